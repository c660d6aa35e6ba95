"""Operations of the SQL store on spans: numbering and storing them, and what their arrival means for attempts."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_core.store import lifecycle
from rollout_core.store.checks import sequence_id_after
from rollout_core.store.span_bodies import StoredSpan
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import RolloutState, load_rollouts, save_counters
from rollout_core.store.sql.unit import UnitOfWork
from rollout_core.store.types import Attempt


def number_spans(tx: Transaction, rollout_ids: Sequence[str]) -> list[int]:
    """The next span sequence id for each request, in the order of requests. One counter a rollout."""
    states = load_rollouts(tx, rollout_ids)
    numbers: list[int] = []
    for rollout_id in rollout_ids:
        state = states[rollout_id]
        state.last_sequence_id = sequence_id_after(state.last_sequence_id, rollout_id)
        numbers.append(state.last_sequence_id)
    save_counters(tx, states.values())
    return numbers


def add_spans(tx: Transaction, spans: Sequence[StoredSpan]) -> list[bool]:
    """Store spans; for each, whether it was new.

    Raises NotFound, and stores none, if a rollout or attempt is unknown.
    """
    unit = UnitOfWork(tx, [rollout_id for rollout_id, _ in spans])
    is_new = receive_spans(unit, spans)
    unit.save()
    return is_new


def receive_spans(unit: UnitOfWork, spans: Sequence[StoredSpan]) -> list[bool]:
    """Store spans, and change in ``unit`` what follows from them; for each, whether it was new."""
    attempts = [unit.attempt(rollout_id, columns[0]) for rollout_id, columns in spans]
    for rollout_id, columns in spans:
        state = unit.states[rollout_id]
        if columns[2] > state.last_sequence_id:
            state.last_sequence_id = columns[2]
            unit.note_counter(state)
    is_new = _insert(unit.tx, unit.states, spans)
    unit.tx.counted["spans"] += sum(is_new)
    for attempt, new in zip(attempts, is_new, strict=True):
        if new:
            _note_arrival(unit, attempt)
    return is_new


def _note_arrival(unit: UnitOfWork, attempt: Attempt) -> None:
    """A span is a sign of life of its attempt."""
    state = unit.states[attempt.rollout_id]
    before = (attempt.status, state.status)
    is_latest = unit.is_latest(attempt)
    attempt.last_heartbeat_time = unit.tx.now
    attempt.status = lifecycle.attempt_after_span(attempt.status, state.status, is_latest=is_latest)
    unit.note_attempt(attempt)
    if is_latest:
        state.set_status(lifecycle.ROLLOUT_AFTER_SPAN.get(state.status, state.status), unit.tx)
        if (attempt.status, state.status) != before:
            state.watch(attempt)
            unit.note_rollout(state)


def _insert(tx: Transaction, states: dict[str, RolloutState], spans: Sequence[StoredSpan]) -> list[bool]:
    last_key = tx.number("{last_span}")
    inserted = tx.insert(
        "spans",
        "rollout_key, attempt_id, span_id, sequence_id, trace_id, parent_id, name, start_time, end_time, body, body_id",
        [(states[rollout_id].key, *columns) for rollout_id, columns in spans],
        "ON CONFLICT DO NOTHING",
    )
    if inserted == len(spans):
        return [True] * len(spans)
    # Some were there before, or come twice in this batch: the first one of each new key is the one that was stored.
    # The rollouts are locked, so all their spans beyond that key are from here.
    stored = set(tx.rows("SELECT rollout_key, attempt_id, span_id FROM spans WHERE key > ?", last_key))
    is_new: list[bool] = []
    for rollout_id, columns in spans:
        identity = (states[rollout_id].key, columns[0], columns[1])
        is_new.append(identity in stored)
        stored.discard(identity)
    return is_new
