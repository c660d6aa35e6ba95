"""Replies: results and errors as JSON, large ones part by part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from rollout_core.base.errors import Recoverable
from rollout_core.store.codec import encode_stored
from rollout_core.store.http import wire
from rollout_core.store.http.errors import error_body, status_of
from rollout_core.store.http.lane import LOOP_RECORDS
from rollout_core.store.types import PaginatedResult

logger = logging.getLogger(__name__)

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
