"""A database as the SQL store sees it, open for the tasks, threads and event loops of one process.

Writes go through ``group_commit``, reads through connections of their own that never wait for it. A forked child opens
connections of its own, because on those of its parent it would speak in its parent's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.group_commit import Batch, GroupCommit, Hooks, Session, SessionThreads, Undo

if TYPE_CHECKING:
    from sqlalchemy import Connection


Item = TypeVar("Item")
Result = TypeVar("Result")
SessionT = TypeVar("SessionT", bound=Session)


class _Read:
    """An operation that a caller waits for."""

    def __init__(self, operation: Callable[[Session], Any], future: asyncio.Future[Any]) -> None:
        self.operation = operation
        self.future = future
        self.is_dropped = False
        """Whether nobody wants the result any more."""
        self._session: Session | None = None
        self._guard = threading.Lock()
        """Held to interrupt the session, and to give it up: what it does next is not interrupted."""

    def begin(self, session: Session) -> bool:
        """Note where it runs; whether it is to run at all."""
        self._session = session  # before the look: `drop` does it the other way round, so one of them sees the other
        if self.is_dropped:
            self.end()
        return not self.is_dropped

    def end(self) -> None:
        """Note that it no longer runs."""
        with self._guard:
            self._session = None

    def drop(self) -> None:
        """Keep it from running, or have it stopped without waiting for that."""
        self.is_dropped = True
        if self._session is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: then it runs to its end
                threading.Thread(target=self.stop, name="store-interrupt", daemon=True).start()

    def stop(self) -> None:
        """Interrupt it until it has ended."""
        seconds = 0.01
        while self._session is not None:
            with self._guard:
                if self._session is not None:
                    self._session.interrupt()
            time.sleep(seconds)  # again, because between two statements there is nothing to interrupt
            seconds = min(2 * seconds, 1.0)


class Database(ABC, Generic[SessionT]):
    """An open database; its connections are opened when they are needed. Operations see it as a ``Transaction``."""

    NUM_WRITERS: int
    NUM_READERS: int

    def __init__(self, name: str, where: str, hooks: Hooks) -> None:
        """``name`` is that of its threads; ``where`` names it in errors, without secrets."""
        self._name = name
        self._where = where
        self._hooks = hooks
        self._closed = False
        self._start()
        _open_databases.add(self)

    def _start(self) -> None:
        self._writers = [self._session(writes=True) for _ in range(self.NUM_WRITERS)]
        self._readers = [self._session(writes=False) for _ in range(self.NUM_READERS)]
        self._commits = GroupCommit(f"store-writer-{self._name}", self._where, self._writers, self._hooks)
        self._reads = SessionThreads[_Read](f"store-reader-{self._name}", self._where, self._readers, _answer)
        self._unanswered: set[_Read] = set()

    @abstractmethod
    def _session(self, *, writes: bool) -> SessionT:
        """A connection that is not yet open, for transactions that write or that read."""

    async def write(
        self, operation: Callable[[Transaction], Result], *, watched: bool = True, undo: Undo[Result] | None = None
    ) -> Result:
        """Run ``operation`` and return its result once it is on disk. See ``GroupCommit.run``."""

        def batch(tx: Transaction, items: Sequence[None]) -> list[Result]:
            return [operation(tx)]

        [result] = await self._commits.run(batch, [None], watched=watched, undo=undo)
        return result

    async def write_batch(
        self,
        batch: Batch[Item, Result],
        items: Sequence[Item],
        *,
        watched: bool = True,
        undo: Undo[Result] | None = None,
    ) -> Sequence[Result]:
        """``write`` of an operation on many items. What concurrent callers give to the same function is run as one."""
        return await self._commits.run(batch, items, watched=watched, undo=undo)

    async def read(self, operation: Callable[[Transaction], Result]) -> Result:
        """Run ``operation`` on a consistent snapshot that holds every write acknowledged so far."""

        def run(session: Session) -> Result:
            try:
                session.begin_reading()
                return operation(Transaction(session, session.dialect, self._hooks.clock()))
            finally:
                session.end_reading()

        return await self._in_reader(run)

    async def _in_reader(self, operation: Callable[[Session], Result]) -> Result:
        """Run ``operation`` in one of the threads that read. A connection that was lost is replaced once.

        If the caller is cancelled, the database stops what it does for it.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        read = _Read(operation, future)
        self._unanswered.add(read)
        try:
            self._reads.submit(read)
            return await future
        except asyncio.CancelledError:
            read.drop()
            raise
        finally:
            self._unanswered.discard(read)

    @abstractmethod
    async def foreign_version(self) -> Any:
        """A value that changes when others may have finished rollouts without ``on_finished`` being called."""

    def close(self) -> None:
        """Finish pending writes, and reads for a while, and close every connection. Harmless when repeated."""
        if not self._closed:
            self._closed = True
            _open_databases.discard(self)
            self._commits.threads.close()
            self._reads.close(self._stop_reads)

    def _stop_reads(self) -> None:
        reads = self._unanswered.copy()
        for read in reads:
            read.is_dropped = True
        for read in reads:
            read.stop()

    def before_fork(self) -> None:
        """Prepare for a fork: nothing to do for connections that a child may leave alone."""

    def after_fork_in_parent(self) -> None:
        """Undo what ``before_fork`` did."""

    def after_fork_in_child(self) -> None:
        """Begin anew: the threads, and the callers they worked for, exist in the parent only."""
        self._start()


