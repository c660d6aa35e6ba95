"""Leases of work that several machines could do."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add their table."""
    op.create_table(
        "leases",
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("leases_by_end", "leases", ["expires_at"])
