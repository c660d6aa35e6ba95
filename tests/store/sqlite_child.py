"""What the child processes of ``test_store_processes`` do: ``python sqlite_child.py TASK URL [ARGUMENT]``.

Each line on stdout is one acknowledgement, written after the call returned.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.store import AttemptedRollout, AttemptUpdate, EnqueueRolloutRequest, Span, SqlLightningStore


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def write_until_killed(url: str, prefix: str) -> None:
    """Enqueue, claim, trace and complete from eight tasks at once."""
    async with SqlLightningStore.from_url(url) as store:

        async def enqueue(task: int) -> None:
            for n in range(1_000_000):
                rollout = await store.enqueue_rollout(n, rollout_id=f"{prefix}-{task}-{n}")
                say("enqueued", rollout.rollout_id)

        async def work(task: int) -> None:
            while True:
                for rollout in await store.dequeue_many_rollouts(limit=3, worker_id=f"{prefix}-{task}"):
                    attempt = rollout.attempt
                    say("claimed", rollout.rollout_id, attempt.attempt_id)
                    span = Span.from_attributes(
                        rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id, attributes={"n": rollout.input}
                    )
                    await store.add_span(span)
                    say("span", rollout.rollout_id, span.span_id)
                    await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="succeeded", fenced=True)
                    say("succeeded", rollout.rollout_id)
                await asyncio.sleep(0)

        await asyncio.gather(*[enqueue(task) for task in range(4)], *[work(task) for task in range(4)])


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
            await store.update_many_attempts(
                [
                    AttemptUpdate(
                        rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status="succeeded"
                    )
                    for rollout in claimed
                ],
                fenced=True,
            )
            claimed = await claim()


async def finish(url: str, rollout_id: str) -> None:
    """Finish one rollout."""
    async with SqlLightningStore.from_url(url) as store:
        await store.update_attempt(rollout_id, "latest", status="succeeded")


async def fill_the_disk(url: str, limit: str) -> None:
    """Write past a limit on the size of files, then lift it and go on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    async with SqlLightningStore.from_url(url) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
        refused = 0
        for n in range(400):
            try:
                rollouts = await store.enqueue_many_rollouts(
                    [EnqueueRolloutRequest(input="x" * 20_000, rollout_id=f"{n}-{k}") for k in range(3)]
                )
                for rollout in rollouts:
                    say("enqueued", rollout.rollout_id)
            except Recoverable as error:
                refused += 1
                if refused == 1:
                    say("refused", error)
                if refused > 3:
                    break
        # One that does not fit must not spoil the small ones it shares a transaction with.
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit) * 4, resource.RLIM_INFINITY))
        outcomes = await asyncio.gather(
            store.enqueue_rollout(1, rollout_id="small-1"),
            store.enqueue_rollout("x" * int(limit) * 8, rollout_id="giant"),
            store.enqueue_rollout(2, rollout_id="small-2"),
            return_exceptions=True,
        )
        say("together", *[type(outcome).__name__ for outcome in outcomes])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        say("enqueued", (await store.enqueue_rollout(3, rollout_id="after")).rollout_id)


async def open_as_nobody(url: str) -> None:
    """Open a store without the right to write it."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setuid(65534)
    try:
        SqlLightningStore.from_url(url)
    except ConfigError as error:
        say("refused", error)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
