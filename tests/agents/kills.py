"""A campaign of kills against a run that trains an agent: ``python -m tests.agents.kills [--rounds N] [--vllm]``.

A run of 16 runners in 4 processes over HTTP is started again and again while, at random moments, a runner, the
engine's process or the flow itself (with store server, proxy and queue in it) gets SIGKILL. In the end every task has
exactly one attempt that succeeded, its reward is the agent's, no span stands under another rollout, and no finished
rollout was run again. Prints a line for each campaign.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "examples")]

from tests.flows.conftest import write_toml  # noqa: E402

AGENT = """
import json, os, random, time
import openai
from rollout_core.agents import emit_annotation, rollout


@rollout
def agent(task, llm, rollout):
    with open(os.environ["AGENT_RUNS"], "a") as runs:
        runs.write(json.dumps([rollout.rollout_id, rollout.attempt.attempt_id]) + "\\n")
    emit_annotation({"whose": rollout.rollout_id, "attempt": rollout.attempt.attempt_id})
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=5)
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "9"}]
        time.sleep(random.random() / 2)
    return task["number"] / 10 + len(answer) / 1000
"""
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
RUN = """
from rollout_core.config import TrainAgentConfig, load_config
from flows.agent import train_agent
if __name__ == "__main__":
    print(train_agent(load_config("run.toml", TrainAgentConfig))["model"])
"""


def prepare(folder: Path, *, vllm: bool) -> None:
    """Agent, tasks, model and configuration."""
    from make_tiny import make_model

    # vLLM's attention on a CPU takes no heads of 16.
    make_model(folder / "model", hidden_size=256 if vllm else 64, num_layers=2, seed=1)
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.py").write_text(RUN)
    rows = [{"question": f"sort {number % 10} 1 =", "number": number} for number in range(24)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm: dict[str, Any] = {
        "kind": "grpo",
        "base_model": {"uri": "model"},
        "prompts": {"path": "tasks.jsonl"},
        "iterations": 3,
        "prompts_per_iteration": 12,
        "samples_per_prompt": 4,
        "minibatch_size": 16,
        "sampling": {"max_tokens": 8},
        "optimizer": {"lr": 1e-4},
    }
    document = {
        "num_threads": 1,
        "run": {"name": "kills"},
        # Enough attempts that bad luck alone does not use them up.
        "agent": {"function": "agent.py:agent", "timeout_seconds": 60, "max_attempts": 20},
        "backend": {"kind": "vllm", "max_model_len": 64} if vllm else {"kind": "transformers"},
        "runners": {"count": 4, "concurrency": 4, "max_restarts": 20, "worker_timeout_seconds": 5},
        "algorithm": algorithm,
        "report_dir": "report",
    }
    write_toml(folder / "run.toml", document)


def processes(root: int, mark: str) -> list[psutil.Process]:
    """Below ``root``, those whose command or name holds ``mark``."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if mark in " ".join([process.name(), *process.cmdline()]):
                    found.append(process)
    return found


def statuses(folder: Path) -> dict[str, str]:
    """Of all rollouts so far."""
    database = folder / "rollout.db"
    if not database.exists():
        return {}
    with contextlib.suppress(sqlite3.Error), sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return dict(connection.execute("SELECT rollout_id, status FROM rollouts").fetchall())
    return {}


