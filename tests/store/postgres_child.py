"""What the child processes of ``test_store_postgres`` do: ``python postgres_child.py TASK URL [ARGUMENT]``.

Each line on stdout is one acknowledgement, written after the call returned.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import psycopg

from rollout_core.base.errors import Conflict, Recoverable
from rollout_core.store import AttemptedRollout, Span, SqlLightningStore
from rollout_core.store.sql.dialect import Transaction
from tests.store.patience import LONG, wait_until

Result = TypeVar("Result")


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def work_through_restarts(url: str, name: str) -> None:
    """Enqueue 40 rollouts, and claim, trace and complete until nothing is left, whatever the server does."""

    async def patiently(call: Awaitable[Result]) -> Result | None:
        """The result, or None if the server was away; what then became of the call is not known."""
        try:
            return await call
        except Recoverable:
            await asyncio.sleep(0.05)
            return None

    async with SqlLightningStore.from_url(url) as store:
        say("ready")
        sys.stdin.readline()

        async def enqueue() -> None:
            for n in range(40):
                # Repeated until acknowledged: one id is one rollout.
                while not await patiently(store.enqueue_rollout(n, rollout_id=f"{name}-{n}")):
                    pass
                say("enqueued", f"{name}-{n}")

        async def work() -> None:
            while not enqueuing.done() or await unfinished():
                claimed = await patiently(store.dequeue_rollout(name))
                if claimed is None:
                    await asyncio.sleep(0.02)
                    continue
                id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
                say("claimed", id, attempt_id)
                span = Span.from_attributes(rollout_id=id, attempt_id=attempt_id, attributes={"n": claimed.input})
                while await patiently(store.add_many_spans([span])) is None:
                    pass
                say("span", id, span.span_id)
                try:
                    while not await patiently(store.update_attempt(id, attempt_id, status="succeeded", fenced=True)):
                        pass
                    say("succeeded", id)
                except Conflict:
                    say("superseded", id)

        async def unfinished() -> bool:
            for status in ("queuing", "requeuing", "preparing", "running"):
                page = await patiently(store.query_rollouts(status_in=[status], limit=1))
                if page is None or page.total:
                    return True
            return False

        enqueuing = asyncio.create_task(enqueue())
        await asyncio.gather(enqueuing, *[work() for _ in range(3)])


async def drain(url: str, limit: str) -> None:
    """Claim and complete until the queue is empty."""
    async with SqlLightningStore.from_url(url) as store:

        async def claim() -> Sequence[AttemptedRollout]:
            return await store.dequeue_many_rollouts(limit=int(limit), worker_id=f"w{os.getpid()}")

        say("ready")
        sys.stdin.readline()
        claimed = await claim()
        say("claimed")
        sys.stdin.readline()  # so that none has claimed all before another begins
        while claimed:
            for rollout in claimed:
                say(rollout.rollout_id)
                await store.update_attempt(
                    rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", fenced=True
                )
            claimed = await claim()


async def finish(url: str, rollout_id: str) -> None:
    """Finish one rollout."""
    async with SqlLightningStore.from_url(url) as store:
        await store.update_attempt(rollout_id, "latest", status="succeeded")


async def enqueue_in_batches(url: str, name: str) -> None:
    """Enqueue ids that another process enqueues at the same time."""
    async with SqlLightningStore.from_url(url) as store:
        say("ready")
        sys.stdin.readline()
        for n in range(100):
            rollout = await store.enqueue_rollout(n, rollout_id=f"shared-{n}")
            say(rollout.rollout_id)


def fork(url: str) -> None:
    """Fork, beside a read and a write that last until the child has ended, one that uses the store and ends as programs
    do."""
    store = SqlLightningStore.from_url(url, busy_timeout_seconds=LONG)
    holder = psycopg.connect(url, autocommit=True)
    holder.execute("SELECT pg_advisory_lock(1)")

    def sleep(tx: Transaction) -> int:
        tx.rows("SELECT 1 FROM pg_advisory_xact_lock_shared(1)")
        return tx.number("SELECT pg_backend_pid()")

    def both_wait() -> bool:
        found = holder.execute("SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone()
        return found == (2,)

    async def sleep_twice() -> list[int]:
        sleeping = [store._database.read(sleep), store._database.write(sleep)]
        return await asyncio.gather(store._database.write(_session), *sleeping)

    async def use() -> int:
        await store.enqueue_rollout(1)
        return await store._database.read(_session)

    asyncio.run(use())
    slept: list[int] = []
    sleeping = threading.Thread(target=lambda: slept.extend(asyncio.run(sleep_twice())))
    sleeping.start()
    wait_until(both_wait)
    child = os.fork()
    if child == 0:
        own = asyncio.run(use())
        asyncio.run(store.close())
        del store
        gc.collect()
        say("own", own)
        sys.exit()
    status = os.waitpid(child, 0)[1]
    say("beside", both_wait())
    holder.close()
    sleeping.join()
    say("child", status, *slept)
    pids = asyncio.run(store._database.read(lambda tx: tx.rows("SELECT pid FROM pg_stat_activity")))
    say("after", *(pid for (pid,) in pids))
    asyncio.run(store.close())


def _session(tx: Transaction) -> int:
    return tx.number("SELECT pg_backend_pid()")


if __name__ == "__main__":
    done = globals()[sys.argv[1]](*sys.argv[2:])
    if done is not None:
        asyncio.run(done)
