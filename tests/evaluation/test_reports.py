"""Reports of suites as they are filed, and two of them compared, from completions whose scores are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import Suite
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


def report(objects: ObjectStore, suite: Suite, *questions: Answers, model: str = "a") -> SuiteReport:
    """Of the answers to each question, with their scores."""
    of = ContentId(hash_bytes(model.encode()))
    rows = [(number, index, *answer) for number, one in enumerate(questions) for index, answer in enumerate(one)]
    ids = [hash_bytes(f"{model} {number} {index}".encode()) for number, index, *_ in rows]
    samples = [Sample(key, f"q{row[0]}", [1], row[1], f"id-{row[0]}", {}) for key, row in zip(ids, rows, strict=True)]
    made = [Completion(key, [3], [-0.5], row[2], "stop") for key, row in zip(ids, rows, strict=True)]
    scores = [row[3] for row in rows]
    completions = Completions(
        completions=objects.put_bytes(b"".join(map(encode_completion, made))),
        samples=objects.put_bytes(encode_samples(samples)),
        model=of,
        num_samples=len(rows),
        num_tokens=len(rows),
        finish_reasons={"stop": len(rows) - 1, "length": 1},
    )
    scored = Scores(
        scores=objects.put_bytes(canonical_json(scores)),
        completions=completions.completions,
        num_samples=len(rows),
        mean=0.0,
        std=0.0,
        num_abstained=scores.count(None),
    )
    return report_suite(objects, suite, suite_id_of(suite, PROMPTS, CODE), completions, scored, print)


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


def test_reports_of_different_suites_are_not_compared(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)])
    assert suite_id_of(suite_of(1, threshold=0.5, metrics=["mean"]), PROMPTS, CODE) == one.suite_id
    others = [suite_of(2), suite_of(1, scorer={"kind": "math"}), suite_of(1, sampling={"max_tokens": 1})]
    ids = {suite_id_of(suite, PROMPTS, CODE) for suite in others} | {suite_id_of(suite_of(1), CODE, CODE)}
    assert len(ids | {one.suite_id}) == 5
    with pytest.raises(ConfigError, match="suite s was changed between the two evaluations"):
        compare_reports(objects, one, one.model_copy(update={"suite_id": CODE}))


def test_answers_that_are_not_kept_any_more_are_named(objects: ObjectStore):
    one = report(objects, suite_of(1), [("a", 1.0)])
    with pytest.raises(NotFound, match="the answers to s are not in memory://reports any more"):
        compare_reports(objects, one, one.model_copy(update={"questions": CODE}))
