"""Answers of a served model as rollouts in the store: a share of the requests, each with the span that the LLM proxy
would have written of it.

A client gets its answer whatever the store does. What is recorded waits here, behind the answers, and is stored in
batches; a store that is away is asked again, and what does not fit in meanwhile is counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollout_core.agents.delivery import retried
from rollout_core.agents.proxy.recording import CHAT, COMPLETIONS, Call
from rollout_core.agents.proxy.upstreams import Upstream
from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.base.ids import ContentId
from rollout_core.store import AttemptedRollout, EnqueueRolloutRequest, LightningStore, Span
from rollout_core.store.types import AttemptUpdate, RolloutConfig

SERVED_KIND = "served"
"""What the metadata of these rollouts have as their ``kind``."""
MAX_WAITING_BYTES = 64 << 20
"""Of answers that wait for the store, with their requests; what comes then is dropped."""
BATCH = 64
"""Most answers that are stored at once."""
STOP_SECONDS = 10.0
"""How long a server that stops waits for the store."""
_LOG_SECONDS = 60.0
"""Least time between two lines about records that are lost."""
_END_SECONDS = 3600.0
"""A rollout whose end has not been stored for so long never ends: its server was killed between two writes."""
_PATHS = {f"/v1{path}": path for path in (CHAT, COMPLETIONS)}
"""Whose answers come with token ids, and what they are called behind a base URL."""
_CHANGING = ("use_beam_search", "echo")
"""Fields with which the engine would answer otherwise, or not at all, when it is asked for log-probabilities."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordSettings:
    """Which answers are recorded, and where."""

    share: float
    """Of the requests, from 0 to 1."""
    database: str = field(repr=False)
    """Address of the store's database, with its password."""


def parse_share(text: str) -> float:
    """``0.1`` or ``10%`` as a number from 0 to 1. Raises ConfigError for what is none."""
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"--record is {text!r}; expected a share of the requests from 0 to 1, such as 0.1 or 10%")
    return share


def rollout_of(answer_id: str) -> str:
    """Id of the rollout that an answer is recorded as."""
    return f"{SERVED_KIND}-{answer_id}"


@dataclass(eq=False)
class _Record:
    """An answer on its way to the store."""

    request: EnqueueRolloutRequest
    span: Span
    """But for its attempt and number."""
    succeeded: bool
    num_bytes: int

    @property
    def rollout_id(self) -> str:
        return self.span.rollout_id or ""


class RecordedCall:
    """One request that is recorded: what the engine is asked, and what the client gets of the answer."""

    def __init__(self, recording: Recording, path: str, data: bytes, body: dict[str, Any]) -> None:
        self._recording = recording
        self._call = Call(path, data, body, is_recorded=True, hides_ids=True)
        self._body = body
        self._is_stream = False
        self._was_answered = False
        self._model_id: ContentId | None = None
        self._announced: str | None = None
        """Id of the answer, once clients may ask about it."""

    def asked_of(self, model_id: ContentId, name: str) -> bytes:
        """The body for the engine that has these weights, and calls its model by ``name``."""
        self._model_id = model_id
        return self._call.body_for(Upstream(url="http://engine/v1", model=name, model_id=model_id))

    def whole(self, status: int, data: bytes) -> bytes:
        """Take in an answer that is no stream; what the client gets."""
        if status != 200:
            return data
        self._was_answered = True
        shown = self._call.read_whole(data)
        self._announce()
        return shown

    def piece(self, events: bytes) -> bytes:
        """Take in some of a stream; what the client gets now."""
        self._is_stream = self._was_answered = True
        shown = self._call.read_piece(events)
        self._announce()
        return shown

    def last_piece(self, rest: bytes) -> bytes:
        """Take in what stands at a stream's end without being an event; what the client gets of it."""
        return self._call.read_piece(rest) + self._call.end_stream()

    def end(self) -> None:
        """The request is over, as well as it went: hand it over to be stored, if it was answered."""
        if not self._was_answered:
            return
        call = self._call
        if self._is_stream and not (call.is_done or call.is_whole or call.problem):
            call.problem = "no end: the client left, the engine died or the server stopped before the answer's end"
        answer_id = call.response_id
        if answer_id is None:
            return self._recording.lose("an answer has no id")
        rollout_id = rollout_of(answer_id)
        asked = "messages" if call.path == CHAT else "prompt"
        request = EnqueueRolloutRequest(
            input={asked: self._body.get(asked)},
            config=RolloutConfig(timeout_seconds=_END_SECONDS),
            metadata={
                "kind": SERVED_KIND,
                "answer": answer_id,
                "model": self._model_id,
                # By which a start that is made again, after its acknowledgement was lost, knows its own.
                "record": secrets.token_hex(8),
            },
            rollout_id=rollout_id,
        )
        span = call.span(rollout_id, "")
        self._recording.take(_Record(request, span, call.problem is None, call.num_bytes))

    def _announce(self) -> None:
        if self._announced is None and self._call.response_id is not None:
            self._announced = self._call.response_id
            self._recording.expect(self._announced)


