"""The per-sample ledger: which samples are done, whose turn it is for the others, and commits that cannot be lost.

A sample is a rollout of the store (``rollout_id`` = sample id). Its completion is a row of a blob in object storage,
named by a span of the attempt that made it. A completion counts once three things happened in this order: the blob is
on disk, the span is committed, and the attempt's fenced update to ``succeeded`` went through. A worker whose attempt
was superseded in the meantime is refused there, so exactly one attempt of a sample wins. A sample that fails for good
is kept in the same way under the status ``failed``; one that failed for a passing reason is free for the next run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import orjson

from rollout_core.base.errors import Conflict, CorruptObject, Fatal, MissingObject
from rollout_core.base.ids import ContentId, named_ids
from rollout_core.base.processes import ProcessName
from rollout_core.base.trusted import trusted
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Failure, Outcome, Sample, encode_completion, encode_failure
from rollout_core.inference.backend import problem_with
from rollout_core.objects import ObjectStore
from rollout_core.store import (
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    LightningStore,
    Rollout,
    Span,
)
from rollout_core.store.encoded_spans import EncodedSpan, encode_plain, span_ids
from rollout_core.store.sql.by_url import is_postgres
from rollout_core.store.sql.sql_store import SqlLightningStore
from rollout_core.store.sql.sqlite import parse_url
from rollout_core.store.types import UNSET, RolloutMode

SAMPLE_KIND = "sample"
"""In the metadata of rollouts that are samples."""
COMPLETION_SPAN = "rollout.completion"
FAILURE_SPAN = "rollout.failure"
REASON_ATTRIBUTE = "rollout.failure.reason"
BLOB_ATTRIBUTE = "rollout.completion.blob"
GENERATOR_ATTRIBUTE = "rollout.completion.generator"
ROW_ATTRIBUTE = "rollout.completion.row"
CHUNK = 5_000
LOOKED_UP_AT_ONCE = 64

_held: set[str] = set()
"""Attempts that this process works on. Others of its own, which a failed release left behind, are nobody's."""


@dataclass
class ShardStatus:
    """Where each of the samples stands."""

    done: dict[ContentId, bytes] = field(default_factory=dict)
    """Line of every sample that is completed, or failed for good."""
    failed: set[ContentId] = field(default_factory=set)
    """Those of ``done`` that failed."""
    free: list[ContentId] = field(default_factory=list)
    """Samples anyone may claim."""
    busy: list[ContentId] = field(default_factory=list)
    """Samples whose attempt belongs to a worker that still seems alive."""
    ended: dict[ContentId, float] = field(default_factory=dict)
    """When those of ``done`` were, in seconds since the epoch."""
    attempts: dict[ContentId, int] = field(default_factory=dict)
    """Attempts so far of every sample that is known."""


class Answer(NamedTuple):
    """The outcome of an attempt."""

    attempt: Attempt
    line: bytes
    """One row of a completions blob."""
    failure: str | None = None
    """Why there is no completion."""
    passing: bool = False
    """The failure is not for good."""

    @classmethod
    def of(cls, attempt: Attempt, outcome: Outcome, params: SamplingParams) -> Answer:
        """What is kept of an outcome. A completion that cannot be kept fails its own sample, and not the run."""
        if not isinstance(outcome, Failure):
            is_scored = outcome.greedy is not None  # of tokens that were given, by no parameters
            problem = None if is_scored else problem_with(outcome.token_ids, outcome.logprobs, params)
            try:
                if problem is not None:
                    raise Fatal(f"the backend's completion cannot be kept: {problem}")
                return cls(attempt, encode_completion(outcome))
            except Fatal as error:
                outcome = Failure(outcome.key, str(error))
        return cls(attempt, encode_failure(outcome), outcome.reason, outcome.passing)


