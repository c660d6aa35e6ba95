"""What happens in runs, as one stream of typed lines of JSON, for programs: metrics, dashboards, scripts.

Lines are written for people's programs alone: no stage reads them, and none waits for them or fails by them. They go to
the file that ``ROLLOUT_EVENTS`` names (all runs of a machine may write to one), or to stderr; without it, nowhere.

The Prefect server gets what is rare, so that its automations can act on it: ``rollout.promoted``,
``rollout.run_done``. That goes out with the artifacts, from a thread of its own (`tasks.runtime.artifact_sender`):
nothing waits for a server that is away, and what happened meanwhile is sent in its order once it answers again. Each
event keeps its id, so that the server files it once. ``ROLLOUT_PREFECT_EVENTS=off`` switches them off.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext
from prefect.events.schemas.events import Event as ServerEvent, RelatedResource, Resource
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollout_core.base import traces
from rollout_core.base.machine import Machine
from rollout_core.base.settings import locations
from tasks.runtime.artifact_sender import SENDER
from tasks.runtime.journal import Learning, current_journal, stage_logger, title_of

STDERR = "stderr"
"""In place of a file's name."""
FREQUENT = frozenset(
    {
        "work_start",
        "work_end",
        "train_step",
        "samples_done",
        "plugin_loaded",
        "plugin_reloaded",
        "plugin_call",
        "plugin_call_error",
    }
)
"""Topics that the server does not get: it is no place for thousands of them, and of stages it has its own task runs."""
_ID, _NAME, _ROLE = "prefect.resource.id", "prefect.resource.name", "prefect.resource.role"


class _Event(BaseModel):
    """What every event has."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    topic: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    flow_run: str = Field(default_factory=lambda: flow_run.id or "")
    """Id of the flow run; empty outside of one."""


class RunStart(_Event):
    """A flow run begins, or begins its next try."""

    topic: Literal["run_start"] = "run_start"
    flow: str
    run: str
    """Name of the run by its configuration, such as ``nightly``."""


class RunDone(_Event):
    """A flow run, or a try of it, has ended."""

    topic: Literal["run_done"] = "run_done"
    flow: str
    run: str
    state: Literal["completed", "stopped", "failed"]
    seconds: float
    """Wall-clock time of this try."""
    computed_seconds: float
    """In which stages were computed; so also for the price."""
    gpu_seconds: float
    price: float
    currency: str
    held_out: Mapping[str, float] = {}
    """Mean held-out reward by moment."""
    promoted: bool | None = None
    error: str | None = None


class Inventory(_Event):
    """What the machine has for a process that begins: a try of a flow run, or a worker of a pool."""

    topic: Literal["inventory"] = "inventory"
    machine: Machine
    """As it is then; ``spot`` is of a worker that watches for notices."""


class WorkStart(_Event):
    """A stage begins to be computed, in this process."""

    topic: Literal["work_start"] = "work_start"
    stage: str


class WorkEnd(_Event):
    """A call of a stage has ended, or its result was there already."""

    topic: Literal["work_end"] = "work_end"
    stage: str
    label: str
    state: str
    """``Completed``, ``Cached``, ``Checked``, or as the failed task run's state is called."""
    seconds: float


class WorkerStart(_Event):
    """A worker is there for a run's shards."""

    topic: Literal["worker_start"] = "worker_start"
    worker: str
    """Address of a Dask worker, or name of this process."""
    kind: Literal["dask", "threads"]
    slots: int
    """Shards that it works on at a time."""


class WorkerEnd(_Event):
    """The run needs it no more, or it left without a shard."""

    topic: Literal["worker_end"] = "worker_end"
    worker: str
    kind: Literal["dask", "threads"]


class WorkerLost(_Event):
    """It is gone, with shards that it had not completed; others go on with them."""

    topic: Literal["worker_lost"] = "worker_lost"
    worker: str
    kind: Literal["dask", "threads"]
    shards: int


class TrainStart(_Event):
    """A learner begins, or resumes from a snapshot."""

    topic: Literal["train_start"] = "train_start"
    algorithm: str
    label: str
    step: int
    """Where it begins: the step of the snapshot, or 0."""
    num_steps: int


class TrainStep(_Event):
    """A learner has done a step."""

    topic: Literal["train_step"] = "train_step"
    algorithm: str
    label: str
    step: int
    num_steps: int
    figures: Mapping[str, float]
    """As in the metrics of the checkpoint: loss, reward, KL (nats), learning rate and so on."""


