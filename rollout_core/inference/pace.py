"""How fast an endpoint is asked: requests and tokens a minute, and how many requests are under way at a time.

A request goes out once the limits by the minute have room, evenly and not all at the minute's beginning. One that takes
more tokens than there are goes out as soon as there is any room, and later ones wait the longer for it. Where the
endpoint answers 429, half as many requests are under way from then on. They become more again with each round of
answers, first by one, then by two, four and so on until the next 429: near its limit the endpoint is tried gently, and
after a short crowd a window of 64 is whole again after six rounds.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

SECONDS_AT_ONCE = 1.0
"""So much of a minute's amount may go out together, after a pause."""
LEAST_BETWEEN_CUTS = 1.0
"""Seconds: answers 429 that come together are about the same crowd of requests."""


class _Amount:
    """An amount that fills again by so much a minute."""

    def __init__(self, per_minute: float) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, SECONDS_AT_ONCE * self._per_second)
        self._level, self._at = self._most, time.monotonic()

    def seconds_until_any(self) -> float:
        """Until there is room."""
        now = time.monotonic()
        self._level = min(self._most, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, amount: float) -> None:
        """Also more than there is."""
        self._level -= amount


class Pace:
    """Turns to ask an endpoint. Safe for threads: engines, each with an event loop of its own, may share one."""

    def __init__(
        self,
        max_concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._most = max_concurrency
        self.window = float(max_concurrency)
        """Requests that may be under way."""
        self._step = 1.0
        """By which the window grows with the present round of answers."""
        self._left_of_round = self.window
        self._under_way = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._requests = None if requests_per_minute is None else _Amount(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else _Amount(tokens_per_minute)
        self._cut_at = float("-inf")
        self._resume_at = 0.0
        self._lock = threading.Lock()
        # Its own source of chance: the global one belongs to training, which must repeat to the last bit.
        self._chance = random.Random()

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a turn to send a request of so many tokens; it is under way inside the block."""
        while (place := self._enter()) is not None:
            await place
        try:
            while (seconds := self._take(tokens)) > 0:
                await asyncio.sleep(seconds)
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._wake()

    def _enter(self) -> asyncio.Future[None] | None:
        """Become one of those under way; or where there are enough, what to wait for before another look."""
        with self._lock:
            if self._under_way < max(1, int(self.window)):
                self._under_way += 1
                return None
            loop = asyncio.get_running_loop()
            place = loop.create_future()
            self._waiting.append((loop, place))
            return place

    def _take(self, tokens: int) -> float:
        """Take a request and its tokens of the limits; or where they have no room, seconds until another look."""
        with self._lock:
            if (seconds := self._resume_at - time.monotonic()) > 0:
                return seconds * self._chance.uniform(1.0, 1.1)  # not all in the same moment
            amounts = [amount for amount in (self._requests, self._tokens) if amount is not None]
            seconds = max((amount.seconds_until_any() for amount in amounts), default=0.0)
            if seconds <= 0:
                for amount, taken in ((self._requests, 1), (self._tokens, tokens)):
                    if amount is not None:
                        amount.take(taken)
            return seconds

    def _wake(self) -> None:
        """All that wait look again: some may have been cancelled. Called under the lock."""
        waiting, self._waiting = self._waiting, deque()
        for loop, place in waiting:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_let_go_on, place)

    def throttled(self) -> None:
        """The endpoint said that there are too many requests."""
        with self._lock:
            if time.monotonic() - self._cut_at >= LEAST_BETWEEN_CUTS:
                self._cut_at = time.monotonic()
                self.window = max(1.0, self.window / 2)
                self._step, self._left_of_round = 1.0, self.window

    def answered(self) -> None:
        """The endpoint answered a request."""
        with self._lock:
            if self.window >= self._most:
                return
            self._left_of_round -= 1
            if self._left_of_round <= 0:
                self.window = min(float(self._most), self.window + self._step)
                self._step, self._left_of_round = 2 * self._step, self.window
                self._wake()

    def rest(self, seconds: float) -> None:
        """The endpoint asked to be left alone for so long. It speaks for all requests, so the others need not find out
        one by one."""
        with self._lock:
            self._resume_at = max(self._resume_at, time.monotonic() + seconds)

    def give_back(self, tokens: int) -> None:
        """A request took so many tokens less than was thought."""
        with self._lock:
            if self._tokens is not None:
                self._tokens.take(-tokens)


def _let_go_on(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


_paces: dict[tuple[object, ...], Pace] = {}
_paces_lock = threading.Lock()


def shared_pace(
    url: str,
    model: str,
    max_concurrency: int,
    requests_per_minute: float | None = None,
    tokens_per_minute: float | None = None,
) -> Pace:
    """The pace of a model at an endpoint, the same one for all engines of this process that ask it with these limits:
    what an endpoint can take, and what it was asked in the last minute, outlives an engine."""
    limits = max_concurrency, requests_per_minute, tokens_per_minute
    with _paces_lock:
        return _paces.setdefault((url, model, *limits), Pace(*limits))
