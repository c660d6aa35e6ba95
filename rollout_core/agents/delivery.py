"""The way of spans from a running agent to the store: collected at once, from any thread; stored behind its back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rollout_core.base.errors import ConfigError, Recoverable, in_words
from rollout_core.store import LightningStore, Span, TraceStatus
from rollout_core.store.semconv import AGL_EXCEPTION

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY = (Recoverable, ConnectionError, TimeoutError)
"""What a store that is away raises."""
BATCH_SPANS = 256
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class SpanDelivery:
    """Spans of one attempt, on their way to the store.

    ``add`` only appends. A task on the event loop that made this object stores what has come, one batch after the
    other, each as large as has come meanwhile: the first span leaves at once. A store that is away is asked again for
    ``patience_seconds``. ``close`` returns when everything is stored, and raises what is in the way of that.

    A span that a store refuses as such (ConfigError) is logged, and a span of that exception stored instead, with the
    others of its batch. ``close`` then raises the error: an attempt without a span, perhaps its reward, is no success.
    """

    def __init__(
        self, store: LightningStore, rollout_id: str, attempt_id: str, *, patience_seconds: float = 120.0
    ) -> None:
        self._store = store
        self._rollout_id, self._attempt_id = rollout_id, attempt_id
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[Span] = []
        self._closed = False
        self._work: asyncio.Task[None] | None = None
        self._refusal: ConfigError | None = None
        """Of the first span that was refused."""

    def add(self, span: Span) -> bool:
        """Take a span to be numbered and stored, from any thread; False if the attempt is over, so that it is not."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.append(span)
            is_first = len(self._waiting) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed; nothing will be stored any more
                self._loop.call_soon_threadsafe(self._begin)
        return True

    async def flush(self) -> None:
        """Wait until all that has been added so far is stored. Raises what kept it from being stored."""
        while True:
            with self._lock:
                if not self._waiting and self._work is None:
                    return
            self._begin()
            assert self._work is not None
            await asyncio.shield(self._work)

    async def close(self) -> None:
        """``flush``, and refuse what comes from now on."""
        with self._lock:
            self._closed = True
        await self.flush()
        if self._refusal is not None:
            raise self._refusal

    def _begin(self) -> None:
        if self._work is None:
            self._work = self._loop.create_task(self._store_all())
            self._work.add_done_callback(self._note_end)

    def _note_end(self, work: asyncio.Task[None]) -> None:
        error = None if work.cancelled() else work.exception()  # raised by flush, where somebody waits
        if error is not None:
            logger.error(
                "Spans of rollout %s, attempt %s, are not stored: %s",
                self._rollout_id,
                self._attempt_id,
                in_words(error),
            )

    async def _store_all(self) -> None:
        try:
            while batch := self._take():
                try:
                    await self._store_batch(batch)
                except BaseException:
                    with self._lock:
                        self._waiting = batch + self._waiting  # a repeated span is no second one, so nothing is lost
                    raise
        finally:
            self._work = None

    def _take(self) -> list[Span]:
        with self._lock:
            batch, self._waiting = self._waiting[:BATCH_SPANS], self._waiting[BATCH_SPANS:]
        return batch

    async def _store_batch(self, batch: Sequence[Span]) -> None:
        pair = (self._rollout_id, self._attempt_id)
        numbers = await self._ask(lambda: self._store.get_many_span_sequence_ids([pair] * len(batch)))
        for span, number in zip(batch, numbers, strict=True):
            span.sequence_id = number
        try:
            await self._ask(lambda: self._store.add_many_spans(batch))
        except ConfigError as error:
            if len(batch) > 1:
                for span in batch:
                    await self._store_batch([span])
            else:
                logger.error("A span of rollout %s is refused: %s", self._rollout_id, in_words(error))
                self._refusal = self._refusal or error
                note = self._note_of_refusal(batch[0], error)
                await self._ask(lambda: self._store.add_many_spans([note]))

    def _note_of_refusal(self, span: Span, error: ConfigError) -> Span:
        """What stands in place of a span that was refused."""
        attributes = {
            "exception.type": type(error).__name__,
            "exception.message": f"the store refuses the span {span.name!r:.80}: {error}",
            "exception.escaped": True,
        }
        return Span.from_attributes(
            rollout_id=self._rollout_id,
            attempt_id=self._attempt_id,
            sequence_id=span.sequence_id,
            name=AGL_EXCEPTION,
            attributes=attributes,
            status=TraceStatus(status_code="ERROR"),
        )

    def _ask(self, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        return retried(call, self._patience_seconds)


async def retried(
    call: Callable[[], Awaitable[T]],
    patience_seconds: float,
    is_over: Callable[[], bool] = lambda: False,
    name: str = "The store",
) -> T:
    """What ``call`` returns, which is repeated while the store is away, with growing pauses. Raises the last error when
    that takes longer than ``patience_seconds``, or ``is_over`` says so. Only for calls that may be made twice."""
    until = time.monotonic() + patience_seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            return await call()
        except AWAY as error:
            if is_over() or time.monotonic() + pause > until:
                raise
            # The kind alone: a message may show what was to be stored, such as a prompt.
            level = logging.WARNING if pause < _LONGEST_PAUSE else logging.DEBUG  # a few times, not for hours
            logger.log(level, "%s is away (%s); asking again in %.1f s", name, type(error).__name__, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
