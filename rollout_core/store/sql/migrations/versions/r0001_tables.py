"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Create everything."""
    op.create_table(
        "rollouts",
        sa.Column("key", KEY, primary_key=True),
        sa.Column("rollout_id", TEXT, nullable=False, unique=True),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("mode", TEXT),
        sa.Column("resources_id", TEXT),
        sa.Column("start_time", sa.Float, nullable=False),
        sa.Column("end_time", sa.Float),
        sa.Column("config", TEXT),
        sa.Column("attempt_count", sa.Integer, nullable=False),
        sa.Column("last_sequence_id", KEY, nullable=False),
        sa.Column("queue_position", KEY),
        sa.Column("due_time", sa.Float),
    )
    op.create_index("rollouts_by_status", "rollouts", ["status", "key"])
    for index, column in (("rollouts_queue", "queue_position"), ("rollouts_due", "due_time")):
        where = sa.text(f"{column} IS NOT NULL")
        op.create_index(index, "rollouts", [column], sqlite_where=where, postgresql_where=where)
    op.create_table(
        "rollout_payloads",
        sa.Column("key", KEY, primary_key=True, autoincrement=False),
        sa.Column("input", TEXT, nullable=False),
        sa.Column("metadata", TEXT),
    )
    op.create_table(
        "attempts",
        sa.Column("rollout_key", KEY, primary_key=True),
        sa.Column("sequence_id", sa.Integer, primary_key=True),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("start_time", sa.Float, nullable=False),
        sa.Column("end_time", sa.Float),
        sa.Column("worker_id", TEXT),
        sa.Column("last_heartbeat_time", sa.Float),
        sa.Column("metadata", TEXT),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "spans",
        sa.Column("key", KEY, primary_key=True),
        sa.Column("rollout_key", KEY, nullable=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("span_id", TEXT, nullable=False),
        sa.Column("sequence_id", KEY, nullable=False),
        sa.Column("trace_id", TEXT, nullable=False),
        sa.Column("parent_id", TEXT),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("start_time", sa.Float),
        sa.Column("end_time", sa.Float),
        sa.Column("body", TEXT, nullable=False),
        sa.UniqueConstraint("rollout_key", "attempt_id", "span_id"),
    )
    op.create_table(
        "resources",
        sa.Column("key", KEY, primary_key=True),
        sa.Column("resources_id", TEXT, nullable=False, unique=True),
        sa.Column("create_time", sa.Float, nullable=False),
        sa.Column("update_time", sa.Float, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("change_number", KEY, nullable=False),
        sa.Column("resources", TEXT, nullable=False),
    )
    op.create_index("resources_by_change", "resources", ["change_number"])
    op.create_table(
        "workers",
        sa.Column("key", KEY, primary_key=True),
        sa.Column("worker_id", TEXT, nullable=False, unique=True),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("heartbeat_stats", TEXT),
        sa.Column("last_heartbeat_time", sa.Float),
        sa.Column("last_dequeue_time", sa.Float),
        sa.Column("last_busy_time", sa.Float),
        sa.Column("last_idle_time", sa.Float),
        sa.Column("current_rollout_id", TEXT),
        sa.Column("current_attempt_id", TEXT),
    )
    if op.get_bind().dialect.name == "postgresql":
        for sequence in ("queue_positions", "resources_changes"):
            op.execute(sa.schema.CreateSequence(sa.Sequence(sequence)))
