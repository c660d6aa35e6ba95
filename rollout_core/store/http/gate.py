"""Who is let in: those who have the key; and without one, only programs of this machine, no web pages of others.

A web page can make the browser of somebody on this machine send requests to a server on loopback: with the page's
address as Origin, or, where a name of the page's owner leads to 127.0.0.1 (DNS rebinding), with that name as Host.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_core.store.base import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.errors import Forbidden, Unauthorized
from rollout_core.store.http.listening import is_loopback
from rollout_core.store.http.requests import error_reply


class Gate:
    """Lets requests in or refuses them, keeps paths as they were sent, and counts."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, allowed_origins: Sequence[str], metrics: Metrics | None
    ) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._allowed_origins = frozenset(origin.lower().encode() for origin in allowed_origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Ids may hold slashes. So routes are matched before %2F is decoded, and endpoints decode their parts.
        scope["path"] = scope["raw_path"].decode("latin-1")
        refusal = self._refusal(scope)
        if refusal is not None:
            return await error_reply(refusal)(scope, receive, send)
        if self._metrics is None:
            return await self._app(scope, receive, send)
        await self._metrics.watch(self._app, scope, receive, send)

    def _refusal(self, scope: Scope) -> Exception | None:
        if scope["path"] == wire.HEALTH_PATH:
            return None
        if self._authorization is None:
            return self._foreign(scope)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._authorization):
            return None
        return Unauthorized("no valid API key; send it as Authorization: Bearer KEY")

    def _foreign(self, scope: Scope) -> Exception | None:
        """Why this may be the request of a web page of others."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        # Old programs send no Host; browsers always do.
        if len(hosts) > 1 or not all(map(_is_local, hosts)):
            shown = b", ".join(hosts).decode("latin-1")
            return Forbidden(
                f"the request is for the host {shown!r:.200}; without an API key this server answers only to localhost "
                "and loopback addresses; give it a key to use it by another name"
            )
        for name, value in scope["headers"]:
            if name == b"origin" and not self._is_allowed(value.lower(), hosts):
                return Forbidden(
                    f"the request comes from the web page {value.decode('latin-1')!r:.200}; without an API key this "
                    "server accepts none from other sites' pages, unless it was started with their origin "
                    "(--cors-allow-origin)"
                )
        return None

    def _is_allowed(self, origin: bytes, hosts: Sequence[bytes]) -> bool:
        is_own = any(origin == b"http://" + host.lower() for host in hosts)
        return is_own or origin in self._allowed_origins or b"*" in self._allowed_origins


@lru_cache(256)
def _is_local(host: bytes) -> bool:
    """Whether a Host header names this machine as only this machine can."""
    text = host.decode("latin-1").lower()
    try:
        parts = urlsplit(f"//{text}")
        return parts.netloc == text and "@" not in text and is_loopback(parts.hostname or "")
    except ValueError:
        return False


# Metrics

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNTS = ("total_rollouts", "total_attempts", "total_spans", "total_resources", "total_workers")
MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable by which prometheus-client adds up the worker processes of one server."""


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_store_requests", "Requests answered", ["operation", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "rollout_store_request_seconds",
            "Seconds from a request's header to its reply's end",
            ["operation"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._held = Gauge(
            "rollout_store_records",
            "Records in the store",
            ["kind"],
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    async def watch(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and count it."""
        started = time.perf_counter()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, note_status)
        finally:
            # Labels are names of operations, never paths: ids would make a time series each.
            route = scope.get("route")
            operation = route.name if route is not None else "unknown"
            self._requests.labels(operation, status).inc()
            self._seconds.labels(operation).observe(time.perf_counter() - started)

    async def show(self, store: LightningStore) -> Response:
        """The metrics page."""
        for name, value in (await store.statistics()).items():
            if name in _COUNTS and isinstance(value, int):
                self._held.labels(name.removeprefix("total_")).set(value)
        registry = self._registry
        if os.environ.get(MULTIPROCESS_FOLDER):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
