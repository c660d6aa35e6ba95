"""Operations of the SQL store on workers, which change as a consequence of what happens to their attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_core.store.lifecycle import WORKER_AFTER_ATTEMPT
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import worker_model
from rollout_core.store.types import Attempt, Worker


def note_attempts(tx: Transaction, attempts: Sequence[Attempt], *, dequeued: bool = False) -> None:
    """Bring the workers of these attempts into line with them; the last attempt of a worker counts."""
    by_worker = {attempt.worker_id: attempt for attempt in attempts if attempt.worker_id}
    latest = [by_worker[worker_id] for worker_id in sorted(by_worker)]  # sorted, so that writers cannot deadlock
    busy = [attempt for attempt in latest if WORKER_AFTER_ATTEMPT[attempt.status] == "busy"]
    free = [attempt for attempt in latest if WORKER_AFTER_ATTEMPT[attempt.status] != "busy"]
    tx.insert(
        "workers",
        "worker_id, status, last_busy_time, last_dequeue_time, current_rollout_id, current_attempt_id",
        [
            (attempt.worker_id, "busy", tx.now, tx.now if dequeued else None, attempt.rollout_id, attempt.attempt_id)
            for attempt in busy
        ],
        "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status, last_busy_time = excluded.last_busy_time,"
        " last_dequeue_time = COALESCE(excluded.last_dequeue_time, workers.last_dequeue_time),"
        " current_rollout_id = excluded.current_rollout_id, current_attempt_id = excluded.current_attempt_id",
    )
    _free(tx, [(attempt.worker_id, WORKER_AFTER_ATTEMPT[attempt.status], tx.now) for attempt in free])


def note_idle(tx: Transaction, attempts: Sequence[Attempt]) -> None:
    """The workers of these attempts do not work on them after all."""
    _free(tx, [(worker_id, "idle", tx.now) for worker_id in sorted({a.worker_id for a in attempts if a.worker_id})])


def note_empty_dequeues(tx: Transaction, worker_ids: Iterable[str]) -> None:
    """These workers asked for work and there was none: they are idle, from now unless they were before."""
    tx.insert(
        "workers",
        "worker_id, status, last_idle_time, last_dequeue_time",
        [(worker_id, "idle", tx.now, tx.now) for worker_id in sorted(set(worker_ids))],
        "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status,"
        " last_dequeue_time = excluded.last_dequeue_time,"
        " last_idle_time = CASE WHEN workers.status = 'idle' THEN workers.last_idle_time"
        " ELSE excluded.last_idle_time END, current_rollout_id = NULL, current_attempt_id = NULL",
    )


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


def _free(tx: Transaction, rows: Sequence[tuple[str | None, str, float]]) -> None:
    tx.insert(
        "workers",
        "worker_id, status, last_idle_time",
        rows,
        "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status, last_idle_time = excluded.last_idle_time,"
        " current_rollout_id = NULL, current_attempt_id = NULL",
    )
