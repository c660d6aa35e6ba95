"""A PostgreSQL database shared by many processes: its sessions, and the notices that processes send each other.

Rollouts that finish are announced by NOTIFY in the transaction that finishes them.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple

import orjson
import psycopg
from blake3 import blake3
from psycopg import RawCursor, sql

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.settings import without_password
from rollout_core.store.sql.database import Database
from rollout_core.store.sql.dialect import POSTGRES
from rollout_core.store.sql.group_commit import Hooks, Session
from rollout_core.store.sql.postgres_server import (
    OTHERS_IN_THE_WAY,
    connect,
    explain,
    is_lost,
    prepare,
    unknown_outcome,
)

log = logging.getLogger(__name__)

BY_INDEX = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
"""Settings of connections that write. All that they look up is behind an index, and the server, which does not know how
few rows a parameter holds, would read whole tables for them; the more so with a plan from when those were small."""
INTERRUPT_SECONDS = 2.0
"""How long the server may take to accept that it should stop a statement."""
MAX_NAME_BYTES = 63
"""Longer names LISTEN cuts without a word, and pg_notify refuses."""
MAX_NOTICE_BYTES = 7_900
"""PostgreSQL takes notices below 8,000 bytes."""
MAX_STATEMENT_BYTES = 8_000_000
"""Most JSON of rows that one statement takes, if it is more than one row."""


class PostgresSession(Session):
    """A connection to the server. One that was lost while it lay idle is replaced unnoticed."""

    dialect = POSTGRES

    def __init__(
        self,
        url: str,
        open_connection: Callable[[], psycopg.Connection[Any]],
        channel: str,
        sender: str,
    ) -> None:
        """Rollouts that finish are announced on ``channel``, in notices that name their ``sender``."""
        super().__init__()
        self._url = url
        self._open_connection = open_connection
        self._channel = channel
        self._sender = sender
        self._connection: psycopg.Connection[Any] | None = None
        self._cursor: RawCursor[tuple[Any, ...]]

    def fetch(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        self._cursor.execute(sql.encode(), parameters)
        return self._cursor.fetchall() if self._cursor.description else []

    def run(self, sql: str) -> None:
        self._cursor.execute(sql.encode(), prepare=False)

    def insert(self, table: str, columns: str, rows: Sequence[Sequence[Any]], conflict: str) -> int:
        return self._write(_insert(table, columns, conflict), columns, rows)

    def update(self, table: str, columns: str, keys: str, rows: Sequence[Sequence[Any]]) -> None:
        self._write(_update(table, columns, keys), f"{columns}, {keys}", rows)

    def _write(self, statements: _Statements, columns: str, rows: Sequence[Sequence[Any]]) -> int:
        """Write rows of values for ``columns``; how many were changed."""
        if len(rows) == 1:
            return self._cursor.execute(statements.of_one, rows[0]).rowcount
        changed = 0
        for part in _json_parts(columns.split(", "), rows):
            changed += self._cursor.execute(statements.of_json, [part]).rowcount
        return changed

    def begin(self) -> None:
        self._begin("BEGIN")

    def begin_reading(self) -> None:
        self._begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _begin(self, sql: str) -> None:
        if self._connection is not None:
            try:
                return self.run(sql)
            except Exception as error:
                was_lost = self._connection.closed or is_lost(error)
                self.close()
                if not was_lost:
                    raise
        connection = self._connection = self._open_connection()
        self._cursor = RawCursor(connection)
        self.writer = connection.info.backend_pid % 64
        self.run(sql)

    def commit(self, finished: Sequence[str]) -> None:
        if finished:
            sql = "SELECT pg_notify($1, notice) FROM unnest($2::text[]) notice"
            self.fetch(sql, [self._channel, list(_notices(self._sender, finished))])
        try:
            self.run("COMMIT")
        except psycopg.Error as error:
            if not is_lost(error):
                raise
            self.close()
            raise unknown_outcome(error, self._url) from error
        if self._cursor.statusmessage != "COMMIT":
            raise Fatal(
                f"{without_password(self._url)} answered {self._cursor.statusmessage} to COMMIT; nothing was stored"
            )

    def rollback(self) -> None:
        self._end("ROLLBACK")

    def end_reading(self) -> None:
        self._end("COMMIT")  # after a ROLLBACK the driver forgets the statements it has prepared

    def _end(self, sql: str) -> None:
        if self._connection is not None:
            try:
                self.run(sql)
            except psycopg.Error:
                self.close()

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                connection.cancel_safe(timeout=INTERRUPT_SECONDS)

    def breaks_transaction(self, error: Exception) -> bool:
        return is_lost(error) or (isinstance(error, psycopg.Error) and error.sqlstate in ("40P01", "40001"))

    def worth_repeating(self, error: Exception) -> bool:
        return is_lost(error) or (isinstance(error, psycopg.Error) and error.sqlstate in OTHERS_IN_THE_WAY)

    def explain(self, error: Exception) -> Exception:
        return explain(error, self._url)


class _Statements(NamedTuple):
    of_one: bytes
    """With a parameter for each column."""
    of_json: bytes
    """Of any number of rows, which are one parameter: JSON objects by the names of the columns."""


@lru_cache(256)
def _insert(table: str, columns: str, conflict: str) -> _Statements:
    values = ", ".join(f"${place}" for place in range(1, len(columns.split(", ")) + 1))
    head = f"INSERT INTO {table} ({columns})"
    return _Statements(
        f"{head} VALUES ({values}) {conflict}".encode(),
        f"{head} SELECT {columns} FROM json_populate_recordset(NULL::{table}, $1::json) {conflict}".encode(),  # noqa: S608 - our own names
    )


@lru_cache(256)
def _update(table: str, columns: str, keys: str) -> _Statements:
    changed, found_by = columns.split(", "), keys.split(", ")
    changes = ", ".join(f"{name} = ${place}" for place, name in enumerate(changed, 1))
    condition = " AND ".join(f"{name} = ${place}" for place, name in enumerate(found_by, 1 + len(changed)))
    given_changes = ", ".join(f"{name} = given.{name}" for name in changed)
    given_condition = " AND ".join(f"{table}.{name} = given.{name}" for name in found_by)
    return _Statements(
        f"UPDATE {table} SET {changes} WHERE {condition}".encode(),  # noqa: S608 - as above
        f"UPDATE {table} SET {given_changes} FROM json_populate_recordset(NULL::{table}, $1::json) AS given"  # noqa: S608 - as above
        f" WHERE {given_condition}".encode(),
    )


def _json_parts(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """JSON arrays of these rows as objects, each of at most ``MAX_STATEMENT_BYTES`` unless one row is larger."""
    try:
        objects = [dict(zip(names, row, strict=True)) for row in rows]
        text = orjson.dumps(objects, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except TypeError as error:
        raise ConfigError(f"a value cannot be stored: {error}") from error
    if text.count(b"null") != sum(row.count(None) for row in rows):  # orjson writes it for NaN and infinities as well
        for row in rows:
            _check_finite(names, row)
    if len(text) > MAX_STATEMENT_BYTES and len(rows) > 1:
        half = len(rows) // 2
        yield from _json_parts(names, rows[:half])
        yield from _json_parts(names, rows[half:])
    else:
        yield text.decode()


def _check_finite(names: Sequence[str], row: Sequence[Any]) -> None:
    for name, value in zip(names, row, strict=True):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"a value cannot be stored: {name} is {value}; expected a finite number")


# Notices of what others have finished


def _channel_of(schema: str) -> str:
    """Where the stores of a schema are announced what has finished."""
    channel = f"rollout_{schema}"
    if len(channel.encode()) > MAX_NAME_BYTES:
        return f"rollout_{blake3(schema.encode()).hexdigest(length=16)}"
    return channel


def _notices(sender: str, rollout_ids: Sequence[str]) -> Iterator[str]:
    """JSON lists of these ids behind their sender, each short enough for one notice.

    A process of an older version takes the sender for one more id, of which it knows nothing.
    """
    part = [sender]
    num_bytes = start = len(sender) + 6
    for rollout_id in dict.fromkeys(rollout_ids):
        size = len(json.dumps(rollout_id)) + 2
        if len(part) > 1 and num_bytes + size > MAX_NOTICE_BYTES:
            yield json.dumps(part)
            part, num_bytes = [sender], start
        part.append(rollout_id)
        num_bytes += size
    if len(part) > 1:
        yield json.dumps(part)


class _Listener:
    """A connection that hears notices, and the thread that waits for them, until it is stopped or cut."""

    def __init__(
        self, connection: psycopg.Connection[Any], channel: str, hear: Callable[[psycopg.Notify], Any]
    ) -> None:
        self._connection = connection
        self._hear = hear
        self._stopping, self._stop = socket.socketpair()
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._thread = threading.Thread(target=self._run, name="store-listener", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        with (
            suppress(psycopg.Error, OSError),
            self._stopping,
            self._connection as connection,
            DefaultSelector() as selector,
        ):
            selector.register(connection, EVENT_READ)
            stopping = selector.register(self._stopping, EVENT_READ)
            while True:
                for notice in connection.notifies(timeout=0):
                    self._hear(notice)
                if stopping in [key for key, _ in selector.select()]:
                    return

    def stop(self) -> None:
        """End the thread, which closes its connection."""
        with self._stop:
            self._stop.shutdown(socket.SHUT_RDWR)  # to close it would do nothing while a forked child has it open
        self._thread.join()


_of_parents: list[object] = []
"""Connections that a forked child has from its parents. The driver warns when an open connection is forgotten."""


class PostgresDatabase(Database[PostgresSession]):
    """A PostgreSQL database, or the schema of one that the URL's ``search_path`` names. Raises as ``prepare``."""

    NUM_WRITERS = 2  # while one commits, or waits for a lock, the other runs the next transaction
    NUM_READERS = 4

    def __init__(self, url: str, hooks: Hooks, busy_timeout_seconds: float) -> None:
        self.url = url
        self._busy_timeout_seconds = busy_timeout_seconds
        self._channel = _channel_of(prepare(url, busy_timeout_seconds).schema)
        super().__init__("postgres", without_password(url), hooks)

    def _start(self) -> None:
        # Not the server's process ids: it gives them out anew after a restart, perhaps to others.
        self._sender = secrets.token_hex(8)
        self._listener: _Listener | None = None
        self._num_listeners = 0
        self._listening = threading.Lock()
        super()._start()

    def after_fork_in_child(self) -> None:
        """Begin anew. The driver leaves alone at the server what another process has connected."""
        _of_parents.append((self._writers, self._readers, self._listener))
        super().after_fork_in_child()

    def _session(self, *, writes: bool) -> PostgresSession:
        open_connection = partial(connect, self.url, self._busy_timeout_seconds, BY_INDEX if writes else {})
        return PostgresSession(self.url, open_connection, self._channel, self._sender)

    async def foreign_version(self) -> int:
        return await self._in_reader(lambda _: self._listen())

    def _listen(self) -> int:
        """See to it that other processes' notices arrive; how often that had to be begun anew."""
        with self._listening:
            if self._listener is not None and not self._listener.is_alive:
                self._listener.stop()
                self._listener = None
            if self._listener is None:
                connection = connect(self.url, self._busy_timeout_seconds)
                self._listener = _Listener(connection, self._channel, self._hear)
                self._num_listeners += 1
            return self._num_listeners

    def _hear(self, notice: psycopg.Notify) -> None:
        try:
            finished = list(json.loads(notice.payload))
            if self._sender not in finished:  # our own waiters were woken at the commit
                self._hooks.on_finished(finished)
        except (ValueError, TypeError):
            log.warning("%s: a notice on %s is not of this store: %.80r", self._where, self._channel, notice.payload)

    def close(self) -> None:
        super().close()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
