"""A store together with the HTTP server in front of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from starlette.applications import Starlette

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.loops import refuse_finalizers
from rollout_core.store.contract import LightningStore
from rollout_core.store.forwarding_store import ForwardingLightningStore, LightningStoreThreaded
from rollout_core.store.http import wire
from rollout_core.store.http.app import AppSettings, create_app, serving
from rollout_core.store.http.client import LightningStoreClient
from rollout_core.store.types import LightningStoreCapabilities
from rollout_core.web.listening import (
    DEFAULT_HOST,
    MAX_BODY_BYTES,
    MainServer,
    Server,
    listen,
    require_key,
    url_of,
    uvicorn_config,
)

LaunchMode = Literal["thread", "asyncio", "mp"]

START_SECONDS = 20.0
"""Longest time that a server may take to start."""


class LightningStoreServer(ForwardingLightningStore):
    """A store that other processes reach over HTTP, and that this process uses directly.

    ``launch_mode`` says where ``start`` puts the web server: in a ``thread`` of its own, as a task of the calling event
    loop (``asyncio``), or in ``n_workers`` processes (``mp``; for stores that processes can share, such as
    ``SqlLightningStore``). ``port`` None takes a free one. ``cors_allow_origins`` lists the origins of web pages that
    may use the server (``*``: all); ``prometheus`` adds ``/metrics``; ``max_body_bytes`` bounds a request's body.
    Without an ``api_key`` it listens on loopback only.

    In another process (forked, or unpickled anywhere) the object has neither store nor server, and talks to this one
    over HTTP. So there is one copy of the store, whoever holds this object. The pickle holds address and key.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: Sequence[str] | str | None = None,
        launch_mode: LaunchMode = "thread",
        n_workers: int = 1,
        prometheus: bool = False,
        *,
        api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.host = host or DEFAULT_HOST
        self.port = port or 0
        require_key(self.host, api_key)
        capabilities = store.capabilities
        if launch_mode not in ("thread", "asyncio", "mp"):
            raise ConfigError(f"launch_mode is {launch_mode!r}; expected thread, asyncio or mp")
        if n_workers < 1 or (n_workers > 1 and launch_mode != "mp"):
            raise ConfigError(f"n_workers is {n_workers} in launch mode {launch_mode}; only mp has more than one")
        if launch_mode == "mp" and not capabilities.get("zero_copy"):
            raise ConfigError(f"{type(store).__name__} cannot be shared by processes; use launch mode thread")
        if launch_mode == "thread" and not capabilities.get("thread_safe"):
            # The server's thread and the callers of this object share it.
            store = LightningStoreThreaded(store)
        origins = [cors_allow_origins] if isinstance(cors_allow_origins, str) else list(cors_allow_origins or ())
        self._settings = AppSettings(api_key, tuple(origins), max_body_bytes, prometheus)
        self._launch_mode: LaunchMode = launch_mode
        self._n_workers = n_workers
        self.store: LightningStore | None = store
        self.app: Starlette | None = create_app(store, self._settings)
        self._running: _Running | None = None
        self._owner_pid: int | None = os.getpid()
        self._client: LightningStoreClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port, "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.host, self.port, self._settings = state["host"], state["port"], state["_settings"]
        self.store = self.app = self._running = self._owner_pid = self._client = None

    @property
    def endpoint(self) -> str:
        """URL for clients on this machine. Raises ConfigError before the port is known."""
        if not self.port:
            raise ConfigError("the server has no port yet; start it, or give one")
        return url_of(self.host, self.port)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store; and whoever holds this object uses the one store, which has an OTLP endpoint now."""
        if self._is_owner():
            assert self.store is not None
            return {**self.store.capabilities, "zero_copy": True, "otlp_traces": True}
        return self._http_client().capabilities

    def otlp_traces_endpoint(self) -> str:
        """URL for an OTLP/HTTP exporter."""
        return self.endpoint + wire.TRACES_PATH

    def backend(self) -> LightningStore:
        """The store itself in the process that made this object, a client of it elsewhere."""
        if self._is_owner():
            assert self.store is not None
            return self.store
        return self._http_client()

    def _is_owner(self) -> bool:
        return self._owner_pid == os.getpid()

    def _http_client(self) -> LightningStoreClient:
        if self._client is None:
            self._client = LightningStoreClient(self.endpoint, api_key=self._settings.api_key)
        return self._client

    # The server

    async def start(self) -> None:
        """Start serving in the background; done when requests are answered.

        Raises ConfigError if the port cannot be had, Fatal in a process that does not hold the store.
        """
        app, store = self._require_owner()
        if self._running is not None:
            return
        listener = self._bind()
        if self._launch_mode == "thread":
            self._running = _InThread(app, listener)
        elif self._launch_mode == "asyncio":
            self._running = _InLoop(app, listener)
        else:
            self._running = _InProcesses(store, self._settings, listener, self._n_workers)
        deadline = time.monotonic() + START_SECONDS
        client = LightningStoreClient(self.endpoint, retry_delays=(), api_key=self._settings.api_key)
        try:
            while not (self._running.started() and await client.is_healthy()):
                if time.monotonic() > deadline or not self._running.alive():
                    await self.stop()
                    raise Fatal(f"the server at {self.endpoint} did not start; the log says why")
                await asyncio.sleep(0.01)
        finally:
            await client.close()

    async def run_forever(self) -> None:
        """Serve in the calling task until it is cancelled or the process gets SIGTERM or SIGINT."""
        app, _ = self._require_owner()
        server = MainServer(uvicorn_config(app))
        await server.serve(sockets=[self._bind()])

    async def stop(self) -> None:
        """Stop serving; requests under way may finish. The store stays open."""
        self._require_owner()
        running, self._running = self._running, None
        if running is not None:
            await running.stop()

    async def close(self) -> None:
        """Stop serving and close the store; elsewhere, close the connections to it."""
        if self._client is not None:
            await self._client.close()
        if self._is_owner():
            await self.stop()
            assert self.store is not None
            await self.store.close()

    def _require_owner(self) -> tuple[Starlette, LightningStore]:
        if not self._is_owner():
            raise Fatal("only the process that made a server can start and stop it; here it is a client")
        assert self.app is not None and self.store is not None
        return self.app, self.store

    def _bind(self) -> socket.socket:
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        return listener


class _Running:
    """A server under way."""

    def started(self) -> bool:
        """Whether it listens."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether it may still start, or go on."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Let requests finish, and end."""
        raise NotImplementedError


class _InThread(_Running):
    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        self._server = Server(uvicorn_config(app))
        self._thread = threading.Thread(target=self._run, args=[listener], name="store-server", daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        async def serve() -> None:
            refuse_finalizers(asyncio.get_running_loop())
            await self._server.serve(sockets=[listener])

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(serve())

    def started(self) -> bool:
        return self._server.started

    def alive(self) -> bool:
        return self._thread.is_alive()

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join)


class _InLoop(_Running):
    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        self._server = Server(uvicorn_config(app))
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    def started(self) -> bool:
        return self._server.started

    def alive(self) -> bool:
        return not self._task.done()

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


class _InProcesses(_Running):
    def __init__(self, store: LightningStore, settings: AppSettings, listener: socket.socket, n_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(target=_serve_copy, args=(store, settings, listener, os.getpid()), daemon=True)
            for _ in range(n_workers)
        ]
        for process in self._processes:
            process.start()
        listener.close()

    def started(self) -> bool:
        return True  # the answer to a request shows it

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    async def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.join)


def _serve_copy(store: LightningStore, settings: AppSettings, listener: socket.socket, parent_pid: int) -> None:
    """What a worker process does until it is asked to stop, or its parent is gone."""
    app = create_app(store, settings, lifespan=lambda _: serving(store, parent_pid))
    MainServer(uvicorn_config(app)).run(sockets=[listener])
