"""Counts that the SQL store keeps, because to count a million rows anew for each page takes longer than the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.types import RolloutStatus


def add_counts(tx: Transaction, changes: Mapping[str, int]) -> None:
    """Add to counts; the names are statuses of rollouts, ``attempts`` and ``spans``."""
    tx.insert(
        "counts",
        "name, writer, count",
        sorted((name, tx.writer, change) for name, change in changes.items() if change),
        "ON CONFLICT (name, writer) DO UPDATE SET count = counts.count + excluded.count",
    )


def count(tx: Transaction, name: str) -> int:
    """One count."""
    return _sum(tx, [name])


def count_rollouts(tx: Transaction, statuses: Iterable[str] | None = None) -> int:
    """How many rollouts have one of these statuses; None: any."""
    return _sum(tx, get_args(RolloutStatus) if statuses is None else statuses)


def _sum(tx: Transaction, names: Iterable[str]) -> int:
    return tx.number(
        "SELECT CAST(COALESCE(SUM(count), 0) AS BIGINT) FROM counts WHERE name {in_texts}", tx.texts(list(names))
    )
