"""Connections of a store, the threads that use them, and how concurrent calls share a transaction.

Callers hand in operations and wait. A writer takes all that are waiting, runs those of one kind as one batch, commits
once, with one sync to disk, and only then lets the callers continue: what was acknowledged is on disk. A batch that
fails undoes itself alone and is run again caller by caller, so that only those are refused that really fail; the same
goes for the transaction itself (disk full, for one).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from rollout_core.base.errors import Fatal, Recoverable, RolloutError
from rollout_core.store.sql.change_rows import add_changes
from rollout_core.store.sql.dialect import Connection, Dialect, Transaction

Work = TypeVar("Work")
Item = TypeVar("Item")
Result = TypeVar("Result")
Batch = Callable[[Transaction, Sequence[Item]], Sequence[Result]]
"""An operation on many items, with one result for each, in order."""
Undo = Callable[[Transaction, Sequence[Result]], object]

CLOSE_SECONDS = 5.0
"""How long work that can be interrupted may hold up the closing of its connections."""
MAX_TRIES = 3
"""How often one operation is run before an error that may pass at once, such as a deadlock, is the caller's."""
MAX_GROUP_ITEMS = 2_048
"""A transaction that has as many items takes no more operations. Bounds how long others wait for their turn."""


class Session(Connection, ABC):
    """A connection and the transactions on it. It connects when a transaction begins, if it is not connected.

    Whoever uses it holds ``lock``.
    """

    dialect: Dialect
    writer = 0

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def run(self, sql: str) -> None:
        """Run a statement without parameters that yields nothing."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a writing transaction."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Begin a transaction that sees one state of the database throughout."""

    @abstractmethod
    def end_reading(self) -> None:
        """End it; harmless when there is none, or no connection any more."""

    @abstractmethod
    def commit(self, finished: Sequence[str]) -> None:
        """Make the transaction durable, and let other processes know which rollouts have finished."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo it; harmless when there is none, or no connection any more."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, if there is one. The next transaction makes another."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the statement that another thread runs fail, if there is one; for that thread, ``lock`` is held."""

    def savepoint(self) -> None:
        """Begin a part that can be undone alone; only one at a time."""
        self.run("SAVEPOINT part")

    def undo_part(self) -> None:
        """Undo it to the savepoint."""
        self.run("ROLLBACK TO part")
        self.run("RELEASE part")

    def keep_part(self) -> None:
        """Make the part since the savepoint, if not undone, one with the rest of the transaction."""
        self.run("RELEASE part")

    @abstractmethod
    def breaks_transaction(self, error: Exception) -> bool:
        """Whether nothing of the transaction can be relied on after this error."""

    @abstractmethod
    def worth_repeating(self, error: Exception) -> bool:
        """Whether the same operation, run again at once, may well succeed, nothing of it having been stored."""

    @abstractmethod
    def explain(self, error: Exception) -> Exception:
        """Our error for one that a statement raised; any other error as it is."""


