"""Execution strategies: where the algorithm and the runners run, how they share the store, and how all of it ends.

A run ends when the algorithm returns: the runners are then asked to stop. It fails when the algorithm fails, when a
runner fails for good, when all runners have ended though work is left that only they would do, and when the process is
interrupted; then whatever still runs is cancelled, and attempts that are cancelled are stored as failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

from rollout_core.agents import agent_calls as running_agents
from rollout_core.agents.agent_calls import ExecutionEvent
from rollout_core.agents.delivery import AWAY
from rollout_core.agents.handover import check_not_importing
from rollout_core.agents.nursery import GivenUp
from rollout_core.agents.run_supervision import (
    WatchedStore,
    mark_dead_workers,
    mark_unresponsive,
    run_main,
    supervise,
)
from rollout_core.agents.runner_processes import RunnerProcesses
from rollout_core.base.errors import ConfigError, in_words
from rollout_core.base.loops import LoopThread
from rollout_core.store import LightningStore, LightningStoreClient, LightningStoreServer, LightningStoreThreaded

logger = logging.getLogger(__name__)

Role = Literal["algorithm", "runner", "both"]


AlgorithmBundle = Callable[[LightningStore, ExecutionEvent], Coroutine[Any, Any, None]]
"""One with an attribute ``only_publishes``, a `threading.Event`, has no end of its own: runners start when it has set
the event, and the run ends with them."""
RunnerBundle = Callable[[LightningStore, int, ExecutionEvent], Coroutine[Any, Any, None]]
"""For runners in processes it is handed to them, see `rollout_core.agents.handover`; an attribute ``imports`` names
modules as `Tracer.imports` does."""


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
        poll_interval: not used, for nothing is polled here; accepted for programs written for agentlightning.
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
        check_not_importing()
        shared = LightningStoreThreaded(store) if self._managed_store else store
        run_main(functools.partial(self._run, algorithm, runner, shared))

    async def _run(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, stop: asyncio.Event
    ) -> None:
        event = threading.Event()
        threads = [LoopThread(f"rollout-runner-{number}") for number in range(self.n_runners)]
        is_aside = self._main_thread == "runner"

        def start(number: int, thread: LoopThread) -> Awaitable[None]:
            work = runner(store, number, event)
            return work if is_aside else thread.run(work)

        running = [
            _once_published(algorithm, event, functools.partial(start, number, thread))
            for number, thread in enumerate(threads)
        ]
        end_seconds = (self._join_timeout, self._graceful_delay)
        try:
            await _learn(algorithm, running, store, event, stop, is_aside=is_aside, end_seconds=end_seconds)
        finally:
            _leave(threads, all(work.done() for work in running))


class ClientServerExecutionStrategy(ExecutionStrategy):
    """The algorithm in this process, which serves the store over HTTP; each runner in a process of its own, on this
    machine or on others. Runner processes import the agent anew and share nothing with this process, see
    `rollout_core.agents.handover`.

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
        self.worker_timeout = worker_timeout
        self._api_key = api_key

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        check_not_importing()
        in_processes = self.role != "algorithm" and self._main_process == "algorithm"
        processes = None
        if in_processes:
            main = functools.partial(_runner_main, runner, self._api_key, None if self._managed_store else store)
            processes = RunnerProcesses(
                main,
                self._runner_numbers(),
                max_restarts=self._max_restarts,
                allowed_exit_codes=self._allowed_exit_codes,
                imports=getattr(runner, "imports", ()),
            )
        try:
            if self.role == "runner":
                run_main(functools.partial(self._only_runners, runner, processes))
            else:
                run_main(functools.partial(self._serve, algorithm, runner, store, processes))
        finally:
            if processes is not None:
                processes.end()

    def _runner_numbers(self) -> range:
        """Of this process's runners. Others may work on the same store, and a worker is known by its number."""
        first = secrets.randbelow(2**32) if self.role == "runner" else 0
        return range(first, first + self.n_runners)

    async def _only_runners(self, runner: RunnerBundle, processes: RunnerProcesses | None, stop: asyncio.Event) -> None:
        url = f"http://{self.server_host}:{self.server_port}"
        event, client = threading.Event(), LightningStoreClient(url, api_key=self._api_key)
        if processes is not None:
            running = asyncio.ensure_future(processes.run(url, functools.partial(_end_work_of, client)))
        else:
            [number] = self._runner_numbers()
            running = asyncio.ensure_future(runner(client, number, event))
        try:
            await supervise(None, [running], event, stop, end_seconds=self._end_seconds, processes=processes)
        finally:
            await client.close()

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
        event = threading.Event()
        watch = asyncio.ensure_future(mark_dead_workers(shared, self.worker_timeout))
        running: list[asyncio.Future[None]] = []
        if processes is not None:
            url = server.endpoint if server is not None else ""
            start = functools.partial(processes.run, url, functools.partial(_end_work_of, shared))
            running.append(_once_published(algorithm, event, start))
        elif self.role == "both":
            running.append(_once_published(algorithm, event, functools.partial(runner, shared, 0, event)))
        try:
            await _learn(
                algorithm,
                running,
                shared,
                event,
                stop,
                is_aside=self._main_process == "runner",
                end_seconds=self._end_seconds,
                processes=processes,
            )
        finally:
            watch.cancel()
            if processes is not None:
                await asyncio.to_thread(processes.end)
                for number in self._runner_numbers():  # what a runner had that did not end by itself
                    await _end_work_of(shared, number)
            if server is not None:
                await server.stop()


