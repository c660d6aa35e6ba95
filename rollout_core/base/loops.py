"""Event loops of several threads: callers that wait for rollouts or for work, a lock between loops, and a loop on a
thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

Result = TypeVar("Result")


class Waiter:
    """One call that waits for some rollouts."""

    def __init__(self, rollout_ids: Iterable[str]) -> None:
        self.rollout_ids = frozenset(rollout_ids)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._open: set[str] = set()

    def wake(self, finished: Iterable[str]) -> None:
        """Tell the waiter, from any thread, that these of its rollouts have finished."""
        with self._lock:
            self._finished.update(finished)
            if not self._open:
                return  # it knows already
            self._open.difference_update(finished)
            if self._open:
                return  # nothing to do for it yet; to wake its loop for each rollout would hold up those who work
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._woken.set)

    async def next_finished(self, open_ids: Iterable[str], timeout: float) -> set[str]:
        """Wait until all of these rollouts have finished, at most ``timeout`` seconds; those that have, whichever they
        are, since the last time."""
        self._woken.clear()
        with self._lock:
            self._open = set(open_ids) - self._finished
            is_over = not self._open
        if not is_over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._woken.wait()
        with self._lock:
            self._open = set()
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


class Bell:
    """Wakes those of a process who wait for work. A forked child has none of them, whatever held the lock."""

    def __init__(self) -> None:
        self._reset()
        _all_waiters.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    async def wait(
        self, look: Callable[[], Awaitable[Any]], timeout: float, first_poll: float, longest_poll: float
    ) -> bool:
        """Wait until it rings or ``look`` finds work that nobody rang for, such as other processes', at most
        ``timeout`` seconds; whether there is some. Between looks the pauses, in seconds, grow from first to longest."""
        deadline, pause = time.monotonic() + timeout, first_poll
        with self.listening() as rung:
            try:
                while not await look():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left, pause)):
                            await rung.wait()
                    if rung.is_set():
                        break
                    pause = min(1.5 * pause, longest_poll)
            except BaseException:
                if rung not in self._listeners:  # it was meant for one who goes to work
                    self.ring(1)
                raise
        return True

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set when it rings, from now on."""
        event = asyncio.Event()
        with self._lock:
            self._listeners[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self._lock:
                self._listeners.pop(event, None)

    def ring_all(self) -> None:
        """Wake all listeners; from any thread."""
        if self._listeners:  # as a rule there are none, and each write rings
            self.ring(len(self._listeners))

    def ring(self, count: int) -> None:
        """Wake up to ``count`` listeners, those who have waited longest; from any thread. Each is woken once."""
        with self._lock:
            woken = [(event, self._listeners.pop(event)) for event in list(islice(self._listeners, count))]
        for event, loop in woken:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(event.set)


_waits: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Event]] = weakref.WeakKeyDictionary()
"""Of the calls that ``end_waits`` ends, by their loop."""


async def until_stop(wait: Coroutine[Any, Any, Result], otherwise: Result) -> Result:
    """What ``wait`` comes to, or ``otherwise`` where ``end_waits`` is called on this loop meanwhile."""
    stop = asyncio.Event()
    stops = _waits.setdefault(asyncio.get_running_loop(), set())
    stops.add(stop)
    both = [asyncio.ensure_future(wait), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return both[0].result() if both[0].done() else otherwise  # type: ignore[return-value]
    finally:
        stops.discard(stop)
        for future in both:
            future.cancel()
        await asyncio.gather(*both, return_exceptions=True)


def end_waits() -> None:
    """Have the calls of this loop return that only wait, as its server is to stop."""
    for stop in _waits.get(asyncio.get_running_loop(), ()):
        stop.set()


def _forget_waiters() -> None:
    for waiters in _all_waiters:
        waiters._reset()


_all_waiters: weakref.WeakSet[Waiters | Bell] = weakref.WeakSet()
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


def _in_finalizer() -> bool:
    """Whether this thread stands in some object's ``__del__``.

    `gc.callbacks` would say the same of collections, but what a signal's handler raises in such a callback is lost, and
    with it the signal: Python has nobody to raise it to.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _task_unless_finalizing(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    if _in_finalizer():
        work.close()
        raise RuntimeError("a finalizer's task belongs to the loop that its object was used on")
    return asyncio.Task(work, loop=loop, **options)


def refuse_finalizers(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop take no tasks from finalizers (``__del__``): for loops on threads next to those that run others'
    code.

    Clients such as openai's, when they are collected without having been closed, close themselves by a task on the loop
    that runs at that moment. Python collects on whichever thread comes to it, so that may be another than the one that
    the client was used on. Closing its sockets from there takes readers from sockets that were opened since, and
    requests under way on those never get their answers.
    """
    loop.set_task_factory(_task_unless_finalizing)


class LoopThread:
    """A thread that runs an event loop, from the first use on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.loop = asyncio.new_event_loop()
        refuse_finalizers(self.loop)

    def start(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self.loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
        return self.loop

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there, from another loop. Cancelled, it is cancelled there, and this waits until it has
        ended; a second cancellation leaves it to itself."""
        here, there = asyncio.get_running_loop(), self.start()
        ended: asyncio.Future[None] = here.create_future()
        tasks: list[asyncio.Task[Result]] = []

        def report(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more: that loop is closed
                here.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))

        def begin() -> None:
            tasks.append(there.create_task(work))
            tasks[0].add_done_callback(report)

        there.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.shield(ended)
        return tasks[0].result()

    def stop(self) -> None:
        """End the loop and the thread, if they run."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
