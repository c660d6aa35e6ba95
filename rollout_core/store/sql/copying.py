"""A store as a whole copied into another database, such as from SQLite to PostgreSQL or back.

Rows are read in the order of their keys, a part at a time. A part that the other database has already is compared, one
that it has not is written in one transaction; so a copy that was killed continues where it was. Nothing there is ever
changed or deleted: a row that is not the source's ends the copy. It is done once a whole pass has found nothing to do,
which reads every row of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    NullPool,
    StaticPool,
    Table,
    create_engine,
    func,
    insert,
    select,
    text,
    tuple_,
)
from sqlalchemy.exc import DBAPIError

from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import without_password
from rollout_core.store.sql import sqlite
from rollout_core.store.sql.by_url import BUSY_TIMEOUT_SECONDS, count_all, is_postgres, migrate, postgres_server
from rollout_core.store.sql.dialect import POSTGRES, SQLITE
from rollout_core.store.sql.tables import metadata

PART_ROWS = 500
LEASES = "leases"
"""A table of what running processes hold: none of them may run during a copy, and new ones take leases of their own."""
CHANGES = "changes"
"""A table of what was changed lately, for those who watch: the copy's watchers begin anew."""
COUNTED = "counts"
"""A table of sums of what the others hold, which each process keeps in rows of its own."""
_PASSES = 4
_SHOWN_LEASES = 3

OnPart = Callable[[str, int], None]
"""Called with a table's name and how many rows were written, for each part."""


@dataclass
class Copied:
    """What a copy did."""

    rows: dict[str, int] = field(default_factory=dict)
    """Of each table that was copied; both databases have them."""
    written: int = 0
    """Rows that this call wrote; the others were there."""
    under_way: int = 0
    """Rollouts that somebody had begun and not ended when they were copied."""


def copy_store(source: str, target: str, on_part: OnPart | None = None) -> Copied:
    """Copy the store at the database URL ``source`` into the database at ``target``, whose tables are made if need be.

    Raises ConfigError where ``source`` has no store of the present schema or somebody holds leases in it, where
    ``target`` holds rows of its own, and where ``source`` is written to meanwhile; Recoverable where a database is busy
    or away.
    """
    if count_all(source, BUSY_TIMEOUT_SECONDS) is None:
        raise ConfigError(
            f"{without_password(source)} has no store of this version; give the database of one, and bring an older "
            "one up by `rollout store migrate --database URL`"
        )
    if _place(source) == _place(target):
        raise ConfigError(f"{without_password(source)} is both where the store is and where it is to go")
    migrate(target)
    copied = Copied()
    with _open(source) as reading, _open(target) as writing:
        _refuse_leases(reading, source)
        _refuse_leases(writing, target)
        pairs = _Pair(reading, writing, without_password(target), on_part or (lambda table, rows: None))
        tables = [table for table in metadata.sorted_tables if table.name not in (LEASES, CHANGES, COUNTED)]
        for _ in range(_PASSES):
            found = {table.name: pairs.copy(table) for table in tables}
            copied.rows = {name: rows for name, (rows, _) in found.items()}
            written = sum(written for _, written in found.values())
            copied.written += written
            if not written:
                break
        else:
            raise ConfigError(
                f"{without_password(source)} is being written to; end what uses it, then run the copy again, which "
                "continues from here"
            )
        _refuse_leases(reading, source)  # once more: somebody may have begun meanwhile
        copied.under_way = _under_way(writing)
        _set_counts(reading, writing)
        _go_on_counting(writing)
    return copied


def _place(url: str) -> str:
    return url if is_postgres(url) else str(sqlite.parse_url(url).resolve())


@contextmanager
def _open(url: str) -> Iterator[Engine]:
    """The database, with errors in the words of the store."""
    if is_postgres(url):
        server = postgres_server()

        def explain(error: Exception) -> Exception:
            return server.explain(error, url)

        engine = create_engine(
            "postgresql+psycopg://",
            creator=lambda: server.connect(url, BUSY_TIMEOUT_SECONDS, autocommit=False),
            poolclass=NullPool,
        )
    else:
        path = sqlite.parse_url(url)

        def explain(error: Exception) -> Exception:
            return sqlite.explain(error, path)

        connection = sqlite.connect(path, BUSY_TIMEOUT_SECONDS)
        engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    try:
        yield engine
    except DBAPIError as error:
        raise explain(error.orig) if isinstance(error.orig, Exception) else error from error
    finally:
        engine.dispose()


@contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    """One that commits at the end of the block; SQLite's connections begin theirs by hand."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection
        connection.commit()


def _refuse_leases(engine: Engine, url: str) -> None:
    leases = metadata.tables[LEASES]
    clock = text((POSTGRES if engine.dialect.name == "postgresql" else SQLITE).clock)
    with engine.connect() as connection:
        held = connection.scalars(select(leases.c.name).where(leases.c.expires_at > clock).order_by("name")).all()
    if held:
        more = f" and {len(held) - _SHOWN_LEASES} more" if len(held) > _SHOWN_LEASES else ""
        raise ConfigError(
            f"{without_password(url)} is in use: {', '.join(held[:_SHOWN_LEASES])}{more}; let runs, servers and "
            "workers end first, or wait until the leases of killed ones have run out"
        )


@dataclass(frozen=True)
class _Pair:
    """The two databases of a copy."""

    source: Engine
    target: Engine
    where: str
    """The target, for people."""
    on_part: OnPart

    def copy(self, table: Table) -> tuple[int, int]:
        """Bring the target's table to the source's: how many rows both have, and how many of them were written now."""
        rows = written = 0
        last: Sequence[Any] | None = None
        for part in self._parts(table):
            new = self._write(table, part, last)
            rows, written, last = rows + len(part), written + new, _key(table, part[-1])
            self.on_part(table.name, new)
        with self.target.connect() as connection:
            self._refuse(table, connection.execute(_beyond(table, last).limit(1)).all())
            there = connection.scalar(select(func.count()).select_from(table))
        if there != rows:
            raise ConfigError(f"{self.where} has {there} rows of {table.name}, where {rows} were copied; {_EMPTY}")
        return rows, written

    def _parts(self, table: Table) -> Iterator[Sequence[Any]]:
        """All rows of the source, by key."""
        last: Sequence[Any] | None = None
        while True:
            with self.source.connect() as connection:
                part = connection.execute(_beyond(table, last).limit(PART_ROWS)).all()
            if not part:
                return
            yield part
            last = _key(table, part[-1])

    def _write(self, table: Table, part: Sequence[Any], after: Sequence[Any] | None) -> int:
        """Write those of the part that the target does not have; how many."""
        up_to = _beyond(table, after).where(_keys(table) <= tuple_(*_key(table, part[-1])))
        with _transaction(self.target) as connection:
            known = {_key(table, row): row for row in connection.execute(up_to)}
            new = [row for row in part if _key(table, row) not in known]
            expected = {_key(table, row): row for row in part}
            self._refuse(table, [row for key, row in known.items() if expected.get(key) != row])
            if new:
                connection.execute(insert(table), [dict(row._mapping) for row in new])
        return len(new)

    def _refuse(self, table: Table, rows: Sequence[Any]) -> None:
        """Raise ConfigError for rows of the target that are not the source's."""
        if rows:
            key = ", ".join(map(str, _key(table, rows[0])))
            raise ConfigError(
                f"{self.where} has another row {key} of {table.name} than the store to be copied; {_EMPTY}"
            )


_EMPTY = "it is in use already, or what was being copied has changed since; give an empty database"


def _keys(table: Table) -> Any:
    return tuple_(*table.primary_key.columns)


def _key(table: Table, row: Any) -> tuple[Any, ...]:
    return tuple(row._mapping[column.name] for column in table.primary_key.columns)


def _beyond(table: Table, last: Sequence[Any] | None) -> Any:
    """Rows by key, from the first one after the key ``last``."""
    rows = select(*table.columns).order_by(*table.primary_key.columns)
    return rows if last is None else rows.where(_keys(table) > tuple_(*last))


def _under_way(engine: Engine) -> int:
    rollouts = metadata.tables["rollouts"]
    with engine.connect() as connection:
        begun = select(func.count()).where(rollouts.c.status.in_(["preparing", "running"]))
        return connection.scalar(begun) or 0


def _set_counts(source: Engine, target: Engine) -> None:
    counts = metadata.tables[COUNTED]
    with source.connect() as connection:
        sums = connection.execute(select(counts.c.name, func.sum(counts.c.count)).group_by(counts.c.name)).all()
    with _transaction(target) as connection:
        connection.execute(counts.delete())
        connection.execute(insert(counts), [{"name": name, "writer": 0, "count": int(count)} for name, count in sums])


def _go_on_counting(engine: Engine) -> None:
    """Have a server that counts by sequences go on after the highest number of each; SQLite does so anyway."""
    if engine.dialect.name != "postgresql":
        return
    counted = {"queue_positions": ("rollouts", "queue_position"), "resources_changes": ("resources", "change_number")}
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            named = {"table": table.name, "column": "key"}
            owned = "key" in table.c and connection.scalar(
                text("SELECT pg_get_serial_sequence(:table, :column)"), named
            )
            if owned:
                counted[owned] = (table.name, "key")
        for sequence, (table, column) in counted.items():
            highest = connection.scalar(select(func.max(metadata.tables[table].c[column])))
            if highest is not None:
                where = {"sequence": sequence, "highest": highest}
                connection.execute(text("SELECT setval(CAST(:sequence AS regclass), :highest)"), where)
