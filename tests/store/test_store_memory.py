"""What is special about the store in memory and the thread-safe wrapper: isolation, eviction, threads, processes."""

from __future__ import annotations

import asyncio
import copy
import json
import multiprocessing
import pickle
import threading
from inspect import iscoroutinefunction

import pytest

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.loops import LoopLock
from rollout_core.store import (
    LLM,
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreThreaded,
    RolloutConfig,
    SqlLightningStore,
)
from tests.store.forking import leave
from tests.store.patience import LONG

pytestmark = pytest.mark.asyncio


async def test_nothing_a_caller_does_to_its_objects_reaches_the_store(make):
    store = InMemoryLightningStore()
    task, metadata, config = {"messages": [{"role": "user"}]}, {"a": [1]}, RolloutConfig(retry_condition=["failed"])
    rollout = await store.enqueue_rollout(task, config=config, metadata=metadata)
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    original = claimed.model_copy(deep=True)
    task["messages"].append("mine")
    metadata["a"].append(2)
    config.retry_condition.append("timeout")
    for shown in (rollout, claimed, await store.get_rollout_by_id(claimed.rollout_id)):
        shown.input["messages"][0]["role"] = shown.status = "changed"
        shown.metadata["a"].append(3)
        shown.config.max_attempts = 9
        shown.config.retry_condition.clear()
    claimed.attempt.status = "failed"
    assert await store.get_rollout_by_id(claimed.rollout_id) == original

    attributes = {"ids": [1]}
    span = make.span(original, attributes=attributes)
    await store.add_span(span)
    attributes["ids"].append(2)
    span.name = "changed"
    [read] = await store.query_spans(claimed.rollout_id)
    assert (read.attributes, read.name) == ({"ids": [1]}, "agentlightning.virtual")
    read.attributes["more"] = read.further = 1
    read.events.append(None)
    [again] = await store.query_spans(claimed.rollout_id)
    assert (again.attributes, again.events, hasattr(again, "further")) == ({"ids": [1]}, [], False)

    resources = {"llm": LLM(endpoint="e", model="m", sampling_parameters={"t": 1})}
    snapshot = await store.add_resources(resources)
    expected = copy.deepcopy(snapshot)
    resources["llm"].sampling_parameters["t"] = 2
    snapshot.resources["llm"].model = "changed"
    assert await store.get_latest_resources() == expected


async def test_ids_that_are_not_text_are_refused_and_change_nothing():
    store = InMemoryLightningStore()
    await store.enqueue_rollout(1)
    for bad in ("\ud800", ["a"], object(), 7):
        for call in (
            store.get_rollout_by_id,
            store.get_latest_attempt,
            store.get_worker_by_id,
            store.update_worker,
            store.query_attempts,
            store.query_spans,
            store.get_resources_by_id,
            store.dequeue_rollout,
            store.start_attempt,
        ):
            with pytest.raises(ConfigError, match=r"expected text|lone surrogate"):
                await call(bad)
        for batch in (store.start_many_attempts, store.query_many_spans):
            with pytest.raises(ConfigError):
                await batch([bad])
            with pytest.raises(ConfigError):
                await batch("text")
        with pytest.raises(ConfigError):
            await store.get_next_span_sequence_id(bad, "at")
        with pytest.raises(ConfigError):
            await store.query_rollouts(rollout_id_in=[bad])
    assert len(await store.query_workers()) == 0
    assert (await store.dequeue_rollout("w")).input == 1


async def test_snapshots_added_at_one_moment_still_have_a_latest(clock):
    store = InMemoryLightningStore(clock=clock)
    for n in range(3):
        last = await store.update_resources(f"rs-{2 - n}", {})
        assert await store.get_latest_resources() == last
        assert (await store.enqueue_rollout(n)).resources_id == f"rs-{2 - n}"


# Eviction


def evicting_store() -> InMemoryLightningStore:
    return InMemoryLightningStore(1000, 600, lambda span: 100)


async def test_the_oldest_rollouts_lose_their_spans_down_to_the_safe_level(make):
    store = evicting_store()
    rollouts = [await store.start_rollout(n) for n in range(5)]
    for rollout in reversed(rollouts):
        await store.add_many_spans([make.span(rollout) for _ in range(2)])
    assert (await store.statistics())["total_span_bytes"] == 1000
    await store.add_span(make.span(rollouts[4]))
    statistics = await store.statistics()
    assert (statistics["total_span_bytes"], statistics["total_spans"]) == (500, 5)
    for evicted in rollouts[:3]:
        with pytest.raises(RuntimeError, match=f"spans of rollout {evicted.rollout_id} were evicted"):
            await store.query_spans(evicted.rollout_id)
    with pytest.raises(Fatal):
        await store.query_many_spans([rollout.rollout_id for rollout in rollouts])
    assert len(await store.query_spans(rollouts[3].rollout_id)) == 2
    assert len(await store.query_many_spans([rollouts[4].rollout_id])) == 3


