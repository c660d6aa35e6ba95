"""Operations of the SQL store on its queue (enqueue, claim, start, give back what nobody received), and on workers and
snapshots of resources.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from rollout_core.store.changes import resources_entry, rollout_entry
from rollout_core.store.checks import LARGEST_NUMBER, refuse_missing
from rollout_core.store.operations import (
    Loaded,
    NewRollout,
    Taker,
    begin_attempts,
    new_attempts,
    note_empty_dequeue,
    unknown_rollouts,
    withdraw,
)
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.sql.dialect import NUM_ROLLOUT, Transaction
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    RolloutState,
    UnitOfWork,
    config_json,
    resources_model,
    rollout_model,
    rollout_of,
    worker_model,
)
from rollout_core.store.types import Attempt, AttemptedRollout, Rollout, RolloutStatus, Worker

MAX_REPEATED_CLAIM = 100_000
"""Most rollouts of one claim that are looked for when it is repeated."""


class Demand(NamedTuple):
    """What one caller would claim."""

    limit: int
    worker_id: str | None
    claim_id: str | None = None
    """With one, the attempts get ids that follow from it, by which ``find_claimed`` finds them again."""


class Claim(NamedTuple):
    """A claimed rollout, and where it stood in the queue."""

    rollout: AttemptedRollout
    status_before: RolloutStatus
    queue_position_before: int | None


class _Stored(NamedTuple):
    """A rollout to be changed, and its payload."""

    state: RolloutState
    input_json: str
    metadata_json: str | None


class Started(NamedTuple):
    """A rollout with an attempt that was just started."""

    stored: _Stored
    attempt: Attempt

    def rollout(self) -> AttemptedRollout:
        """The model, which takes longer to make than the rollout to start."""
        return _attempted(*self.stored, self.attempt)


def enqueue(tx: Transaction, requests: Sequence[NewRollout]) -> list[Rollout]:
    """Queue these rollouts at the tail, in order; a rollout whose given id is known already is returned as it is.

    Raises Conflict, and queues none, if a known id comes with another input.
    """
    known, fresh = _sort_out(tx, requests)
    rollouts = {rollout_id: stored.rollout for rollout_id, stored in known.items()}
    states = _new_states(tx, fresh, "queuing")
    _write_new(tx, states, fresh)
    for state, request in zip(states, fresh, strict=True):
        rollouts[state.rollout_id] = rollout_of(state, request.input_json, request.metadata_json)
    return [rollouts[request.rollout_id] for request in requests]


def claim(tx: Transaction, demands: Sequence[Demand]) -> list[list[Claim]]:
    """Start attempts of queued rollouts, first in, first out; for each demand its claims."""
    # What is claimed is chosen and locked by one statement: rows that another process has locked are passed over.
    found = tx.rows(
        "SELECT {rollout}, {payload} FROM rollouts r JOIN rollout_payloads p ON p.key = r.key"
        " WHERE r.queue_position IS NOT NULL ORDER BY r.queue_position LIMIT ? {lock_free}",
        min(sum(demand.limit for demand in demands), LARGEST_NUMBER),
    )
    rows = [_Stored(RolloutState(*row[:-2]), row[-2], row[-1]) for row in found]
    before: list[tuple[RolloutStatus, int | None]] = [(state.status, state.queue_position) for state, _, _ in rows]
    unit = UnitOfWork(tx)
    waiting = iter(unit.add([row.state for row in rows]))
    attempts: list[Attempt] = []
    counts: list[int] = []
    for demand in demands:
        share = list(islice(waiting, min(demand.limit, len(rows))))
        ids = [None] * len(share) if demand.claim_id is None else _attempt_ids(demand.claim_id, len(share))
        takers = [Taker(demand.worker_id, attempt_id) for attempt_id in ids]
        attempts += begin_attempts(unit, share, takers, dequeued=True)
        if demand.worker_id is not None and not share:
            note_empty_dequeue(unit, demand.worker_id)
        counts.append(len(share))
    unit.save()
    claims = (
        Claim(_attempted(*row, attempt), *place) for row, attempt, place in zip(rows, attempts, before, strict=True)
    )
    return [list(islice(claims, count)) for count in counts]


def find_claimed(tx: Transaction, claim_id: str, limit: int) -> list[AttemptedRollout]:
    """What an earlier ``claim`` of this id and limit, or its repeat, claimed, as far as it is still in preparing, in
    that order.

    Reads every rollout in preparing: few, and only callers that lost an answer ask.
    """
    count = min(limit, MAX_REPEATED_CLAIM)
    attempt_ids = _attempt_ids(claim_id, count) + _attempt_ids(repeat_of(claim_id), count)
    found = tx.rows(
        ROLLOUTS_WITH_ATTEMPT + " WHERE r.status = 'preparing' AND a.attempt_id {in_texts}", tx.texts(attempt_ids)
    )
    rollouts = [rollout for row in found if isinstance(rollout := rollout_model(row), AttemptedRollout)]
    places = {attempt_id: place for place, attempt_id in enumerate(attempt_ids)}
    return sorted(rollouts, key=lambda rollout: places[rollout.attempt.attempt_id])


def repeat_of(claim_id: str) -> str:
    """The id under which a claim is repeated that is nowhere in preparing any more: its rollouts may have been queued
    again meanwhile, and no two attempts of one shall have the same id."""
    return f"{claim_id} repeated"


def has_claimed(tx: Transaction, claim_id: str, limit: int) -> bool:
    """Whether a claim has an attempt of a rollout that waits in the queue now, and so may be claimed once more."""
    attempt_ids = _attempt_ids(claim_id, min(limit, MAX_REPEATED_CLAIM))
    found = tx.rows(
        "SELECT 1 FROM rollouts r JOIN attempts a ON a.rollout_key = r.key WHERE r.queue_position IS NOT NULL"
        " AND r.attempt_count > 0 AND a.attempt_id {in_texts} LIMIT 1",
        tx.texts(attempt_ids),
    )
    return bool(found)


def release(tx: Transaction, claimed: Sequence[AttemptedRollout]) -> None:
    """Take back committed claims that nobody took up; their rollouts go to the head of the queue, in this order."""
    unit = UnitOfWork(tx)
    unit.load([rollout.rollout_id for rollout in claimed])
    head = tx.number("SELECT COALESCE(MIN(queue_position), 1) FROM rollouts WHERE queue_position IS NOT NULL")
    released = withdraw(unit, [(rollout, None) for rollout in claimed])
    for place, loaded in enumerate(released, start=head - len(released)):
        loaded.record.queue_position = place
    tx.num_queued += len(released)
    unit.save()


def unclaim(tx: Transaction, shares: Sequence[Sequence[Claim]]) -> None:
    """Undo claims that their callers never received, as if they had not been made; see ``withdraw``."""
    claims = {claim.rollout.rollout_id: claim for share in shares for claim in share}
    unit = UnitOfWork(tx)
    unit.load(claims)
    for loaded in withdraw(unit, [(claim.rollout, claim.status_before) for claim in claims.values()]):
        loaded.record.queue_position = claims[loaded.record.rollout_id].queue_position_before
    unit.save()


def start(tx: Transaction, rollout_ids: Sequence[str], worker_id: str | None) -> list[AttemptedRollout]:
    """Start a new attempt of each of these rollouts, whatever their status and number of attempts."""
    rows = _lock(tx, rollout_ids)
    refuse_missing(rollout_ids, rows)
    ordered = [rows[rollout_id] for rollout_id in dict.fromkeys(rollout_ids)]
    unit = UnitOfWork(tx)
    attempts = begin_attempts(unit, unit.add([row.state for row in ordered]), [Taker(worker_id)] * len(ordered))
    unit.save()
    started = {row.state.rollout_id: _attempted(*row, attempt) for row, attempt in zip(ordered, attempts, strict=True)}
    return [started[rollout_id] for rollout_id in rollout_ids]


def start_new(tx: Transaction, starts: Sequence[tuple[NewRollout, str | None]]) -> list[Started | None]:
    """Start the first attempt of each rollout for its worker; None for one that has had an attempt, be it of this call.

    Those that are unknown are stored, and never were in the queue. Raises as ``enqueue``.
    """
    takers = {request.rollout_id: worker_id for request, worker_id in reversed(starts)}
    known, fresh = _sort_out(tx, [request for request, _ in starts])
    unit = UnitOfWork(tx)
    states = _new_states(tx, fresh, "preparing", attempt_count=1)
    rows = [
        _Stored(state, request.input_json, request.metadata_json) for state, request in zip(states, fresh, strict=True)
    ]
    new = {state.rollout_id: state.key for state in states}
    attempts = new_attempts(unit, [(rollout_id, 1) for rollout_id in new], [Taker(takers[name]) for name in new])
    for state, attempt in zip(states, attempts, strict=True):
        state.watch(attempt)
    waiting = [rollout_id for rollout_id, it in known.items() if not isinstance(it.rollout, AttemptedRollout)]
    if waiting:
        # Read once more under their locks: another process may have started some since they were looked at.
        locked = [row for row in _lock(tx, waiting).values() if not row.state.attempt_count]
        unit.rollouts = {row.state.rollout_id: Loaded(row.state) for row in locked}
        attempts += begin_attempts(unit, list(unit.rollouts.values()), [Taker(takers[name]) for name in unit.rollouts])
        rows += locked
    unit.save(new)
    _write_new(tx, states, fresh)
    # Each is given away once: callers that share this transaction may ask for the same one.
    started = {attempt.rollout_id: Started(row, attempt) for row, attempt in zip(rows, attempts, strict=True)}
    return [started.pop(request.rollout_id, None) for request, _ in starts]


def _lock(tx: Transaction, rollout_ids: Sequence[str]) -> dict[str, _Stored]:
    """Those of these rollouts that are known, as nobody else changes them until the transaction ends."""
    found = tx.rows_of(
        "SELECT {rollout}, {payload} FROM rollouts r JOIN rollout_payloads p ON p.key = r.key WHERE r.rollout_id",
        rollout_ids,
        "{lock}",
    )
    return {row[1]: _Stored(RolloutState(*row[:-2]), row[-2], row[-1]) for row in found}


class _Known(NamedTuple):
    rollout: Rollout
    input_json: str


def _sort_out(tx: Transaction, requests: Sequence[NewRollout]) -> tuple[dict[str, _Known], list[NewRollout]]:
    """Rollouts that are known, and the first request of each other one. Raises Conflict for an id with two inputs."""
    given = [request.rollout_id for request in requests if request.given_id]
    known: dict[str, _Known] = {}
    if given:
        found = tx.rows_of(ROLLOUTS_WITH_ATTEMPT + " WHERE r.rollout_id", given)
        known = {row[1]: _Known(rollout_model(row), row[NUM_ROLLOUT]) for row in found}
    inputs = {rollout_id: stored.input_json for rollout_id, stored in known.items()}
    return known, unknown_rollouts(requests, inputs)


def _new_states(
    tx: Transaction, requests: Sequence[NewRollout], status: RolloutStatus, *, attempt_count: int = 0
) -> list[RolloutState]:
    """New rollouts, not yet written; queued ones at the tail."""
    if not requests:
        return []
    keys = tx.next_numbers("rollout", len(requests))
    positions = tx.next_numbers("queue", len(requests)) if status == "queuing" else [None] * len(requests)
    latest_resources = tx.row("SELECT resources_id FROM resources ORDER BY change_number DESC LIMIT 1")
    tx.counted[status] += len(requests)
    tx.num_queued += len(requests) if status == "queuing" else 0
    return [
        RolloutState(
            key=key,
            rollout_id=request.rollout_id,
            status=status,
            mode=request.mode,
            resources_id=request.resources_id or (latest_resources[0] if latest_resources else None),
            start_time=tx.now,
            end_time=None,
            config_json=config_json(request.config),
            attempt_count=attempt_count,
            last_sequence_id=0,
            queue_position=position,
            due_time=None,
        )
        for request, key, position in zip(requests, keys, positions, strict=True)
    ]


def _write_new(tx: Transaction, states: Sequence[RolloutState], requests: Sequence[NewRollout]) -> None:
    new = [rollout_entry(state.rollout_id, state.status, False, state.queue_position is not None) for state in states]
    tx.changes[:0] = new  # before those of their attempts
    tx.insert(
        "rollouts",
        "key, rollout_id, status, mode, resources_id, start_time, config, attempt_count, last_sequence_id,"
        " queue_position, due_time",
        [
            (
                state.key,
                state.rollout_id,
                state.status,
                state.mode,
                state.resources_id,
                state.start_time,
                state.config_json,
                state.attempt_count,
                state.last_sequence_id,
                state.queue_position,
                state.due_time,
            )
            for state in states
        ],
    )
    tx.insert(
        "rollout_payloads",
        "key, input, metadata",
        [
            (state.key, request.input_json, request.metadata_json)
            for state, request in zip(states, requests, strict=True)
        ],
    )


def _attempt_ids(claim_id: str, count: int) -> list[str]:
    return [f"at-{blake3(f'{claim_id} {place}'.encode()).hexdigest(length=6)}" for place in range(count)]


def _attempted(state: RolloutState, input_json: str, metadata_json: str | None, attempt: Attempt) -> AttemptedRollout:
    rollout = rollout_of(state, input_json, metadata_json, attempt)
    assert isinstance(rollout, AttemptedRollout)
    return rollout


# Workers and resources


def record_heartbeat(tx: Transaction, worker_id: str, stats_json: str | None) -> Worker:
    """Stamp a worker's heartbeat, with new statistics if given; the worker is created if it is new."""
    tx.run(
        "INSERT INTO workers (worker_id, status, last_heartbeat_time, heartbeat_stats) VALUES (?, 'unknown', ?, ?)"
        " ON CONFLICT (worker_id) DO UPDATE SET last_heartbeat_time = excluded.last_heartbeat_time,"
        " heartbeat_stats = COALESCE(excluded.heartbeat_stats, workers.heartbeat_stats)",
        worker_id,
        tx.now,
        stats_json,
    )
    [row] = tx.rows("SELECT {worker} FROM workers WHERE worker_id = ?", worker_id)
    return worker_model(row)


