"""The flow that trains an agent: runs to a report, is killed and resumes, and learns from the code it began with."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_core.config import TrainAgentConfig, load_config, parse_config
from tests.flows.conftest import write_toml

pytestmark = pytest.mark.server

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
AGENT = """
import json, os, time
import openai
from rollout_core.agents import rollout


@rollout
def agent(task, llm, rollout):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    with open(os.environ["AGENT_RUNS"], "a") as runs:
        runs.write(json.dumps([rollout.rollout_id, rollout.attempt.attempt_id, "FIRST"]) + "\\n")
    messages = [{"role": "user", "content": task["question"]}]
    answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""
    time.sleep(float(os.environ.get("AGENT_SECONDS", "0")))
    return len(set(answer)) / 10
"""


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent, its tasks, and a model that has a chat template."""
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"sort {number} 1 ="} for number in range(2, 8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held-out.jsonl").write_text('{"question": "sort 9 8 ="}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_RUNS", str(tmp_path / "runs.jsonl"))
    return tmp_path


def document(**runners: Any) -> dict[str, Any]:
    return {
        "num_threads": 1,
        "run": {"name": "agent-test"},
        "agent": {"function": "agent.py:agent", "timeout_seconds": 60},
        "backend": {"kind": "transformers"},
        "runners": {"count": 1, "concurrency": 4, **runners},
        "algorithm": {
            "kind": "grpo",
            "base_model": {"uri": "model"},
            "prompts": {"path": "tasks.jsonl"},
            "iterations": 2,
            "prompts_per_iteration": 3,
            "samples_per_prompt": 4,
            "minibatch_size": 4,
            "sampling": {"max_tokens": 6},
            "optimizer": {"lr": 1e-3},
        },
        "evaluation": {"tasks": {"path": "held-out.jsonl"}, "sampling": {"temperature": 0.0, "max_tokens": 6}},
        "report_dir": "report",
    }


def runs(work: Path) -> list[list[str]]:
    file = work / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def statuses(work: Path) -> dict[str, str]:
    with sqlite3.connect(work / "rollout.db") as database:
        return dict(database.execute("SELECT rollout_id, status FROM rollouts").fetchall())


def runner_processes(work: Path) -> list[psutil.Process]:
    """Runners and the processes that they are forked from, these first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = any("rollout_core.agents.nursery" in part for part in process.cmdline())
            if is_ours and Path(process.cwd()) == work:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


@pytest.mark.parametrize("where", ["processes", "threads"])
def test_an_agent_is_trained_to_a_report_and_again_from_the_cache(prefect_server: str, work: Path, where: str):
    from flows.agent import train_agent

    config = parse_config(document(where=where), TrainAgentConfig)
    first = train_agent(config)
    assert len(first["rewards"]) == 2 and set(first["held_out"]) == {"before", "after"}
    page = (Path(first["report"]) / "index.html").read_text()
    assert "agent.py:agent" in page and "run_agents" in page
    done = runs(work)
    assert len(done) == 2 * 3 * 4 + 2 and len({rollout for rollout, _, _ in done}) == len(done)
    again = train_agent(config)
    assert (again["model"], again["rewards"]) == (first["model"], first["rewards"])
    assert runs(work) == done


RUN = """
import sys
from rollout_core.config import TrainAgentConfig, load_config
from flows.agent import train_agent
print(train_agent(load_config("run.toml", TrainAgentConfig))["model"])
"""


def train_again() -> str:
    from flows.agent import train_agent

    return train_agent(load_config("run.toml", TrainAgentConfig))["model"]


def test_killed_in_the_middle_and_started_again_no_finished_rollout_is_run_again(
    prefect_server: str, work: Path, start_process: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_SECONDS", "0.5")
    write_toml(work / "run.toml", document())
    process = start_process("-c", RUN, cwd=work, stdout=(work / "run.log").open("w"))
    deadline = time.monotonic() + 180
    while len(runs(work)) < 8:  # in the first iteration, some of them under way
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    finished = {rollout: status for rollout, status in statuses(work).items() if status == "succeeded"}
    assert finished and len(finished) < 13
    before = runs(work)
    psutil.wait_procs(runner_processes(work), timeout=120)
    assert not runner_processes(work), "runners outlive the flow by no more than a moment"
    resumed = train_again()
    again = runs(work)[len(before) :]
    assert not {rollout for rollout, _, _ in again} & set(finished)
    done = Counter(status for status in statuses(work).values())
    assert done == {"succeeded": 2 * 3 * 4 + 2}
    # The update is made of the stored spans alone: computed afresh, with the same database, it is the same.
    before = runs(work)
    monkeypatch.setenv("ROLLOUT_STORAGE", str(work / "other-objects"))
    assert train_again() == resumed and runs(work) == before


def test_an_agent_that_is_edited_in_the_middle_is_the_one_that_was_read(
    prefect_server: str, work: Path, start_process: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_SECONDS", "0.2")
    write_toml(work / "run.toml", document(max_restarts=3))
    process = start_process("-c", RUN, cwd=work, stdout=(work / "run.log").open("w"))
    deadline = time.monotonic() + 180
    while len(runs(work)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (work / "agent.py").write_text(AGENT.replace("FIRST", "SECOND"))
    for runner in runner_processes(work)[1:]:
        runner.kill()  # its successor must load the agent anew
    assert process.wait(300) == 0, (work / "run.log").read_text()
    assert {version for _, _, version in runs(work)} == {"FIRST"}
    assert set(statuses(work).values()) == {"succeeded"}
