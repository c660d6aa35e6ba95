"""`rollout store copy` and `migrate`: the store in another database, and brought to this version."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.storage import DatabaseURL
from rollout_core.store.sql.by_url import migrate
from rollout_core.store.sql.copying import copy_store

LOG_SECONDS = 30.0


def store_copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Database URL of the store; nothing of it is changed.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Database URL of an empty database.")],
    debug: Debug = False,
) -> None:
    """Copy a whole store into another database, such as from SQLite to PostgreSQL.

    It has rollouts, attempts, spans, resources and workers. Everything that uses either database has to end first.
    Every row is read back and compared. Start a killed copy again, and it continues where it stopped.
    """
    with one_line_errors(debug):
        shown = time.monotonic()
        total = 0

        def show(table: str, rows: int) -> None:
            nonlocal shown, total
            total += rows
            if time.monotonic() >= shown + LOG_SECONDS:
                shown = time.monotonic()
                sys.stderr.write(f"{total:,} rows written, now of {table}\n")

        copied = copy_store(source, target, show)
        for name, rows in copied.rows.items():
            typer.echo(f"{name:17} {rows:>12,}")
        typer.echo(f"both have the same rows; {copied.written:,} were written now")
        if copied.under_way:
            sys.stderr.write(
                f"rollout: {copied.under_way} rollouts are preparing or running; where their runners are still at "
                "work, what those store from now on is in the first database alone: end them, and copy into an empty "
                "one\n"
            )


def store_migrate(database: DatabaseURL, debug: Debug = False) -> None:
    """Bring a store's database to the schema of this version."""
    with one_line_errors(debug):
        typer.echo(migrate(database))
