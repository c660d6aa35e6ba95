"""One operation on collections: it loads what it needs, is decided in memory, and saves all that has changed at once.

Until it saves, nothing has happened; so an operation that raises before has changed nothing. Records are copied where
they enter and leave the store, so that nothing a caller does to its objects reaches it: what comes in is taken through
JSON, which checks and copies it at once and leaves exactly what a database would keep; what goes out is copied field
by field. That is done for each record of each call, so it skips the copying of pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.trusted import SET_FIELDS_SET, trusted
from rollout_core.store import lifecycle
from rollout_core.store.changes import Entry, resources_entry
from rollout_core.store.checks import refuse_missing, sequence_id_after
from rollout_core.store.codec import decode, encode, json_copy
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.memory.collection import LightningCollections
from rollout_core.store.operations import (
    Loaded,
    NewRollout,
    Work,
    cancel,
    change_worker,
    copy_attempt,
    unknown_rollouts,
)
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.stored_spans import span_model
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
)

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")


def with_fields(model: type[Model], source: BaseModel, fields: dict[str, Any]) -> Model:
    """A ``model`` with these fields, which are not checked, and the further fields of ``source``.

    Both share the set of fields that were set, which only grows.
    """
    extra = source.__pydantic_extra__
    further = json_copy(extra) if extra else extra if extra is None else {}
    return trusted(model, fields, source.__pydantic_fields_set__, further)


def changed(record: Model, **changes: Any) -> Model:
    """A copy of a record with other values of some fields."""
    return with_fields(type(record), record, {**record.__dict__, **changes})


def shown_rollout(rollout: Rollout, attempt: Attempt | None) -> Rollout:
    """A rollout as callers get it: an AttemptedRollout exactly if ``attempt`` is given."""
    fields = rollout.__dict__.copy()
    fields["input"] = json_copy(rollout.input)
    fields["metadata"] = json_copy(rollout.metadata)
    fields["config"] = changed(rollout.config, retry_condition=list(rollout.config.retry_condition))
    if attempt is None:
        return with_fields(Rollout, rollout, fields)
    fields["attempt"] = copy_attempt(attempt)
    shown = with_fields(AttemptedRollout, rollout, fields)
    SET_FIELDS_SET(shown, {*rollout.__pydantic_fields_set__, "attempt"})
    return shown


def shown_attempted(loaded: Loaded[Rollout]) -> AttemptedRollout:
    """A rollout that has an attempt, as callers get it."""
    shown = shown_rollout(loaded.record, loaded.latest)
    assert isinstance(shown, AttemptedRollout)
    return shown


def shown_page(page: PaginatedResult[Item], shown: Callable[[Item], Item]) -> PaginatedResult[Item]:
    """A page as callers get it, its items by ``shown``."""
    page.items = [shown(item) for item in page.items]
    return page


def shown_worker(worker: Worker) -> Worker:
    """A worker as callers get it."""
    return changed(worker, heartbeat_stats=json_copy(worker.heartbeat_stats))


def kept_config(config: RolloutConfig | None) -> RolloutConfig:
    """A config as the store keeps it."""
    if config is None:
        return _DEFAULT_CONFIG
    return changed(config, retry_condition=list(config.retry_condition))


_DEFAULT_CONFIG = RolloutConfig()


def kept_json(value: Any, what: str) -> Any:
    """A JSON value as the store keeps it. Raises ConfigError, which names it by ``what``, if it is no JSON."""
    return decode(encode(value, what))


class CollectionWork(Work[Rollout]):
    """A ``Work`` on copies of what collections hold."""

    def __init__(self, collections: LightningCollections, now: float) -> None:
        super().__init__(now)
        self.collections = collections
        self._were_queued: set[str] = set()
        self.new_spans: list[Span] = []
        self._last_numbers: dict[str, int] = {}
        self.requeued: list[str] = []
        """Rollouts that wait again, and go to the head of the queue, in this order."""
        self.changed_resources: list[str] = []
        self.num_queued = 0
        """Rollouts that wait now and did not before, once they are saved."""

    # Loading

    async def load(self, rollout_ids: Iterable[str], asked: Iterable[tuple[str, str]] = ()) -> list[Loaded[Rollout]]:
        """These rollouts, each once, with their latest attempts, the older ones under way, and those that are asked for
        by rollout and id. Raises NotFound if a rollout is unknown.
        """
        wanted = list(dict.fromkeys(rollout_ids))
        found = {rollout.rollout_id: rollout for rollout in await self.collections.rollouts.items_of(wanted)}
        refuse_missing(wanted, found)
        if not wanted:
            return []
        attempts = await self.collections.attempts.items_of(wanted)
        latest = latest_of(attempts)
        for rollout_id in wanted:
            attempt = latest.get(rollout_id)
            rollout = changed(found[rollout_id])
            self.rollouts[rollout_id] = (
                Loaded(rollout) if attempt is None else Loaded(rollout, attempt.sequence_id, changed(attempt))
            )
            if rollout.status in lifecycle.QUEUED:
                self._were_queued.add(rollout_id)
        if len(attempts) > len(latest):
            named = set(asked)
            for attempt in attempts:
                if attempt is not latest[attempt.rollout_id] and (
                    attempt.status in lifecycle.WATCHED or (attempt.rollout_id, attempt.attempt_id) in named
                ):
                    self.rollouts[attempt.rollout_id].older[attempt.attempt_id] = changed(attempt)
        return [self.rollouts[rollout_id] for rollout_id in wanted]

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Cancel those that have not finished; all of them as they are then."""
        await self.load(rollout_ids)
        cancel(self)
        found = [self.rollouts[rollout_id] for rollout_id in rollout_ids]
        return [shown_rollout(loaded.record, loaded.latest) for loaded in found]

    async def enqueue(self, requests: Sequence[NewRollout], status: RolloutStatus) -> list[Loaded[Rollout]]:
        """A rollout for each request, in order: the one that is known by its id, or a new one in ``status``.

        Raises Conflict if a known id comes with another input.
        """
        given = [request.rollout_id for request in requests if request.given_id]
        if given:
            await self.load([rollout.rollout_id for rollout in await self.collections.rollouts.items_of(given)])
        inputs = {rollout_id: encode(loaded.record.input, "input") for rollout_id, loaded in self.rollouts.items()}
        latest = None
        if any(request.resources_id is None for request in requests):
            latest = await self.latest_resources()
        for request in unknown_rollouts(requests, inputs):
            fields: dict[str, Any] = {
                "rollout_id": request.rollout_id,
                "input": decode(request.input_json),
                "start_time": self.now,
                "end_time": None,
                "mode": request.mode,
                "resources_id": request.resources_id or (latest.resources_id if latest else None),
                "status": status,
                "config": kept_config(request.config),
                "metadata": decode(request.metadata_json),
            }
            self.rollouts[request.rollout_id] = Loaded(trusted(Rollout, fields))
            self.note(self.rollouts[request.rollout_id])
            self.before[request.rollout_id] = None
        return [self.rollouts[request.rollout_id] for request in requests]

    async def dequeue(self, limit: int) -> list[Loaded[Rollout]]:
        """Up to ``limit`` rollouts that wait, taken from the head of the queue."""
        waiting: list[Loaded[Rollout]] = []
        while len(waiting) < limit:
            rollout_ids = await self.collections.rollout_queue.dequeue(limit - len(waiting))
            if not rollout_ids:
                break
            waiting += [loaded for loaded in await self.load(rollout_ids) if loaded.record.status in lifecycle.QUEUED]
        return waiting

    async def latest_resources(self) -> ResourcesUpdate | None:
        """The snapshot that was added or updated last."""
        if not await self.collections.resources.size():
            return None
        return await self.collections.resources.get(sort={"name": "update_time", "order": "desc"})

    # Spans

    async def numbered(self, encoded: Sequence[EncodedSpan]) -> list[Span]:
        """Spans as they are kept; those without a number get the next ones of their rollouts, which are loaded."""
        unnumbered = [span for span in encoded if span.sequence_id is None]
        for span in unnumbered:  # before a number is taken; raises if there is no such attempt
            self.rollouts[span.rollout_id].attempt(span.attempt_id)
        numbers = iter(await number_spans(self.collections, [span.rollout_id for span in unnumbered]))
        numbered = [
            span if span.sequence_id is not None else span._replace(sequence_id=next(numbers)) for span in encoded
        ]
        return [span_model(span[0], span[1:]) for span in numbered]

    async def store_spans(self, spans: Sequence[Span]) -> list[bool]:
        """Have spans saved, given as they are to be kept; for each, whether it is new."""
        wanted: dict[tuple[str, str], list[str]] = {}
        for span in spans:
            wanted.setdefault((span.rollout_id, span.attempt_id), []).append(span.span_id)
        stored: set[tuple[str, str, str]] = set()
        for (rollout_id, attempt_id), span_ids in wanted.items():
            self.rollouts[rollout_id].attempt(attempt_id)  # raises if there is none
            found = await self.collections.spans.query(
                {
                    "rollout_id": {"exact": rollout_id},
                    "attempt_id": {"exact": attempt_id},
                    "span_id": {"within": span_ids},
                }
            )
            stored.update((rollout_id, attempt_id, span.span_id) for span in found.items)
        is_new: list[bool] = []
        last = self._last_numbers
        for span in spans:
            key = (span.rollout_id, span.attempt_id, span.span_id)
            is_new.append(key not in stored)
            stored.add(key)
            if span.sequence_id > last.get(span.rollout_id, 0):
                last[span.rollout_id] = span.sequence_id
        self.new_spans += [span for span, fresh in zip(spans, is_new, strict=True) if fresh]
        return is_new

    # Resources and workers

    async def put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        """Replace the snapshot of this id, or create it; it is the latest now."""
        latest = await self.latest_resources()
        now = self.now
        if latest is not None and latest.update_time >= now:
            # What counts as the latest is known by the time alone, so no two changes may share one.
            now = math.nextafter(latest.update_time, math.inf)
        old = await self.collections.resources.get({"resources_id": {"exact": resources_id}})
        fields = {"resources_id": resources_id, "update_time": now, "resources": resources}
        if old is None:
            new = ResourcesUpdate(create_time=now, version=1, **fields)
        else:
            new = ResourcesUpdate(create_time=old.create_time, version=old.version + 1, **fields)
        await self.collections.resources.upsert([new])
        self.changed_resources.append(resources_id)
        return new

    async def put_heartbeat(self, worker_id: str, stats: dict[str, Any] | None) -> Worker:
        """Stamp a worker's heartbeat, with new statistics if given; the worker is created if it is new."""
        worker = await self._worker(worker_id)
        worker.last_heartbeat_time = self.now
        if stats is not None:
            worker.heartbeat_stats = stats
        await self.collections.workers.upsert([worker])
        return worker

    async def _worker(self, worker_id: str) -> Worker:
        """A worker, to be changed; a new one if it is unknown."""
        found = await self.collections.workers.items_of([worker_id])
        return (
            changed(found[0])
            if found
            else Worker(**{**dict.fromkeys(Worker.model_fields), "worker_id": worker_id, "status": "unknown"})
        )

    def entries(self) -> list[Entry]:
        entries = super().entries()
        entries += map(resources_entry, self.changed_resources)
        return entries

    # Saving

    async def save(self, on_change: Callable[[Loaded[Rollout]], Awaitable[None]]) -> None:
        """Write back what was changed, spans included, and bring the queue into line. ``on_change`` hears of each
        rollout that was changed."""
        await self._save_spans()
        states = list(self.changed.values())
        if states:
            await self.collections.rollouts.upsert([loaded.record for loaded in states])
            await self._requeue(states)
        if self.withdrawn:
            await self.collections.attempts.delete(self.withdrawn)
        if self.new_attempts:
            await self.collections.attempts.insert(self.new_attempts)
        if self.changed_attempts:
            await self.collections.attempts.update(list(self.changed_attempts.values()))
        workers = [await self._worker(worker_id) for worker_id in self.workers]
        for worker, change in zip(workers, self.workers.values(), strict=True):
            change_worker(worker, change, self.now)
        if workers:
            await self.collections.workers.upsert(workers)
        for loaded in states:
            await on_change(loaded)

    async def _save_spans(self) -> None:
        if self.new_spans:
            await self.collections.spans.insert(self.new_spans)
        counters = self.collections.span_sequence_ids
        for rollout_id, number in self._last_numbers.items():
            if number > (await counters.get(rollout_id) or 0):
                await counters.set(rollout_id, number)

    async def _requeue(self, states: Sequence[Loaded[Rollout]]) -> None:
        leaving: list[str] = []
        joining: list[str] = []
        for loaded in states:
            rollout_id = loaded.record.rollout_id
            waited = rollout_id in self._were_queued
            if waited and loaded.left_queue:
                leaving.append(rollout_id)
            if loaded.record.status in lifecycle.QUEUED and (loaded.left_queue or not waited):
                joining.append(rollout_id)
        queue = self.collections.rollout_queue
        if leaving:
            await queue.remove(leaving)
        if self.requeued:
            joining = [rollout_id for rollout_id in joining if rollout_id not in self.requeued]
            await queue.put_back(self.requeued)
        self.num_queued = len(joining) + len(self.requeued)
        if joining:
            await queue.enqueue(joining)


