"""What runs on a Dask worker: stages that a driver submitted, through one engine that stays from shard to shard.

A worker works with the settings of its own environment (``ROLLOUT_STORAGE``, ``ROLLOUT_DATABASE``, ``ROLLOUT_CACHE``,
``PREFECT_API_URL``); nothing secret travels with a task. Whether they lead to the driver's storage and database is
tried before the first shard: the driver left a mark in both.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import UUID

from distributed import Worker, WorkerPlugin, get_worker
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.events.worker import EventsWorker
from prefect.results import ResultStore
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollout_core.base import traces
from rollout_core.base.determinism import NUMERICS, Numerics, current_numerics
from rollout_core.base.errors import ConfigError
from rollout_core.base.processes import this_machine
from rollout_core.base.settings import without_password
from rollout_core.config import VLLMBackend, WorkersConfig
from rollout_core.inference.batch import Progress
from rollout_core.inference.batch_runs import forget_tally, tally
from rollout_core.inference.engines import close_engine
from rollout_core.models.pretrained import prepare_transformers
from rollout_core.rewards.kept import close_rewards
from tasks.runtime import connections
from tasks.runtime.arguments import spread_arguments
from tasks.runtime.placement import sharing
from tasks.runtime.stage import Stage, retry

IDLE_SECONDS = 300.0
"""An engine that had nothing to do for this long is closed: a driver that was killed cannot ask for it."""
CLOSE_SECONDS = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Driver:
    """The process that submits, as workers know it."""

    run_id: str
    """Of its flow run."""
    worker_id: str
    """Its name in the database."""
    mark: str
    """Its ref in the object store."""
    connections: str
    """Description of its storage and database, without secrets."""
    machine: str
    api_url: str | None
    numerics: Numerics
    """In force there: stages have other keys where it is another one."""

    @property
    def topic(self) -> str:
        """On which its workers report their progress."""
        return f"rollout-{self.run_id}"


@dataclass
class _Use:
    """What this process does for drivers."""

    runs: set[str]
    """Runs whose keeper is here."""
    under_way: int = 0
    last: float = 0.0


_use = _Use(set())
_lock = threading.Lock()
_met: set[Driver] = set()
_meeting = threading.Lock()


def address_of(function: Callable[..., Any]) -> str:
    """Where a stage or flow of this function is found in every process."""
    return f"{function.__module__}:{function.__qualname__}"


def _find(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


def run_stage(
    stage: str,
    inputs: dict[str, Any],
    task_run_id: UUID,
    context: dict[str, Any],
    driver: Driver,
    shared: WorkersConfig | None,
) -> State:
    """Run a stage that ``driver`` submitted, and return its final state; ``shared`` as of `sharing`. Raises ConfigError
    where this worker's settings are not the driver's."""
    worker = get_worker()
    worker.log_event(driver.topic, {"started": str(task_run_id), "worker": worker.address})
    with (
        _in_use(),
        _reachable_api(driver),
        traces.part_of(context.get(traces.TRACEPARENT)),
        sharing(shared),
    ):
        _meet(driver, inputs)

        def report(shard: str, progress: Progress) -> None:
            worker.log_event(driver.topic, {"shard": str(shard), "progress": list(astuple(progress))})

        tally(driver.run_id).report_to(report)
        flow = cast(Flow[..., Any], _find(context["flow"]))
        store = ResultStore(result_storage=connections.result_storage())
        flow_run = {**context["flow_run_context"], "flow": flow, "result_store": store}
        return cast(Stage[..., Any], _find(stage)).run_submitted(inputs, task_run_id, {"flow_run_context": flow_run})


@contextmanager
def _in_use() -> Iterator[None]:
    with _lock:
        _use.under_way += 1
    try:
        yield
    finally:
        with _lock:
            _use.under_way -= 1
            _use.last = time.monotonic()


@contextmanager
def _reachable_api(driver: Driver) -> Iterator[None]:
    """The Prefect server of this worker's settings, else the driver's."""
    if PREFECT_API_URL.value() or driver.api_url is None:
        yield
        return
    if driver.machine != this_machine() and urlsplit(driver.api_url).hostname in LOOPBACK:
        raise ConfigError(
            f"worker {_name()} has no PREFECT_API_URL, and the driver's is {without_password(driver.api_url)}, which "
            "only its own machine reaches; set PREFECT_API_URL for the worker, or for the driver to an address that "
            "workers reach"
        )
    with temporary_settings({PREFECT_API_URL: driver.api_url}):
        yield


def _meet(driver: Driver, inputs: dict[str, Any]) -> None:
    """Refuse to work where it would be lost, or cannot be done."""
    backend = spread_arguments(inputs).get("backend")
    if isinstance(backend, VLLMBackend) and multiprocessing.current_process().daemon:
        raise ConfigError(
            f"worker {_name()} may not start the process that vLLM runs in; start Dask workers with "
            "DASK_DISTRIBUTED__WORKER__DAEMON=False in their environment, or with --no-nanny"
        )
    if current_numerics() != driver.numerics:
        raise ConfigError(
            f"worker {_name()} computes with {current_numerics()} numerics, the driver with {driver.numerics}; start "
            f"Dask workers with {NUMERICS}={driver.numerics} in their environment"
        )
    with _meeting:
        if driver not in _met:
            retry(lambda: _refuse_other_connections(driver))
            prepare_transformers()
            _met.add(driver)


def _refuse_other_connections(driver: Driver) -> None:
    missing: list[str] = []
    if connections.objects().get_ref(driver.mark) is None:
        missing.append("object storage")
    if not asyncio.run(_knows(driver.worker_id)):
        missing.append("database")
    if missing:
        raise ConfigError(
            f"worker {_name()} has another {' and '.join(missing)} than the driver: got {connections.description()}; "
            f"expected {driver.connections}; set ROLLOUT_STORAGE and ROLLOUT_DATABASE in the worker's environment to "
            "what all machines share (a SQLite file or a local folder is of one machine)"
        )


async def _knows(worker_id: str) -> bool:
    async with connections.open_store() as store:
        return await store.get_worker_by_id(worker_id) is not None


def _name() -> str:
    return get_worker().address


class EngineKeeper(WorkerPlugin):
    """Keeps a worker's engine warm while a run lasts, and closes it afterwards.

    ``flow``: where the run's flow is found. ``workers_end``: the workers end with the run.
    """

    def __init__(self, run_id: str, flow: str, *, workers_end: bool) -> None:
        self.name = f"rollout-{run_id}"
        self._run_id = run_id
        self._flow = flow
        self._workers_end = workers_end
        self._watch: asyncio.Task[None] | None = None

    async def setup(self, worker: Worker) -> None:
        _use.runs.add(self._run_id)
        # First, and by this thread alone: both imports read Python source, and where two threads do so at once, Python
        # before 3.11.8 may find its parser's depth wrong (gh-106905) and the worker would end.
        _find(self._flow)
        # Takes seconds, in which the first shard is on its way.
        threading.Thread(target=prepare_transformers, name="rollout-imports", daemon=True).start()
        self._watch = asyncio.create_task(self._close_when_idle())

    async def teardown(self, worker: Worker) -> None:
        if self._watch is not None:
            self._watch.cancel()
        _use.runs.discard(self._run_id)
        forget_tally(self._run_id)
        await _within(CLOSE_SECONDS, traces.flush)
        # Another run may use the same engine.
        if not _use.runs:
            await _within(CLOSE_SECONDS, close_engine)
            await _within(CLOSE_SECONDS, close_rewards)
        if self._workers_end:
            # States of task runs on their way to the Prefect server. Prefect would wait for them when the process ends,
            # which a cluster gives it little time for.
            await _within(CLOSE_SECONDS, lambda: EventsWorker.drain_all(timeout=CLOSE_SECONDS))

    async def _close_when_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            if not _use.under_way and time.monotonic() - _use.last > IDLE_SECONDS:
                await _within(CLOSE_SECONDS, close_engine)


async def _within(seconds: float, call: Callable[[], object]) -> None:
    # A daemon thread: closing an engine waits for the shards that use it, which must not keep the process from ending.
    thread = threading.Thread(target=call, name="rollout-end-of-run", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, seconds)
