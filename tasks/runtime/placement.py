"""Where stages run: the seam between a stage that is called and a worker that runs it.

A flow calls its stages and knows nothing of this. Around it `placing` says, by the place that a stage names, what takes
the call instead of this process; `tasks/runtime/dask/placed_stages.py` does so by a run's ``[placement]`` table. On a
worker `sharing` says that others help with the stage, so what it takes for itself has to be kept where they see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture

from rollout_core.base.ids import ContentId
from rollout_core.config import WorkersConfig
from rollout_core.config.inference import StagePlace
from rollout_core.objects.records import Record

R = TypeVar("R", bound=Record)

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


StartHelp = Callable[[RunsTasks, dict[str, Any], ContentId], Submitted[Any]]
"""Starts, on a worker, help with a call of a stage that has these arguments and this key."""
