"""A SQLite file shared by the tasks, threads and event loops of one process, and with other processes.

Writes go through one thread (see ``group_commit``), reads through a few connections of their own that never wait for
it. Before a fork every connection is closed, because SQLite loses track of its locks in a forked process; parent and
child then open their own when they next need one.
"""

from __future__ import annotations

import asyncio
import queue
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.base.errors import Fatal
from rollout_core.store.sql.database import Database, forget
from rollout_core.store.sql.dialect import SQLITE, Transaction
from rollout_core.store.sql.group_commit import GroupCommit, Hooks
from rollout_core.store.sql.sqlite_file import breaks_transaction, connect, explain, prepare

Result = TypeVar("Result")

NUM_READERS = 2
"""Two, so that a long query does not hold up short ones. More only fight for the interpreter's lock, which is let go at
each row: with four, 16 callers read spans at 0.6 of the speed."""
MAX_ROWS = 256
"""Most rows that one statement takes. The interpreter's lock is let go and fought for once a statement: beside a busy
thread updates one by one take twice to three times as long."""


class _Slot:
    """One connection, opened when it is first needed and used by one thread at a time."""

    def __init__(self, path: Path, busy_timeout_seconds: float) -> None:
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._connection: sqlite3.Connection | None = None
        self.lock = threading.Lock()
        self.generation = 0
        """How many connections there have been."""

    def __enter__(self) -> sqlite3.Connection:
        self.lock.acquire()
        try:
            if self._connection is None:
                self._connection = connect(self._path, self._busy_timeout_seconds)
                self.generation += 1
        except BaseException:
            self.lock.release()
            raise
        return self._connection

    def __exit__(self, *exception: object) -> None:
        self.lock.release()

    def drop(self) -> None:
        """Close the connection. The caller holds the lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Reading:
    """A connection as operations see it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def fetch(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters).fetchall()

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self.insert_many(sql, rows)

    def insert_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        changed, start, chunk = 0, 0, MAX_ROWS
        # Chunks of 256, 64, 16, 4 rows, so that there are few statements to prepare; what is left goes row by row.
        while chunk > 1:
            while len(rows) - start >= chunk and (statement := _many_rows(sql, chunk)):
                part = rows[start : start + chunk]
                changed += self._connection.execute(statement, [value for row in part for value in row]).rowcount
                start += chunk
            chunk //= 4
        if start < len(rows):
            changed += self._connection.executemany(sql, rows[start:]).rowcount
        return changed


@lru_cache(1024)
def _many_rows(sql: str, num_rows: int) -> str | None:
    """An INSERT of one row, or an UPDATE by key, as one for many; None for other statements."""
    if match := re.fullmatch(r"(INSERT .* VALUES )(\([^)]*\))(.*)", sql):
        return f"{match[1]}{', '.join([match[2]] * num_rows)}{match[3]}"
    if match := re.fullmatch(r"UPDATE (\w+) SET ((?:\w+ = \?(?:, )?)+) WHERE ((?:\w+ = \?(?: AND )?)+)", sql):
        places = count()
        changes, condition = (re.sub(r"\?", lambda _: f"given.p{next(places)}", part) for part in match.group(2, 3))
        columns = [f"p{place}" for place in range(next(places))]
        rows = ", ".join([f"({', '.join('?' * len(columns))})"] * num_rows)
        given = f"WITH given({', '.join(columns)}) AS (VALUES {rows})"
        return f"{given} UPDATE {match[1]} SET {changes} FROM given WHERE {condition}"  # noqa: S608 - our own statements
    return None


