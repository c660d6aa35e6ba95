"""Many calls of stages over the workers there are, each result taken as it comes: `local_fleet` has threads of this
process, `tasks.runtime.dask.fleet` the workers of a cluster."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from rollout_core.inference.batch import Progress
from rollout_core.inference.ledger import this_worker
from rollout_core.objects.records import Record
from tasks.runtime import events
from tasks.runtime.placement import RunsTasks, Submitted

R = TypeVar("R", bound=Record)
T = TypeVar("T")


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
def local_fleet(count: int) -> Iterator[Fleet]:
    """Threads of this process, one more than workers: while their shards are generated, the next is made ready."""
    worker = this_worker()
    events.emit(events.WorkerStart(worker=worker, kind="threads", slots=count))
    try:
        with ThreadPoolTaskRunner(max_workers=count + 1) as runner:
            yield _Threads(runner, count)
    finally:
        events.emit(events.WorkerEnd(worker=worker, kind="threads"))


class _Threads:
    def __init__(self, runner: TaskRunner[Any], count: int) -> None:
        self._runner = runner
        self._count = count

    def average_workers(self) -> float:
        return self._count

    def run_all(self, items: Sequence[T], work: FanOut[T, R]) -> list[R]:
        results: dict[int, R] = {}
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        under_way: dict[int, Submitted[R]] = {}
        waiting = iter(range(len(items)))
        while len(results) < len(items):
            while len(under_way) <= self._count and (place := next(waiting, None)) is not None:
                submitted = work.submit(self._runner, items[place])
                under_way[place] = submitted
                submitted.when_done(lambda place=place: finished.put(place))
            place = finished.get()
            results[place] = under_way.pop(place).result()
            work.on_result(items[place], results[place])
        return [results[place] for place in range(len(items))]
