"""Pools: which upstream of a model answers a request, when, and what happens to both while the model is swapped.

Everything here runs on the proxy's event loop, so a decision is never half made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.base.errors import ConfigError, NotFound, near

SwapPolicy = Literal["drain", "wait", "mix"]
"""``drain``: new requests go to the new upstream at once, and the swap is over when the old one's last has ended;
``wait``: new requests are held until then, so that at no time two versions answer; ``mix``: as ``drain``, but the swap
waits for nothing."""

MAX_PAUSE_SECONDS = 600.0
"""Of an upstream that asks to be left alone."""


class Seat:
    """One upstream as a pool uses it. What is asked of it holds a seat."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.in_flight = 0
        self._resume_at = 0.0
        """Monotonic seconds until which it wants no requests."""
        self._next_at = 0.0
        """Before then a request would exceed its rate."""

    @property
    def has_room(self) -> bool:
        """Whether one more may be under way."""
        limit = self.upstream.max_concurrent
        return limit is None or self.in_flight < limit

    def ready_at(self) -> float:
        """Monotonic seconds from which on it may be asked, room aside."""
        return max(self._resume_at, self._next_at)

    def take(self) -> None:
        """A request goes there."""
        self.in_flight += 1
        rate = self.upstream.requests_per_second
        if rate is not None:
            self._next_at = max(self._next_at, time.monotonic()) + 1 / rate

    def leave_alone(self, seconds: float) -> None:
        """Ask nothing more of it for a while, as it wishes."""
        self._resume_at = max(self._resume_at, time.monotonic() + min(seconds, MAX_PAUSE_SECONDS))


@dataclass(eq=False)
class _Turn:
    """A request that waits for an upstream."""

    granted: asyncio.Future[Seat]
    avoid: frozenset[Seat] = field(default_factory=frozenset)


class Pool:
    """The upstreams of one model."""

    def __init__(self, entry: ModelEntry) -> None:
        self.name = entry.name
        self._seats = [Seat(upstream) for upstream in dict.fromkeys(entry.upstreams)]
        self._queue: deque[_Turn] = deque()
        self._holds: set[object] = set()
        """Of those who want new requests to wait."""
        self._released: list[asyncio.Future[None]] = []
        """Of those who wait for requests to end."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def upstreams(self) -> list[Upstream]:
        """That answer now."""
        return [seat.upstream for seat in self._seats]

    @property
    def timeout(self) -> float:
        """Seconds that a request may take in all."""
        return max(seat.upstream.timeout for seat in self._seats)

    async def take(self, avoid: Iterable[Seat] = ()) -> Seat:
        """The least busy upstream, once there is one that may be asked; others than ``avoid``, if there are any.

        Waits for as long as it takes: give it a time limit. ``release`` it in the end.
        """
        turn = _Turn(asyncio.get_running_loop().create_future(), frozenset(avoid))
        self._queue.append(turn)
        self._grant()
        try:
            return await turn.granted
        except asyncio.CancelledError:
            if turn.granted.done() and not turn.granted.cancelled():
                self.release(turn.granted.result())
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(turn)
            raise

    def release(self, seat: Seat) -> None:
        """What was asked of an upstream has ended."""
        seat.in_flight -= 1
        for waiting in self._released:
            if not waiting.done():
                waiting.set_result(None)
        self._released.clear()
        self._grant()

    def has_other(self, than: Iterable[Seat]) -> bool:
        """Whether an upstream that is none of these may be asked now."""
        now, known = time.monotonic(), set(than)
        return any(seat not in known and seat.has_room and seat.ready_at() <= now for seat in self._seats)

    def seconds_until_ready(self) -> float:
        """Until the first of the upstreams wants requests again."""
        return max(0.0, min(seat.ready_at() for seat in self._seats) - time.monotonic())

    def _grant(self) -> None:
        """Give those in the queue what is free."""
        while self._queue and not self._holds:
            turn = self._queue[0]
            seat = self._best(turn.avoid)
            if seat is None:
                break
            self._queue.popleft()
            if not turn.granted.done():
                seat.take()
                turn.granted.set_result(seat)
        self._look_again_later()

    def _best(self, avoid: frozenset[Seat]) -> Seat | None:
        now = time.monotonic()
        free = [seat for seat in self._seats if seat.has_room and seat.ready_at() <= now]
        return min(free, key=lambda seat: (seat in avoid, seat.in_flight), default=None)

    def _look_again_later(self) -> None:
        """Seats become free by ``release``, but ready by time alone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue and not self._holds:
            # Not those that are not ready now: one may have become so since it was looked at.
            resting = [seat.ready_at() for seat in self._seats if seat.has_room]
            if resting:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(0.0, min(resting) - time.monotonic()), self._grant)

    async def drained(self, seats: Sequence[Seat] | None = None) -> None:
        """Wait until nothing more is under way at these upstreams, by default all. Each request ends by its timeout."""
        seats = list(self._seats) if seats is None else seats
        while any(seat.in_flight for seat in seats):
            change = asyncio.get_running_loop().create_future()
            self._released.append(change)
            await change

    def hold(self, holder: object) -> None:
        """New requests wait until this holder lets go."""
        self._holds.add(holder)

    def let_go(self, holder: object) -> None:
        """Undo ``hold``, if there was one."""
        self._holds.discard(holder)
        self._grant()

    def replace(self, upstreams: Sequence[Upstream]) -> list[Seat]:
        """Let these answer from now on; those that did so far. An upstream that stays keeps its seat."""
        old = {seat.upstream: seat for seat in self._seats}
        self._seats = [old.pop(upstream, None) or Seat(upstream) for upstream in dict.fromkeys(upstreams)]
        self._grant()
        return list(old.values())

    def set_model_id(self, model_id: str) -> None:
        """The upstreams serve these weights now. Only while nothing is under way."""
        for seat in self._seats:
            seat.upstream = replace(seat.upstream, model_id=model_id)


