"""`rollout ops metrics`: figures for Prometheus, of the pipeline, the learners, the engines and the store.

Two sources: what `rollout doctor status` sees, looked at again and again in the background, so that a scrape never
waits; and the events of this machine's runs (`tasks.runtime.events`), of which the file is followed. Counters begin
with the file.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from prefect.client.schemas.objects import StateType
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from deployments.probes import find_server
from deployments.status import Status, look
from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import locations, without_passwords
from tasks.runtime.events import (
    EVENT,
    STDERR,
    Event,
    PluginCall,
    PluginLoaded,
    PluginReloaded,
    Promoted,
    RolledBack,
    RunDone,
    RunStart,
    SamplesDone,
    SamplesSkipped,
    TrainStart,
    TrainStep,
    WorkEnd,
    WorkerLost,
    WorkerStart,
)

FOLLOW_SECONDS = 1.0
"""Between looks at the file of events."""
MOST_OF_A_FILE = 1 << 20
"""Bytes that are read at once."""
MOST_RUNS = 50
"""Flow runs whose learners' figures are kept: the last ones. A label for each run without end would fill Prometheus."""


class Pipeline(Collector):
    """What the last look at the server, the storage and the database found."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._lock = threading.Lock()

    def show(self, status: Status) -> None:
        """Report this from now on."""
        with self._lock:
            self._status = status

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for. Before the first look there is nothing."""
        with self._lock:
            status = self._status
        if status is not None:
            yield from _places(status)
            yield from _pools(status)
            yield from _deployments(status)


def _places(status: Status) -> Iterator[Metric]:
    yield _gauge(
        "rollout_looked_timestamp_seconds", "When server and storage were looked at", status.checked_at.timestamp()
    )
    yield _gauge("rollout_problems", "Lines of `rollout doctor status` that need a person", len(status.problems))
    up = GaugeMetricFamily("rollout_up", "1 where this part answers as it should", labels=["part"])
    for part, place in (("server", status.server), ("storage", status.storage), ("database", status.database)):
        up.add_metric([part], float(place.trouble is None))
    yield up
    if status.storage.free_bytes is not None:
        yield _gauge("rollout_storage_free_bytes", "Free on the disk of the object store", status.storage.free_bytes)
    rollouts = GaugeMetricFamily("rollout_store_rollouts", "Rollouts in the store", labels=["status"])
    for name, count in (status.database.rollouts or {}).items():
        rollouts.add_metric([name], count)
    yield rollouts
    if status.database.rollouts is not None:
        queued = sum(status.database.rollouts.get(name, 0) for name in ("queuing", "requeuing"))
        yield _gauge("rollout_store_queue_length", "Rollouts in the store that wait for a runner", queued)
    if status.database.spans is not None:
        yield _gauge("rollout_store_attempts", "Attempts in the store", status.database.attempts or 0)
        yield _gauge("rollout_store_spans", "Spans in the store", status.database.spans)


def _pools(status: Status) -> Iterator[Metric]:
    if status.server.trouble is not None:
        return  # a server that is away has no pools without workers
    yield _gauge("rollout_late_runs", "Runs that should have begun", len(status.late))
    yield _gauge(
        "rollout_failed_runs", "Runs that failed or crashed within a day and were not tried again", len(status.failed)
    )
    yield _gauge("rollout_waiting_runs", "Runs that wait for a person", len(status.waiting))
    workers = GaugeMetricFamily("rollout_pool_workers", "Workers online", labels=["pool"])
    slots = GaugeMetricFamily(
        "rollout_pool_active_slots", "Runs that take a place of the pool's limit", labels=["pool"]
    )
    for pool in status.pools:
        workers.add_metric([pool.name], sum(worker.online for worker in pool.workers))
        if pool.active_slots is not None:
            slots.add_metric([pool.name], pool.active_slots)
    yield from (workers, slots)


