"""What transactions have changed, for those who watch the store."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import CreateSequence

revision = "0004"
down_revision = "0003"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add their table."""
    op.create_table(
        "changes",
        sa.Column("transaction_id", KEY, primary_key=True, autoincrement=False),
        sa.Column("number", KEY, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("entries", TEXT, nullable=False),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(CreateSequence(sa.Sequence("change_numbers")))
    # Stands for the time before any change.
    op.execute("INSERT INTO changes VALUES (0, 0, 0.0, '[]')")
