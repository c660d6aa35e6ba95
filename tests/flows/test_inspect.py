"""Evaluations by tasks of inspect_ai: what is killed goes on with the answers that are kept and comes to the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from flows.evaluate import evaluate_suites
from rollout_core.base.errors import Fatal
from rollout_core.config import EndpointModel, EvalConfig, SamplingParams
from rollout_core.data.samples import decode_completions_blob, decode_samples
from rollout_core.inference.backend import Request
from rollout_core.inference.endpoint_model import body_of
from rollout_core.inference.kept_chat import LONGEST_ANSWER
from rollout_core.inference.spending import Account
from rollout_core.runs.evaluations import evaluated_models
from rollout_core.runs.run_records import RunRecords
from tasks.runtime import artifacts
from tests.evaluation import inspected
from tests.flows.conftest import finished_samples, objects, wait_for
from tests.flows.test_evaluate import ROLLOUT, evaluate, last_states
from tests.support.answer_server import AnswerServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> Path:
    shutil.copy(str(inspected.__file__), tmp_path / "tasks.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def suite(**changes: Any) -> dict[str, Any]:
    given = {"kind": "inspect", "name": "theirs", "tasks": ["tasks.py@sums"], "generate_config": {"max_tokens": 16}}
    return {**given, **changes}


def test_a_model_answers_once_and_its_answers_are_those_of_a_chat(
    folder: Path, chat_base: Path, monkeypatch: pytest.MonkeyPatch
):
    shown: list[tuple[Any, ...]] = []
    show = artifacts.ProgressBar.show

    def note(bar: Any, *given: Any) -> None:
        shown.append(given)
        show(bar, *given)

    monkeypatch.setattr(artifacts.ProgressBar, "show", note)
    [report] = evaluate(chat_base, suite(max_connections=1))
    # One is asked at a time, and how many there are is known from the first.
    assert [(done, total) for done, total, _ in shown[:6]] == [(done, 6) for done in range(1, 7)]
    assert {figures for _, _, figures in shown} == {"6 questions"}
    assert (report.num_questions, report.num_samples, finished_samples()) == (6, 12, 12)
    samples = decode_samples(objects().get_bytes(report.samples))
    rows = decode_completions_blob(objects().get_bytes(report.completions))
    assert len({row.text for row in rows}) > 6, "epochs draw anew, at temperature 1"
    assert [row.id for row in rows] == [sample.id for sample in samples]
    assert evaluate(chat_base, suite()) == [report] and finished_samples() == 12
    assert {state for title, state in last_states().items() if not title.startswith("import_")} == {"Cached"}
    [more] = evaluate(chat_base, suite(limit=2))
    assert finished_samples() == 12 and (more.num_questions, more.suite_id != report.suite_id) == (2, True)
    listed = CliRunner().invoke(app, ["eval", "list"])
    assert f"accuracy {more.headline.value:.4f}" in listed.stdout, listed.stdout


def test_killed_while_it_answers_the_next_run_goes_on_and_comes_to_the_same_report(
    folder: Path, chat_base: Path, start_process: Any, prefect_server: str
):
    call = '<tool_call>{"name":"add","arguments":{"x":2,"y":1}}</tool_call>'
    (folder / "theirs.toml").write_text(
        f'kind = "inspect"\nname = "theirs"\ntasks = ["{folder}/tasks.py@acting", "{folder}/tasks.py@sums"]\n'
        "max_connections = 2\n"
        "generate_config = { max_tokens = 100 }\n"
    )
    slow = ("--backend", "scripted", "--set", "backend.delay_seconds=0.5", "--set", f"backend.text='{call}'")

    def run() -> subprocess.Popen[str]:
        environment = {"PREFECT_API_URL": prefect_server, "COLUMNS": "200"}
        command = ("eval", "run", str(chat_base), "--suite", str(folder / "theirs.toml"), *slow)
        return start_process(*ROLLOUT, *command, env=environment)

    for least in (3, 8):
        process = run()
        wait_for(lambda least=least: finished_samples() >= least, f"{least} answers", process=process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert least <= finished_samples() < 16
    process = run()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-4000:]
    assert finished_samples() == 16
    assert re.search(r"^theirs +acting/accuracy +0\.0000 ", output, re.MULTILINE), output[-4000:]
    [model] = evaluated_models(RunRecords(objects()))
    report = model.reports["theirs"]
    assert (report.num_questions, report.num_samples) == (8, 16)
    samples = decode_samples(objects().get_bytes(report.samples))
    assert [len(sample.prompt) for sample in samples[:4]] == [1, 3, 1, 3]


@pytest.mark.parametrize("who", [pytest.param("model", marks=pytest.mark.campaign), "grader"])
def test_what_a_cached_stage_took_counts_in_the_budgets_of_model_and_grader(folder: Path, who: str):
    source = (folder / "tasks.py").read_text()
    (folder / "more.py").write_text(source.replace("def judged", "def judged_again"))
    answers = {**{f"sort {n} 1": str(n % 2) for n in range(2, 8)}, "grade 1": "yes", "grade 0": "no"}
    with AnswerServer(answers) as server, AnswerServer(answers) as judge:
        asked = {"model": server, "grader": judge}[who]
        endpoints = {name: endpoint(name, {"model": server, "grader": judge}[name]) for name in ("model", "grader")}
        request = Request("", (), SamplingParams(max_tokens=16 if who == "model" else LONGEST_ANSWER), 0)
        text = "sort 2 1" if who == "model" else "grade 1"
        asking = replace(request, messages=[{"role": "user", "content": text}])
        config = endpoints[who]
        limit = Account(config).most(body_of(config, asking), request.params.max_tokens).tokens + 35
        suites = [
            suite(name=name, tasks=[task], model_roles={"grader": endpoints["grader"].model_dump(mode="json")})
            for name, task in (("one", "tasks.py@judged"), ("two", "more.py@judged_again"))
        ]

        def run(num_suites: int, tokens: int) -> None:
            budgeted = [json.loads(json.dumps(suite)) for suite in suites[:num_suites]]
            model = endpoints["model"].model_dump(mode="json")
            for table in [model] if who == "model" else [each["model_roles"]["grader"] for each in budgeted]:
                table["budget"] = {"tokens": tokens}
            evaluate_suites(EvalConfig.model_validate({"run": {"name": "paid"}, "model": model, "suites": budgeted}))

        run(1, limit)
        assert len(asked.asked) == 4
        with pytest.raises(Fatal, match=rf"generation has taken 40 of {limit:,} tokens of its budget"):
            run(2, limit)
        assert len(asked.asked) == 4
        run(2, 100_000)
    records = RunRecords(objects())
    facts = records.detail(records.heads()[0])[1].facts
    assert facts[f"endpoint {who} at {asked.url}"] == "8 answers, 56 tokens of prompts and 24 of answers"


def endpoint(name: str, server: AnswerServer) -> EndpointModel:
    return EndpointModel(kind="endpoint", url=server.url, model=name, max_retries=0)
