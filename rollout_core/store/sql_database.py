"""A SQLite file shared by the tasks, threads and event loops of one process, and with other processes.

Writes go through one thread (``group_commit``), reads through a few connections of their own that never wait for it.
Before a fork every connection is closed, because SQLite loses track of its locks in a forked process; parent and child
then open their own when they next need one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollout_core.errors import Fatal
from rollout_core.store.group_commit import GroupCommit, Undo
from rollout_core.store.sql_dialect import SQLITE, Transaction
from rollout_core.store.sqlite_file import connect, explain, prepare

Result = TypeVar("Result")

NUM_READERS = 4


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


class Database:
    """An open SQLite file. Raises ConfigError when made if the file is not fit to be one, see ``sqlite_file``."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        busy_timeout_seconds: float,
        watchdog: Callable[[Transaction], None],
        on_finished: Callable[[Sequence[str]], None],
    ) -> None:
        self.path = path.absolute()
        self._clock = clock
        self._busy_timeout_seconds = busy_timeout_seconds
        self._watchdog = watchdog
        self._on_finished = on_finished
        prepare(self.path, busy_timeout_seconds)
        self._closed = False
        self._start()
        _open_databases.add(self)

    def _start(self) -> None:
        self._writer = _Slot(self.path, self._busy_timeout_seconds)
        self._reader_slots = [_Slot(self.path, self._busy_timeout_seconds) for _ in range(NUM_READERS)]
        self._free_readers: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._reader_slots:
            self._free_readers.put(slot)
        self._executor = ThreadPoolExecutor(NUM_READERS, thread_name_prefix=f"store-reader-{self.path.name}")
        self._commits = GroupCommit(
            self.path, self._writer, clock=self._clock, watchdog=self._watchdog, on_finished=self._on_finished
        )

    async def write(
        self, operation: Callable[[Transaction], Result], *, watched: bool = True, undo: Undo[Result] | None = None
    ) -> Result:
        """Run ``operation`` and return its result once it is on disk. See ``GroupCommit.run``."""
        return await self._commits.run(operation, watched=watched, undo=undo)

    async def read(self, operation: Callable[[Transaction], Result]) -> Result:
        """Run ``operation`` on a consistent snapshot that holds every write acknowledged so far."""
        return await self._in_thread(lambda: self._read(operation))

    async def foreign_version(self) -> tuple[int, int]:
        """A value that changes whenever another process has changed the file."""
        return await self._in_thread(self._foreign_version)

    def close(self) -> None:
        """Finish pending writes and close every connection. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        _open_databases.discard(self)
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
                    return operation(Transaction(connection, SQLITE, self._clock()))
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


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_forking: list[Database] = []


def _before_fork() -> None:
    _forking.extend(_open_databases)
    for database in _forking:
        database.before_fork()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop().after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
