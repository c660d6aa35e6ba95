"""Suites as files: what is sound is planned, and what is wrong with one is a line before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.config import EvalConfig, Suite, apply_overrides, load_config, parse_config
from rollout_core.plans.suite_plan import plan_suites
from rollout_core.store.reachable import plain_connections
from tests.plan.planning import TEMPLATE, jsonl

PROJECT = Path(__file__).resolve().parents[2]
QUESTION: dict[str, Any] = {
    "name": "sums",
    "rows": {"path": "sums.jsonl"},
    "prompt": {"text": "{{ question }} ="},
    "sampling": {"max_tokens": 8},
}
FEW_SHOT = {"rows": {"path": "sums.jsonl"}, "count": 1}


@pytest.fixture(autouse=True)
def here(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(work / "sums.jsonl", *({"question": f"sort {n} 1", "answer": n} for n in range(2, 6)))
    (work / "empty.jsonl").write_text("")
    (work / "broken.jsonl").write_text('{"question": "a"}\n{"question"\n')
    monkeypatch.chdir(work)


def plan(*suites: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    document = {"model": {"uri": "model"}, "backend": {"kind": "transformers"}, "suites": [dict(s) for s in suites]}
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    config = parse_config(apply_overrides(document, overrides), EvalConfig)
    return plan_suites(config, Path.cwd(), plain_connections())


def suite(**changes: Any) -> dict[str, Any]:
    """The sound one with other keys; None leaves one out."""
    changed = apply_overrides(QUESTION, {key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in changed.items() if value is not None}


def refusal(*suites: Mapping[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*suites, **changes)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def test_what_is_sound_is_planned():
    prompts = {"name": "sorting", "rows": {"path": "prompts.jsonl"}, "samples": 8}
    prompts["sampling"] = {"temperature": 0.7, "max_tokens": 8}
    facts = plan(QUESTION, suite(name="shots", prompt__few_shot=FEW_SHOT), prompts)
    assert facts == {"model": "model", "questions": {"sums": "4", "shots": "4", "sorting": "2 x 8"}}


@pytest.mark.parametrize(
    ("samples", "scorer", "metrics"),
    [
        (1, {"kind": "math"}, ("mean", "accuracy")),
        (4, {"kind": "math"}, ("mean", "avg@4", "pass@4", "maj@4")),
        (4, {"kind": "text", "compare": "bleu"}, ("mean", "avg@4", "pass@4")),
    ],
)
def test_metrics_follow_from_samples_and_scorer(samples: int, scorer: dict[str, Any], metrics: tuple[str, ...]):
    found = Suite.model_validate(suite(samples=samples, scorer=scorer, sampling={"temperature": 1.0}))
    assert found.chosen_metrics == metrics


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "suites.0.name: required, but not given"),
        ({"name": "two words"}, "suites.0.name: String should match pattern"),
        ({"rows": None}, "suites.0.rows: required, but not given"),
        ({"rowz": {"path": "x"}}, "suites.0.rowz: unknown key; did you mean 'rows'?"),
        ({"rows__path": "none.jsonl"}, "suite sums: rows.path: "),
        ({"rows__path": "empty.jsonl"}, "suite sums: rows.path: "),
        ({"rows__path": "broken.jsonl"}, "suite sums: rows.path: broken.jsonl:2: "),
        ({"prompt": {}}, "suites.0.prompt: give either text, or user"),
        ({"prompt__user": "{{ question }}"}, "suites.0.prompt: give either text, or user"),
        ({"prompt__system": "Be kind."}, "suites.0.prompt: system is for conversations"),
        ({"prompt__text": "{{ question"}, "suites.0.prompt.text: is no Jinja template: unexpected end of template"),
        ({"prompt__text": "{% if %}"}, "suites.0.prompt.text: is no Jinja template: "),
        ({"prompt__text": ""}, "suites.0.prompt.text: String should have at least 1 character"),
        (
            {"prompt__text": "{{ qestion }}"},
            "suite sums: prompt: row 1: it has no 'qestion', which text reads; ",
        ),
        ({"prompt__few_shot": {**FEW_SHOT, "count": 0}}, "suites.0.prompt.few_shot.count: "),
        ({"prompt__few_shot": {**FEW_SHOT, "count": 4}}, "suite sums: prompt: row 1: few_shot.count is 4, and"),
        ({"prompt__few_shot": {**FEW_SHOT, "rows": {"path": "x"}}}, "suite sums: prompt.few_shot.rows.path: "),
        ({"prompt__few_shot": {**FEW_SHOT, "answer": "{{ a }}"}}, "it has no 'a', which few_shot.answer reads"),
        ({"samples": 0}, "suites.0.samples: Input should be greater than or equal to 1; got 0"),
        ({"samples": 4}, "suites.0: samples is 4, and sampling.temperature 0 draws the same answer each time"),
        ({"sampling": {"max_token": 4}}, "suites.0.sampling.max_token: unknown key; did you mean 'max_tokens'?"),
        ({"sampling": {"max_tokens": 600}}, "suite sums: rows.path: "),
        ({"metrics": ["acuracy"]}, "suites.0: metrics: unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ({"metrics": ["pass@0"]}, "suites.0: metrics: unknown metric 'pass@0'; did you mean 'pass@1'?"),
        ({"metrics": ["mean", "mean"]}, "suites.0: metrics: mean, mean names one of them twice"),
        ({"metrics": ["pass@2"]}, "suites.0: metrics: pass@2 needs 2 samples of each question, and samples is 1"),
        (
            {"metrics": ["maj@1"], "scorer": {"kind": "schema"}},
            "metrics: maj@1 needs answers to count, which a",
        ),
        ({"scorer": {"kind": "maths"}}, "suites.0.scorer.kind: Input should be "),
        ({"scorer": {"kind": "math", "answer_key": "result"}}, "row 1 has no 'result', which the math reward reads"),
        ({"scorer": {"kind": "regex", "pattern": "("}}, "suites.0.scorer.pattern: '(' is no regular expression"),
        ({"scorer": {"kind": "function", "callable": "none.py:f"}}, "suite sums: scorer: "),
        ({"scorer": {"kind": "sql", "database": "none.db", "answer_key": "answer"}}, "suite sums: scorer: "),
        ({"threshold": "high"}, "suites.0.threshold: Input should be a valid number"),
        ({"prompt": None}, "suite sums: rows.path: sums.jsonl:1: needs prompt or messages; "),
    ],
)
def test_a_bad_suite_is_refused_in_one_line(changes: dict[str, Any], expected: str):
    message = refusal(suite(**changes)).removeprefix("config: ")
    assert expected in message, message


def test_metrics_of_some_samples_are_refused_but_for_pass():
    drawn = functools.partial(suite, samples=4, sampling__temperature=1.0)
    assert "avg@2 is not of all 4 samples; give avg@4" in refusal(drawn(metrics=["avg@2"]))
    assert plan(drawn(metrics=["pass@1", "pass@2", "avg@4"]))["questions"] == {"sums": "4 x 4"}


def test_two_suites_of_one_name_are_refused():
    assert "two suites are named 'sums'; rename one of them" in refusal(QUESTION, QUESTION)


def test_no_suites_are_refused():
    assert "suites is empty; give at least one" in refusal()


def test_what_is_wrong_with_several_suites_is_said_together():
    with pytest.raises(ConfigError) as caught:
        plan(suite(rows__path="none.jsonl"), suite(name="other", prompt__text="{{ q }}"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["suite sums", "suite other"]


def test_an_evaluation_starts_from_no_snapshot():
    assert "run.resume: an evaluation resumes by itself" in refusal(QUESTION, run__resume="latest")


@pytest.mark.parametrize("file", sorted((PROJECT / "examples" / "suites").glob("*.toml")), ids=lambda file: file.stem)
def test_example_suites_are_sound(file: Path, monkeypatch: pytest.MonkeyPatch, work: Path):
    found = load_config(file, Suite)
    model = {"uri": str(work / "model"), "chat_template": TEMPLATE}
    monkeypatch.chdir(PROJECT)
    config = EvalConfig.model_validate({"model": model, "backend": {"kind": "scripted"}, "suites": [found]})
    assert list(plan_suites(config, PROJECT, plain_connections())["questions"]) == [found.name]
