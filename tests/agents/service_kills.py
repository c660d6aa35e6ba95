"""A campaign of kills against agents at work as services: ``python -m tests.agents.service_kills [--rounds N]``.

Store server, LLM proxy, model, algorithm and 16 runners in 4 processes each run in processes of their own, over HTTP.
At random moments one of them gets SIGKILL, and is started again under its old address a moment later. In the end every
task has exactly one attempt that succeeded, with the agent's reward and all of its model calls, in order, no span
stands under another rollout, and everything has ended by itself. Prints a line for each campaign.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from openai import OpenAI

from rollout_core.agents.algorithm import enqueue_once
from rollout_core.agents.delivery import retried
from rollout_core.agents.emitters import emit_annotation, emit_reward, find_final_reward
from rollout_core.agents.lit_agent import llm_rollout
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.store import (
    EnqueueRolloutRequest,
    LightningStoreClient,
    LightningStoreServer,
    ProxyLLM,
    RolloutConfig,
    SqlLightningStore,
)
from rollout_core.store.semconv import LLM_CALL, LlmCallAttributes
from tests.agents.scripted_upstream import ScriptedUpstream
from tests.store.ports import own_port

TURNS = 3
NUM_RUNNERS = 4
"""In each process of them."""
PATIENCE_SECONDS = 120.0
"""Of the algorithm with a store that is away."""
CONFIG = RolloutConfig(
    timeout_seconds=60,
    unresponsive_seconds=6,
    # Enough that bad luck alone does not use them up.
    max_attempts=50,
    retry_condition=["failed", "timeout", "unresponsive"],
)


@llm_rollout
def agent(task, llm, rollout):
    """Some turns with the model, whose answer is the question backwards, and a reward for the last."""
    emit_annotation({"whose": rollout.rollout_id, "attempt": rollout.attempt.attempt_id})
    with OpenAI(base_url=llm.get_base_url(), api_key="none", max_retries=4) as client:
        for turn in range(TURNS):
            text = f"{task}.{turn}"
            asked = [{"role": "user", "content": text}]
            answer = client.chat.completions.create(model="m", messages=asked).choices[0].message.content
            assert answer == text[::-1], (answer, text)
            time.sleep(random.random() / 4)
    emit_reward(task / 1000)


async def serve_store(folder: Path, ports: dict[str, int]) -> None:
    """The store server."""
    async with SqlLightningStore.from_url(f"sqlite:///{folder / 'store.db'}") as store:
        await LightningStoreServer(store, port=ports["store"]).start()
        await asyncio.Event().wait()


async def serve_model(folder: Path, ports: dict[str, int]) -> None:
    """The proxy's upstream."""
    await ScriptedUpstream(delay=0.02, port=ports["model"]).start()
    await asyncio.Event().wait()


async def serve_proxy(folder: Path, ports: dict[str, int]) -> None:
    """The proxy."""
    upstream = Upstream(url=f"http://127.0.0.1:{ports['model']}/v1", model="m")
    proxy = LLMProxy(ports["proxy"], [ModelEntry("m", (upstream,))], store=client_of(ports))
    await proxy.start()
    await asyncio.Event().wait()


async def run_agents(folder: Path, ports: dict[str, int]) -> None:
    """Runners on one event loop, their agents in threads."""

    async def work(number: int) -> None:
        runner = LitAgentRunner(OtelTracer(instrument=[]), poll_interval=0.2, heartbeat_interval=2)
        async with runner.run_context(agent=agent, store=client_of(ports), worker_id=number) as worker:
            await worker.iter()

    await asyncio.gather(*map(work, range(NUM_RUNNERS)))


async def run_algorithm(folder: Path, ports: dict[str, int], rounds: int = 4, size: int = 40) -> None:
    """Rounds of tasks, each begun when the one before has finished."""
    store = client_of(ports)
    model = ProxyLLM(endpoint=f"http://127.0.0.1:{ports['proxy']}/v1", model="m", api_key="none")
    await retried(lambda: store.update_resources("model", {"llm": model}), PATIENCE_SECONDS)
    for number in range(rounds):
        tasks = range(number * size, (number + 1) * size)
        requests = [
            EnqueueRolloutRequest(rollout_id=f"task-{task}", input=task, resources_id="model", config=CONFIG)
            for task in tasks
        ]
        ids = await retried(partial(enqueue_once, store, requests), PATIENCE_SECONDS)
        assert len(await retried(partial(store.wait_for_rollouts, rollout_ids=ids), PATIENCE_SECONDS)) == size


