"""The web application in front of a store: its routes, what stands before them, and how they are described."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rollout_core.base.errors import NotFound
from rollout_core.store.base import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.large_bodies import Lane
from rollout_core.store.http.metrics import METRICS_PATH, Metrics
from rollout_core.store.http.otlp import receive_traces
from rollout_core.store.http.requests import BodyLimits, Memo, direct_app, endpoint_of
from rollout_core.store.http.routes import ROUTES, Route
from rollout_core.web.errors import ErrorBody, error_reply
from rollout_core.web.gate import Gate
from rollout_core.web.listening import tune_gc

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
    direct: dict[tuple[str, str], ASGIApp] = {}
    for route in ROUTES:
        endpoint = endpoint_of(store, route, limits, memo, lane)
        app.add_route(route.path, endpoint, methods=[route.method], name=route.name, include_in_schema=False)
        if "{" not in route.path:
            direct[route.method, route.path] = direct_app(endpoint, app.routes[-1])

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
    app.add_middleware(
        Gate,
        api_key=settings.api_key,
        allowed_origins=settings.cors_allow_origins,
        public=(wire.HEALTH_PATH,),
        direct=direct,
        watch=None if metrics is None else metrics.watch,
    )
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


@contextlib.asynccontextmanager
async def serving(store: LightningStore, parent_pid: int | None = None) -> AsyncIterator[None]:
    """The lifespan of an application that has a process to itself: in the end the store is closed.

    A worker process ends when ``parent_pid`` is gone: left alone, it would keep the port from the next server.
    """
    tune_gc()
    watch = None if parent_pid is None else asyncio.create_task(_end_with(parent_pid))
    try:
        yield
    finally:
        if watch is not None:
            watch.cancel()
        await store.close()


async def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        await asyncio.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


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