def _answer(session: Session, read: _Read) -> None:
    """Do what a caller of ``Database._in_reader`` waits for."""
    result = error = None
    try:
        if not read.begin(session):
            raise _closed()
        try:
            result = read.operation(session)
        except Exception as first:
            if read.is_dropped:
                raise _closed() from first
            if not session.worth_repeating(first):
                raise
            result = read.operation(session)
        finally:
            read.end()
            if read.is_dropped:
                session.close()  # a server may stop what runs on it a little later than asked
    except Exception as raised:  # noqa: BLE001 - the thread must outlive it, and the caller must hear of it
        error = session.explain(raised)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        read.future.get_loop().call_soon_threadsafe(_settle, read.future, result, error)


def _closed() -> Fatal:
    return Fatal("the store was closed before it could answer; open it again with from_url")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


_open_databases: weakref.WeakSet[Database[Any]] = weakref.WeakSet()
_forking: list[Database[Any]] = []
_one_forks = threading.Lock()  # another thread that forks meanwhile would wait for the same sessions' locks for ever


def _before_fork() -> None:
    _one_forks.acquire()
    _forking.extend(_open_databases)
    for database in _forking:
        database.before_fork()


def _after_fork_in_parent() -> None:
    try:
        while _forking:
            _forking.pop().after_fork_in_parent()
    finally:
        _one_forks.release()


def _after_fork_in_child() -> None:
    try:
        while _forking:
            _forking.pop().after_fork_in_child()
    finally:
        _one_forks.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# Versions of the schema: Alembic's, in ``migrations``

REVISIONS = ("0001", "0002", "0003", "0004")
"""Every version there has been, the present one last."""
COUNTS = "SELECT name, CAST(SUM(count) AS BIGINT) FROM counts GROUP BY name"
"""Of rollouts by status, of attempts, and of spans, without reading any of them."""

_alembic_lock = threading.Lock()  # Alembic keeps the upgrade under way in a global


def known_revision(found: Sequence[str], where: str) -> str:
    """The version that a database of ours records. Raises ConfigError if this program does not know it."""
    if len(found) == 1 and found[0] in REVISIONS:
        return found[0]
    raise ConfigError(
        f"{where} has schema revision {', '.join(found) or 'none'}, this version of rollout knows {REVISIONS[-1]}; "
        "it was written by a newer version, use that one"
    )


def upgrade(connection: Connection) -> None:
    """Bring the database to the present version, in the transaction under way. The caller locks and commits."""
    # Imported here because only a database that is not at the present version needs it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    with _alembic_lock:
        command.upgrade(config, "head")
