"""The web application in front of a store: who is let in, what is counted, where requests go, how it is described.

Let in are those who have the key; and without one, only programs of this machine, no web pages of others. A web page
can make the browser of somebody on this machine send requests to a server on loopback: with the page's address as
Origin, or, where a name of the page's owner leads to 127.0.0.1 (DNS rebinding), with that name as Host.
"""

from __future__ import annotations

import hmac
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_core.base.errors import NotFound, UnknownOutcome
from rollout_core.store.base import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.errors import ErrorBody, Forbidden, Unauthorized
from rollout_core.store.http.large_bodies import Lane
from rollout_core.store.http.listening import is_loopback
from rollout_core.store.http.otlp import receive_traces
from rollout_core.store.http.requests import BodyLimits, Memo, answer, error_reply, read_call
from rollout_core.store.http.routes import ROUTES, Route

METRICS_PATH = "/metrics"
MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True)
class AppSettings:
    """How a store is served."""

    api_key: str | None = None
    """What clients must send as ``Authorization: Bearer KEY``; None: nothing."""
    cors_allow_origins: Sequence[str] = ()
    """Origins of web pages that may use the server; ``*``: all."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Most bytes of a request body, unpacked."""
    prometheus: bool = False
    """Whether there is a ``/metrics`` page."""

    def __repr__(self) -> str:
        # Settings end up in logs and tracebacks; the key must not.
        return f"AppSettings(api_key={'...' if self.api_key else None}, max_body_bytes={self.max_body_bytes})"


def create_app(
    store: LightningStore,
    settings: AppSettings | None = None,
    *,
    lifespan: Callable[[FastAPI], Any] | None = None,
) -> FastAPI:
    """The application that serves ``store``. It neither opens nor closes it; ``lifespan`` may."""
    settings = settings or AppSettings()
    limits = BodyLimits(settings.max_body_bytes)
    metrics = Metrics() if settings.prometheus else None
    memo = Memo()
    lane = Lane()
    app = FastAPI(title="LightningStore", lifespan=lifespan, redirect_slashes=False)
    # Plain routes: bodies are read, checked and written here, once, without FastAPI's own passes.
    for route in ROUTES:
        app.add_route(
            route.path,
            _endpoint(store, route, limits, memo, lane),
            methods=[route.method],
            name=route.name,
            include_in_schema=False,
        )

    async def health(request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=wire.JSON)

    async def traces(request: Request) -> Response:
        return await receive_traces(store, request.scope, request.receive, limits, lane)

    app.add_route(wire.HEALTH_PATH, health, methods=["GET"], include_in_schema=False)
    app.add_route(wire.TRACES_PATH, traces, methods=["POST"], name="traces", include_in_schema=False)
    if metrics is not None:

        async def show_metrics(request: Request) -> Response:
            return await metrics.show(store)

        app.add_route(METRICS_PATH, show_metrics, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _say_http_error)
    app.openapi = cache(lambda: describe(app.title))  # pyright: ignore[reportAttributeAccessIssue]
    app.add_middleware(Gate, api_key=settings.api_key, allowed_origins=settings.cors_allow_origins, metrics=metrics)
    if settings.cors_allow_origins:
        # The outermost: browsers ask for permission without a key, and must be able to read a refusal.
        # With credentials no answer may say ``*``, so it is a pattern, and each page reads its own origin.
        everybody = "*" in settings.cors_allow_origins
        app.add_middleware(
            CORSMiddleware,
            allow_origins=() if everybody else settings.cors_allow_origins,
            allow_origin_regex=".*" if everybody else None,
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[wire.UNFINISHED_HEADER],
        )
    return app


def _endpoint(
    store: LightningStore, route: Route, limits: BodyLimits, memo: Memo, lane: Lane
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        try:
            call = await read_call(route, request, limits, lane)
            if call.key is None or not route.remembered:
                return await answer(store, route, call, lane)
            if call.final and not memo.known(call.key):
                raise UnknownOutcome(
                    "the connection was lost while this was sent, and this server does not know whether it was done; "
                    "look before you repeat it"
                )
            return await memo.once(call.key, call.digest, lambda: answer(store, route, call, lane))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            return error_reply(error)

    return serve


async def _say_http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    reply = error_reply(NotFound(f"there is no {request.method} {request.url.path}: {error.detail}"))
    reply.status_code = error.status_code
    return reply


# The description

_ERRORS = {
    "400": "A value makes no sense, or the body is not JSON",
    "401": "No API key, or a wrong one",
    "404": "Something named does not exist",
    "408": "The body did not arrive in time",
    "409": "The thing changed under the caller",
    "410": "What was asked for is gone",
    "413": "The body is too large",
    "415": "The body is packed in an unknown way",
    "422": "The body is JSON, but not of this form",
    "503": "Passing trouble of the storage; the same request can be sent again",
}


def describe(title: str, routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
    """The OpenAPI description of the server, as JSON."""
    models = [
        (route, mode, TypeAdapter(model))
        for route in routes
        for mode, model in (("validation", route.takes), ("serialization", route.gives))
        if model is not None
    ]
    error = TypeAdapter(ErrorBody)
    schemas, definitions = TypeAdapter.json_schemas(
        [*models, ("error", "serialization", error)],  # pyright: ignore[reportArgumentType] - the modes are literal
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_one(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _describe_one(route: Route, schemas: Any) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            str(route.status): _content("Done", schemas.get((route, "serialization"), {})),
            **{status: _content(text, schemas["error", "serialization"]) for status, text in _ERRORS.items()},
        },
    }
    if route.method == "GET" and route.takes is not None:
        fields = TypeAdapter(route.takes).json_schema()
        parameters += [
            {"name": name, "in": "query", "required": name in fields.get("required", ()), "schema": schema}
            for name, schema in fields["properties"].items()
        ]
    elif route.takes is not None:
        described["requestBody"] = {
            "required": not route.may_be_empty,
            "content": {wire.JSON: {"schema": schemas[route, "validation"]}},
        }
    if parameters:
        described["parameters"] = parameters
    return described


def _content(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {wire.JSON: {"schema": schema}}}


# Who is let in


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
        refusal = self.refusal(scope)
        if refusal is not None:
            return await error_reply(refusal)(scope, receive, send)
        if self._metrics is None:
            return await self._app(scope, receive, send)
        await self._metrics.watch(self._app, scope, receive, send)

    def refusal(self, scope: Scope) -> Exception | None:
        """Why this request is not let in, whose path is as it was sent; None where it is."""
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