async def _learn(
    algorithm: AlgorithmBundle,
    running: Sequence[asyncio.Future[None]],
    store: LightningStore,
    event: ExecutionEvent,
    stop: asyncio.Event,
    *,
    is_aside: bool,
    end_seconds: tuple[float, float],
    processes: RunnerProcesses | None = None,
) -> None:
    """Run the algorithm and the runners, in a thread of its own if ``is_aside``, until `supervise` has ended all."""
    watched, aside = WatchedStore(store), LoopThread("rollout-algorithm")
    work = algorithm(watched, event)
    learning = asyncio.ensure_future(aside.run(work) if is_aside else work)
    try:
        await supervise(
            learning,
            running,
            event,
            stop,
            end_seconds=end_seconds,
            watched=watched,
            processes=processes,
            ends_with_runners=_only_publishes(algorithm) is not None,
        )
    finally:
        _leave([aside], learning.done())


def _only_publishes(algorithm: AlgorithmBundle) -> threading.Event | None:
    return getattr(algorithm, "only_publishes", None)


def _once_published(
    algorithm: AlgorithmBundle, event: ExecutionEvent, start: Callable[[], Awaitable[None]]
) -> asyncio.Future[None]:
    """What ``start`` returns. Where nothing but resources is published they come first: rollouts may be queued already,
    and agents would find none."""

    async def run() -> None:
        published = _only_publishes(algorithm)
        while published is not None and not published.is_set():
            if event.is_set():  # it has failed
                return
            await asyncio.sleep(0.01)
        await start()

    return asyncio.ensure_future(run())


def _leave(threads: Sequence[LoopThread], have_ended: bool) -> None:
    for thread in threads:
        if have_ended:
            thread.stop()
        elif thread.loop.is_running():
            thread.loop.call_soon_threadsafe(thread.loop.stop)  # what is left there cannot be ended


def _runner_main(
    runner: RunnerBundle,
    api_key: str | None,
    store: LightningStore | None,
    number: int,
    url: str,
    is_ready: Callable[[], None],
) -> None:
    """A runner process, from start to end."""
    is_ready()
    event = threading.Event()

    async def run() -> None:
        work = asyncio.ensure_future(runner(own, number, event))

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, event.set)
        loop.add_signal_handler(signal.SIGINT, work.cancel)
        running_agents.owns_process = True
        try:
            await work
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGINT)
        except running_agents.WornOut:
            raise
        except AWAY as error:
            raise GivenUp(f"the store is away: {in_words(error)}") from error
        finally:
            if store is None:
                await own.close()

    own = store if store is not None else LightningStoreClient(url, api_key=api_key)
    asyncio.run(run())


async def _end_work_of(store: LightningStore, number: int) -> None:
    try:
        await mark_unresponsive(store, f"Worker-{number}")
    except Exception as error:  # noqa: BLE001 - any store's; the runner is replaced all the same
        logger.error("Cannot end what runner %d had under way: %s", number, in_words(error))


# Settings


def _from_environment(name: str, given: Any, read: Callable[[str], Any], default: Any) -> Any:
    if given is not None:
        return read(str(given))
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
