"""AgentOpsTracer with the real package, which needs older versions of packages than our environment has.

Run (a second environment that sees ours behind its own packages; none of it touches the network but pip):

    python3.11 -m venv /tmp/agentops && /tmp/agentops/bin/pip install "agentops>=0.4.21,<0.5" openai==3.52.0
    echo $PWD/.venv/lib/python3.11/site-packages > /tmp/agentops/lib/python3.11/site-packages/ours.pth
    PYTHONPATH=$PWD /tmp/agentops/bin/python -m tests.agents.agentops_check
"""

from __future__ import annotations

import asyncio
import socket
import sys
from importlib.metadata import version
from typing import Any

import openai

from rollout_core.agents import AgentOpsTracer, LitAgentRunner, TracerTraceToTriplet, emit_reward, rollout
from rollout_core.store import LLM, InMemoryLightningStore
from tests.agents.scripted_chat import completion, scripted_chat


@rollout
def agent(task: str, llm: LLM) -> None:
    client = openai.OpenAI(base_url=llm.endpoint, api_key="k")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}])
    emit_reward(0.5)


def refuse_strangers() -> None:
    """Connections may lead to this machine alone."""
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost"), address
        connect(self, address)

    socket.socket.connect = checked  # type: ignore[method-assign]


async def main() -> None:
    refuse_strangers()
    store = InMemoryLightningStore()
    answers = [completion(number, {"content": f"answer {number}"}) for number in range(4)]
    with scripted_chat(answers) as url:
        await store.add_resources({"main": LLM(endpoint=url, model="m")})
        for number in range(4):
            await store.enqueue_rollout(f"task {number}")
        runner = LitAgentRunner(AgentOpsTracer(), max_rollouts=4, poll_interval=0.05)
        async with runner.run_context(agent=agent, store=store):
            await runner.iter()
    for number, item in enumerate(await store.query_rollouts()):
        assert item.status == "succeeded", item
        spans = list(await store.query_spans(item.rollout_id))
        [session] = [span for span in spans if span.name.endswith(".session")]
        calls = [span for span in spans if "openai.chat.completion" in span.name]
        assert len(calls) == 1 and calls[0].parent_id == session.span_id, [span.name for span in spans]
        assert session.attributes["agentops.span.kind"] == "session"
        [triplet] = TracerTraceToTriplet().adapt(spans)
        assert triplet.reward == 0.5 and f"answer {number}" in str(triplet.response), triplet
    sys.stdout.write(f"agentops {version('agentops')}: 4 rollouts, each with a session and a call; nothing sent away\n")


if __name__ == "__main__":
    asyncio.run(main())