async def test_spans_of_an_evicted_rollout_are_heartbeats_and_are_not_kept(make, clock):
    store = InMemoryLightningStore(100, 50, lambda span: 60, clock=clock, scan_debounce_seconds=0)
    rollout = await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=10))
    await store.add_many_spans([make.span(rollout), make.span(rollout)])
    for _ in range(3):
        clock.advance(8)
        assert await store.add_span(make.span(rollout)) is not None
        assert await make.status(store, rollout.rollout_id) == "running"
    assert (await store.statistics())["total_span_bytes"] == 0
    with pytest.raises(RuntimeError):
        await store.query_spans(rollout.rollout_id)


async def test_thresholds_are_shares_of_memory_or_bytes(make):
    statistics = await InMemoryLightningStore().statistics()
    capacity = statistics["memory_capacity_bytes"]
    assert statistics["eviction_threshold_bytes"] == int(capacity * 0.7)
    assert statistics["safe_threshold_bytes"] == int(0.8 * int(capacity * 0.7))
    statistics = await InMemoryLightningStore(0.5, 1000).statistics()
    assert (statistics["eviction_threshold_bytes"], statistics["safe_threshold_bytes"]) == (capacity // 2, 1000)
    store = InMemoryLightningStore()
    rollout = await store.start_rollout(1)
    await store.add_span(make.span(rollout, attributes={"ids": list(range(1000))}))
    assert 5_000 < (await store.statistics())["total_span_bytes"] < 10_000


@pytest.mark.parametrize("bad", [(0,), (-1,), (float("nan"),), ("1GB",), (True,), (100, 200), (None, 0.9)])
async def test_thresholds_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="memory_threshold"):
        InMemoryLightningStore(*bad)


# Threads and processes


def work_in_thread(store, results: list[str]) -> None:
    async def work() -> None:
        while (claimed := await store.dequeue_rollout()) is not None:
            results.append(claimed.rollout_id)
            await store.get_many_span_sequence_ids([("counted", "any")])
            await store.update_attempt(claimed.rollout_id, "latest", status="succeeded", fenced=True)

    asyncio.run(work())


class SlowStore(InMemoryLightningStore):
    """A store that waits in the middle of calls and is not safe for anything."""

    inside = 0

    @property
    def capabilities(self):
        return {}

    async def _do(self, operation, *, watched=True):
        self.inside += 1
        assert self.inside == 1, "two calls at once"
        await asyncio.sleep(0.0001)
        try:
            return await super()._do(operation, watched=watched)
        finally:
            self.inside -= 1


@pytest.mark.parametrize("make_store", [InMemoryLightningStore, lambda: LightningStoreThreaded(SlowStore())])
async def test_threads_with_loops_of_their_own_share_a_store(make_store):
    store = make_store()
    await store.start_rollout(0)
    ids = [f"r{n}" for n in range(300)]
    requests = [EnqueueRolloutRequest(input=0, rollout_id=id) for id in ids]
    await store.enqueue_many_rollouts([*requests, EnqueueRolloutRequest(input=0, rollout_id="counted")])
    results: list[str] = []
    threads = [threading.Thread(target=work_in_thread, args=(store, results)) for _ in range(4)]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids))
    for thread in threads:
        thread.start()
    assert len(await asyncio.wait_for(waiting, LONG)) == 300
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert sorted(results) == sorted([*ids, "counted"])
    assert await store.get_next_span_sequence_id("counted", "any") == 302


async def test_tasks_of_one_loop_share_a_threaded_store_that_waits_within_calls():
    store = LightningStoreThreaded(SlowStore())
    await asyncio.gather(*[store.enqueue_rollout(n) for n in range(50)])
    claimed = await asyncio.gather(*[store.dequeue_rollout() for _ in range(60)])
    assert sorted(rollout.input for rollout in claimed if rollout) == list(range(50))


async def test_a_cancelled_waiter_does_not_keep_the_lock():
    lock = LoopLock()
    entered = []

    async def enter(n: int) -> None:
        async with lock:
            entered.append(n)
            await asyncio.sleep(0)

    for rounds in range(6):
        tasks = [asyncio.create_task(enter(n)) for n in range(4)]
        for _ in range(rounds):
            await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LONG)
        await asyncio.wait_for(enter(9), LONG)
    assert entered.count(9) == 6 and entered.count(0) == entered.count(3) == 6


