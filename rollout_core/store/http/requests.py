"""From a request to the call that it asks for, and from its result, or error, to the reply."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from blake3 import blake3
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_core.base.errors import ConfigError, UnknownOutcome
from rollout_core.store.codec import encode_stored
from rollout_core.store.contract import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.large_bodies import LOOP_BYTES, LOOP_RECORDS, Lane, read_large
from rollout_core.store.http.routes import Call, Route
from rollout_core.store.types import PaginatedResult
from rollout_core.web.http_errors import Unprocessable, WrongMediaType, unprocessable
from rollout_core.web.listening import BodyLimits, Gone, read_body
from rollout_core.web.replies import error_reply

logger = logging.getLogger(__name__)

MAX_KEY_LENGTH = 256
_KEY, _REPEATED, _JSON = wire.KEY_HEADER.encode(), wire.REPEATED_HEADER.encode(), wire.JSON.encode()

Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint_of(store: LightningStore, route: Route, limits: BodyLimits, memo: Memo, lane: Lane) -> Endpoint:
    """What answers the requests of a route, with errors too; it raises nothing."""

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
            return await memo.once(call.key, call.digest, lambda: answer(store, route, call, lane), route.in_bulk)
        except Gone:
            return Response(status_code=400)  # nobody is there to read it
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            return error_reply(error)

    return serve


def direct_app(endpoint: Endpoint, route: BaseRoute) -> ASGIApp:
    """The endpoint without the layers of Starlette that try one route after another and catch exceptions, of which it
    lets none out: 15 to 30 microseconds a request."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        reply = await endpoint(Request(scope, receive))
        await reply(scope, receive, send)

    return serve


async def read_call(route: Route, request: Request, limits: BodyLimits, lane: Lane) -> Call:
    """What a request asks for. Raises ConfigError for what it cannot ask, and Gone."""
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    key = _key(headers)
    body, data = None, b""
    if route.read is not None:
        if route.method == "GET":
            body = _read_query(route, request)
        else:
            data = await read_unpacked(request.scope, request.receive, limits, lane)
            body = await _read_json(route, headers, data, lane)
    try:
        path = {name: unquote(value, errors="strict") for name, value in request.path_params.items()}
    except UnicodeDecodeError as error:
        raise ConfigError(f"the path is not UTF-8 behind its percent signs: {error}") from error
    repeated = headers.get(_REPEATED)
    digest = b"" if key is None else _digest(request, data)
    takes_long = len(data) > LOOP_BYTES or route.num_records(body) > LOOP_RECORDS
    return Call(path, body, key, digest, repeated is not None, repeated == b"final", {}, takes_long)


def _key(headers: Mapping[bytes, bytes]) -> str | None:
    key = headers.get(_KEY)
    if key is None:
        return None
    if len(key) > MAX_KEY_LENGTH:
        raise Unprocessable(f"{wire.KEY_HEADER} has {len(key)} characters; expected at most {MAX_KEY_LENGTH}")
    return key.decode("latin-1")


def _digest(request: Request, data: bytes) -> bytes:
    """Tells one request from another: by method, path and body."""
    return blake3(f"{request.method} {request.scope['path']}\n".encode() + blake3(data).digest()).digest()


def _read_query(route: Route, request: Request) -> Any:
    try:
        return route.read_query(request.query_params)
    except ValidationError as error:
        raise unprocessable(error) from error


async def _read_json(route: Route, headers: Mapping[bytes, bytes], data: bytes, lane: Lane) -> Any:
    assert route.read is not None
    if not data and route.may_be_empty:
        return None
    media_type = headers.get(b"content-type", b"")
    if data and media_type != _JSON and media_type.partition(b";")[0].strip().lower() != _JSON:
        # Pages of others can send other types without asking; see ``listening.Gate``.
        raise WrongMediaType(f"content-type is {media_type.decode('latin-1')!r:.100}; expected {wire.JSON}")
    if len(data) > LOOP_BYTES:
        return await lane.run(read_large(route.read, route.lists, data))
    try:
        return route.read(data)
    except ValidationError as error:
        raise unprocessable(error) from error


async def answer(store: LightningStore, route: Route, call: Call, lane: Lane) -> Response:
    """Do what a request asks for, and reply."""
    if call.is_large and store.capabilities.get("thread_safe"):
        return await lane.run(_answer(store, route, call))
    result = await route.handler(store, call)
    if is_large(result):
        return _reply(route, call, await lane.run(encode_large(result)))
    return _reply(route, call, await encode_large(result))


async def _answer(store: LightningStore, route: Route, call: Call) -> Response:
    return _reply(route, call, await encode_large(await route.handler(store, call)))


def _reply(route: Route, call: Call, data: bytes) -> Response:
    return Response(data, route.status, call.reply_headers, media_type=wire.JSON)


_NO_ITEMS = b'{"items":[]'


def is_large(result: Any) -> bool:
    """Whether a result has many records that are still to be encoded."""
    return isinstance(result, (list, tuple, PaginatedResult)) and len(result) > LOOP_RECORDS


async def encode_large(result: Any) -> bytes:
    """``encode_stored``, in parts: the interpreter's lock is held for one at a time."""
    if not is_large(result):
        return result if isinstance(result, bytes) else encode_stored(result)
    if isinstance(result, PaginatedResult):
        frame = encode_stored(result.model_copy(update={"items": []}))
        assert frame.startswith(_NO_ITEMS)
        return b'{"items":%b%b' % (await _encode_list(result.items), frame[len(_NO_ITEMS) :])
    return await _encode_list(result)


