"""How fast an endpoint is asked."""

from __future__ import annotations

import asyncio
import time

from rollout_core.inference.pace import LEAST_BETWEEN_CUTS, Pace


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


def test_more_requests_go_out_once_the_window_opens():
    async def story() -> int:
        pace = Pace(4)
        pace.window, started, release = 1.0, 0, asyncio.Event()

        async def one() -> None:
            nonlocal started
            async with pace.turn(1):
                started += 1
                await release.wait()

        tasks = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0)
        before = started
        pace.answered()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found = started - before
        release.set()
        await asyncio.gather(*tasks)
        return found

    assert asyncio.run(story()) == 1


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