class SampleLedger:
    """Samples of one batch over the store and the object store.

    A sample's id says what is to be generated, not with which software and device; ``generator`` does. Only
    completions of the same generator count as done, others are generated anew.
    """

    def __init__(
        self,
        store: LightningStore,
        objects: ObjectStore,
        *,
        worker_id: str,
        stale_after_seconds: float,
        generator: str = "",
        limit: int | None = None,
    ) -> None:
        self._store = store
        self._objects = objects
        self._worker_id = worker_id
        self._stale_after_seconds = stale_after_seconds
        self._generator = generator
        self._not_ours: set[tuple[ContentId, int]] = set()
        """Samples and numbers of their latest attempts, where none of the earlier ones is this generator's."""
        # Who fails depends on the longest sequence too: a sample that was too long for another limit is tried again.
        self._failing_generator = f"{generator}/{limit}"

    async def enqueue(self, samples: Sequence[Sample], *, mode: RolloutMode, source: ContentId) -> list[Rollout]:
        """Make every sample a rollout, and return them all; those already known stay as they are.

        ``source`` is the blob that the samples come from.
        """
        rollouts: list[Rollout] = []
        for start in range(0, len(samples), CHUNK):
            requests = _requests(samples[start : start + CHUNK], mode, source)
            rollouts += await self._store.enqueue_many_rollouts(requests)
        return rollouts

    async def begin(
        self,
        samples: Sequence[Sample],
        claimed: dict[ContentId, Attempt],
        *,
        mode: RolloutMode,
        source: ContentId,
    ) -> None:
        """Add to ``claimed`` the first attempts of samples, stored as rollouts where they are unknown. Those that
        another worker was quicker with are left out.

        To be preferred to ``enqueue`` and ``claim`` where nobody else would take them meanwhile. If this fails,
        ``claimed`` holds what was claimed before.
        """
        for start in range(0, len(samples), CHUNK):
            requests = _requests(samples[start : start + CHUNK], mode, source)
            started = await self._store.start_first_attempts(requests, worker_id=self._worker_id)
            self._hold(claimed, filter(None, started))

    def _hold(self, claimed: dict[ContentId, Attempt], attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            claimed[cast(ContentId, attempt.rollout_id)] = attempt
            _held.add(attempt.attempt_id)

    async def shard_status(
        self, sample_ids: Sequence[ContentId], *, exclusive: bool, unknown_are_free: bool = False
    ) -> ShardStatus:
        """Look every sample up. With ``exclusive`` no one else works on them, so unfinished ones are free at once; with
        ``unknown_are_free`` those are, too, that are no rollouts yet."""
        rollouts: list[Rollout] = []
        for start in range(0, len(sample_ids), CHUNK):
            rollouts += await self._store.query_rollouts(rollout_id_in=sample_ids[start : start + CHUNK])
        standing = await self.shard_status_of(rollouts, exclusive=exclusive)
        if unknown_are_free:
            standing.free += [sample for sample in sample_ids if sample not in standing.attempts]
        return standing

    async def shard_status_of(self, rollouts: Iterable[Rollout], *, exclusive: bool) -> ShardStatus:
        """Where samples stand whose rollouts were just looked at."""
        standing = ShardStatus()
        known = {cast(ContentId, rollout.rollout_id): rollout for rollout in rollouts}
        standing.attempts = {
            sample: rollout.attempt.sequence_id if isinstance(rollout, AttemptedRollout) else 0
            for sample, rollout in known.items()
        }
        finished = {sample: rollout for sample, rollout in known.items() if rollout.status in ("succeeded", "failed")}
        standing.done = await self._lines(finished)
        standing.failed = {sample for sample in standing.done if finished[sample].status == "failed"}
        standing.ended = {sample: finished[sample].end_time or 0.0 for sample in standing.done}
        # What this generator has completed stays done while another one works on the sample, and after that.
        hidden = [
            sample
            for sample, number in standing.attempts.items()
            if number > 1 and sample not in standing.done and (sample, number) not in self._not_ours
        ]
        earlier = await self._earlier_lines(hidden)
        self._not_ours.update((sample, standing.attempts[sample]) for sample in hidden if sample not in earlier)
        for sample, (line, ended) in earlier.items():
            standing.done[sample], standing.ended[sample] = line, ended
        underway: list[AttemptedRollout] = []
        for sample, rollout in known.items():
            if sample in standing.done:
                continue
            if rollout.status in ("preparing", "running") and isinstance(rollout, AttemptedRollout) and not exclusive:
                underway.append(rollout)
            else:
                # Also one that is finished: its completion is another generator's or cannot be read any more, or it
                # failed for a passing reason.
                standing.free.append(sample)
        signs = await self._signs_of_life(rollout.attempt for rollout in underway)
        stale_before = time.time() - self._stale_after_seconds
        for rollout in underway:
            alive = max(rollout.attempt.start_time, signs.get(rollout.attempt.worker_id, 0.0)) >= stale_before
            alive = alive and not is_gone(rollout.attempt.worker_id) and not self._is_left_behind(rollout.attempt)
            (standing.busy if alive else standing.free).append(ContentId(rollout.rollout_id))
        return standing

    def _is_left_behind(self, attempt: Attempt) -> bool:
        return attempt.worker_id == self._worker_id and attempt.attempt_id not in _held

    async def _signs_of_life(self, attempts: Iterable[Attempt]) -> dict[str | None, float]:
        """When the workers of these attempts last said that they live."""
        signs: dict[str | None, float] = {}
        for worker_id in {attempt.worker_id for attempt in attempts if attempt.worker_id is not None}:
            worker = await self._store.get_worker_by_id(worker_id)
            if worker is not None and worker.last_heartbeat_time is not None:
                signs[worker_id] = worker.last_heartbeat_time
        return signs

    async def heartbeat(self) -> None:
        """Say that this worker lives: what it has claimed stays busy."""
        await self._store.update_worker(self._worker_id)

    async def _lines(self, finished: Mapping[ContentId, Rollout]) -> dict[ContentId, bytes]:
        """The line of each finished sample that has one; of a failed sample, its last attempt's."""
        lines: dict[ContentId, bytes] = {}
        blobs = _Blobs(self._objects)
        sample_ids = list(finished)
        for start in range(0, len(sample_ids), CHUNK):
            spans = await self._store.query_many_spans(sample_ids[start : start + CHUNK], name=COMPLETION_SPAN)
            for span in spans:
                sample = cast(ContentId, span.rollout_id)
                rollout = finished[sample]
                if rollout.status == "failed":
                    counts = self._is_our_failure(span) and _made_by_last(span, rollout)
                else:
                    counts = self._is_ours(span)
                if counts and (line := await blobs.line(span)) is not None:
                    lines[sample] = line
        return lines

    async def _earlier_lines(self, sample_ids: Sequence[ContentId]) -> dict[ContentId, tuple[bytes, float]]:
        """The line of each sample that this generator completed in any attempt, and when that ended."""
        lines: dict[ContentId, tuple[bytes, float]] = {}
        blobs = _Blobs(self._objects)

        async def look_up(sample: ContentId) -> None:
            spans = await self._store.query_spans(sample, name=COMPLETION_SPAN)
            ours = [span for span in spans if self._is_ours(span)]
            if not ours:
                return
            attempts = await self._store.query_attempts(sample)
            ends = {item.attempt_id: item.end_time or 0.0 for item in attempts if item.status == "succeeded"}
            for span in ours:
                if span.attempt_id in ends and (line := await blobs.line(span)) is not None:
                    lines[sample] = line, ends[span.attempt_id]

        for start in range(0, len(sample_ids), LOOKED_UP_AT_ONCE):
            await asyncio.gather(*map(look_up, sample_ids[start : start + LOOKED_UP_AT_ONCE]))
        return lines

    def _is_ours(self, span: Span) -> bool:
        return span.attributes.get(GENERATOR_ATTRIBUTE) == self._generator

    def _is_our_failure(self, span: Span) -> bool:
        return span.attributes.get(GENERATOR_ATTRIBUTE) == self._failing_generator

    async def claim(
        self, sample_ids: Sequence[ContentId], standing: ShardStatus, claimed: dict[ContentId, Attempt]
    ) -> None:
        """Add to ``claimed`` a new attempt of each sample for this worker, superseding older ones.

        ``standing`` is where they stood when they were looked at, and all were known. A sample that another worker
        finished since then keeps its completion and is left out. If this fails, ``claimed`` holds what was claimed
        before.
        """
        for start in range(0, len(sample_ids), CHUNK):
            chunk = sample_ids[start : start + CHUNK]
            started = await self._store.start_many_attempts(chunk, worker_id=self._worker_id)
            attempts = [rollout.attempt for rollout in started]
            self._hold(claimed, attempts)
            for attempt in attempts:
                sample = cast(ContentId, attempt.rollout_id)
                seen = standing.attempts[sample]
                if attempt.sequence_id > seen + 1 and await self._restore(attempt, seen):
                    self.let_go([claimed.pop(sample)])

    async def _restore(self, attempt: Attempt, seen: int) -> bool:
        """Finish ``attempt`` with the completion of an attempt after number ``seen``, if one succeeded."""
        attempts = await self._store.query_attempts(attempt.rollout_id)
        finished = {item.attempt_id for item in attempts if item.sequence_id > seen and item.status == "succeeded"}
        spans = await self._store.query_spans(attempt.rollout_id, name=COMPLETION_SPAN)
        places = [
            (str(span.attributes[BLOB_ATTRIBUTE]), span.attributes[ROW_ATTRIBUTE])
            for span in spans
            if span.attempt_id in finished and self._is_ours(span)
        ]
        if places:
            await self._record([Answer(attempt, b"")], [places[-1]])
        return bool(places)

    async def commit(self, answers: Sequence[Answer]) -> list[float | None]:
        """Make outcomes durable and end their attempts. Gives the time of each attempt's end, in seconds since the
        epoch; None where another attempt took the sample over."""
        blob = await asyncio.to_thread(self._objects.put_bytes, b"".join(answer.line for answer in answers))
        return await self._record(answers, [(blob, row) for row in range(len(answers))])

    async def _record(self, answers: Sequence[Answer], places: Sequence[tuple[str, Any]]) -> list[float | None]:
        """Name the blob and row of each outcome in a span, and end its attempt."""
        ends = [
            (self._span(ids, answer, blob, row), _status_update(answer.attempt, answer.failure))
            for answer, (blob, row), ids in zip(answers, places, span_ids(len(answers)), strict=True)
        ]
        outcomes = await self._store.end_attempts(ends)
        return [None if isinstance(outcome, Conflict) else outcome.end_time or time.time() for outcome in outcomes]

    def _span(self, ids: tuple[str, str], answer: Answer, blob: str, row: Any) -> EncodedSpan:
        attributes = {BLOB_ATTRIBUTE: blob, ROW_ATTRIBUTE: row}
        if answer.failure is None:
            attributes[GENERATOR_ATTRIBUTE] = self._generator
        else:
            attributes |= {GENERATOR_ATTRIBUTE: self._failing_generator, REASON_ATTRIBUTE: answer.failure}
        return encode_plain(
            ids,
            rollout_id=answer.attempt.rollout_id,
            attempt_id=answer.attempt.attempt_id,
            name=FAILURE_SPAN if answer.passing else COMPLETION_SPAN,
            attributes=orjson.dumps(attributes).decode(),
        )

    def let_go(self, attempts: Iterable[Attempt]) -> None:
        """Nothing of this process works on these attempts any more, whether or not the store knows."""
        _held.difference_update([attempt.attempt_id for attempt in attempts])

    async def release(self, attempts: Iterable[Attempt]) -> None:
        """Give claimed, unfinished samples back after a failure, so that others need not wait for them to go stale."""
        updates = [_status_update(attempt, "unfinished") for attempt in attempts]
        for start in range(0, len(updates), CHUNK):
            await self._store.update_many_attempts(updates[start : start + CHUNK], fenced=True)


class _Blobs:
    """Blobs of lines, each read once."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lines: dict[str, asyncio.Task[list[bytes]]] = {}

    async def line(self, span: Span) -> bytes | None:
        """The line that a span names; None where its blob cannot be read any more."""
        blob, row = str(span.attributes[BLOB_ATTRIBUTE]), int(span.attributes[ROW_ATTRIBUTE])  # pyright: ignore[reportArgumentType]
        if blob not in self._lines:
            self._lines[blob] = asyncio.create_task(asyncio.to_thread(self._read, blob))
        lines = await self._lines[blob]
        return lines[row] if row < len(lines) else None

    def _read(self, blob: str) -> list[bytes]:
        try:
            return self._objects.get_bytes(ContentId(blob)).splitlines(keepends=True)
        except (CorruptObject, MissingObject):
            return []


_NAMED = {"rollout_id", "attempt_id", "status"}


def _status_update(attempt: Attempt, failure: str | None) -> AttemptUpdate:
    fields = {
        "rollout_id": attempt.rollout_id,
        "attempt_id": attempt.attempt_id,
        "status": "succeeded" if failure is None else "failed",
        "worker_id": UNSET,
        "last_heartbeat_time": UNSET,
        "metadata": UNSET,
    }
    return trusted(AttemptUpdate, fields, _NAMED)


def _requests(samples: Sequence[Sample], mode: RolloutMode, source: ContentId) -> list[EnqueueRolloutRequest]:
    metadata = {"samples": source, "kind": SAMPLE_KIND}
    return [
        trusted(
            EnqueueRolloutRequest,
            {
                "input": {
                    "prompt": sample.prompt,
                    "index": sample.index,
                    **({"continuation": sample.continuation} if sample.continuation else {}),
                },
                "mode": mode,
                "resources_id": None,
                "config": None,
                "metadata": metadata,
                "rollout_id": sample.id,
            },
        )
        for sample in samples
    ]


def _made_by_last(span: Span, rollout: Rollout) -> bool:
    return isinstance(rollout, AttemptedRollout) and span.attempt_id == rollout.attempt.attempt_id


def this_worker() -> str:
    """Name of this process among all workers of a store."""
    return f"{socket.gethostname()}:{ProcessName.of_this_process()}"


def is_gone(worker_id: str | None) -> bool:
    """Whether a worker was a process of this machine that has ended; False where that cannot be known."""
    # A machine's own name may hold colons (an IPv6 address, say).
    process = ProcessName.parse(":".join((worker_id or "").split(":")[-3:]))
    return process is not None and process.has_ended()


async def named_by_database(url: str, *, completion_days: float) -> frozenset[ContentId]:
    """Ids in the latest resources, and in the completions of samples that have not ended or ended within these days.

    None where there is no database yet. Raises what opening the store raises.
    """
    if not is_postgres(url) and not os.path.exists(parse_url(url)):
        return frozenset()
    store = SqlLightningStore.from_url(url)
    try:
        latest = await store.get_latest_resources()
        served = "" if latest is None else latest.model_dump_json()
        since = time.time() - completion_days * 86400.0
        completions = await store.ids_in_spans((COMPLETION_SPAN, FAILURE_SPAN), since=since)
        return frozenset(completions.union(named_ids([served.encode()])))
    finally:
        await store.close()
