"""The runner with real agents on real stores."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import re
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from rollout_core.agents.emitters import emit_annotation, emit_reward, find_final_reward, get_reward_value
from rollout_core.agents.heartbeats import Heartbeats
from rollout_core.agents.hooks import Hook
from rollout_core.agents.lit_agent import FunctionalLitAgent, LitAgent, llm_rollout, rollout as rollout_agent
from rollout_core.agents.operation_spans import operation
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.base.errors import ConfigError, Recoverable, UnknownOutcome
from rollout_core.store import (
    LLM,
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
    ProxyLLM,
    RolloutConfig,
    Span,
    SpanCoreFields,
    SqlLightningStore,
    TraceStatus,
)
from rollout_core.store.http import wire
from tests.store.patience import FOREVER, LONG, until

LLM_RESOURCES = {"main": LLM(endpoint="http://localhost:9/v1", model="m")}


def runner(**options) -> LitAgentRunner:
    options = {"poll_interval": 0.01, "heartbeat_interval": 0, **options}
    return LitAgentRunner(OtelTracer(instrument=[]), **options)


async def run_all(store, agent, count: int, **options) -> None:
    async with runner(max_rollouts=count, **options).run_context(agent=agent, store=store) as worker:
        await asyncio.wait_for(worker.iter(), LONG)


async def test_what_the_agent_emits_and_returns_is_in_the_store_in_order(store):
    @llm_rollout
    def agent(task, llm):
        assert llm.model == "m"
        emit_reward(0.25)
        with operation(name="look-up", place="here") as op:
            op.set_input(1, key="k")
            op.set_output({"found": [1, 2]})
        emit_annotation({"note": {"of": task}})
        return task / 4

    await store.add_resources(LLM_RESOURCES)
    queued = await store.enqueue_rollout(3, mode="train")
    await run_all(store, agent, 1)
    done = await store.get_rollout_by_id(queued.rollout_id)
    assert (done.status, done.attempt.status, done.attempt.worker_id) == ("succeeded", "succeeded", "Worker-0")
    spans = list(await store.query_spans(queued.rollout_id))
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4]
    assert [get_reward_value(span) for span in spans] == [0.25, None, None, 0.75]
    assert find_final_reward(spans) == 0.75
    assert spans[1].attributes == {
        "agentlightning.operation.name": "look-up",
        "place": "here",
        "agentlightning.operation.input.args.0": 1,
        "agentlightning.operation.input.key": "k",
        "agentlightning.operation.output.found": [1, 2],
    }
    assert spans[2].attributes == {"note.of": 3}


def test_a_runner_is_ready_in_a_plain_block_too(memory):
    with runner().run_context(agent=FunctionalLitAgent(lambda task: task / 4), store=memory) as worker:
        done = asyncio.run(worker.step(3))
    assert done.status == "succeeded"
    assert find_final_reward(asyncio.run(memory.query_spans(done.rollout_id))) == 0.75
    with pytest.raises(ConfigError, match="no agent"):
        worker.get_agent()
    agent = FunctionalLitAgent(lambda task: task)
    with pytest.raises(ZeroDivisionError), runner().run_context(agent=agent, store=memory):
        raise ZeroDivisionError


@pytest.mark.parametrize("returned", [1, True])
async def test_a_whole_number_is_a_reward_like_others(memory, caplog, returned):
    queued = await memory.enqueue_rollout(0)
    await run_all(memory, FunctionalLitAgent(lambda task: returned), 1)
    assert find_final_reward(await memory.query_spans(queued.rollout_id)) == 1.0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"a": 1.0}, r"return the reward that trains as a number, or emit rewards .* primary_key"),
        (np.array([1.0, 2.0]), r"returned array\(\[1\., 2\.\]\) .*expected None, a number"),
    ],
)
async def test_several_numbers_are_no_reward_and_the_message_says_what_is(memory, returned, said):
    queued = await memory.enqueue_rollout(0)
    await run_all(memory, FunctionalLitAgent(lambda task: returned), 1)
    [span] = await memory.query_spans(queued.rollout_id)
    assert span.attributes["exception.type"] == "TypeError" and re.search(said, span.attributes["exception.message"])


async def test_a_runner_that_ends_at_once_leaves_no_coroutine_behind(memory):
    event = threading.Event()
    event.set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with runner(heartbeat_interval=10).run_context(
            agent=FunctionalLitAgent(lambda task: 1), store=memory
        ) as worker:
            await worker.iter(event=event)
        gc.collect()
    assert not [item.message for item in caught if "never awaited" in str(item.message)]


async def test_an_agents_error_fails_the_attempt_and_the_next_rollout_runs(store):
    @rollout_agent
    async def agent(task, llm):
        if task == "bad":
            raise ValueError("no such thing")
        return 1

    await store.add_resources(LLM_RESOURCES)
    bad, good = await store.enqueue_rollout("bad"), await store.enqueue_rollout("good")
    await run_all(store, agent, 2)
    assert (await store.get_rollout_by_id(bad.rollout_id)).status == "failed"
    assert (await store.get_rollout_by_id(good.rollout_id)).status == "succeeded"
    [span] = await store.query_spans(bad.rollout_id)
    assert span.attributes["exception.message"] == "no such thing"


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (None, "succeeded"),
        (True, "succeeded"),
        (np.float32(0.5), "succeeded"),
        ([], "succeeded"),
        ({"reward": 1}, "failed"),
        ("1.0", "failed"),
        (float("nan"), "failed"),
        ([1, 2], "failed"),
        ([Span.from_attributes(attributes={"a": 1}, name="own")], "succeeded"),
        ([Span.from_attributes(attributes={}, rollout_id="other", attempt_id="other")], "failed"),
    ],
)
async def test_what_a_rollout_may_return(memory, result, status):
    class Agent(LitAgent):
        def rollout(self, task, resources, rollout):
            return result

    queued = await memory.enqueue_rollout(1)
    await run_all(memory, Agent(), 1)
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == status


async def test_the_mode_chooses_the_method(memory):
    class Agent(LitAgent):
        async def training_rollout_async(self, task, resources, rollout):
            return 1

        async def validation_rollout_async(self, task, resources, rollout):
            return 2

    for mode in ("train", "val", "test", None):
        await memory.enqueue_rollout(mode, mode=mode)
    await run_all(memory, Agent(), 4)
    rewards = {}
    for rollout in await memory.query_rollouts():
        rewards[rollout.input] = find_final_reward(await memory.query_spans(rollout.rollout_id))
    assert rewards == {"train": 1, "val": 2, "test": 2, None: 2}


async def test_runners_in_one_process_never_mix_their_spans(store):
    @rollout_agent
    def agent(task, llm):
        emit_annotation({"task": task})
        time.sleep(0.002 * (task % 3))
        emit_annotation({"task": task})
        return float(task)

    await store.add_resources(LLM_RESOURCES)
    ids = [(await store.enqueue_rollout(task)).rollout_id for task in range(24)]
    first = runner(max_rollouts=8)
    async with first.run_context(agent=agent, store=store):
        workers = [first, first.for_worker(), first.for_worker()]
        for number, worker in enumerate(workers):
            worker.init_worker(number, store)
        await asyncio.wait_for(asyncio.gather(*[worker.iter() for worker in workers]), LONG)
    for task, rollout_id in enumerate(ids):
        spans = list(await store.query_spans(rollout_id))
        assert [span.attributes.get("task") for span in spans] == [task, task, None]
        assert find_final_reward(spans) == task


async def test_threads_that_an_agent_starts_are_part_of_its_trace(memory):
    @rollout_agent
    def agent(task, llm):
        thread = threading.Thread(target=lambda: emit_reward(0.5))
        thread.start()
        thread.join()

    await memory.add_resources(LLM_RESOURCES)
    queued = await memory.enqueue_rollout(1)
    worker = LitAgentRunner(OtelTracer(instrument=["threading"]), max_rollouts=1, heartbeat_interval=0)
    async with worker.run_context(agent=agent, store=memory):
        await worker.iter()
    assert find_final_reward(await memory.query_spans(queued.rollout_id)) == 0.5


@pytest.mark.parametrize("kind", ["sleeps", "blocks", "swallows"])
async def test_an_agent_that_hangs_is_timed_out_and_tried_again(memory, kind, monkeypatch):
    monkeypatch.setattr("rollout_core.agents.agent_calls.GRACE_SECONDS", 0.2)
    release = threading.Event()

    class Patient(Hook):
        """The second try, which needs no time, has as much as it takes."""

        async def on_rollout_start(self, *, agent, runner, rollout):
            if rollout.attempt.sequence_id == 1:
                patient = rollout.config.model_copy(update={"timeout_seconds": FOREVER})
                await memory.update_rollout(rollout.rollout_id, config=patient)

    class Sync(LitAgent):
        def rollout(self, task, resources, rollout):
            if rollout.attempt.sequence_id == 1:
                release.wait(LONG)
            return 1.0

    class Async(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            while rollout.attempt.sequence_id == 1 and not release.is_set():
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    if kind != "swallows":
                        raise
            return 1.0

    config = RolloutConfig(timeout_seconds=0.3, max_attempts=2, retry_condition=["timeout"])
    queued = await memory.enqueue_rollout(1, config=config)
    agent = Sync() if kind == "blocks" else Async()
    try:
        async with runner(max_rollouts=2).run_context(agent=agent, store=memory, hooks=[Patient()]) as worker:
            await asyncio.wait_for(worker.iter(), LONG)
    finally:
        release.set()
    statuses = [attempt.status for attempt in await memory.query_attempts(queued.rollout_id)]
    assert statuses == ["timeout", "succeeded"]


async def test_a_cancelled_runner_never_leaves_a_success(memory):
    started = asyncio.Event()

    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            started.set()
            await asyncio.sleep(60)

    queued = await memory.enqueue_rollout(1)
    async with runner().run_context(agent=Agent(), store=memory) as worker:
        work = asyncio.create_task(worker.iter())
        await started.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "failed"


async def test_an_agent_whose_rollout_is_cancelled_is_stopped(memory):
    started, stopped = asyncio.Event(), asyncio.Event()

    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

    queued = await memory.enqueue_rollout(1)
    worker = runner(max_rollouts=1, heartbeat_interval=0.05)
    async with worker.run_context(agent=Agent(), store=memory):
        work = asyncio.create_task(worker.iter())
        await started.wait()
        await memory.update_rollout(queued.rollout_id, status="cancelled")
        await asyncio.wait_for(work, LONG)
    assert stopped.is_set()
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "cancelled"


async def test_an_agent_that_exits_or_forks_harms_nobody(memory):
    class Agent(LitAgent):
        def rollout(self, task, resources, rollout):
            if task == "exit":
                sys.exit(3)
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            return 1.0  # the child comes here too

    class AsyncAgent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            sys.exit(3)

    for task in ("exit", "fork"):
        await memory.enqueue_rollout(task)
    await run_all(memory, Agent(), 2)
    assert [rollout.status for rollout in await memory.query_rollouts()] == ["failed", "succeeded"]
    queued = await memory.enqueue_rollout("exit")
    await run_all(memory, AsyncAgent(), 1)
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "failed"


class Panic(BaseException):
    """As what Rust's libraries raise where they are at fault."""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: next(iter([])), "StopIteration was raised"),
        (lambda: (_ for _ in ()).throw(Panic("index out of bounds")), "the agent ended by Panic: index out of bounds"),
    ],
    ids=["StopIteration", "panic"],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_an_agent_raises_fails_its_attempt_and_says_so(memory, what, message, is_async):
    """`next` that finds nothing is everyday Python: a synchronous agent with it hung its runner for ever."""

    def agent(task, rollout):
        return what() if task == "bad" else 1.0

    async def async_agent(task, rollout):
        return agent(task, rollout)

    bad, good = await memory.enqueue_rollout("bad"), await memory.enqueue_rollout("good")
    await run_all(memory, FunctionalLitAgent(async_agent if is_async else agent), 2)
    statuses = [(await memory.get_rollout_by_id(one.rollout_id)).status for one in (bad, good)]
    assert statuses == ["failed", "succeeded"]
    [span] = await memory.query_spans(bad.rollout_id)
    if "StopIteration" in message and is_async:
        message = "coroutine raised StopIteration"
    assert message in span.attributes["exception.message"]


