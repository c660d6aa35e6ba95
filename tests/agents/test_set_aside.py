"""Rollouts of a run that was killed are cancelled while runners elsewhere may just be finishing them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rollout_core.agents.algorithm import enqueue_once, set_aside
from rollout_core.base.errors import Conflict
from rollout_core.store import EnqueueRolloutRequest, InMemoryLightningStore, LightningStore, SqlLightningStore

REQUESTS = [
    EnqueueRolloutRequest(rollout_id=f"r-{number}", input=number, metadata={"run": "a"}) for number in range(40)
]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_what_a_runner_finishes_stays_so_and_what_was_cancelled_is_refused(kind: str, tmp_path: Path):
    """Threads that end attempts race with one that sets the run aside and queues it again."""
    store: LightningStore = (
        InMemoryLightningStore() if kind == "memory" else SqlLightningStore.from_url(f"sqlite:///{tmp_path}/s.db")
    )

    async def claim() -> dict[str, str]:
        await enqueue_once(store, REQUESTS)
        claimed = await store.dequeue_many_rollouts(limit=30)
        return {rollout.rollout_id: rollout.attempt.attempt_id for rollout in claimed}

    attempts = asyncio.run(claim())
    begin = threading.Barrier(5)
    accepted: set[str] = set()
    refused: set[str] = set()

    def finish(ids: list[str]) -> None:
        async def each() -> None:
            begin.wait()
            for rollout_id in ids:
                try:
                    await store.update_attempt(rollout_id, attempts[rollout_id], status="succeeded", fenced=True)
                    accepted.add(rollout_id)
                except Conflict:
                    refused.add(rollout_id)

        asyncio.run(each())

    async def restart() -> None:
        begin.wait()
        await set_aside(store, "a")
        await enqueue_once(store, REQUESTS)

    places = sorted(attempts)
    threads = [threading.Thread(target=finish, args=(places[start::4],)) for start in range(4)]
    threads.append(threading.Thread(target=lambda: asyncio.run(restart())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def outcome() -> dict[str, str]:
        return {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}

    statuses = asyncio.run(outcome())
    assert accepted | refused == set(attempts) and not accepted & refused
    assert {name for name, status in statuses.items() if status == "succeeded"} == accepted
    assert {name for name, status in statuses.items() if status == "queuing"} == set(statuses) - accepted
    asyncio.run(store.close())