def _deployments(status: Status) -> Iterator[Metric]:
    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"rollout_deployment_{name}", text, labels=["deployment"])

    running = family("running", "Runs under way")
    late_by = family("next_timestamp_seconds", "When its next run is due")
    ok = family("last_ok", "1 where its last run that says something completed")
    ended = family("last_end_timestamp_seconds", "When that run ended")
    took = family("last_seconds", "That it ran")
    for item in status.deployments:
        running.add_metric([item.name], len(item.running))
        if item.next_run is not None:
            late_by.add_metric([item.name], item.next_run.timestamp())
        run = item.telling_run
        if run is not None:
            ok.add_metric([item.name], float(run.type == StateType.COMPLETED))
            took.add_metric([item.name], run.seconds)
            if run.end is not None:
                ended.add_metric([item.name], run.end.timestamp())
    yield from (running, late_by, ok, ended, took)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


class Events:
    """What the events of runs add up to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rollout_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rollout_{name}", text, labels, registry=registry)

        self._runs = counter("runs", "Tries of flow runs that ended", "run", "state")
        self._price = counter("price", "What computed stages cost, by [cost]", "run", "currency")
        self._gpu_seconds = counter("gpu_seconds", "GPUs times seconds in which stages were computed", "run")
        self._reward = gauge("held_out_reward", "Mean held-out reward of the last run that had one", "run", "moment")
        self._stages = counter("stages", "Calls of stages", "stage", "state")
        self._stage_seconds = counter("stage_seconds", "Seconds of computed calls of stages", "stage")
        self._steps = counter("learner_steps", "Steps of learners", "algorithm")
        learner = ("run", "algorithm", "flow_run")
        self._step = gauge("learner_step", "Step of the learner under way", *learner)
        self._num_steps = gauge("learner_steps_planned", "Its steps in all", *learner)
        self._figure = gauge("learner_figure", "Figure of its last step", *learner, "figure")
        self._samples = counter("engine_samples", "Samples completed", "stage")
        self._tokens = counter("engine_tokens", "Tokens generated", "stage")
        self._running = gauge("engine_running_requests", "Requests that the engine has not answered", "stage")
        self._waiting = gauge("engine_waiting_samples", "Samples that the engine was not given yet", "stage")
        self._speed = gauge("engine_tokens_per_second", "Between the last two tellings of a stage", "stage")
        self._workers = counter("worker_starts", "Workers that came to a run's shards", "kind")
        self._lost = counter("workers_lost", "Workers that were gone with shards they had not completed", "kind")
        self._skipped = counter("samples_skipped", "Samples that results do without", "stage")
        self._plugin_loads = counter("plugin_loads", "Starts of plugins", "plugin")
        self._plugin_reloads = counter(
            "plugin_reloads", "Edited files of plugins that were taken while they ran", "plugin"
        )
        self._plugin_calls = counter("plugin_calls", "Calls of plugins", "plugin")
        self._plugin_errors = counter("plugin_call_errors", "Calls of plugins that failed", "plugin")
        self._plugin_seconds = counter("plugin_call_seconds", "Seconds of calls of plugins", "plugin")
        self._promoted = counter("promotions", "Models that became the latest", "resource")
        self._rolled_back = counter("rollbacks", "Models that were taken back", "resource")
        self.unreadable = counter("events_unreadable", "Lines of the file of events that are none")
        self._names: dict[str, str] = {}
        """Of the last flow runs, by id."""

    def take(self, line: bytes) -> None:
        """Count a line of the file."""
        try:
            self._count(EVENT.validate_json(line))
        except ValidationError:
            self.unreadable.inc()

    def _count(self, event: Event) -> None:
        match event:
            case RunStart():
                self._begin(event)
            case RunDone():
                self._runs.labels(event.run, event.state).inc()
                self._price.labels(event.run, event.currency).inc(event.price)
                self._gpu_seconds.labels(event.run).inc(event.gpu_seconds)
                for moment, value in event.held_out.items():
                    self._reward.labels(event.run, moment).set(value)
            case WorkEnd():
                self._stages.labels(event.stage, event.state).inc()
                if event.state == "Completed":
                    self._stage_seconds.labels(event.stage).inc(event.seconds)
            case TrainStart():
                learner = self._learner(event)
                self._step.labels(*learner).set(event.step)
                self._num_steps.labels(*learner).set(event.num_steps)
            case TrainStep():
                learner = self._learner(event)
                self._steps.labels(event.algorithm).inc()
                self._step.labels(*learner).set(event.step)
                for name, value in event.figures.items():
                    self._figure.labels(*learner, name).set(value)
            case SamplesDone():
                self._samples.labels(event.stage).inc(event.samples)
                self._tokens.labels(event.stage).inc(event.tokens)
                self._running.labels(event.stage).set(event.running)
                self._waiting.labels(event.stage).set(event.waiting)
                if event.seconds:
                    self._speed.labels(event.stage).set(event.tokens / event.seconds)
            case WorkerStart():
                self._workers.labels(event.kind).inc()
            case WorkerLost():
                self._lost.labels(event.kind).inc()
            case SamplesSkipped():
                self._skipped.labels(event.stage).inc(event.samples)
            case PluginLoaded():
                self._plugin_loads.labels(event.plugin).inc()
            case PluginReloaded():
                self._plugin_reloads.labels(event.plugin).inc(not event.problem)
            case PluginCall():
                self._plugin_calls.labels(event.plugin).inc(event.calls)
                self._plugin_errors.labels(event.plugin).inc(event.failed)
                self._plugin_seconds.labels(event.plugin).inc(event.seconds)
            case Promoted():
                self._promoted.labels(event.resource).inc()
            case RolledBack():
                self._rolled_back.labels(event.resource).inc()
            case _:
                pass

    def _begin(self, event: RunStart) -> None:
        self._names.pop(event.flow_run, None)
        self._names[event.flow_run] = event.run
        while len(self._names) > MOST_RUNS:
            oldest = next(iter(self._names))
            del self._names[oldest]
            for gauge in (self._step, self._num_steps, self._figure):
                gauge.remove_by_labels({"flow_run": oldest})

    def _learner(self, event: TrainStart | TrainStep) -> tuple[str, str, str]:
        return self._names.get(event.flow_run, ""), event.algorithm, event.flow_run


class Followed:
    """A file that others write lines to; also one that is not there yet, or is replaced by a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        """The last that was there, which stays open: it may get lines until it is replaced."""
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def lines(self) -> Iterator[bytes]:
        """Those that came since the last time. Raises OSError where the file cannot be read now; the next continues
        from there."""
        try:
            found = self._path.open("rb")
        except FileNotFoundError:
            found = None
        with suppress(OSError):  # one that was removed from a network drive
            yield from self._read()
        if found is not None:
            self._follow(found)
            yield from self._read()

    def _read(self) -> Iterator[bytes]:
        if self._file is None:
            return
        self._file.seek(self._offset)
        while data := self._file.read(MOST_OF_A_FILE):
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from filter(None, whole)

    def _follow(self, file: BinaryIO) -> None:
        """Read this one from now on: from its start, unless it is the last one."""
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self._rest = found.st_ino, 0, b""
        if self._file is not None:
            self._file.close()
        self._file = file