class TrainEnd(_Event):
    """A learner has done all its steps."""

    topic: Literal["train_end"] = "train_end"
    algorithm: str
    label: str
    step: int
    figures: Mapping[str, float]


class SamplesDone(_Event):
    """Samples that an engine has completed since the event before."""

    topic: Literal["samples_done"] = "samples_done"
    stage: str
    samples: int
    tokens: int
    seconds: float = 0.0
    """Since the event before, or the beginning."""
    running: int = 0
    """Requests that the engine has not answered."""
    waiting: int = 0
    """Samples that it was not given yet."""


class SamplesSkipped(_Event):
    """Samples that a result does without, as the configuration allows."""

    topic: Literal["samples_skipped"] = "samples_skipped"
    stage: str
    samples: int
    reason: str


class PluginLoaded(_Event):
    """A plugin was started, in a process of its own."""

    topic: Literal["plugin_loaded"] = "plugin_loaded"
    plugin: str
    version: str
    mode: str
    seconds: float


class PluginReloaded(_Event):
    """Files of a plugin were edited while a run with ``--hot-reload`` went. ``problem``: why they were not taken."""

    topic: Literal["plugin_reloaded"] = "plugin_reloaded"
    plugin: str
    version: str
    mode: str
    id: str
    """Content id of the files that it runs from then on."""
    seconds: float
    problem: str = ""


class PluginCall(_Event):
    """Calls of a plugin in a stage that ended, together."""

    topic: Literal["plugin_call"] = "plugin_call"
    plugin: str
    stage: str
    calls: int
    failed: int
    seconds: float
    slowest_seconds: float


class PluginCallError(_Event):
    """A call of a plugin failed; of a stage's the first ones."""

    topic: Literal["plugin_call_error"] = "plugin_call_error"
    plugin: str
    stage: str
    error: str


class Promoted(_Event):
    """A model became the latest one of a resource."""

    topic: Literal["promoted"] = "promoted"
    resource: str
    model: str
    reason: str


class RolledBack(_Event):
    """An earlier model became the latest one again."""

    topic: Literal["rolled_back"] = "rolled_back"
    resource: str
    model: str
    instead_of: str
    reason: str


