"""One operation on collections: it loads what it needs, is decided in memory, and saves all that has changed at once.

Until it saves, nothing has happened; so an operation that raises before has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.checks import refuse_missing, sequence_id_after
from rollout_core.store.codec import decode, encode
from rollout_core.store.memory.collection import LightningCollections
from rollout_core.store.memory.copies import changed, kept_config
from rollout_core.store.operations import Loaded, NewRollout, Work, change_worker, unknown_rollouts
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import Attempt, Rollout, RolloutStatus, Worker


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