def add_resources(tx: Transaction, resources: str) -> ResourcesUpdate:
    """Store a new snapshot under a fresh id; it is the latest now."""
    return _insert_resources(tx, f"rs-{secrets.token_hex(6)}", resources)


def update_resources(tx: Transaction, resources_id: str, resources: str) -> ResourcesUpdate:
    """Replace the snapshot of this id, or create it; it is the latest now."""
    row = tx.row("SELECT version FROM resources r WHERE resources_id = ? {lock}", resources_id)
    if row is None:
        return _insert_resources(tx, resources_id, resources)
    tx.run(
        "UPDATE resources SET resources = ?, update_time = ?, version = version + 1, change_number = ?"
        " WHERE resources_id = ?",
        resources,
        tx.now,
        tx.next_numbers("resources", 1)[0],
        resources_id,
    )
    return _changed_resources(tx, resources_id)


def _insert_resources(tx: Transaction, resources_id: str, resources: str) -> ResourcesUpdate:
    tx.run(
        "INSERT INTO resources (resources_id, create_time, update_time, version, change_number, resources)"
        " VALUES (?, ?, ?, 1, ?, ?)",
        resources_id,
        tx.now,
        tx.now,
        tx.next_numbers("resources", 1)[0],
        resources,
    )
    return _changed_resources(tx, resources_id)


def _changed_resources(tx: Transaction, resources_id: str) -> ResourcesUpdate:
    tx.changes.append(resources_entry(resources_id))
    [row] = tx.rows("SELECT {resources} FROM resources WHERE resources_id = ?", resources_id)
    return resources_model(row)
