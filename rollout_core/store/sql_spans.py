"""Operations of the SQL store on spans: numbering and storing them, and what their arrival means for attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_core.store import lifecycle
from rollout_core.store.span_bodies import StoredSpan
from rollout_core.store.sql_dialect import Transaction
from rollout_core.store.sql_rows import (
    RolloutState,
    find_attempt,
    load_attempts,
    load_rollouts,
    save_attempts,
    save_rollouts,
)
from rollout_core.store.types import Attempt


def number_spans(tx: Transaction, rollout_ids: Sequence[str]) -> list[int]:
    """The next span sequence id for each request, in the order of requests. One counter a rollout."""
    states = load_rollouts(tx, rollout_ids)
    numbers: list[int] = []
    for rollout_id in rollout_ids:
        states[rollout_id].last_sequence_id += 1
        numbers.append(states[rollout_id].last_sequence_id)
    _save_counters(tx, states.values())
    return numbers


def add_spans(tx: Transaction, spans: Sequence[StoredSpan]) -> list[bool]:
    """Store spans; for each, whether it was new.

    Raises NotFound, and stores none, if a rollout or attempt is unknown.
    """
    states = load_rollouts(tx, [rollout_id for rollout_id, _ in spans])
    attempts = _load_span_attempts(tx, states, {(rollout_id, columns[0]) for rollout_id, columns in spans})
    counters = {rollout_id: state.last_sequence_id for rollout_id, state in states.items()}
    for rollout_id, columns in spans:
        state = states[rollout_id]
        state.last_sequence_id = max(state.last_sequence_id, columns[2])
    is_new = _insert(tx, states, spans)
    tx.counted["spans"] += sum(is_new)

    arrived = {(rollout_id, columns[0]) for (rollout_id, columns), new in zip(spans, is_new, strict=True) if new}
    moved: dict[str, RolloutState] = {}
    for rollout_id, attempt_id in arrived:
        state, attempt = states[rollout_id], attempts[rollout_id, attempt_id]
        before = (attempt.status, state.status)
        attempt.last_heartbeat_time = tx.now
        attempt.status = lifecycle.ATTEMPT_AFTER_SPAN.get(attempt.status, attempt.status)
        if attempt.sequence_id == state.attempt_count:
            state.set_status(lifecycle.ROLLOUT_AFTER_SPAN.get(state.status, state.status), tx)
            if (attempt.status, state.status) != before:
                state.watch(attempt)
                moved[rollout_id] = state
    save_attempts(tx, [(states[key[0]].key, attempts[key]) for key in arrived])
    save_rollouts(tx, list(moved.values()))
    _save_counters(
        tx,
        [
            state
            for rollout_id, state in states.items()
            if rollout_id not in moved and state.last_sequence_id != counters[rollout_id]
        ],
    )
    return is_new


def _load_span_attempts(
    tx: Transaction, states: dict[str, RolloutState], wanted: set[tuple[str, str]]
) -> dict[tuple[str, str], Attempt]:
    """The attempts that spans name. Nearly always the latest ones, so those are read at once."""
    attempts = {
        (attempt.rollout_id, attempt.attempt_id): attempt for attempt in load_attempts(tx, states.values()).values()
    }
    for rollout_id, attempt_id in wanted - attempts.keys():
        attempts[rollout_id, attempt_id] = find_attempt(tx, states[rollout_id], attempt_id)
    return attempts


def _insert(tx: Transaction, states: dict[str, RolloutState], spans: Sequence[StoredSpan]) -> list[bool]:
    last_key = tx.number("{last_span}")
    inserted = tx.insert_many(
        "INSERT INTO spans (rollout_key, attempt_id, span_id, sequence_id, trace_id, parent_id, name, start_time,"
        " end_time, body, body_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        [(states[rollout_id].key, *columns) for rollout_id, columns in spans],
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


def _save_counters(tx: Transaction, states: Iterable[RolloutState]) -> None:
    tx.run_many(
        "UPDATE rollouts SET last_sequence_id = ? WHERE key = ?",
        [(state.last_sequence_id, state.key) for state in states],
    )
