"""Shards over workers: so many at a time, results in order, the first error ends it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from rollout_core.config import WorkersConfig
from rollout_core.records import Record
from tasks.stage import Submitted

R = TypeVar("R", bound=Record)
T = TypeVar("T")


@contextmanager
def local_runner(workers: WorkersConfig) -> Iterator[TaskRunner[Any]]:
    """Threads of this process, one more than workers: while their shards are generated, the next is made ready."""
    with ThreadPoolTaskRunner(max_workers=workers.count + 1) as runner:
        yield runner


def run_all(
    items: Sequence[T],
    submit: Callable[[T], Submitted[R]],
    *,
    at_once: int,
    on_result: Callable[[T, R], None],
) -> list[R]:
    """Results of all items, in their order, at most ``at_once`` of them under way.

    ``on_result`` is told of each as it comes; what it raises, or an item does, ends the loop.
    """
    results: dict[int, R] = {}
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()
    under_way: dict[int, Submitted[R]] = {}
    waiting = iter(range(len(items)))
    while len(results) < len(items):
        while len(under_way) < at_once and (place := next(waiting, None)) is not None:
            submitted = submit(items[place])
            under_way[place] = submitted
            submitted.when_done(lambda place=place: finished.put(place))
        place = finished.get()
        results[place] = under_way.pop(place).result()
        on_result(items[place], results[place])
    return [results[place] for place in range(len(items))]
