"""Bodies of requests: read within limits of bytes and time, for every server alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_core.store.codec import read_object
from rollout_core.web.http_errors import TooLarge, TooSlow
from rollout_core.web.listening import BodyLimits, Gone, read_body


def parts(*bodies: bytes) -> list[dict[str, Any]]:
    last = len(bodies) - 1
    return [{"type": "http.request", "body": body, "more_body": n < last} for n, body in enumerate(bodies)]


async def read(
    messages: Sequence[dict[str, Any]], limits: BodyLimits, headers: Sequence[tuple[bytes, bytes]] = ()
) -> bytes:
    """The body that comes in these messages; after the last one the sender is silent."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    return await read_body({"type": "http", "headers": [*headers]}, receive, limits)


@pytest.mark.parametrize(
    ("sent", "body"), [((b"",), b""), ((b"whole",), b"whole"), ((b"in ", b"", b"parts"), b"in parts")]
)
async def test_a_body_is_what_was_sent(sent, body):
    assert await read(parts(*sent), BodyLimits(max_bytes=8)) == body


async def test_one_that_is_too_large_is_refused_by_its_header_or_as_soon_as_it_is():
    limits = BodyLimits(8, advice="; send less")
    with pytest.raises(TooLarge, match="larger than the 8 bytes this server takes; send less"):
        await read([], limits, [(b"content-length", b"9")])
    with pytest.raises(TooLarge):
        await read([*parts(b"12345", b"6789", b"never read")][:2], limits, [(b"content-length", b"of no matter")])


async def test_one_that_stops_or_takes_too_long_or_whose_sender_goes_away_is_given_up():
    with pytest.raises(TooSlow, match=r"stopped for 0.05 s, or took more than 300 s"):
        await read(parts(b"a", b"b")[:1], BodyLimits(8, silent_seconds=0.05))
    with pytest.raises(TooSlow):
        await read(parts(b"a", b"b")[:1], BodyLimits(8, whole_seconds=0.05))
    with pytest.raises(Gone):
        await read([*parts(b"a", b"b")[:1], {"type": "http.disconnect"}], BodyLimits(8))


@pytest.mark.parametrize(
    ("data", "problem"), [(b"{", "no JSON: "), (b"", "no JSON: "), (b"[]", "is a JSON list; expected an object")]
)
def test_what_is_no_object_is_refused_in_words(data, problem):
    assert read_object(b'{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match=f"^the request's body (is )?{problem}"):
        read_object(data)
