"""What the answers to a suite's questions come to, and how sure that is.

Every metric is a mean over questions of a value of each question, so that its error is clustered by question: answers
to one question are no independent observations (arXiv:2411.00640, section 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from rollout_core.config.evaluation import INSTRUCTION_METRIC
from rollout_core.config.promotion import ROUNDING

Z = statistics.NormalDist().inv_cdf(0.975)
"""Of an interval of 95 %."""
HUMAN = "human_"
"""Begins the names of figures that say how a judge and people agree (`rollout_core.evaluation.agreement`)."""


@dataclass(frozen=True)
class Question:
    """The scores of the answers to one question, and what the answers are, where they are voted on."""

    scores: Sequence[float | None]
    """None of an answer without a score."""
    answers: Sequence[str | None] = ()


class Metric(BaseModel):
    """A mean over questions, with its interval of 95 %; None where nothing is known of their spread."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    lower: float | None = None
    upper: float | None = None
    num_questions: int
    """That have a value; the others are left out."""


def is_right(score: float, threshold: float) -> bool:
    """Whether an answer of this score is right; a score that is less by rounding alone is, too."""
    return score >= threshold or math.isclose(score, threshold, rel_tol=ROUNDING, abs_tol=ROUNDING)


def value_of(metric: str, question: Question, threshold: float) -> float | None:
    """A question's value of a metric, as `rollout_core.config.evaluation.Suite` names them; None where too few of its
    answers have a score."""
    known = [score for score in question.scores if score is not None]
    if not known:
        return None
    if metric in ("mean", INSTRUCTION_METRIC):
        return statistics.fmean(known)
    num_right = sum(is_right(score, threshold) for score in known)
    kind, _, number = metric.partition("@")
    if kind == "pass":
        return pass_at(len(known), num_right, int(number)) if len(known) >= int(number) else None
    return majority(question, threshold) if kind == "maj" else num_right / len(known)


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k answers is right, of n answers of which c are.

    1 - C(n - c, k) / C(n, k); arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(question: Question, threshold: float) -> float:
    """Whether the most frequent answer is right (arXiv:2203.11171); of several that are as frequent, the share of them
    that is. Completions without an answer do not vote, and nothing is right where nobody votes."""
    votes: dict[str, list[bool]] = {}
    for score, answer in zip(question.scores, question.answers, strict=True):
        if score is not None and answer is not None:
            votes.setdefault(answer, []).append(is_right(score, threshold))
    most = max(map(len, votes.values()), default=0)
    # Equal answers have equal scores, unless the scorer looks at more than the answer.
    leading = [statistics.fmean(right) for right in votes.values() if len(right) == most]
    return statistics.fmean(leading) if leading else 0.0


def estimate(name: str, values: Sequence[float | None], samples_per_question: int) -> Metric | None:
    """The mean of the questions' values, under the metric's name; None where none has one."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    if name == "mean":
        lower, upper = _interval_of_mean(known, mean)
    else:
        lower, upper = _interval_of_share(known, mean, len(known) * samples_per_question)
    return Metric(name=name, value=mean, lower=lower, upper=upper, num_questions=len(known))


def weighted_estimate(name: str, values: Sequence[float | None], weights: Sequence[float]) -> Metric | None:
    """The weighted mean of questions' shares, with 1.96 standard errors of a ratio to both sides, within 0 and 1; None
    where none has one."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    if not known:
        return None
    count, total = len(known), math.fsum(weight for _, weight in known)
    mean = math.fsum(value * weight for value, weight in known) / total
    lower = upper = None
    if len({value for value, _ in known}) > 1:
        squares = math.fsum((weight * (value - mean)) ** 2 for value, weight in known)
        error = math.sqrt(squares * count / (count - 1)) / total
        lower, upper = max(0.0, mean - Z * error), min(1.0, mean + Z * error)
    return Metric(name=name, value=mean, lower=lower, upper=upper, num_questions=count)


def _interval_of_mean(values: Sequence[float], mean: float) -> tuple[float | None, float | None]:
    """1.96 standard errors of the questions' values to both sides; arXiv:2411.00640, equation 1. None where they are
    all the same, which says nothing of their spread."""
    if min(values) == max(values):
        return None, None
    error = statistics.stdev(values, mean) / math.sqrt(len(values))
    return mean - Z * error, mean + Z * error


def _interval_of_share(values: Sequence[float], share: float, num_samples: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of as many independent answers as would have the same error clustered by question.

    Standard errors to both sides are an interval without width where all questions are right, and too narrow where
    there are few (arXiv:2503.01747). Q questions whose values are 0 or 1 count as Q; values of several samples vary
    less and count as more, up to the number of samples. Where all values are the same, nothing is known of how
    questions differ, as of a single one, and Q count as Q, however many samples each has.
    """
    spread = statistics.pvariance(values, share)
    binomial = share * (1 - share)
    count = float(len(values))
    if spread > ROUNDING * binomial:
        count = min(count * binomial / spread, num_samples)
    centre = share + Z * Z / (2 * count)
    reach = Z * math.sqrt(max(0.0, binomial) / count + Z * Z / (4 * count * count))
    whole = 1 + Z * Z / count
    return max(0.0, (centre - reach) / whole), min(1.0, (centre + reach) / whole)
