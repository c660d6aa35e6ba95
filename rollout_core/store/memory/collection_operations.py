"""What the calls of a store over collections do, one function each; decisions are those of ``lifecycle``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_core.base.errors import Conflict, NotFound
from rollout_core.store import lifecycle
from rollout_core.store.checks import check_request, same_json, sequence_id_after
from rollout_core.store.codec import decode, encode
from rollout_core.store.copies import kept_config, kept_json, shown_attempt, shown_rollout
from rollout_core.store.memory.collection_work import RolloutState, Work
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Unset,
)

# The queue


class NewRollout(NamedTuple):
    """A request, checked and copied."""

    rollout_id: str | None
    input_json: str
    mode: RolloutMode | None
    resources_id: str | None
    config: RolloutConfig
    metadata: dict[str, Any]


def new_rollout(request: EnqueueRolloutRequest) -> NewRollout:
    """Check a request before anything is done. Raises ConfigError for a bad id, and if its input is not JSON."""
    check_request(request)
    return NewRollout(
        rollout_id=request.rollout_id,
        input_json=encode(request.input, "input"),
        mode=request.mode,
        resources_id=request.resources_id,
        config=kept_config(request.config),
        metadata=kept_json(request.metadata or {}, "metadata"),
    )


async def enqueue(work: Work, requests: Sequence[NewRollout], status: RolloutStatus = "queuing") -> list[RolloutState]:
    """Store rollouts, in order; one whose given id is known already stays as it is.

    Raises Conflict, and stores none, if a known id comes with another input.
    """
    states = await _load_known(work, [request.rollout_id for request in requests if request.rollout_id is not None])
    inputs = {rollout_id: encode(state.rollout.input, "input") for rollout_id, state in states.items()}
    latest = None
    if any(request.resources_id is None for request in requests):
        latest = await latest_resources(work)
    stored: list[RolloutState] = []
    for request in requests:
        rollout_id = request.rollout_id or f"ro-{secrets.token_hex(10)}"
        if not same_json(request.input_json, inputs.setdefault(rollout_id, request.input_json)):
            raise Conflict(f"rollout {rollout_id} exists with another input; one id stands for one input, use a new id")
        if rollout_id not in states:
            rollout = Rollout(
                rollout_id=rollout_id,
                input=decode(request.input_json),
                start_time=work.now,
                mode=request.mode,
                resources_id=request.resources_id or (latest.resources_id if latest else None),
                status=status,
                config=request.config,
                metadata=request.metadata,
            )
            states[rollout_id] = RolloutState(rollout, None)
            work.touch(states[rollout_id])
        stored.append(states[rollout_id])
    return stored


async def _load_known(work: Work, rollout_ids: Sequence[str]) -> dict[str, RolloutState]:
    if not rollout_ids:
        return {}
    found = await work.collections.rollouts.query({"rollout_id": {"within": rollout_ids}})
    return await work.load([rollout.rollout_id for rollout in found.items])


async def claim(work: Work, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
    """Start an attempt of up to ``limit`` queued rollouts, first in, first out."""
    states: list[RolloutState] = []
    while len(states) < limit:
        rollout_ids = await work.collections.rollout_queue.dequeue(limit - len(states))
        if not rollout_ids:
            break
        loaded = await work.load(rollout_ids)
        states += [state for state in loaded.values() if state.rollout.status in lifecycle.QUEUED]
    claimed = [begin_attempt(work, state, worker_id) for state in states]
    if worker_id is not None:
        worker = await work.worker(worker_id)
        worker.last_dequeue_time = work.now
        if claimed:
            work.note_worker(states[-1].latest)
        else:
            if worker.status != "idle":
                worker.last_idle_time = work.now
            worker.status, worker.current_rollout_id, worker.current_attempt_id = "idle", None, None
    return claimed


def begin_attempt(work: Work, state: RolloutState, worker_id: str | None) -> AttemptedRollout:
    """Give a rollout its next attempt, in preparing."""
    attempt = Attempt(
        rollout_id=state.rollout.rollout_id,
        attempt_id=f"at-{secrets.token_hex(6)}",
        sequence_id=state.attempt_count + 1,
        start_time=work.now,
        worker_id=worker_id,
    )
    work.begin_attempt(state, attempt)
    rollout = shown_rollout(state.rollout, attempt)
    assert isinstance(rollout, AttemptedRollout)
    return rollout


async def start_new(work: Work, requests: Sequence[NewRollout], worker_id: str | None) -> list[AttemptedRollout | None]:
    """Start the first attempt of each rollout; None for one that has had an attempt, be it of this call.

    Those that are unknown are stored, and never were in the queue.
    """
    started: dict[str, AttemptedRollout] = {}
    states = await enqueue(work, requests, "preparing")
    for state in states:
        if not state.attempt_count:
            started[state.rollout.rollout_id] = begin_attempt(work, state, worker_id)
            work.note_worker(state.latest)
    return [started.pop(state.rollout.rollout_id, None) for state in states]


async def start(work: Work, rollout_ids: Sequence[str], worker_id: str | None) -> list[AttemptedRollout]:
    """Start a new attempt of each of these rollouts, whatever their status."""
    states = await work.load(rollout_ids)
    started = {rollout_id: begin_attempt(work, state, worker_id) for rollout_id, state in states.items()}
    for state in states.values():
        work.note_worker(state.latest)
    return [started[rollout_id] for rollout_id in rollout_ids]


# Updates


async def update_attempts(work: Work, updates: Sequence[AttemptUpdate], fenced: bool) -> list[Attempt | Conflict]:
    """Apply updates in order. A refused one yields a Conflict in its place; the others are applied all the same."""
    states = await work.load([update.rollout_id for update in updates])
    results: list[Attempt | Conflict] = []
    for update in updates:
        state = states[update.rollout_id]
        newest = state.latest
        if newest is None:
            raise NotFound(f"rollout {update.rollout_id} has no attempts yet; dequeue or start it first")
        attempt = newest if update.attempt_id == "latest" else await work.attempt(state, update.attempt_id)
        if fenced:
            if attempt is newest and attempt.status in lifecycle.ENDED and attempt.status == update.status:
                results.append(shown_attempt(attempt))  # the caller repeats what it could not know had arrived
                continue
            reason = lifecycle.fence(attempt.attempt_id, newest.attempt_id, attempt.status, state.rollout.status)
            if reason is not None:
                results.append(Conflict(f"rollout {update.rollout_id}: {reason}; nothing was changed"))
                continue
        _apply(work, update, state, attempt)
        shown = shown_attempt(attempt)  # as it is now: a later update of the batch may change it further
        if not (isinstance(update.status, Unset) and isinstance(update.worker_id, Unset)):
            work.note_worker(shown)
        results.append(shown)
    return results


def _apply(work: Work, update: AttemptUpdate, state: RolloutState, attempt: Attempt) -> None:
    if not isinstance(update.worker_id, Unset):
        attempt.worker_id = update.worker_id
    if not isinstance(update.last_heartbeat_time, Unset):
        attempt.last_heartbeat_time = update.last_heartbeat_time
    if not isinstance(update.metadata, Unset):
        attempt.metadata = kept_json(update.metadata, f"metadata of attempt {update.attempt_id}")
    if not isinstance(update.status, Unset):
        work.set_attempt_status(state, attempt, update.status)
    work.touch_attempt(attempt)
    if attempt is state.latest:
        work.touch(state)


async def update_rollout(work: Work, rollout_id: str, changes: Mapping[str, Any]) -> Rollout:
    """Set the given fields of a rollout; a status is taken as it is, with end time and queue in line with it."""
    [state] = (await work.load([rollout_id])).values()
    for name, value in changes.items():
        if name == "config":
            state.rollout.config = kept_config(value)
        elif name != "status":
            setattr(state.rollout, name, value)
    if "status" in changes:
        work.set_status(state, changes["status"])
    if changes:
        work.touch(state)
    return shown_rollout(state.rollout, state.latest)


async def mark_lost(work: Work, rollout_ids: Sequence[str]) -> list[RolloutState]:
    """The watchdog: mark the latest attempts of these rollouts that are overdue."""
    states = list((await work.load(rollout_ids)).values())
    for state in states:
        rollout, attempt = state.rollout, state.latest
        work.touch(state)  # also those that heartbeats have saved: their next alarm is later
        if not is_watched(rollout, attempt) or attempt is None:
            continue
        status = lifecycle.lost_status(rollout.config, attempt.start_time, attempt.last_heartbeat_time, work.now)
        if status is not None:
            work.set_attempt_status(state, attempt, status)
            work.note_worker(attempt)
    return states


def is_watched(rollout: Rollout, attempt: Attempt | None) -> bool:
    """Whether the watchdog may declare the rollout's latest attempt lost."""
    return attempt is not None and rollout.status in lifecycle.RUNNING and attempt.status in lifecycle.WATCHED


