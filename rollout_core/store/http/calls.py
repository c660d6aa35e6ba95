"""From a request to the call of an operation, and from its result to the reply; large ones in the lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from blake3 import blake3
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rollout_core.base.errors import ConfigError
from rollout_core.store.base import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.bodies import BodyLimits, read_body
from rollout_core.store.http.errors import Unprocessable, WrongMediaType, unprocessable
from rollout_core.store.http.lane import LOOP_BYTES, LOOP_RECORDS, Lane
from rollout_core.store.http.large_bodies import read_large
from rollout_core.store.http.operations import Call, Operation
from rollout_core.store.http.replies import encode_large, is_large

MAX_KEY_LENGTH = 256
_KEY, _REPEATED, _JSON = wire.KEY_HEADER.encode(), wire.REPEATED_HEADER.encode(), wire.JSON.encode()


async def read_call(operation: Operation, request: Request, limits: BodyLimits, lane: Lane) -> Call:
    """What a request asks for. Raises ConfigError for what it cannot ask, and ClientDisconnect."""
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    key = _key(headers)
    body, data = None, b""
    if operation.read is not None:
        if operation.method == "GET":
            body = _read_query(operation, request)
        else:
            data = await read_body(request.scope, request.receive, limits, lane)
            body = await _read_json(operation, headers, data, lane)
    try:
        path = {name: unquote(value, errors="strict") for name, value in request.path_params.items()}
    except UnicodeDecodeError as error:
        raise ConfigError(f"the path is not UTF-8 behind its percent signs: {error}") from error
    repeated = headers.get(_REPEATED)
    digest = b"" if key is None else _digest(request, data)
    is_large = len(data) > LOOP_BYTES or operation.num_records(body) > LOOP_RECORDS
    return Call(path, body, key, digest, repeated is not None, repeated == b"final", {}, is_large)


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


def _read_query(operation: Operation, request: Request) -> Any:
    try:
        return operation.read_query(request.query_params)
    except ValidationError as error:
        raise unprocessable(error) from error


async def _read_json(operation: Operation, headers: Mapping[bytes, bytes], data: bytes, lane: Lane) -> Any:
    assert operation.read is not None
    if not data and operation.may_be_empty:
        return None
    media_type = headers.get(b"content-type", b"")
    if data and media_type != _JSON and media_type.partition(b";")[0].strip().lower() != _JSON:
        # Pages of others can send other types without asking; see ``gate``.
        raise WrongMediaType(f"content-type is {media_type.decode('latin-1')!r:.100}; expected {wire.JSON}")
    if len(data) > LOOP_BYTES:
        return await lane.run(read_large(operation.read, operation.lists, data))
    try:
        return operation.read(data)
    except ValidationError as error:
        raise unprocessable(error) from error


async def answer(store: LightningStore, operation: Operation, call: Call, lane: Lane) -> Response:
    """Do what a request asks for, and reply."""
    if call.is_large and store.capabilities.get("thread_safe"):
        return await lane.run(_answer(store, operation, call))
    result = await operation.handler(store, call)
    if is_large(result):
        return _reply(operation, call, await lane.run(encode_large(result)))
    return _reply(operation, call, await encode_large(result))


async def _answer(store: LightningStore, operation: Operation, call: Call) -> Response:
    return _reply(operation, call, await encode_large(await operation.handler(store, call)))


def _reply(operation: Operation, call: Call, data: bytes) -> Response:
    return Response(data, operation.status, call.reply_headers, media_type=wire.JSON)
