"""What the tests of serving share: a front over a small engine, which is a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId
from rollout_core.inference.backend import ModelRef
from rollout_core.serving.feedback import FeedbackDesk
from rollout_core.serving.following import Follow, Follower
from rollout_core.serving.front import Front, FrontLimits
from rollout_core.serving.program import DrainingServer
from rollout_core.serving.replica import Program, Replica
from rollout_core.serving.weights import Canary, Examined, Weights
from rollout_core.web.listening import listen
from tests.store.patience import LONG, until

MODEL = ContentId("ab" * 32)
OTHER = ContentId("cd" * 32)
UPSTREAM = Path(__file__).parent / "upstream.py"
LOGPROB = -1.5
TOLERANCE = 0.01


def put_weights(folder: Path, model_id: ContentId, *, does: str = "fine", logprob: float = LOGPROB) -> None:
    """Weights of that id, as the engine of these tests has them: ``does`` is what it does when it takes them, and
    ``logprob`` what it says of any token."""
    place = folder / "models" / model_id
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").touch()
    (place / "weights").write_text(f"{model_id} {logprob} {does}")


def weights_in(folder: Path) -> Weights:
    """Models by their id; one fits in the place of another unless there is a file ``odd`` in its folder."""

    def fetch(model_id: ContentId) -> Path:
        place = folder / "models" / model_id
        if not place.exists():
            raise NotFound(f"no model {model_id} is in the object store")
        return place

    async def examine(model: ModelRef, instead_of: ModelRef | None) -> Examined:
        fits = instead_of is not None and not (model.folder / "odd").exists()
        return Examined(canary=Canary(token_ids=[1, 2, 3], logprobs=[LOGPROB, LOGPROB]), fits=fits)

    return Weights(fetch, examine)


def replica_in(folder: Path, *, program: Program | None = None, start_seconds: float = LONG) -> Replica:
    """An engine that keeps its notes in ``folder`` and begins with MODEL."""
    if not (folder / "models" / MODEL).exists():
        put_weights(folder, MODEL)
    command = [sys.executable, "-P", str(UPSTREAM)]
    return Replica(
        program or (lambda socket, model: [*command, str(socket), str(folder), str(model)]),
        weights_in(folder),
        MODEL,
        name="tiny",
        reload=lambda model: {"method": "reload", "args": [str(model)]},
        start_seconds=start_seconds,
        tolerance=TOLERANCE,
    )


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
    folder: Path,
    *,
    keys: Sequence[str] = (),
    drain_seconds: float = LONG,
    latest: Callable[[], Awaitable[ContentId | None]] | None = None,
    desk: FeedbackDesk | None = None,
    **limits: Any,
) -> AsyncIterator[RunningFront]:
    """A server that answers, with its engine; with ``latest`` it follows that."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    replica = replica_in(folder)
    follower = None if latest is None else Follower(replica, Follow("policy", latest), look_seconds=0.01)
    limited = FrontLimits(**{"wait_seconds": LONG, **limits})
    front = Front(replica, "tiny", keys, limited, follower=follower, desk=desk)
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
        if follower is not None:
            await follower.stop()
        await replica.stop()
        listener.close()


def events_of(text: str) -> list[Any]:
    """What the events of a stream hold, each parsed."""
    assert text.endswith("\n\n"), text[-200:]
    lines = [line for block in text.strip().split("\n\n") for line in block.splitlines() if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


__all__ = [
    "LONG",
    "MODEL",
    "OTHER",
    "RunningFront",
    "events_of",
    "front_over",
    "put_weights",
    "replica_in",
    "until",
    "weights_in",
]
