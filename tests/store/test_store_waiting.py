"""The contract of waiting for rollouts."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading

import pytest
import pytest_asyncio

from rollout_core.base.loops import Bell, LoopThread, Waiters
from rollout_core.store import (
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
)
from rollout_core.store.http import wire
from rollout_core.web import listening
from tests.store.conftest import SHARED
from tests.store.forking import leave
from tests.store.patience import FOREVER, LONG

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def looks_once(store, monkeypatch):
    """The store, none of whose waits looks a second time: news end them, or nothing does."""
    for name in ("sql.store.SHORTEST_POLL", "sql.store.LONGEST_POLL", "sql.store.LOOK", "memory.collection_based.POLL"):
        monkeypatch.setattr(f"rollout_core.store.{name}_SECONDS", FOREVER)
    if not isinstance(store, LightningStoreClient):
        yield store
        return
    monkeypatch.setattr(wire, "LONGEST_WAIT_SECONDS", FOREVER)
    async with LightningStoreClient(store.server_address_root, request_timeout=2 * FOREVER) as client:
        yield client


async def test_waiting_returns_as_soon_as_all_are_finished(looks_once, make):
    store = looks_once
    rollouts = [await store.start_rollout(n) for n in range(3)]
    ids = [rollout.rollout_id for rollout in rollouts]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids))
    for rollout, status in zip(rollouts, ("succeeded", "failed", "failed"), strict=True):
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await store.update_attempt(rollout.rollout_id, "latest", status=status)
    finished = await asyncio.wait_for(waiting, LONG)
    assert [(rollout.rollout_id, rollout.status) for rollout in finished] == list(
        zip(ids, ("succeeded", "failed", "failed"), strict=True)
    )


async def test_a_timeout_returns_what_is_finished(store):
    done, open_ = [await store.start_rollout(n) for n in range(2)]
    await store.update_rollout(done.rollout_id, status="cancelled")
    ids = [done.rollout_id, open_.rollout_id]
    for timeout in (0, -1, 0.05):
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=timeout)
        assert [rollout.rollout_id for rollout in finished] == [done.rollout_id]


async def test_unknown_ids_are_not_waited_for(store):
    assert await asyncio.wait_for(store.wait_for_rollouts(rollout_ids=["nope"]), LONG) == []
    assert await store.wait_for_rollouts(rollout_ids=[]) == []
    done = await store.start_rollout(1)
    await store.update_rollout(done.rollout_id, status="succeeded")
    finished = await asyncio.wait_for(store.wait_for_rollouts(rollout_ids=["nope", done.rollout_id]), LONG)
    assert [rollout.rollout_id for rollout in finished] == [done.rollout_id]


async def test_a_retry_does_not_end_the_wait(store, make):
    rollout = await make.claimed(store, max_attempts=2, retry_condition=["failed"])
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
    await store.update_attempt(rollout.rollout_id, "latest", status="failed")
    again = await store.dequeue_rollout()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.update_attempt(again.rollout_id, again.attempt.attempt_id, status="succeeded")
    [finished] = await asyncio.wait_for(waiting, LONG)
    assert finished.attempt.sequence_id == 2


async def test_many_wait_at_once_and_a_cancelled_one_disturbs_nobody(store):
    rollout = await store.start_rollout(1)
    ids = [rollout.rollout_id]
    waiting = [asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids)) for _ in range(10)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(len(result) == 1 for result in results[1:])


async def test_waiting_notices_an_attempt_that_nobody_else_watches(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=10)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
    await asyncio.sleep(0.05)
    clock.advance(11)
    [finished] = await asyncio.wait_for(waiting, LONG)
    assert (finished.status, finished.attempt.status) == ("failed", "timeout")


async def test_thousands_can_be_waited_for_in_one_call(store):
    ids = [f"r{n}" for n in range(5000)]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, rollout_id=id) for id in ids])
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids))
    await store.start_many_attempts(ids)
    updates = [AttemptUpdate(rollout_id=id, attempt_id="latest", status="succeeded") for id in ids]
    for start in range(0, 5000, 500):
        await store.update_many_attempts(updates[start : start + 500])
    assert len(await asyncio.wait_for(waiting, LONG)) == 5000


@pytest.mark.parametrize("make_store", SHARED, indirect=True)
async def test_another_store_object_on_the_same_data_wakes_the_waiter(make_store):
    mine, other = await make_store(), await make_store()
    rollout = await mine.start_rollout(1)
    waiting = asyncio.create_task(mine.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
    await asyncio.sleep(0.1)
    await other.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert len(await asyncio.wait_for(waiting, LONG)) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_forked_child_waits_for_nothing_that_was_under_way_in_its_parent():
    def wake() -> None:
        waiters.wake(["a"])
        leave()

    waiters = Waiters()
    with waiters._lock:
        child = multiprocessing.get_context("fork").Process(target=wake)
        child.start()
    child.join(LONG)
    child.kill()
    assert child.exitcode == 0


async def test_waiting_for_work_ends_when_something_is_queued(looks_once, make):
    store = looks_once
    assert not await store.wait_for_work(0.05)
    waiting = asyncio.create_task(store.wait_for_work(FOREVER))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await store.enqueue_rollout(1)
    assert await asyncio.wait_for(waiting, LONG)
    assert await asyncio.wait_for(store.wait_for_work(FOREVER), LONG), "something is queued already"
    await store.dequeue_rollout()
    assert not await store.wait_for_work(0.05)


@pytest.mark.parametrize("how", ["failed attempt", "requeuing", "released"])
async def test_waiting_for_work_ends_when_something_is_queued_again(store, make, how):
    rollout = await make.claimed(store, max_attempts=2, retry_condition=["failed"])
    waiting = asyncio.create_task(store.wait_for_work(FOREVER))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    if how == "failed attempt":
        await store.update_attempt(rollout.rollout_id, "latest", status="failed")
    elif how == "requeuing":
        await store.update_rollout(rollout.rollout_id, status="requeuing")
    else:
        await store.release_rollouts([rollout])
    assert await asyncio.wait_for(waiting, LONG)
    assert (await store.dequeue_rollout()).rollout_id == rollout.rollout_id


async def test_an_attempt_that_is_lost_is_work_for_those_who_wait(make_store, make, clock):
    store = await make_store(scan_debounce_seconds=0)
    await make.claimed(store, timeout_seconds=10, max_attempts=2, retry_condition=["timeout"])
    waiting = asyncio.create_task(store.wait_for_work(FOREVER))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    clock.advance(11)
    assert await asyncio.wait_for(waiting, LONG)


async def test_no_more_are_woken_than_there_is_work_for():
    bell = Bell()
    with bell.listening() as first, bell.listening() as second, bell.listening() as third:
        bell.ring(2)
        await asyncio.sleep(0)
        assert [event.is_set() for event in (first, second, third)] == [True, True, False]
        bell.ring(5)
        await asyncio.sleep(0)
        assert third.is_set()
    bell.ring(1)


@pytest.mark.parametrize("look_seconds", [0, 60])
async def test_who_is_cancelled_when_work_comes_leaves_it_to_the_next(look_seconds):
    async def look() -> bool:
        await asyncio.sleep(look_seconds)
        return False

    bell = Bell()
    first = asyncio.create_task(bell.wait(look, timeout=60, first_poll=60, longest_poll=60))
    await asyncio.sleep(0.05)
    with bell.listening() as second:
        bell.ring(1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(second.wait(), LONG)


async def test_a_cancelled_claim_of_a_task_is_given_back():
    class Slow(InMemoryLightningStore):
        async def get_latest_resources(self):
            reached.set()
            await asyncio.sleep(60)

    reached, store = asyncio.Event(), Slow()
    rollout = await store.enqueue_rollout("task")
    claiming = asyncio.create_task(store.claim_task("claim"))
    await reached.wait()
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    again = await store.dequeue_rollout()
    assert again is not None and again.rollout_id == rollout.rollout_id


@pytest.mark.filterwarnings("error")
async def test_a_server_that_ends_sends_those_away_who_wait_for_work(caplog, monkeypatch):
    class Told(InMemoryLightningStore):
        async def wait_for_work(self, timeout):
            reached.set()
            return await super().wait_for_work(timeout)

    reached = threading.Event()
    for module, name in ((wire, "LONGEST_WAIT_SECONDS"), (listening, "GRACE_SECONDS")):
        monkeypatch.setattr(module, name, FOREVER)
    server = LightningStoreServer(Told(), port=0)
    await server.start()
    async with LightningStoreClient(server.endpoint, request_timeout=2 * FOREVER) as client:
        waiting = asyncio.create_task(client.wait_for_work(FOREVER))
        assert await asyncio.to_thread(reached.wait, LONG)
        await asyncio.wait_for(server.stop(), LONG)  # the grace of the server is not spent
        assert not await waiting
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_collection_on_a_loops_thread_runs_no_finalizers_task():
    """Such as that of openai's client, which would close the sockets of the loop that it was used on."""
    places = []

    class Client:
        def __init__(self):
            self.itself = self

        def __del__(self):
            closing = close()
            try:
                places.append(threading.current_thread().name)
                asyncio.get_running_loop().create_task(closing)
            except RuntimeError as error:
                places.append(str(error))

    async def close() -> None:
        places.append("closed")

    async def collect() -> int:
        gc.collect()
        return await asyncio.create_task(asyncio.sleep(0, 7))

    gc.collect()
    gc.disable()
    thread = LoopThread("aside")
    try:
        Client()
        assert await thread.run(collect()) == 7
        assert places == ["aside", "a finalizer's task belongs to the loop that its object was used on"]
        places.clear()
        Client()
        await collect()
        assert places == ["MainThread", "closed"]
    finally:
        gc.enable()
        thread.stop()
