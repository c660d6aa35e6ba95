"""What happens in runs, as one stream of typed lines of JSON, for programs: metrics, dashboards, scripts.

Lines are written for people's programs alone: no stage reads them, and none waits for them or fails by them. They go to
the file that ``ROLLOUT_EVENTS`` names (all runs of a machine may write to one), or to stderr; without it, nowhere.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollout_core.base.settings import locations
from tasks.logs import stage_logger

STDERR = "stderr"
"""In place of a file's name."""


class _Event(BaseModel):
    """What every event has."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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


class TrainStart(_Event):
    """A learner begins, or goes on from a snapshot."""

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


class SamplesSkipped(_Event):
    """Samples that a result does without, as the configuration allows."""

    topic: Literal["samples_skipped"] = "samples_skipped"
    stage: str
    samples: int
    reason: str


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
    | WorkStart
    | WorkEnd
    | TrainStart
    | TrainStep
    | TrainEnd
    | SamplesDone
    | SamplesSkipped
    | Promoted
    | RolledBack,
    Field(discriminator="topic"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads a line: ``EVENT.validate_json(line)``."""

_told: set[str] = set()
"""Places that could not be written, each told once."""


def emit(event: _Event) -> None:
    """Write a line, in one piece."""
    place = locations().events
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


class Training:
    """Tells of one update of a learner."""

    def __init__(self, algorithm: str, label: str) -> None:
        self._algorithm, self._label = algorithm, label
        self._num_steps = 0
        self._last: Mapping[str, float] | None = None

    def start(self, first: int, last: int) -> None:
        """It begins at step ``first`` of ``last``."""
        self._num_steps = last
        emit(TrainStart(algorithm=self._algorithm, label=self._label, step=first, num_steps=last))

    def step(self, row: Mapping[str, float]) -> None:
        """It has done a step, of which ``row["step"]`` is the number."""
        self._last = row
        done = TrainStep(
            algorithm=self._algorithm,
            label=self._label,
            step=int(row["step"]),
            num_steps=self._num_steps,
            figures=_figures(row),
        )
        emit(done)

    def end(self) -> None:
        """It has done what it was to do; tells nothing where there was nothing to do."""
        row = self._last
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
        self._next = time.monotonic() + interval
        self._told = self._tokens = 0

    def note(self, samples: int, tokens: int) -> None:
        """So many in all by now."""
        if time.monotonic() >= self._next:
            self.end(samples, tokens)

    def end(self, samples: int, tokens: int) -> None:
        """So many in all, and that was it, or it is time."""
        self._next = time.monotonic() + self._interval
        if samples > self._told or tokens > self._tokens:
            emit(SamplesDone(stage=self._stage, samples=samples - self._told, tokens=tokens - self._tokens))
            self._told, self._tokens = samples, tokens
