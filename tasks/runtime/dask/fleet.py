"""Shards over the workers of a Dask cluster, of the run's own or one that is there, whoever joins, leaves or dies.

Two shards are under way on each worker, so that its engine does not run dry between them. When all are given out, idle
workers take unclaimed samples off the slow ones. A shard whose worker dies is run by another under the same task run;
what was committed stays, since workers only meet in the store.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import dask.config
from distributed import Client, KilledWorker
from prefect import Task
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, serialize_context
from prefect.settings import PREFECT_API_URL
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture

from rollout_core.base import traces
from rollout_core.base.determinism import current_numerics
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.processes import this_machine
from rollout_core.config import DaskCluster, DaskConfig, WorkersConfig
from rollout_core.inference.batch import Progress
from rollout_core.inference.batch_runs import tally
from rollout_core.inference.ledger import this_worker
from rollout_core.plans.cluster import LOCAL_CLUSTERS, in_words, offers
from tasks.runtime import connections, events
from tasks.runtime.dask.worker import Driver, EngineKeeper, address_of, run_stage
from tasks.runtime.journal import stage_logger
from tasks.runtime.placement import FanOut, R, Submitted, T
from tasks.runtime.stage import retry

SHARDS_PER_WORKER = 2
LOOK_SECONDS = 1.0
LOG_SECONDS = 30.0
LOST = "the Dask scheduler is gone; what is complete is kept: see that one runs, and run again"
END_SECONDS = 20.0
CLUSTER_SETTINGS = {
    # Daemonic processes may not have children, and an engine is one.
    "distributed.worker.daemon": False,
    # Dask sizes adaptive clusters by the time that tasks take, which it does not know before the first has ended.
    "distributed.scheduler.default-task-durations": {"infer_shard": "1h"},
}
FOR_WORKERS, BEFORE_WORKERS = "distributed.nanny.environ", "distributed.nanny.pre-spawn-environ"
LOCAL_CLUSTER_OPTIONS = {"threads_per_worker": SHARDS_PER_WORKER, "memory_limit": 0, "dashboard_address": None}
"""Unless given: an engine's memory is not Dask's to bound, and nobody asked for an open port."""


class _Deadly(Exception):
    """Dask gave a task up, whose workers died one after the other."""


class _StageFuture(PrefectDaskFuture[Any]):
    """The future of a stage on a worker; what Dask itself has to say about it is raised."""

    def wait(self, timeout: float | None = None) -> None:
        try:
            state = self._wrapped_future.result(timeout=timeout)
        except KilledWorker as error:
            raise _Deadly(str(error)) from error
        except CancelledError as error:
            raise Recoverable(LOST) from error
        assert isinstance(state, State), "run_stage returns a state"
        self._final_state = state


@dataclass
class _Job:
    """A shard, or help with one, under way."""

    place: int
    """Of its item."""
    is_help: bool
    done_before: int
    """Samples of the shard that were known to be done."""
    worker: str | None
    """Address of the worker it is on, which may have gone since; None while that is open."""
    submitted: Submitted[Any] | None = None


class _Spot:
    """Where the next stage is to run: what stages take for a task runner."""

    def __init__(self, fleet: DaskFleet, job: _Job) -> None:
        self._fleet = fleet
        self._job = job

    def submit(self, task: Task[..., Any], parameters: dict[str, Any]) -> PrefectDaskFuture[Any]:
        return self._fleet.submit(task, parameters, self._job)


class DaskFleet:
    """The workers of a cluster, as they come and go.

    ``at_once``: so many stages are under way on each, and each asks for its part of what the worker has to offer.
    """

    def __init__(
        self,
        client: Client,
        workers: WorkersConfig,
        config: DaskConfig,
        driver: Driver,
        *,
        at_once: int,
    ) -> None:
        self._client = client
        self._workers = workers
        self._config = config
        self._driver = driver
        self._at_once = at_once
        self._shared: WorkersConfig | None = None
        """What workers know of helpers of their stage (`tasks.runtime.placement.sharing`)."""
        self._context = _flow_context()
        self._tally = tally(driver.run_id)
        self._jobs: dict[str, _Job] = {}
        """By task run."""
        self._finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._slots: dict[str, int] = {}
        """Shards that each worker may have at a time."""
        self._had: Counter[str | None] = Counter()
        """Shards that each had at the last look: those of a worker that dies soon begin elsewhere."""
        self._helped: dict[int, float] = {}
        """When nothing was left to help with, by place of the item."""
        self._began = self._looked = self._had_workers = time.monotonic()
        self._next_log = self._began + LOG_SECONDS
        self._worker_seconds = 0.0

    def average_workers(self) -> float:
        return self._worker_seconds / max(self._looked - self._began, 1e-9)

    def num_workers(self) -> int:
        """How many there are now."""
        self._had_workers = time.monotonic()
        self._look_around()
        return len(self._slots)

    def share(self, workers: WorkersConfig | None) -> None:
        """From the next items on workers take from each other's, in claims as ``workers`` says; None: they do not."""
        self._shared = workers
        self._workers = workers or self._workers

    def run_all(self, items: Sequence[T], work: FanOut[T, R]) -> list[R]:
        results: dict[int, R] = {}
        # Help with earlier items may be at its end still.
        self._jobs.clear()
        self._helped.clear()
        self._had_workers = time.monotonic()
        waiting = deque(range(len(items)))
        while len(results) < len(items):
            self._look_around()
            while waiting and self._has_room():
                self._start(waiting.popleft(), items, work)
            if not waiting:
                self._assist(items, work)
            job = self._next_finished()
            if job is None:
                continue
            assert job.submitted is not None, "only submitted jobs finish"
            if job.is_help:
                self._end_help(job, work.name(items[job.place]))
                continue
            try:
                results[job.place] = job.submitted.result()
            except _Deadly as error:
                self._raise_if_stuck(job, work.progress(items[job.place]).done, work.name(items[job.place]), error)
                waiting.appendleft(job.place)
                continue
            work.on_result(items[job.place], results[job.place])
        return [results[place] for place in range(len(items))]

    def submit(self, task: Task[..., Any], inputs: dict[str, Any], job: _Job) -> PrefectDaskFuture[Any]:
        """Run a stage's task on the job's worker, or on whichever has room."""
        task_run_id = uuid4()
        self._jobs[str(task_run_id)] = job
        asked = {name: amount / self._at_once for name, amount in self._config.wanted.items()}
        future = self._client.submit(
            run_stage,
            address_of(task.fn),
            inputs,
            task_run_id,
            {**self._context, traces.TRACEPARENT: traces.current_traceparent()},
            self._driver,
            self._shared,
            key=f"{task.name}-{task_run_id}",
            workers=None if job.worker is None else [job.worker],
            # Another worker continues a shard whose worker dies; help is of use only where there is nothing else to do.
            allow_other_workers=job.worker is not None and not job.is_help,
            resources=asked or None,
            pure=False,
        )
        future.add_done_callback(lambda _: self._finished.put(str(task_run_id)))
        return _StageFuture(task_run_id=task_run_id, wrapped_future=future)

    def hear(self, event: tuple[float, dict[str, Any]]) -> None:
        """Take a worker's event; called by Dask's thread."""
        _, message = event
        if "shard" in message:
            self._tally.note(message["shard"], Progress(*message["progress"]))
        elif (job := self._jobs.get(message["started"])) is not None:
            job.worker = message["worker"]

    def _look_around(self) -> None:
        """See which workers there are. Raises Recoverable where that cannot be known, or there were none for long."""
        if self._client.status != "running":
            raise Recoverable(LOST)
        now = time.monotonic()
        if self._slots and now - self._looked < LOOK_SECONDS:
            return
        found = _ask_for_workers(self._client)
        wanted = self._config.wanted
        # Those that are used already stay so.
        usable = sorted(_usable(found, wanted), key=lambda address: address not in self._slots)
        usable = usable[: self._config.max_workers]
        slots = {address: min(self._at_once, found[address]["nthreads"]) for address in usable}
        self._worker_seconds += len(self._slots) * (now - self._looked)
        if slots.keys() != self._slots.keys():
            stage_logger().info("%d Dask workers", len(slots))
            self._tell(slots)
        self._slots, self._looked = slots, now
        self._had = self._load()
        if slots:
            self._had_workers = now
            return
        lacking = f' that offer {in_words(wanted)} (dask worker --resources "{in_words(wanted)}")' if wanted else ""
        if now - self._had_workers > self._config.wait_seconds:
            raise Recoverable(
                f"{now - self._had_workers:.0f} s without Dask workers{lacking}, {len(found)} others are there; start "
                "some and run again: what is complete is kept"
            )
        if now > self._next_log:
            self._next_log = now + LOG_SECONDS
            stage_logger().warning("waiting for Dask workers%s; %d others are there", lacking, len(found))

    def _tell(self, slots: dict[str, int]) -> None:
        """Events of workers that came and went since the last look."""
        for address in slots.keys() - self._slots.keys():
            events.emit(events.WorkerStart(worker=address, kind="dask", slots=slots[address]))
        for address in self._slots.keys() - slots.keys():
            if self._had[address]:
                events.emit(events.WorkerLost(worker=address, kind="dask", shards=self._had[address]))
            else:
                events.emit(events.WorkerEnd(worker=address, kind="dask"))

    def end(self) -> None:
        """The run needs its workers no more."""
        for address in self._slots:
            events.emit(events.WorkerEnd(worker=address, kind="dask"))

    def _has_room(self) -> bool:
        # With none yet, or more to come, Dask sees by what waits that workers are wanted.
        most = self._config.adapt.maximum if self._config.adapt is not None else 1
        room = max(sum(self._slots.values()), self._at_once * most)
        return sum(not job.is_help for job in self._jobs.values()) < room

    def _start(self, place: int, items: Sequence[T], work: FanOut[T, R]) -> None:
        load = self._load()
        # Which of those that offer what is asked for is left to Dask. Where it was given one and may take others, it
        # takes any that is left when that one dies, whatever that offers, and fails on it.
        pinned = {} if self._config.wanted else self._slots
        free = [worker for worker, slots in pinned.items() if load[worker] < slots]
        worker = min(free, key=load.__getitem__, default=None)
        job = _Job(place, False, work.progress(items[place]).done, worker)
        job.submitted = work.submit(_Spot(self, job), items[place])

    def _load(self) -> Counter[str | None]:
        return Counter(job.worker for job in self._jobs.values() if job.worker in self._slots)

    def _assist(self, items: Sequence[T], work: FanOut[T, R]) -> None:
        """Give every idle worker the shard that has the most left for each who works on it."""
        if work.assist is None:
            return
        load, now = self._load(), time.monotonic()
        helpers = Counter(job.place for job in self._jobs.values() if job.is_help)
        # Claims become free again when they go stale, so what had nothing left may have.
        pause = self._workers.stale_after_seconds
        shards = {
            job.place: _left(work.progress(items[job.place]))
            for job in self._jobs.values()
            if not job.is_help and job.worker in self._slots and now - self._helped.get(job.place, -math.inf) > pause
        }
        for worker in [worker for worker in self._slots if not load[worker]]:
            worth = {
                place: left / (1 + helpers[place])
                for place, left in shards.items()
                if left > helpers[place] * self._workers.claimed_together
            }
            if not worth:
                return
            place = max(worth, key=worth.__getitem__)
            helpers[place] += 1
            job = _Job(place, True, 0, worker)
            job.submitted = work.assist(_Spot(self, job), items[place])

    def _next_finished(self) -> _Job | None:
        with suppress(queue.Empty):
            return self._jobs.pop(self._finished.get(timeout=LOOK_SECONDS), None)
        return None

    def _end_help(self, job: _Job, name: str) -> None:
        self._helped[job.place] = time.monotonic()
        try:
            assert job.submitted is not None
            job.submitted.result()
        except Exception as error:  # noqa: BLE001 - its own task reports what is wrong with the shard itself
            stage_logger().warning("help with %s ended: %s", name, error)

    def _raise_if_stuck(self, job: _Job, done: int, name: str, error: _Deadly) -> None:
        """What Dask gave up is tried again as long as it gets further."""
        if done > job.done_before:
            return
        raise Fatal(
            f"the workers that {name} ran on died, and none got further with it ({error}); see their logs (often "
            "memory ran out: give the workers more, or the engine less), and run again"
        ) from error


