"""A suite as a guard: a model that falls by more than it may is not promoted, with the suite named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import PromotionConfig, SuiteGuard
from rollout_core.evaluation.reports import SuiteReport
from rollout_core.promotion.decision import promote_if_accepted, weigh
from rollout_core.promotion.evidence import Promotion
from rollout_core.promotion.guards import GuardFinding, GuardReports, Measured, judge_guard
from rollout_core.store import SqlLightningStore
from tests.evaluation.test_reports import report, suite_of
from tests.promotion.test_promotion_history import Place
from tests.support.evaluations import evaluation

SUITE = suite_of(1, name="arithmetic")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def answered(place: Place, num_right: int, num_questions: int = 1000, *, model: str, first: int = 0) -> SuiteReport:
    """Of a model that has ``num_right`` questions right, from number ``first`` on."""
    right = range(first, first + num_right)
    answers = [[("x", 1.0 if number in right else 0.0)] for number in range(num_questions)]
    return report(place.objects, SUITE, *answers, model=model)


def judged(place: Place, before: SuiteReport, after: SuiteReport, **keys: Any) -> GuardFinding:
    guard = SuiteGuard.model_validate({"kind": "suite", "name": "arithmetic", **keys})
    [finding] = judge_guard(guard, Measured(place.objects, {"latest": before}, after))
    return finding


@pytest.mark.parametrize(("num_right", "is_promoted"), [(801, True), (800, True), (799, False)])
def test_a_drop_just_above_the_limit_refuses_the_promotion_and_one_just_below_does_not(
    place: Place, num_right: int, is_promoted: bool
):
    """Of 1,000 questions the served model has 810 right; a hundredth is ten of them."""
    served, base, new = place.model("served"), place.model("base"), place.model("new")
    place.promote(served)
    rewards = {base: 0.1, served: 0.2, new: 0.9}
    held_out = [evaluation(place.objects, model, ("a", reward, 1, "stop")) for model, reward in rewards.items()]
    config = PromotionConfig.model_validate({"guards": [{"kind": "suite", "name": "arithmetic", "max_drop": 0.01}]})
    reports = GuardReports(
        guard=0,
        before=answered(place, 0, model="base"),
        latest=answered(place, 810, model="served"),
        after=answered(place, num_right, model="new"),
    )
    rivals: Any = {"before": held_out[0], "latest": held_out[1]}
    evidence = weigh(place.objects, rivals, held_out[2], config, [reports], [], None)

    async def promote(store: SqlLightningStore) -> Promotion:
        opened: Any = nullcontext(store)
        return await promote_if_accepted(place.objects, lambda: opened, new, evidence, config, by="flow run 1")

    done: Promotion = place.do(promote)
    assert (done.promoted, place.served()) == (is_promoted, new if is_promoted else served)
    passed = [finding.passed for finding in evidence.guards]
    assert passed == [True, is_promoted]
    share = num_right / 1000
    line = f"suite arithmetic: accuracy 0.8100 (latest) -> {share:.4f}, gain {share - 0.81:.4f}, "
    assert evidence.guards[1].line.startswith(f"{line}0.95 interval -0.")
    assert evidence.guards[1].line.endswith("over 1000 questions, may fall by 0.01")
    assert is_promoted or f"a guard refused it: {line}" in done.reason


def test_with_a_confidence_the_interval_may_not_reach_below_the_limit_either(place: Place):
    """Both have 500 of 1,000 right, but of different questions: the mean is the same, and that is not sure."""
    before, after = answered(place, 500, model="a"), answered(place, 500, model="b", first=400)
    assert judged(place, before, after).passed
    unsure = judged(place, before, after, confidence=0.95, max_drop=0.02)
    assert not unsure.passed
    line = "suite arithmetic: accuracy 0.5000 (latest) -> 0.5000, gain 0.0000, 0.95 interval -0.05"
    assert unsure.line.startswith(line)
    assert unsure.line.endswith("may fall by 0.02, and so may the interval's lower end")
    assert judged(place, before, after, confidence=0.95, max_drop=0.1).passed
    same = answered(place, 500, model="b")
    assert judged(place, before, same, confidence=0.95).passed, "every question is as it was"


def test_questions_that_one_model_has_no_score_of_do_not_count(place: Place):
    before = report(place.objects, SUITE, [("x", 1.0)], [("x", None)], [("x", 1.0)])
    after = report(place.objects, SUITE, [("x", 1.0)], [("x", 0.0)], [("x", None)], model="b")
    found = judged(place, before, after, min_questions=1)
    assert found.passed and found.line.endswith("over 1 questions, may fall by 0")
    nothing = report(place.objects, SUITE, [("x", None)], [("x", 1.0)], [("x", None)], model="c")
    refused = judged(place, before, nothing, min_questions=1)
    assert not refused.passed and refused.line == (
        "suite arithmetic: no question has accuracy in both models (latest and after), or it is no mean over questions"
    )


@pytest.mark.parametrize(("keys", "least"), [({}, 5), ({"min_questions": 4}, 4), ({"min_questions": 9}, 9)])
def test_of_few_questions_that_both_models_have_a_score_of_no_drop_is_told(
    place: Place, keys: dict[str, Any], least: int
):
    """The rival has a score of all ten questions, or of as few as the new model."""
    full = report(place.objects, SUITE, *[[("x", 1.0)]] * 10)
    for num_scored in (least - 1, least):
        scored = [[("x", 1.0)]] * num_scored + [[("x", None)]] * (10 - num_scored)
        after = report(place.objects, SUITE, *scored, model="b")
        for before in (full, report(place.objects, SUITE, *scored, model="c")):
            found = judged(place, before, after, **keys)
            assert found.passed == (num_scored == least)
    few = judged(place, full, report(place.objects, SUITE, [("x", 1.0)], *[[("x", None)]] * 9, model="b"), **keys)
    assert few.line.startswith("suite arithmetic: accuracy 1.0000 (latest) -> 1.0000, gain 0.0000, ")
    assert few.line.endswith(
        "over 1 questions: too few to tell a drop, as 1 of 10 questions have a score in both models; "
        f"at least {least} must (min_questions)"
    )


def test_the_least_number_of_questions_is_in_ids_where_it_is_given():
    guard = {"kind": "suite", "name": "arithmetic"}
    plain, given = (SuiteGuard.model_validate({**guard, **more}) for more in ({}, {"min_questions": 5}))
    assert "min_questions" not in plain.cache_identity() and given.cache_identity()["min_questions"] == 5


def test_a_metric_of_the_suite_may_decide(place: Place):
    suite = suite_of(2, name="drawn")
    before = report(place.objects, suite, [("x", 1.0), ("y", 1.0)], [("x", 0.0), ("y", 0.0)])
    after = report(place.objects, suite, [("x", 1.0), ("y", 0.0)], [("x", 0.0), ("y", 0.0)], model="b")
    assert not judged(place, before, after, name="drawn").passed
    found = judged(place, before, after, name="drawn", metric="pass@2")
    assert found.passed and found.line.startswith("suite drawn: pass@2 0.5000 (latest) -> 0.5000, gain 0.0000")