async def _encode_list(records: Sequence[Any]) -> bytes:
    parts: list[bytes] = []
    for start in range(0, len(records), LOOP_RECORDS):
        parts.append(encode_stored(records[start : start + LOOP_RECORDS])[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(parts)


# Bodies

_GZIP = 16 + zlib.MAX_WBITS
_GZIP_PART = 64 << 10
_GZIP_LOOP_BYTES = 4 << 10
"""Most packed bytes that are unpacked on the event loop: it may be a thousand times as many then."""
MAX_GZIP_MEMBERS = 1_000
"""Most gzip streams, one after the other, that a body may be made of."""


async def read_unpacked(scope: Scope, receive: Receive, limits: BodyLimits, lane: Lane) -> bytes:
    """The unpacked body. Raises as `read_body`, WrongMediaType for an unknown packing, and ConfigError for a broken
    one."""
    given = next((value for name, value in scope["headers"] if name == b"content-encoding"), b"identity")
    packing = given.decode("latin-1").strip().lower()
    if packing not in ("identity", "gzip"):
        raise WrongMediaType(f"content-encoding is {packing!r:.100}; this server reads gzip and identity")
    data = await read_body(scope, receive, limits)
    if packing == "identity":
        return data
    if len(data) > _GZIP_LOOP_BYTES:
        return await lane.call(unpack_gzip, data, limits)
    return unpack_gzip(data, limits)


def unpack_gzip(data: bytes, limits: BodyLimits) -> bytes:
    """Unpack gzip, one member or several, giving up at the limit rather than filling the memory."""
    unpacked: list[bytes] = []
    num_bytes = start = num_members = 0
    while start < len(data):
        num_members += 1
        if num_members > MAX_GZIP_MEMBERS:
            raise ConfigError(f"the body has more than {MAX_GZIP_MEMBERS} gzip members; pack it as one")
        stream = zlib.decompressobj(_GZIP)
        while not stream.eof:
            # Part by part, because what a member leaves over is copied for the next one.
            part = data[start : start + _GZIP_PART]
            if not part:
                raise ConfigError("the body says it is gzip, but ends in the middle")
            try:
                unpacked.append(stream.decompress(part, limits.max_bytes + 1 - num_bytes))
            except zlib.error as error:
                raise ConfigError(f"the body says it is gzip, but is not: {error}") from error
            num_bytes += len(unpacked[-1])
            if num_bytes > limits.max_bytes:
                raise limits.refuse()
            start += len(part) - len(stream.unused_data)
    return b"".join(unpacked)


# Idempotency keys


class _Entry(NamedTuple):
    task: asyncio.Task[Response]
    started: float
    request: bytes


class _Share:
    """The entries of a memo, in order of their start, that make room only for each other."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.num_bytes = 0


class Memo:
    """Replies by idempotency key, of one process; forgotten after a while, or when they are too many or too large.

    Each key is bound to the request that it came with first. Calls that are sent in bulk have a share of their own.
    """

    def __init__(self, *, keep_seconds: float = 300.0, max_entries: int = 2_000, max_bytes: int = 32 << 20) -> None:
        self._keep_seconds = keep_seconds
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._shares = _Share(), _Share()

    def known(self, key: str) -> bool:
        """Whether a call of this key was begun here."""
        return self._entry(key) is not None

    def _entry(self, key: str) -> _Entry | None:
        return next((share.entries[key] for share in self._shares if key in share.entries), None)

    async def once(
        self, key: str, request: bytes, call: Callable[[], Awaitable[Response]], in_bulk: bool = False
    ) -> Response:
        """The reply to the call of this key: of the first one, should there be several.

        ``request`` tells one request from another. A key that comes with another request than before raises
        Unprocessable: the reply it would get is not to what it asks, and what it asks would not be done. A call that
        raises is forgotten: it has changed nothing, or does not know. A client that goes away does not stop a call.
        """
        entry = self._entry(key)
        if entry is None:
            share = self._shares[in_bulk]
            task = asyncio.create_task(self._run(share, key, call))
            entry = share.entries[key] = _Entry(task, time.monotonic(), request)
        elif entry.request != request:
            raise Unprocessable(
                f"{wire.KEY_HEADER} {key!r:.80} was sent with another request before; a key stands for one request, "
                "use a new key for a new one"
            )
        return await asyncio.shield(entry.task)

    async def _run(self, share: _Share, key: str, call: Callable[[], Awaitable[Response]]) -> Response:
        try:
            reply = await call()
        except BaseException:
            del share.entries[key]
            raise
        share.num_bytes += len(reply.body)
        self._forget_old(share)
        return reply

    def _forget_old(self, share: _Share) -> None:
        # In order of their start, so only the oldest need a look. One still running is not forgotten.
        horizon = time.monotonic() - self._keep_seconds
        while share.entries:
            key, entry = next(iter(share.entries.items()))
            full = len(share.entries) > self._max_entries or share.num_bytes > self._max_bytes
            if not entry.task.done() or not (full or entry.started < horizon):
                break
            del share.entries[key]
            share.num_bytes -= len(entry.task.result().body)
