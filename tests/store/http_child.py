"""What the worker processes of ``test_http_processes`` do: ``python http_child.py ADDRESS PREFIX``, until told to stop.

Each line on stdout is one acknowledgement, written after the call returned.
"""

from __future__ import annotations

import asyncio
import sys

from rollout_core.store import LightningStoreClient, Span


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def work(address: str, prefix: str) -> None:
    """Enqueue, claim, trace and complete, whatever happens to the server."""
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    async with LightningStoreClient(address, retry_delays=(0.05,) * 6000, health_retry_delays=()) as store:
        turn = 0
        while not stop.done():
            turn += 1
            named = await store.enqueue_rollout(turn, rollout_id=f"{prefix}-{turn}")
            say("enqueued", named.rollout_id)
            say("enqueued", (await store.enqueue_rollout(turn)).rollout_id)
            for rollout in await store.dequeue_many_rollouts(limit=2, worker_id=prefix):
                attempt = rollout.attempt
                say("claimed", rollout.rollout_id, attempt.attempt_id)
                number = await store.get_next_span_sequence_id(rollout.rollout_id, attempt.attempt_id)
                spans = [
                    Span.from_attributes(
                        rollout_id=rollout.rollout_id,
                        attempt_id=attempt.attempt_id,
                        sequence_id=number,
                        attributes={"n": n},
                    )
                    for n in range(2)
                ]
                await store.add_many_spans(spans)
                for span in spans:
                    say("span", rollout.rollout_id, span.span_id)
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="succeeded", fenced=True)
                say("succeeded", rollout.rollout_id)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