class _Writing(_Reading):
    """The writing connection, see ``group_commit.Session``. It holds its slot for as long as a transaction is open."""

    dialect = SQLITE

    def __init__(self, path: Path, slot: _Slot) -> None:
        self._path = path
        self._slot = slot

    def begin(self) -> None:
        self._connection = self._slot.__enter__()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._slot.__exit__()
            raise

    def commit(self, finished: Sequence[str]) -> None:
        self._connection.execute("COMMIT")
        self._slot.__exit__()

    def rollback(self) -> None:
        try:
            if self._connection.in_transaction:  # SQLite has rolled back by itself after some errors
                self._connection.execute("ROLLBACK")
        finally:
            self._slot.__exit__()

    def savepoint(self) -> None:
        self._connection.execute("SAVEPOINT part")

    def undo_part(self) -> None:
        self._connection.execute("ROLLBACK TO part")
        self._connection.execute("RELEASE part")

    def keep_part(self) -> None:
        self._connection.execute("RELEASE part")

    def breaks_transaction(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.Error) and breaks_transaction(error)

    def worth_repeating(self, error: Exception) -> bool:
        return False  # a busy file has been waited for

    def explain(self, error: Exception) -> Exception:
        return explain(error, self._path)


class _Writer(GroupCommit):
    """The writing thread. It starts with the first operation."""

    def __init__(self, path: Path, slot: _Slot, hooks: Hooks) -> None:
        super().__init__(str(path), hooks)
        self._session = _Writing(path, slot)
        self._path = path
        self._work_waits = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"store-writer-{self._path.name}", daemon=True)
            self._thread.start()
        self._work_waits.release()

    def close(self) -> None:
        """Finish what is waiting and end the thread. Later operations are refused."""
        with self._lock:
            self._closed = True
            self._work_waits.release()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            self._work_waits.acquire()
            group = self._take()
            if group:
                self._commit(self._session, group)
            elif self._closed:
                return


class SqliteDatabase(Database):
    """An open SQLite file. Raises ConfigError when made if the file is not fit to be one, see ``sqlite_file``."""

    def __init__(self, path: Path, hooks: Hooks, busy_timeout_seconds: float) -> None:
        self.path = path.absolute()
        self._hooks = hooks
        self._busy_timeout_seconds = busy_timeout_seconds
        prepare(self.path, busy_timeout_seconds)
        self._closed = False
        self._start()
        super().__init__()

    def _start(self) -> None:
        self._writer = _Slot(self.path, self._busy_timeout_seconds)
        self._reader_slots = [_Slot(self.path, self._busy_timeout_seconds) for _ in range(NUM_READERS)]
        self._free_readers: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._reader_slots:
            self._free_readers.put(slot)
        self._executor = ThreadPoolExecutor(NUM_READERS, thread_name_prefix=f"store-reader-{self.path.name}")
        self.commits = self._commits = _Writer(self.path, self._writer, self._hooks)

    async def read(self, operation: Callable[[Transaction], Result]) -> Result:
        return await self._in_thread(lambda: self._read(operation))

    async def foreign_version(self) -> tuple[int, int]:
        return await self._in_thread(self._foreign_version)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        forget(self)
        self._commits.close()
        self._executor.shutdown()
        for slot in [self._writer, *self._reader_slots]:
            with slot.lock:
                slot.drop()

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        if self._closed:
            raise Fatal(f"the store of {self.path} is closed; open it again with from_url")
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _read(self, operation: Callable[[Transaction], Result]) -> Result:
        slot = self._free_readers.get()
        try:
            with slot as connection:
                try:
                    connection.execute("BEGIN")
                    return operation(Transaction(_Reading(connection), SQLITE, self._hooks.clock()))
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        except (sqlite3.Error, UnicodeEncodeError, OverflowError) as error:
            raise explain(error, self.path) from error
        finally:
            self._free_readers.put(slot)

    def _foreign_version(self) -> tuple[int, int]:
        # Asked of the writing connection, because on that one our own commits do not count as changes.
        try:
            with self._writer as connection:
                return self._writer.generation, connection.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error as error:
            raise explain(error, self.path) from error

    def before_fork(self) -> None:
        """Wait until no connection is in use, and close them all."""
        self._writer.lock.acquire()
        self._writer.drop()
        for slot in self._reader_slots:
            slot.lock.acquire()
            slot.drop()

    def after_fork_in_parent(self) -> None:
        """Let the parent go on; connections are opened again as they are needed."""
        for slot in [self._writer, *self._reader_slots]:
            slot.lock.release()

    def after_fork_in_child(self) -> None:
        """Begin anew: the threads, and the callers they worked for, exist in the parent only."""
        self._start()
