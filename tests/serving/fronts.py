"""What the tests of serving share: a front over a small engine, which is a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rollout_core.base.ids import ContentId
from rollout_core.serving.front import Front, FrontLimits, ServedModel
from rollout_core.serving.program import DrainingServer
from rollout_core.serving.replica import Replica
from rollout_core.web.listening import listen
from tests.store.patience import LONG, until

MODEL = ServedModel("tiny", ContentId("ab" * 32))
UPSTREAM = Path(__file__).parent / "upstream.py"


def upstream_in(folder: Path):
    """The program of an engine that keeps its notes in ``folder``."""
    return lambda socket: [sys.executable, "-P", str(UPSTREAM), str(socket), str(folder)]


@dataclass
class RunningFront:
    url: str
    client: aiohttp.ClientSession
    replica: Replica
    front: Front
    server: DrainingServer
    task: asyncio.Task[None]
    folder: Path

    def notes(self, line: str) -> int:
        """How often the engine noted this."""
        log = self.folder / "log"
        return log.read_text().splitlines().count(line) if log.exists() else 0

    def post(self, prompt: str, *, path: str = "/v1/completions", **body: Any):
        named = {"input": prompt} if path == "/v1/responses" else {"prompt": prompt}
        return self.client.post(path, json={"model": "tiny", **named, **body})

    async def ask(self, prompt: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.post(prompt, **body) as response:
            return response.status, await response.json()

    async def figure(self, name: str) -> float:
        async with self.client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def front_over(
    folder: Path, *, keys: Sequence[str] = (), drain_seconds: float = LONG, **limits: Any
) -> AsyncIterator[RunningFront]:
    """A server that answers, with its engine."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    replica = Replica(upstream_in(folder), start_seconds=LONG)
    front = Front(replica, MODEL, keys, FrontLimits(**{"wait_seconds": LONG, **limits}))
    server = DrainingServer(front, drain_seconds)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        await replica.started
        async with aiohttp.ClientSession(url, headers=headers) as client:
            yield RunningFront(url, client, replica, front, server, task, folder)
    finally:
        server.should_exit = server.force_exit = True
        await task
        await replica.stop()
        listener.close()


def events_of(text: str) -> list[Any]:
    """What the events of a stream hold, each parsed."""
    assert text.endswith("\n\n"), text[-200:]
    lines = [line for block in text.strip().split("\n\n") for line in block.splitlines() if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


__all__ = ["LONG", "MODEL", "RunningFront", "events_of", "front_over", "until", "upstream_in"]
