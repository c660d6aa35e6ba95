"""Evaluations by suites: what is reported, that nothing is generated twice, and that a killed one goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.config import EvalConfig
from rollout_core.evaluation.reports import SuiteReport, compare_reports
from rollout_core.inference import engines
from rollout_core.runs.evaluations import evaluated_models, find_evaluated
from rollout_core.runs.run_records import RunRecords
from tests.flows.conftest import finished_samples, objects, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ROLLOUT = ("-c", "from flows.cli import main; main()")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> Path:
    rows = [{"question": f"sort {n} 1", "answer": f"1 {n}", "id": f"q{n}"} for n in range(2, 8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"sort {n} 1 =", "answer": "sort 3"} for n in range(2, 6)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sums(**changes: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "samples": 4,
        "rows": {"path": "sums.jsonl"},
        "prompt": {
            "text": "{{ question }} =",
            "few_shot": {"rows": {"path": "sums.jsonl"}, "count": 2, "answer": " {{ answer }}", "separator": " "},
        },
        "sampling": {"temperature": 1.0, "max_tokens": 8},
        "scorer": {"kind": "regex", "pattern": r"(\d)", "answer_key": "answer"},
        **changes,
    }


PLAIN = {
    "name": "plain",
    "rows": {"path": "plain.jsonl"},
    "sampling": {"temperature": 0.0, "max_tokens": 32},
    "scorer": {"kind": "text", "compare": "contains"},
}


def evaluate(model: Path, *suites: dict[str, Any], kind: str = "transformers") -> list[SuiteReport]:
    from flows.evaluate import evaluate_suites

    config = EvalConfig.model_validate({"model": {"uri": str(model)}, "backend": {"kind": kind}, "suites": suites})
    return [SuiteReport.model_validate(report) for report in evaluate_suites(config)["reports"]]


def last_states() -> dict[str, str]:
    """Of the stages of the last run, by title."""
    records = RunRecords(objects())
    _, detail = records.detail(records.find("latest"))
    return {f"{call.stage} {call.label}".strip(): call.state for call in detail.calls}


def test_answers_are_scored_reported_and_compared(folder: Path, tiny_model: Path, other_tiny_model: Path):
    [report] = evaluate(tiny_model, PLAIN, kind="scripted")  # answers SCRIPTED: and the prompt
    assert [(metric.name, metric.value) for metric in report.metrics] == [("mean", 0.25), ("accuracy", 0.25)]
    accuracy = report.headline
    assert (accuracy.lower, accuracy.upper) == pytest.approx((0.045587, 0.699358), abs=1e-5)  # Wilson's of 1 in 4
    filed = objects().get_json(report.questions)
    assert filed["ids"] == ["1", "2", "3", "4"] and filed["places"] == [0, 1, 2, 3]
    assert filed["values"] == {"mean": [0, 1, 0, 0], "accuracy": [0, 1, 0, 0]}

    [other] = evaluate(other_tiny_model, PLAIN, kind="transformers")
    compared = compare_reports(objects(), report, other)
    assert [(flip.question, flip.shares) for flip in compared.lost] == [("2", (1.0, 0.0))] and not compared.gained
    assert compared.lost[0].completions[0] == "SCRIPTED:sort 3 1 ="
    assert (compared.gains["accuracy"].gain, compared.gains["accuracy"].num_prompts) == (-0.25, 4)

    models = evaluated_models(RunRecords(objects()))
    assert [model.model for model in models] == [other.model, report.model]
    assert find_evaluated(models, report.model[:6]).reports == {"plain": report}
    assert find_evaluated(models, str(other_tiny_model)).model == other.model

    listed = CliRunner().invoke(app, ["eval", "list"])
    assert listed.exit_code == 0, listed.stderr
    head, *rows = listed.stdout.splitlines()
    assert head.split() == ["model", "from", "evaluated", "plain"]
    assert [row.split()[0] for row in rows] == [other.model[:12], report.model[:12]]
    assert "accuracy 0.2500 (0.0456 to 0.6994)" in rows[1]
    both = ["eval", "compare", report.model[:8], str(other_tiny_model)]
    told = CliRunner().invoke(app, both).stdout
    assert re.search(r"^accuracy +0\.2500 +0\.0000 +-0\.2500 +-\S+ to \+0\.0000 +4$", told, re.MULTILINE), told
    assert "questions that flipped: 1 lost, 0 gained\nlost 2: sort 3 1 =\n    SCRIPTED:sort 3 1 =\n" in told
    document = json.loads(CliRunner().invoke(app, [*both, "--format", "json"]).stdout)
    assert document["models"] == [report.model, other.model]
    assert document["suites"][0]["lost"]["count"] == 1 and document["not_compared"] == []

    (folder / "plain.jsonl").write_text('{"prompt": "sort 9 1 =", "answer": "9"}\n')
    evaluate(other_tiny_model, PLAIN, kind="scripted")
    refused = CliRunner().invoke(app, both)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "suite plain was changed between the two evaluations" in refused.stderr

    # What was filed of an evaluation may be gone, by housekeeping say.
    [again] = evaluate(tiny_model, PLAIN, kind="scripted")
    objects().files.delete(objects()._key(again.questions))
    gone = CliRunner().invoke(app, both)
    assert (gone.exit_code, gone.stdout) == (2, "")
    assert re.fullmatch(r"rollout: the answers to plain are not in .* evaluate the model again\n", gone.stderr)


def test_one_engine_answers_all_suites_and_a_second_evaluation_generates_nothing(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[str] = []
    start = engines.build_backend

    def counted(config: Any, *arguments: Any, **options: Any) -> Any:
        started.append(config.kind)
        return start(config, *arguments, **options)

    monkeypatch.setattr(engines, "build_backend", counted)
    first = evaluate(tiny_model, sums(), PLAIN)
    assert started == ["transformers"]
    assert first[0].num_samples == 24 and first[0].num_questions == 6
    assert [metric.name for metric in first[0].metrics] == ["mean", "avg@4", "pass@4", "maj@4"]
    answers = finished_samples()

    assert evaluate(tiny_model, sums(), PLAIN) == first
    states = last_states()
    assert {state for title, state in states.items() if not title.startswith("import_")} == {"Cached"}
    # Another threshold is another report of the same answers and scores; another scorer, other scores of the answers.
    [looser] = evaluate(tiny_model, sums(threshold=0.0))
    assert looser.headline.value == 1.0 and looser.suite_id != first[0].suite_id
    assert [title for title, state in last_states().items() if state == "Completed"] == ["report_suite sums"]
    [other] = evaluate(tiny_model, sums(scorer={"kind": "text", "compare": "numeric"}))
    assert other.suite_id != first[0].suite_id and other.completions == first[0].completions
    assert started == ["transformers"] and finished_samples() == answers


def test_killed_while_it_answers_the_next_run_goes_on_and_comes_to_the_same_report(
    folder: Path, tiny_model: Path, start_process: Any, prefect_server: str
):
    questions = [{"question": f"sort {n} {n + 1}", "answer": str(n % 7), "id": f"q{n}"} for n in range(60)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "sums.toml").write_text(
        f'name = "sums"\nsamples = 4\nrows = {{ path = "{folder}/sums.jsonl" }}\n'
        'prompt = { text = "{{ question }} =" }\n'
        'sampling = { temperature = 1.0, max_tokens = 64 }\nscorer = { kind = "text", compare = "contains" }\n'
    )
    slow = ("--backend", "scripted", "--set", "backend.delay_seconds=0.03")

    def run() -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200"}
        command = ("eval", "run", str(tiny_model), "--suite", str(folder / "sums.toml"), *slow)
        return start_process(*ROLLOUT, *command, env=environment)

    process = run()
    wait_for(lambda: finished_samples() >= 20, "20 answers", process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = finished_samples()
    assert 20 <= kept < 240
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 240
    assert re.search(r"^sums +avg@4 ", output, re.MULTILINE), output[-4000:]
    [model] = evaluated_models(RunRecords(objects()))
    resumed = model.reports["sums"]
    values = objects().get_json(resumed.questions)["values"]["mean"]
    wanted = [float(row["answer"] in f"SCRIPTED:{row['question']} =") for row in questions]
    assert 0 < sum(wanted) < 60 and values == wanted and resumed.num_samples == 240