# Spans


async def number_spans(work: Work, rollout_ids: Sequence[str]) -> list[int]:
    """The next span sequence id for each request, in the order of requests. One counter a rollout."""
    counters = work.collections.span_sequence_ids
    last = {rollout_id: await counters.get(rollout_id) or 0 for rollout_id in rollout_ids}
    unnumbered = [rollout_id for rollout_id, number in last.items() if not number]
    if unnumbered:
        await work.require(unnumbered)
    numbers: list[int] = []
    for rollout_id in rollout_ids:
        last[rollout_id] = sequence_id_after(last[rollout_id], rollout_id)
        numbers.append(last[rollout_id])
    for rollout_id, number in last.items():
        await counters.set(rollout_id, number)
    return numbers


async def add_spans(work: Work, spans: Sequence[Span]) -> list[bool]:
    """Store spans, given as they are to be kept; for each, whether it was new.

    Raises NotFound, and stores none, if a rollout or attempt is unknown.
    """
    states = await work.load([span.rollout_id for span in spans])
    wanted: dict[tuple[str, str], list[str]] = {}
    for span in spans:
        wanted.setdefault((span.rollout_id, span.attempt_id), []).append(span.span_id)
    attempts = {key: await work.attempt(states[key[0]], key[1]) for key in wanted}
    stored: set[tuple[str, str, str]] = set()
    for (rollout_id, attempt_id), span_ids in wanted.items():
        found = await work.collections.spans.query(
            {
                "rollout_id": {"exact": rollout_id},
                "attempt_id": {"exact": attempt_id},
                "span_id": {"within": span_ids},
            }
        )
        stored.update((rollout_id, attempt_id, span.span_id) for span in found.items)
    is_new: list[bool] = []
    last: dict[str, int] = {}
    for span in spans:
        key = (span.rollout_id, span.attempt_id, span.span_id)
        is_new.append(key not in stored)
        stored.add(key)
        if span.sequence_id > last.get(span.rollout_id, 0):
            last[span.rollout_id] = span.sequence_id

    new = [span for span, fresh in zip(spans, is_new, strict=True) if fresh]
    await work.collections.spans.insert(new)
    counters = work.collections.span_sequence_ids
    for rollout_id, number in last.items():
        if number > (await counters.get(rollout_id) or 0):
            await counters.set(rollout_id, number)
    for rollout_id, attempt_id in dict.fromkeys((span.rollout_id, span.attempt_id) for span in new):
        _note_heartbeat(work, states[rollout_id], attempts[rollout_id, attempt_id])
    return is_new


