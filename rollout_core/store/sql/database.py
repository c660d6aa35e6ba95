"""A database as the SQL store sees it, open for the tasks, threads and event loops of one process."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.group_commit import Batch, GroupCommit, Undo

Item = TypeVar("Item")
Result = TypeVar("Result")


class Database(ABC):
    """An open database; its connections are opened when they are needed. Operations see it as a ``Transaction``."""

    commits: GroupCommit

    def __init__(self) -> None:
        _open_databases.add(self)

    async def write(
        self, operation: Callable[[Transaction], Result], *, watched: bool = True, undo: Undo[Result] | None = None
    ) -> Result:
        """Run ``operation`` and return its result once it is on disk. See ``GroupCommit.run``."""

        def batch(tx: Transaction, items: Sequence[None]) -> list[Result]:
            return [operation(tx)]

        [result] = await self.commits.run(batch, [None], watched=watched, undo=undo)
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
        return await self.commits.run(batch, items, watched=watched, undo=undo)

    @abstractmethod
    async def read(self, operation: Callable[[Transaction], Result]) -> Result:
        """Run ``operation`` on a consistent snapshot that holds every write acknowledged so far."""

    @abstractmethod
    async def foreign_version(self) -> Any:
        """A value that changes when others may have finished rollouts without ``on_finished`` being told."""

    @abstractmethod
    def close(self) -> None:
        """Finish pending writes and close every connection. Harmless when repeated."""

    def before_fork(self) -> None:  # noqa: B027 - most have nothing to do
        """Make ready for a fork of this process."""

    def after_fork_in_parent(self) -> None:  # noqa: B027 - as above
        """Go on after a fork."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Begin anew: the threads, and the callers they worked for, exist in the parent only."""


def forget(database: Database) -> None:
    """Leave a closed database out of forks."""
    _open_databases.discard(database)


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
