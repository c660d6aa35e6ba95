"""Reports of suites as they are filed, and two of them compared, from completions whose scores are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, canonical_json, content_id, hash_bytes
from rollout_core.config import Suite, identity
from rollout_core.data.samples import Completion, Sample, encode_completion, encode_samples
from rollout_core.evaluation.reports import SuiteReport, compare_reports, report_suite, suite_id_of
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, Scores

Answers = Sequence[tuple[str, float | None]]
PROMPTS, CODE = hash_bytes(b"prompts"), hash_bytes(b"code")


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url("memory://reports")


def suite_of(samples: int, **keys: Any) -> Suite:
    document = {"name": "s", "rows": {"path": "s.jsonl"}, "samples": samples, "sampling": {"temperature": 1.0}}
    return Suite.model_validate({**document, **keys})


def report(
    objects: ObjectStore,
    suite: Suite,
    *questions: Answers,
    model: str = "a",
    prompts: ContentId = PROMPTS,
    first: int = 0,
) -> SuiteReport:
    """Of the answers to each question, with their scores; those whose text is ``failed`` could not be had. ``first`` is
    the number of the first question."""
    of = ContentId(hash_bytes(model.encode()))
    asked = [(number, index, *one) for number, each in enumerate(questions, first) for index, one in enumerate(each)]
    every = [sample_of(model, number, index) for number, index, *_ in asked]
    rows = [row for row in asked if row[2] != "failed"]
    samples = [sample_of(model, number, index) for number, index, *_ in rows]
    ids = [sample.id for sample in samples]
    made = [Completion(key, [3], [-0.5], row[2], "stop") for key, row in zip(ids, rows, strict=True)]
    scores = [row[3] for row in rows]
    completions = Completions(
        completions=objects.put_bytes(b"".join(map(encode_completion, made))),
        samples=objects.put_bytes(encode_samples(samples)),
        model=of,
        num_samples=len(rows),
        num_tokens=len(rows),
        finish_reasons={"stop": len(rows) - 1, "length": 1},
        num_left_out=len(every) - len(rows),
    )
    scored = Scores(
        scores=objects.put_bytes(canonical_json(scores)),
        completions=completions.completions,
        num_samples=len(rows),
        mean=0.0,
        std=0.0,
        num_abstained=scores.count(None),
    )
    whole = objects.put_bytes(encode_samples(every)) if len(every) > len(rows) else None
    return report_suite(objects, suite, prompts, CODE, completions, scored, print, asked=whole)


def sample_of(model: str, number: int, index: int) -> Sample:
    key = hash_bytes(f"{model} {number} {index}".encode())
    extras = {"instruction_id_list": ["length_constraints:number_words"] * (number + 1)}
    return Sample(key, f"q{number}", [1], index, f"id-{number}", extras)


def test_a_report_has_every_metric_and_what_has_no_score_is_counted(objects: ObjectStore):
    found = report(
        objects,
        suite_of(3),
        [("4", 1.0), ("4", 1.0), ("5", 0.0)],
        [("1", 1.0), ("2", 0.0), ("2", None)],
        [("1", None), ("1", None), ("1", None)],
    )
    values = {metric.name: (metric.value, metric.num_questions) for metric in found.metrics}
    assert values == {
        "mean": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "avg@3": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "pass@3": (1.0, 1),
        "maj@3": (pytest.approx((1 + 1 / 2) / 2), 2),
    }
    assert (found.num_questions, found.num_samples, found.num_abstained, found.num_truncated) == (3, 9, 4, 1)
    filed = objects.get_json(found.questions)
    assert filed["ids"] == ["id-0", "id-1", "id-2"]
    assert filed["values"]["pass@3"] == [1, None, None]
    assert found.headline.name == "avg@3"


def test_a_metric_that_no_question_has_is_refused(objects: ObjectStore):
    with pytest.raises(ConfigError, match="no question has enough answers with a score for pass@2"):
        report(objects, suite_of(2, metrics=["pass@2"]), [("1", 1.0), ("2", None)])


def test_a_model_against_itself_gains_nothing_and_flips_no_question(objects: ObjectStore):
    one = report(objects, suite_of(1), [("1", 1.0)], [("2", 0.0)], [("3", 0.4)])
    compared = compare_reports(objects, one, one)
    assert all((gain.gain, gain.lower, gain.upper) == (0, 0, 0) for gain in compared.gains.values())
    assert compared.lost == compared.gained == ()


@pytest.mark.parametrize(
    ("second", "means"),
    [
        # Of 1 + 2 instructions of the questions that both have, 1 + 1 and again 1 + 1 are followed; then 1 + 2 of them.
        ([1.0, 0.5, None], (2 / 3, 2 / 3)),
        ([1.0, 1.0, None], (2 / 3, 3 / 3)),
        ([0.0, 0.5, 0.0], (2 / 6, 1 / 6)),
    ],
)
def test_questions_that_only_one_model_has_change_no_weight_of_the_others(
    objects: ObjectStore, second: list[float | None], means: tuple[float, float]
):
    """Of 1, 2 and 3 instructions the first model follows 1, 1 and none."""
    suite = suite_of(1, scorer={"kind": "instructions", "value": "share"}, metrics=["inst_level_acc"])
    before, after = (
        report(objects, suite, *([("a", share)] for share in shares), model=model)
        for model, shares in (("a", [1.0, 0.5, 0.0]), ("b", second))
    )
    for sides, expected in (((before, after), means), ((after, before), means[::-1])):
        gain = compare_reports(objects, *sides).gains["inst_level_acc"]
        assert (gain.mean_before, gain.mean_after) == pytest.approx(expected)
        assert gain.gain == pytest.approx(expected[1] - expected[0])
        assert gain.lower <= gain.gain <= gain.upper and gain.num_prompts == 3 - second.count(None)


def test_questions_that_flip_are_named_both_ways_and_turn_with_the_order(objects: ObjectStore):
    suite = suite_of(2)
    one = report(objects, suite, [("a", 1.0), ("a", 1.0)], [("b", 0.0), ("b", 0.0)], [("c", 1.0), ("c", 0.0)])
    two = report(
        objects, suite, [("x", 0.0), ("x", 0.0)], [("y", 1.0), ("y", 0.0)], [("z", 1.0), ("z", 1.0)], model="b"
    )
    forward, back = compare_reports(objects, one, two), compare_reports(objects, two, one)
    assert [(flip.question, flip.completions, flip.shares) for flip in forward.lost] == [("id-0", ("a", "x"), (1, 0))]
    assert [flip.question for flip in forward.gained] == ["id-1"]
    assert [flip.question for flip in back.gained] == ["id-0"] and [flip.question for flip in back.lost] == ["id-1"]
    assert list(forward.gains) == ["mean", "avg@2", "pass@2", "maj@2"]
    for name, gain in forward.gains.items():
        other = back.gains[name]
        assert (gain.gain, gain.lower, gain.upper) == pytest.approx((-other.gain, -other.upper, -other.lower))


def test_a_question_without_a_score_on_one_side_is_left_out(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)], [("b", None)], [("c", 0.0)])
    two = report(objects, suite_of(1), [("a", 0.0)], [("b", 1.0)], [("c", 0.0)], model="b")
    compared = compare_reports(objects, one, two)
    assert compared.gains["accuracy"].num_prompts == 2
    assert [flip.question for flip in compared.lost] == ["id-0"] and not compared.gained


@pytest.mark.parametrize(
    ("rule", "means", "accuracy", "failed"),
    [
        ("leave_out", [1.0, None, 0.0], 0.5, ("id-0", "id-1")),
        ("wrong", [0.5, 0.0, 0.0], 1 / 6, ("id-0", "id-1")),
    ],
)
def test_an_answer_that_cannot_be_had_is_counted_and_named_and_counts_as_the_suite_says(
    objects: ObjectStore, rule: str, means: list[float | None], accuracy: float, failed: tuple[str, ...]
):
    answers = [("a", 1.0), ("failed", None)], [("failed", None), ("failed", None)], [("c", 0.0), ("c", 0.0)]
    found = report(objects, suite_of(2, failed=rule), *answers)
    filed = objects.get_json(found.questions)
    assert filed["ids"] == ["id-0", "id-1", "id-2"] and filed["places"] == [0, None, 1]
    assert filed["values"]["mean"] == means
    assert (found.num_questions, found.num_samples, found.num_failed, found.failed) == (3, 3, 3, failed)
    assert found.metrics[1].value == pytest.approx(accuracy)
    assert found.num_abstained == 0


def test_models_of_which_one_lacks_an_answer_are_paired_by_question(objects: ObjectStore):
    one = report(objects, suite_of(1), [("failed", None)], [("b", 1.0)], [("c", 1.0)])
    two = report(objects, suite_of(1), [("x", 1.0)], [("y", 1.0)], [("z", 0.0)], model="b")
    compared = compare_reports(objects, one, two)
    assert compared.gains["accuracy"].num_prompts == 2
    assert [(flip.question, flip.prompt, flip.completions) for flip in compared.lost] == [("id-2", "q2", ("c", "z"))]
    assert compared.remark is None


def test_other_prompts_of_the_same_rows_are_paired_by_the_rows_ids(objects: ObjectStore):
    """Such as other examples before each question, or rows that were added."""
    one = report(objects, suite_of(1), [("a", 1.0)], [("b", 0.0)], [("c", 1.0)])
    two = report(objects, suite_of(1), [("y", 1.0)], [("z", 0.0)], [("w", 0.0)], model="b", prompts=CODE, first=1)
    assert one.suite_id != two.suite_id and one.conditions == two.conditions
    compared = compare_reports(objects, one, two)
    assert compared.gains["accuracy"].num_prompts == 2
    assert [flip.question for flip in compared.lost] == ["id-2"] and [flip.question for flip in compared.gained] == [
        "id-1"
    ]
    assert (
        compared.remark is not None and "2 questions of 3 and 3 are paired by the ids of their rows" in compared.remark
    )
    elsewhere = report(objects, suite_of(1), [("a", 1.0)], model="b", prompts=CODE, first=7)
    with pytest.raises(ConfigError, match="no question of suite s was put to both models"):
        compare_reports(objects, one, elsewhere)


def test_a_report_of_the_first_version_is_compared(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)], [("b", 0.0)])
    filed = objects.get_json(one.questions)
    del filed["places"]
    document = one.model_dump(mode="json", exclude={"num_failed", "failed", "conditions"})
    old = SuiteReport.model_validate({**document, "questions": objects.put_json(filed)})
    two = report(objects, suite_of(1), [("x", 0.0)], [("y", 0.0)], model="b")
    assert [flip.completions for flip in compare_reports(objects, old, two).lost] == [("a", "x")]


def test_reports_of_different_suites_are_not_compared(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)])
    assert suite_id_of(suite_of(1, metrics=["mean"]), PROMPTS, CODE) == one.suite_id
    others = [{"samples": 2}, {"scorer": {"kind": "math"}}, {"sampling": {"max_tokens": 1}}]
    others += [{"threshold": 0.5}, {"failed": "wrong"}]
    ids = {suite_id_of(suite_of(**{"samples": 1, **change}), PROMPTS, CODE) for change in others}
    ids |= {suite_id_of(suite_of(1), CODE, CODE), one.suite_id}
    assert len(ids) == 7
    looser = report(objects, suite_of(1, threshold=0.5), [("a", 1.0)], model="b")
    with pytest.raises(ConfigError, match="suite s was changed between the two evaluations"):
        compare_reports(objects, one, looser)


def test_the_id_of_a_suite_is_what_it_was_for_what_is_stored():
    """Those with another threshold had the id of the same suite without one."""
    suite = suite_of(1, scorer={"kind": "math"})
    asked = [PROMPTS, identity(suite.sampling), 1, identity(suite.scorer), CODE]
    assert suite_id_of(suite, PROMPTS, CODE) == content_id("suite/1", asked)


def test_answers_that_are_not_kept_any_more_are_named(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)])
    with pytest.raises(NotFound, match="the answers to s are not in memory://reports any more"):
        compare_reports(objects, one, one.model_copy(update={"questions": CODE}))
