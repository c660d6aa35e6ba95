"""Several sets of requests on their way through one engine, so that it never runs dry between two of them.

Each caller opens a lane, waits for its turn, submits requests as it has them ready, and takes outcomes as they come.
One thread feeds the engine from all lanes, the oldest first. A lane's turn comes when the engine has taken the last
request of those before it: while these are generated, the engine already works on the next set.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from rollout_core.data.samples import Outcome
from rollout_core.inference.backend import InferenceBackend, Request


class Lanes:
    """The open lanes of one backend. Thread-safe; nothing else uses the backend's ``stream`` while a lane is open."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend
        self._lanes: list[Lane] = []
        self._owners: dict[str, Lane] = {}
        self._changed = threading.Condition()
        self._pump: threading.Thread | None = None
        self._was_left = False
        """The last lane was closed, so the stream ends; what is opened meanwhile gets the next one."""

    @property
    def max_model_len(self) -> int | None:
        """See `InferenceBackend`."""
        return self._backend.max_model_len

    def open(self, *, few: int = 0, keeps_turn: bool = True) -> Lane:
        """A new lane, for the event loop that calls; close it when done. Its ``outcomes`` returns, without any if need
        be, when the engine has taken enough requests that fewer than ``few`` wait. Later lanes need not wait until it
        ends unless it ``keeps_turn``."""
        lane = Lane(self, asyncio.get_running_loop(), few)
        lane.ended = not keeps_turn
        with self._changed:
            self._lanes.append(lane)
            self._give_turn()
            if self._pump is None:
                self._pump = threading.Thread(target=self._run, name="rollout-engine-lanes", daemon=True)
                self._pump.start()
        return lane

    def submit(self, lane: Lane, requests: Sequence[Request]) -> None:
        """Append requests to a lane."""
        with self._changed:
            lane.queue.extend(requests)
            self._changed.notify()

    def withdraw(self, lane: Lane, keys: Collection[str]) -> None:
        """Take back those requests of a lane that the engine has not taken."""
        with self._changed:
            lane.queue = deque(request for request in lane.queue if request.key not in keys)
            self._give_turn()

    def end(self, lane: Lane) -> None:
        """No more requests are submitted to a lane."""
        with self._changed:
            lane.ended = True
            self._give_turn()

    def _give_turn(self) -> None:
        """Let the oldest lane begin that the engine has not yet taken everything of; called under the lock."""
        for lane in self._lanes:
            lane.begin()
            if lane.queue or not lane.ended:
                return

    def close(self, lane: Lane) -> None:
        """Forget a lane; outcomes of what it has under way are dropped. The last one waits until the engine rests."""
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)
                self._give_turn()
            last, pump = not self._lanes, self._pump
            self._was_left = self._was_left or last
            self._changed.notify()
            if last and pump is not None:
                self._backend.interrupt()  # before another lane can open, whose stream it would end
        if last and pump is not None and pump is not threading.current_thread():
            pump.join()

    def _run(self) -> None:
        error: BaseException | None = None
        with self._changed:
            self._was_left = not self._lanes
        stream = self._backend.stream(self._requests())
        try:
            for outcome in stream:
                with self._changed:
                    lane = self._owners.pop(outcome.key)
                    if self._was_left:
                        break
                lane.deliver(outcome)
        except BaseException as raised:  # noqa: BLE001 - handed over to the lanes, which raise it
            error = raised
        close = getattr(stream, "close", None)
        if close is not None:
            with suppress(Exception):
                close()
        with self._changed:
            self._owners.clear()
            self._pump = None
            lanes, restart = list(self._lanes), error is None and self._was_left and bool(self._lanes)
            if not restart:
                self._lanes.clear()  # what they still have queued is nobody's any more
            else:
                # A lane was opened while the thread was on its way out.
                self._pump = threading.Thread(target=self._run, name="rollout-engine-lanes", daemon=True)
                self._pump.start()
        for lane in () if restart else lanes:
            lane.fail(error or RuntimeError("the backend's stream ended early"))

    def _requests(self) -> Iterator[Request | None]:
        while True:
            with self._changed:
                if self._was_left:
                    return
                request = self._next()
                if request is None and not self._owners:
                    self._changed.wait()
                    continue
            yield request

    def _next(self) -> Request | None:
        for lane in self._lanes:
            # The same request may be under way for another lane; an engine knows requests by their key.
            if lane.queue and lane.queue[0].key not in self._owners:
                request = lane.queue.popleft()
                self._owners[request.key] = lane
                lane.started[request.key] = time.monotonic()
                lane.note_taken()
                if not lane.queue and lane.ended:
                    self._give_turn()
                return request
        return None


class Lane:
    """One caller's requests and their outcomes."""

    def __init__(self, lanes: Lanes, loop: asyncio.AbstractEventLoop, few: int) -> None:
        self._lanes = lanes
        self._loop = loop
        self._few = few
        self._ready = asyncio.Event()
        self._turn = asyncio.Event()
        self._has_turn = False
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self.queue: deque[Request] = deque()
        """Not yet taken by the engine; changed under the lanes' lock."""
        self.ended = False
        """Nothing more is submitted, or later lanes do not wait for it."""
        self.started: dict[str, float] = {}
        """Monotonic seconds at which the engine took each request whose outcome was not yet looked at."""

    @property
    def waiting(self) -> int:
        """Requests that the engine has not yet taken."""
        return len(self.queue)

    async def turn(self) -> None:
        """Wait until the engine has taken all requests of the lanes that were opened before."""
        await self._turn.wait()

    def begin(self) -> None:
        """Called by the lanes: it is this lane's turn."""
        if not self._has_turn:
            self._has_turn = True
            self._call(self._turn.set)

    def note_taken(self) -> None:
        """Called by the lanes: the engine took one of the requests."""
        if len(self.queue) == self._few - 1:
            self._call(self.wake)

    def submit(self, requests: Sequence[Request]) -> None:
        """Append requests; their keys are unique in this lane."""
        self._lanes.submit(self, requests)

    def withdraw(self, keys: Collection[str]) -> None:
        """Take back requests; the outcomes of those that the engine already has are still delivered."""
        self._lanes.withdraw(self, keys)

    def end(self) -> None:
        """Say that nothing more is submitted."""
        self._lanes.end(self)

    async def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """All outcomes that are known and were not taken yet; waits for one, or until ``timeout`` seconds passed.

        Raises what the backend raised, after the outcomes from before.
        """
        if timeout is None:
            await self._ready.wait()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._ready.wait()
        with self._lock:
            self._ready.clear()
            outcomes, self._outcomes = self._outcomes, []
            if not outcomes and self._error is not None:
                raise self._error
            if self._error is not None:
                self._ready.set()
        return outcomes

    def wake(self) -> None:
        """Called in the lane's event loop: let ``outcomes`` return, though there may be none."""
        self._ready.set()

    def deliver(self, outcome: Outcome) -> None:
        """Called by the thread of the lanes."""
        with self._lock:
            self._outcomes.append(outcome)
            first = len(self._outcomes) == 1
        if first:
            self._call(self._ready.set)

    def fail(self, error: BaseException) -> None:
        """Called by the thread of the lanes: no more outcomes come."""
        with self._lock:
            self._error = error
        self._call(self._ready.set)
        # Who waits for a turn learns of the error by asking for outcomes.
        self._call(self._turn.set)

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Take no more outcomes. Blocks until the engine rests if this was the last lane."""
        self._lanes.close(self)
