"""A SQLite file as the store uses it: how it is opened, made, recognised, written, and what its errors mean.

A committed transaction is on disk: WAL with ``synchronous=FULL`` syncs the log at every commit. A file is taken to be
ours by its application id, and its schema by the revision it records.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RolloutError
from rollout_core.base.settings import without_password
from rollout_core.store.sql.database import COUNTS, REVISIONS, Database, known_revision, upgrade
from rollout_core.store.sql.dialect import SQLITE
from rollout_core.store.sql.group_commit import Hooks, Session

APPLICATION_ID = 0x524F4C4C
"""``ROLL`` in ASCII, in the file's header."""

LEAST_VERSION = (3, 33, 0)
"""For ``UPDATE ... FROM``, and statements of more than 999 variables."""

TURN_SECONDS = 0.01
"""How long a query waits for another one to end before it runs as well. Both fight for the interpreter's lock, which
is released at each row: at 16 callers, two queries at once take longer than one after the other."""
CHUNKS = (256, 64, 16, 4)
"""Rows that one statement takes, besides one for the last few: few sizes, so that there are few statements to prepare;
and many rows, because the interpreter's lock is released and taken once a statement. Next to a busy thread, updates
one by one take two to three times as long."""

_NOT_OURS = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_PASSING = {
    sqlite3.SQLITE_BUSY: "is held by another process",
    sqlite3.SQLITE_LOCKED: "is held by another process",
    sqlite3.SQLITE_FULL: "has no room left on its disk",
    sqlite3.SQLITE_IOERR: "could not be read or written",
    sqlite3.SQLITE_CANTOPEN: "could not be opened",
    sqlite3.SQLITE_NOMEM: "ran out of memory",
    sqlite3.SQLITE_INTERRUPT: "was interrupted",
    sqlite3.SQLITE_PROTOCOL: "is held by too many processes",
}


def parse_url(url: str) -> Path:
    """The file of a URL like ``sqlite:///relative.db`` or ``sqlite:////absolute.db``. Raises ConfigError for others."""
    scheme, separator, path = url.partition(":///")
    if not separator or scheme != "sqlite":
        raise ConfigError(
            f"database URL is {without_password(url)!r}; expected sqlite:///path/to/file.db or postgresql://user:password@host/database"
        )
    if not path or path == ":memory:" or "?" in path:
        raise ConfigError(
            f"database URL is {without_password(url)!r}; expected the path of a file after sqlite:///, without options"
        )
    return Path(path)


def connect(path: Path, busy_timeout_seconds: float) -> sqlite3.Connection:
    """A connection with every setting the store relies on. Transactions are begun and ended by hand."""
    connection = sqlite3.connect(
        path, timeout=busy_timeout_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        _write_ahead(connection, busy_timeout_seconds)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")  # 16 MB: each checkpoint syncs the file itself as well
        connection.execute("PRAGMA journal_size_limit = 67108864")
        # What undoes a part of a transaction stays in memory; a third of all writes went to a temporary file for it.
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -32000")  # 32 MB, however large the file grows
    except BaseException:
        connection.close()
        raise
    return connection


def _write_ahead(connection: sqlite3.Connection, busy_timeout_seconds: float) -> None:
    """Set the journal mode, which other connections to a new file may be doing at the same moment.

    Where two would wait for each other, SQLite refuses one of them at once, whatever its busy timeout.
    """
    deadline = time.monotonic() + busy_timeout_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.001, 0.02))  # so that those who wait do not go in step


def prepare(path: Path, busy_timeout_seconds: float) -> str | None:
    """Make sure ``path`` is a store of the present schema; the one it had, None if there was nothing yet.

    Raises ConfigError for a file that is not ours, is damaged, cannot be written, or comes from a newer version, and
    Recoverable if it is merely busy.
    """
    if sqlite3.sqlite_version_info < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(
            f"this Python has SQLite {sqlite3.sqlite_version}; expected {least} or later, use another one"
        )
    with _opening(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Looked at before anything is set: opening somebody else's database must not turn it into a WAL file.
        revision = inspect(path, busy_timeout_seconds)
        if revision == REVISIONS[-1]:
            return revision
        connection = connect(path, busy_timeout_seconds)
        try:
            return _upgrade(connection, path)
        finally:
            connection.close()


def inspect(path: Path, busy_timeout_seconds: float) -> str | None:
    """The schema revision of the store at ``path``, None if there is nothing; raises as `prepare`, creates nothing."""
    with _opening(path):
        if not path.exists():
            nearest = next(folder for folder in path.absolute().parents if folder.exists())
            if not nearest.is_dir() or not os.access(nearest, os.W_OK):
                raise ConfigError(f"{path} cannot be created: {nearest} is no folder, or may not be written")
            return None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{path} is read-only; the store needs to write it, change its permissions or the URL")
        connection = sqlite3.connect(path, timeout=busy_timeout_seconds, isolation_level=None)
        try:
            return _recognise(connection, path)
        finally:
            connection.close()


def read_counts(path: Path, busy_timeout_seconds: float) -> dict[str, int] | None:
    """The counts that are kept, by name; None for a file without the present schema. Raises as `inspect`."""
    if inspect(path, busy_timeout_seconds) != REVISIONS[-1]:
        return None
    with _opening(path), closing(sqlite3.connect(path, timeout=busy_timeout_seconds)) as connection:
        return dict(connection.execute(COUNTS).fetchall())


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if _primary_code(error) in _NOT_OURS:
            raise ConfigError(f"{path} is not a database of this store, or is damaged: {error}") from error
        if _primary_code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise ConfigError(f"{path} cannot be opened for writing: {error}") from error
        raise explain(error, path) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error}") from error


