"""What was answered lately, so that a client that lost an answer gets it again instead of doing its write twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.responses import Response

from rollout_core.store.http import wire
from rollout_core.store.http.errors import Unprocessable


class _Entry(NamedTuple):
    task: asyncio.Task[Response]
    started: float
    request: bytes


class Memo:
    """Replies by idempotency key, of one process; forgotten after a while, or when they are too many or too large.

    Each key is bound to the request that it came with first.
    """

    def __init__(self, *, keep_seconds: float = 300.0, max_entries: int = 2_000, max_bytes: int = 32 << 20) -> None:
        self._keep_seconds = keep_seconds
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: dict[str, _Entry] = {}

    def known(self, key: str) -> bool:
        """Whether a call of this key was begun here."""
        return key in self._entries

    async def once(self, key: str, request: bytes, call: Callable[[], Awaitable[Response]]) -> Response:
        """The reply to the call of this key: of the first one, should there be several.

        ``request`` tells one request from another. A key that comes with another request than before raises
        Unprocessable: the reply it would get is not to what it asks, and what it asks would not be done. A call that
        raises is forgotten: it has changed nothing, or does not know. A client that goes away does not stop a call.
        """
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.create_task(self._run(key, call))
            entry = self._entries[key] = _Entry(task, time.monotonic(), request)
        elif entry.request != request:
            raise Unprocessable(
                f"{wire.KEY_HEADER} {key!r:.80} was sent with another request before; a key stands for one request, "
                "use a new key for a new one"
            )
        return await asyncio.shield(entry.task)

    async def _run(self, key: str, call: Callable[[], Awaitable[Response]]) -> Response:
        try:
            reply = await call()
        except BaseException:
            del self._entries[key]
            raise
        self._num_bytes += len(reply.body)
        self._forget_old()
        return reply

    def _forget_old(self) -> None:
        # In order of their start, so only the oldest need a look. One still running is not forgotten.
        horizon = time.monotonic() - self._keep_seconds
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            full = len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes
            if not entry.task.done() or not (full or entry.started < horizon):
                break
            del self._entries[key]
            self._num_bytes -= len(entry.task.result().body)
