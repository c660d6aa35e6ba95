"""GRPO and PPO of a tiny model that agents use, with a real engine, proxy, trainer and learner."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout_core.agents.execution import SharedMemoryExecutionStrategy
from rollout_core.agents.lit_agent import rollout as rollout_agent
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.policy_algorithms import GRPO, PPO
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.trainer import Trainer
from rollout_core.base.errors import ConfigError
from rollout_core.config import JsonlDataset, ModelSource, OptimizerConfig, SamplingParams, TransformersBackend
from rollout_core.config.agents import AgentGRPO
from rollout_core.store import InMemoryLightningStore, LightningStore, LightningStoreClient, ProxyLLM
from tests.agents.training_script import TASKS, algorithm, ask, digits
from tests.store.patience import LONG
from tests.store.ports import own_port

SCRIPT = Path(__file__).parent / "training_script.py"


@rollout_agent
def writes_digits(task, llm):
    return digits(ask(task, llm))


def fit(algorithm, store: LightningStore | None = None, *, agent=writes_digits, val=None, **options) -> LightningStore:
    store = store or InMemoryLightningStore()
    trainer = Trainer(
        algorithm=algorithm,
        store=store,
        strategy=SharedMemoryExecutionStrategy(4),
        runner={"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0},
        tracer=OtelTracer(instrument=[]),
        **options,
    )
    trainer.fit(agent, TASKS, val_dataset=val)
    return store


def rollouts_of(store: LightningStore) -> list:
    return list(asyncio.run(store.query_rollouts()))


def test_the_reward_rises_and_each_iteration_is_answered_by_its_own_weights(tiny_model, tmp_path):
    grpo = algorithm(tiny_model, tmp_path, iterations=8, evaluate_every=4, tasks_per_iteration=3, rollouts_per_task=8)
    store = fit(grpo, val=TASKS)
    rewards = [report.mean_reward for report in grpo.history]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert [report.number for report in grpo.history if report.evaluation] == [3, 7]
    last = grpo.history[-1].evaluation
    assert last is not None and last.num_rollouts == 3 and last.num_without_reward == 0
    assert last.mean_reward > rewards[0]
    assert grpo.checkpoint == grpo.history[-1].checkpoint

    rollouts = rollouts_of(store)
    assert Counter(item.mode for item in rollouts) == {"train": 8 * 24, "val": 6}
    for item in rollouts:
        [span] = [span for span in asyncio.run(store.query_spans(item.rollout_id)) if span.name == "rollout.llm_call"]
        assert item.metadata["model"] in span.attributes.values()
    resources = list(asyncio.run(store.query_resources()))
    assert len(resources) == 9  # before the first iteration and after each
    assert all(isinstance(item.resources["llm"], ProxyLLM) for item in resources)


def test_ppo_learns_without_groups(tiny_model, tmp_path):
    ppo = PPO(
        tiny_model,
        iterations=2,
        tasks_per_iteration=3,
        rollouts_per_task=1,
        lr=1e-3,
        max_tokens=6,
        backend=TransformersBackend(),
        storage=tmp_path / "objects",
        cache=tmp_path / "cache",
    )
    fit(ppo)
    assert len(ppo.history) == 2 and ppo.checkpoint is not None and ppo.checkpoint.algorithm == "ppo"
    assert len({report.checkpoint.model for report in ppo.history}) == 2


def test_the_same_spans_give_the_same_weights_and_finished_rollouts_are_not_run_again(tiny_model, tmp_path):
    store = InMemoryLightningStore()
    first, second, other = (algorithm(tiny_model, tmp_path / name) for name in ("a", "a", "b"))
    fit(first, store)
    attempts = {item.rollout_id: item.attempt.attempt_id for item in rollouts_of(store)}
    fit(second, store)
    fit(other, store)  # its updates are computed again
    assert {item.rollout_id: item.attempt.attempt_id for item in rollouts_of(store)} == attempts
    assert first.history == second.history == other.history and len(first.history) == 3


@pytest.mark.campaign
def test_killed_and_run_again_it_runs_no_rollout_twice_and_ends_in_the_same_weights(
    start_process, tiny_model, tmp_path
):
    def run(storage: str):
        return start_process(str(SCRIPT), str(tmp_path), str(tmp_path / storage), str(tiny_model))

    def noted() -> list[str]:
        path = tmp_path / "attempts.txt"
        return path.read_text().split() if path.exists() else []

    def outcome(storage: str) -> list[str]:
        output, _ = (process := run(storage)).communicate(timeout=LONG)
        assert process.returncode == 0, output[-4000:]
        return [line for line in output.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]

    process = run("killed")
    deadline = time.monotonic() + LONG
    while len(noted()) < 12:  # in the midst of the second iteration
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-4000:]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = noted()
    resumed = outcome("killed")
    counts = Counter(noted())
    assert set(before) <= set(counts) and len(counts) == 3 * 8
    assert sum(counts.values()) <= 3 * 8 + 1, "but for the one under way when the process was killed"
    assert len(resumed) == 3 and outcome("other") == resumed, "the same spans, all updates computed again"
    assert Counter(noted()) == counts


def test_the_trainers_own_proxy_is_used_and_keeps_its_models(tiny_model, tmp_path):
    proxy = LLMProxy()
    grpo = algorithm(tiny_model, tmp_path, iterations=1)
    store = fit(grpo, llm_proxy=proxy)
    assert proxy.model_list == [] and len(grpo.history) == 1
    [first, *_] = asyncio.run(store.query_resources())
    llm = first.resources["llm"]
    assert isinstance(llm, ProxyLLM) and f":{proxy.port}/" in llm.get_base_url("r", "a")


def test_failed_rollouts_leave_their_group_out_and_are_counted(tiny_model, tmp_path):
    @rollout_agent
    def fails_on_the_first(task, llm):
        if task == TASKS[0]:
            raise ValueError("no")
        return digits(ask(task, llm))

    grpo = algorithm(tiny_model, tmp_path, iterations=1, tasks_per_iteration=3, max_attempts=1)
    fit(grpo, agent=fails_on_the_first)
    [report] = grpo.history
    assert report.left_out == {"failed": 4} and report.num_rollouts == 12


def test_what_cannot_be_meant_is_refused(tiny_model, tmp_path):
    for arguments in ({}, {"model": tiny_model, "rollouts_per_task": 1}, {"model": tiny_model, "temperature": 0.0}):
        with pytest.raises(ConfigError):
            GRPO(**arguments)
    with pytest.raises(ConfigError, match="evaluate_every"):
        fit(algorithm(tiny_model, tmp_path, evaluate_every=1))
    with pytest.raises(TypeError, match="no_such"):
        GRPO(tiny_model, no_such=1)
    settings = AgentGRPO(
        base_model=ModelSource(uri=str(tiny_model)),
        prompts=JsonlDataset(path="x"),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-3),
        sampling=SamplingParams(max_tokens=4),
    )
    assert GRPO(settings=settings).settings is settings
    with pytest.raises(ConfigError, match="leave the model out"):
        GRPO(tiny_model, settings=settings)
    assert math.isclose(GRPO(tiny_model, lr=0.5).settings.optimizer.lr, 0.5)


STORE = """
import asyncio, sys
from rollout_core.store import LightningStoreServer, SqlLightningStore

