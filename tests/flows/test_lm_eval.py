"""Evaluations by tasks of lm-evaluation-harness: a model's scores are those that it has there, and nothing is generated
twice, whatever is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from deployments.cli import app
from rollout_core.data.continuations import Loglikelihood
from rollout_core.data.samples import decode_completions_blob
from rollout_core.runs.evaluations import evaluated_models
from rollout_core.runs.run_records import RunRecords
from tests.evaluation.lm_eval_tasks import write_tasks
from tests.evaluation.test_lm_eval import figures
from tests.flows.conftest import finished_samples, objects, wait_for
from tests.flows.test_evaluate import ROLLOUT, evaluate, last_states

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
TASKS = ["sums", "several"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return write_tasks(tmp_path)


def suite(**changes: Any) -> dict[str, Any]:
    return {"kind": "lm_eval", "name": "sums", "tasks": TASKS, "include_path": ".", "bootstrap_iters": 200, **changes}


def test_a_models_scores_are_those_that_it_has_there_and_come_from_what_is_stored(folder: Path, tiny_model: Path):
    [found] = evaluate(tiny_model, suite())
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=str(tiny_model), device="cpu", dtype="float32", batch_size=1)
    theirs = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=200)
    assert theirs is not None
    filed = objects().get_json(found.questions)
    assert figures(filed["lm_eval"]) == figures(theirs)
    answers = [
        example["resps"]
        for task in TASKS
        for example in theirs["samples"][task]
        if example["filter"] in ("strict", "none")
    ]
    texts = [row.text for row in decode_completions_blob(objects().get_bytes(found.completions))]
    assert [[[text]] for text in texts] == answers
    assert found.num_questions == found.num_samples == 12

    generated = finished_samples()
    assert evaluate(tiny_model, suite()) == [found] and finished_samples() == generated
    assert {state for title, state in last_states().items() if not title.startswith("import_")} == {"Cached"}
    [more] = evaluate(tiny_model, suite(tasks=["sums"]))
    assert finished_samples() == generated and more.suite_id != found.suite_id
    listed = CliRunner().invoke(app, ["eval", "list"])
    assert "sums/exact_match,strict" in listed.stdout or "exact_match,strict" in listed.stdout, listed.stdout


def test_log_likelihoods_are_those_that_it_has_there(folder: Path, tiny_model: Path):
    tasks = ["chosen", "told", "read"]
    [found] = evaluate(tiny_model, suite(tasks=tasks))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=str(tiny_model), device="cpu", dtype="float32", batch_size=1)
    theirs = simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=200)
    assert theirs is not None
    ours = figures(objects().get_json(found.questions)["lm_eval"])
    for entry, figured in figures(theirs).items():
        numbers = {name: value for name, value in figured.items() if isinstance(value, float | int)}
        assert {name: ours[entry][name] for name in numbers} == pytest.approx(numbers, rel=1e-4), entry
    scored = [Loglikelihood.of(row) for row in decode_completions_blob(objects().get_bytes(found.completions))]
    answers = [resp for task in tasks for example in theirs["samples"][task] for [resp] in example["resps"]]
    assert len(scored) == len(answers) == 30
    for one, answer in zip(scored, answers, strict=True):
        assert one.total == pytest.approx(answer[0] if isinstance(answer, tuple | list) else answer, rel=1e-4)
        assert not isinstance(answer, tuple | list) or one.is_greedy == answer[1]
    assert (found.num_questions, found.num_samples) == (18, 30)


def test_killed_while_it_answers_the_next_run_goes_on_and_comes_to_the_same_report(
    folder: Path, tiny_model: Path, start_process: Any, prefect_server: str
):
    (folder / "sums.toml").write_text(
        f'kind = "lm_eval"\nname = "sums"\ntasks = ["repeated"]\ninclude_path = "{folder}"\n'
        "gen_kwargs = { max_gen_toks = 64 }\n"
    )
    slow = ("--backend", "scripted", "--set", "backend.delay_seconds=0.5")

    def run() -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200", "HF_HOME": os.environ["HF_HOME"]}
        command = ("eval", "run", str(tiny_model), "--suite", str(folder / "sums.toml"), *slow)
        return start_process(*ROLLOUT, *command, env=environment)

    process = run()
    wait_for(lambda: finished_samples() >= 4, "4 answers", process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = finished_samples()
    assert 4 <= kept < 18
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 18
    assert re.search(r"^sums +exact_match,majority +0\.0000 ", output, re.MULTILINE), output[-4000:]
    [model] = evaluated_models(RunRecords(objects()))
    assert model.reports["sums"].num_samples == 18 and model.reports["sums"].num_questions == 6
