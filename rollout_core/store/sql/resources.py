"""Operations of the SQL store on snapshots of resources."""

from __future__ import annotations

import secrets

from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import resources_model


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
