"""What people say of answers: a reward of the rollout that the answer is recorded as, in the form of `emit_reward`.

The last one counts, as it does where rewards are read; earlier ones stay. One that says what the last one said is the
same one, sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from pydantic import ConfigDict, Field

from rollout_core.agents.attributes import flat
from rollout_core.agents.emitters import emit_reward, find_reward_spans, get_reward_value
from rollout_core.base.errors import ConfigError, NotFound, Recoverable, RetryHint
from rollout_core.config.base import Settings, parse_config
from rollout_core.serving.recording import SERVED_KIND, STOP_SECONDS, Recording, RecordSettings, rollout_of
from rollout_core.serving.requests import read_object
from rollout_core.store import AttemptedRollout, Span, SqlLightningStore
from rollout_core.store.semconv import AGL_ANNOTATION

FEEDBACK = "/v1/feedback"
"""Path to which it is posted."""
THUMBS = {"up": 1.0, "down": 0.0}
"""What they are as rewards."""
WAIT_SECONDS = 30.0
"""Longest wait until feedback is stored, the answer's record included."""
MAX_TEXT = 10_000
"""Characters of a comment."""
_FOR, _THUMBS = "feedback_for", "thumbs"
"""Keys of a request's metadata."""
_MOST_BEHIND = 1_000
"""Thumbs on their way; what comes then is dropped."""
_TEXT = "rollout.feedback.text"
"""Attribute of the reward's span."""

logger = logging.getLogger(__name__)


class Feedback(Settings):
    """The body of a request to `FEEDBACK`."""

    model_config = ConfigDict(strict=True)

    id: str = Field(min_length=1, max_length=500)
    """Of the answer, as the client got it."""
    reward: float
    text: str | None = Field(default=None, max_length=MAX_TEXT)
    """A comment."""


def read_feedback(data: bytes) -> Feedback:
    """The feedback that a body has. Raises ConfigError for one that has none."""
    body = read_object(data, '{"id": ANSWER, "reward": 1.0}')
    return parse_config(body, Feedback, name="feedback")


def thumbs_of(body: dict[str, Any]) -> Feedback | None:
    """The feedback on an earlier answer that the metadata of a request has. Raises ConfigError for one that cannot be
    meant."""
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or metadata.keys().isdisjoint((_FOR, _THUMBS)):
        return None
    answer_id, thumbs = metadata.get(_FOR), metadata.get(_THUMBS)
    if not isinstance(answer_id, str) or not isinstance(thumbs, str) or thumbs not in THUMBS:
        raise ConfigError(
            f"metadata has {_FOR} = {answer_id!r:.100} and {_THUMBS} = {thumbs!r:.100}; expected the id of an earlier "
            'answer, and "up" or "down"'
        )
    return parse_config({"id": answer_id, "reward": THUMBS[thumbs]}, Feedback, name="metadata")


@dataclass
class _Turn:
    """Feedback on one answer is stored one after the other."""

    lock: asyncio.Lock
    num_users: int = 0


class FeedbackDesk:
    """Stores feedback on what a server has recorded. To be used on one event loop."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self._store = recording, recording.store
        self._turns: dict[str, _Turn] = {}
        self._behind: set[asyncio.Task[None]] = set()
        self.registry = CollectorRegistry()
        """Its figures for Prometheus."""
        kept: dict[str, Any] = {"registry": self.registry}
        self._kept = Counter("rollout_serve_feedback", "Feedback that was stored.", **kept)
        self._lost = Counter("rollout_serve_feedback_lost", "Thumbs in metadata that could not be stored.", **kept)

    async def keep(self, feedback: Feedback) -> dict[str, Any]:
        """Store this, and say where. Raises NotFound where the answer is not recorded, Recoverable where the store is
        away; then the same may be sent again."""
        rollout_id = rollout_of(feedback.id)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self.recording.until_stored(feedback.id)
                with self._turn(rollout_id) as lock:
                    async with lock:
                        is_new = await self._add(rollout_id, feedback)
        except TimeoutError:
            raise Recoverable(
                f"the feedback could not be stored within {WAIT_SECONDS:g} s: the answer is not at its end, or the "
                "store is away; send it again later",
                RetryHint(delay_seconds=10),
            ) from None
        self._kept.inc(is_new)
        return {"id": feedback.id, "rollout_id": rollout_id, "reward": feedback.reward, "stored": True}

    def keep_behind(self, feedback: Feedback) -> None:
        """Store this while the request that had it is answered. What goes wrong is counted and logged."""
        if len(self._behind) >= _MOST_BEHIND:
            self._lost.inc()
            return
        task = asyncio.create_task(self._keep_quietly(feedback))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    def figures(self) -> bytes:
        """Of feedback and records, for Prometheus."""
        return generate_latest(self.recording.registry) + generate_latest(self.registry)

    async def stop(self) -> None:
        """Store what is on its way, for a while, and end."""
        if self._behind:
            _, late = await asyncio.wait(self._behind, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
        await self.recording.stop()

    async def _keep_quietly(self, feedback: Feedback) -> None:
        try:
            await self.keep(feedback)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and its request is answered all the same
            self._lost.inc()
            logger.warning("Thumbs on answer %.100r are not stored (%s)", feedback.id, type(error).__name__)

    @contextmanager
    def _turn(self, rollout_id: str) -> Iterator[asyncio.Lock]:
        turn = self._turns.setdefault(rollout_id, _Turn(asyncio.Lock()))
        turn.num_users += 1
        try:
            yield turn.lock
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[rollout_id]

    async def _add(self, rollout_id: str, feedback: Feedback) -> bool:
        """Whether it was new."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        is_served = rollout is not None and (rollout.metadata or {}).get("kind") == SERVED_KIND
        if not is_served or not isinstance(rollout, AttemptedRollout):
            raise NotFound(
                f"no answer with the id {feedback.id!r:.100} is recorded: either there was none, or it is not of the "
                "share of requests that `rollout serve --record` records, or its record was lost"
            )
        attempt_id = rollout.attempt.attempt_id
        said = find_reward_spans(await self._store.query_spans(rollout_id, attempt_id, name=AGL_ANNOTATION))
        if said and (get_reward_value(said[-1]), said[-1].attributes.get(_TEXT)) == (feedback.reward, feedback.text):
            return False
        attributes = flat({} if feedback.text is None else {_TEXT: feedback.text})
        number = await self._store.get_next_span_sequence_id(rollout_id, attempt_id)
        span = emit_reward(feedback.reward, attributes=attributes, propagate=False)
        await self._store.add_span(
            Span.from_core_fields(span, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number)
        )
        return True


@asynccontextmanager
async def feedback_desk(settings: RecordSettings | None) -> AsyncIterator[FeedbackDesk | None]:
    """What records answers by these settings and takes feedback on them, until the end of the block; None where nothing
    is recorded."""
    if settings is None:
        yield None
        return
    async with SqlLightningStore.from_url(settings.database) as store:
        desk = FeedbackDesk(Recording(store, settings.share))
        try:
            yield desk
        finally:
            await desk.stop()
