"""Whether an answer is mathematically the row's, by Math-Verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.verifiers import MathReward
from rollout_core.rewards.verifiers.extraction import boxed, extract

_CONFIGS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_UNTIMED: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
"""Math-Verify's own time-outs are alarms, which a loop in C does not hear; the process is what is ended here."""


def math_reward(spec: MathReward, completion: str, extras: dict[str, Any]) -> float:
    """1 where the answer in ``completion`` equals that of the row, else 0. Raises ConfigError for a row's answer that
    is none."""
    references = [_reference(spec, answer) for answer in _listed(extras[spec.answer_key])]
    found = _answer(spec, completion)
    return float(any(_equal(spec, reference, found) for reference in references)) if found else 0.0


def _listed(answer: Any) -> Sequence[Any]:
    if isinstance(answer, list) and answer:
        return answer
    return [answer]


def _reference(spec: MathReward, answer: Any) -> list[Any]:
    """What Math-Verify makes of a row's answer: a number, or text that is an expression or has one in it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected a number or text")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise ConfigError(f"the row's {spec.answer_key!r} is {answer}; expected a finite number")
        answer = int(answer) if answer.is_integer() else answer
    text = str(answer).strip()
    for form in _written(text):
        if found := _parsed(form):
            return found
    raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}, which is no mathematics; use exact_match")


def _written(text: str) -> Sequence[str]:
    """A row's answer as Math-Verify may find an expression in it: LaTeX is one only between its marks."""
    marked = any(mark in text for mark in ("$", r"\(", r"\[", r"\boxed"))
    return (text,) if marked else (rf"\boxed{{{text}}}", text)


def _answer(spec: MathReward, completion: str) -> list[Any]:
    if spec.extract is None:
        last = boxed(completion)[-1:]
        return _parsed(rf"\boxed{{{last[0]}}}") if last else _parsed(completion)
    text = extract(completion, spec.extract)
    if text is None:
        return []
    return next((found for form in _written(text) if (found := _parsed(form))), [])


def _parsed(text: str) -> list[Any]:
    """Its expressions; none where it has none, or what it has cannot be read."""
    try:
        return parse(text, extraction_config=_CONFIGS, **_UNTIMED)
    except Exception:  # noqa: BLE001 - whatever a parser of other people's text raises
        return []


def _equal(spec: MathReward, reference: list[Any], found: list[Any]) -> bool:
    try:
        return verify(reference, found, float_rounding=spec.decimals, timeout_seconds=None, raise_on_error=True)
    except Exception:  # noqa: BLE001 - what SymPy raises while it compares is no equality
        return False
