"""Has the look-up agent work on one task in this process, and prints what it did: for breakpoints and tracebacks.

Run: python examples/agents/debug_agent.py http://localhost:8000/v1 my-model
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from lookup_agent import lookup_agent

from rollout_core.agents import LitAgentRunner, OtelTracer, trace_lines
from rollout_core.store import LLM, InMemoryLightningStore

TASK = {
    "question": "What is the pet of the friend of ann?",
    "answer": "dog",
    "records": {"ann": {"pet": "cat", "friend": "bob"}, "bob": {"pet": "dog", "friend": "ann"}},
}


async def main(url: str, model: str) -> None:
    """Raises what the agent raises, when what it did before is printed."""
    store, runner = InMemoryLightningStore(), LitAgentRunner[Any](OtelTracer())
    with runner.run_context(agent=lookup_agent, store=store) as worker:
        try:
            await worker.step(TASK, resources={"llm": LLM(endpoint=url, model=model)})
        finally:
            [rollout] = await store.query_rollouts()
            print(rollout.status, *trace_lines(await store.query_spans(rollout.rollout_id)), sep="\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
