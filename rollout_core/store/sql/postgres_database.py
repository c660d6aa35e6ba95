"""A PostgreSQL database shared by many processes.

The driver's connections live in two event loops of their own, each in a thread: one writes (``group_commit``), one
reads, so that a store serves the event loops of any thread and a large query does not hold up writers. Operations are
plain functions; they run in a greenlet, which lets the loop go on with others while a statement is under way (as
SQLAlchemy does). Rollouts that finish are announced by NOTIFY in the transaction that finishes them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import asyncpg
from sqlalchemy.util import await_only, greenlet_spawn

from rollout_core.base.errors import Fatal
from rollout_core.base.redaction import without_password
from rollout_core.store.loops import LoopThread
from rollout_core.store.sql.database import Database, forget
from rollout_core.store.sql.dialect import POSTGRES, Transaction
from rollout_core.store.sql.group_commit import GroupCommit, Hooks
from rollout_core.store.sql.postgres_schema import prepare
from rollout_core.store.sql.postgres_server import (
    DRIVER_ERRORS,
    LOST,
    UNFORTUNATE,
    connect,
    connection_settings,
    explain,
    unknown_outcome,
)

Result = TypeVar("Result")

NUM_WRITERS = 2
"""Transactions of one process at a time: while one is being committed, or waits for a lock, the next is run."""
NUM_READERS = 4
MAX_NOTICE_BYTES = 7_900
"""PostgreSQL takes notices below 8,000 bytes."""
CLOSE_SECONDS = 5.0


class _Reading:
    """A connection as operations see it. Its methods may be called in a greenlet of the connection's loop only."""

    def __init__(self, connection: Any = None) -> None:
        self._connection: Any = connection

    def fetch(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await_only(self._connection.fetch(sql, *parameters))]

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) == 1:
            await_only(self._connection.fetch(sql, *rows[0]))
        else:
            await_only(self._connection.executemany(sql, rows))

    def insert_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return len(await_only(self._connection.fetchmany(f"{sql} RETURNING 1", rows)))


class _Writing(_Reading):
    """A writing connection, see ``group_commit.Session``. It is taken from the pool for each transaction."""

    dialect = POSTGRES

    def __init__(self, url: str, pool: Callable[[], Awaitable[asyncpg.Pool]], channel: str, pids: set[int]) -> None:
        self._url = url
        self._pool = pool
        self._channel = channel
        self._pids = pids
        super().__init__(None)

    def begin(self) -> None:
        try:
            self._begin()
        except LOST:
            self._begin()  # it was lost while it lay idle; another is made

    def _begin(self) -> None:
        self._connection = await_only(await_only(self._pool()).acquire())
        try:
            await_only(self._connection.execute("BEGIN"))
            self._pids.add(self._connection.get_server_pid())
        except BaseException:
            self._drop()
            raise

    def commit(self, finished: Sequence[str]) -> None:
        if finished:
            sql = "SELECT pg_notify($1, notice) FROM unnest($2::text[]) notice"
            await_only(self._connection.fetch(sql, self._channel, list(_notices(finished))))
        try:
            status = await_only(self._connection.execute("COMMIT"))
        except LOST as error:
            self._drop()
            raise unknown_outcome(error, self._url) from error
        if status != "COMMIT":
            raise Fatal(f"{without_password(self._url)} answered {status} to COMMIT; nothing was stored")
        self._release()

    def rollback(self) -> None:
        if self._connection is not None:
            try:
                await_only(self._connection.execute("ROLLBACK"))
            except DRIVER_ERRORS:
                self._drop()
            else:
                self._release()

    def savepoint(self) -> None:
        await_only(self._connection.execute("SAVEPOINT part"))

    def undo_part(self) -> None:
        await_only(self._connection.execute("ROLLBACK TO part; RELEASE part"))

    def keep_part(self) -> None:
        await_only(self._connection.execute("RELEASE part"))

    def breaks_transaction(self, error: Exception) -> bool:
        return isinstance(error, (*LOST, asyncpg.DeadlockDetectedError, asyncpg.SerializationError))

    def worth_repeating(self, error: Exception) -> bool:
        return isinstance(error, (*LOST, *UNFORTUNATE))

    def explain(self, error: Exception) -> Exception:
        return explain(error, self._url)

    def _drop(self) -> None:
        """Have the pool make a new connection in place of this one. It may not have noticed yet that it was cut."""
        self._connection.terminate()
        self._release()

    def _release(self) -> None:
        connection: Any = self._connection
        self._connection = None
        await_only(await_only(self._pool()).release(connection))


def _notices(rollout_ids: Sequence[str]) -> Iterator[str]:
    """JSON lists of these ids, each short enough for one notice."""
    part: list[str] = []
    num_bytes = 2
    for rollout_id in dict.fromkeys(rollout_ids):
        size = len(json.dumps(rollout_id)) + 2
        if part and num_bytes + size > MAX_NOTICE_BYTES:
            yield json.dumps(part)
            part, num_bytes = [], 2
        part.append(rollout_id)
        num_bytes += size
    if part:
        yield json.dumps(part)


