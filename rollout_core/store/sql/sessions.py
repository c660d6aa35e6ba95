"""Connections of a store, and the threads of one process that use them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.store.sql.dialect import Connection, Dialect

Work = TypeVar("Work")

CLOSE_SECONDS = 5.0
"""How long work that can be interrupted may hold up the closing of its connections."""


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
