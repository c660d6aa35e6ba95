"""Event loops of several threads: callers that wait for rollouts, a lock between loops, and a loop on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class Waiter:
    """One call that waits for some rollouts."""

    def __init__(self, rollout_ids: Iterable[str]) -> None:
        self.rollout_ids = frozenset(rollout_ids)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._finished: set[str] = set()

    def wake(self, finished: Iterable[str]) -> None:
        """Tell the waiter, from any thread, that these of its rollouts have finished."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._note, finished)

    def _note(self, finished: Iterable[str]) -> None:
        self._finished.update(finished)
        self._woken.set()

    async def next_finished(self, timeout: float) -> set[str]:
        """Wait for news, at most ``timeout`` seconds; the rollouts that have finished since the last time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout)
        self._woken.clear()
        finished, self._finished = self._finished, set()
        return finished


class Waiters:
    """All calls of a process that wait for rollouts of one store. A forked child has none, whatever held the lock."""

    def __init__(self) -> None:
        self._reset()
        _all_waiters.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._by_rollout: dict[str, set[Waiter]] = {}

    @contextmanager
    def waiting(self, rollout_ids: Iterable[str]) -> Iterator[Waiter]:
        """A waiter that hears of every finish of these rollouts from now on."""
        waiter = Waiter(rollout_ids)
        with self._lock:
            for rollout_id in waiter.rollout_ids:
                self._by_rollout.setdefault(rollout_id, set()).add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                for rollout_id in waiter.rollout_ids:
                    others = self._by_rollout[rollout_id]
                    others.discard(waiter)
                    if not others:
                        del self._by_rollout[rollout_id]

    def wake(self, finished: Sequence[str]) -> None:
        """Tell all who wait for these rollouts; from any thread."""
        with self._lock:
            news: dict[Waiter, list[str]] = {}
            for rollout_id in finished:
                for waiter in self._by_rollout.get(rollout_id, ()):
                    news.setdefault(waiter, []).append(rollout_id)
        for waiter, rollout_ids in news.items():
            waiter.wake(rollout_ids)


def _forget_waiters() -> None:
    for waiters in _all_waiters:
        waiters._reset()


_all_waiters: weakref.WeakSet[Waiters] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_waiters)


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


class LoopThread:
    """A thread that runs an event loop, from the first use on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.loop = asyncio.new_event_loop()

    def start(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self.loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
        return self.loop

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there, from another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.start()))

    def stop(self) -> None:
        """End the loop and the thread, if they run."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