async def test_a_closed_loop_does_not_keep_the_lock():
    lock = LoopLock()
    async with lock:
        other = asyncio.new_event_loop()
        waiting = other.create_task(lock.__aenter__())
        await asyncio.to_thread(other.run_until_complete, asyncio.sleep(0.01))
        assert not waiting.done()
        other.close()
    async with asyncio.timeout(LONG), lock:
        pass


async def test_the_threaded_store_adds_thread_safety_to_the_capabilities(url):
    assert LightningStoreThreaded(SlowStore()).capabilities == {"thread_safe": True, "async_safe": True}
    async with LightningStoreThreaded(SqlLightningStore.from_url(url)) as store:
        assert store.capabilities == store.store.capabilities
        with pytest.raises(NotImplementedError):
            store.otlp_traces_endpoint()
        rollout = await store.enqueue_rollout(1)
        async with pickle.loads(pickle.dumps(store)) as copied:  # noqa: S301 - our own bytes
            assert await copied.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_the_threaded_store_passes_on_what_the_store_does_better_than_the_contract(url, make):
    """Claims are remembered, released claims leave no attempt, and JSON comes straight from the table."""
    async with LightningStoreThreaded(SqlLightningStore.from_url(url)) as store:
        first, second = [await store.enqueue_rollout(n) for n in range(2)]
        [claimed] = await store.claim_rollouts("claim", worker_id="w")
        assert list(await store.claim_rollouts("claim", worker_id="w", repeated=True)) == [claimed]
        await store.release_rollouts([claimed])
        [again] = await store.dequeue_many_rollouts()
        assert (again.rollout_id, again.attempt.sequence_id) == (first.rollout_id, 1)
        await store.add_span(make.span(again))
        page = await store.query_spans_json(again.rollout_id, limit=1)
        assert page == await store.store.query_spans_json(again.rollout_id, limit=1)
        assert json.loads(page)["total"] == 1
        assert (await store.get_rollout_by_id(second.rollout_id)).status == "queuing"


async def test_every_coroutine_of_the_contract_is_passed_on():
    coroutines = {name for name, value in vars(LightningStore).items() if iscoroutinefunction(value)}
    inherited = {name for name in coroutines if getattr(LightningStoreThreaded, name) is getattr(LightningStore, name)}
    assert inherited == {"__aenter__", "__aexit__"}


async def test_a_store_in_memory_is_not_pickled_into_another():
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(LightningStoreThreaded(InMemoryLightningStore()))


def _child_of_fork(store, results) -> None:
    async def enqueue_and_count() -> int:
        await store.enqueue_rollout(2)
        return len(await store.query_rollouts())

    results.put(asyncio.run(asyncio.wait_for(enqueue_and_count(), LONG / 2)))
    leave()


@pytest.mark.parametrize("make_store", [InMemoryLightningStore, lambda: LightningStoreThreaded(SlowStore())])
async def test_a_forked_child_works_on_a_copy_even_if_the_lock_was_held(make_store):
    store = make_store()
    await store.enqueue_rollout(1)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_child_of_fork, args=(store, results))
    lock = store._lock if isinstance(store, LightningStoreThreaded) else store.collections.atomic()
    async with lock:
        child.start()
    await asyncio.to_thread(child.join, LONG)
    assert child.exitcode == 0
    assert results.get() == 2
    assert len(await store.query_rollouts()) == 1


async def test_the_cost_of_a_call_does_not_grow_with_what_is_stored():
    """Counted in items looked at, not in seconds."""
    store = InMemoryLightningStore(scan_debounce_seconds=0)
    config = RolloutConfig(timeout_seconds=1e6)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(3000)])
    claimed = await store.dequeue_many_rollouts(limit=2000)
    updates = [
        AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="latest", status="succeeded")
        for rollout in claimed[:1000]
    ]
    await store.update_many_attempts(updates)
    looked_at = 0
    collection = store.collections._rollouts
    match = collection._match

    def counted(filter):
        nonlocal looked_at
        entries, count = match(filter)

        def walk():
            nonlocal looked_at
            for entry in entries:
                looked_at += 1
                yield entry

        return type(match(filter))(walk(), count)

    collection._match = counted
    for status in ("queuing", "preparing", "succeeded"):
        page = await store.query_rollouts(status_in=[status], limit=50)
        assert (len(page), page.total) == (50, 1000)
    await store.query_rollouts(status_in=["queuing", "succeeded"], limit=50, offset=10)
    await store.get_rollout_by_id(claimed[0].rollout_id)
    assert await store.dequeue_rollout() is not None
    assert looked_at < 300
