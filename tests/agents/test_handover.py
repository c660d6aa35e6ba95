"""What runner processes get: agents by name, values by value, nothing of the program's connections and threads."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from rollout_core.agents import (
    Baseline,
    ClientServerExecutionStrategy,
    Hook,
    LitAgentRunner,
    OtelTracer,
    Trainer,
    rollout,
    runner_processes as processes,
)
from rollout_core.agents.emitters import find_final_reward
from rollout_core.agents.handover import CannotBeImported, packed, unpacked
from rollout_core.store import LLM, InMemoryLightningStore
from tests.agents import handed_over
from tests.store.patience import LONG

ROOT = Path(__file__).parents[2]
PLAIN = {"format": "%(levelname)s %(message)s", "datefmt": "%H"}
RESOURCES = {"main": LLM(endpoint="http://localhost:9/v1", model="m")}


def test_an_agent_is_found_by_its_name_and_another_ones_values_are_copied():
    assert unpacked(packed(handed_over.doubles)) is handed_over.doubles
    assert unpacked(packed(handed_over.LOCKED)) is handed_over.LOCKED, "a lock has no copy, but a name leads to it"
    copied = unpacked(packed(handed_over.Holds(5.0)))
    assert isinstance(copied, handed_over.Holds) and copied.factor == 5.0


def test_what_the_program_has_set_on_an_agent_comes_with_its_name(monkeypatch):
    monkeypatch.setattr(handed_over.LOCKED, "factor", 10.0)
    work = packed(handed_over.LOCKED)
    monkeypatch.setattr(handed_over.LOCKED, "factor", 3.0)
    assert unpacked(work).factor == 10.0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (
            {"format": "%(levelname)s %(message)s", "datefmt": "%H"},
            {"text_format": "%(levelname)s %(message)s", "datefmt": "%H"},
        ),
        ({"format": "{levelname} {message}", "style": "{"}, {}),
        ({"format": "%(of_a_filter)s %(message)s"}, {}),
    ],
)
def test_runners_log_as_the_program_does_where_they_can(monkeypatch, options, kept):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    assert processes._logging() is None
    logging.basicConfig(level=logging.INFO, **options)
    assert processes._logging() == {"level": logging.INFO, **kept}


def test_what_cannot_be_handed_over_is_named():
    @rollout
    def local(task, llm):
        return 1.0

    class Local(Hook):
        pass

    with pytest.raises(CannotBeImported, match=r"agent .*test_handover\S*<locals>\.local is no global of its module"):
        packed(local)
    with pytest.raises(CannotBeImported, match=r"lock \(lock\) cannot be handed .*strategy='shm'"):
        packed(handed_over.Holds(1.0, threading.Lock()))
    with pytest.raises(CannotBeImported, match="Local"):
        packed((handed_over.doubles, Local()))


def test_a_file_that_changed_since_the_run_began_is_not_run(tmp_path, monkeypatch):
    module = tmp_path / "agent_of_a_day.py"
    module.write_text("from tests.agents.handed_over import Holds\nclass Mine(Holds):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import agent_of_a_day  # pyright: ignore[reportMissingImports] - written above

    try:
        work = packed(agent_of_a_day.Mine(2.0))
        assert unpacked(work).factor == 2.0
        module.write_text(module.read_text() + "# changed\n")
        with pytest.raises(CannotBeImported, match=r"agent_of_a_day.py changed since the run began"):
            unpacked(work)
    finally:
        del sys.modules["agent_of_a_day"]


def fitted(agent, strategy) -> list[float | None]:
    store = InMemoryLightningStore()
    Trainer(
        algorithm=Baseline(span_verbosity="none"),
        n_runners=2,
        store=store,
        strategy=strategy,
        initial_resources=RESOURCES,
        tracer=OtelTracer(instrument=[]),
        runner={"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0},
    ).fit(agent, [1, 2, 3])

    async def rewards():
        return [find_final_reward(await store.query_spans(one.rollout_id)) for one in await store.query_rollouts()]

    return sorted(asyncio.run(rewards()))


def test_an_agent_of_a_function_runs_in_threads_by_default_and_is_refused_where_processes_are_asked_for(caplog):
    seen = []

    @rollout
    def local(task, llm):
        seen.append(os.getpid())
        return 2.0 * task

    assert fitted(local, None) == [2.0, 4.0, 6.0]
    assert set(seen) == {os.getpid()}
    assert "The runners are threads of this process" in caplog.text and "local is no global" in caplog.text
    with pytest.raises(CannotBeImported, match="local is no global"):
        fitted(local, ClientServerExecutionStrategy(server_port=0))


HEAD = """
    import http.server, json, os, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    import httpx
    from rollout_core.agents import Baseline, LitAgent, OtelTracer, Trainer, rollout
    from rollout_core.store import LLM, InMemoryLightningStore

    client = httpx.Client(timeout=60)
    pool = ThreadPoolExecutor(2)

    def fit(agent, llm=LLM(endpoint="http://localhost:9/", model="m")):
        tracer = OtelTracer(instrument=[])
        Trainer(
            algorithm=Baseline(span_verbosity="none"), n_runners=3, initial_resources={"llm": llm}, tracer=tracer,
            strategy={"type": "cs", "server_port": 0}, store=InMemoryLightningStore(),
        ).fit(agent, list(range(30)))
"""

CROSSING = """
    class Echo(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(0.005)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *arguments):
            pass

    @rollout
    def agent(task, llm):
        question = f"question {task}"
        answer = pool.submit(lambda: client.post(llm.endpoint, content=question).text).result()
        os.write(1, f"{os.getpid()} {question} {answer}\\n".encode())
        return float(answer == question)

    if __name__ == "__main__":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        llm = LLM(endpoint=f"http://127.0.0.1:{server.server_port}/", model="m")
        assert pool.submit(lambda: client.post(llm.endpoint, content="tried").text).result() == "tried"
        for _ in range(2):
            fit(agent, llm)
"""


def ran(folder: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG)


def test_a_client_and_a_pool_that_the_program_has_used_are_not_shared_by_its_runners(tmp_path):
    """Both of two runs in one program: forked runners read each other's answers from the one open connection, and a
    pool's threads were not there."""
    done = ran(tmp_path, CROSSING)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    assert len(lines) == 60 and all(line[1:3] == line[3:5] for line in lines), done.stdout


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("@rollout\ndef agent(task, llm):\n    return 1.0\n\nfit(agent)\n", "program.py, which each runner's process"),
        (
            "@rollout\ndef agent(task, llm):\n    return 1.0\n\nif __name__ == '__main__':\n    pass\nfit(agent)\n",
            "starts a run wherever it is imported",
        ),
        (
            "class Agent(LitAgent):\n    def rollout(self, *_):\n        return 1.0\n\n"
            "if __name__ == '__main__':\n    class Other(Agent):\n        pass\n    fit(Other())\n",
            "the script defines Other only under",
        ),
        (
            "if __name__ == '__main__':\n    @rollout\n    def agent(task, llm):\n        return 1.0\n    fit(agent)\n",
            "agent __main__.agent is no global of its module",
        ),
    ],
)
def test_a_script_that_cannot_be_imported_is_refused_by_name(tmp_path, body, error):
    done = ran(tmp_path, body)
    assert done.returncode == 1 and error in done.stderr, done.stderr
    assert done.stdout == ""
