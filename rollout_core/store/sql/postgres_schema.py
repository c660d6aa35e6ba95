"""The tables of a store in a PostgreSQL database: recognised, created, upgraded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_core.base.errors import ConfigError
from rollout_core.base.secrets import without_password
from rollout_core.store.sql.postgres_server import DRIVER_ERRORS, connect, explain
from rollout_core.store.sql.schema import REVISIONS, known_revision, upgrade

if TYPE_CHECKING:
    from sqlalchemy import Connection

UPGRADE_LOCK = 0x524F4C4C
"""``ROLL`` in ASCII: the advisory lock of whoever creates or upgrades the tables."""
_SCHEMA = "SELECT current_schema()"
_TABLES = "SELECT table_name::text FROM information_schema.tables WHERE table_schema = current_schema()"
_REVISIONS = "SELECT version_num::text FROM alembic_version"


class Prepared(NamedTuple):
    """What was found in a database, before it was brought to the present schema."""

    schema: str
    """The PostgreSQL schema that the tables are in."""
    revision_before: str | None
    """The revision that the tables had, None if there were none."""


async def prepare(url: str, busy_timeout_seconds: float) -> Prepared:
    """Make sure that the database at ``url`` is a store of the present schema.

    Raises ConfigError for a database of another program or of a newer version, and what ``explain`` makes of errors.
    """
    found = await inspect(url, busy_timeout_seconds)
    if found.revision_before == REVISIONS[-1]:
        return found
    return found._replace(revision_before=await _upgrade(url, busy_timeout_seconds))


async def inspect(url: str, busy_timeout_seconds: float) -> Prepared:
    """Look at the database as `prepare` does, with its errors, and leave it as it is."""
    connection = await connect(url, busy_timeout_seconds)
    try:
        schema = await connection.fetchval(_SCHEMA)
        if schema is None:
            raise ConfigError(
                f"{without_password(url)}: the schema that search_path names does not exist; create it first"
            )
        tables = {row[0] for row in await connection.fetch(_TABLES)}
        found = [row[0] for row in await connection.fetch(_REVISIONS)] if "alembic_version" in tables else []
        return Prepared(schema, _recognise(tables, found, without_password(url)))
    except DRIVER_ERRORS as error:
        raise explain(error, url) from error
    finally:
        await connection.close()


def _recognise(tables: set[str], revisions: Sequence[str], where: str) -> str | None:
    """The schema revision of a store, None if there are no tables. Raises ConfigError for anything else."""
    if not tables:
        return None
    if not {"alembic_version", "rollout_payloads"} <= tables:
        raise ConfigError(
            f"{where} holds tables of another program; give the store a database of its own, or a schema of its own by "
            "?search_path=NAME"
        )
    return known_revision(revisions, where)


async def _upgrade(url: str, busy_timeout_seconds: float) -> str | None:
    """Create the tables or bring them to the present; the revision they had."""
    from sqlalchemy import NullPool
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.ext.asyncio import create_async_engine

    async def open_connection() -> Any:
        return await connect(url, busy_timeout_seconds)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=open_connection, poolclass=NullPool)
    try:
        async with engine.begin() as upgrading:
            return await upgrading.run_sync(_upgrade_once, without_password(url))
    except DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        raise explain(cause, url) if isinstance(cause, Exception) else error from error


def _upgrade_once(connection: Connection, where: str) -> str | None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})")
    # Another process may have done it in the meantime.
    tables = _first_column(connection, _TABLES)
    revision = _recognise(set(tables), _first_column(connection, _REVISIONS) if tables else [], where)
    if revision != REVISIONS[-1]:
        upgrade(connection)
    return revision


def _first_column(connection: Connection, sql: str) -> list[str]:
    return [row[0] for row in connection.exec_driver_sql(sql)]
