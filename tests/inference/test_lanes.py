"""Lanes: several sets of requests through one engine, in turn, and none of them waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from batches import PARAMS

from rollout_core.data.samples import Completion
from rollout_core.inference.backend import GathersStream, Request
from rollout_core.inference.lanes import Lane, Lanes
from tests.store.patience import LONG


def requests(*keys: str) -> list[Request]:
    return [Request(key, [1], PARAMS, 0) for key in keys]


class Echo(GathersStream):
    """Completes what it is given in groups of what is there; notes the order of arrival."""

    batch_invariant = True

    def __init__(self, *, ends_after: int | None = None) -> None:
        self.taken: list[str] = []
        self._ends_after = ends_after

    def stream(self, given: Iterable[Request | None]) -> Iterator[Completion]:
        for number, request in enumerate(given):
            if number == self._ends_after:
                return
            if request is not None:
                self.taken.append(request.key)
                yield Completion(request.key, [], [], "", "stop")


async def all_keys(lane: Lane, count: int) -> list[str]:
    keys: list[str] = []
    while len(keys) < count:
        keys += [outcome.key for outcome in await lane.outcomes(timeout=5)]
    return keys


async def test_a_lanes_turn_comes_when_all_of_the_one_before_is_taken():
    backend = Echo()
    lanes = Lanes(backend)
    first, second = lanes.open(), lanes.open()
    await first.turn()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.turn(), 0.05)
    first.submit(requests("a", "b"))
    assert await all_keys(first, 2) == ["a", "b"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.turn(), 0.05)
    first.end()
    await asyncio.wait_for(second.turn(), LONG)
    second.submit(requests("c"))
    assert await all_keys(second, 1) == ["c"]
    await asyncio.to_thread(first.close)
    await asyncio.to_thread(second.close)
    assert backend.taken == ["a", "b", "c"]


async def test_a_lane_that_is_given_up_lets_the_next_begin():
    lanes = Lanes(Echo())
    first, second = lanes.open(), lanes.open()
    await asyncio.to_thread(first.close)
    await asyncio.wait_for(second.turn(), LONG)
    await asyncio.to_thread(second.close)


async def test_a_request_under_way_for_another_lane_is_asked_again_and_answered_to_both():
    lanes = Lanes(Echo())
    first, second = lanes.open(), lanes.open()
    first.submit(requests("same"))
    second.submit(requests("same"))
    assert await all_keys(first, 1) == await all_keys(second, 1) == ["same"]
    await asyncio.to_thread(first.close)
    await asyncio.to_thread(second.close)


async def test_a_backend_that_ends_its_stream_early_is_an_error_and_no_endless_wait():
    lanes = Lanes(Echo(ends_after=1))
    lane = lanes.open()
    lane.submit(requests("a", "b"))
    assert await all_keys(lane, 1) == ["a"]
    with pytest.raises(RuntimeError, match="ended early"):
        await asyncio.wait_for(lane.outcomes(), LONG)
    await asyncio.to_thread(lane.close)


async def test_the_engine_serves_again_after_all_lanes_were_closed():
    lanes = Lanes(Echo())
    for _ in range(3):
        lane = lanes.open()
        lane.submit(requests("a"))
        assert await all_keys(lane, 1) == ["a"]
        await asyncio.to_thread(lane.close)


class Far(GathersStream):
    """Its second answer is as far away as its interruption, after which it rests when it is ``let``."""

    lanes: Lanes

    def __init__(self) -> None:
        self.let = threading.Event()
        self.streams = 0
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        with ThreadPoolExecutor(1) as others:
            self.others_may_open = others.submit(self._could_open).result()
        self._interrupted.set()

    def _could_open(self) -> bool:
        could = self.lanes._changed.acquire(blocking=False)
        if could:
            self.lanes._changed.release()
        return could

    def stream(self, given: Iterable[Request | None]) -> Iterator[Completion]:
        self._interrupted.clear()
        self.streams += 1
        for request in given:
            assert request is not None
            yield Completion(request.key, [], [], "", "stop")
            if self.streams == 1:
                self._interrupted.wait()
                self.let.wait()
                return


async def test_who_leaves_last_does_not_wait_for_answers_and_who_comes_meanwhile_gets_theirs():
    backend = Far()
    lanes = backend.lanes = Lanes(backend)
    lane = lanes.open()
    lane.submit(requests("a", "b"))
    assert await all_keys(lane, 1) == ["a"]
    leaves = asyncio.create_task(asyncio.to_thread(lane.close))
    while lanes._lanes:
        await asyncio.sleep(0.001)
    comes = lanes.open()
    comes.submit(requests("c"))
    backend.let.set()
    await asyncio.wait_for(leaves, LONG)
    assert await all_keys(comes, 1) == ["c"] and backend.streams == 2
    assert not backend.others_may_open, "it would be their stream that is interrupted"
    await asyncio.to_thread(comes.close)


@pytest.mark.parametrize("steps", range(5))
async def test_a_cancellation_that_comes_with_an_outcome_is_not_lost(steps: int):
    lane = Lanes(Echo()).open()
    task = asyncio.create_task(lane.outcomes(LONG))
    await asyncio.sleep(0)
    lane.wake()
    for _ in range(steps):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(lane.close)