async def main(url, port):
    async with SqlLightningStore.from_url(url) as store:
        server = LightningStoreServer(store, port=int(port))
        await server.start()
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def port():
    with own_port() as port:
        yield port


def test_the_store_may_be_a_server_elsewhere_that_is_killed_and_comes_back(tiny_model, tmp_path, port):
    running: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = [sys.executable, "-c", STORE, f"sqlite:///{tmp_path / 'store.db'}", str(port)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        assert int(running[-1].stdout.readline()) == port

    start()
    asked = threading.Event()

    @rollout_agent
    def agent(task, llm):
        reward = digits(ask(task, llm))
        asked.set()
        return reward

    def kill() -> None:
        asked.wait(LONG)
        running[0].kill()
        running[0].wait()
        time.sleep(2)
        start()

    killer = threading.Thread(target=kill)
    killer.start()
    grpo = algorithm(tiny_model, tmp_path, iterations=2, tasks_per_iteration=3, rollouts_per_task=4)
    store = LightningStoreClient(f"http://127.0.0.1:{port}")

    async def all_rollouts() -> list:
        found = list(await store.query_rollouts())
        await store.close()  # also what it has opened on event loops that have ended
        return found

    try:
        strategy = SharedMemoryExecutionStrategy(2, managed_store=False)
        runner = {"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0}
        tracer = OtelTracer(instrument=[])
        Trainer(algorithm=grpo, store=store, strategy=strategy, runner=runner, tracer=tracer).fit(agent, TASKS)
        rollouts = asyncio.run(all_rollouts())
    finally:
        asked.set()
        killer.join()
        for process in running:
            process.kill()
            process.wait()
    assert len(running) == 2 and len(grpo.history) == 2
    assert Counter(item.status for item in rollouts) == {"succeeded": 2 * 12}
