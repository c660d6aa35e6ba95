"""How a judge and people agree on the same answers, with intervals of 95 %.

Scores are compared by Spearman's rank correlation (its interval by Fisher's z with the variance of Bonett and Wright,
Psychometrika 65, 2000) and by the share of pairs of answers that both put in the same order (concordance, as Harrell's
C; its interval by the jackknife). Choices in pairs are compared by the share of equal ones (Wilson's interval) and by
Cohen's kappa, which takes off what chance alone would give (Educational and Psychological Measurement 20, 1960, whose
standard error it has).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rollout_core.evaluation.metrics import HUMAN, Metric, Z, estimate

_ROWS_AT_ONCE = 512
"""Of pairs that are compared together, so that thousands of answers fit into memory."""


def agreement(mode: Literal["score", "pairwise"], judge: Sequence[float], human: Sequence[float]) -> list[Metric]:
    """What a judge's values of answers and a person's of the same ones come to. A figure that they do not have is left
    out, such as a correlation where all values of one side are equal. Of a pair, more than a half is a choice of the
    first answer, a half a tie."""
    if mode == "pairwise":
        found = [_equal_choices(judge, human), _kappa(judge, human)]
    else:
        found = [_spearman(judge, human), _concordance(judge, human)]
    return [metric for metric in found if metric is not None]


def _metric(name: str, value: float, error: float | None, count: int, least: float) -> Metric:
    """With 1.96 standard errors to both sides, from ``least`` to 1."""
    lower = upper = None
    if error:
        lower, upper = max(least, value - Z * error), min(1.0, value + Z * error)
    return Metric(name=f"{HUMAN}{name}", value=value, lower=lower, upper=upper, num_questions=count)


def _chosen(values: Sequence[float]) -> list[int]:
    return [int(np.sign(value - 0.5)) for value in values]


def _equal_choices(judge: Sequence[float], human: Sequence[float]) -> Metric | None:
    equal = [float(one == other) for one, other in zip(_chosen(judge), _chosen(human), strict=True)]
    return estimate(f"{HUMAN}agreement", equal, 1)


def _kappa(judge: Sequence[float], human: Sequence[float]) -> Metric | None:
    sides = _chosen(judge), _chosen(human)
    count = len(judge)
    if not count:
        return None
    equal = sum(one == other for one, other in zip(*sides, strict=True)) / count
    first, second = map(Counter, sides)
    by_chance = sum(first[choice] * second[choice] for choice in first) / count**2
    if by_chance == 1.0:  # both always make the same choice
        return None
    error = math.sqrt(equal * (1 - equal) / count) / (1 - by_chance)
    return _metric("kappa", (equal - by_chance) / (1 - by_chance), error, count, -1.0)


def _spearman(judge: Sequence[float], human: Sequence[float]) -> Metric | None:
    if len(judge) < 2 or min(judge) == max(judge) or min(human) == max(human):
        return None
    rho = float(np.corrcoef(_ranks(judge), _ranks(human))[0, 1])
    lower = upper = None
    if len(judge) > 3 and abs(rho) < 1 - 1e-12:
        reach = Z * math.sqrt((1 + rho * rho / 2) / (len(judge) - 3))
        lower, upper = (math.tanh(math.atanh(rho) + sign * reach) for sign in (-1, 1))
    return Metric(name=f"{HUMAN}spearman", value=rho, lower=lower, upper=upper, num_questions=len(judge))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """From 0; equal values have the mean of their ranks."""
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place]


def _concordance(judge: Sequence[float], human: Sequence[float]) -> Metric | None:
    """Of pairs that a person puts in an order, the share that the judge puts in the same one; half of its ties."""
    judge_N, human_N, count = np.asarray(judge, float), np.asarray(human, float), len(judge)
    same_N, pairs_N = np.zeros(count), np.zeros(count)
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        order_RN = np.sign(human_N[rows, None] - human_N)
        agree_RN = order_RN * np.sign(judge_N[rows, None] - judge_N)
        pairs_N[rows] = np.abs(order_RN).sum(axis=1)
        same_N[rows] = ((agree_RN + np.abs(order_RN)) / 2).sum(axis=1)
    same, pairs = same_N.sum() / 2, pairs_N.sum() / 2
    if not pairs:
        return None
    left_N = pairs - pairs_N
    error = None
    if (left_N > 0).all():
        without_N = (same - same_N) / left_N
        error = math.sqrt((count - 1) / count * float(((without_N - without_N.mean()) ** 2).sum()))
    return _metric("concordance", float(same / pairs), error, count, 0.0)
