"""Metrics of suites against arithmetic by hand, closed forms and their own properties."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given, strategies as st

from rollout_core.evaluation.metrics import (
    Metric,
    Question,
    estimate,
    is_right,
    majority,
    pass_at,
    value_of,
    weighted_estimate,
)

SCORES = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=8)


def shares(*values: float | None, samples: int = 1) -> Metric:
    found = estimate("accuracy", values, samples)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("metric", "value"),
    [("mean", 0.55), ("accuracy", 0.5), ("avg@4", 0.5), ("pass@1", 0.5), ("pass@2", 5 / 6), ("pass@4", 1.0)],
)
def test_a_questions_values_by_hand(metric: str, value: float):
    assert value_of(metric, Question([1.0, 0.2, 1.0, 0.0]), threshold=1.0) == pytest.approx(value)


def test_answers_without_a_score_are_left_out_and_a_question_without_enough_of_them_has_no_value():
    question = Question([None, 1.0, None, 0.0], [None] * 4)
    assert value_of("mean", question, 1.0) == 0.5
    assert value_of("pass@2", question, 1.0) == 1.0
    assert value_of("pass@3", question, 1.0) is None
    assert all(value_of(metric, Question([None]), 1.0) is None for metric in ("mean", "accuracy", "pass@1", "maj@1"))


@pytest.mark.parametrize(
    ("scores", "answers", "value"),
    [
        ([1, 1, 0], ["4", "4", "5"], 1),
        ([1, 0, 0], ["4", "5", "5"], 0),
        ([1, 0], ["4", "5"], 0.5),
        ([1, 0, 0, 0], ["4", "5", None, None], 0.5),
        ([0, 0], [None, None], 0),
        ([None, 0, 1], ["4", "5", "4"], 0.5),
    ],
)
def test_the_most_frequent_answer_decides(scores: list[float | None], answers: list[str | None], value: float):
    assert majority(Question(scores, answers), threshold=1.0) == value


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_draws_of_k_answers_with_a_right_one(num_samples: int, data: st.DataObject):
    num_right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    drawn = list(itertools.combinations([True] * num_right + [False] * (num_samples - num_right), k))
    assert pass_at(num_samples, num_right, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


def test_pass_at_k_is_exact_for_many_samples():
    closed = 1 - math.prod((900 - i) / (1000 - i) for i in range(100))
    assert pass_at(1000, 100, 100) == pytest.approx(closed, rel=1e-12)


@given(SCORES, st.floats(-5, 5))
def test_accuracy_and_the_average_and_pass_at_one_are_one_figure(scores: list[float | None], threshold: float):
    values = [value_of(metric, Question(scores), threshold) for metric in ("accuracy", "avg@8", "pass@1")]
    if values[0] is None:
        assert values == [None] * 3
    else:
        assert values[1:] == pytest.approx([values[0]] * 2)


@given(SCORES)
def test_more_tries_never_lower_the_chance_that_one_is_right(scores: list[float | None]):
    known = [score for score in scores if score is not None]
    chances = [pass_at(len(known), sum(score >= 0 for score in known), k) for k in range(1, len(known) + 1)]
    assert chances == sorted(chances)


def test_a_score_that_is_less_by_rounding_is_right():
    assert is_right(0.1 + 0.2 + 0.7 - 2e-16, 1.0)
    assert not is_right(1 - 1e-9, 1.0)


def test_the_interval_of_a_mean_is_that_of_the_questions_values():
    found = estimate("mean", [1.0, 2.0, None, 6.0], 4)
    assert found is not None
    error = statistics.stdev([1, 2, 6]) / math.sqrt(3)
    assert (found.value, found.num_questions) == (3.0, 3)
    assert (found.lower, found.upper) == pytest.approx((3 - 1.959964 * error, 3 + 1.959964 * error), abs=1e-6)


def test_values_that_do_not_differ_say_nothing_of_their_spread():
    assert estimate("mean", [2.0, 2.0], 1) == Metric(name="mean", value=2.0, num_questions=2)
    assert estimate("mean", [2.0], 1) == Metric(name="mean", value=2.0, num_questions=1)
    assert estimate("mean", [None], 1) is None


@pytest.mark.parametrize(
    ("num_right", "lower", "upper"),
    # The roots p of (r/10 - p)² = z² p (1 - p) / 10.
    [(0, 0.0, 0.27753279), (5, 0.23659309, 0.76340691), (8, 0.49016248, 0.94331784), (10, 0.72246721, 1.0)],
)
def test_the_interval_of_a_share_of_questions_is_wilsons(num_right: int, lower: float, upper: float):
    found = shares(*[1.0] * num_right, *[0.0] * (10 - num_right))
    assert (found.lower, found.upper) == pytest.approx((lower, upper), abs=1e-7)


def bounds(metric: Metric) -> tuple[float | None, float | None]:
    return metric.lower, metric.upper


def test_samples_of_one_question_that_agree_count_as_one_answer():
    """Four samples of each of ten questions: where they agree, they say no more than one; where they do not, more."""
    agreeing = shares(*[1.0] * 5, *[0.0] * 5, samples=4)
    assert bounds(agreeing) == bounds(shares(*[1.0] * 5, *[0.0] * 5))
    differing = shares(*[0.25, 0.75] * 5, samples=4)
    assert bounds(differing) == pytest.approx(bounds(shares(*[1.0] * 20, *[0.0] * 20)))


@pytest.mark.parametrize("num_questions", [1, 2, 10])
def test_questions_of_one_value_say_nothing_of_how_they_differ_however_many_samples_each_has(num_questions: int):
    """A hundred samples of one question, of which half are right, are no hundred questions."""
    same = shares(*[0.5] * num_questions, samples=100)
    count, z = num_questions, 1.959964
    reach = z * math.sqrt(0.25 / count + z * z / (4 * count * count)) / (1 + z * z / count)
    assert bounds(same) == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-6)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=30))
def test_an_interval_of_a_share_holds_it_and_is_within_its_bounds(values: list[float]):
    found = shares(*values, samples=4)
    assert found.lower is not None and found.upper is not None
    assert 0 <= found.lower <= found.value + 1e-12 and found.value - 1e-12 <= found.upper <= 1
    assert found.lower < found.upper
    swapped = shares(*[1 - value for value in values], samples=4)
    assert (swapped.lower, swapped.upper) == pytest.approx((1 - found.upper, 1 - found.lower))


def test_a_weighted_mean_counts_single_instructions_and_its_error_is_a_ratios():
    """Prompts of 1, 2 and 3 instructions, of which 1, 1 and 0 are followed: 2 of 6."""
    shares, weights = [1.0, 0.5, None, 0.0], [1, 2, 5, 3]
    found = weighted_estimate("inst_level_acc", shares, weights)
    assert found is not None and (found.value, found.num_questions) == (pytest.approx(2 / 6), 3)
    residuals = [1 * (1 - 1 / 3), 2 * (0.5 - 1 / 3), 3 * (0 - 1 / 3)]
    error = math.sqrt(sum(each**2 for each in residuals) * 3 / 2) / 6
    assert bounds(found) == (pytest.approx(max(0, 1 / 3 - 1.959964 * error)), pytest.approx(1 / 3 + 1.959964 * error))
    assert weighted_estimate("inst_level_acc", [None], [1]) is None
    assert bounds(weighted_estimate("inst_level_acc", [1.0, 1.0], [1, 2]) or found) == (None, None)
