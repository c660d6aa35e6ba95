"""The server of a model as a program: what ``rollout serve`` runs."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from rollout_core.base.determinism import probe_device
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.logs import configure
from rollout_core.base.settings import locations
from rollout_core.config import VLLMBackend
from rollout_core.inference.vllm_backend import reload_call
from rollout_core.serving.feedback import feedback_desk
from rollout_core.serving.following import Follow, Follower
from rollout_core.serving.front import Front, FrontLimits
from rollout_core.serving.listed import listed
from rollout_core.serving.recording import RecordSettings
from rollout_core.serving.replica import Replica
from rollout_core.serving.vllm_job import ServerJob
from rollout_core.serving.weights import Weights
from rollout_core.web.listening import MainServer, listen, require_key, url_of, uvicorn_config

LAST_SECONDS = 5.0
"""After the time of a drain, for the events that say that the server stops."""


@dataclass(frozen=True)
class ServingSettings:
    """Arguments of ``rollout serve``."""

    host: str
    port: int
    api_key_env: tuple[str, ...] = ()
    """Environment variables, each of which holds a key."""
    max_queue: int = 256
    """Most requests that wait, besides those that the engine answers together."""
    drain_seconds: float = 30.0
    record: RecordSettings | None = None
    """None: nothing is recorded."""

    def keys(self) -> list[str]:
        """Raises ConfigError for a variable that is not set, a key that no client could send, and a server without one
        that other machines can reach."""
        keys: list[str] = []
        for name in self.api_key_env:
            if name not in os.environ:
                raise ConfigError(f"--api-key-env names {name}, which is not set in the environment")
            keys.append(os.environ[name])
        for key in keys or [None]:
            require_key(self.host, key)
        return keys


def serve_vllm(
    name: str,
    model_id: ContentId,
    weights: Weights,
    backend: VLLMBackend,
    settings: ServingSettings,
    announce: Callable[[str], None],
    *,
    tool_call_parser: str | None = None,
    follow: AbstractAsyncContextManager[Follow] | None = None,
) -> None:
    """Serve a model by vLLM until SIGTERM or SIGINT; ``announce`` gets a line when it serves.

    Raises ConfigError for settings that cannot be served, Fatal where the engine does not start.
    """

    def program(path: Path, folder: Path) -> list[str]:
        job = ServerJob(
            owner=os.getpid(),
            folder=folder,
            name=name,
            socket=path,
            backend=backend,
            tool_call_parser=tool_call_parser,
        )
        return [sys.executable, "-P", "-m", "rollout_core.serving.vllm_server", job.model_dump_json()]

    def replica() -> Replica:
        return Replica(
            program,
            weights,
            model_id,
            name=name,
            reload=lambda folder: reload_call(folder, probe_device()),
            start_seconds=backend.start_timeout_seconds,
            tolerance=backend.parity_tolerance,
        )

    serve(name, replica, settings, announce, max_together=backend.max_num_seqs, follow=follow)


def serve(
    name: str,
    make_replica: Callable[[], Replica],
    settings: ServingSettings,
    announce: Callable[[str], None],
    *,
    max_together: int,
    follow: AbstractAsyncContextManager[Follow] | None = None,
) -> None:
    """As `serve_vllm`, by any engine. ``make_replica`` is called on the server's event loop, and ``follow`` entered
    there."""
    keys = settings.keys()
    configure(logging.WARNING, "%(asctime)s %(name)s %(levelname)s %(message)s")
    limits = FrontLimits(max_requests=max_together + settings.max_queue)
    _allow_connections(2 * limits.max_requests)
    listener = listen(settings.host, settings.port)
    address = url_of(settings.host, listener.getsockname()[1])

    async def run() -> None:
        async with AsyncExitStack() as stack:
            desk = await stack.enter_async_context(feedback_desk(settings.record))
            replica = make_replica()
            stack.push_async_callback(replica.stop)
            follower = None
            if follow is not None:
                follower = Follower(replica, await stack.enter_async_context(follow))
                stack.push_async_callback(follower.stop)
            front = Front(replica, name, keys, limits, follower=follower, desk=desk)
            server = DrainingServer(front, settings.drain_seconds)
            replica.started.add_done_callback(server.on_engine(lambda: announce(f"{name} serves at {address}")))
            with listed(locations().cache, address, name):
                await server.serve(sockets=[listener])
        if replica.started.done():
            replica.started.result()  # what ended the first start

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class DrainingServer(MainServer):
    """uvicorn's server, which lets requests under way finish."""

    def __init__(self, front: Front, drain_seconds: float) -> None:
        config = uvicorn_config(front)
        config.lifespan = "off"
        config.timeout_graceful_shutdown = round(drain_seconds + LAST_SECONDS)
        super().__init__(config)
        self._front, self._drain_seconds = front, drain_seconds

    def on_engine(self, announce: Callable[[], None]) -> Callable[[asyncio.Future[None]], Any]:
        """What to call at the end of the engine's first start: a server without an engine ends."""

        def ended(started: asyncio.Future[None]) -> None:
            if started.cancelled() or started.exception() is not None:
                self.should_exit = True
            else:
                announce()

        return ended

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front.drain(self._drain_seconds)
        await super().shutdown(sockets)


def _allow_connections(count: int) -> None:
    """Raise the limit to open files, as far as this user may: a request has a connection on either side."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, count + 1024)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
