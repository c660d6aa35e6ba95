"""Whether an answer matches a regular expression."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import regex

from rollout_core.config.verifiers import RegexReward
from rollout_core.rewards.answers import comparable, written
from rollout_core.rewards.verifiers.extraction import extract


def regex_reward(spec: RegexReward, completion: str, extras: Mapping[str, Any]) -> float:
    """1 where the answer matches, and what it finds is the row's answer where there is one to compare; else 0."""
    answer = extract(completion, spec.extract)
    if answer is None:
        return 0.0
    pattern = regex.compile(spec.pattern, regex.IGNORECASE if spec.ignore_case else 0)
    if spec.match == "full":
        found = [match for match in (pattern.fullmatch(answer),) if match is not None]
    else:
        found = list(pattern.finditer(answer))
    if not found or spec.answer_key is None:
        return float(bool(found))
    same = partial(comparable, ignore_case=spec.ignore_case)
    return float(same(found[-1][1] or "") in map(same, written(extras[spec.answer_key])))