class _Writer(GroupCommit):
    """Up to ``NUM_WRITERS`` tasks of a loop that write while there are jobs."""

    def __init__(self, url: str, thread: LoopThread, hooks: Hooks, session: Callable[[], _Writing]) -> None:
        super().__init__(without_password(url), hooks)
        self._thread = thread
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_woken = False

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._thread.start().call_soon_threadsafe(self._start_writing)

    def _start_writing(self) -> None:
        self._is_woken = False
        if len(self._tasks) < NUM_WRITERS:
            task = asyncio.get_running_loop().create_task(self._write())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        session = self._session()
        while group := self._take():
            await greenlet_spawn(self._commit, session, group)

    async def finish(self) -> None:
        """Refuse later jobs and wait for those under way. Called in the loop."""
        with self._lock:
            self._closed = True
        while self._tasks or self._jobs:
            self._start_writing()
            await asyncio.wait(self._tasks)


class PostgresDatabase(Database):
    """A PostgreSQL database, or the schema of one that the URL's ``search_path`` names."""

    def __init__(self, url: str, hooks: Hooks, busy_timeout_seconds: float) -> None:
        self.url = url
        self._hooks = hooks
        self._busy_timeout_seconds = busy_timeout_seconds
        self._closed = False
        self._start()
        try:
            opening = asyncio.run_coroutine_threadsafe(prepare(url, busy_timeout_seconds), self._reading.start())
            self._channel = f"rollout_{opening.result().schema}"
        except BaseException:
            self._stop()
            raise
        super().__init__()

    def _start(self) -> None:
        self._writing = LoopThread("store-writer")
        self._reading = LoopThread("store-reader")
        self._pools: dict[asyncio.AbstractEventLoop, asyncpg.Pool] = {}
        self._writing_pids: set[int] = set()
        self._listener: asyncpg.Connection | None = None
        self._listening = asyncio.Lock()
        self._num_listeners = 0
        self.commits = self._commits = _Writer(self.url, self._writing, self._hooks, self._new_session)

    def _new_session(self) -> _Writing:
        return _Writing(self.url, self._pool, self._channel, self._writing_pids)

    async def _pool(self) -> asyncpg.Pool:
        """The connections of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = asyncpg.create_pool(
                **connection_settings(self.url, self._busy_timeout_seconds),
                min_size=0,
                max_size=NUM_WRITERS if loop is self._writing.loop else NUM_READERS,
                reset=_keep,
            )
            await self._pools[loop]
        return self._pools[loop]

    async def read(self, operation: Callable[[Transaction], Result]) -> Result:
        self._check_open()
        return await self._reading.run(self._read(operation))

    async def _read(self, operation: Callable[[Transaction], Result]) -> Result:
        try:
            try:
                return await self._read_once(operation)
            except LOST:
                return await self._read_once(operation)
        except DRIVER_ERRORS as error:
            raise explain(error, self.url) from error

    async def _read_once(self, operation: Callable[[Transaction], Result]) -> Result:
        async with (await self._pool()).acquire() as connection:
            try:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                try:
                    tx = Transaction(_Reading(connection), POSTGRES, self._hooks.clock())
                    return await greenlet_spawn(operation, tx)
                finally:
                    await connection.execute("ROLLBACK")
            except LOST:
                connection.terminate()  # else the pool could hand it out again before it notices
                raise

    async def foreign_version(self) -> int:
        self._check_open()
        return await self._reading.run(self._listen())

    async def _listen(self) -> int:
        """See to it that other processes' notices arrive; how often that had to be begun anew."""
        async with self._listening:
            if self._listener is None or self._listener.is_closed():
                self._listener = await connect(self.url, self._busy_timeout_seconds)
                await self._listener.add_listener(self._channel, self._on_notice)
                self._num_listeners += 1
        return self._num_listeners

    def _on_notice(self, connection: Any, pid: int, channel: str, notice: Any) -> None:
        if pid not in self._writing_pids:  # our own waiters were told at the commit
            self._hooks.on_finished(json.loads(notice))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        forget(self)
        asyncio.run_coroutine_threadsafe(self._commits.finish(), self._writing.start()).result()
        for thread in (self._writing, self._reading):
            asyncio.run_coroutine_threadsafe(self._disconnect(), thread.start()).result()
        self._stop()

    async def _disconnect(self) -> None:
        """Close the connections of the running loop."""
        loop = asyncio.get_running_loop()
        if loop is self._reading.loop and self._listener is not None:
            self._listener.terminate()
        pool = self._pools.pop(loop, None)
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), CLOSE_SECONDS)
            except (TimeoutError, *LOST):
                pool.terminate()

    def _stop(self) -> None:
        self._writing.stop()
        self._reading.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise Fatal(f"the store of {without_password(self.url)} is closed; open it again with from_url")

    def after_fork_in_child(self) -> None:
        # Kept for ever: to close them here would speak to the server in the parent's name.
        _parents_things.append((self._writing, self._reading, self._pools, self._listener, self._commits))
        self._start()


_parents_things: list[Any] = []


async def _keep(connection: Any) -> None:
    """In place of the pool's own clean-up, which costs a statement: nothing here leaves anything behind."""