def explain(error: Exception, path: Path) -> Exception:
    """Our error for one that a statement raised, with that one as its cause; any other error as it is."""
    if isinstance(error, sqlite3.Error):
        explained = _translate(error, path)
    elif isinstance(error, (UnicodeEncodeError, OverflowError)):
        explained = ConfigError(f"a value cannot be stored: {error}")
    else:
        return error
    explained.__cause__ = error
    return explained


def _translate(error: sqlite3.Error, path: Path) -> RolloutError:
    """Recoverable if it may pass, else the kind that says what to do."""
    code = _primary_code(error)
    if code in _PASSING:
        return Recoverable(f"{path} {_PASSING[code]} ({error}); nothing of this call was stored, it can be repeated")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(
            f"{path} cannot be written any more: {error}; check its permissions and that it still exists"
        )
    if code == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
        return ConfigError(f"a value is too large for one row of {path}: {error}; keep it in the object store instead")
    if isinstance(error, (sqlite3.InterfaceError, sqlite3.ProgrammingError)):
        return ConfigError(
            f"a value of a kind that no column holds: {error}; ids, names and times are text and numbers"
        )
    return Fatal(f"{path} is damaged or was changed by another program: {error}; restore it from a copy")


def breaks_transaction(error: sqlite3.Error) -> bool:
    """Whether this error is the file's trouble, so that nothing of the transaction can be relied on."""
    return _primary_code(error) not in (
        None,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_RANGE,
        sqlite3.SQLITE_MISUSE,
    )


def _primary_code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _recognise(connection: sqlite3.Connection, path: Path) -> str | None:
    """The schema revision of a store, None for an empty file. Raises ConfigError for anything else."""
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    num_tables = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
    if application_id != APPLICATION_ID:
        if num_tables or application_id:
            raise ConfigError(f"{path} is a database of another program; give the store a file of its own")
        return None
    found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    return known_revision([revision for (revision,) in found], str(path))


def _upgrade(connection: sqlite3.Connection, path: Path) -> str | None:
    """Create the tables or bring them to the present; the revision they had."""
    # Imported here because only a new or an old file needs them, and SQLAlchemy takes a third of a second.
    from sqlalchemy import StaticPool, create_engine

    with create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool).connect() as upgrading:
        upgrading.exec_driver_sql("BEGIN IMMEDIATE")
        # Another process may have done it in the meantime.
        revision = _recognise(connection, path)
        if revision != REVISIONS[-1]:
            upgrade(upgrading)
            upgrading.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        upgrading.commit()
        return revision


