"""The LLM proxy as algorithms and trainers hold it: started and stopped, its models swapped, its address published."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollout_core.agents.proxy.call_delivery import CallDelivery
from rollout_core.agents.proxy.proxy_app import ProxyApp
from rollout_core.agents.proxy.upstream_pools import Pools, SwapPolicy
from rollout_core.agents.proxy.upstream_requests import Forwarder
from rollout_core.agents.proxy.upstreams import GivenModel, ModelEntry, Upstream, model_entries
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.store import LLM, LightningStore, ProxyLLM
from rollout_core.web.listening import DEFAULT_HOST, MAX_BODY_BYTES, listen, require_key, url_of
from rollout_core.web.threads import ServerThread

T = TypeVar("T")

START_SECONDS = 20.0
"""Longest time that the server may take to start."""
NO_KEY = "EMPTY"
"""What clients that insist on a key send to a proxy that has none."""


class LLMProxy:
    """An OpenAI-compatible server in front of models, which records agents' calls as spans, token by token.

    It runs on a thread and event loop of its own, so an algorithm that blocks does not stop it, and any number of them
    run in a process. Its methods may be called from any thread and loop.

    Args:
        port: 0 takes a free one, which it keeps.
        model_list: the models, see ``upstreams``; may be changed while the proxy runs.
        store: where calls under ``/rollout/{id}/attempt/{id}`` are recorded; safe for threads.
        host: where to listen; other than on loopback only with an ``api_key``.
        api_key: what agents must send. The resource has it.
        public_url: the proxy's address as agents see it, where that is not the machine's own, as behind a gateway.
        max_body_bytes: of a request; more is refused with HTTP 413.
        patience_seconds: how long ``flush`` and ``stop`` wait for a store that is away.
    """

    def __init__(
        self,
        port: int | None = 0,
        model_list: Sequence[GivenModel] = (),
        store: LightningStore | None = None,
        *,
        host: str | None = None,
        api_key: str | None = None,
        public_url: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        patience_seconds: float = 120.0,
    ) -> None:
        self.host = host or DEFAULT_HOST
        require_key(self.host, api_key)
        self.port = port or 0
        self._pools = Pools(model_entries(model_list))
        self._store: LightningStore | None = None
        if store is not None:
            self.set_store(store)
        self._api_key = api_key
        self._public_url = public_url
        self._max_body_bytes = max_body_bytes
        self._patience_seconds = patience_seconds
        self._delivery = CallDelivery()
        self._running: ServerThread | None = None

    def __repr__(self) -> str:
        return f"LLMProxy({url_of(self.host, self.port)}, models={self._pools.names})"

    # Where it is

    def is_running(self) -> bool:
        """Whether it answers; never in a fork of the process that started it."""
        return self._running is not None and self._running.is_alive()

    @property
    def url(self) -> str:
        """Its address, without ``/v1``. Raises ConfigError before the port is known."""
        if self._public_url is not None:
            return self._public_url.rstrip("/").removesuffix("/v1")
        if not self.port:
            raise ConfigError("the proxy has no port yet; start it, or give it one")
        return url_of(self.host, self.port)

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM:
        """A resource for agents: without ids a ProxyLLM, which gets them at each attempt; with both an LLM whose calls
        are recorded under them. ``model`` may be left out if there is only one.

        Raises ConfigError if one id comes without the other, or it is not clear which model is meant.
        """
        names = self._pools.names
        if model is None and len(names) != 1:
            raise ConfigError(f"the proxy serves {len(names)} models ({', '.join(names)}); say which by model=")
        proxied = ProxyLLM(
            endpoint=f"{self.url}/v1",
            model=names[0] if model is None else self._pools.get(model).name,
            api_key=self._api_key or NO_KEY,
            sampling_parameters=dict(sampling_parameters or {}),
        )
        endpoint = proxied.get_base_url(rollout_id, attempt_id)
        if rollout_id is None:
            return proxied
        return LLM(
            endpoint=endpoint,
            model=proxied.model,
            api_key=proxied.api_key,
            sampling_parameters=proxied.sampling_parameters,
        )

    # What it serves

    def set_store(self, store: LightningStore) -> None:
        """Record calls there that begin from now on."""
        if not store.capabilities.get("thread_safe"):
            raise ConfigError(
                f"{type(store).__name__} is not safe for threads, and the proxy has one of its own; wrap it in "
                "LightningStoreThreaded, and use that one everywhere"
            )
        self._store = store

    @property
    def model_list(self) -> list[ModelEntry]:
        """The models served, with their upstreams."""
        return self._pools.entries()

    async def update_model_list(self, model_list: Sequence[GivenModel]) -> None:
        """Serve these models from now on. Requests under way end where they are."""
        entries = model_entries(model_list)

        async def update() -> None:
            self._pools.replace(entries)

        await self._on_loop(update())

    async def swap(self, model: str, upstream: Upstream | Sequence[Upstream], policy: SwapPolicy = "drain") -> None:
        """Let other upstreams answer for a model, while agents go on. No request fails by it: those under way finish
        where they are. Each span has the ``model_id`` of the upstream that answered.

        ``policy`` is ``drain``: new requests go to the new upstream at once, and the call returns when the old one has
        finished its last, so that it can be shut down; ``wait``: new requests wait until then, so that at no time two
        versions answer; ``mix``: as ``drain``, but the call returns at once.

        Raises NotFound for an unknown model.
        """
        upstreams = [upstream] if isinstance(upstream, Upstream) else list(upstream)
        [entry] = model_entries([ModelEntry(model, upstreams)])
        await self._on_loop(self._pools.swap(model, entry.upstreams, policy))

    @asynccontextmanager
    async def paused(self, model: str, *, model_id: str | None = None) -> AsyncIterator[None]:
        """For a server that loads new weights in place: when the block is entered, requests under way have ended; new
        ones wait until it is left. If it ends without an error, the model's upstreams have this ``model_id`` from then
        on. Raises NotFound for an unknown model.
        """
        holder, new = object(), None
        try:
            await self._on_loop(self._pools.hold(model, holder))
            yield
            new = model_id
        finally:
            await self._on_loop(self._pools.let_go(model, holder, new))

    async def flush(self, rollout_id: str | None = None) -> None:
        """Wait until the calls of a rollout are stored, those under way included; without one, all that have ended.

        To be called before the spans of finished rollouts are read. Raises Recoverable if the store does not take them
        within ``patience_seconds``.
        """
        if not self.is_running() and not self._delivery.num_waiting:
            return
        try:
            async with asyncio.timeout(self._patience_seconds if self.is_running() else 0):
                await self._on_loop(self._delivery.flush(rollout_id))
        except TimeoutError:
            raise Recoverable(
                f"{self._delivery.num_waiting} calls are recorded but not stored: the store is away, or the proxy does "
                "not run"
            ) from None

    # Its life

    async def start(self) -> None:
        """Serve; returns when requests are answered. Harmless when it runs.

        Raises ConfigError without a store, or if the port cannot be had.
        """
        if self.is_running():
            return
        if self._store is None:
            raise ConfigError("the proxy has no store to record calls in; call set_store(store) first")
        self._pools = Pools(self._pools.entries())  # in a fork, the requests of the parent never end
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        running = ServerThread(self._serve, listener, "LLM proxy")
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wrap_future(running.started)
        except TimeoutError:
            running.ask_to_stop()
            raise Fatal(f"the proxy at {self.url} did not start within {START_SECONDS:g} s") from None
        self._running = running

    async def stop(self) -> None:
        """Stop serving: requests under way get a few seconds, and what was recorded is stored.

        Raises Recoverable if the store does not take it in time; then it is kept for the next ``start``.
        """
        running, self._running = self._running, None
        if running is None or not running.is_alive():
            return
        running.ask_to_stop()
        await asyncio.to_thread(running.join)

    async def restart(self, *, model_list: Sequence[GivenModel] | None = None) -> None:
        """``stop`` and ``start``, on the same port."""
        await self.stop()
        if model_list is not None:
            await self.update_model_list(model_list)
        await self.start()

    async def _serve(self, running: ServerThread, listener: socket.socket) -> None:
        forwarder = Forwarder()
        app = ProxyApp(
            self._pools,
            forwarder,
            self._delivery,
            self._current_store,
            api_key=self._api_key,
            max_body_bytes=self._max_body_bytes,
        )
        self._delivery.start()
        try:
            await running.serve(app, listener)
        finally:
            await forwarder.close()
            await self._delivery.stop(self._patience_seconds)

    def _current_store(self) -> LightningStore:
        assert self._store is not None, "looked at by start"
        return self._store

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the requests are."""
        running = self._running
        if running is None or not running.is_alive():
            return await work
        return await running.run(work)