def client_of(ports: dict[str, int]) -> LightningStoreClient:
    """Of the store."""
    return LightningStoreClient(f"http://127.0.0.1:{ports['store']}")


ROLES = {
    "store": serve_store,
    "model": serve_model,
    "proxy": serve_proxy,
    "runner": run_agents,
    "algorithm": run_algorithm,
}


def start(role: str, folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    """A process of this role, its output appended to the role's log."""
    command = [sys.executable, "-m", "tests.agents.service_kills", "--role", role, str(folder), json.dumps(ports)]
    with (folder / f"{role}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def campaign(folder: Path, number: int, pause: tuple[float, float]) -> Counter[str]:
    """One run to its end, with kills on the way. Raises AssertionError for what must not be."""
    with ExitStack() as held:
        ports = {name: held.enter_context(own_port()) for name in ("store", "model", "proxy")}
        return _campaign(folder, number, pause, ports)


def _campaign(folder: Path, number: int, pause: tuple[float, float], ports: dict[str, int]) -> Counter[str]:
    chance, kills = random.Random(number), Counter[str]()
    roles = ["store", "model", "proxy", "algorithm", *["runner"] * 4]
    running = [start(role, folder, ports) for role in roles]
    algorithm, began = roles.index("algorithm"), time.monotonic()
    try:
        while running[algorithm].poll() != 0:
            assert time.monotonic() - began < 1500, "the run does not end"
            time.sleep(chance.uniform(*pause))
            if running[algorithm].poll() == 0:
                break
            kind = chance.choice(list(ROLES))
            place = chance.choice([number for number, role in enumerate(roles) if role == kind])
            for other, process in enumerate(running):
                assert process.poll() is None, f"{roles[other]} ended: {process.returncode}"
            running[place].kill()
            running[place].wait()
            kills[roles[place]] += 1
            time.sleep(chance.uniform(0.1, 2.0))
            running[place] = start(roles[place], folder, ports)
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
    asyncio.run(check(folder))
    return kills


async def check(folder: Path) -> None:
    """What must hold in the end."""
    async with SqlLightningStore.from_url(f"sqlite:///{folder / 'store.db'}") as store:
        rollouts = await store.query_rollouts()
        assert len(rollouts) == 160, len(rollouts)
        for rollout in rollouts:
            attempts = await store.query_attempts(rollout.rollout_id)
            won = [attempt for attempt in attempts if attempt.status == "succeeded"]
            assert rollout.status == "succeeded" and len(won) == 1 and won[0] == attempts[-1], attempts
            spans = await store.query_spans(rollout.rollout_id)
            for span in spans:
                assert span.attributes.get("whose", rollout.rollout_id) == rollout.rollout_id
                assert span.attributes.get("attempt", span.attempt_id) == span.attempt_id
            winning = [span for span in spans if span.attempt_id == won[0].attempt_id]
            assert find_final_reward(winning) == rollout.input / 1000, rollout.rollout_id
            calls = [one for one in winning if one.name == LLM_CALL and one.status.status_code != "ERROR"]
            asked = ["".join(map(chr, call.attributes[LlmCallAttributes.PROMPT_TOKEN_IDS.value])) for call in calls]
            assert asked == [f"{rollout.input}.{turn}" for turn in range(TURNS)], (rollout.rollout_id, asked)


def main() -> None:
    """Run the campaigns and print what was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, nargs=2, default=(1.0, 8.0), help="seconds between two kills")
    parser.add_argument("--role", nargs=3, metavar=("ROLE", "FOLDER", "PORTS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        role, folder, ports = given.role
        asyncio.run(ROLES[role](Path(folder), json.loads(ports)))
        return
    for number in range(given.rounds):
        folder = Path(tempfile.mkdtemp(prefix="service-kills-"))
        began = time.monotonic()
        kills = campaign(folder, given.seed + number, tuple(given.pause))
        took = time.monotonic() - began
        print(f"campaign {number + 1}: {dict(kills)}, {took:.0f} s: whole", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