class SessionThreads(Generic[Work]):
    """Threads that take work from one queue, each with a session of its own; started one by one as work piles up."""

    def __init__(self, name: str, where: str, sessions: Sequence[Session], do: Callable[[Session, Work], Any]) -> None:
        """``do`` is called with each piece of work that it has not taken itself, by ``take_more``; it raises nothing.

        ``where`` names the database in errors.
        """
        self.sessions = sessions
        self._name = name
        self._where = where
        self._do = do
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_busy = 0
        self._closed = False

    def submit(self, work: Work) -> None:
        """Have a thread do this. Raises Fatal once closed, and Recoverable if no thread can be started for it."""
        with self._lock:
            if self._closed:
                raise Fatal(f"the store of {self._where} is closed; open it again with from_url")
            if self._num_busy + self._queue.qsize() >= len(self._threads) < len(self.sessions):
                self._start_thread()
            self._queue.put(work)

    def _start_thread(self) -> None:
        session = self.sessions[len(self._threads)]
        thread = threading.Thread(target=self._run, args=[session], name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or too little memory for another
            if not self._threads:  # those there are do it later
                raise Recoverable(
                    f"no thread for the store of {self._where} could be started ({error}); nothing of this call was "
                    "stored, it can be repeated"
                ) from error
        else:
            self._threads.append(thread)

    def take_more(self) -> Work | None:
        """Work that is waiting at this moment, for the thread that calls; None if there is none."""
        try:
            work = self._queue.get_nowait()
        except Empty:
            return None
        if work is None:
            self._queue.put(None)  # the word to end, which is for when all work is done
        return work

    def close(self, hurry: Callable[[], object] | None = None) -> None:
        """Do what is waiting, end the threads and close the connections. Later work is refused.

        ``hurry`` is called if that takes longer than ``CLOSE_SECONDS``.
        """
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        if hurry is not None:
            deadline = time.monotonic() + CLOSE_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if any(thread.is_alive() for thread in self._threads):
                hurry()
        for thread in self._threads:
            thread.join()
        for session in self.sessions:
            with session.lock:
                session.close()

    def _run(self, session: Session) -> None:
        while (work := self._queue.get()) is not None:
            with self._lock:
                self._num_busy += 1
            with session.lock:
                self._do(session, work)
            with self._lock:
                self._num_busy -= 1


# Group commit


class Hooks(NamedTuple):
    """What the store has its database do."""

    clock: Callable[[], float]
    watchdog: Callable[[Transaction], bool]
    """Run before other writes; whether it looked at anything."""
    on_finished: Callable[[Sequence[str]], None]
    """Called, from any thread, with rollouts that have just finished."""
    on_queued: Callable[[int], None]
    """Called, from any thread, with the number of rollouts that have just joined the queue."""
    on_changed: Callable[[], None]
    """Called, from any thread, when there are new changes for those who watch."""


@dataclass(eq=False)
class Job(Generic[Item, Result]):
    """An operation that a caller waits for."""

    batch: Batch[Item, Result]
    items: Sequence[Item]
    watched: bool
    future: asyncio.Future[Sequence[Result]]
    taken: bool = False
    """Whether the writer has it, so that it can no longer be withdrawn."""
    results: Sequence[Result] = ()
    error: Exception | None = None


class GroupCommit:
    """The jobs of one store in one process, and how its writing threads run them."""

    def __init__(self, name: str, where: str, sessions: Sequence[Session], hooks: Hooks) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()
        self.threads = SessionThreads[Job[Any, Any]](name, where, sessions, self._work)

    async def run(
        self, batch: Batch[Item, Result], items: Sequence[Item], *, watched: bool, undo: Undo[Result] | None = None
    ) -> Sequence[Result]:
        """Run ``batch`` in the next transaction, after the watchdog if ``watched``; its results once they are on disk.

        If the caller is cancelled before the operation starts, it never runs. After that it does; then ``undo`` takes
        its results back, and the cancellation waits for that, also when there are more of them.
        """
        job = self._submit(batch, items, watched)
        try:
            return await (job.future if undo is None else asyncio.shield(job.future))
        except asyncio.CancelledError:
            if self._withdraw(job):
                job.future.cancel()  # where it is shielded from that, nobody would ask for its error
            elif undo is not None:
                with contextlib.suppress(RolloutError):
                    results = await _uncancelled(job.future)
                    await _uncancelled(self._submit(lambda tx, _: [undo(tx, results)], [None], watched=False).future)
            raise

    def _submit(self, batch: Batch[Item, Result], items: Sequence[Item], watched: bool) -> Job[Item, Result]:
        job = Job(batch, items, watched, asyncio.get_running_loop().create_future())
        self.threads.submit(job)
        return job

    def _withdraw(self, job: Job[Any, Any]) -> bool:
        """Keep a job from running if it has not started."""
        with self._lock:
            if not job.taken:
                job.batch, job.items, job.watched = _nothing, (), False
            return not job.taken

    def _work(self, session: Session, job: Job[Any, Any]) -> None:
        """Run this job and those that wait behind it in one transaction."""
        group = [job]
        num_items = max(1, len(job.items))
        while num_items < MAX_GROUP_ITEMS and (other := self.threads.take_more()):
            group.append(other)
            num_items += max(1, len(other.items))
        with self._lock:
            for job in group:
                job.taken = True
        self._commit(session, group)

    def _commit(self, session: Session, group: Sequence[Job[Any, Any]]) -> None:
        """Run the group, and hand each job its outcome."""
        pending = deque([(group, MAX_TRIES)])
        finished: list[str] = []
        num_queued = 0
        has_changed = False
        while pending:
            jobs, tries = pending.popleft()
            try:
                session.begin()
            except Exception as error:  # noqa: BLE001 - the writer must outlive it, and the callers must hear of it
                _fail(session, [*jobs, *(job for others, _ in pending for job in others)], error)
                break
            try:
                whole = self._run_jobs(session, jobs)
                session.commit(whole.finished)
                finished += whole.finished
                num_queued += whole.num_queued
                has_changed |= bool(whole.changes)
            except Exception as error:  # noqa: BLE001 - as above
                with contextlib.suppress(Exception):
                    session.rollback()
                if isinstance(error, RolloutError):
                    _fail(session, jobs, error)
                elif len(jobs) > 1:
                    pending.extend(([job], tries) for job in jobs)
                elif tries > 1 and session.worth_repeating(error):
                    pending.append((jobs, tries - 1))
                else:
                    _fail(session, jobs, error)
        if finished:
            self._hooks.on_finished(finished)
        if num_queued:
            self._hooks.on_queued(num_queued)
        if has_changed:
            self._hooks.on_changed()
        self._deliver(group)

    def _run_jobs(self, session: Session, jobs: Sequence[Job[Any, Any]]) -> Transaction:
        """Run jobs in the transaction under way, one part for each kind of operation; what they did together."""
        parts: dict[Batch[Any, Any], list[Job[Any, Any]]] = {}
        for job in jobs:
            job.results, job.error = (), None
            parts.setdefault(job.batch, []).append(job)
        whole = Transaction(session, session.dialect, self._hooks.clock())
        has_scanned = any(job.watched for job in jobs) and self._hooks.watchdog(whole)
        if len(jobs) == 1 and not has_scanned:
            _run_batch(whole, jobs[0].batch, jobs)  # to undo it is to undo the transaction
        else:
            for batch, sharers in parts.items():
                self._run_part(whole, session, batch, sharers)
        _add_counts(whole, whole.counted)
        add_changes(whole)
        return whole

    def _run_part(
        self, whole: Transaction, session: Session, batch: Batch[Any, Any], jobs: Sequence[Job[Any, Any]]
    ) -> None:
        """Run jobs of one kind together, or each by itself if that fails."""
        part = Transaction(session, session.dialect, self._hooks.clock())
        session.savepoint()
        try:
            _run_batch(part, batch, jobs)
        except Exception as error:
            if session.breaks_transaction(error) or (len(jobs) == 1 and session.worth_repeating(error)):
                raise
            session.undo_part()
            if len(jobs) == 1:
                jobs[0].error = session.explain(error)
            else:
                for job in jobs:
                    self._run_part(whole, session, batch, [job])
        else:
            session.keep_part()
            whole.take_over(part)

    def _deliver(self, group: Sequence[Job[Any, Any]]) -> None:
        """Hand results to their event loops, with one wake-up for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Job[Any, Any]]] = {}
        for job in group:
            by_loop.setdefault(job.future.get_loop(), []).append(job)
        for loop, jobs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, jobs)


async def _uncancelled(future: asyncio.Future[Result]) -> Result:
    """What ``future`` comes to, however often the caller is cancelled meanwhile; it is to raise that itself then."""
    # Not in a task of its own: that would be cancelled too where a program ends.
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(future)
    return future.result()


def _add_counts(tx: Transaction, changes: Mapping[str, int]) -> None:
    """Add to counts; the names are statuses of rollouts, ``attempts`` and ``spans``."""
    tx.insert(
        "counts",
        "name, writer, count",
        sorted((name, tx.writer, change) for name, change in changes.items() if change),
        "ON CONFLICT (name, writer) DO UPDATE SET count = counts.count + excluded.count",
    )


def _run_batch(tx: Transaction, batch: Batch[Any, Any], jobs: Sequence[Job[Any, Any]]) -> None:
    results = batch(tx, jobs[0].items if len(jobs) == 1 else [item for job in jobs for item in job.items])
    start = 0
    for job in jobs:
        job.results = results[start : start + len(job.items)]
        start += len(job.items)


def _fail(session: Session, jobs: Iterable[Job[Any, Any]], error: Exception) -> None:
    for job in jobs:
        job.results, job.error = (), session.explain(error)


def _resolve(jobs: Sequence[Job[Any, Any]]) -> None:
    for job in jobs:
        if job.future.cancelled():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.results)


def _nothing(tx: Transaction, items: Sequence[Any]) -> Sequence[Any]:
    """What a job does whose caller was cancelled before it started."""
    return ()
