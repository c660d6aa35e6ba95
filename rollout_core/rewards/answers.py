"""Answers of prompts' rows as text, and when two texts are the same."""

from __future__ import annotations

import unicodedata
from typing import Any

from rollout_core.base.ids import canonical_json


def written(answer: Any) -> list[str]:
    """The ways that an answer may be written. A whole number of a column with gaps is a float: pandas makes it one."""
    text = answer if isinstance(answer, str) else canonical_json(answer).decode()
    if isinstance(answer, float) and answer.is_integer():
        return [text, str(int(answer)), repr(answer)]
    return [text]


def comparable(text: str, *, strip: bool = True, ignore_case: bool = False) -> str:
    """What is the same for texts that count as the same: composed and decomposed characters do."""
    text = unicodedata.normalize("NFC", text)
    if strip:
        text = text.strip()
    # Folding case may take a composed character apart.
    return unicodedata.normalize("NFC", text.casefold()) if ignore_case else text
