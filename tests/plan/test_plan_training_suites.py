"""Suites of runs that train: planned with the run, and refused before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.lm_eval_tasks import write_tasks
from tests.plan.planning import plan, refusal

SORTING = {"name": "sorting", "rows": {"path": "prompts.jsonl"}, "sampling": {"max_tokens": 8}}
THEIRS = {"kind": "lm_eval", "name": "theirs", "tasks": ["all_sums"], "include_path": "."}
FILE = """
name = "in-a-file"
rows = { path = "held-out.jsonl" }
samples = 4
sampling = { temperature = 0.7, max_tokens = 8 }
"""


@pytest.fixture
def file(work: Path) -> str:
    (work / "suites").mkdir()
    (work / "suites" / "one.toml").write_text(FILE)
    return "suites/one.toml"


def test_suites_by_file_and_by_table_are_planned_with_the_moments_at_which_they_are_asked(work: Path, file: str):
    entries = [{"suite": file, "every": 5}, {"suite": SORTING}]
    expected = {
        "in-a-file": "1 x 4 questions, before and after each phase, every 5 iterations",
        "sorting": "2 questions, before and after each phase",
    }
    assert plan("nightly", work, evaluation__suites=entries)["suites"] == expected
    assert plan("train-grpo", work, evaluation__suites=entries)["suites"] == expected
    rows = {"evaluation__suites": [{"suite": SORTING}], "backend": {"kind": "transformers"}}
    assert list(plan("train-sft", work, **rows)["suites"]) == ["sorting"]
    assert "suites" not in plan("train-sft", work)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, "evaluation.suites.0.suite: required, but not given"),
        ({"suite": 5}, "evaluation.suites.0.suite: Input should be a valid dictionary"),
        ({"suite": SORTING, "evry": 5}, "evaluation.suites.0.evry: unknown key; did you mean 'every'?"),
        (
            {"suite": SORTING, "every": 0},
            "evaluation.suites.0.every: Input should be greater than or equal to 1",
        ),
        ({"suite": "none.toml"}, "evaluation.suites.0.suite: "),
        ({"suite": "mine.py"}, "evaluation.suites.0.suite: "),
        ({"suite": ""}, "evaluation.suites.0.suite: got an empty text; expected a suite's name"),
        ({"suite": {**THEIRS, "taskz": 1}}, "evaluation.suites.0.suite.taskz: unknown key; did you mean 'tasks'?"),
        ({"suite": "theirs.toml"}, "suite theirs: task 'chozen' is neither known to lm_eval nor a file; did you mean"),
        (
            {"suite": {**THEIRS, "gen_kwargs": {"num_beams": 3}}},
            "suite theirs: task sums: generation_kwargs has num_beams = 3, which has no meaning here",
        ),
        ({"suite": "gsm9k"}, "suite 'gsm9k': there is no such suite and no such file; did you mean 'gsm8k'?"),
        ({"suite": {**SORTING, "rowz": 1}}, "evaluation.suites.0.suite.rowz: unknown key; did you mean 'rows'?"),
        ({"suite": {**SORTING, "rows": {"path": "no.jsonl"}}}, "suite sorting: rows.path: "),
        ({"suite": {**SORTING, "scorer": {"kind": "function", "callable": "mine.py:no"}}}, "suite sorting: scorer: "),
        ({"suite": {**SORTING, "sampling": {"max_tokens": 600}}}, "suite sorting: rows.path: "),
    ],
)
def test_a_bad_suite_is_refused_in_one_line(work: Path, entry: dict[str, Any], expected: str):
    write_tasks(work)
    (work / "theirs.toml").write_text(
        'kind = "lm_eval"\nname = "theirs"\ntasks = ["chozen", "chosen.yaml"]\ninclude_path = "."'
    )
    message = refusal("nightly", work, evaluation__suites=[entry])
    assert expected in message, message


def test_tasks_of_lm_eval_are_planned_and_the_metrics_are_those_of_its_tasks_and_groups(work: Path):
    write_tasks(work)

    def given(metric: str) -> dict[str, Any]:
        entry = {"suite": THEIRS, "every": 1, "patience": 1, "metric": metric}
        guard = {"kind": "suite", "name": "theirs", "metric": metric, "max_drop": 0.01}
        return {"evaluation__suites": [entry], "promotion__guards": [guard]}

    words = "12 requests of lm_eval 0.4.13, before and after each phase, every 1 iterations"
    for metric in ("sums/exact_match,flexible", "all_sums/exact_match", "several/exact_match"):
        assert plan("nightly", work, **given(metric))["suites"] == {"theirs": words}
    wrong = {"evaluation__suites": given("sums/exact_match")["evaluation__suites"]}
    assert refusal("nightly", work, **wrong).startswith("evaluation.suites.0.metric: suite theirs has no 'sums/exact_m")
    wrong = {**given("all_sums/exact_match"), "promotion__guards": given("sums/exact")["promotion__guards"]}
    assert refusal("nightly", work, **wrong).startswith("promotion.guards.0.metric: suite theirs has no 'sums/exact'; ")
    guards = [{"kind": "suite", "name": "theirs", "confidence": 0.95}]
    few = [{"suite": {**THEIRS, "tasks": ["chosen"]}}]
    message = refusal("nightly", work, evaluation__suites=few, promotion__guards=guards)
    assert "promotion.guards.0.confidence: 6 questions are too few for an interval" in message, message


def test_what_is_wrong_within_a_suites_file_is_named_with_the_file_and_the_key(work: Path, file: str):
    (work / file).write_text(FILE + "metric = 1\n")
    message = refusal("train-grpo", work, evaluation__suites=[{"suite": file}])
    assert (
        message.startswith("evaluation.suites.0.suite: ")
        and "one.toml: metric: unknown key; did you mean 'metr" in message
    )


def test_two_suites_of_one_name_are_refused(work: Path):
    twice = [{"suite": SORTING}, {"suite": {**SORTING, "rows": {"path": "held-out.jsonl"}}}]
    expected = "evaluation.suites.1: two suites are named 'sorting'; rename one of them"
    assert refusal("nightly", work, evaluation__suites=twice) == expected


def test_suites_are_evaluated_between_iterations_only_where_there_are_some_that_follow_each_other(work: Path):
    entries = [{"suite": SORTING, "every": 2}]
    message = refusal("train-sft", work, evaluation__suites=entries, backend={"kind": "transformers"})
    assert message.endswith("evaluation.suites.0.every is 2, and sft has no iterations; leave it out")
    message = refusal("train-grpo", work, evaluation__suites=entries, algorithm__async_depth=1)
    assert "evaluation.suites.0.every is 2, and with async_depth the engine" in message


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ({"name": "other"}, "promotion.guards.0.name: 'other' is no suite of this run; evaluation.suites has sorting"),
        ({"metric": "pass@4"}, "promotion.guards.0.metric: suite sorting has no 'pass@4'; found: accuracy, mean"),
        ({"confidence": 0.95}, "promotion.guards.0.confidence: 2 questions are too few for an interval; give at least"),
        ({"min_questions": 3}, "promotion.guards.0.min_questions is 3, and suite sorting has 2 questions"),
        ({"max_drop": -1}, "promotion.guards.0.max_drop: Input should be greater than or equal to 0"),
        ({"name": None}, "promotion.guards.0.name: "),
    ],
)
def test_a_guard_that_looks_at_what_is_not_there_is_refused(work: Path, guard: dict[str, Any], expected: str):
    guards = [{"kind": "suite", "name": "sorting", **guard}]
    message = refusal("nightly", work, evaluation__suites=[{"suite": SORTING}], promotion__guards=guards)
    assert expected in message


def test_a_guard_of_a_suite_is_planned(work: Path):
    guards = [{"kind": "suite", "name": "sorting", "metric": "mean", "max_drop": 0.01}]
    assert "suites" in plan("nightly", work, evaluation__suites=[{"suite": SORTING}], promotion__guards=guards)
    message = refusal("nightly", work, promotion__guards=guards)
    assert message.endswith("'sorting' is no suite of this run; there are no evaluation.suites")


@pytest.mark.parametrize(
    ("entry", "changes", "expected"),
    [
        ({"select": "best"}, {}, 'select = "best" compares evaluations between iterations, and there are none; set ev'),
        ({"patience": 2}, {}, "patience = 2 compares evaluations between iterations, and there are none; set every"),
        ({"every": 1, "metric": "mean"}, {}, 'metric is for select = "best" and patience; leave it out'),
        (
            {"every": 1, "patience": 1, "metric": "pass@4"},
            {},
            "evaluation.suites.0.metric: suite sorting has no 'pass@",
        ),
        ({"every": 1, "select": "most"}, {}, "evaluation.suites.0.select: Input should be 'last' or 'best'"),
        ({"every": 1, "patience": 1}, {"ppo__state_every": 2}, "with state_every = 2 not every iteration is stored"),
    ],
)
def test_a_suite_that_decides_about_training_is_checked(
    work: Path, entry: dict[str, Any], changes: dict[str, Any], expected: str
):
    message = refusal("nightly", work, evaluation__suites=[{"suite": SORTING, **entry}], ppo__iterations=4, **changes)
    assert expected in message


def test_one_suite_selects(work: Path, file: str):
    entries = [{"suite": one, "every": 1, "select": "best"} for one in (SORTING, file)]
    message = refusal("nightly", work, evaluation__suites=entries)
    assert message.endswith('several suites have select = "best"; leave it with one of them')
