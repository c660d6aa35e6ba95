"""A LightningStore made safe for threads, whatever store it wraps."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from contextlib import nullcontext
from typing import Any

from rollout_core.store.base import LightningStore
from rollout_core.store.forwarding import ForwardingLightningStore
from rollout_core.store.types import LightningStoreCapabilities

UNLOCKED = frozenset({"wait_for_rollouts", "statistics"})
"""Calls that do not wait for their turn."""


class LoopLock:
    """A lock for coroutines of any number of threads and event loops, first come, first served.

    A waiting coroutine does not block its loop, so one that holds the lock may wait for things itself. A forked child
    starts with the lock free: what held it is not in the child.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._process = os.getpid()

    async def __aenter__(self) -> None:
        if os.getpid() != self._process:
            self._reset()
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._guard:
                passed_on = turn not in self._queue
                if not passed_on:
                    self._queue.remove(turn)
            if passed_on:
                self._pass_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            while self._queue:
                turn = self._queue.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:  # its loop was closed while it waited
                    continue
                return
            self._held = False


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # cancelled meanwhile: then its waiter passes the lock on
        turn.set_result(None)


class LightningStoreThreaded(ForwardingLightningStore):
    """Delegates to ``store``, one call at a time, from any thread. Make it before the threads that use it.

    Queries wait for their turn too: they may run the watchdog. ``wait_for_rollouts`` and ``statistics`` do not, so a
    waiting caller holds nobody up. A store that is safe for threads itself gets all calls as they come: it has its own,
    finer way to keep them apart. A pickled copy wraps a pickled copy of the store, if that allows it.
    """

    def __init__(self, store: LightningStore) -> None:
        self.store = store
        self._lock = nullcontext() if store.capabilities.get("thread_safe") else LoopLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    def backend(self) -> LightningStore:
        """The wrapped store."""
        return self.store

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the store's method of this name, while no other call is in it."""
        if name in UNLOCKED:
            return await super().forward(name, *args, **kwargs)
        async with self._lock:
            return await super().forward(name, *args, **kwargs)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store, and safe for threads and tasks."""
        return {**self.store.capabilities, "thread_safe": True, "async_safe": True}

    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    async def close(self) -> None:
        await self.forward("close")