def runs_of(folder: Path) -> list[list[str]]:
    """A rollout and its attempt for each time that the agent was called."""
    file = folder / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def campaign(folder: Path, number: int, *, vllm: bool, pause: tuple[float, float]) -> Counter[str]:
    """One run to its end, with kills on the way. Raises AssertionError for what must not be."""
    chance, kills = random.Random(number), Counter[str]()
    prepare(folder, vllm=vllm)
    environment = {
        **os.environ,
        "AGENT_RUNS": str(folder / "runs.jsonl"),
        "ROLLOUT_STORAGE": f"file://{folder / 'objects'}",
        "ROLLOUT_DATABASE": f"sqlite:///{folder / 'rollout.db'}",
        "ROLLOUT_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(PROJECT),
    }
    started = time.monotonic()
    while True:
        finished = {rollout for rollout, status in statuses(folder).items() if status == "succeeded"}
        before = settled = len(runs_of(folder))
        with (folder / "log").open("ab") as log:
            flow = subprocess.Popen([sys.executable, "run.py"], cwd=folder, env=environment, stdout=log, stderr=log)
        was_killed = False
        while flow.poll() is None:
            assert time.monotonic() - started < 1800, "the run does not end"
            with contextlib.suppress(subprocess.TimeoutExpired):
                flow.wait(chance.uniform(*pause))
            if flow.poll() is not None:
                break
            what = chance.choice(["runner", "runner", "runner", "engine", "flow"])
            # vLLM takes longer to start than there is between two kills, so something must have come of its last start.
            is_at_work = len(runs_of(folder)) > settled + 4
            victims = {
                "runner": [
                    process
                    for nursery in processes(flow.pid, "rollout_core.agents.nursery")
                    for process in processes(nursery.pid, "rollout_core.agents.nursery")
                ],
                "engine": processes(flow.pid, "EngineCore") if is_at_work else [],
                "flow": [psutil.Process(flow.pid)] if is_at_work else [],
            }[what]
            if victims:
                with contextlib.suppress(psutil.Error):
                    chance.choice(victims).kill()
                    kills[what] += 1
                    settled = settled if what == "runner" else len(runs_of(folder))
                    was_killed = was_killed or what == "flow"
        again = {rollout for rollout, _ in runs_of(folder)[before:]}
        assert not again & finished, f"run again after they had finished: {sorted(again & finished)[:3]}"
        if flow.wait() == 0:
            break
        assert was_killed or kills["engine"], (folder / "log").read_text()[-4000:]
    check(folder)
    return kills


def check(folder: Path) -> None:
    """What must hold in the end."""
    from rollout_core.agents.emitters import find_final_reward
    from rollout_core.store import SqlLightningStore

    async def look() -> None:
        async with SqlLightningStore.from_url(f"sqlite:///{folder / 'rollout.db'}") as store:
            rollouts = await store.query_rollouts()
            assert len(rollouts) == 3 * 12 * 4, len(rollouts)
            for rollout in rollouts:
                attempts = await store.query_attempts(rollout.rollout_id)
                won = [attempt for attempt in attempts if attempt.status == "succeeded"]
                assert rollout.status == "succeeded" and len(won) == 1, (rollout.status, attempts)
                spans = await store.query_spans(rollout.rollout_id)
                reward = find_final_reward([span for span in spans if span.attempt_id == won[0].attempt_id])
                assert reward is not None and abs(reward - rollout.input["number"] / 10) < 0.1, reward
                for span in spans:
                    assert span.attributes.get("whose", rollout.rollout_id) == rollout.rollout_id
                    assert span.attributes.get("attempt", span.attempt_id) == span.attempt_id
                calls = [s for s in spans if s.attempt_id == won[0].attempt_id and s.name == "rollout.llm_call"]
                answered = [call for call in calls if call.status.status_code != "ERROR"]
                assert len(answered) == 2, f"{len(answered)} calls of the attempt that won"

    import asyncio

    asyncio.run(look())


def main() -> None:
    """Run the campaigns and print what was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", action="store_true", help="with vLLM's engine, whose process is killed too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 12.0), help="seconds between two kills")
    given = parser.parse_args()
    from tasks.runtime.prefect_server import prefect_server

    home = Path(tempfile.mkdtemp(prefix="agent-kills-prefect-"))
    with prefect_server(home):
        for number in range(given.rounds):
            folder = Path(tempfile.mkdtemp(prefix="agent-kills-"))
            began = time.monotonic()
            kills = campaign(folder, given.seed + number, vllm=given.vllm, pause=tuple(given.pause))
            took, calls = time.monotonic() - began, len(runs_of(folder))
            print(f"campaign {number + 1}: {dict(kills)}, {calls} calls of the agent, {took:.0f} s: whole", flush=True)
            shutil.rmtree(folder)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