class Pools:
    """All models by name."""

    def __init__(self, entries: Sequence[ModelEntry]) -> None:
        self._by_name = {entry.name: Pool(entry) for entry in entries}

    @property
    def names(self) -> list[str]:
        """Of the models, as agents know them."""
        return list(self._by_name)

    def get(self, name: str) -> Pool:
        """Raises NotFound, which names those that there are."""
        pool = self._by_name.get(name)
        if pool is None:
            raise NotFound(f"the proxy serves no model {name!r:.200}; {near(name, self._by_name)}")
        return pool

    def entries(self) -> list[ModelEntry]:
        """The models as they are now."""
        return [ModelEntry(name, pool.upstreams) for name, pool in self._by_name.items()]

    def replace(self, entries: Sequence[ModelEntry]) -> None:
        """Serve these models from now on; requests under way end where they are."""
        known, self._by_name = self._by_name, {}
        for entry in entries:
            pool = known.pop(entry.name, None)
            if pool is None:
                pool = Pool(entry)
            else:
                pool.replace(entry.upstreams)
            self._by_name[entry.name] = pool

    async def swap(self, name: str, upstreams: Sequence[Upstream], policy: SwapPolicy) -> None:
        """See ``LLMProxy.swap``."""
        pool = self.get(name)
        if policy == "wait":
            holder = object()
            pool.hold(holder)
            try:
                await pool.drained()
                pool.replace(upstreams)
            finally:
                pool.let_go(holder)
        elif policy in ("drain", "mix"):
            old = pool.replace(upstreams)
            if policy == "drain":
                await pool.drained(old)
        else:
            raise ConfigError(f"policy is {policy!r}; expected drain, wait or mix")

    async def hold(self, name: str, holder: object) -> None:
        """Let new requests for a model wait; done when those under way have ended."""
        pool = self.get(name)
        pool.hold(holder)
        await pool.drained()

    async def let_go(self, name: str, holder: object, model_id: str | None) -> None:
        """Undo ``hold``; the model's upstreams serve these weights now, unless None."""
        pool = self.get(name)
        if model_id is not None:
            pool.set_model_id(model_id)
        pool.let_go(holder)
