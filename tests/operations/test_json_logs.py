"""Logs in JSON of whole programs: flow runs with what Prefect itself writes, servers with uvicorn's lines, runners."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import PROJECT
from tests.flows.conftest import wait_for, write_toml

SECONDS = 300
FLOW = """
import logging
from prefect import flow, get_run_logger, task
from tasks.runtime import prefect_logs

log = logging.getLogger("rollout_core.somewhere")
log.setLevel(logging.INFO)

@task
def work():
    get_run_logger().info("of the task")
    log.info("of the library, in the task")
    raise ValueError("the task's end")

@flow
def run():
    get_run_logger().warning("of the flow")
    log.info("of the library")
    work(return_state=True)

run()
"""

RUNNERS = """
import logging
from rollout_core.agents import LitAgent, Trainer

class Agent(LitAgent):
    def training_rollout(self, task, resources, rollout):
        logging.getLogger("agent").warning("works on %s", rollout.rollout_id)
        return 1.0

if __name__ == "__main__":
    strategy = {"type": "cs", "main_process": "algorithm"}
    Trainer(n_runners=2, strategy=strategy).dev(Agent(), train_dataset=[{"a": 1}, {"a": 2}])
"""


def lines_of(text: str) -> list[dict[str, Any]]:
    """Each line of the text as an object."""
    return [json.loads(line) for line in text.splitlines()]


def environment(**others: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT), "ROLLOUT_LOG": "json", **others}


@pytest.mark.server
def test_each_record_of_a_flow_is_one_line_with_the_ids_of_its_run(prefect_server, tmp_path):
    file = tmp_path / "flow.py"
    file.write_text(FLOW)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=environment(PREFECT_API_URL=prefect_server),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stderr)
    found = {line["message"]: line for line in lines}
    for message in ("of the flow", "of the library"):
        assert found[message]["flow_run_id"] and "task_run_id" not in found[message]
    flow_run = found["of the flow"]["flow_run_id"]
    for message in ("of the task", "of the library, in the task"):
        assert (found[message]["flow_run_id"], bool(found[message]["task_run_id"])) == (flow_run, True)
    assert Counter(line["message"] for line in lines if line["message"].startswith("of the")).most_common(1)[0][1] == 1
    assert [line for line in lines if "the task's end" in line.get("exception", "")]
    assert {"prefect.flow_runs", "prefect.task_runs", "rollout_core.somewhere"} <= {line["logger"] for line in lines}


@pytest.mark.server
def test_a_run_of_the_command_writes_json_alone(prefect_server, tiny_model, tmp_path):
    (tmp_path / "sft.jsonl").write_text('{"prompt": "sort 2 1 =", "completion": " 1 2"}\n' * 4)
    tables = {
        "run": {"name": "json"},
        "algorithm": {
            "kind": "sft",
            "base_model": {"uri": str(tiny_model)},
            "dataset": {"path": "sft.jsonl"},
            "sequence": {"max_length": 64},
            "budget": {"max_steps": 1},
            "minibatch_size": 2,
            "optimizer": {"lr": 1e-3},
        },
    }
    write_toml(tmp_path / "sft.toml", tables)
    command = [sys.executable, "-m", "rollout_core", "train", "sft", "--config", "sft.toml"]
    done = subprocess.run(
        command,
        env=environment(PREFECT_API_URL=prefect_server, PREFECT_LOGGING_LEVEL="INFO"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stderr)
    ids = {line["flow_run_id"] for line in lines if "flow_run_id" in line}
    assert len(ids) == 1
    assert any(line.get("task_run_id") for line in lines)


def test_every_process_of_a_store_server_writes_json_uvicorn_too(tmp_path):
    log, options = tmp_path / "log", ["--workers", "2", "--port", "0", "--database", f"sqlite:///{tmp_path}/store.db"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "rollout_core", "store", "serve", *options],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        assert server.stdout is not None
        address = next(line.split()[-1] for line in server.stdout if line.startswith("serving at"))
        place = (urlsplit(address).hostname, urlsplit(address).port)
        with contextlib.closing(socket.create_connection(place)) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            connection.recv(1000)
        wait_for(lambda: "Invalid HTTP request" in log.read_text(), "uvicorn has written a line")
    finally:
        server.terminate()
        server.wait(SECONDS)
        assert server.stdout is not None
        server.stdout.close()
    lines = lines_of(log.read_text())
    [line] = [line for line in lines if "Invalid HTTP request" in line["message"]]
    assert line["logger"] == "uvicorn.error" and line["level"] == "WARNING" and line["process"] != server.pid


def test_runners_write_json_with_the_ids_of_what_they_work_on(tmp_path):
    file = tmp_path / "agents.py"
    file.write_text(RUNNERS)
    done = subprocess.run(
        [sys.executable, str(file)], env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in lines_of(done.stderr) if line["logger"] == "agent"]
    assert len(found) == 2
    for line in found:
        assert line["message"] == f"works on {line['rollout_id']}" and line["attempt_id"]
