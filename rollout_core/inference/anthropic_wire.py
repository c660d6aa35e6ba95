"""Anthropic's form of requests and answers, as models that are evaluated and judges both have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATH = "/messages"
"""Where requests are posted, below the endpoint's url."""
ACCESS: Mapping[str, Any] = {"headers": {"anthropic-version": "2023-06-01"}, "key_header": "x-api-key"}
"""Of an `Endpoint`."""
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def read_message(answer: Mapping[str, Any]) -> tuple[Any, Any]:
    """The text of an answer, and why it ended in OpenAI's words where they have one.

    Raises LookupError or TypeError where it is none.
    """
    text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
    return text, _REASONS.get(answer["stop_reason"], answer["stop_reason"])
