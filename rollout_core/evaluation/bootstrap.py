"""How sure a difference in mean reward is: the paired bootstrap over prompts.

Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993, chapter 13 (percentile interval); Koehn, *Statistical
Significance Tests for Machine Translation Evaluation*, EMNLP 2004 (paired over the same test sentences).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import content_id, seed_of
from rollout_core.config.promotion import ROUNDING

NUM_RESAMPLES = 10_000
_DRAWN_AT_ONCE = 2**21


@dataclass(frozen=True)
class PairedGain:
    """Mean rewards of two models on the same prompts, and the interval of their difference."""

    num_prompts: int
    mean_before: float
    mean_after: float
    gain: float
    lower: float
    upper: float


def paired_gain(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    confidence: float,
    weights: Mapping[str, float] | None = None,
) -> PairedGain:
    """The gain of ``after`` over ``before``, and its percentile interval of that ``confidence``.

    Both map prompts to the rewards of their samples, of which each prompt counts the mean, by its weight where there
    are ``weights``; P prompts have rewards on both sides, and others are left out. P prompts are resampled with
    replacement, so samples of one stay together, as does a prompt's weight; the interval runs from quantile
    (1 - confidence) / 2 to (1 + confidence) / 2 of the resampled mean differences. The draws follow from the prompts'
    names alone: neither the order of rows nor which side is which changes them. Raises ConfigError where the prompts of
    the two are not the same, or none has rewards.
    """
    return paired_gains({"": Sides(before, after, weights)}, confidence=confidence)[""]


class Sides(NamedTuple):
    """What `paired_gain` takes."""

    before: Mapping[str, Sequence[float]]
    after: Mapping[str, Sequence[float]]
    weights: Mapping[str, float] | None = None


def paired_gains(sides: Mapping[str, Sides], *, confidence: float) -> dict[str, PairedGain]:
    """What `paired_gain` comes to, by metric. Metrics of the same prompts share the draws, which take most of the
    time."""
    pairs = {name: _Paired.of(*each) for name, each in sides.items()}
    intervals: dict[str, tuple[float, float]] = {}
    for prompts in dict.fromkeys(pair.prompts for pair in pairs.values()):
        same = {name: pair for name, pair in pairs.items() if pair.prompts == prompts}
        seed = seed_of(content_id("paired-bootstrap/1", list(prompts)))
        intervals |= zip(same, _intervals(list(same.values()), confidence, seed), strict=True)
    return {name: pair.gain(*intervals[name]) for name, pair in pairs.items()}


@dataclass(frozen=True)
class _Paired:
    """Mean rewards of the P prompts that have some on both sides."""

    prompts: tuple[str, ...]
    before: Sequence[float]
    after: Sequence[float]
    weights: Sequence[float] | None

    @classmethod
    def of(
        cls,
        before: Mapping[str, Sequence[float]],
        after: Mapping[str, Sequence[float]],
        weights: Mapping[str, float] | None,
    ) -> _Paired:
        _refuse_different(before, after)
        prompts = sorted(prompt for prompt in before if before[prompt] and after[prompt])
        if not prompts:
            raise ConfigError("no prompt has a score on both sides, so nothing can be compared; look at the reward")
        means_before, means_after = ([_mean(side[prompt]) for prompt in prompts] for side in (before, after))
        counts = None if weights is None else [weights[prompt] for prompt in prompts]
        return cls(tuple(prompts), means_before, means_after, counts)

    def gain(self, lower: float, upper: float) -> PairedGain:
        mean_before, mean_after = (_mean(means, self.weights) for means in (self.before, self.after))
        is_tie = math.isclose(mean_before, mean_after, rel_tol=ROUNDING, abs_tol=ROUNDING)
        gain = 0.0 if is_tie else mean_after - mean_before
        return PairedGain(len(self.prompts), mean_before, mean_after, gain, lower, upper)


def _intervals(pairs: Sequence[_Paired], confidence: float, seed: int) -> list[tuple[float, float]]:
    """Of pairs of the same prompts."""
    count = len(pairs[0].prompts)
    differences_NP = [np.asarray(pair.after) - np.asarray(pair.before) for pair in pairs]
    weights_NP = [None if pair.weights is None else np.asarray(pair.weights, float) for pair in pairs]
    # Not numpy's Generator: its numbers may change with numpy's version, and a decision must not.
    random = np.random.RandomState(seed)
    means: list[list[np.ndarray]] = [[] for _ in pairs]
    for size in _sizes(NUM_RESAMPLES, max(1, _DRAWN_AT_ONCE // count)):
        drawn_SP = random.randint(0, count, size=(size, count))
        for found, differences_P, weights_P in zip(means, differences_NP, weights_NP, strict=True):
            found.append(_means(differences_P, weights_P, drawn_SP))
    quantiles = [(1 - confidence) / 2, (1 + confidence) / 2]
    ends = [np.quantile(np.concatenate(found), quantiles) for found in means]
    # No mean is beyond what it is the mean of, but for rounding.
    clipped = [np.clip(each, of.min(), of.max()) for each, of in zip(ends, differences_NP, strict=True)]
    return [(float(lower), float(upper)) for lower, upper in clipped]


def _means(differences_P: np.ndarray, weights_P: np.ndarray | None, drawn_SP: np.ndarray) -> np.ndarray:
    if weights_P is None:
        return differences_P[drawn_SP].mean(axis=1)
    return (differences_P * weights_P)[drawn_SP].sum(axis=1) / weights_P[drawn_SP].sum(axis=1)


def _sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    if weights is None:
        return math.fsum(values) / len(values)
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)


def _refuse_different(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> None:
    if before.keys() != after.keys():
        raise ConfigError(
            f"the two evaluations are of different prompts ({len(before.keys() - after.keys())} in the first alone, "
            f"{len(after.keys() - before.keys())} in the second); evaluate both models on the same file"
        )
    if not before:
        raise ConfigError("nothing was evaluated, so nothing can be compared; give held-out prompts")
