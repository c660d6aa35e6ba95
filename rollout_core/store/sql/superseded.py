"""The end of attempts that a newer one has superseded, in the SQL store. First attempts, nearly all, cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_core.store import lifecycle
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import RolloutState, attempt_model, save_attempts
from rollout_core.store.types import Attempt


def find_superseded(tx: Transaction, states: Iterable[RolloutState]) -> list[Attempt]:
    """The attempts of these rollouts that are under way, by the database, and are not the latest one."""
    retried = [state.rollout_id for state in states if state.attempt_count > 1]
    if not retried:
        return []
    found = tx.rows(
        "SELECT r.rollout_id, {attempt} FROM rollouts r"
        " JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id < r.attempt_count"
        " WHERE r.rollout_id {in_texts} AND a.status {in_texts}",
        tx.texts(retried),
        tx.texts(sorted(lifecycle.WATCHED)),
    )
    return [attempt_model(rollout_id, columns) for rollout_id, *columns in found]


def end_attempt(tx: Transaction, attempt: Attempt) -> None:
    """Change an attempt that was superseded while it was under way."""
    attempt.end_time = lifecycle.attempt_end_time(lifecycle.SUPERSEDED, attempt.end_time, tx.now)
    attempt.status = lifecycle.SUPERSEDED


def end_superseded(tx: Transaction, states: Sequence[RolloutState]) -> None:
    """End the superseded attempts of these rollouts. The rollouts have been written."""
    keys = {state.rollout_id: state.key for state in states}
    superseded = find_superseded(tx, states)
    for attempt in superseded:
        end_attempt(tx, attempt)
    save_attempts(tx, [(keys[attempt.rollout_id], attempt) for attempt in superseded])