def _note_heartbeat(work: Work, state: RolloutState, attempt: Attempt) -> None:
    attempt.last_heartbeat_time = work.now
    work.touch_attempt(attempt)
    is_latest = attempt is state.latest
    status = lifecycle.attempt_after_span(attempt.status, state.rollout.status, is_latest=is_latest)
    if status != attempt.status:
        attempt.status = status
        if attempt is state.latest:
            work.touch(state)
    if attempt is state.latest:
        rollout_status = lifecycle.ROLLOUT_AFTER_SPAN.get(state.rollout.status, state.rollout.status)
        if rollout_status != state.rollout.status:
            work.set_status(state, rollout_status)


# Resources


async def latest_resources(work: Work) -> ResourcesUpdate | None:
    """The snapshot that was added or updated last."""
    return await work.collections.resources.get(sort={"name": "update_time", "order": "desc"})


async def put_resources(work: Work, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
    """Replace the snapshot of this id, or create it; it is the latest now."""
    latest = await latest_resources(work)
    now = work.now
    if latest is not None and latest.update_time >= now:
        # What counts as the latest is told by the time alone, so no two changes may share one.
        now = math.nextafter(latest.update_time, math.inf)
    old = await work.collections.resources.get({"resources_id": {"exact": resources_id}})
    fields = {"resources_id": resources_id, "update_time": now, "resources": resources}
    if old is None:
        new = ResourcesUpdate(create_time=now, version=1, **fields)
    else:
        new = ResourcesUpdate(create_time=old.create_time, version=old.version + 1, **fields)
    await work.collections.resources.upsert([new])
    return new
