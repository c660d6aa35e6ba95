"""How fast an endpoint is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_core.inference.pace import LEAST_BETWEEN_CUTS, Pace, shared_pace


def test_no_more_are_under_way_than_the_window_has_and_cancelled_ones_take_no_place():
    async def story() -> int:
        pace, most, under_way = Pace(3), 0, 0

        async def one() -> None:
            nonlocal most, under_way
            async with pace.turn(1):
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.001)
                under_way -= 1

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[5:8]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return most

    assert asyncio.run(story()) == 3


def test_answers_429_that_come_together_halve_the_window_once_and_answers_open_it_again(monkeypatch):
    pace = Pace(8)
    for _ in range(5):
        pace.throttled()
    assert pace.window == 4
    monkeypatch.setattr("rollout_core.inference.pace.LEAST_BETWEEN_CUTS", 0.0)
    for _ in range(10):
        pace.throttled()
    assert pace.window == 1 and LEAST_BETWEEN_CUTS > 0, "one is always under way"
    for _ in range(100):
        pace.answered()
    assert pace.window == 8


@pytest.mark.parametrize(("most", "rounds"), [(64, 6), (1_000, 9)])
def test_a_halved_window_is_whole_after_few_rounds_of_answers_and_begins_gently(most: int, rounds: int):
    pace, windows = Pace(most), []
    pace.throttled()
    while pace.window < most:
        for _ in range(int(pace.window)):
            pace.answered()
        windows.append(pace.window)
    assert len(windows) == rounds
    assert [window - most / 2 for window in windows[:3]] == [1, 3, 7]


def test_another_429_has_the_window_grow_gently_again(monkeypatch):
    monkeypatch.setattr("rollout_core.inference.pace.LEAST_BETWEEN_CUTS", 0.0)
    pace = Pace(64)
    pace.throttled()
    for _ in range(32 + 33 + 35):
        pace.answered()
    assert pace.window == 39
    pace.throttled()
    for _ in range(20):
        pace.answered()
    assert pace.window == 20.5


def test_more_requests_go_out_once_the_window_opens():
    async def story() -> int:
        pace, started, release, second = Pace(2), 0, asyncio.Event(), asyncio.Event()
        pace.throttled()

        async def one() -> None:
            nonlocal started
            async with pace.turn(1):
                started += 1
                if started == 2:
                    second.set()
                await release.wait()

        tasks = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0)
        assert started == 1
        pace.answered()
        await second.wait()
        found = started
        release.set()
        await asyncio.gather(*tasks)
        return found

    assert asyncio.run(asyncio.wait_for(story(), 60)) == 2


def test_engines_of_one_endpoint_share_its_pace_over_threads_and_after_their_end():
    def engine(number: int) -> Pace:
        return shared_pace("http://127.0.0.1:1/v1", "m", 3, 6_000.0)

    pace = engine(0)
    assert engine(1) is pace and shared_pace("http://127.0.0.1:1/v1", "other", 3, 6_000.0) is not pace
    most = under_way = 0
    lock = threading.Lock()

    async def one() -> None:
        nonlocal most, under_way
        async with pace.turn(1):
            with lock:
                under_way += 1
                most = max(most, under_way)
            await asyncio.sleep(0.001)
            with lock:
                under_way -= 1

    async def crowd() -> None:
        await asyncio.gather(*(one() for _ in range(75)))

    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(asyncio.run, crowd()) for _ in range(4)]:
            future.result(timeout=60)
    assert most == 3
    assert time.monotonic() - began >= 1.9, "300 requests at 100 a second, of which 100 go out at once"


def test_who_is_asked_to_rest_rests_with_all_the_others():
    async def story() -> float:
        pace, started = Pace(4), time.monotonic()
        pace.rest(0.2)
        pace.rest(0.05)  # takes nothing back
        async with pace.turn(0):
            return time.monotonic() - started

    assert asyncio.run(story()) >= 0.2


def test_requests_and_tokens_a_minute_are_kept():
    async def sent(pace: Pace, tokens: int, count: int) -> float:
        started = time.monotonic()
        for _ in range(count):
            async with pace.turn(tokens):
                pass
        return time.monotonic() - started

    # A second's worth at once, and then evenly.
    assert asyncio.run(sent(Pace(1, requests_per_minute=1200), 0, 30)) >= 0.45
    # One that takes more than there is goes out, and later ones wait the longer.
    assert asyncio.run(sent(Pace(1, tokens_per_minute=60_000), 1_500, 2)) >= 0.45


def test_tokens_that_were_not_taken_are_given_back():
    async def story() -> float:
        pace = Pace(1, tokens_per_minute=60_000)
        started = time.monotonic()
        for _ in range(3):
            async with pace.turn(60_000):
                pass
            pace.give_back(59_900)
        return time.monotonic() - started

    assert asyncio.run(story()) < 30
