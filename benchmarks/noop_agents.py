"""One trainer with a no-op agent, ours or the peer's (agentlightning), on a store in memory; for `agents.py --noop`.

Prints one line of JSON: the seconds from the first rollout queued to the last one ended, the processor seconds that
this process and its runner processes took meanwhile, and how many of the rollouts have not succeeded. The program is
the same on both sides but for the package that it imports.

Run: python benchmarks/noop_agents.py {ours,peer} {shm,cs} RUNNERS ROLLOUTS
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

import psutil

PATIENCE_SECONDS = 90.0
"""After which what has not ended counts as failed."""


def cpu_seconds() -> dict[str, float]:
    """Processor seconds so far of this process, which holds the store, and of its runner processes that still live."""
    this = psutil.Process()
    return {
        "cpu_here": sum(this.cpu_times()[:2]),
        "cpu_runners": sum(sum(child.cpu_times()[:2]) for child in this.children(recursive=True)),
    }


def _packages(side: str) -> tuple[Any, Any]:
    """Of agents and of stores."""
    if side == "ours":
        import rollout_core.agents
        import rollout_core.store

        return rollout_core.agents, rollout_core.store
    import agentlightning  # pyright: ignore[reportMissingImports] - of the peer's own venv

    return agentlightning, agentlightning


package, stores = _packages(sys.argv[1])


@package.rollout
def agent(task: int, llm: Any) -> float:
    """Does nothing."""
    return float(task)


def main(kind: str, num_runners: int, num_rollouts: int) -> None:
    """Run the trainer and print what it took."""
    found: dict[str, float] = {}

    @package.algo
    async def learn(store: Any, train_dataset: Any, initial_resources: Any) -> None:
        await store.update_resources("default", initial_resources)
        await asyncio.sleep(8.0)  # the runners are up
        start, cpu = time.perf_counter(), cpu_seconds()
        ids = [(await store.enqueue_rollout(task)).rollout_id for task in train_dataset]
        ended: list[Any] = []
        while len(ended) < len(ids) and time.perf_counter() - start < PATIENCE_SECONDS:
            ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=1.0)
        found["seconds"] = time.perf_counter() - start
        found.update({name: spent - cpu[name] for name, spent in cpu_seconds().items()})
        found["failed"] = len(ids) - sum(rollout.status == "succeeded" for rollout in ended)

    tracer = package.OtelTracer()
    if kind == "shm":
        strategy = package.SharedMemoryExecutionStrategy(n_runners=num_runners, main_thread="algorithm")
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        strategy = package.ClientServerExecutionStrategy(n_runners=num_runners, server_port=port)
    trainer = package.Trainer(
        n_runners=num_runners,
        algorithm=learn,
        tracer=tracer,
        runner=package.LitAgentRunner(tracer=tracer, poll_interval=0.05),
        store=stores.InMemoryLightningStore(),
        strategy=strategy,
        initial_resources={"main": stores.LLM(endpoint="http://localhost:9/v1", model="m")},
    )
    trainer.fit(agent, [float(number) for number in range(num_rollouts)])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
