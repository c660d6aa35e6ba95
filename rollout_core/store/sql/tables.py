"""Tables of the SQL store, the one definition that databases are made from.

``rollouts`` is kept narrow because each rollout's row is rewritten several times in its life; what is written once
(input and metadata) lies in ``rollout_payloads``. All other tables point to ``rollouts.key``, which is also the order
of insertion: an id of 64 hex digits in every index would double the file. Foreign keys are not declared, because every
statement that writes one has looked its rollout up in the same transaction. JSON is stored as text, see ``codec``.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Index, Integer, MetaData, Sequence, String, UniqueConstraint, text
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

# SQLite makes a column its row id only if its type is spelled INTEGER.
_Key = BigInteger().with_variant(Integer, "sqlite")
# Texts are compared by their bytes, as SQLite does, whatever language the server speaks.
_Text = String().with_variant(String(collation="C"), "postgresql")
_metadata = MetaData()
# Where several processes write at once, numbers come from sequences; SQLite takes the next one after the highest.
Sequence("queue_positions", metadata=_metadata)
Sequence("resources_changes", metadata=_metadata)


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


class _Table(SQLModel, registry=registry(metadata=_metadata)):
    """Base of the store's tables, apart from those of any other library that uses SQLModel in the same process."""


class RolloutRow(_Table, table=True):
    """One rollout, its place in the queue and its watchdog's alarm."""

    __tablename__ = "rollouts"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        Index("rollouts_by_status", "status", "key"),
        # Partial: they hold only what is queued or watched now, so they stay small however many rollouts are done.
        Index("rollouts_queue", "queue_position", **_where("queue_position IS NOT NULL")),
        Index("rollouts_due", "due_time", **_where("due_time IS NOT NULL")),
    )

    key: int = Field(sa_type=_Key, primary_key=True, description="Order of insertion.")
    rollout_id: str = Field(sa_type=_Text, unique=True)
    status: str = Field(sa_type=_Text)
    mode: str | None = Field(sa_type=_Text)
    resources_id: str | None = Field(sa_type=_Text)
    start_time: float
    end_time: float | None
    config: str | None = Field(sa_type=_Text, description="JSON of the RolloutConfig; NULL: all defaults.")
    attempt_count: int = Field(description="Number of the latest attempt; 0: none yet.")
    last_sequence_id: int = Field(sa_type=_Key, description="Highest span sequence id given out or seen.")
    queue_position: int | None = Field(sa_type=_Key, description="Place in the queue; NULL exactly when not queued.")
    due_time: float | None = Field(description="No later than the latest attempt can be lost; NULL: not watched.")


class RolloutPayloadRow(_Table, table=True):
    """The parts of a rollout that are large and seldom change."""

    __tablename__ = "rollout_payloads"  # pyright: ignore[reportAssignmentType]

    key: int = Field(sa_type=_Key, primary_key=True, sa_column_kwargs={"autoincrement": False})
    input: str = Field(sa_type=_Text)
    # SQLModel keeps the name ``metadata`` for itself; the column has it all the same.
    metadata_: str | None = Field(sa_type=_Text, sa_column_kwargs={"name": "metadata"})


class AttemptRow(_Table, table=True):
    """One attempt."""

    __tablename__ = "attempts"  # pyright: ignore[reportAssignmentType]
    __table_args__ = {"sqlite_with_rowid": False}

    rollout_key: int = Field(sa_type=_Key, primary_key=True)
    sequence_id: int = Field(primary_key=True)
    attempt_id: str = Field(sa_type=_Text)
    status: str = Field(sa_type=_Text)
    start_time: float
    end_time: float | None
    worker_id: str | None = Field(sa_type=_Text)
    last_heartbeat_time: float | None
    metadata_: str | None = Field(sa_type=_Text, sa_column_kwargs={"name": "metadata"})


class SpanRow(_Table, table=True):
    """One span. ``body`` is the JSON of the fields that have no column."""

    __tablename__ = "spans"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("rollout_key", "attempt_id", "span_id"),)

    key: int = Field(sa_type=_Key, primary_key=True, description="Order of insertion.")
    rollout_key: int = Field(sa_type=_Key)
    attempt_id: str = Field(sa_type=_Text)
    span_id: str = Field(sa_type=_Text)
    sequence_id: int = Field(sa_type=_Key)
    trace_id: str = Field(sa_type=_Text)
    parent_id: str | None = Field(sa_type=_Text)
    name: str = Field(sa_type=_Text)
    start_time: float | None
    end_time: float | None
    body: str = Field(sa_type=_Text)
    body_id: str | None = Field(sa_type=_Text, description="Of no use: kept for databases that have the column.")


class CountRow(_Table, table=True):
    """A part of a count that queries need at once: of rollouts by status, of attempts, and of spans.

    Each writer adds to a row of its own, so that writers do not wait for each other; the sum is the count.
    """

    __tablename__ = "counts"  # pyright: ignore[reportAssignmentType]
    __table_args__ = {"sqlite_with_rowid": False}

    name: str = Field(sa_type=_Text, primary_key=True)
    writer: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    count: int = Field(sa_type=_Key)


class ResourcesRow(_Table, table=True):
    """One snapshot of resources."""

    __tablename__ = "resources"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("resources_by_change", "change_number"),)

    key: int = Field(sa_type=_Key, primary_key=True, description="Order of insertion.")
    resources_id: str = Field(sa_type=_Text, unique=True)
    create_time: float
    update_time: float
    version: int
    change_number: int = Field(sa_type=_Key, description="Order of additions and updates; the highest is the latest.")
    resources: str = Field(sa_type=_Text)


class WorkerRow(_Table, table=True):
    """One worker."""

    __tablename__ = "workers"  # pyright: ignore[reportAssignmentType]

    key: int = Field(sa_type=_Key, primary_key=True, description="Order of insertion.")
    worker_id: str = Field(sa_type=_Text, unique=True)
    status: str = Field(sa_type=_Text)
    heartbeat_stats: str | None = Field(sa_type=_Text)
    last_heartbeat_time: float | None
    last_dequeue_time: float | None
    last_busy_time: float | None
    last_idle_time: float | None
    current_rollout_id: str | None = Field(sa_type=_Text)
    current_attempt_id: str | None = Field(sa_type=_Text)


class LeaseRow(_Table, table=True):
    """A name that one holder at a time may have."""

    __tablename__ = "leases"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (Index("leases_by_end", "expires_at"), {"sqlite_with_rowid": False})

    name: str = Field(sa_type=_Text, primary_key=True)
    owner: str = Field(sa_type=_Text)
    epoch: int = Field(sa_type=BigInteger, description="Rises with each taking by another.")
    expires_at: float = Field(description="By the database's clock.")


metadata = _metadata
