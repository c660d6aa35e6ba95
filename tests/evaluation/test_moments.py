"""What suites say of a run's iterations: which was the best, and whether training ends."""

from __future__ import annotations

import pytest

from rollout_core.base.errors import MissingObject
from rollout_core.base.ids import hash_bytes
from rollout_core.evaluation.moments import SuiteWatch, change_of, in_order, moment_of, training_label
from rollout_core.objects import ObjectStore
from tests.evaluation.test_reports import report, suite_of


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://moments")


def watched(objects: ObjectStore, *shares: float, patience: int | None = None, metric: str | None = None) -> SuiteWatch:
    """After iterations with these shares of ten questions right."""
    watch = SuiteWatch(metric, patience)
    for number, share in enumerate(shares, start=1):
        answers = [[("x", float(place < 10 * share))] for place in range(10)]
        watch.note(number, report(objects, suite_of(1, name="sums"), *answers, model=str(number)))
    return watch


def test_the_best_is_the_first_of_those_with_the_highest_figure(objects: ObjectStore):
    watch = watched(objects, 0.2, 0.7, 0.5, 0.7)
    assert watch.best is not None and (watch.best.iteration, watch.best.model) == (2, hash_bytes(b"2"))
    assert watch.selected == "iteration 2, with the highest accuracy on suite sums (0.7000)"
    assert watch.end is None, "without patience training goes on"
    assert watched(objects).best is None


@pytest.mark.parametrize(
    ("shares", "ends"),
    [
        ((), False),
        ((0.5,), False),
        ((0.5, 0.4), False),
        ((0.5, 0.4, 0.5), True),
        ((0.5, 0.4, 0.6), False),
        ((0.5, 0.6, 0.6, 0.1), True),
    ],
)
def test_training_ends_after_so_many_evaluations_without_a_new_highest_figure(
    objects: ObjectStore, shares: tuple[float, ...], ends: bool
):
    end = watched(objects, *shares, patience=2).end
    assert (end is not None) == ends
    if end is not None:
        assert end.startswith(
            f"after iteration {len(shares)}, as the last 2 evaluations brought no higher accuracy on "
        )


def test_another_metric_may_decide(objects: ObjectStore):
    watch = SuiteWatch("pass@2", None)
    suite = suite_of(2, name="drawn")
    watch.note(1, report(objects, suite, [("x", 1.0), ("x", 1.0)], [("x", 0.0), ("x", 0.0)], model="1"))
    watch.note(2, report(objects, suite, [("x", 1.0), ("x", 0.0)], [("x", 1.0), ("x", 0.0)], model="2"))
    assert watch.best is not None and watch.best.iteration == 2 and "pass@2" in watch.selected


def test_a_label_has_its_moment():
    assert moment_of(training_label("sums", "after SFT"), "sums") == "after SFT"
    assert moment_of("sums", "sums") is None and moment_of(training_label("sums-2", "before"), "sums") is None


def test_moments_of_several_suites_are_one_order():
    few = ["before", "after SFT", "after PPO", "latest"]
    second = [*few[:2], "after iteration 2", "after iteration 10", *few[2:]]
    third = [*few[:2], "after iteration 3", *few[2:]]
    found = [*few[:2], *(f"after iteration {number}" for number in (2, 3, 10)), *few[2:]]
    assert in_order([few, second, third]) == in_order([third, few, second]) == found
    assert in_order([["after SFT", "before"], ["before", "after SFT"]]) == ["after SFT", "before"]
    assert in_order([]) == []


def test_a_change_is_paired_by_question_and_what_storage_lost_is_named_for_the_run_to_compute_again(
    objects: ObjectStore,
):
    one = report(objects, suite_of(1), [("x", 1.0)], [("x", None)], [("x", 1.0)])
    two = report(objects, suite_of(1), [("x", 0.0)], [("x", 1.0)], [("x", 1.0)], model="b")
    change = change_of(objects, one, two)
    assert change is not None and (change.gain.gain, change.gain.num_prompts) == (-0.5, 2)
    line = "suite s: accuracy 1.0000 (latest) -> 0.5000, gain -0.5000, 0.95 interval -1.0000 to 0.0000 over 2 questions"
    assert change.line("latest") == line
    with pytest.raises(MissingObject):
        change_of(objects, one, two.model_copy(update={"questions": hash_bytes(b"gone")}))
