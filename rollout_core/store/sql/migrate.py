"""A store's database brought to the present schema. A new one starts empty and goes through all versions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollout_core.base.secrets import without_password
from rollout_core.store.sql import sqlite_file
from rollout_core.store.sql.database_urls import is_postgres
from rollout_core.store.sql.schema import REVISIONS

Result = TypeVar("Result")

BUSY_TIMEOUT_SECONDS = 30.0
"""How long an upgrade waits for others to finish writing."""


def migrate(url: str) -> str:
    """Create the store's tables at ``url`` or bring them to the present version; what was done, in a line.

    Opening a store does the same. Safe beside other processes that do it too. Raises ConfigError for a database of
    another program and for one of a newer version, Recoverable if the database is busy or away.
    """
    before, where = _prepare(url)
    if before == REVISIONS[-1]:
        return f"{where} has the present schema {before}"
    if before is None:
        return f"{where} was created with schema {REVISIONS[-1]}"
    return f"{where} was brought from schema {before} to {REVISIONS[-1]}"


def check(url: str) -> None:
    """Raises what `migrate` would, as far as it shows in advance. Nothing is created or changed."""
    if is_postgres(url):
        from rollout_core.store.sql.postgres_schema import inspect

        _run(inspect(url, BUSY_TIMEOUT_SECONDS))
    else:
        sqlite_file.inspect(sqlite_file.parse_url(url), BUSY_TIMEOUT_SECONDS)


def _prepare(url: str) -> tuple[str | None, str]:
    """Do it; the version there was before, None for nothing, and the database in words."""
    if is_postgres(url):
        from rollout_core.store.sql.postgres_schema import prepare

        prepared = _run(prepare(url, BUSY_TIMEOUT_SECONDS))
        return prepared.revision_before, without_password(url)
    path = sqlite_file.parse_url(url)
    return sqlite_file.prepare(path, BUSY_TIMEOUT_SECONDS), str(path)


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, in a thread of its own: the caller's may be running an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
