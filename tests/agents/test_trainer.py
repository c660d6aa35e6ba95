"""Trainers with real threads and processes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from openai import AsyncOpenAI

from rollout_core.agents import agent_calls as running, execution, runner as runner_module
from rollout_core.agents.adapters.triplets import LlmProxyTraceToTriplet
from rollout_core.agents.algorithm import Algorithm, algo, with_llm_proxy, with_store
from rollout_core.agents.baseline import Baseline
from rollout_core.agents.components import build_component
from rollout_core.agents.emitters import emit_annotation, emit_reward, find_final_reward
from rollout_core.agents.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from rollout_core.agents.lit_agent import LitAgent, llm_rollout, rollout as rollout_agent
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.trainer import Trainer
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.store import (
    LLM,
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    PromptTemplate,
    RolloutConfig,
    SqlLightningStore,
)
from tests.agents.scripted_chat import completion, scripted_chat
from tests.agents.scripted_upstream import ScriptedUpstream
from tests.store.patience import FOREVER, LONG
from tests.store.ports import own_port

RESOURCES = {"main": LLM(endpoint="http://localhost:9/v1", model="m")}
ROOT = Path(__file__).parents[2]


@rollout_agent
def add_one(task, llm):
    emit_annotation({"task": task})
    return float(task + 1)


def shm(n_runners=1, **options):
    return SharedMemoryExecutionStrategy(n_runners, **options)


def cs(n_runners=1, **options):
    return ClientServerExecutionStrategy(n_runners=n_runners, server_port=0, **options)


def trainer(strategy, **options) -> Trainer:
    quick = {"type": LitAgentRunner, "poll_interval": 0.02, "heartbeat_interval": 0}
    return Trainer(
        **{
            "strategy": strategy,
            "store": InMemoryLightningStore(),
            "tracer": OtelTracer(instrument=[]),
            "runner": quick,
            "initial_resources": RESOURCES,
            **options,
        }
    )


async def rewards_of(store) -> dict:
    found = {}
    for rollout in await store.query_rollouts():
        spans = await store.query_spans(rollout.rollout_id)
        assert {span.attempt_id for span in spans} <= {rollout.attempt.attempt_id}
        assert [span.attributes["task"] for span in spans if "task" in span.attributes] == [rollout.input]
        found[rollout.input, rollout.mode] = (rollout.status, find_final_reward(spans))
    return found


@pytest.mark.parametrize("strategy", [shm(), shm(4), shm(main_thread="runner"), cs(), cs(3), cs(main_process="runner")])
def test_every_task_runs_once_wherever_the_runners_are(strategy):
    made = trainer(strategy, algorithm=Baseline(span_verbosity="none"))
    made.fit(add_one, list(range(20)), val_dataset=[100, 101])
    found = asyncio.run(rewards_of(made.store))
    assert found == {
        **{(task, "train"): ("succeeded", task + 1) for task in range(20)},
        **{(task, "val"): ("succeeded", task + 1) for task in (100, 101)},
    }
    asyncio.run(made.store.close())


def test_an_algorithm_may_be_a_function_and_may_block(tmp_path):
    seen = []

    @algo
    def learn(store, train_dataset, initial_resources):
        async def run():
            await store.add_resources(initial_resources)
            for task in train_dataset:
                rollout = await store.enqueue_rollout(task)
                while (await store.get_rollout_by_id(rollout.rollout_id)).status != "succeeded":
                    await asyncio.sleep(0.01)
                seen.append(find_final_reward(await store.query_spans(rollout.rollout_id)))

        time.sleep(0.05)
        asyncio.run(run())

    store = SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'store.db'}")
    trainer(cs(), algorithm=learn, store=store).fit(add_one, [1, 2, 3])
    assert seen == [2, 3, 4]
    asyncio.run(store.close())


@pytest.mark.parametrize(
    "strategy",
    [
        shm(2, join_timeout=FOREVER, graceful_delay=FOREVER),
        cs(2, graceful_timeout=FOREVER, terminate_timeout=FOREVER),
    ],
)
def test_an_algorithm_that_fails_ends_the_run_with_its_reason(strategy):
    """At once: none of the times that runners have to end is waited out, or the test has no end."""

    @algo
    async def learn(store):
        raise LookupError("no data")

    with pytest.raises(LookupError, match="no data"):
        trainer(strategy, algorithm=learn).fit(add_one)


@pytest.mark.parametrize("strategy", [shm(2), cs(2)])
def test_too_few_rollouts_of_runners_end_the_run_instead_of_waiting_for_ever(strategy, monkeypatch):
    monkeypatch.setattr("rollout_core.agents.run_supervision.GIVE_UP_SECONDS", 2.0)
    made = trainer(strategy, algorithm=Baseline(), max_rollouts=2)
    with pytest.raises(Fatal, match="rollouts are queued that nobody takes"):
        made.fit(add_one, list(range(10)))


class Broken(LitAgentRunner):
    """Cannot begin."""

    def init_worker(self, worker_id, store, **kwargs):
        raise OSError("no such device")


class Blocks(LitAgent):
    """Blocks its event loop on its first try at one of its tasks."""

    async def rollout_async(self, task, resources, rollout):
        if task == "blocks" and rollout.attempt.sequence_id == 1:
            time.sleep(3600)
        return 1.0


class Impatient(LitAgentRunner):
    """Of a runner's process: it waits for nothing for long."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        running.GRACE_SECONDS = 0.2
        runner_module._PROBE_SECONDS = 0.1
        execution.LightningStoreClient = functools.partial(LightningStoreClient, retry_delays=(0.1, 0.2, 0.5))


