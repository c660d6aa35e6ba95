"""The database that a URL means, opened."""

from __future__ import annotations

from rollout_core.store.sql.database import Database
from rollout_core.store.sql.database_urls import is_postgres
from rollout_core.store.sql.group_commit import Hooks
from rollout_core.store.sql.sqlite_database import SqliteDatabase
from rollout_core.store.sql.sqlite_file import parse_url


def open_database(url: str, hooks: Hooks, *, busy_timeout_seconds: float) -> Database:
    """The database at ``url``, created or brought to the present schema if need be.

    Raises ConfigError for a URL that is none, and what the database is not fit for; Recoverable if it is merely busy.
    """
    if is_postgres(url):
        # Its driver need not be installed for a store in a file.
        from rollout_core.store.sql.postgres_database import PostgresDatabase

        return PostgresDatabase(url, hooks, busy_timeout_seconds)
    return SqliteDatabase(parse_url(url), hooks, busy_timeout_seconds)