def _ask_for_workers(client: Any) -> dict[str, Any]:
    """What the scheduler knows of its workers, by address."""
    # Not Client.scheduler_info, whose answer a refresh in the background may replace by one without workers.
    try:
        return client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    except OSError as error:
        raise Recoverable(LOST) from error


def _usable(workers: Mapping[str, Any], wanted: Mapping[str, float]) -> list[str]:
    """Addresses of those that offer what is wanted."""
    return [
        address
        for address, worker in workers.items()
        if offers(worker["resources"], wanted) and worker["status"] in ("running", "paused")
    ]


def _left(known: Progress) -> int:
    return known.total - known.done


def _flow_context() -> dict[str, Any]:
    """Prefect's context of this flow run, less what workers have themselves: the flow's code and where results go."""
    run = serialize_context()["flow_run_context"]
    return {
        "flow": _flow_address(),
        "flow_run_context": {name: value for name, value in run.items() if name not in ("flow", "result_store")},
    }


def _flow_address() -> str:
    """Where this run's flow is found."""
    context = FlowRunContext.get()
    assert context is not None and context.flow is not None, "called inside the flow"
    return address_of(context.flow.fn)


class OpenCluster:
    """A cluster whose workers know of this run."""

    def __init__(self, client: Client, driver: Driver) -> None:
        self._client = client
        self._driver = driver
        self._fleets: list[DaskFleet] = []
        client.subscribe_topic(driver.topic, self._hear)

    def fleet(self, workers: WorkersConfig, config: DaskConfig, *, at_once: int) -> DaskFleet:
        """Those of its workers that ``config`` asks for."""
        self._fleets.append(DaskFleet(self._client, workers, config, self._driver, at_once=at_once))
        return self._fleets[-1]

    def end(self) -> None:
        """The run needs its workers no more."""
        for fleet in self._fleets:
            fleet.end()

    def _hear(self, event: tuple[float, dict[str, Any]]) -> None:
        for fleet in self._fleets:
            fleet.hear(event)