class SqliteSession(Session):
    """A connection to the file."""

    dialect = SQLITE

    def __init__(self, path: Path, busy_timeout_seconds: float, turn: threading.Lock) -> None:
        """Of the sessions that share ``turn``, one reads at a time, but for those that have waited ``TURN_SECONDS``."""
        super().__init__()
        self._turn = turn
        self._has_turn = False
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._connection: sqlite3.Connection | None = None
        self._num_connections = 0
        self.version = (0, 0)
        """Changes when others have committed; this connection's own commits do not count."""

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self._path, self._busy_timeout_seconds)
            self._num_connections += 1
        return self._connection

    def fetch(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._connected().execute(sql, parameters).fetchall()

    def insert(self, table: str, columns: str, rows: Sequence[Sequence[Any]], conflict: str) -> int:
        return self._in_chunks(partial(_insert, table, columns, conflict), rows)

    def update(self, table: str, columns: str, keys: str, rows: Sequence[Sequence[Any]]) -> None:
        self._in_chunks(partial(_update, table, columns, keys), rows)

    def _in_chunks(self, statement: Callable[[int], str], rows: Sequence[Sequence[Any]]) -> int:
        """Run ``statement`` of so and so many rows until all rows are written; how many were changed."""
        execute = self._connected().execute
        if len(rows) == 1:
            return execute(statement(1), rows[0]).rowcount
        changed = start = 0
        for size in (*CHUNKS, len(rows) % CHUNKS[-1]):
            while 0 < size <= len(rows) - start:
                part = rows[start : start + size]
                changed += execute(statement(size), list(chain.from_iterable(part))).rowcount
                start += size
        return changed

    def run(self, sql: str) -> None:
        self._connected().execute(sql)

    def begin(self) -> None:
        self._connected().execute("BEGIN IMMEDIATE")
        self.look_for_changes()  # here too, because nobody else can while one transaction follows the other

    def begin_reading(self) -> None:
        self._has_turn = self._turn.acquire(timeout=TURN_SECONDS)
        self._connected().execute("BEGIN")

    def end_reading(self) -> None:
        try:
            self.rollback()
        finally:
            if self._has_turn:
                self._turn.release()
                self._has_turn = False

    def commit(self, finished: Sequence[str]) -> None:
        self._connected().execute("COMMIT")

    def rollback(self) -> None:
        if self._connection is not None and self._connection.in_transaction:  # after some errors SQLite has done so
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        if self._connection is not None:
            self._connection.interrupt()

    def look_for_changes(self) -> None:
        """Bring ``version`` up to date."""
        [(version,)] = self._connected().execute("PRAGMA data_version")
        self.version = self._num_connections, version

    def breaks_transaction(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.Error) and breaks_transaction(error)

    def worth_repeating(self, error: Exception) -> bool:
        return False  # a busy file has been waited for

    def explain(self, error: Exception) -> Exception:
        return explain(error, self._path)


@lru_cache(512)
def _insert(table: str, columns: str, conflict: str, num_rows: int) -> str:
    row = f"({', '.join('?' * len(columns.split(', ')))})"
    return f"INSERT INTO {table} ({columns}) VALUES {', '.join([row] * num_rows)} {conflict}"  # noqa: S608 - our names


@lru_cache(512)
def _update(table: str, columns: str, keys: str, num_rows: int) -> str:
    changes, conditions = columns.split(", "), keys.split(", ")
    if num_rows == 1:
        settings, condition = (
            ", ".join(f"{name} = ?" for name in changes),
            " AND ".join(f"{name} = ?" for name in conditions),
        )
        return f"UPDATE {table} SET {settings} WHERE {condition}"  # noqa: S608 - as above
    # A table of values has no names of its own for its columns.
    given = [f"p{place}" for place in range(len(changes) + len(conditions))]
    pairs = [f"{name} = given.{value}" for name, value in zip([*changes, *conditions], given, strict=True)]
    rows = ", ".join([f"({', '.join('?' * len(given))})"] * num_rows)
    return (
        f"WITH given({', '.join(given)}) AS (VALUES {rows}) UPDATE {table} SET {', '.join(pairs[: len(changes)])}"  # noqa: S608 - as above
        f" FROM given WHERE {' AND '.join(pairs[len(changes) :])}"
    )


class SqliteDatabase(Database[SqliteSession]):
    """An open SQLite file. Raises what ``prepare`` does when it is made."""

    NUM_WRITERS = 1
    NUM_READERS = 2  # so that a long query does not hold up short ones

    def __init__(self, path: Path, hooks: Hooks, busy_timeout_seconds: float) -> None:
        self.path = path.absolute()
        self._busy_timeout_seconds = busy_timeout_seconds
        prepare(self.path, busy_timeout_seconds)
        super().__init__(self.path.name, str(self.path), hooks)

    def _start(self) -> None:
        self._turn = threading.Lock()
        super()._start()

    def _session(self, *, writes: bool) -> SqliteSession:
        return SqliteSession(self.path, self._busy_timeout_seconds, self._turn)

    def before_fork(self) -> None:
        """Wait until no connection is in use, and close them all: SQLite would lose track of its locks in the child."""
        # Readers first: a thread that has a reader's lock may take the writer's too, see `foreign_version`.
        for session in [*self._readers, *self._writers]:
            session.lock.acquire()
            session.close()

    def after_fork_in_parent(self) -> None:
        """Let the threads continue; connections are opened again as they are needed."""
        for session in [*self._readers, *self._writers]:
            session.lock.release()

    async def foreign_version(self) -> tuple[int, int]:
        # Asked of the connection that writes, because on that one our own commits do not count as changes.
        writer = self._writers[0]

        def look(_: Session) -> tuple[int, int]:
            # A writer may wait long for a file that is held by another process, and reads must not wait with it.
            if writer.lock.acquire(blocking=False):
                try:
                    writer.look_for_changes()
                finally:
                    writer.lock.release()
            return writer.version

        return await self._in_reader(look)
