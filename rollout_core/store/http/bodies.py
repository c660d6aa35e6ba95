"""Reading request bodies: never more than the limit, never longer than the patience, packed or not."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from rollout_core.errors import ConfigError
from rollout_core.store.http.errors import TooLarge, TooSlow, WrongMediaType

_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class BodyLimits:
    """What a server puts up with."""

    max_bytes: int
    """Most bytes of a body, unpacked."""
    chunk_seconds: float = 30.0
    """Longest silence in the middle of a body."""

    def refuse(self) -> TooLarge:
        """The error for a body above the limit."""
        return TooLarge(
            f"the body is larger than the {self.max_bytes} bytes this server takes; send fewer records in a request, "
            "or keep large values in the object store"
        )


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
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
    return unpack_gzip(data, limits) if packing == "gzip" else data


async def _read(receive: Receive, limits: BodyLimits) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    more = True
    while more:
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
    num_bytes = 0
    while data:
        stream = zlib.decompressobj(_GZIP)
        try:
            unpacked.append(stream.decompress(data, limits.max_bytes + 1 - num_bytes))
        except zlib.error as error:
            raise ConfigError(f"the body says it is gzip, but is not: {error}") from error
        num_bytes += len(unpacked[-1])
        if num_bytes > limits.max_bytes:
            raise limits.refuse()
        if not stream.eof:
            raise ConfigError("the body says it is gzip, but ends in the middle")
        data = stream.unused_data
    return b"".join(unpacked)
