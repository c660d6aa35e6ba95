"""Bodies of spans in the object store; counts of rows."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add what is new, and count what is there."""
    op.add_column("spans", sa.Column("body_id", TEXT))
    op.create_table(
        "counts",
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("writer", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("count", KEY, nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO counts SELECT status, 0, COUNT(*) FROM rollouts GROUP BY status")
    op.execute("INSERT INTO counts SELECT 'attempts', 0, COUNT(*) FROM attempts")
    op.execute("INSERT INTO counts SELECT 'spans', 0, COUNT(*) FROM spans")