async def test_an_asynchronous_agent_is_awaited_however_it_is_wrapped(memory, monkeypatch):
    """Behind an ordinary decorator, as the __call__ of an object, and where a synchronous one returns what to await;
    its time limit holds, too."""

    def counted(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    async def plain(task, rollout):
        await asyncio.sleep(FOREVER if task == "slow" else 0)
        return 0.5

    class Callable:
        async def __call__(self, task, rollout):
            return await plain(task, rollout)

    monkeypatch.setattr("rollout_core.agents.agent_calls.GRACE_SECONDS", 0.5)
    for agent in (counted(plain), Callable(), lambda task, rollout: plain(task, rollout)):
        quick = await memory.enqueue_rollout("quick")
        slow = await memory.enqueue_rollout("slow", config=RolloutConfig(timeout_seconds=0.5))
        await run_all(memory, FunctionalLitAgent(agent), 2)
        assert (await memory.get_rollout_by_id(quick.rollout_id)).status == "succeeded"
        assert find_final_reward(await memory.query_spans(quick.rollout_id)) == 0.5
        [attempt] = await memory.query_attempts(slow.rollout_id)
        assert attempt.status == "timeout"


async def test_hooks_see_their_moments_in_order_and_cannot_harm(memory):
    seen = []

    class Notes(Hook):
        async def on_rollout_start(self, *, agent, runner, rollout):
            seen.append("rollout start")

        async def on_trace_start(self, *, agent, runner, tracer, rollout):
            emit_annotation({"by": "hook"})
            seen.append("trace start")

        async def on_trace_end(self, *, agent, runner, tracer, rollout):
            seen.append(("trace end", len(tracer.get_last_trace())))

        async def on_rollout_end(self, *, agent, runner, rollout, spans):
            stored = await runner.get_store().get_rollout_by_id(rollout.rollout_id)
            seen.append(("rollout end", [get_reward_value(span) for span in spans], stored.status))

    class Bad(Hook):
        async def on_trace_start(self, **given):
            raise RuntimeError("bad hook")

    @rollout_agent
    def agent(task, llm):
        return 1.5

    await memory.add_resources(LLM_RESOURCES)
    await memory.enqueue_rollout(1)
    worker = runner(max_rollouts=1)
    async with worker.run_context(agent=agent, store=memory, hooks=[Bad(), Notes()]):
        await worker.iter()
    assert seen == ["rollout start", "trace start", ("trace end", 1), ("rollout end", [None, 1.5], "running")]
    assert [rollout.status for rollout in await memory.query_rollouts()] == ["succeeded"]


async def test_step_runs_one_input_and_raises_what_the_agent_raises(store):
    @llm_rollout
    def agent(task, llm):
        if task == "bad":
            raise KeyError("gone")
        return 0.5 if "/rollout/ro-" in llm.endpoint else 0.0

    async with runner().run_context(agent=agent, store=store) as worker:
        proxied = {"main": ProxyLLM(endpoint="http://localhost:9/v1", model="m")}
        done = await worker.step("good", resources=proxied, mode="val")
        assert (done.status, done.mode) == ("succeeded", "val")
        assert find_final_reward(await store.query_spans(done.rollout_id)) == 0.5
        with pytest.raises(KeyError, match="gone"):
            await worker.step("bad")
    assert [rollout.status for rollout in await store.query_rollouts()] == ["succeeded", "failed"]


async def test_missing_resources_fail_the_rollout_and_say_so(memory, caplog):
    @llm_rollout
    def agent(task, llm):
        return 1

    without, unknown = await memory.enqueue_rollout(1), await memory.enqueue_rollout(2, resources_id="rs-nope")
    await run_all(memory, agent, 2)
    for queued in (without, unknown):
        assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "failed"
    assert "asks for a LLM, but the resources are none" in caplog.text
    assert "rs-nope" in caplog.text


async def test_heartbeats_that_fail_in_a_row_are_one_warning(caplog):
    sent = [True, False, False, False, True, False, False]

    class Away(InMemoryLightningStore):
        async def update_worker(self, worker_id, *stats):
            if sent and not sent.pop(0):
                raise Recoverable("the store is away")
            return await super().update_worker(worker_id, *stats)

    async with Away() as store, Heartbeats(store, "w", 0.001, "asyncio", include_gpu=False):
        await until(lambda: not sent)
    told = [record for record in caplog.records if "could not send its heartbeat" in record.message]
    assert [record.levelname for record in told if record.levelno >= logging.WARNING] == ["WARNING"] * 2


async def test_heartbeats_say_what_the_machine_is_at(store):
    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            async with asyncio.timeout(LONG):
                while (worker := await store.get_worker_by_id("Worker-0")) is None or not worker.heartbeat_stats:
                    await asyncio.sleep(0.02)

    await store.enqueue_rollout(1)
    await run_all(store, Agent(), 1, heartbeat_interval=0.1)
    worker = await store.get_worker_by_id("Worker-0")
    assert worker.last_heartbeat_time is not None
    assert set(worker.heartbeat_stats) == {"host", "process", "cpu", "memory", "disk", "network"}


async def test_ten_thousand_spans_of_one_rollout_arrive(store):
    @rollout_agent
    def agent(task, llm):
        for number in range(task):
            emit_annotation({"number": number})

    count = 10_000 if isinstance(store, InMemoryLightningStore) else 2_000
    await store.add_resources(LLM_RESOURCES)
    queued = await store.enqueue_rollout(count)
    await run_all(store, agent, 1)
    spans = await store.query_spans(queued.rollout_id)
    assert [span.attributes["number"] for span in spans] == list(range(count))


async def test_an_attempt_whose_span_the_store_refuses_is_no_success_and_says_why(store):
    """Over HTTP a span has at most 8 MiB; a reward beside a long transcript was lost, and the attempt had succeeded."""

    @rollout_agent
    def agent(task, llm):
        emit_annotation({"before": 1})
        emit_annotation({"agentlightning.reward": 1.0, "transcript": "x" * (9 * 2**20)})
        emit_annotation({"after": 1})

    await store.add_resources(LLM_RESOURCES)
    queued = await store.enqueue_rollout("task")
    await run_all(store, agent, 1)
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    spans = await store.query_spans(queued.rollout_id)
    if not isinstance(store, LightningStoreClient):
        assert rollout.status == "succeeded" and len(spans) == 3
        return
    assert rollout.status == "failed"
    assert [span.attributes.get("before", span.attributes.get("after")) for span in spans] == [1, None, 1]
    assert "the store refuses the span 'agentlightning." in spans[1].attributes["exception.message"]


async def test_a_runner_whose_store_is_gone_for_good_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_core.agents.runner._PROBE_SECONDS", 0.1)
    server = LightningStoreServer(InMemoryLightningStore())
    await server.start()
    client = LightningStoreClient(server.endpoint, retry_delays=(0.1, 0.2, 0.5))

    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            return 1.0

    async with runner(store_patience_seconds=0.5).run_context(agent=Agent(), store=client) as worker:
        work = asyncio.create_task(worker.iter())
        await asyncio.sleep(0.3)
        await server.stop()
        with pytest.raises(Recoverable):
            await asyncio.wait_for(work, LONG)
    await client.close()


async def test_a_claim_whose_answer_is_lost_is_asked_for_again(tmp_path):
    """And not made a second time."""

    class Forgetful(SqlLightningStore):
        lost = 0

        async def claim_rollouts(self, *args, **options):
            claimed = await super().claim_rollouts(*args, **options)
            if claimed and not self.lost:
                self.lost += 1
                raise UnknownOutcome("the connection broke")
            return claimed

    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            return 1.0

    async with Forgetful.from_url(f"sqlite:///{tmp_path / 'store.db'}") as store:
        ids = [(await store.enqueue_rollout(number)).rollout_id for number in range(2)]
        await run_all(store, Agent(), 2)
        assert store.lost == 1
        for rollout_id in ids:
            assert [attempt.status for attempt in await store.query_attempts(rollout_id)] == ["succeeded"]


@pytest.mark.parametrize("attributes", [{"a": {1, 2}}, {"a": float("nan")}, {"a": b"raw"}, {"a": "\udc80"}])
async def test_a_returned_span_that_no_store_can_keep_fails_the_attempt(store, attributes):
    class Agent(LitAgent):
        def rollout(self, task, resources, rollout):
            return [
                SpanCoreFields(
                    name="own",
                    status=TraceStatus(status_code="OK"),
                    attributes=attributes,
                    start_time=None,
                    end_time=None,
                )
            ]

    queued = await store.enqueue_rollout(1)
    await run_all(store, Agent(), 1)
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "failed"


async def test_a_cancellation_waits_for_the_end_of_an_attempt(memory):
    ending = asyncio.Event()

    class Slow(Hook):
        async def on_rollout_end(self, *, agent, runner, rollout, spans):
            ending.set()
            await asyncio.sleep(0.3)

    class Agent(LitAgent):
        async def rollout_async(self, task, resources, rollout):
            return 1.0

    queued = await memory.enqueue_rollout(1)
    async with runner().run_context(agent=Agent(), store=memory, hooks=[Slow()]) as worker:
        work = asyncio.create_task(worker.iter())
        await ending.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (await memory.get_rollout_by_id(queued.rollout_id)).status == "succeeded"


async def test_idle_runners_wake_when_work_is_queued(store, monkeypatch):
    """However long their pauses have become."""

    @rollout_agent
    async def agent(task, llm):
        return 1.0

    pauses: list[float] = []

    def told(wait):
        def wait_for_work(timeout):
            pauses.append(timeout)
            return wait(timeout)

        return wait_for_work

    monkeypatch.setattr("rollout_core.agents.runner._FIRST_POLL_SECONDS", FOREVER)
    monkeypatch.setattr(wire, "LONGEST_WAIT_SECONDS", FOREVER)
    patient = store
    if isinstance(store, LightningStoreClient):
        patient = LightningStoreClient(store.server_address_root, request_timeout=2 * FOREVER)
    monkeypatch.setattr(patient, "wait_for_work", told(patient.wait_for_work))
    await store.add_resources(LLM_RESOURCES)
    async with runner(poll_interval=FOREVER, interval_jitter=0).run_context(agent=agent, store=patient) as worker:
        event = threading.Event()
        work = asyncio.create_task(worker.iter(event=event))
        async with asyncio.timeout(LONG):
            while not pauses:
                await asyncio.sleep(0.01)
            assert pauses == [FOREVER], "it wakes before that, or after the test has failed"
            queued = await store.enqueue_rollout(1)
            while (await store.get_rollout_by_id(queued.rollout_id)).status != "succeeded":
                await asyncio.sleep(0.01)
        event.set()
        await asyncio.wait_for(work, LONG)
    if patient is not store:
        await patient.close()
