"""A live service with scripted users: each asks one question after the other, and is content only with right answers.

The service runs the look-up agent itself. It finds the model in the store, as whatever `rollout agent online` has
published, and knows nothing of training: what is recorded are the calls and, as the reward, whether the user was
content. See docs/agents-tutorial.md.

    python examples/agents/make_lookup.py
    python examples/agents/live_users.py &
    rollout agent online --config examples/agents/online-lookup.toml

Run: python examples/agents/live_users.py [--users 8] [--requests N]   (default: until Ctrl-C)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lookup_agent import lookup_agent

from rollout_core.agents import LitAgentRunner, OtelTracer
from rollout_core.agents.emitters import find_final_reward
from rollout_core.base.settings import locations
from rollout_core.store import LightningStore, SqlLightningStore

QUESTIONS = Path("data/agents/train.jsonl")
SHOWN = 128
"""The share of right answers is that of the last so many, and shown as often."""


class Tally:
    """Counts answers, and says now and then how many were right."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: deque[float] = deque(maxlen=SHOWN)

    def add(self, reward: float) -> None:
        """An answer."""
        self._count += 1
        self._latest.append(reward)
        if self._count % SHOWN == 0:
            right = sum(self._latest) / SHOWN
            print(f"{self._count:6d} questions; of the last {SHOWN} answers {right:.2f} were right", flush=True)


async def ask(store: LightningStore, user: int, tasks: Iterator[Any], tally: Tally) -> None:
    """One user, until there are no more questions."""
    runner = LitAgentRunner(OtelTracer(instrument=[]))
    async with runner.run_context(agent=lookup_agent, store=store, worker_id=user):
        for task in tasks:
            while "llm" not in getattr(await store.get_latest_resources(), "resources", {}):
                await asyncio.sleep(1.0)
            try:
                rollout = await runner.step(task)
            except Exception as error:  # noqa: BLE001 - the model may be away; the rollout is stored as failed
                print(f"user {user}: {type(error).__name__}", flush=True)
                await asyncio.sleep(5.0)
                continue
            tally.add(find_final_reward(await store.query_spans(rollout.rollout_id, "latest")) or 0.0)


async def main(users: int, requests: int | None) -> None:
    """Have users ask, side by side."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    tasks = itertools.islice(itertools.cycle(rows), requests)
    tally = Tally()
    async with SqlLightningStore.from_url(locations().database) as store:
        await asyncio.gather(*(ask(store, user, tasks, tally) for user in range(users)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--requests", type=int, default=None)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.users, arguments.requests))
