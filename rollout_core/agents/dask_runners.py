"""Runners on the workers of a Dask cluster: on each a process that works on the run's tasks, while the run lasts.

A Dask worker starts the same process as a `Fleet` does on its own machine, from a task that stays under way. The task
ends when the run says so, when the run's client is gone (the scheduler then takes the task back), and when the worker
loses its scheduler. The process ends with the worker, whatever kills it.

Imported only where a run asks for Dask, which is an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from distributed import Client, Future, Worker, get_worker
from distributed.core import Status

from rollout_core.agents.runner_processes import Restarts
from rollout_core.agents.worker import END_SECONDS, WorkOrder, processes_for
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.settings import require_secret

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""For the scheduler to answer; one that does not is gone."""
LOST = "the Dask scheduler at {} is gone; tasks that have ended are kept: see that one runs, and run again"
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.25


# On a Dask worker

_ended_runs: set[str] = set()


@dataclass(frozen=True)
class Outcome:
    """How a process of runners ended on a Dask worker, without a word if it was asked to."""

    refusal: str = ""
    """Why none of the run's agents can work there."""
    death: str = ""
    """What it died of."""


def run_on_worker(order: WorkOrder, secret: str, run_id: str) -> Outcome:
    """The Dask task: a process of runners from its start to its end. ``order`` comes without a key, which is the secret
    of this NAME in the worker's own environment."""
    worker = get_worker()
    key, where = worker.get_current_task(), f"on Dask worker {worker.address}"
    try:
        order = replace(order, api_key=require_secret(secret))
        asyncio.run(_work(order, lambda: run_id not in _ended_runs and _is_wanted(worker, key)))
    except ConfigError as error:
        return Outcome(refusal=f"{error} ({where})")
    except (Fatal, Recoverable) as error:
        return Outcome(death=f"{error} ({where}, whose log has what it wrote)")
    return Outcome()


async def _work(order: WorkOrder, is_wanted: Callable[[], bool]) -> None:
    """Have a process work for as long as it is wanted. Raises what it died of; what it had under way is tried again
    when its heartbeats are missed."""
    processes = processes_for(order, [order.number], max_restarts=0)
    async with processes.running(order.url, end_seconds=END_SECONDS + 2) as work:
        while is_wanted():
            await asyncio.wait([work], timeout=_POLL_SECONDS)
            if work.done():
                work.result()


def _is_wanted(worker: Worker, key: Any) -> bool:
    """Whether worker and task are still the scheduler's. A task that is taken back while it runs is ``cancelled``."""
    task = worker.state.tasks.get(key)
    return worker.status in (Status.running, Status.paused) and task is not None and task.state == "executing"


def end_run(run_id: str) -> None:
    """Let this Dask worker's tasks of a run end."""
    _ended_runs.add(run_id)


# Where the run is


class DaskRunners:
    """A process of runners on every worker of the cluster, whichever come and go; an asynchronous context.

    Args:
        address: of the scheduler.
        order: what every process is given, but for the key.
        secret: NAME of the secret that holds the key, in each worker's environment.
        max_restarts: how often in a row processes may die while no task ends.
        num_ended: how many tasks have ended so far.
        fail: is given what makes the run fail: ConfigError for an agent that a worker cannot run, Fatal for processes
            that keep dying, Recoverable for a scheduler that is gone.

    Entering raises Recoverable where no scheduler answers.
    """

    def __init__(
        self,
        address: str,
        order: WorkOrder,
        secret: str,
        *,
        max_restarts: int,
        num_ended: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> None:
        self._address, self._order, self._secret = address, order, secret
        self._restarts, self._fail = Restarts(max_restarts, num_ended), fail
        self._run_id = secrets.token_hex(8)
        self._client: Any = None
        self._tasks: dict[str, Future[Outcome]] = {}
        """By address of the worker."""
        self._num_started = 0
        self._due: dict[str, float] = {}
        """When a process that has died is replaced, by address of its worker."""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DaskRunners:
        try:
            self._client = await Client(self._address, asynchronous=True, set_as_default=False, timeout=ANSWER_SECONDS)
        except (OSError, TimeoutError) as error:
            raise Recoverable(f"no Dask scheduler answers at {self._address}: {error}") from error
        self._watching = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        # None of this is needed for the processes to end: they do when the client is gone.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_SECONDS + 4):
                if self._client.status == "running" and self._tasks:
                    await self._client.run(end_run, self._run_id, workers=list(self._tasks), on_error="ignore")
                    waits: Any = [task.result() for task in self._tasks.values()]  # its client is asynchronous
                    await asyncio.gather(*waits, return_exceptions=True)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._client.cancel(list(self._tasks.values()), force=True)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._client.close(timeout=2)

    async def _keep(self) -> None:
        """A task on every worker, for as long as this runs; what is in the way of that is the run's failure."""
        try:
            while True:
                workers = await self._workers()
                await self._forget(self._tasks.keys() - workers)
                for address in workers:
                    await self._see(address)
                await asyncio.sleep(_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 - anything of Dask's; runners must not be missing in silence
            self._fail(error)

    async def _workers(self) -> set[str]:
        """Addresses of those that can work now."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = (await self._client.scheduler.identity(n_workers=-1))["workers"]
        except (OSError, TimeoutError) as error:
            raise Recoverable(LOST.format(self._address)) from error
        return {address for address, worker in found.items() if worker["status"] in ("running", "paused")}

    async def _forget(self, addresses: Iterable[str]) -> None:
        """Workers that are gone. What they had under way is tried again when their heartbeats are missed."""
        gone = [self._tasks.pop(address) for address in list(addresses)]
        if gone:
            log.warning("%d Dask workers are gone; their tasks are tried again", len(gone))
            await self._client.cancel(gone, force=True)

    async def _see(self, address: str) -> None:
        """Start a process on this worker, or, when it is due, another one in place of one that died."""
        task = self._tasks.get(address)
        if task is not None:
            if not task.done():
                return
            del self._tasks[address]
            self._due[address] = time.monotonic() + self._pause(await self._outcome(task))
        if time.monotonic() < self._due.get(address, 0.0):
            return
        order = replace(self._order, number=self._num_started)
        self._num_started += 1
        self._tasks[address] = self._client.submit(
            run_on_worker,
            order,
            self._secret,
            self._run_id,
            key=f"rollout-runners-{self._run_id}-{self._num_started}",
            workers=[address],
            allow_other_workers=False,
            pure=False,
        )

    async def _outcome(self, task: Future[Outcome]) -> Outcome:
        if task.status == "finished":
            return await task  # pyright: ignore[reportGeneralTypeIssues] - the client is asynchronous
        error: Any = None if task.status in ("cancelled", "lost") else await task.exception()
        if isinstance(error, ImportError | AttributeError | RuntimeError):
            return Outcome(
                refusal=f"a Dask worker cannot run rollout ({error}); install the run's version of it on every worker"
            )
        return Outcome(death=f"Dask gave it up ({error or task.status})")

    def _pause(self, outcome: Outcome) -> float:
        """Seconds before a process that ended so is replaced. Raises what makes the run fail instead."""
        if outcome.refusal:
            raise ConfigError(outcome.refusal)
        reason = outcome.death or "it ended unasked"
        pause = self._restarts.pause(reason)
        log.warning("A process of runners died (%s); it is replaced", reason)
        return pause
