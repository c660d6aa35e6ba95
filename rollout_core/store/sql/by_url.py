"""The database that a URL means: opened, checked, and brought to the present schema.

A new one starts empty and goes through all versions.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple, get_args

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import without_password
from rollout_core.store.sql import sqlite
from rollout_core.store.sql.database import REVISIONS, Database
from rollout_core.store.sql.group_commit import Hooks
from rollout_core.store.types import RolloutStatus

BUSY_TIMEOUT_SECONDS = 30.0
"""How long an upgrade waits for others to finish writing."""


def is_postgres(url: str) -> bool:
    """Whether a database URL is one of PostgreSQL.

    Raises ConfigError if it is and its driver is not installed, or has a port that is none.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        return False
    if find_spec("psycopg") is None:
        raise ConfigError(f"postgresql:// needs a package: pip install '{DISTRIBUTION}[postgres]'")
    postgres_server().check_url(url)
    return True


def postgres_server():
    """The module that knows PostgreSQL's servers. It imports their driver, which is an extra."""
    from rollout_core.store.sql import postgres_server

    return postgres_server


def open_database(url: str, hooks: Hooks, *, busy_timeout_seconds: float) -> Database[Any]:
    """The database at ``url``, created or brought to the present schema if need be.

    Raises ConfigError for a URL that is none, and for a database that is not fit for it; Recoverable if it is merely
    busy.
    """
    if is_postgres(url):
        from rollout_core.store.sql.postgres import PostgresDatabase

        return PostgresDatabase(url, hooks, busy_timeout_seconds)
    return sqlite.SqliteDatabase(sqlite.parse_url(url), hooks, busy_timeout_seconds)


def migrate(url: str) -> str:
    """Create the store's tables at ``url`` or bring them to the present version; what was done, in a line.

    Opening a store does the same. Safe while other processes do it too. Raises ConfigError for a database of
    another program and for one of a newer version, Recoverable if the database is busy or away.
    """
    if is_postgres(url):
        before, where = postgres_server().prepare(url, BUSY_TIMEOUT_SECONDS).revision_before, without_password(url)
    else:
        path = sqlite.parse_url(url)
        before, where = sqlite.prepare(path, BUSY_TIMEOUT_SECONDS), str(path)
    if before == REVISIONS[-1]:
        return f"{where} has the present schema {before}"
    if before is None:
        return f"{where} was created with schema {REVISIONS[-1]}"
    return f"{where} was brought from schema {before} to {REVISIONS[-1]}"


class Counts(NamedTuple):
    """How much a store holds."""

    rollouts: dict[str, int]
    """By status."""
    attempts: int
    spans: int


def count_all(url: str, busy_timeout_seconds: float) -> Counts | None:
    """None where there is no store yet, or one that is not brought to this version yet.

    Adds up the counts that the store's writers keep, so it takes no longer for a million rollouts. Nothing is created
    or changed; raises as `check`.
    """
    if is_postgres(url):
        counts = postgres_server().read_counts(url, busy_timeout_seconds)
    else:
        counts = sqlite.read_counts(sqlite.parse_url(url), busy_timeout_seconds)
    if counts is None:
        return None
    rollouts = {status: counts.get(status, 0) for status in get_args(RolloutStatus)}
    return Counts(rollouts, counts.get("attempts", 0), counts.get("spans", 0))


def check(url: str) -> None:
    """Raises what `migrate` would, as far as it shows in advance. Nothing is created or changed."""
    if is_postgres(url):
        postgres_server().inspect(url, BUSY_TIMEOUT_SECONDS)
    else:
        sqlite.inspect(sqlite.parse_url(url), BUSY_TIMEOUT_SECONDS)