def _keep_looking(look: Callable[[], Status], pipeline: Pipeline, every: float) -> None:
    while True:
        started = time.monotonic()
        try:
            pipeline.show(look())
        except Exception:  # noqa: BLE001 - the next look may do; until then the time of the last one tells
            sys.stderr.write(without_passwords(traceback.format_exc()))
        time.sleep(max(1.0, every - (time.monotonic() - started)))


def _keep_following(file: Followed, events: Events) -> None:
    is_told = False
    while True:
        try:
            for line in file.lines():
                events.take(line)
            is_told = False
        except OSError as error:
            if not is_told:
                sys.stderr.write(f"events cannot be read, and are looked for again: {error}\n")
            is_told = True
        time.sleep(FOLLOW_SECONDS)


def events_file() -> Path | None:
    """The file of events that the settings name; None where they name none, or standard error."""
    events = locations().events
    return None if events is None or events == STDERR else Path(events)


def serve(host: str, port: int, home: Path, every: float, events: Path | None) -> int:
    """Answer Prometheus from now on, in the background, about the configured server, or the one of the folder ``home``.

    Returns the port, where 0 was asked for. Raises ConfigError where it cannot be had.
    """
    registry, pipeline = CollectorRegistry(), Pipeline()
    registry.register(pipeline)
    counted = Events(registry)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}; give another --port") from error
    threading.Thread(target=_keep_looking, args=(lambda: look(find_server(home)), pipeline, every), daemon=True).start()
    if events is not None:
        threading.Thread(target=_keep_following, args=(Followed(events), counted), daemon=True).start()
    return server.server_port
