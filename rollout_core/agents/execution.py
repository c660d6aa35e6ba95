"""Execution strategies: where the algorithm and the runners run, how they share the store, and how all of it ends.

A run ends when the algorithm returns: the runners are then told to stop. It fails when the algorithm fails, when a
runner fails for good, when all runners have ended though work is left that only they would do, and when the process is
interrupted; then whatever still runs is cancelled, and attempts that are cancelled are stored as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

from rollout_core.agents.processes import Death, RunnerProcesses
from rollout_core.base.errors import ConfigError, Conflict, Fatal, in_words
from rollout_core.store import LightningStore, LightningStoreClient, LightningStoreServer, LightningStoreThreaded
from rollout_core.store.loops import LoopThread

logger = logging.getLogger(__name__)

Role = Literal["algorithm", "runner", "both"]
_LOOK_SECONDS = 0.1
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


AlgorithmBundle = Callable[[LightningStore, ExecutionEvent], Coroutine[Any, Any, None]]
RunnerBundle = Callable[[LightningStore, int, ExecutionEvent], Coroutine[Any, Any, None]]


class ExecutionStrategy:
    """Runs an algorithm and its runners to the end."""

    n_runners: int = 1

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Return when the algorithm has returned and the runners have ended. Raises what made the run fail;
        KeyboardInterrupt after SIGINT and SystemExit(143) after SIGTERM."""
        raise NotImplementedError


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Everything in this process: the algorithm on one event loop, each runner on one of its own, in a thread.

    Args:
        n_runners: how many.
        main_thread: whether the algorithm or the (only) runner is in the calling thread, as a debugger wants it.
        join_timeout: seconds that runners have to end their rollouts when the algorithm has returned.
        graceful_delay: the same when the run has failed or is interrupted.
        managed_store: wrap the store so that threads can share it; False: it can do so itself.
    """

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["algorithm", "runner"] = "algorithm",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        if n_runners < 1 or (main_thread == "runner" and n_runners != 1):
            raise ConfigError(
                f"n_runners is {n_runners} with main_thread {main_thread!r}; expected 1, or more with algorithm"
            )
        if main_thread not in ("algorithm", "runner"):
            raise ConfigError(f"main_thread is {main_thread!r}; expected algorithm or runner")
        self.n_runners = n_runners
        self._main_thread = main_thread
        self._join_timeout, self._graceful_delay = join_timeout, graceful_delay
        self._managed_store = _from_environment("AGL_MANAGED_STORE", managed_store, _as_bool, True)

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        shared = LightningStoreThreaded(store) if self._managed_store else store
        _run_main(functools.partial(self._run, algorithm, runner, shared))

    async def _run(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, stop: asyncio.Event
    ) -> None:
        event = threading.Event()
        threads = [LoopThread(f"rollout-runner-{number}") for number in range(self.n_runners)]
        aside = LoopThread("rollout-algorithm")
        is_main = self._main_thread == "algorithm"
        learning = asyncio.ensure_future(
            algorithm(store, event) if is_main else _on_thread(aside, algorithm(store, event))
        )
        running = [
            asyncio.ensure_future(
                _on_thread(thread, runner(store, number, event)) if is_main else runner(store, number, event)
            )
            for number, thread in enumerate(threads)
        ]
        try:
            await _supervise(
                learning,
                running,
                event,
                stop,
                end_seconds=(self._join_timeout, self._graceful_delay),
                work_left=functools.partial(_num_unfinished, store),
            )
        finally:
            _leave([*threads, aside], all(work.done() for work in (learning, *running)))


class ClientServerExecutionStrategy(ExecutionStrategy):
    """The algorithm in this process, which serves the store over HTTP; each runner in a process of its own, on this
    machine or on others.

    With ``role`` "both", the default, this process starts everything. The same program can be split: with the role
    "algorithm" it serves and waits for others, with "runner" it runs ``n_runners`` that connect to ``server_host``.
    Arguments that are not given come from AGL_CURRENT_ROLE, AGL_SERVER_HOST, AGL_SERVER_PORT and AGL_MANAGED_STORE.

    Args:
        n_runners: runner processes of this machine.
        graceful_timeout: seconds that runners have to end their rollouts when the run ends.
        terminate_timeout: seconds until those that were then cancelled are killed.
        main_process: "runner" has the only runner in the calling process, as a debugger wants it, and the algorithm in
            a thread.
        allowed_exit_codes: of runner processes, that are no failure.
        max_restarts: how often in a row a runner process that died is replaced before the run fails.
        worker_timeout: seconds without a heartbeat after which a busy worker counts as dead and its attempt as
            unresponsive; for workers that send heartbeats. 0: never.
        api_key: what runners on other machines must know; needed to serve beyond this machine.
    """

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Sequence[int] = (0, -15),
        max_restarts: int = 3,
        worker_timeout: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.role: Role = _from_environment("AGL_CURRENT_ROLE", role, _as_role, "both")
        self.server_host: str = _from_environment("AGL_SERVER_HOST", server_host, str, "127.0.0.1")
        self.server_port: int = _from_environment("AGL_SERVER_PORT", server_port, _as_port, 4747)
        self._managed_store = _from_environment("AGL_MANAGED_STORE", managed_store, _as_bool, True)
        if n_runners < 1 or (main_process == "runner" and (n_runners != 1 or self.role == "algorithm")):
            raise ConfigError(
                f"n_runners is {n_runners} with main_process {main_process!r} and role {self.role!r}; expected 1 or "
                "more, and exactly one runner, in this process, with main_process runner"
            )
        self.n_runners = n_runners
        self._end_seconds = (graceful_timeout, terminate_timeout)
        self._main_process = main_process
        self._allowed_exit_codes = tuple(allowed_exit_codes)
        self._max_restarts = max_restarts
        self._worker_timeout = worker_timeout
        self._api_key = api_key

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        in_processes = self.role != "algorithm" and self._main_process == "algorithm"
        processes = None
        if in_processes:
            main = functools.partial(_runner_main, runner, self._api_key, None if self._managed_store else store)
            processes = RunnerProcesses(
                main,
                range(self.n_runners),
                max_restarts=self._max_restarts,
                allowed_exit_codes=self._allowed_exit_codes,
            )
        try:
            if self.role == "runner":
                _run_main(functools.partial(self._only_runners, runner, processes))
            else:
                _run_main(functools.partial(self._serve, algorithm, runner, store, processes))
        finally:
            if processes is not None:
                processes.end()

    async def _only_runners(self, runner: RunnerBundle, processes: RunnerProcesses | None, stop: asyncio.Event) -> None:
        url = f"http://{self.server_host}:{self.server_port}"
        event = threading.Event()
        if processes is not None:
            running = asyncio.ensure_future(processes.run(url, _let_be))
        else:
            running = asyncio.ensure_future(runner(LightningStoreClient(url, api_key=self._api_key), 0, event))
        ended = asyncio.get_running_loop().create_future()  # no algorithm here, so none ends
        running.add_done_callback(lambda _: ended.done() or ended.set_result(None))
        await _supervise(
            ended, [running], event, stop, end_seconds=self._end_seconds, processes=processes, work_left=_no_work_left
        )

    async def _serve(
        self,
        algorithm: AlgorithmBundle,
        runner: RunnerBundle,
        store: LightningStore,
        processes: RunnerProcesses | None,
        stop: asyncio.Event,
    ) -> None:
        shared, server = store, None
        if self._managed_store:
            shared = server = LightningStoreServer(store, self.server_host, self.server_port, api_key=self._api_key)
            await server.start()
        event, aside = threading.Event(), LoopThread("rollout-algorithm")
        watch = asyncio.ensure_future(_mark_dead_workers(shared, self._worker_timeout))
        running: list[asyncio.Future[None]] = []
        if processes is not None:
            url = server.endpoint if server is not None else ""
            running.append(asyncio.ensure_future(processes.run(url, functools.partial(_end_work_of, shared))))
        elif self.role == "both":
            running.append(asyncio.ensure_future(runner(shared, 0, event)))
        is_main = self._main_process == "algorithm"
        learning = asyncio.ensure_future(
            algorithm(shared, event) if is_main else _on_thread(aside, algorithm(shared, event))
        )
        try:
            await _supervise(
                learning,
                running,
                event,
                stop,
                end_seconds=self._end_seconds,
                processes=processes,
                work_left=functools.partial(_num_unfinished, shared),
            )
        finally:
            watch.cancel()
            _leave([aside], learning.done())
            if server is not None:
                await server.stop()


def _runner_main(
    runner: RunnerBundle, api_key: str | None, store: LightningStore | None, number: int, url: str
) -> None:
    """A runner process, from start to end."""
    event = threading.Event()

    async def run() -> None:
        work = asyncio.ensure_future(runner(own, number, event))

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, event.set)
        loop.add_signal_handler(signal.SIGINT, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGINT)
        finally:
            if store is None:
                await own.close()

    own = store if store is not None else LightningStoreClient(url, api_key=api_key)
    asyncio.run(run())


async def _on_thread(thread: LoopThread, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` on the thread's loop. Cancelled, it is cancelled there, and this waits until it has ended so; a
    second cancellation leaves it to itself."""
    here, there = asyncio.get_running_loop(), thread.start()
    ended: asyncio.Future[None] = here.create_future()
    tasks: list[asyncio.Task[None]] = []

    def report(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more
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


def _leave(threads: Sequence[LoopThread], have_ended: bool) -> None:
    for thread in threads:
        if have_ended:
            thread.stop()
        elif thread.loop.is_running():
            thread.loop.call_soon_threadsafe(thread.loop.stop)  # what is left there cannot be ended


# The end of a run


async def _supervise(
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


async def _num_unfinished(store: LightningStore) -> int:
    found = await store.query_rollouts(status_in=list(_UNFINISHED), limit=0)
    return found.total if hasattr(found, "total") else len(found)


async def _no_work_left() -> int:
    return 0


async def _let_be(death: Death) -> None:
    """Whoever serves the store sees to what this runner had."""


async def _end_work_of(store: LightningStore, death: Death) -> None:
    await _mark_unresponsive(store, f"Worker-{death.number}")


async def _mark_unresponsive(store: LightningStore, worker_id: str) -> None:
    """The worker is dead: its attempt counts as lost now, and is tried again if its config says so."""
    worker = await store.get_worker_by_id(worker_id)
    if worker is None or worker.current_rollout_id is None or worker.current_attempt_id is None:
        return
    logger.warning("Worker %s died at work on rollout %s", worker_id, worker.current_rollout_id)
    with contextlib.suppress(Conflict):  # it had ended the attempt
        await store.update_attempt(
            worker.current_rollout_id, worker.current_attempt_id, status="unresponsive", fenced=True
        )


async def _mark_dead_workers(store: LightningStore, timeout_seconds: float) -> None:
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
                    await _mark_unresponsive(store, worker.worker_id)
            seen = {worker.worker_id: worker.last_heartbeat_time for worker in busy}
        except Exception as error:  # noqa: BLE001 - any store's; the run goes on, and the next look tells
            logger.warning("Cannot look after the workers: %s", in_words(error))


# The main thread


def _run_main(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
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


# Settings


def _from_environment(name: str, given: Any, read: Callable[[str], Any], default: Any) -> Any:
    if given is not None:
        return read(str(given)) if read in (_as_role, _as_port) else given
    text = os.environ.get(name)
    try:
        return default if text is None else read(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _as_role(text: str) -> str:
    if text not in ("algorithm", "runner", "both"):
        raise ConfigError(f"the role is {text!r}; expected algorithm, runner or both")
    return text


def _as_port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) < 65536:
        raise ConfigError(f"the port is {text!r}; expected a number below 65536")
    return int(text)


def _as_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"got {text!r}; expected true or false")
