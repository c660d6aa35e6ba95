"""How a run ends: the algorithm has returned, something failed, a signal came, or nobody is left to work.

Whatever still runs then is told to end, given time, and cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from rollout_core.agents.processes import RunnerProcesses
from rollout_core.base.errors import Conflict, Fatal, in_words
from rollout_core.store import LightningStore

logger = logging.getLogger(__name__)

_IDLE_LOOK_SECONDS = 2.0
_UNFINISHED = ("queuing", "requeuing", "preparing", "running")


class ExecutionEvent(Protocol):
    """Set when the run is to end."""

    def set(self) -> None:
        """End the run."""
        ...

    def is_set(self) -> bool:
        """Whether it is to end."""
        ...


# The end of a run


async def supervise(
    learning: asyncio.Future[Any],
    running: Sequence[asyncio.Future[Any]],
    event: ExecutionEvent,
    stop: asyncio.Event,
    *,
    end_seconds: tuple[float, float],
    work_left: Callable[[], Awaitable[int]],
    processes: RunnerProcesses | None = None,
) -> None:
    """Wait for the algorithm, then end the runners; raise what failed first. ``end_seconds``: for runners to end, when
    all is well and when not (with processes: to end, and to end once cancelled)."""
    stopped = asyncio.ensure_future(stop.wait())
    failure: BaseException | None = None
    try:
        await _until_decided(learning, running, stopped, work_left)
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
    for work in (learning, *running):
        work.cancel()
    await _wait([learning, *running], end_seconds[1])
    for work in (learning, *running):
        if work.done() and not work.cancelled() and work.exception() is not None and failure is not work.exception():
            if failure is None and is_well:
                failure = work.exception()
            else:
                logger.error("Also failed: %s", in_words(work.exception() or RuntimeError()))
    if failure is not None:
        raise failure


async def _until_decided(
    learning: asyncio.Future[Any],
    running: Sequence[asyncio.Future[Any]],
    stopped: asyncio.Future[Any],
    work_left: Callable[[], Awaitable[int]],
) -> None:
    """Return when the algorithm has, or the process is to stop. Raises what a runner or the algorithm raised."""
    unchanged: int | None = None
    while True:
        alive = [work for work in running if not work.done()]
        wait_seconds = None if alive or not running else _IDLE_LOOK_SECONDS
        await asyncio.wait({learning, stopped, *alive}, return_when=asyncio.FIRST_COMPLETED, timeout=wait_seconds)
        for work in (learning, *running):
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                raise error
        if learning.done() or stopped.done():
            return
        if running and all(work.done() for work in running):
            left = await work_left()
            if left and unchanged == left:
                raise Fatal(
                    f"all runners have ended, {left} rollouts are left that nobody will run, and the algorithm waits; "
                    "raise max_rollouts, or leave it out"
                )
            unchanged = left


async def _wait(work: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    pending = [future for future in work if not future.done()]
    if pending:
        await asyncio.wait(pending, timeout=seconds)


async def num_unfinished(store: LightningStore) -> int:
    found = await store.query_rollouts(status_in=list(_UNFINISHED), limit=0)
    return found.total if hasattr(found, "total") else len(found)


async def no_work_left() -> int:
    return 0


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
        except Exception as error:  # noqa: BLE001 - any store's; the run goes on, and the next look tells
            logger.warning("Cannot look after the workers: %s", in_words(error))


# The main thread


def run_main(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """``asyncio.run``, whose work is told of stop signals by an event, and has time to end by itself.

    A second signal ends the process at once. Where the calling thread has a running event loop, as in notebooks, the
    work gets a thread of its own.
    """
    received: list[int] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

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
        _in_thread(run)
    if received:
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])


def _in_thread(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    failure: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            failure.append(error)

    thread = threading.Thread(target=body, name="rollout-run")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
