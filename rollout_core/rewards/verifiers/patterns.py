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
    found = _last_match(spec, completion)
    if found is None or spec.answer_key is None:
        return float(found is not None)
    same = partial(comparable, ignore_case=spec.ignore_case)
    return float(same(found[1] or "") in map(same, written(extras[spec.answer_key])))


def regex_answer(spec: RegexReward, completion: str) -> str | None:
    """What is compared with the row's answer."""
    found = _last_match(spec, completion)
    return None if found is None else comparable(found[1] or "", ignore_case=spec.ignore_case)


def _last_match(spec: RegexReward, completion: str) -> Any:
    answer = extract(completion, spec.extract)
    if answer is None:
        return None
    pattern = regex.compile(spec.pattern, regex.IGNORECASE if spec.ignore_case else 0)
    if spec.match == "full":
        return pattern.fullmatch(answer)
    return next(reversed(list(pattern.finditer(answer))), None)
