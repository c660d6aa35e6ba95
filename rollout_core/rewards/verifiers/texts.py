"""Whether an answer is the row's as text, and how many of its words are: by the rules of SQuAD's evaluation script
(arXiv:1606.05250)."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import regex

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.verifiers import TextReward
from rollout_core.rewards.answers import comparable
from rollout_core.rewards.verifiers.extraction import extract, listed

_NUMBER = regex.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""To which numbers are equal."""


def text_reward(spec: TextReward, completion: str, extras: Mapping[str, Any]) -> float:
    """From 0 to 1. Raises ConfigError for a row's answer that cannot be compared so."""
    references = references_of(spec, extras)
    answer = extract(completion, spec.extract)
    return 0.0 if answer is None else _COMPARISONS[spec.compare](spec, answer, references)


def text_answer(spec: TextReward, completion: str) -> str | None:
    """The answer in the form in which answers are compared."""
    answer = extract(completion, spec.extract)
    if answer is None or spec.compare == "exact":
        return None if answer is None else comparable(answer, ignore_case=spec.ignore_case)
    if spec.compare == "numeric":
        number = last_number(answer)
        return None if number is None else repr(number + 0.0)  # -0.0 is 0.0
    return normalised(answer)


def references_of(spec: TextReward, extras: Mapping[str, Any]) -> list[str]:
    """The row's answers, as texts. Raises ConfigError where one cannot be compared as ``spec`` says."""
    return [_reference(spec, answer) for answer in listed(extras[spec.answer_key])]


def _reference(spec: TextReward, answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected a text or a number")
    text = str(answer).strip()
    if spec.compare == "numeric" and last_number(text) is None:
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected a number in it")
    if spec.compare == "contains" and not text:
        raise ConfigError(f"the row's {spec.answer_key!r} is empty, which every completion contains; give a text")
    return text


def last_number(text: str) -> float | None:
    """The last number of a text: digits with or without commas between thousands, a fraction, an exponent."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def normalised(text: str) -> str:
    """SQuAD's ``normalize_answer``: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(regex.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(answer: str, reference: str) -> float:
    """SQuAD's F1 of two texts' normalised words; of texts of which one has none, whether neither has any."""
    ours, theirs = normalised(answer).split(), normalised(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _same_number(answer: str, reference: str) -> bool:
    number, wanted = last_number(answer), last_number(reference)
    if number is None or wanted is None:
        return False
    return math.isclose(number, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _best(one: Callable[[str, str], float]) -> Callable[[TextReward, str, Sequence[str]], float]:
    return lambda spec, answer, references: float(max(one(answer, reference) for reference in references))


def _best_plain(one: Callable[[str, str], bool]) -> Callable[[TextReward, str, Sequence[str]], float]:
    def compared(spec: TextReward, answer: str, references: Sequence[str]) -> float:
        same = partial(comparable, ignore_case=spec.ignore_case)
        return float(any(one(same(answer), same(reference)) for reference in references))

    return compared


_COMPARISONS: Mapping[str, Callable[[TextReward, str, Sequence[str]], float]] = {
    "exact": _best_plain(lambda answer, reference: answer == reference),
    "contains": _best_plain(lambda answer, reference: reference in answer),
    "normalised": _best(lambda answer, reference: normalised(answer) == normalised(reference)),
    "numeric": _best(_same_number),
    "f1": _best(word_f1),
}
