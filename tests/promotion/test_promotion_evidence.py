"""Evidence for promotions: the paired bootstrap against arithmetic by hand, exact enumeration and its own symmetries;
what is promoted by it, and what guards refuse.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes
from rollout_core.config import (
    PromotionConfig,
    parse_config,
)
from rollout_core.evaluation.bootstrap import Sides, paired_gain, paired_gains
from rollout_core.objects import ObjectStore
from rollout_core.promotion.evidence import Evidence, compare, rewards_by_prompt
from rollout_core.promotion.guards import GuardFinding
from tests.support.evaluations import evaluation

SOME = hash_bytes(b"some")
REWARDS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)


def by_prompt(*rewards: float) -> dict[str, list[float]]:
    return {f"p{number:03d}": [reward] for number, reward in enumerate(rewards)}


def comparison(before: dict[str, list[float]], after: dict[str, list[float]], config: PromotionConfig):
    return compare("before", (SOME, SOME, before), (SOME, after), config)


def objections(before: dict[str, list[float]], after: dict[str, list[float]], **config: float) -> list[str]:
    wanted = PromotionConfig(**config)
    return Evidence(comparisons=(comparison(before, after, wanted),)).objections(wanted)


# The bootstrap


def test_the_gain_is_that_of_arithmetic_by_hand():
    before = {"a": [0.0, 1.0], "b": [1.0], "c": [0.0, 0.0, 0.0]}
    after = {"c": [1.0, 0.0, 0.5], "a": [1.0, 1.0], "b": [0.5]}
    # Means of prompts: 0.5, 1, 0 and 1, 0.5, 0.5; their differences 0.5, -0.5, 0.5.
    found = paired_gain(before, after, confidence=0.9)
    assert (found.num_prompts, found.mean_before) == (3, 0.5)
    assert found.mean_after == pytest.approx(2 / 3) and found.gain == pytest.approx(1 / 6)
    assert -0.5 <= found.lower < found.gain < found.upper <= 0.5


def test_a_weighted_interval_is_that_of_all_weighted_means_of_resamples():
    before, after = by_prompt(0, 0, 1, 0.5, 2), by_prompt(1, 0.25, 0.5, 1.5, 2.125)
    differences, weights = np.array([1, 0.25, -0.5, 1, 0.125]), np.array([1, 3, 2, 1, 5])
    resamples = [list(drawn) for drawn in itertools.product(range(5), repeat=5)]
    means = np.sort([np.average(differences[drawn], weights=weights[drawn]) for drawn in resamples])
    found = paired_gain(before, after, confidence=0.9, weights=dict(zip(before, weights, strict=True)))
    assert found.gain == pytest.approx((1 + 0.75 - 1 + 1 + 0.625) / 12)
    for end, share in ((found.lower, 0.05), (found.upper, 0.95)):
        assert means[int((share - 0.01) * len(means))] <= end <= means[int((share + 0.01) * len(means))]
    same = paired_gain(before, after, confidence=0.9, weights=dict.fromkeys(before, 2.0))
    plain = paired_gain(before, after, confidence=0.9)
    assert dataclasses.astuple(same) == pytest.approx(dataclasses.astuple(plain)), "equal weights are none"


def test_the_interval_is_that_of_all_resamples_there_are():
    """Of 5 prompts there are 5**5 resamples, all equally likely, so the interval is known without drawing any."""
    before, after = by_prompt(0, 0, 1, 0.5, 2), by_prompt(1, 0.25, 0.5, 1.5, 2.125)
    differences = np.array([1, 0.25, -0.5, 1, 0.125])
    means = np.sort([np.mean(differences[list(drawn)]) for drawn in itertools.product(range(5), repeat=5)])
    for confidence in (0.5, 0.8, 0.95):
        found = paired_gain(before, after, confidence=confidence)
        # 10,000 draws: a quantile's rank is known to within four standard errors.
        for end, share in ((found.lower, (1 - confidence) / 2), (found.upper, (1 + confidence) / 2)):
            error = 4 * math.sqrt(share * (1 - share) / 10_000)
            low, high = np.quantile(means, [max(0, share - error), min(1, share + error)])
            assert low <= end <= high


def test_metrics_that_share_draws_have_the_intervals_of_each_alone():
    names = [f"q{place}" for place in range(60)]
    draw = np.random.default_rng(7)

    def side(names: list[str]) -> dict[str, list[float]]:
        return {name: list(draw.normal(size=2)) for name in names}

    fewer = {**side(names), "q3": [], "q9": []}
    weights = dict(zip(names, draw.random(60), strict=True))
    sides = {
        "plain": Sides(side(names), side(names)),
        "other": Sides(side(names), side(names)),
        "weighted": Sides(side(names), side(names), weights),
        "fewer": Sides(fewer, side(names)),
    }
    alone = {
        name: paired_gain(before, after, confidence=0.9, weights=of) for name, (before, after, of) in sides.items()
    }
    assert paired_gains(sides, confidence=0.9) == alone and paired_gains({}, confidence=0.9) == {}
    assert alone["fewer"].num_prompts == 58


def test_the_interval_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats", reason="an independent reference where it is installed")
    draw = np.random.default_rng(3)
    before, after = draw.normal(size=80), draw.normal(size=80) + 0.3
    found = paired_gain(by_prompt(*before), by_prompt(*after), confidence=0.9)
    reference = stats.bootstrap(
        (after - before,), np.mean, confidence_level=0.9, n_resamples=20_000, method="percentile", rng=draw
    ).confidence_interval
    assert (found.lower, found.upper) == pytest.approx((reference.low, reference.high), abs=0.01)


@given(REWARDS)
@settings(deadline=None, max_examples=40)
def test_swapping_sides_mirrors_the_interval_and_the_order_of_rows_changes_nothing(pairs):
    before, after = (by_prompt(*side) for side in zip(*pairs, strict=True))
    found, swapped = (paired_gain(*sides, confidence=0.9) for sides in ((before, after), (after, before)))
    assert swapped.gain == -found.gain
    assert (swapped.lower, swapped.upper) == pytest.approx((-found.upper, -found.lower), abs=1e-12)
    assert paired_gain(dict(reversed(before.items())), after, confidence=0.9) == found


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.sampled_from([0.0, 0.25, -1.0]))
@settings(deadline=None, max_examples=40)
def test_a_constant_gain_has_no_interval_to_speak_of(rewards, gain):
    found = paired_gain(by_prompt(*rewards), by_prompt(*(reward + gain for reward in rewards)), confidence=0.99)
    assert found.lower == pytest.approx(gain, abs=1e-9) and found.upper == pytest.approx(gain, abs=1e-9)


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0]), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 0.95]),
)
@settings(deadline=None, max_examples=60)
def test_a_tie_is_never_promoted(rewards, random, min_gain, confidence):
    """However the rewards are spread over the prompts, and whatever rounding makes of their sum."""
    shuffled = random.sample(rewards, len(rewards))
    assert objections(by_prompt(*rewards), by_prompt(*shuffled), min_gain=min_gain, confidence=confidence)


def test_the_same_rewards_are_a_tie_whatever_rounding_makes_of_them():
    assert 0.1 + 0.2 > 0.3
    before, after = by_prompt(0.3, 0.5), by_prompt(0.1 + 0.2, 0.5)
    assert paired_gain(before, after, confidence=0.9).gain == 0.0


def test_evaluations_of_different_prompts_are_not_compared():
    with pytest.raises(ConfigError, match=r"different prompts \(1 in the first alone, 0 in the second\)"):
        paired_gain(by_prompt(1, 2), by_prompt(1), confidence=0.9)
    with pytest.raises(ConfigError, match="nothing was evaluated"):
        paired_gain({}, {}, confidence=0.9)


# What is promoted


@pytest.mark.parametrize(
    ("before", "after", "config", "expected"),
    [
        (0.0, 0.0, {}, "it did not rise: held-out reward 0.0000 -> 0.0000"),
        (0.5, 0.4, {}, "it fell: held-out reward 0.5000 -> 0.4000"),
        (0.5, 0.6, {}, None),
        (0.5, 0.6, {"min_gain": 0.1}, "its gain, 0.1, is not above 0.1 (promotion.min_gain): held-out reward 0.5000"),
        (0.5, 0.61, {"min_gain": 0.1}, None),
        (0.5, 0.5, {"tolerance": 0.05}, None),
        (0.5, 0.45, {"tolerance": 0.05}, None),
        (0.5, 0.44, {"tolerance": 0.05}, "it fell: held-out reward 0.5000 -> 0.4400"),
        (0.5, 0.6, {"confidence": 0.95}, None),
    ],
)
def test_what_rises_by_more_than_is_asked_for_is_promoted(before, after, config, expected):
    found = objections(by_prompt(*[before] * 12), by_prompt(*[after] * 12), **config)
    assert found == [] if expected is None else found[0].startswith(expected)


def test_a_gain_that_is_not_sure_is_promoted_only_where_nobody_asks():
    before, after = by_prompt(*[0, 1] * 10), by_prompt(*[1, 0] * 9, 1, 1)
    assert objections(before, after) == []
    [why] = objections(before, after, confidence=0.95)
    assert why.startswith("the gain is not sure: held-out reward 0.5000 -> 0.5500, gain 0.0500, 0.95 interval -0.")
    assert why.endswith("over 20 prompts, whose lower end is not above 0")
    # A loss that cannot be larger than what is accepted: a test of non-inferiority.
    assert objections(before, after, confidence=0.95, tolerance=0.6) == []


def test_an_interval_of_few_prompts_is_no_evidence():
    [why] = objections(by_prompt(*[0.0] * 9), by_prompt(*[1.0] * 9), confidence=0.95)
    assert why == "9 prompts are too few for promotion.confidence; expected at least 10"


def test_a_tolerance_beside_a_gain_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"tolerance 0.05 accepts a loss and min_gain 0.1 asks for a gain; give one"):
        parse_config({"tolerance": 0.05, "min_gain": 0.1}, PromotionConfig)
    assert parse_config({"tolerance": 0.05}, PromotionConfig).tolerance == 0.05


# What evaluations filed


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://promotion-evidence")


def test_rewards_of_two_models_are_paired_by_prompt_in_any_order(objects):
    first = evaluation(objects, SOME, ("a", 0.25, 1, "stop"), ("b", 1.0, 1, "stop"), ("a", 0.75, 1, "stop"))
    second = evaluation(objects, hash_bytes(b"new"), ("b", 1.0, 1, "stop"), ("a", 0.5, 1, "stop"))
    before, after = rewards_by_prompt(objects, first), rewards_by_prompt(objects, second)
    assert before.keys() == after.keys() and sorted(before.values()) == [[0.25, 0.75], [1.0]]
    assert paired_gain(before, after, confidence=0.9).gain == 0.0


def test_prompts_without_a_score_are_left_out_and_counted(objects):
    """a 0.25 -> 0.75; the new model's b has no score, one of the old model's c's has none."""
    first = evaluation(
        objects, SOME, ("a", 0.25, 1, "stop"), ("b", 1.0, 1, "stop"), ("c", None, 1, "stop"), ("c", 0.5, 1, "stop")
    )
    second = evaluation(
        objects, hash_bytes(b"new"), ("a", 0.75, 1, "stop"), ("b", None, 1, "stop"), ("c", 0.5, 1, "stop")
    )
    before, after = rewards_by_prompt(objects, first), rewards_by_prompt(objects, second)
    found = comparison(before, after, PromotionConfig())
    assert (found.num_prompts, found.num_unscored) == (2, 1)
    assert (found.mean_before, found.mean_after, found.gain) == (0.375, 0.625, 0.25)
    assert found.interval.endswith("over 2 prompts, 1 without a score left out")
    with pytest.raises(ConfigError, match="no prompt has a score on both sides"):
        paired_gain({"a": [], "b": [1.0]}, {"a": [1.0], "b": []}, confidence=0.9)


def test_a_guard_that_fails_keeps_a_model_from_promotion_and_is_told():
    wanted = PromotionConfig()
    found = comparison(by_prompt(0, 0), by_prompt(1, 1), wanted)
    refused = GuardFinding(kind="length", passed=False, line="too long")
    evidence = Evidence(comparisons=(found,), guards=(refused,))
    assert evidence.objections(wanted) == ["a guard refused it: too long"]
    assert evidence.lines == [
        f"against the model before ({SOME.short}): held-out reward 0.0000 -> 1.0000, gain 1.0000, 0.95 interval 1.0000 "
        "to 1.0000 over 2 prompts (paired bootstrap)",
        "guard refused: too long",
    ]
