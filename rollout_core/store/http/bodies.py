"""Reading request bodies: never more than the limit, never longer than the patience, packed or not."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from rollout_core.base.errors import ConfigError
from rollout_core.store.http.errors import TooLarge, TooSlow, WrongMediaType
from rollout_core.store.http.lane import Lane

_GZIP = 16 + zlib.MAX_WBITS
_GZIP_PART = 64 << 10
_GZIP_LOOP_BYTES = 4 << 10
"""Most packed bytes that are unpacked on the event loop: it may be a thousand times as many then."""
MAX_GZIP_MEMBERS = 1_000
"""Most gzip streams, one after the other, that a body may be made of."""


@dataclass(frozen=True)
class BodyLimits:
    """What a server puts up with."""

    max_bytes: int
    """Most bytes of a body, unpacked."""
    chunk_seconds: float = 30.0
    """Longest silence in the middle of a body."""
    whole_seconds: float = 300.0
    """Longest time for a body as a whole."""

    def refuse(self) -> TooLarge:
        """The error for a body above the limit."""
        return TooLarge(
            f"the body is larger than the {self.max_bytes} bytes this server takes; send fewer records in a request, "
            "or keep large values in the object store"
        )


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits, lane: Lane) -> bytes:
    """The unpacked body. Raises TooLarge, TooSlow, WrongMediaType for an unknown packing, ConfigError for a broken
    one, and ClientDisconnect."""
    packing = "identity"
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limits.max_bytes:
            raise limits.refuse()
        if name == b"content-encoding":
            packing = value.decode("latin-1").strip().lower()
    if packing not in ("identity", "gzip"):
        raise WrongMediaType(f"content-encoding is {packing!r:.100}; this server reads gzip and identity")
    data = await _read(receive, limits)
    if packing == "identity":
        return data
    if len(data) > _GZIP_LOOP_BYTES:
        return await lane.call(unpack_gzip, data, limits)
    return unpack_gzip(data, limits)


async def _read(receive: Receive, limits: BodyLimits) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    more = True
    started = time.monotonic()
    while more:
        if time.monotonic() - started > limits.whole_seconds:
            raise TooSlow(f"the body took more than {limits.whole_seconds:g} s; send fewer records in a request")
        message = await _next_message(receive, limits)
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > limits.max_bytes:
            raise limits.refuse()
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _next_message(receive: Receive, limits: BodyLimits) -> Message:
    try:
        async with asyncio.timeout(limits.chunk_seconds):
            message = await receive()
    except TimeoutError:
        raise TooSlow(f"no more of the body came for {limits.chunk_seconds:g} s; send it again") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect()
    return message


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
