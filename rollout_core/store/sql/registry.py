"""Operations of the SQL store on workers and on snapshots of resources."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rollout_core.store.operations import WorkerChange
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import resources_model, worker_model
from rollout_core.store.types import Worker


def save_workers(tx: Transaction, changes: Mapping[str, WorkerChange]) -> None:
    """Apply changes to workers, as ``change_worker`` does.

    In SQL, because a worker's row is not read before: two processes may meet a worker for the first time at once.
    """
    tx.insert(
        "workers",
        "worker_id, status, last_busy_time, last_idle_time, last_dequeue_time, current_rollout_id, current_attempt_id",
        [
            (
                worker_id,
                change.status,
                tx.now if change.was_busy else None,
                tx.now if change.was_freed else None,
                tx.now if change.dequeued else None,
                change.rollout_id,
                change.attempt_id,
            )
            for worker_id, change in sorted(changes.items())  # sorted, so that writers cannot deadlock
        ],
        "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status,"
        " last_busy_time = COALESCE(excluded.last_busy_time, workers.last_busy_time),"
        # Of a change, these are the marks of ``found_nothing``.
        " last_idle_time = CASE WHEN workers.status = 'idle' AND excluded.last_busy_time IS NULL"
        " AND excluded.last_dequeue_time IS NOT NULL THEN workers.last_idle_time"
        " ELSE COALESCE(excluded.last_idle_time, workers.last_idle_time) END,"
        " last_dequeue_time = COALESCE(excluded.last_dequeue_time, workers.last_dequeue_time),"
        " current_rollout_id = excluded.current_rollout_id, current_attempt_id = excluded.current_attempt_id",
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


def add_resources(tx: Transaction, resources: str) -> ResourcesUpdate:
    """Store a new snapshot under a fresh id; it is the latest now."""
    return _insert(tx, f"rs-{secrets.token_hex(6)}", resources)


def update_resources(tx: Transaction, resources_id: str, resources: str) -> ResourcesUpdate:
    """Replace the snapshot of this id, or create it; it is the latest now."""
    row = tx.row("SELECT version FROM resources r WHERE resources_id = ? {lock}", resources_id)
    if row is None:
        return _insert(tx, resources_id, resources)
    tx.run(
        "UPDATE resources SET resources = ?, update_time = ?, version = version + 1, change_number = ?"
        " WHERE resources_id = ?",
        resources,
        tx.now,
        tx.next_numbers("resources", 1)[0],
        resources_id,
    )
    return _read(tx, resources_id)


def _insert(tx: Transaction, resources_id: str, resources: str) -> ResourcesUpdate:
    tx.run(
        "INSERT INTO resources (resources_id, create_time, update_time, version, change_number, resources)"
        " VALUES (?, ?, ?, 1, ?, ?)",
        resources_id,
        tx.now,
        tx.now,
        tx.next_numbers("resources", 1)[0],
        resources,
    )
    return _read(tx, resources_id)


def _read(tx: Transaction, resources_id: str) -> ResourcesUpdate:
    [row] = tx.rows("SELECT {resources} FROM resources WHERE resources_id = ?", resources_id)
    return resources_model(row)
