"""Where stages run: the seam between a stage that is called and a worker that runs it.

A flow calls its stages and knows nothing of this. Around it `placing` says, by the place that a stage names, what takes
the call instead of this process; `tasks/runtime/dask/placed_stages.py` does so by a run's ``[placement]`` table. On a
worker `sharing` says that others help with the stage, so what it takes for itself has to be kept where they see it.
A `FanOut` is many calls over the workers there are: `local_fleet` has threads of this process,
`tasks.runtime.dask.fleet` the workers of a cluster.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from rollout_core.config import WorkersConfig
from rollout_core.config.inference import StagePlace
from rollout_core.inference.batch import Progress
from rollout_core.inference.ledger import this_worker
from rollout_core.objects.records import Record
from tasks.runtime import events

R = TypeVar("R", bound=Record)
T = TypeVar("T")

Place = Callable[[Any, dict[str, Any]], Any]
"""Runs a stage with these arguments, by name, and returns its record."""

_places: ContextVar[Mapping[StagePlace, Place] | None] = ContextVar("rollout_places", default=None)
_sharing: ContextVar[WorkersConfig | None] = ContextVar("rollout_sharing", default=None)


@contextmanager
def placing(places: Mapping[StagePlace, Place]) -> Iterator[None]:
    """Stages of these places, called inside the block, run there; the others in this process."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def place_of(place: StagePlace | None) -> Place | None:
    """Where a stage that names ``place`` runs, called here; None: in this process."""
    places = _places.get()
    return None if places is None or place is None else places.get(place)


@contextmanager
def sharing(workers: WorkersConfig | None) -> Iterator[None]:
    """Stages inside the block have helpers in other processes; None: they have not."""
    token = _sharing.set(workers)
    try:
        yield
    finally:
        _sharing.reset(token)


def shared_with() -> WorkersConfig | None:
    """How the running stage shares its work with helpers; None: it has none."""
    return _sharing.get()


class RunsTasks(Protocol):
    """A started task runner, or a place on one."""

    def submit(self, task: Task[..., Any], parameters: dict[str, Any]) -> PrefectFuture[Any]:
        """Start a task and return at once."""
        ...


class Submitted(Generic[R]):
    """A stage that runs on a task runner."""

    def __init__(self, future: PrefectFuture[Any], finish: Callable[[State[Any], float], R]) -> None:
        self._future = future
        self._finish = finish
        self._started = time.monotonic()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call, from any thread, once `result` would not wait."""
        self._future.add_done_callback(lambda _: call())

    def result(self) -> R:
        """Wait for the record. Raises what the stage raised."""
        self._future.wait()
        return self._finish(self._future.state, time.monotonic() - self._started)


@dataclass(frozen=True)
class FanOut(Generic[T, R]):
    """What is done with each item, on whichever worker has room."""

    submit: Callable[[RunsTasks, T], Submitted[R]]
    assist: Callable[[RunsTasks, T], Submitted[Any]] | None
    """Help the item's worker with it; None: nobody can."""
    progress: Callable[[T], Progress]
    """How far an item is, as its worker reported; zeros before it did."""
    name: Callable[[T], str]
    """What people call an item."""
    on_result: Callable[[T, R], None]
    """Receives each result as it comes; what it raises ends the fan-out."""


class Fleet(Protocol):
    """Workers of one machine or of many."""

    def run_all(self, items: Sequence[T], work: FanOut[T, R]) -> list[R]:
        """Results of all items, in their order. An item that raises ends the fan-out."""
        ...

    def average_workers(self) -> float:
        """How many workers there were, over the time so far."""
        ...


@contextmanager
def local_fleet(count: int, *, in_turn: bool = False) -> Iterator[Fleet]:
    """Threads of this process, one more than workers: while their shards are generated, the next is made ready, unless
    they come ``in_turn``, each when the one before it is complete."""
    worker = this_worker()
    events.emit(events.WorkerStart(worker=worker, kind="threads", slots=count))
    try:
        at_once = 1 if in_turn else count + 1
        with ThreadPoolTaskRunner(max_workers=at_once) as runner:
            yield _Threads(runner, count, at_once)
    finally:
        events.emit(events.WorkerEnd(worker=worker, kind="threads"))


class _Threads:
    def __init__(self, runner: TaskRunner[Any], count: int, at_once: int) -> None:
        self._runner = runner
        self._count, self._at_once = count, at_once

    def average_workers(self) -> float:
        return self._count

    def run_all(self, items: Sequence[T], work: FanOut[T, R]) -> list[R]:
        results: dict[int, R] = {}
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        under_way: dict[int, Submitted[R]] = {}
        waiting = iter(range(len(items)))
        while len(results) < len(items):
            while len(under_way) < self._at_once and (place := next(waiting, None)) is not None:
                submitted = work.submit(self._runner, items[place])
                under_way[place] = submitted
                submitted.when_done(lambda place=place: finished.put(place))
            place = finished.get()
            results[place] = under_way.pop(place).result()
            work.on_result(items[place], results[place])
        return [results[place] for place in range(len(items))]
