"""The runners of a run: a store server for them, processes of this machine that are replaced when they die, and the
wait for tasks to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollout_core.agents.code import AgentCode
from rollout_core.agents.run_queue import RolloutQueue
from rollout_core.agents.run_supervision import mark_dead_workers
from rollout_core.agents.worker import END_SECONDS, HEARTBEAT_SECONDS, WorkOrder, processes_for, run_runners
from rollout_core.base.errors import Fatal, Recoverable, in_words
from rollout_core.config import RunnersConfig
from rollout_core.store import LightningStore, LightningStoreServer, NamedResources, Rollout
from rollout_core.store.lifecycle import FINISHED

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_CHUNK = 1_000


class Fleet:
    """Runners for one agent. An asynchronous context; every use on one event loop.

    Args:
        store: where the rollouts are, safe for threads.
        api_key: what runners show; default: one that only those of this machine know.
        max_failures: see `RolloutQueue`.
        log_folder: where the processes write what the agent prints; None: nowhere.
        say: receives lines for people.

    Entering raises ConfigError where the agent cannot be loaded.
    """

    def __init__(
        self,
        store: LightningStore,
        code: AgentCode,
        runners: RunnersConfig,
        *,
        api_key: str | None = None,
        max_failures: int | None = None,
        log_folder: Path | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._code, self._runners, self._say, self._log_folder = code, runners, say, log_folder
        self._key = api_key or secrets.token_urlsafe(24)
        self._queue = RolloutQueue(store, self._note_change, max_failures=max_failures)
        self._server = LightningStoreServer(self._queue, runners.host, runners.port or None, api_key=self._key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._is_ending = self._is_running = False
        self._exits = AsyncExitStack()
        self._num_ended = 0

    def set_resources(self, resources: NamedResources) -> None:
        """What agents get with each task from now on."""
        self._queue.set_resources(resources)

    @property
    def endpoint(self) -> str:
        """Where runners elsewhere find the tasks."""
        host = self._runners.public_host or self._runners.host
        return f"http://{host}:{self._server.port}"

    @property
    def _join_command(self) -> str:
        return (
            f"rollout agent work --store {self.endpoint} --agent {self._code.function} --api-key-env NAME (of an "
            "environment variable that holds the run's key)"
        )

    async def __aenter__(self) -> Fleet:
        self._loop = asyncio.get_running_loop()
        try:
            await self._server.start()
            self._exits.push_async_callback(self._server.stop)
            watch = asyncio.ensure_future(mark_dead_workers(self._queue, self._runners.worker_timeout_seconds))
            self._exits.callback(watch.cancel)
            if self._runners.where == "processes":
                await self._start_processes()
            elif self._runners.where == "threads":
                self._start_threads()
            elif self._runners.where == "dask":
                await self._start_on_dask()
            if self._runners.where == "elsewhere" or self._runners.api_key is not None:
                self._say(f"runners elsewhere join by: {self._join_command}")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_ending = True
        self._failure = self._failure or Recoverable("the runners were ended")  # for a `run` that waits
        self._queue.clear()
        await self._exits.aclose()

    # Runners

    def _start_threads(self) -> None:
        event = threading.Event()
        agent = self._code.load()
        work = asyncio.ensure_future(
            run_runners(
                agent,
                self._code.id,
                self._queue,
                0,
                self._runners.concurrency,
                event,
                heartbeat_seconds=self._heartbeat_seconds,
            )
        )
        work.add_done_callback(self._note_end)

        async def end() -> None:
            event.set()
            _, left = await asyncio.wait([work], timeout=END_SECONDS)
            for future in left:
                future.cancel()
            await asyncio.wait([work])

        self._exits.push_async_callback(end)

    def _note_end(self, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and not self._is_ending:
            self._fail(error if isinstance(error, Exception) else Fatal(in_words(error)))

    @property
    def _heartbeat_seconds(self) -> float:
        """Often enough that a worker is not held for dead that misses two."""
        return min(HEARTBEAT_SECONDS, self._runners.worker_timeout_seconds / 3)

    def _order(self, url: str, key: str | None) -> WorkOrder:
        code, concurrency = self._code.document(), self._runners.concurrency
        return WorkOrder(url, key, code, concurrency, heartbeat_seconds=self._heartbeat_seconds)

    async def _start_on_dask(self) -> None:
        from rollout_core.agents.dask_runners import DaskRunners

        dask, secret = self._runners.dask, self._runners.api_key
        assert dask is not None and secret is not None, "validated"
        order = self._order(self.endpoint, None)
        runners = DaskRunners(
            dask.address,
            order,
            secret,
            max_restarts=self._runners.max_restarts,
            num_ended=lambda: self._num_ended,
            fail=self._fail,
        )
        await self._exits.enter_async_context(runners)

    async def _start_processes(self) -> None:
        if self._log_folder is not None:
            self._log_folder.mkdir(parents=True, exist_ok=True)
        processes = processes_for(
            self._order(self._server.endpoint, self._key),
            range(self._runners.count),
            max_restarts=self._runners.max_restarts,
            num_ended=lambda: self._num_ended,
            output=self._log_file,
        )
        url, seconds = self._server.endpoint, END_SECONDS + 2
        running = processes.running(url, end_seconds=seconds, on_death=self._note_death)
        work = await self._exits.enter_async_context(running)
        work.add_done_callback(self._note_end)
        ready = asyncio.ensure_future(processes.all_ready.wait())
        await asyncio.wait({work, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if work.done():
            work.result()

    async def _note_death(self, number: int) -> None:
        try:
            await self._queue.adopt_claimed()  # now, and not when its heartbeats are missed
        except Exception as problem:  # noqa: BLE001 - any store's; then they are missed
            log.warning("Cannot end what runner process %d had under way: %s", number, in_words(problem))

    def _log_file(self, number: int) -> str:
        folder = self._log_folder
        return os.devnull if folder is None else str(folder / f"runner-{os.getpid()}-{number}.log")

    # Work

    async def run(
        self,
        rollout_ids: Sequence[str],
        *,
        retry_failed: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Have these rollouts worked on until all have finished, whoever does it. Those that have are left alone, but
        with ``retry_failed`` those that failed.

        Raises what ended the runners, and Fatal where nobody takes the work.
        """
        total, since = len(rollout_ids), time.monotonic()
        pending = await self._begin(rollout_ids, retry_failed)
        self._is_running = True
        try:
            while True:
                ended = await self._queue.look()
                pending.difference_update(rollout.rollout_id for rollout in ended)
                self._num_ended += len(ended)
                on_progress(total - len(pending), total)
                if not pending:
                    return
                if self._failure is not None:
                    raise self._failure
                since = self._check_taken(since)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._changed.wait()
        finally:
            self._is_running = False
            self._queue.withdraw(rollout_ids)  # and nothing of what `take_on` brought

    async def take_on(self, rollout_ids: Sequence[str]) -> None:
        """Have these queued rollouts worked on too, with their own resources, without waiting for them; those handed
        out already are not again.
        To be called often: it also notices what has ended. Raises what ended the runners."""
        if self._failure is not None:
            raise self._failure
        if not self._is_running:  # `run` must see the ends of what it waits for
            self._num_ended += len(await self._queue.look())
        if not self._queue.num_waiting:
            self._queue.add(rollout_ids, as_stored=True)

    async def _begin(self, rollout_ids: Sequence[str], retry_failed: bool) -> set[str]:
        """Put what is left to do into the queue, and return it."""
        found: dict[str, Rollout] = {}
        for start in range(0, len(rollout_ids), _CHUNK):
            part = await self._queue.store.query_rollouts(rollout_id_in=rollout_ids[start : start + _CHUNK])
            found |= {rollout.rollout_id: rollout for rollout in part}
        missing = [rollout_id for rollout_id in rollout_ids if rollout_id not in found]
        if missing:
            raise Fatal(f"{len(missing)} rollouts are not in the store, such as {missing[0]}")
        failed = [rollout_id for rollout_id in rollout_ids if retry_failed and found[rollout_id].status == "failed"]
        for rollout_id in failed:
            await self._queue.retry(rollout_id)
        open_ = [found[rollout_id] for rollout_id in rollout_ids if found[rollout_id].status not in FINISHED]
        await self._queue.take_over(open_)
        under_way = [rollout.rollout_id for rollout in open_ if rollout.status in ("preparing", "running")]
        self._queue.watch(under_way)
        waiting = [rollout.rollout_id for rollout in open_ if rollout.status not in ("preparing", "running")]
        self._queue.add([*waiting, *failed])
        return {*under_way, *waiting, *failed}

    def _check_taken(self, since: float) -> float:
        """When work was last taken, or there was none to take. Raises Fatal where that is too long ago."""
        now = time.monotonic()
        if not self._queue.num_waiting or self._queue.taken:
            return now
        if now - since > self._runners.wait_seconds:
            raise Fatal(
                f"{self._queue.num_waiting} tasks wait, and nobody has taken one for {self._runners.wait_seconds:g} s; "
                f"start runners: {self._join_command}"
            )
        return since

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _note_change(self) -> None:
        """From any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(self._changed.set)
