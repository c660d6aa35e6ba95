"""Samples of later iterations, drawn by a thread of its own while this one trains.

Which weights draw the samples of which iteration follows from the settings alone, never from what was faster, so a run
that is killed and tried again asks for the same samples and comes to the same bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from rollout_core.base.errors import RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import Interruption, in_thread, run_interruptibly
from tasks.stage import stop_signal

T = TypeVar("T")


class SamplesAhead(Generic[T]):
    """What ``draw`` makes of each of ``iterations`` and a model: of iteration i the one that iteration
    i - 1 - ``depth`` ended with, of the first ones ``start``. With a ``depth`` of 0 it draws when it is asked.
    """

    def __init__(self, draw: Callable[[int, ContentId], T], iterations: range, *, depth: int, start: ContentId) -> None:
        self._draw = draw
        self._iterations = iterations
        self._depth = depth
        self._start = start
        self._models: dict[int, ContentId] = {}
        """Of iterations whose samples are drawn when they are asked for."""
        self._drawn: dict[int, Future[T]] = {}
        self._asked: queue.SimpleQueue[_Asked[T] | None] = queue.SimpleQueue()
        self._drawing = Interruption()
        self._has_ended: Future[None] | None = None
        """Of the thread that draws ahead."""

    def __enter__(self) -> SamplesAhead[T]:
        if self._depth:
            self._has_ended = in_thread(partial(run_interruptibly, self._work, stop_signal, self._drawing))
        for number in self._iterations[: self._depth + 1]:
            self._ask(number, self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._has_ended is None:
            return
        for drawn in self._drawn.values():
            drawn.cancel()
        if kind is not None:
            self._drawing.request(RolloutError("the run that these samples were for has ended"))
        self._asked.put(None)
        wait([self._has_ended])

    def learned(self, number: int, model: ContentId) -> None:
        """Iteration ``number`` has ended with ``model``, which draws the samples of a later one from now on."""
        later = number + 1 + self._depth
        if later in self._iterations:
            self._ask(later, model)

    def take(self, number: int) -> T:
        """The samples of iteration ``number``; waits for them. Raises what drawing them raised."""
        if not self._depth:
            return self._draw(number, self._models.pop(number))
        return run_interruptibly(self._drawn.pop(number).result, stop_signal)

    def _ask(self, number: int, model: ContentId) -> None:
        if not self._depth:
            self._models[number] = model
            return
        asked = _Asked[T](number, model)
        self._drawn[number] = asked.drawn
        self._asked.put(asked)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            if not asked.drawn.set_running_or_notify_cancel():
                continue
            try:
                asked.drawn.set_result(self._draw(asked.number, asked.model))
            except BaseException as error:  # noqa: BLE001 - raised where the samples are taken
                asked.drawn.set_exception(error)


@dataclass(frozen=True)
class _Asked(Generic[T]):
    number: int
    model: ContentId
    drawn: Future[T] = field(default_factory=Future)