class Recording:
    """What is recorded, on its way to the store. To be used on one event loop.

    Args:
        share: of the requests, from 0 to 1.
        draw: a number from 0 to 1 for each request, which is recorded where that is below the share.
    """

    def __init__(self, store: LightningStore, share: float, *, draw: Callable[[], float] | None = None) -> None:
        self.store = store
        self._share = share
        # A source of chance of its own: the global one belongs to training.
        self._draw = draw or random.Random().random
        self._waiting: list[_Record] = []
        self._waiting_bytes = 0
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._expected: dict[str, asyncio.Event] = {}
        """By rollout, of those whose answers clients know and the store does not: set when they are stored or lost."""
        self._num_unsaid = 0
        """Records that were lost since the log last said so."""
        self._said_at = -math.inf
        self.registry = CollectorRegistry()
        """Its figures for Prometheus."""
        kept: dict[str, Any] = {"registry": self.registry}
        self._stored = Counter("rollout_serve_records", "Answers that were stored as rollouts.", **kept)
        self._lost = Counter("rollout_serve_records_lost", "Answers that should be stored and were dropped.", **kept)
        queue = Gauge("rollout_serve_records_waiting", "Answers that wait for the store.", **kept)
        queue.set_function(lambda: len(self._waiting))
        self._task = asyncio.create_task(self._store_all())

    def begin(self, path: str, data: bytes, body: dict[str, Any]) -> RecordedCall | None:
        """The record of a request that begins; None if it is not to be recorded."""
        if path not in _PATHS or any(body.get(name) for name in _CHANGING) or self._draw() >= self._share:
            return None
        return RecordedCall(self, _PATHS[path], data, body)

    def expect(self, answer_id: str) -> None:
        """A client gets to know this answer, whose record is still to come."""
        self._expected.setdefault(rollout_of(answer_id), asyncio.Event())

    async def until_stored(self, answer_id: str) -> None:
        """Wait until the record of an answer, if one is under way, is stored or lost."""
        if (expected := self._expected.get(rollout_of(answer_id))) is not None:
            await expected.wait()

    def take(self, record: _Record) -> None:
        """Store this, as soon as that goes."""
        if self._waiting_bytes + record.num_bytes > MAX_WAITING_BYTES:
            self.lose("the store does not keep up, or is away")
            self._forget(record)
            return
        self._waiting.append(record)
        self._waiting_bytes += record.num_bytes
        self._news.set()
        self._idle.clear()

    def lose(self, why: str) -> None:
        """Count a record that is dropped."""
        self._lost.inc()
        self._num_unsaid += 1
        if time.monotonic() >= self._said_at + _LOG_SECONDS:
            logger.warning(
                "%d answers are not recorded: %s; rollout_serve_records_lost_total counts them", self._num_unsaid, why
            )
            self._said_at, self._num_unsaid = time.monotonic(), 0

    async def stop(self) -> None:
        """Store what waits, for a while, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._idle.wait()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for record in self._waiting:
            self.lose("the server stops, and the store has not taken them")
            self._forget(record)

    async def _store_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                batch = self._waiting[:BATCH]
                await self._store(batch)
                del self._waiting[: len(batch)]
                self._waiting_bytes -= sum(record.num_bytes for record in batch)
            self._idle.set()

    async def _store(self, batch: Sequence[_Record]) -> None:
        try:
            await retried(lambda: self._put(batch), math.inf)
        except Exception as error:  # noqa: BLE001 - whatever one record is refused for must not end the others
            if len(batch) > 1:
                for record in batch:
                    await self._store([record])
                return
            # The kind alone: a message may show what was to be stored, such as a prompt.
            self.lose(f"the store refuses them ({type(error).__name__})")
        else:
            self._stored.inc(len(batch))
        for record in batch:
            self._forget(record)

    async def _put(self, batch: Sequence[_Record]) -> None:
        """Store these; more than once is as once. Raises Conflict where another answer has the id of one."""
        started = await self.store.start_many_rollouts([record.request for record in batch])
        for record, rollout in zip(batch, started, strict=True):
            attempt = (rollout or await self._begun(record)).attempt
            record.span.attempt_id = attempt.attempt_id
        results = await self.store.end_attempts(
            [
                (
                    record.span,
                    AttemptUpdate(
                        rollout_id=record.rollout_id,
                        attempt_id=record.span.attempt_id or "",
                        status="succeeded" if record.succeeded else "failed",
                    ),
                )
                for record in batch
            ]
        )
        if refused := [result for result in results if isinstance(result, Conflict)]:
            raise refused[0]

    async def _begun(self, record: _Record) -> AttemptedRollout:
        """The rollout that an earlier try has started."""
        found = await self.store.get_rollout_by_id(record.rollout_id)
        if not isinstance(found, AttemptedRollout) or found.metadata != record.request.metadata:
            raise Conflict(f"the rollout {record.rollout_id} is there already, of another answer")
        return found

    def _forget(self, record: _Record) -> None:
        if (expected := self._expected.pop(record.rollout_id, None)) is not None:
            expected.set()