class Deadly(LitAgent):
    """Kills its process on its first try at each odd task."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def rollout(self, task, resources, rollout):
        emit_annotation({"task": task})
        if task % 2 and rollout.attempt.sequence_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(task)


def test_a_runner_that_is_killed_is_replaced_and_its_rollout_tried_again(tmp_path, caplog):
    @algo
    async def learn(store, train_dataset):
        config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
        ids = [(await store.enqueue_rollout(task, config=config)).rollout_id for task in train_dataset]
        while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1)) < len(ids):
            pass

    made = trainer(cs(2, max_restarts=4), algorithm=learn)
    made.fit(Deadly(tmp_path), list(range(6)))
    rollouts = asyncio.run(_all(made.store))
    assert {rollout.input: (rollout.status, rollout.attempt.sequence_id) for rollout in rollouts} == {
        task: ("succeeded", 1 + task % 2) for task in range(6)
    }
    assert "was killed by SIGKILL" in caplog.text


async def _all(store):
    return await store.query_rollouts()


def test_runners_that_keep_dying_fail_the_run_with_the_reason():
    made = trainer(cs(1, max_restarts=1), algorithm=Baseline(), runner=lambda: Broken(OtelTracer(instrument=[])))
    with pytest.raises(Fatal, match=r"OSError: no such device.*1 times in a row"):
        made.fit(add_one, [1])


PROGRAM = """
import os, sys, time, signal
from rollout_core.agents.lit_agent import LitAgent
from rollout_core.agents.baseline import Baseline
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.trainer import Trainer
from rollout_core.agents.execution import *
from rollout_core.store import *

class Slow(LitAgent):
    def rollout(self, task, resources, rollout):
        os.write(1, b"started\\n")  # at once: unbuffered, print writes the end of the line on its own
        time.sleep(3600)

if __name__ == "__main__":
    strategy = {strategy}
    store = SqlLightningStore.from_url("sqlite:///" + sys.argv[1])
    tracer = OtelTracer(instrument=[])
    Trainer(strategy=strategy, store=store, algorithm=Baseline(), tracer=tracer).fit(Slow(), [1, 2, 3])
