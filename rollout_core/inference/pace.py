"""How fast an endpoint is asked: requests and tokens a minute, and how many requests are under way at a time.

A request goes out once the limits by the minute have room, evenly and not all at the minute's beginning. One that takes
more tokens than there are goes out as soon as there is any room, and later ones wait the longer for it. Where the
endpoint answers 429, half as many requests are under way from then on, and one more again for each round of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
        return max(0.0, (min(1.0, self._most) - self._level) / self._per_second)

    def take(self, amount: float) -> None:
        """Also more than there is."""
        self._level -= amount


class Pace:
    """Turns to ask an endpoint, for one event loop."""

    def __init__(
        self,
        max_concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._most = max_concurrency
        self.window = float(max_concurrency)
        """Requests that may be under way."""
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._requests = None if requests_per_minute is None else _Amount(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else _Amount(tokens_per_minute)
        self._cut_at = float("-inf")

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a turn to send a request of so many tokens; it is under way inside the block."""
        while self._under_way >= max(1, int(self.window)):
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            await place
        self._under_way += 1
        try:
            await self._until_there_is_room()
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(tokens)
            yield
        finally:
            self._under_way -= 1
            self._wake()

    async def _until_there_is_room(self) -> None:
        amounts = [amount for amount in (self._requests, self._tokens) if amount is not None]
        while (seconds := max((amount.seconds_until_any() for amount in amounts), default=0.0)) > 0:
            await asyncio.sleep(seconds)

    def _wake(self) -> None:
        """All that wait look again: some may have been cancelled."""
        waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            if not place.done():
                place.set_result(None)

    def throttled(self) -> None:
        """The endpoint said that there are too many requests."""
        if time.monotonic() - self._cut_at >= LEAST_BETWEEN_CUTS:
            self._cut_at = time.monotonic()
            self.window = max(1.0, self.window / 2)

    def answered(self) -> None:
        """The endpoint answered a request."""
        if self.window < self._most:
            self.window = min(float(self._most), self.window + 1 / self.window)
            self._wake()

    def give_back(self, tokens: int) -> None:
        """A request took so many tokens less than was thought."""
        if self._tokens is not None:
            self._tokens.take(-tokens)
