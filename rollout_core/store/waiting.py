"""Waiting for rollouts to finish: woken at once by this process's own writes, by polling for those of others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


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
    """All calls of a process that wait for rollouts of one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rollout: dict[str, set[Waiter]] = {}

    @contextmanager
    def waiting(self, rollout_ids: Iterable[str]) -> Iterator[Waiter]:
        """A waiter that is told of every finish of these rollouts from now on."""
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