"""


SHM_2 = "SharedMemoryExecutionStrategy(2)"
CS_2 = "ClientServerExecutionStrategy(n_runners=2, server_port=0)"


@contextmanager
def _started(folder: Path, text: str, strategy: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The program as a process of a session of its own, once two agents are at work, and its database. All processes
    that it has started are to end inside the block."""
    program, database = folder / "program.py", folder / "store.db"
    program.write_text(text.replace("{strategy}", strategy))
    process = subprocess.Popen(
        [sys.executable, str(program), str(database)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for _ in range(2):
            assert process.stdout.readline() == "started\n", process.communicate(timeout=LONG)
        below = psutil.Process(process.pid).children(recursive=True)
        yield process, database
        assert not psutil.wait_procs(below, timeout=LONG)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _statuses(database: Path) -> list[str]:
    async with SqlLightningStore.from_url(f"sqlite:///{database}") as store:
        return sorted(rollout.status for rollout in await store.query_rollouts())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("strategy", [SHM_2, CS_2])
def test_a_stop_signal_ends_all_processes_and_leaves_true_states(tmp_path, number, strategy):
    with _started(tmp_path, PROGRAM, strategy) as (process, database):
        os.killpg(process.pid, number)  # as a terminal does
        _, errors = process.communicate(timeout=LONG)
        assert process.returncode == (-2 if number == signal.SIGINT else 143), errors
    found = asyncio.run(_statuses(database))
    assert set(found) <= {"failed", "queuing"} and found.count("failed") == 2, (found, errors)


_IMPORTS, _, _MAIN = PROGRAM.partition("class Slow")
NOTEBOOK = f"{_IMPORTS}from slow_agent import Slow\n\nasync def cell():\n  if{_MAIN.partition('if')[2]}"
LOOPS = ["asyncio.new_event_loop().run_until_complete(cell())", "asyncio.run(cell())"]
"""As Jupyter runs a cell; and with asyncio's own handler of SIGINT, which only cancels the task that is blocked."""


@pytest.mark.parametrize(("strategy", "loop"), [(SHM_2, LOOPS[0]), (CS_2, LOOPS[1])])
def test_a_notebooks_interruption_ends_the_run_and_leaves_true_states(tmp_path, strategy, loop):
    """A cell has a running event loop, and its interruption reaches the kernel's process alone. Agents are of a module:
    runner processes could not import them from cells."""
    (tmp_path / "slow_agent.py").write_text(PROGRAM.partition("if __name__")[0])
    with _started(tmp_path, f"{NOTEBOOK}\nimport asyncio\n{loop}\n", strategy) as (process, database):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONG)
        assert "KeyboardInterrupt" in errors
    found = asyncio.run(_statuses(database))
    assert set(found) <= {"failed", "queuing"} and found.count("failed") == 2, (found, errors)


def test_a_port_of_the_trainer_is_that_of_its_strategy():
    for strategy in (ClientServerExecutionStrategy(server_port=9000), {"type": "cs", "server_port": 9000}, "cs", None):
        assert Trainer(strategy=strategy, port=9100).strategy.server_port == 9100
    assert Trainer(strategy=ClientServerExecutionStrategy(server_port=9000)).strategy.server_port == 9000


async def test_methods_of_algorithms_get_the_store_and_the_proxy(memory):
    class Proxy:
        def __init__(self, is_up: bool) -> None:
            self.is_up, self.calls = is_up, []

        def is_running(self) -> bool:
            return self.is_up

        async def start(self) -> None:
            self.calls.append("start")

        async def stop(self) -> None:
            self.calls.append("stop")

    class Own(Algorithm):
        @with_store
        async def stored(self, store, count, *, more):
            return store, count, more

        @with_llm_proxy()
        async def asks(self, proxy, count):
            return proxy, count

        @with_llm_proxy(required=True, auto_start=False)
        async def needs(self, proxy):
            raise ZeroDivisionError

    own = Own()
    with pytest.raises(ConfigError, match="no store"):
        await own.stored(1, more=2)
    own.set_store(memory)
    assert await own.stored(1, more=2) == (memory, 1, 2) and own.stored.__name__ == "stored"
    assert await own.asks(1) == (None, 1)
    with pytest.raises(ConfigError, match="needs an LLM proxy"):
        await own.needs()
    for is_up, done in ((False, ["start", "stop"]), (True, [])):
        proxy = Proxy(is_up)
        own.set_llm_proxy(proxy)
        assert await own.asks(1) == (proxy, 1) and proxy.calls == done
        with pytest.raises(ZeroDivisionError):
            await own.needs()
        assert proxy.calls == done


async def test_without_an_algorithm_the_proxy_runs_and_its_resource_is_published(upstream):
    asked = []

    @llm_rollout
    async def agent(task, llm):
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as made:
            answer = await made.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        asked.append(answer.choices[0].message.content)
        return 1.0

    store = LightningStoreThreaded(InMemoryLightningStore())
    proxy = LLMProxy(0, [ModelEntry("m", [Upstream(url=upstream.url)])])
    made = trainer(shm(), store=store, max_rollouts=1, llm_proxy=proxy, initial_resources=None)
    running = asyncio.create_task(asyncio.to_thread(made.fit, agent))
    while await store.get_latest_resources() is None:
        await asyncio.sleep(0.01)
    await store.enqueue_rollout("abc")
    await asyncio.wait_for(running, LONG)
    [rollout] = await store.query_rollouts()
    assert (rollout.status, asked) == ("succeeded", ["cba"]) and not proxy.is_running()
    assert (await store.get_latest_resources()).resources["llm"].model == "m"


def test_the_first_agent_of_the_docs_runs_as_it_stands(tmp_path):
    """But for the model's address, and the port of the store's server."""
    docs = (ROOT / "docs" / "agents.md").read_text()
    code = docs.split("## A first agent")[1].split("```python\n")[1].split("```")[0]
    with scripted_chat([completion(1, {"content": "17 + 25 is 42."})]) as url:
        program = tmp_path / "program.py"
        assert "http://localhost:8000/v1" in code
        program.write_text(
            "import logging\nlogging.basicConfig(level=logging.INFO)\n" + code.replace("http://localhost:8000/v1", url)
        )
        environment = {**os.environ, "AGL_SERVER_PORT": "0"}
        done = subprocess.run(
            [sys.executable, str(program)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG
        )
    assert done.returncode == 0, done.stderr
    assert "1 rollouts, 1 with a reward, mean 1.0000" in done.stderr


@pytest.fixture
def port():
    with own_port() as port:
        yield port


def test_split_roles_of_one_program_meet(tmp_path, monkeypatch, port):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import logging, sys
            logging.basicConfig(level=logging.INFO)
            from rollout_core.agents.lit_agent import rollout
            from rollout_core.agents.baseline import Baseline
            from rollout_core.agents.otel import OtelTracer
            from rollout_core.agents.runner import LitAgentRunner
            from rollout_core.agents.trainer import Trainer
            from rollout_core.store import LLM

            @rollout
            def agent(task, llm):
                return float(task)

            if __name__ == "__main__":
                tracer = OtelTracer(instrument=[])
                Trainer(
                    tracer=tracer, runner=LitAgentRunner(tracer, poll_interval=0.05), n_runners=2, algorithm=Baseline(),
                    initial_resources={"m": LLM(endpoint="http://localhost:9/v1", model="m")},
                ).fit(agent, [1, 2, 3, 4])
            """
        )
    )
    environment = {**os.environ, "AGL_SERVER_PORT": str(port)}
    command = [sys.executable, str(program)]
    algorithm = subprocess.Popen(
        command, cwd=ROOT, env={**environment, "AGL_CURRENT_ROLE": "algorithm"}, stderr=subprocess.PIPE, text=True
    )
    runners = subprocess.Popen(
        command, cwd=ROOT, env={**environment, "AGL_CURRENT_ROLE": "runner"}, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = algorithm.communicate(timeout=LONG)
        assert algorithm.returncode == 0, said
        assert "4 rollouts, 4 with a reward, mean 2.5000" in said
        runners.terminate()
        _, said = runners.communicate(timeout=LONG)
    finally:
        for process in (algorithm, runners):
            process.kill()
            process.wait()
    assert runners.returncode == 143, said


def test_accessors_that_go_with_the_next_release_still_find_what_runs_the_code():
    class Looks(LitAgent):
        def rollout(self, task, resources, rollout):
            with ThreadPoolExecutor(1) as threads, pytest.warns(FutureWarning, match="goes with the next release"):
                of_thread = threads.submit(lambda: (self.trainer, self.runner, self.tracer)).result()
                assert of_thread == (self.trainer, self.runner, self.tracer)
                return float(self.trainer is made and self.runner.tracer is self.tracer)

    @algo
    async def once(store, initial_resources):
        await store.add_resources(initial_resources)
        rollout = await store.enqueue_rollout(1)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=LONG)
        found.append(find_final_reward(await store.query_spans(rollout.rollout_id)))
        with pytest.warns(FutureWarning, match="goes with the next release"):
            found.append(once.get_trainer())

    found = []
    made = trainer(shm(), algorithm=once)
    made.fit(Looks())
    assert found == [1.0, made]
    with pytest.raises(ConfigError, match="no tracer now"):
        _ = Looks().tracer
    with pytest.warns(FutureWarning, match="set_trainer goes with the next release"):
        Looks().set_trainer(made)


def test_component_specs():
    build = build_component
    assert isinstance(build("algorithm", "rollout_core.agents.baseline.Baseline", Algorithm), Baseline)
    made = build("algorithm", {"type": Baseline, "n_epochs": 3}, Algorithm, known={"n_epochs": 5, "unknown": 1})
    assert made._n_epochs == 3
    assert isinstance(build("algorithm", lambda: Baseline(), Algorithm), Baseline)
    assert build("algorithm", None, Algorithm) is None
    with pytest.raises(TypeError, match="makes a dict; expected a Algorithm"):
        build("algorithm", dict, Algorithm)
    for bad in ("nothing", "no.such.module", {"n_epochs": 1}, 5, {"type": Baseline, "epochs": 1}):
        with pytest.raises(ConfigError, match="algorithm"):
            build("algorithm", bad, Algorithm)


def test_dev_runs_fast_algorithms_only():
    with pytest.raises(TypeError, match="dev runs a FastAlgorithm"):
        trainer(shm(), algorithm=algo(lambda store: None)).dev(add_one, [1])
    made = trainer(shm())
    made.dev(add_one, [1])
    assert asyncio.run(rewards_of(made.store)) == {(1, "train"): ("succeeded", 2.0)}


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    monkeypatch.setenv("AGL_SERVER_PORT", "4000")
    assert (cs().role, ClientServerExecutionStrategy().server_port) == ("runner", 4000)
    assert ClientServerExecutionStrategy(role="both").role == "both"
    assert cs()._runner_numbers() != cs()._runner_numbers(), "programs on several machines share the store"
    assert ClientServerExecutionStrategy(role="both", n_runners=2)._runner_numbers() == range(2)
    monkeypatch.setenv("AGL_MANAGED_STORE", "maybe")
    with pytest.raises(ConfigError, match="AGL_MANAGED_STORE: got 'maybe'"):
        shm()
    monkeypatch.setenv("AGL_CURRENT_ROLE", "boss")
    with pytest.raises(ConfigError, match="AGL_CURRENT_ROLE"):
        cs()


def test_no_prompt_template_among_the_resources_fails_the_task_not_the_run():
    made = trainer(
        shm(), algorithm=Baseline(), initial_resources={"p": PromptTemplate(template="x", engine="f-string")}
    )
    made.fit(add_one, [1])
    [rollout] = asyncio.run(_all(made.store))
    assert rollout.status == "failed"


@rollout_agent
def asks(task, llm):
    import openai

    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0) as client:
        for turn in range(2):
            client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": f"{task} {turn}"}])
            emit_reward(float(turn))


@pytest.mark.parametrize("strategy", [shm(2), cs(2)])
async def test_every_call_of_an_agent_goes_through_the_proxy_and_meets_its_reward(strategy):
    upstream = ScriptedUpstream()
    await upstream.start()
    proxy = LLMProxy(model_list=[ModelEntry("tuned", [Upstream(url=upstream.url, model="m")])])
    seen = {}

    class Learn(Algorithm):
        async def run(self, train_dataset=None, val_dataset=None):
            store = self.get_store()
            await store.add_resources(self.get_initial_resources())
            ids = [(await store.enqueue_rollout(task, mode="train")).rollout_id for task in train_dataset]
            while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1)) < len(ids):
                pass
            for task, rollout_id in zip(train_dataset, ids, strict=True):
                spans = await store.query_spans(rollout_id)
                seen[task] = (LlmProxyTraceToTriplet().adapt(spans), self.get_adapter().adapt(spans))

    made = trainer(strategy, algorithm=Learn(), llm_proxy=proxy, initial_resources=None, tracer=OtelTracer())
    await asyncio.to_thread(made.fit, asks, ["a", "b", "c"])
    assert not proxy.is_running()
    await upstream.stop()
    for task in "abc":
        by_proxy, by_tracer = seen[task]
        assert [triplet.reward for triplet in by_proxy] == [0.0, 1.0]
        assert [triplet.reward for triplet in by_tracer] == [0.0, 1.0]
        assert all(triplet.response["token_ids"] for triplet in by_proxy)


def test_what_an_interrupted_run_left_in_the_queue_is_run_too():
    made = trainer(shm(), algorithm=Baseline())
    for task in range(6):
        asyncio.run(made.store.enqueue_rollout(100 + task))
    asyncio.run(made.store.add_resources(RESOURCES))
    made.fit(add_one, [1, 2])
    assert {rollout.status for rollout in asyncio.run(_all(made.store))} == {"succeeded"}


class SlowToPublish(InMemoryLightningStore):
    async def add_resources(self, resources):
        await asyncio.sleep(0.5)
        return await super().add_resources(resources)


@pytest.mark.parametrize("strategy", [shm(), shm(main_thread="runner"), cs(), cs(main_process="runner")])
def test_without_an_algorithm_queued_rollouts_find_the_resources_and_the_run_ends_with_its_runners(strategy):
    made = trainer(strategy, store=SlowToPublish(), max_rollouts=2)
    for task in range(2):
        asyncio.run(made.store.enqueue_rollout(task))
    made.fit(add_one)
    assert [rollout.status for rollout in asyncio.run(_all(made.store))] == ["succeeded"] * 2


def test_resources_that_cannot_be_published_end_the_run():
    class Refuses(InMemoryLightningStore):
        async def add_resources(self, resources):
            raise Fatal("no place for resources")

    with pytest.raises(Fatal, match="no place for resources"):
        trainer(shm(), store=Refuses()).fit(add_one)


def test_an_algorithm_that_trains_is_not_disturbed_by_what_nobody_takes(monkeypatch):
    monkeypatch.setattr("rollout_core.agents.run_supervision.GIVE_UP_SECONDS", 3.0)
    trained = []

    @algo
    async def learn(store, train_dataset, initial_resources):
        await store.add_resources(initial_resources)
        for task in train_dataset:
            await store.enqueue_rollout(task)
        await asyncio.sleep(7)
        trained.append(True)

    trainer(shm(), algorithm=learn, max_rollouts=1).fit(add_one, [1, 2])
    assert trained == [True]


def test_heartbeats_must_be_more_frequent_than_the_limit():
    with pytest.raises(ConfigError, match="heartbeat_interval is 30 s, and worker_timeout 60"):
        trainer(cs(), runner={"type": LitAgentRunner, "heartbeat_interval": 30})


def test_an_agent_that_blocks_its_event_loop_is_timed_out_and_its_process_replaced():
    @algo
    async def learn(store, train_dataset):
        config = RolloutConfig(timeout_seconds=0.5, max_attempts=2, retry_condition=["timeout", "unresponsive"])
        patient = config.model_copy(update={"timeout_seconds": FOREVER})
        configs = {"blocks": config, "works": patient}
        ids = [(await store.enqueue_rollout(task, config=configs[task])).rollout_id for task in train_dataset]
        while await store.get_latest_attempt(ids[0]) is None:
            await asyncio.sleep(0.02)
        await store.update_rollout(ids[0], config=patient)  # the second attempt has as much time as it takes
        while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1)) < len(ids):
            await asyncio.sleep(0.05)

    runner = {"type": Impatient, "poll_interval": 0.02, "heartbeat_interval": 0}
    made = trainer(cs(), algorithm=learn, runner=runner)
    made.fit(Blocks(), ["blocks", "works"])
    assert {rollout.status for rollout in asyncio.run(_all(made.store))} == {"succeeded"}


async def test_a_runner_of_another_machine_that_is_killed_leaves_a_true_state(tmp_path):
    store = InMemoryLightningStore()
    server = LightningStoreServer(store)
    await server.start()
    config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
    for task in range(3):
        await store.enqueue_rollout(task, config=config)
    strategy = ClientServerExecutionStrategy(role="runner", server_port=server.port)
    made = trainer(strategy, max_rollouts=2)
    await asyncio.to_thread(made.fit, Deadly(tmp_path))
    found = {rollout.input: (rollout.status, rollout.attempt.sequence_id) for rollout in await store.query_rollouts()}
    assert found == {0: ("succeeded", 1), 1: ("succeeded", 2), 2: ("succeeded", 1)}
    await server.stop()


def test_runners_whose_store_is_not_there_give_up(port):
    strategy = ClientServerExecutionStrategy(role="runner", server_port=port)
    runner = {"type": Impatient, "heartbeat_interval": 0, "store_patience_seconds": 0.3, "poll_interval": 0.05}
    with pytest.raises(Fatal, match="the store is away"):
        trainer(strategy, runner=runner).fit(add_one)
