"""Whether an answer is mathematically the row's, by Math-Verify."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.verifiers import MathReward
from rollout_core.rewards.verifiers.extraction import boxed, extract, listed

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its alarms are off
_CONFIGS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_UNTIMED: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
"""Math-Verify's own time-outs are alarms, which a loop in C does not hear; the process is what is ended here."""


_SIGNS = str.maketrans("−‐‑–０１２３４５６７８９", "----0123456789")
"""Other signs for the same: minus, hyphens and digits of full width."""
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d*)?[eE][+-]?\d{1,3}")
_NUMBER_AND_WORDS = re.compile(r"([+-]?[$€£]?\d[\d,]*(?:\.\d+)?)((?:\s+[a-zA-Z]{2,}\.?)+)")
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_NAMES = {"sqrt", "frac", "pi", "sin", "cos", "tan", "log", "ln", "exp", "min", "max", "inf", "oo", "infty"}
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


def math_reward(spec: MathReward, completion: str, extras: dict[str, Any]) -> float:
    """1 where the answer in ``completion`` equals that of the row, else 0. Raises ConfigError for a row's answer that
    is none."""
    references = [_reference(spec, answer) for answer in listed(extras[spec.answer_key])]
    found = _answers(spec, completion.translate(_SIGNS))
    return float(any(_equal(spec, reference, one) for reference in references for one in found))


def math_answer(spec: MathReward, completion: str) -> str | None:
    """The answer as SymPy writes it, which is the same of expressions that are the same but for their notation."""
    found = _answers(spec, completion.translate(_SIGNS))
    return str(found[0][0]) if found else None


def _reference(spec: MathReward, answer: Any) -> list[Any]:
    """What Math-Verify makes of a row's answer: a number, or text that is an expression or has one in it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected a number or text")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ConfigError(f"the row's {spec.answer_key!r} is {answer}; expected a finite number")
    text = repr(answer) if isinstance(answer, float) else str(answer).strip().translate(_SIGNS)
    number = _NUMBER_AND_WORDS.fullmatch(text)
    text = number[1] if number else text
    for form in () if _is_prose(text) else _written(text):
        if found := _parsed(form):
            return found
    raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}, which is no mathematics; use exact_match")


def _is_prose(text: str) -> bool:
    """Whether it has words. Math-Verify takes letters side by side for a product, so that "east" would equal "seat"."""
    if _is_marked(text) or _EXPONENT.fullmatch(text):
        return False
    mathematics = _TEXT.sub(" ", text)  # without units
    is_text = not re.search(r"\w", mathematics)
    return not _NAMES.issuperset(_WORD.findall(_TEXT.sub(r"\1", text) if is_text else mathematics))


def _is_marked(text: str) -> bool:
    """Whether it says where in it LaTeX is."""
    return any(mark in text for mark in ("$", r"\(", r"\[", r"\boxed"))


def _written(text: str) -> Sequence[str]:
    """A text as Math-Verify may find an expression in it: LaTeX is one only between its marks, and an exponent is
    Euler's number."""
    if _EXPONENT.fullmatch(text):
        text = format(Decimal(text), "f")
    return (text,) if _is_marked(text) else (rf"\boxed{{{text}}}", text)


def _answers(spec: MathReward, completion: str) -> list[list[Any]]:
    """The answer, in the ways that it may be read."""
    if spec.extract is None:
        last = boxed(completion)[-1:]
        text = last[0].strip() if last else None
        forms = [completion] if text is None else _written(text)[:1]
    else:
        text = extract(completion, spec.extract)
        forms = [] if text is None else _written(text)
    return [found for form in forms if (found := _parsed(form))]


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
