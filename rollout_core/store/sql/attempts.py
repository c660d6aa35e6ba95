"""Operations of the SQL store that drive the status machine: updates of attempts and rollouts, and the watchdog."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.base.errors import Conflict
from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.span_bodies import StoredSpan
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    RolloutState,
    config_json,
    load_attempts,
    load_rollouts,
    rollout_model,
    save_attempts,
    save_rollouts,
)
from rollout_core.store.sql.spans import receive_spans
from rollout_core.store.sql.superseded import end_superseded
from rollout_core.store.sql.unit import UnitOfWork
from rollout_core.store.sql.workers import note_attempts
from rollout_core.store.types import Attempt, AttemptStatus, AttemptUpdate, Rollout, Unset


def update_attempts(tx: Transaction, updates: Sequence[tuple[AttemptUpdate, bool]]) -> list[Attempt | Conflict]:
    """Apply updates in order, each with whether it is fenced.

    A refused one yields a Conflict in its place; the others are applied all the same.
    """
    unit = UnitOfWork(tx, [update.rollout_id for update, _ in updates])
    results = apply_updates(unit, updates)
    unit.save()
    return results


def end_attempts(tx: Transaction, ends: Sequence[tuple[StoredSpan, AttemptUpdate]]) -> list[Attempt | Conflict]:
    """Store the last span of each attempt, and apply its update, fenced."""
    unit = UnitOfWork(tx, [update.rollout_id for _, update in ends])
    receive_spans(unit, [span for span, _ in ends])
    results = apply_updates(unit, [(update, True) for _, update in ends])
    unit.save()
    return results


def apply_updates(unit: UnitOfWork, updates: Sequence[tuple[AttemptUpdate, bool]]) -> list[Attempt | Conflict]:
    """Change attempts in ``unit``, see ``update_attempts``."""
    results: list[Attempt | Conflict] = []
    with_workers: list[Attempt] = []
    for update, fenced in updates:
        state = unit.states[update.rollout_id]
        newest = unit.latest(update.rollout_id)
        attempt = newest if update.attempt_id == "latest" else unit.attempt(update.rollout_id, update.attempt_id)
        if fenced:
            if attempt is newest and attempt.status in lifecycle.ENDED and attempt.status == update.status:
                results.append(_copy(attempt))  # the caller repeats what it could not know had arrived
                continue
            reason = lifecycle.fence(attempt.attempt_id, newest.attempt_id, attempt.status, state.status)
            if reason is not None:
                results.append(Conflict(f"rollout {state.rollout_id}: {reason}; nothing was changed"))
                continue
        _apply(unit, update, attempt)
        left = _copy(attempt)
        results.append(left)
        if left.worker_id and not (isinstance(update.status, Unset) and isinstance(update.worker_id, Unset)):
            with_workers.append(left)
    note_attempts(unit.tx, with_workers)
    return results


def _copy(attempt: Attempt) -> Attempt:
    """As it is now: a later update of the batch may change it further."""
    return trusted(Attempt, {**attempt.__dict__})


def _apply(unit: UnitOfWork, update: AttemptUpdate, attempt: Attempt) -> None:
    state = unit.states[update.rollout_id]
    is_latest = unit.is_latest(attempt)
    was_finished = state.status in lifecycle.FINISHED
    if not isinstance(update.worker_id, Unset):
        attempt.worker_id = update.worker_id
    if not isinstance(update.last_heartbeat_time, Unset):
        attempt.last_heartbeat_time = update.last_heartbeat_time
    if not isinstance(update.metadata, Unset):
        attempt.metadata = update.metadata
    if not isinstance(update.status, Unset):
        _set_attempt_status(unit.tx, attempt, update.status, state, is_latest=is_latest)
        if state.status in lifecycle.FINISHED and not was_finished:
            unit.end_superseded(state.rollout_id)
    unit.note_attempt(attempt)
    if is_latest:
        state.watch(attempt)
        unit.note_rollout(state)


def _set_attempt_status(
    tx: Transaction, attempt: Attempt, status: AttemptStatus, state: RolloutState, *, is_latest: bool
) -> None:
    """Change an attempt's status, and the rollout's with it if this is the latest attempt."""
    attempt.end_time = lifecycle.attempt_end_time(status, attempt.end_time, tx.now)
    attempt.status = status
    if is_latest:
        rollout_status = lifecycle.rollout_status_after(state.status, status, attempt.sequence_id, state.config)
        if rollout_status != state.status:
            state.set_status(rollout_status, tx)


def update_rollout(tx: Transaction, rollout_id: str, changes: Mapping[str, Any]) -> Rollout:
    """Set the given fields of a rollout; a status is taken as it is, with end time and queue in line with it."""
    state = load_rollouts(tx, [rollout_id])[rollout_id]
    if changes.keys() & {"mode", "resources_id", "config"}:
        state.mode = changes.get("mode", state.mode)
        state.resources_id = changes.get("resources_id", state.resources_id)
        if "config" in changes:
            state.config_json = config_json(changes["config"])
        tx.run(
            "UPDATE rollouts SET mode = ?, resources_id = ?, config = ? WHERE key = ?",
            state.mode,
            state.resources_id,
            state.config_json,
            state.key,
        )
    if "input" in changes:
        tx.run("UPDATE rollout_payloads SET input = ? WHERE key = ?", changes["input"], state.key)
    if "metadata" in changes:
        tx.run("UPDATE rollout_payloads SET metadata = ? WHERE key = ?", changes["metadata"], state.key)
    if "status" in changes:
        state.set_status(changes["status"], tx)
    if changes.keys() & {"status", "config"}:
        state.watch(load_attempts(tx, [state]).get((state.key, state.attempt_count)))
        _save([state], tx)
    [row] = tx.rows(ROLLOUTS_WITH_ATTEMPT + " WHERE r.key = ?", state.key)
    return rollout_model(row)


def find_lost_attempts(tx: Transaction, limit: int) -> int:
    """The watchdog: mark attempts that are overdue, at most ``limit``. How many it looked at.

    Only rollouts whose alarm has gone off are read. An alarm that heartbeats have outrun is set again.
    """
    found = tx.rows(
        "SELECT {rollout} FROM rollouts r WHERE r.due_time IS NOT NULL AND r.due_time < ?"
        " ORDER BY r.due_time LIMIT ? {lock_free}",
        tx.now,
        limit,
    )
    # By key: those that are queued again keep the order they were first queued in.
    states = sorted((RolloutState(*row) for row in found), key=lambda state: state.key)
    # Read only now: what another process wrote of an attempt just before the lock was free must be seen.
    attempts = load_attempts(tx, states)
    lost: list[tuple[int, Attempt]] = []
    for state in states:
        attempt = attempts[state.key, state.attempt_count]
        status = lifecycle.lost_status(state.config, attempt.start_time, attempt.last_heartbeat_time, tx.now)
        if status is not None:
            _set_attempt_status(tx, attempt, status, state, is_latest=True)
            lost.append((state.key, attempt))
        state.watch(attempt)
        if state.due_time is not None:
            # Rounding can put the sum before now and the difference within the limit; without this it would spin.
            state.due_time = max(state.due_time, math.nextafter(tx.now, math.inf))
    save_attempts(tx, lost)
    _save(states, tx)
    note_attempts(tx, [attempt for _, attempt in lost])
    return len(found)


def _save(states: Sequence[RolloutState], tx: Transaction) -> None:
    """Write back rollouts, and what follows for the older attempts of those that have finished."""
    finished = [state for state in states if state.just_finished]
    save_rollouts(tx, states)
    end_superseded(tx, finished)
