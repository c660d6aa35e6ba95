"""Operations of the SQL store on its queue: enqueue, claim, start, and give back what nobody received."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from rollout_core.base.errors import Conflict
from rollout_core.base.trusted import trusted
from rollout_core.store.checks import LARGEST_NUMBER, check_request, refuse_missing, same_json
from rollout_core.store.codec import encode
from rollout_core.store.sql.dialect import NUM_ROLLOUT, Transaction
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    RolloutState,
    config_json,
    load_attempts,
    load_rollouts,
    rollout_model,
    rollout_of,
    save_rollouts,
)
from rollout_core.store.sql.superseded import end_superseded
from rollout_core.store.sql.workers import note_attempts, note_empty_dequeues, note_idle
from rollout_core.store.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutStatus

MAX_REPEATED_CLAIM = 100_000
"""Most rollouts of one claim that are looked for when it is repeated."""


class NewRollout(NamedTuple):
    """A request in the form it is stored."""

    rollout_id: str
    given_id: bool
    input_json: str
    metadata_json: str
    mode: str | None
    resources_id: str | None
    config_json: str | None


class Demand(NamedTuple):
    """What one caller would claim."""

    limit: int
    worker_id: str | None
    claim_id: str | None = None
    """With one, the attempts get ids that follow from it, by which ``find_claimed`` finds them again."""


class Taker(NamedTuple):
    """Who gets an attempt."""

    worker_id: str | None
    attempt_id: str | None = None
    """None: a fresh id."""


class Claim(NamedTuple):
    """A claimed rollout, and where it stood in the queue."""

    rollout: AttemptedRollout
    status_before: RolloutStatus
    queue_position_before: int | None


def new_rollout(request: EnqueueRolloutRequest) -> NewRollout:
    """Check and encode a request, outside of the transaction.

    Raises ConfigError for a bad id, and if its input is not JSON.
    """
    check_request(request)
    return NewRollout(
        rollout_id=request.rollout_id or f"ro-{secrets.token_hex(10)}",
        given_id=request.rollout_id is not None,
        input_json=encode(request.input, "input"),
        metadata_json=encode(request.metadata or {}, "metadata"),
        mode=request.mode,
        resources_id=request.resources_id,
        config_json=config_json(request.config),
    )


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
    found = tx.rows(
        "SELECT {rollout}, {payload} FROM rollouts r JOIN rollout_payloads p ON p.key = r.key"
        " WHERE r.queue_position IS NOT NULL ORDER BY r.queue_position LIMIT ? {lock_free}",
        min(sum(demand.limit for demand in demands), LARGEST_NUMBER),
    )
    rows = [_Stored(RolloutState(*row[:-2]), row[-2], row[-1]) for row in found]
    before: list[tuple[RolloutStatus, int | None]] = [(state.status, state.queue_position) for state, _, _ in rows]
    takers: list[Taker] = []
    counts: list[int] = []
    for demand in demands:
        counts.append(min(demand.limit, len(rows) - len(takers)))
        ids = [None] * counts[-1] if demand.claim_id is None else _attempt_ids(demand.claim_id, counts[-1])
        takers += [Taker(demand.worker_id, attempt_id) for attempt_id in ids]
    claims = (
        Claim(rollout, status, position)
        for rollout, (status, position) in zip(_begin_attempts(tx, rows, takers), before, strict=True)
    )
    shares = [list(islice(claims, count)) for count in counts]
    note_attempts(tx, [share[-1].rollout.attempt for share in shares if share], dequeued=True)
    note_empty_dequeues(
        tx, [demand.worker_id for demand, share in zip(demands, shares, strict=True) if demand.worker_id and not share]
    )
    return shares


def find_claimed(tx: Transaction, claim_id: str, limit: int) -> list[AttemptedRollout]:
    """What an earlier ``claim`` of this id and limit claimed, as far as it is still in preparing, in that order.

    Reads every rollout in preparing: few, and only callers that lost an answer ask.
    """
    attempt_ids = _attempt_ids(claim_id, min(limit, MAX_REPEATED_CLAIM))
    found = tx.rows(
        ROLLOUTS_WITH_ATTEMPT + " WHERE r.status = 'preparing' AND a.attempt_id {in_texts}", tx.texts(attempt_ids)
    )
    rollouts = [rollout for row in found if isinstance(rollout := rollout_model(row), AttemptedRollout)]
    places = {attempt_id: place for place, attempt_id in enumerate(attempt_ids)}
    return sorted(rollouts, key=lambda rollout: places[rollout.attempt.attempt_id])


def release(tx: Transaction, claimed: Sequence[AttemptedRollout]) -> None:
    """Take back committed claims that nobody took up; their rollouts go to the head of the queue, in this order."""
    states = load_rollouts(tx, [rollout.rollout_id for rollout in claimed])
    latest = load_attempts(tx, states.values())
    head = tx.number("SELECT COALESCE(MIN(queue_position), 1) FROM rollouts WHERE queue_position IS NOT NULL")
    claims: list[Claim] = []
    for rollout in reversed(claimed):
        state = states[rollout.rollout_id]
        if latest.get((state.key, state.attempt_count)) == rollout.attempt:
            head -= 1
            claims.append(Claim(rollout, "queuing" if state.attempt_count == 1 else "requeuing", head))
    unclaim(tx, [claims])


def unclaim(tx: Transaction, shares: Sequence[Sequence[Claim]]) -> None:
    """Undo claims that their callers never received, as if they had not been made.

    A claim that somebody has touched since (a newer attempt, a status set by hand) is left alone, and an older attempt
    that it has ended stays ended.
    """
    claims = [claim for share in shares for claim in share]
    states = load_rollouts(tx, [claim.rollout.rollout_id for claim in claims])
    undone: list[tuple[RolloutState, Claim]] = []
    for claim in claims:
        state = states[claim.rollout.rollout_id]
        if state.attempt_count == claim.rollout.attempt.sequence_id and state.status == "preparing":
            state.status = claim.status_before
            state.queue_position = claim.queue_position_before
            state.attempt_count -= 1
            state.due_time = None
            undone.append((state, claim))
    tx.counted["attempts"] -= len(undone)
    for state, claim in undone:
        number = claim.rollout.attempt.sequence_id
        tx.run("DELETE FROM attempts WHERE rollout_key = ? AND sequence_id = ?", state.key, number)
    save_rollouts(tx, [state for state, _ in undone])
    note_idle(tx, [claim.rollout.attempt for _, claim in undone])


def start(tx: Transaction, rollout_ids: Sequence[str], worker_id: str | None) -> list[AttemptedRollout]:
    """Start a new attempt of each of these rollouts, whatever their status and number of attempts."""
    rows = _lock(tx, rollout_ids)
    refuse_missing(rollout_ids, rows)
    ordered = [rows[rollout_id] for rollout_id in dict.fromkeys(rollout_ids)]
    rollouts = _begin_attempts(tx, ordered, [Taker(worker_id)] * len(ordered))
    if worker_id is not None:
        note_attempts(tx, [rollout.attempt for rollout in rollouts[-1:]])
    started = {rollout.rollout_id: rollout for rollout in rollouts}
    return [started[rollout_id] for rollout_id in rollout_ids]


def start_new(tx: Transaction, starts: Sequence[tuple[NewRollout, str | None]]) -> list[AttemptedRollout | None]:
    """Start the first attempt of each rollout for its worker; None for one that has had an attempt, be it of this call.

    Those that are unknown are stored, and never were in the queue. Raises as ``enqueue``.
    """
    takers = {request.rollout_id: Taker(worker_id) for request, worker_id in reversed(starts)}
    known, fresh = _sort_out(tx, [request for request, _ in starts])
    states = _new_states(tx, fresh, "preparing")
    attempts = _new_attempts(tx, states, [takers[state.rollout_id] for state in states])
    _write_new(tx, states, fresh)
    rollouts = [
        _attempted(state, request.input_json, request.metadata_json, attempt)
        for state, request, attempt in zip(states, fresh, attempts, strict=True)
    ]
    waiting = [rollout_id for rollout_id, it in known.items() if not isinstance(it.rollout, AttemptedRollout)]
    if waiting:
        # Read once more under their locks: another process may have started some since they were looked at.
        rows = [row for row in _lock(tx, waiting).values() if not row.state.attempt_count]
        rollouts += _begin_attempts(tx, rows, [takers[row.state.rollout_id] for row in rows])
    # Each is given away once: callers that share this transaction may ask for the same one.
    started = {rollout.rollout_id: rollout for rollout in rollouts}
    given = [started.pop(request.rollout_id, None) for request, _ in starts]
    attempts = [rollout.attempt for rollout in given if rollout is not None]
    note_attempts(tx, [attempt for attempt in attempts if attempt.worker_id is not None])
    return given


class _Stored(NamedTuple):
    """A rollout to be changed, and its payload."""

    state: RolloutState
    input_json: str
    metadata_json: str | None


def _lock(tx: Transaction, rollout_ids: Sequence[str]) -> dict[str, _Stored]:
    """Those of these rollouts that are known, as nobody else changes them until the transaction ends."""
    found = tx.rows(
        "SELECT {rollout}, {payload} FROM rollouts r JOIN rollout_payloads p ON p.key = r.key"
        " WHERE r.rollout_id {in_texts} {lock}",
        tx.texts(rollout_ids),
    )
    return {row[1]: _Stored(RolloutState(*row[:-2]), row[-2], row[-1]) for row in found}


class _Known(NamedTuple):
    rollout: Rollout
    input_json: str


def _find_known(tx: Transaction, rollout_ids: list[str]) -> dict[str, _Known]:
    if not rollout_ids:
        return {}
    found = tx.rows(ROLLOUTS_WITH_ATTEMPT + " WHERE r.rollout_id {in_texts}", tx.texts(rollout_ids))
    return {row[1]: _Known(rollout_model(row), row[NUM_ROLLOUT]) for row in found}


def _sort_out(tx: Transaction, requests: Sequence[NewRollout]) -> tuple[dict[str, _Known], list[NewRollout]]:
    """Rollouts that are known, and the first request of each other one. Raises Conflict for an id with two inputs."""
    known = _find_known(tx, [request.rollout_id for request in requests if request.given_id])
    fresh: dict[str, NewRollout] = {}
    for request in requests:
        if request.rollout_id in known:
            stored_json = known[request.rollout_id].input_json
        else:
            stored_json = fresh.setdefault(request.rollout_id, request).input_json
        if not same_json(request.input_json, stored_json):
            raise Conflict(
                f"rollout {request.rollout_id} exists with another input; one id stands for one input, use a new id"
            )
    return known, list(fresh.values())


def _new_states(tx: Transaction, requests: Sequence[NewRollout], status: RolloutStatus) -> list[RolloutState]:
    """New rollouts, not yet written; queued ones at the tail."""
    if not requests:
        return []
    keys = tx.next_numbers("rollout", len(requests))
    positions = tx.next_numbers("queue", len(requests)) if status == "queuing" else [None] * len(requests)
    latest_resources = tx.row("SELECT resources_id FROM resources ORDER BY change_number DESC LIMIT 1")
    tx.counted[status] += len(requests)
    return [
        RolloutState(
            key=key,
            rollout_id=request.rollout_id,
            status=status,
            mode=request.mode,
            resources_id=request.resources_id or (latest_resources[0] if latest_resources else None),
            start_time=tx.now,
            end_time=None,
            config_json=request.config_json,
            attempt_count=0,
            last_sequence_id=0,
            queue_position=position,
            due_time=None,
        )
        for request, key, position in zip(requests, keys, positions, strict=True)
    ]


def _write_new(tx: Transaction, states: Sequence[RolloutState], requests: Sequence[NewRollout]) -> None:
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


def _begin_attempts(tx: Transaction, rows: Sequence[_Stored], takers: Sequence[Taker]) -> list[AttemptedRollout]:
    """Give each rollout its next attempt, in preparing, and write it back."""
    states = [row.state for row in rows]
    attempts = _new_attempts(tx, states, takers)
    save_rollouts(tx, states)
    end_superseded(tx, states)
    return [_attempted(*row, attempt) for row, attempt in zip(rows, attempts, strict=True)]


def _new_attempts(tx: Transaction, states: Sequence[RolloutState], takers: Sequence[Taker]) -> list[Attempt]:
    """Write the next attempt of each rollout, in preparing; the rollouts are changed, and not written."""
    attempts: list[Attempt] = []
    drawn = secrets.token_hex(6 * len(states))  # at once: a draw is a call of the system
    for place, (state, taker) in enumerate(zip(states, takers, strict=True)):
        state.attempt_count += 1
        fields = {
            "rollout_id": state.rollout_id,
            "attempt_id": taker.attempt_id or f"at-{drawn[12 * place : 12 * place + 12]}",
            "sequence_id": state.attempt_count,
            "start_time": tx.now,
            "end_time": None,
            "status": "preparing",
            "worker_id": taker.worker_id,
            "last_heartbeat_time": None,
            "metadata": None,
        }
        attempt = trusted(Attempt, fields)
        state.set_status("preparing", tx)
        state.watch(attempt)
        attempts.append(attempt)
    tx.counted["attempts"] += len(attempts)
    tx.insert(
        "attempts",
        "rollout_key, sequence_id, attempt_id, status, start_time, worker_id",
        [
            (state.key, attempt.sequence_id, attempt.attempt_id, attempt.status, attempt.start_time, attempt.worker_id)
            for state, attempt in zip(states, attempts, strict=True)
        ],
    )
    return attempts


def _attempted(state: RolloutState, input_json: str, metadata_json: str | None, attempt: Attempt) -> AttemptedRollout:
    rollout = rollout_of(state, input_json, metadata_json, attempt)
    assert isinstance(rollout, AttemptedRollout)
    return rollout
