"""The web application in front of a store."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_core.errors import ConfigError, NotFound, Recoverable, UnknownOutcome
from rollout_core.store.base import LightningStore
from rollout_core.store.codec import encode_stored
from rollout_core.store.http import wire
from rollout_core.store.http.bodies import BodyLimits, read_body
from rollout_core.store.http.description import describe
from rollout_core.store.http.errors import Unauthorized, Unprocessable, error_body, status_of
from rollout_core.store.http.memo import Memo
from rollout_core.store.http.metrics import Metrics
from rollout_core.store.http.operations import OPERATIONS, Call, Operation
from rollout_core.store.http.otlp import receive_traces

logger = logging.getLogger(__name__)

HEALTH_PATH = wire.PREFIX + "/health"
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
    app = FastAPI(title="LightningStore", lifespan=lifespan, redirect_slashes=False)
    # Plain routes: bodies are read, checked and written here, once, without FastAPI's own passes.
    for operation in OPERATIONS:
        app.add_route(
            operation.path,
            _endpoint(store, operation, limits, memo),
            methods=[operation.method],
            name=operation.name,
            include_in_schema=False,
        )

    async def health(request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=wire.JSON)

    async def traces(request: Request) -> Response:
        return await receive_traces(store, request.scope, request.receive, limits)

    app.add_route(HEALTH_PATH, health, methods=["GET"], include_in_schema=False)
    app.add_route(wire.TRACES_PATH, traces, methods=["POST"], name="traces", include_in_schema=False)
    if metrics is not None:

        async def show_metrics(request: Request) -> Response:
            return await metrics.show(store)

        app.add_route(METRICS_PATH, show_metrics, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _say_http_error)
    app.openapi = lambda: describe(app.title, OPERATIONS)  # pyright: ignore[reportAttributeAccessIssue]
    app.add_middleware(_Gate, api_key=settings.api_key, metrics=metrics)
    if settings.cors_allow_origins:
        # The outermost: browsers ask for permission without a key, and must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[wire.UNFINISHED_HEADER],
        )
    return app


def _endpoint(
    store: LightningStore, operation: Operation, limits: BodyLimits, memo: Memo
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        try:
            call = await _read_call(operation, request, limits)
            if call.key is None or not operation.remembered:
                return await _answer(store, operation, call)
            if call.final and not memo.known(call.key):
                raise UnknownOutcome(
                    "the connection was lost while this was sent, and this server does not know whether it was done; "
                    "look before you repeat it"
                )
            return await memo.once(call.key, lambda: _answer(store, operation, call))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            return error_reply(error)

    return serve


async def _answer(store: LightningStore, operation: Operation, call: Call) -> Response:
    result = await operation.handler(store, call)
    data = result if isinstance(result, bytes) else encode_stored(result)
    return Response(data, operation.status, call.reply_headers, media_type=wire.JSON)


async def _read_call(operation: Operation, request: Request, limits: BodyLimits) -> Call:
    headers = request.headers
    body = None
    try:
        if operation.method == "GET":
            if operation.takes is not None:
                body = operation.read_query(request.query_params)
        elif operation.adapter is not None:
            data = await read_body(request.scope, request.receive, limits)
            if data or not operation.may_be_empty:
                body = operation.adapter.validate_json(data)
    except ValidationError as error:
        raise _unprocessable(error) from error
    try:
        path = {name: unquote(value, errors="strict") for name, value in request.path_params.items()}
    except UnicodeDecodeError as error:
        raise ConfigError(f"the path is not UTF-8 behind its percent signs: {error}") from error
    repeated = headers.get(wire.REPEATED_HEADER)
    return Call(path, body, headers.get(wire.KEY_HEADER), repeated is not None, repeated == "final", {})


def _unprocessable(error: ValidationError) -> ConfigError:
    """What pydantic found, one line a place. Bodies that are not JSON at all are bad requests."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A body may have a million places.
    lines = [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:20]]
    kind = ConfigError if problems[0]["type"] == "json_invalid" else Unprocessable
    return kind(f"not a valid request: {'; '.join(lines)}", lines)


def error_reply(error: Exception) -> Response:
    """The reply that says ``error``; what nobody foresaw is logged."""
    status = status_of(error)
    if status >= 500:
        logger.error("a request failed: %s", error, exc_info=error if status == 500 else None)
    headers: dict[str, str] = {}
    if isinstance(error, Recoverable):
        headers["retry-after"] = str(max(1, round(error.hint.delay_seconds)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status, headers, media_type=wire.JSON)


async def _say_http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    reply = error_reply(NotFound(f"there is no {request.method} {request.url.path}: {error.detail}"))
    reply.status_code = error.status_code
    return reply


class _Gate:
    """Lets in who has the key, keeps paths as they were sent, and counts."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics | None) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Ids may hold slashes. So routes are matched before %2F is decoded, and endpoints decode their parts.
        scope["path"] = scope["raw_path"].decode("latin-1")
        if not self._is_allowed(scope):
            reply = error_reply(Unauthorized("no valid API key; send it as Authorization: Bearer KEY"))
            return await reply(scope, receive, send)
        if self._metrics is None:
            return await self._app(scope, receive, send)
        await self._metrics.watch(self._app, scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] == HEALTH_PATH:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._authorization)
