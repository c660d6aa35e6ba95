"""A queue of work with a durable ledger: one process puts rollouts in, any number of workers take them out.

    python examples/library/worker_loop.py enqueue sqlite:///data/mine.db 100
    python examples/library/worker_loop.py work    sqlite:///data/mine.db      # in as many terminals as you like
    python examples/library/worker_loop.py report  sqlite:///data/mine.db

Kill a worker whenever you want: what it held goes back into the queue two seconds later.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from rollout_core.base.errors import Conflict
from rollout_core.store import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    LightningStore,
    RolloutConfig,
    Span,
    SqlLightningStore,
)

RETRIED = RolloutConfig(
    unresponsive_seconds=2.0,  # an attempt that is silent for so long has lost its worker
    max_attempts=3,
    retry_condition=["unresponsive", "failed"],
)


async def enqueue(store: LightningStore, count: int) -> None:
    """The same command again adds nothing: an id that is known is the same rollout."""
    requests = [
        EnqueueRolloutRequest(input={"number": number}, rollout_id=f"square-{number}", config=RETRIED)
        for number in range(count)
    ]
    await store.enqueue_many_rollouts(requests)


async def work(store: LightningStore, worker_id: str) -> int:
    """Take up rollouts until all are finished; the number of those that this worker completed."""
    num_done = 0
    while True:
        rollout = await store.dequeue_rollout(worker_id=worker_id)
        if rollout is not None:
            num_done += await attempt(store, rollout)
        elif (await store.query_rollouts(status_in=["preparing", "running", "requeuing"], limit=0)).total == 0:
            return num_done
        else:
            await asyncio.sleep(0.2)  # others are still at work, and may die of it


async def attempt(store: LightningStore, rollout: AttemptedRollout) -> bool:
    """One attempt; whether its result is the one that counts."""
    lease = (rollout.rollout_id, rollout.attempt.attempt_id)
    started = time.time()
    try:
        result = await square(rollout.input["number"], rollout.attempt.sequence_id)
    except ValueError as error:
        await store.update_attempt(*lease, status="failed", metadata={"error": str(error)})
        return False
    # A span is a heartbeat too. Work that takes longer than `unresponsive_seconds` sends some on its way, or calls
    # store.update_attempt(*lease, last_heartbeat_time=time.time()).
    span = Span.from_attributes(
        attributes={"result": result},
        rollout_id=lease[0],
        attempt_id=lease[1],
        sequence_id=await store.get_next_span_sequence_id(*lease),
        name="square",
        start_time=started,
        end_time=time.time(),
    )
    await store.add_span(span)
    try:
        await store.update_attempt(*lease, status="succeeded", fenced=True)
    except Conflict:
        return False  # this worker was given up for dead, and another one has taken over
    return True


async def square(number: int, attempt_number: int) -> int:
    """The work itself. Every seventh number fails at the first try."""
    await asyncio.sleep(0.05)
    if number % 7 == 0 and attempt_number == 1:
        raise ValueError(f"no luck with {number}")
    return number * number


async def report(store: LightningStore) -> dict[str, int]:
    """Results by rollout, of all that succeeded."""
    rollouts = await store.query_rollouts(status_in=["succeeded"])
    spans = await store.query_many_spans([rollout.rollout_id for rollout in rollouts], name="square")
    return {span.rollout_id: int(str(span.attributes["result"])) for span in spans}


async def main(command: str, database: str, *arguments: str) -> None:
    async with SqlLightningStore.from_url(database) as store:
        if command == "enqueue":
            await enqueue(store, int(arguments[0]))
        elif command == "work":
            print(f"completed {await work(store, worker_id=f'worker-{os.getpid()}')}")
        else:
            for rollout_id, result in (await report(store)).items():
                print(rollout_id, result)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