@contextmanager
def dask_fleet(workers: WorkersConfig, config: DaskConfig, run_id: str) -> Iterator[DaskFleet]:
    """The configured cluster's workers, for shards. Raises as `dask_cluster`."""
    with dask_cluster(config, run_id, key="workers.dask") as cluster:
        yield cluster.fleet(workers, config, at_once=SHARDS_PER_WORKER)


def cluster_settings() -> dict[str, Any]:
    """Dask's, for a cluster of this run.

    A nanny has its worker begin with one thread by variables of its own process, which is the run's: its learners would
    have one thread, too, from the first worker on. So workers set these themselves, which is before they import torch.
    """
    begins = dask.config.get(BEFORE_WORKERS)
    threads = {name: value for name, value in begins.items() if name.endswith("_NUM_THREADS")}
    others = {name: value for name, value in begins.items() if name not in threads}
    return {**CLUSTER_SETTINGS, BEFORE_WORKERS: others, FOR_WORKERS: {**threads, **dask.config.get(FOR_WORKERS)}}


@contextmanager
def dask_cluster(config: DaskCluster, run_id: str, *, key: str) -> Iterator[OpenCluster]:
    """The configured cluster, with what its workers need to know of this run. ``key``: of the configuration.

    Raises ConfigError where it cannot be made, or its workers cannot run our code; Recoverable where none answers.
    """
    with dask.config.set(cluster_settings()), _runner(config) as runner:
        client = _client(runner, config, key)
        driver = introduce(run_id)
        keeper = EngineKeeper(run_id, _flow_address(), workers_end=config.cluster is not None)
        try:
            _register(client, keeper)
            cluster = OpenCluster(client, driver)
            try:
                yield cluster
            finally:
                cluster.end()
        finally:
            connections.objects().delete_ref(driver.mark)
            # Also where the cluster ends with the run: it does not wait for engines to close. A worker that hangs must
            # not keep us.
            if client.status == "running":
                _within(END_SECONDS, lambda: client.unregister_worker_plugin(keeper.name))


