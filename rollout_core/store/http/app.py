"""The web application in front of a store: its routes, what stands before them, and how they are described.

It is Starlette's, and ``requests`` reads, checks and answers each request once. FastAPI's routes would not save that
work: repeats, limits and large bodies need code before and behind them. They take 1.6 times as long for a small
request, and 2.7 times as long for a hundred spans (`benchmarks/results/store.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route as WebRoute
from starlette.types import ASGIApp

from rollout_core.base.errors import NotFound
from rollout_core.store.contract import LightningStore
from rollout_core.store.http import event_stream, wire
from rollout_core.store.http.large_bodies import Lane
from rollout_core.store.http.otlp import receive_traces
from rollout_core.store.http.requests import Memo, direct_app, endpoint_of
from rollout_core.store.http.routes import ROUTES, Route
from rollout_core.store.http.server_metrics import METRICS_PATH, Metrics
from rollout_core.web.http_errors import ErrorBody
from rollout_core.web.listening import MAX_BODY_BYTES, BodyLimits, Gate, tune_gc
from rollout_core.web.replies import error_reply

_FEWER = "; send fewer records in a request, or keep large values in the object store"


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
    lifespan: Callable[[Starlette], Any] | None = None,
) -> Starlette:
    """The application that serves ``store``. It neither opens nor closes it; ``lifespan`` may."""
    settings = settings or AppSettings()
    limits = BodyLimits(settings.max_body_bytes, advice=_FEWER)
    metrics = Metrics() if settings.prometheus else None
    memo = Memo()
    lane = Lane()
    routes: list[WebRoute] = []
    direct: dict[tuple[str, str], ASGIApp] = {}
    for route in ROUTES:
        endpoint = endpoint_of(store, route, limits, memo, lane)
        routes.append(WebRoute(route.path, endpoint, methods=[route.method], name=route.name))
        if "{" not in route.path:
            direct[route.method, route.path] = direct_app(endpoint, routes[-1])

    async def health(request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=wire.JSON)

    async def traces(request: Request) -> Response:
        return await receive_traces(store, request.scope, request.receive, limits, lane)

    async def watch(request: Request) -> Response:
        return await event_stream.watch(store, request)

    routes.append(WebRoute(wire.HEALTH_PATH, health))
    routes.append(WebRoute(wire.WATCH_PATH, watch))
    routes.append(WebRoute(wire.TRACES_PATH, traces, methods=["POST"]))
    routes += [WebRoute(DESCRIPTION_PATH, _describe), WebRoute("/docs", _show_docs), WebRoute("/redoc", _show_docs)]
    if metrics is not None:

        async def show_metrics(request: Request) -> Response:
            return await metrics.show(store)

        routes.append(WebRoute(METRICS_PATH, show_metrics))
    middleware: list[Middleware] = []
    if settings.cors_allow_origins:
        # The outermost: browsers ask for permission without a key, and must be able to read a refusal.
        # With credentials no answer may say ``*``, so it is a pattern, and each page reads its own origin.
        everybody = "*" in settings.cors_allow_origins
        cors = Middleware(
            CORSMiddleware,
            allow_origins=() if everybody else settings.cors_allow_origins,
            allow_origin_regex=".*" if everybody else None,
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[wire.UNFINISHED_HEADER],
        )
        middleware.append(cors)
    gate = Middleware(
        Gate,
        api_key=settings.api_key,
        allowed_origins=settings.cors_allow_origins,
        public=(wire.HEALTH_PATH,),
        direct=direct,
        watch=None if metrics is None else metrics.watch,
    )
    app = Starlette(
        routes=routes,
        middleware=[*middleware, gate],
        exception_handlers={HTTPException: _say_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
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

TITLE = "LightningStore"
DESCRIPTION_PATH = "/openapi.json"


async def _describe(request: Request) -> Response:
    return JSONResponse(_description())


async def _show_docs(request: Request) -> Response:
    """A page that needs nothing of other sites."""
    requests = [
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(one['summary'])}"
        for path, methods in _description()["paths"].items()
        for method, one in methods.items()
    ]
    head = f'<!doctype html><meta charset="utf-8"><title>{TITLE}</title><h1>{TITLE}</h1>'
    link = f'<p>Bodies, parameters and replies: <a href="{DESCRIPTION_PATH}">{DESCRIPTION_PATH}</a> (OpenAPI 3.1).'
    return HTMLResponse(f"{head}{link}<table>{''.join(requests)}</table>")


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


def describe(routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
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
        "info": {"title": TITLE, "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


_description = cache(describe)


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