async def number_spans(collections: LightningCollections, rollout_ids: Sequence[str]) -> list[int]:
    """The next span sequence id for each request, in the order of requests; saved at once. One counter a rollout."""
    counters = collections.span_sequence_ids
    last = {rollout_id: await counters.get(rollout_id) or 0 for rollout_id in rollout_ids}
    unnumbered = [rollout_id for rollout_id, number in last.items() if not number]
    if unnumbered:
        found = await collections.rollouts.items_of(unnumbered)
        refuse_missing(unnumbered, {rollout.rollout_id for rollout in found})
    numbers: list[int] = []
    for rollout_id in rollout_ids:
        last[rollout_id] = sequence_id_after(last[rollout_id], rollout_id)
        numbers.append(last[rollout_id])
    for rollout_id, number in last.items():
        await counters.set(rollout_id, number)
    return numbers


async def known_and_finished(
    collections: LightningCollections, rollout_ids: Sequence[str]
) -> tuple[set[str], dict[str, Rollout]]:
    """Which of these rollouts are known, and, by id, those that are finished; only these are copied."""
    known = await collections.rollouts.items_of(rollout_ids)
    ended = {rollout.rollout_id: rollout for rollout in known if rollout.status in lifecycle.FINISHED}
    attempts = await latest_attempts(collections, list(ended))
    shown = {name: shown_rollout(rollout, attempts.get(name)) for name, rollout in ended.items()}
    return {rollout.rollout_id for rollout in known}, shown


async def latest_attempts(collections: LightningCollections, rollout_ids: Sequence[str]) -> dict[str, Attempt]:
    """The latest attempts of those of these rollouts that have one."""
    return latest_of(await collections.attempts.items_of(rollout_ids))


def latest_of(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """For each rollout the last of its attempts that are given."""
    latest: dict[str, Attempt] = {}
    for attempt in attempts:
        other = latest.get(attempt.rollout_id)
        if other is None or attempt.sequence_id > other.sequence_id:
            latest[attempt.rollout_id] = attempt
    return latest