def _runner(config: DaskCluster) -> DaskTaskRunner:
    if config.address is not None:
        return DaskTaskRunner(address=config.address)
    return DaskTaskRunner(
        cluster_class=config.cluster,
        cluster_kwargs={**(LOCAL_CLUSTER_OPTIONS if config.cluster in LOCAL_CLUSTERS else {}), **config.options},
        adapt_kwargs=config.adapt.model_dump() if config.adapt is not None else None,
    )


def _client(runner: DaskTaskRunner, config: DaskCluster, key: str) -> Client:
    try:
        return runner.client
    except OSError as error:
        raise Recoverable(f"no Dask scheduler answers at {config.address or config.cluster}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{key}.options: {config.cluster} does not take them: {error}") from error


def introduce(run_id: str) -> Driver:
    """Leave a mark in storage and database, by which a worker knows that they are its own, too."""
    mark = f"fan-out/{run_id}"

    def appear() -> None:
        storage = connections.objects()
        storage.set_ref(mark, storage.put_bytes(mark.encode()))
        asyncio.run(_appear())

    retry(appear)
    return Driver(
        run_id=run_id,
        worker_id=this_worker(),
        mark=mark,
        connections=connections.description(),
        machine=this_machine(),
        api_url=PREFECT_API_URL.value(),
        numerics=current_numerics(),
    )


async def _appear() -> None:
    async with connections.open_store() as store:
        await store.update_worker(this_worker())


def _register(client: Client, keeper: EngineKeeper) -> None:
    try:
        client.register_plugin(keeper)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"a Dask worker cannot run rollout ({error}); install the driver's version of it on every worker"
        ) from error


def _within(seconds: float, call: Callable[[], Any]) -> None:
    def run() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=run, name="rollout-end-of-run", daemon=True)
    thread.start()
    thread.join(seconds)