Event = Annotated[
    RunStart
    | RunDone
    | Inventory
    | WorkStart
    | WorkEnd
    | TrainStart
    | TrainStep
    | TrainEnd
    | SamplesDone
    | SamplesSkipped
    | PluginLoaded
    | PluginReloaded
    | PluginCall
    | PluginCallError
    | Promoted
    | RolledBack
    | WorkerStart
    | WorkerEnd
    | WorkerLost,
    Field(discriminator="topic"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads a line: ``EVENT.validate_json(line)``."""

_told: set[str] = set()
"""Places that could not be written, each reported once."""


def emit(event: _Event) -> None:
    """Write a line, in one piece, and tell the Prefect server of what is rare."""
    asked = locations()
    if asked.prefect_events:
        _tell_server(event.topic, event.at, event.model_dump(mode="json", exclude={"topic", "at", "flow_run"}))
    place = asked.events
    if place is None:
        return
    line = event.model_dump_json().encode() + b"\n"
    try:
        if place == STDERR:
            sys.stderr.flush()
            os.write(2, line)
            return
        # Opened each time, so that the file may be moved away (logrotate) at any moment; in one write, so that lines
        # of several processes do not mix.
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        if place not in _told:
            _told.add(place)
            stage_logger().warning("events cannot be written to %s (ROLLOUT_EVENTS): %s", place, error)


class _OutgoingEvent:
    """An event on its way to the server."""

    def __init__(self, event: ServerEvent) -> None:
        self.key = event.event
        self.data: Any = [event.model_dump(mode="json")]
        self.context = contextvars.copy_context()

    def deliver(self, client: SyncPrefectClient, data: Any) -> None:
        """Give it to the server."""
        client.request("POST", "/events", json=data)  # pyright: ignore[reportArgumentType]


def _tell_server(topic: str, at: datetime, fields: Mapping[str, Any]) -> None:
    """Tell the server of what happened in the current flow run; returns at once. Outside of a flow run it does nothing.

    The event is about the model, where ``fields`` has one, else about the flow run, to which it is related then; also
    to the run's deployment and tags, by which automations choose.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if topic in FREQUENT or run is None:
        return
    of_run = {_ID: f"prefect.flow-run.{run.id}", _NAME: run.name}
    model = fields.get("model")
    about = of_run if model is None else {_ID: f"rollout.model.{model}", _NAME: str(fields.get("resource", model))}
    related = [] if model is None else [{**of_run, _ROLE: "flow-run"}]
    if run.deployment_id is not None:
        related.append({_ID: f"prefect.deployment.{run.deployment_id}", _ROLE: "deployment"})
    related += [{_ID: f"prefect.tag.{tag}", _ROLE: "tag"} for tag in sorted(run.tags)]
    event = ServerEvent(
        occurred=at,  # pyright: ignore[reportArgumentType]
        event=f"rollout.{topic}",
        resource=Resource.model_validate(about),
        related=[RelatedResource.model_validate(one) for one in related],
        payload=dict(fields),
    )
    SENDER.send(_OutgoingEvent(event))


BATCH = "batch"
"""Spans of a stage's trace: steps of a learner, or samples of an engine, that followed each other."""
BATCH_SECONDS = 1.0
"""For which such a span lasts at least, but for the last."""


class Training:
    """Tells of one update of a learner."""

    def __init__(self, stage: str, algorithm: str, label: str) -> None:
        self._algorithm, self._label = algorithm, label
        self._title, self._journal = title_of(stage, label), current_journal()
        self._num_steps = 0
        self._last: Mapping[str, float] | None = None
        self._stage = traces.current_traceparent()
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    def start(self, first: int, last: int) -> None:
        """It begins at step ``first`` of ``last``."""
        self._num_steps = last
        self._since = time.monotonic()
        if self._journal is not None:
            self._journal.learning = Learning(self._title, last)
        emit(TrainStart(algorithm=self._algorithm, label=self._label, step=first, num_steps=last))

    def step(self, row: Mapping[str, float]) -> None:
        """It has done a step, of which ``row["step"]`` is the number."""
        self._last = row
        if self._journal is not None and self._journal.learning is not None:
            self._journal.learning.rows.append(row)
        done = TrainStep(
            algorithm=self._algorithm,
            label=self._label,
            step=int(row["step"]),
            num_steps=self._num_steps,
            figures=_figures(row),
        )
        emit(done)
        self._steps, self._tokens = self._steps + 1, self._tokens + int(row.get("num_tokens", 0))
        if time.monotonic() - self._since >= BATCH_SECONDS or done.step == self._num_steps:
            self._trace(done)

    def _trace(self, last: TrainStep) -> None:
        counts = {"steps": self._steps, "last_step": last.step, "tokens": self._tokens}
        seconds = time.monotonic() - self._since
        traces.add_span(BATCH, seconds, self._stage, **counts, loss=last.figures.get("loss"))
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    def end(self) -> None:
        """It has done what it was to do; tells nothing where there was nothing to do."""
        row = self._last
        if self._journal is not None:
            self._journal.learning = None
        if row is not None:
            step, figures = int(row["step"]), _figures(row)
            emit(TrainEnd(algorithm=self._algorithm, label=self._label, step=step, figures=figures))


def _figures(row: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON has numbers for."""
    return {name: value for name, value in row.items() if name != "step" and math.isfinite(value)}


class SampleCount:
    """Tells of samples as they are done, at most every ``interval`` seconds."""

    def __init__(self, stage: str, interval: float = 2.0) -> None:
        self._stage = stage
        self._interval = interval
        self._since = time.monotonic()
        self._told = self._tokens = 0
        self._span = traces.current_traceparent()

    def note(self, samples: int, tokens: int, *, running: int = 0, waiting: int = 0) -> None:
        """So many in all by now."""
        if time.monotonic() >= self._since + self._interval:
            self._tell(samples, tokens, running, waiting)

    def end(self, samples: int, tokens: int) -> None:
        """So many in all, and that was it."""
        self._tell(samples, tokens, 0, 0)

    def _tell(self, samples: int, tokens: int, running: int, waiting: int) -> None:
        since, self._since = self._since, time.monotonic()
        if samples > self._told or tokens > self._tokens:
            done = SamplesDone(
                stage=self._stage,
                samples=samples - self._told,
                tokens=tokens - self._tokens,
                seconds=self._since - since,
                running=running,
                waiting=waiting,
            )
            emit(done)
            traces.add_span(BATCH, done.seconds, self._span, samples=done.samples, tokens=done.tokens)
            self._told, self._tokens = samples, tokens
