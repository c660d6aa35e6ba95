"""Tables of the SQL store, the one definition that databases are made from.

``rollouts`` is kept narrow because each rollout's row is rewritten several times in its life; what is written once
(input and metadata) lies in ``rollout_payloads``. All other tables point to ``rollouts.key``, which is also the order
of insertion: an id of 64 hex digits in every index would double the file. Foreign keys are not declared, because every
statement that writes one has looked its rollout up in the same transaction. JSON is stored as text, see ``codec``.

SQLAlchemy makes and migrates them (Alembic) and copies whole stores (``copying``). The statements of calls are written
by hand, see ``dialect``: to build and compile one in SQLAlchemy takes several times as long as SQLite takes to run it,
as `benchmarks/results/store.md` has it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    Sequence,
    String,
    Table,
    UniqueConstraint,
    text,
)

# SQLite makes a column its row id only if its type is spelled INTEGER.
_Key = BigInteger().with_variant(Integer, "sqlite")
# Texts are compared by their bytes, as SQLite does, whatever language the server speaks.
_Text = String().with_variant(String(collation="C"), "postgresql")

metadata = MetaData()
"""A database as the SQL store sees it."""
# Where several processes write at once, numbers come from sequences; SQLite takes the next one after the highest.
Sequence("queue_positions", metadata=metadata)
Sequence("resources_changes", metadata=metadata)
Sequence("change_numbers", metadata=metadata)


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


def _key(name: str = "key", **settings: Any) -> Column[Any]:
    return Column(name, _Key, primary_key=True, **settings)


def _always(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, nullable=False)


Table(  # one rollout, its place in the queue and its watchdog's alarm
    "rollouts",
    metadata,
    _key(),  # order of insertion
    Column("rollout_id", _Text, unique=True, nullable=False),
    _always("status", _Text),
    Column("mode", _Text),
    Column("resources_id", _Text),
    _always("start_time", Float),
    Column("end_time", Float),
    Column("config", _Text),  # JSON of the RolloutConfig; NULL: all defaults
    _always("attempt_count", Integer),  # number of the latest attempt; 0: none yet
    _always("last_sequence_id", _Key),  # highest span sequence id given out or seen
    Column("queue_position", _Key),  # place in the queue; NULL exactly when not queued
    Column("due_time", Float),  # no later than the latest attempt can be lost; NULL: not watched
    Index("rollouts_by_status", "status", "key"),
    # Partial: they hold only what is queued or watched now, so they stay small however many rollouts are done.
    Index("rollouts_queue", "queue_position", **_where("queue_position IS NOT NULL")),
    Index("rollouts_due", "due_time", **_where("due_time IS NOT NULL")),
)
Table(  # the parts of a rollout that are large and seldom change
    "rollout_payloads",
    metadata,
    _key(autoincrement=False),
    _always("input", _Text),
    Column("metadata", _Text),
)
Table(
    "attempts",
    metadata,
    _key("rollout_key"),
    Column("sequence_id", Integer, primary_key=True),
    _always("attempt_id", _Text),
    _always("status", _Text),
    _always("start_time", Float),
    Column("end_time", Float),
    Column("worker_id", _Text),
    Column("last_heartbeat_time", Float),
    Column("metadata", _Text),
    sqlite_with_rowid=False,
)
Table(  # see ``EncodedSpan``
    "spans",
    metadata,
    _key(),  # order of insertion
    _always("rollout_key", _Key),
    _always("attempt_id", _Text),
    _always("span_id", _Text),
    _always("sequence_id", _Key),
    _always("trace_id", _Text),
    Column("parent_id", _Text),
    _always("name", _Text),
    Column("start_time", Float),
    Column("end_time", Float),
    _always("body", _Text),
    Column("body_id", _Text),  # of no use: kept for databases that have the column
    UniqueConstraint("rollout_key", "attempt_id", "span_id"),
)
# Parts of counts that queries need at once: of rollouts by status, of attempts, and of spans. Each writer adds to a row
# of its own, so that writers do not wait for each other; the sum is the count.
Table(
    "counts",
    metadata,
    Column("name", _Text, primary_key=True),
    Column("writer", Integer, primary_key=True, autoincrement=False),
    _always("count", _Key),
    sqlite_with_rowid=False,
)
Table(  # snapshots of resources
    "resources",
    metadata,
    _key(),  # order of insertion
    Column("resources_id", _Text, unique=True, nullable=False),
    _always("create_time", Float),
    _always("update_time", Float),
    _always("version", Integer),
    _always("change_number", _Key),  # order of additions and updates; the highest is the latest
    _always("resources", _Text),
    Index("resources_by_change", "change_number"),
)
Table(
    "workers",
    metadata,
    _key(),  # order of insertion
    Column("worker_id", _Text, unique=True, nullable=False),
    _always("status", _Text),
    Column("heartbeat_stats", _Text),
    Column("last_heartbeat_time", Float),
    Column("last_dequeue_time", Float),
    Column("last_busy_time", Float),
    Column("last_idle_time", Float),
    Column("current_rollout_id", _Text),
    Column("current_attempt_id", _Text),
)
Table(  # what transactions have changed, see ``rollout_core.store.changes``
    "changes",
    metadata,
    # Of PostgreSQL, where those of higher numbers may commit first; else 0.
    Column("transaction_id", _Key, primary_key=True, autoincrement=False),
    Column("number", _Key, primary_key=True, autoincrement=False),
    _always("time", Float),
    _always("entries", _Text),
    sqlite_with_rowid=False,
)
Table(  # names that one holder at a time may have
    "leases",
    metadata,
    Column("name", _Text, primary_key=True),
    _always("owner", _Text),
    _always("epoch", BigInteger),  # rises with each taking by another
    _always("expires_at", Float),  # by the database's clock
    Index("leases_by_end", "expires_at"),
    sqlite_with_rowid=False,
)
