"""One thread that writes for everybody: concurrent calls share a transaction, and so one sync to disk.

Callers hand in operations and wait. The thread takes all that are waiting, runs each in a savepoint of its own inside
one transaction, commits once, and only then lets the callers go on: what was acknowledged is on disk. An operation that
fails undoes itself alone. If the transaction itself fails (disk full, for one), every operation in it is run again by
itself, so that only those that really fail are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollout_core.errors import Fatal, RolloutError
from rollout_core.store.sql_dialect import SQLITE, Transaction
from rollout_core.store.sqlite_file import breaks_transaction, explain

Result = TypeVar("Result")
Undo = Callable[[Transaction, Result], object]

MAX_GROUP = 256
"""Most operations of one transaction. Bounds how long another process waits for its turn."""


@dataclass(eq=False)
class _Job(Generic[Result]):
    """An operation that a caller waits for."""

    operation: Callable[[Transaction], Result]
    watched: bool
    future: asyncio.Future[Result]
    taken: bool = False
    """Whether the thread has it, so that it can no longer be withdrawn."""
    result: Any = None
    error: Exception | None = None
    finished: list[str] = field(default_factory=list)


class GroupCommit:
    """The writing thread of one store in one process. It starts with the first operation."""

    def __init__(
        self,
        path: Path,
        writer: AbstractContextManager[sqlite3.Connection],
        *,
        clock: Callable[[], float],
        watchdog: Callable[[Transaction], None],
        on_finished: Callable[[Sequence[str]], None],
    ) -> None:
        self._path = path
        self._writer = writer
        self._clock = clock
        self._watchdog = watchdog
        self._on_finished = on_finished
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(
        self, operation: Callable[[Transaction], Result], *, watched: bool, undo: Undo[Result] | None = None
    ) -> Result:
        """Run ``operation`` in the next transaction, after the watchdog if ``watched``; its result once it is on disk.

        If the caller is cancelled before the operation starts, it never runs. After that it does; then ``undo`` takes
        its result back, and the cancellation waits for that.
        """
        job = _Job(operation, watched, asyncio.get_running_loop().create_future())
        self._submit(job)
        try:
            return await (job.future if undo is None else asyncio.shield(job.future))
        except asyncio.CancelledError:
            if not self._withdraw(job) and undo is not None:
                with contextlib.suppress(RolloutError):
                    result = await job.future
                    await self.run(lambda tx: undo(tx, result), watched=False)
            raise

    def close(self) -> None:
        """Finish what is waiting and end the thread. Later operations are refused."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _submit(self, job: _Job[Any]) -> None:
        with self._lock:
            if self._closed:
                raise Fatal(f"the store of {self._path} is closed; open it again with from_url")
            # Inside the lock, so that nothing gets behind the None that ends the thread.
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"store-writer-{self._path.name}", daemon=True)
                self._thread.start()

    def _withdraw(self, job: _Job[Any]) -> bool:
        """Keep a job from running if it has not started."""
        with self._lock:
            if not job.taken:
                job.operation, job.watched = _nothing, False
            return not job.taken

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            group = [job]
            while len(group) < MAX_GROUP and not self._jobs.empty():
                job = self._jobs.get_nowait()
                if job is None:
                    break
                group.append(job)
            self._commit(group)
            if job is None:
                return

    def _commit(self, group: list[_Job[Any]]) -> None:
        with self._lock:
            for job in group:
                job.taken = True
        try:
            with self._writer as connection:
                self._transact(connection, group)
        except sqlite3.Error as error:  # there is no connection
            self._fail(group, error)
        finished = [rollout_id for job in group for rollout_id in job.finished]
        if finished:
            self._on_finished(finished)
        self._deliver(group)

    def _transact(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        """Run the group in one transaction, or each by itself if that fails. Errors end up in the jobs."""
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            self._fail(group, error)
            return
        try:
            self._run_jobs(connection, group)
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - the thread must outlive it, and the callers must hear of it
            # SQLite has rolled back by itself after some errors.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(group) == 1:
                self._fail(group, error)
            else:
                for job in group:
                    self._transact(connection, [job])

    def _run_jobs(self, connection: sqlite3.Connection, group: list[_Job[Any]]) -> None:
        watched = False
        for job in group:
            job.result, job.error, job.finished = None, None, []
            if job.watched and not watched:
                watched = True
                tx = Transaction(connection, SQLITE, self._clock())
                self._watchdog(tx)
                job.finished += tx.finished
            connection.execute("SAVEPOINT job")
            tx = Transaction(connection, SQLITE, self._clock())
            try:
                job.result = job.operation(tx)
                job.finished += tx.finished
            except Exception as error:
                if isinstance(error, sqlite3.Error) and breaks_transaction(error):
                    raise
                job.error = explain(error, self._path)
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")

    def _fail(self, group: Sequence[_Job[Any]], error: Exception) -> None:
        for job in group:
            job.result, job.error, job.finished = None, explain(error, self._path), []

    def _deliver(self, group: Sequence[_Job[Any]]) -> None:
        """Hand results to their event loops, with one wake-up for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job[Any]]] = {}
        for job in group:
            by_loop.setdefault(job.future.get_loop(), []).append(job)
        for loop, jobs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, jobs)


def _resolve(jobs: Sequence[_Job[Any]]) -> None:
    for job in jobs:
        if job.future.cancelled():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def _nothing(tx: Transaction) -> None:
    """What a job does whose caller was cancelled before it started."""
