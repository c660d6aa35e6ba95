"""How a run ends: the algorithm has returned, something failed, a signal came, or nobody is left to work.

Whatever still runs then is asked to end, given time, and cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait as wait_for
from typing import Any

from rollout_core.agents.agent_calls import ExecutionEvent
from rollout_core.agents.runner_processes import RunnerProcesses
from rollout_core.base.errors import Conflict, Fatal, in_words
from rollout_core.base.stopping import in_thread
from rollout_core.store import LightningStore
from rollout_core.store.forwarding_store import StoreView

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 20.0
"""How long nobody may take what is queued once all runners of this process have ended; those of other machines look for
work every few seconds."""
_LOOK_SECONDS = 1.0


# The end of a run


async def supervise(
    learning: asyncio.Future[Any] | None,
    running: Sequence[asyncio.Future[Any]],
    event: ExecutionEvent,
    stop: asyncio.Event,
    *,
    end_seconds: tuple[float, float],
    watched: WatchedStore | None = None,
    processes: RunnerProcesses | None = None,
    ends_with_runners: bool = False,
) -> None:
    """Wait for the algorithm, then end the runners; raise what failed first. ``end_seconds``: for runners to end, when
    all is well and when not (with processes: to end, and to end once cancelled)."""
    stopped = asyncio.ensure_future(stop.wait())
    failure: BaseException | None = None
    try:
        await _until_decided(learning, running, stopped, watched, ends_with_runners or learning is None)
    except BaseException as error:  # noqa: BLE001 - raised below, when all has ended
        failure = error
    stopped.cancel()
    is_well = failure is None and not stop.is_set()
    event.set()
    if processes is not None:
        processes.stop(signal.SIGTERM if is_well else signal.SIGINT)
    await _wait(running, end_seconds[0] if is_well else end_seconds[1])
    if processes is not None and not all(work.done() for work in running):
        processes.stop(signal.SIGINT)
        await _wait(running, end_seconds[1])
    everything = _all_of(learning, running)
    for work in everything:
        work.cancel()
    await _wait(everything, end_seconds[1])
    for work in everything:
        if work.done() and not work.cancelled() and work.exception() is not None and failure is not work.exception():
            if failure is None and is_well:
                failure = work.exception()
            else:
                logger.error("Also failed: %s", in_words(work.exception() or RuntimeError()))
    if failure is not None:
        raise failure


def _all_of(learning: asyncio.Future[Any] | None, running: Sequence[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
    return [*running] if learning is None else [learning, *running]


async def _until_decided(
    learning: asyncio.Future[Any] | None,
    running: Sequence[asyncio.Future[Any]],
    stopped: asyncio.Future[Any],
    watched: WatchedStore | None,
    ends_with_runners: bool,
) -> None:
    """Return when the algorithm has, or all runners have and that is the end, or the process is to stop. Raises what a
    runner or the algorithm raised, and Fatal when the algorithm waits for what nobody will do."""
    since: float | None = None
    while True:
        alive = [work for work in running if not work.done()]
        wait_seconds = None if alive or not running else _LOOK_SECONDS
        others = {stopped} if learning is None else {learning, stopped}
        await asyncio.wait({*others, *alive}, return_when=asyncio.FIRST_COMPLETED, timeout=wait_seconds)
        for work in _all_of(learning, running):
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                raise error
        nobody_works = bool(running) and all(work.done() for work in running)
        if stopped.done() or (learning is not None and learning.done()) or (ends_with_runners and nobody_works):
            return
        if not nobody_works or watched is None or not watched.is_asked or not await _is_stuck(watched.store):
            since = None
            continue
        since = time.monotonic() if since is None else since
        if time.monotonic() - since >= GIVE_UP_SECONDS:
            raise Fatal(
                "all runners have ended, rollouts are queued that nobody takes, and the algorithm waits; raise "
                "max_rollouts, or leave it out"
            )


async def _is_stuck(store: LightningStore) -> bool:
    """Whether rollouts are queued and nobody, here or elsewhere, works on any."""
    queued = await store.query_rollouts(status_in=["queuing", "requeuing"], limit=1)
    return len(queued) > 0 and not len(await store.query_rollouts(status_in=["preparing", "running"], limit=1))


class WatchedStore(StoreView):
    """The algorithm's store, which knows whether it is being asked: an algorithm that trains is in nobody's way."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store)
        self._num_calls = 0
        self._last_call = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether a call is under way, or was within the last seconds."""
        return self._num_calls > 0 or time.monotonic() - self._last_call < 2 * _LOOK_SECONDS

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the store's method of this name."""
        self._num_calls += 1
        try:
            return await super().forward(name, *args, **kwargs)
        finally:
            self._num_calls -= 1
            self._last_call = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        # What a particular store has besides the contract, such as a server's endpoint.
        return getattr(self.__dict__["store"], name)


async def _wait(work: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    pending = [future for future in work if not future.done()]
    if pending:
        await asyncio.wait(pending, timeout=seconds)


async def mark_unresponsive(store: LightningStore, worker_id: str) -> None:
    """The worker is dead: its attempt counts as lost now, and is tried again if its config says so."""
    worker = await store.get_worker_by_id(worker_id)
    if worker is None or worker.current_rollout_id is None or worker.current_attempt_id is None:
        return
    logger.warning("Worker %s died at work on rollout %s", worker_id, worker.current_rollout_id)
    with contextlib.suppress(Conflict):  # it had ended the attempt
        await store.update_attempt(
            worker.current_rollout_id, worker.current_attempt_id, status="unresponsive", fenced=True
        )


async def mark_dead_workers(store: LightningStore, timeout_seconds: float) -> None:
    """Look after busy workers that send heartbeats no longer, for ever."""
    if timeout_seconds <= 0:
        return
    seen: dict[str, float | None] = {}
    while True:
        await asyncio.sleep(timeout_seconds)
        try:
            busy = await store.query_workers(status_in=["busy"])
            # Two looks that find the same last heartbeat: this clock is never compared with the store's.
            for worker in busy:
                if worker.last_heartbeat_time is not None and seen.get(worker.worker_id) == worker.last_heartbeat_time:
                    await mark_unresponsive(store, worker.worker_id)
            seen = {worker.worker_id: worker.last_heartbeat_time for worker in busy}
        except Exception as error:  # noqa: BLE001 - any store's; the run continues, and the next look tells
            logger.warning("Cannot look after the workers: %s", in_words(error))


# The main thread


def run_main(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """``asyncio.run``, whose work learns of stop signals by an event, and has time to end by itself.

    A second signal ends the process at once. Where the calling thread has a running event loop, as in notebooks, the
    work gets a thread of its own.
    """
    received: list[int] = []
    stops: list[Callable[[], object]] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))

        def note(number: int) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            logger.warning("Stopping: got %s; a second one ends the process at once", signal.Signals(number).name)
            stop.set()

        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
        for number in before:
            loop.add_signal_handler(number, note, number)
        try:
            await work(stop)
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(run())
    else:
        _in_thread(run, lambda: [stop() for stop in stops])
    if received:
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])


def _in_thread(run: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], object]) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    # asyncio.run's own handler would only cancel the calling task, which waits here and would not notice.
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    work = in_thread(lambda: asyncio.run(run()))
    try:
        wait_for([work])
    except BaseException:  # a notebook's interruption finds the calling thread here
        stop()
        wait_for([work])
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    work.result()
