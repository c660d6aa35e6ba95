"""Requests to upstreams over one HTTP client: tried again while that may help and the agent has got nothing yet."""

from __future__ import annotations

import asyncio
import io
import logging
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import orjson
from yarl import URL

from rollout_core.agents.proxy.recording import Call
from rollout_core.agents.proxy.upstream_pools import Pool, Seat
from rollout_core.agents.proxy.upstreams import Upstream
from rollout_core.base.settings import Redaction
from rollout_core.inference.endpoint import (
    MAX_ERROR_BYTES,
    MAX_HEADER_BYTES,
    PASSING_STATUSES,
    environment_proxy,
    retry_after,
)

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 256 << 20
_IDLE_SECONDS = 4.0
"""How long an unused connection stays open: less than at vLLM's server, which closes its own after five."""
_LARGE_BYTES = 1 << 20
"""A larger body goes out piece by piece."""
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.25, 8.0
_KEPT_HEADERS = ("content-type", "retry-after", "x-request-id", "openai-processing-ms")
"""Of an answer's headers, those that the agent gets."""
_ERROR_HEADERS = {"retry-after", "x-request-id"}
MAX_SHOWN = 1000
"""Characters of an answer that is no JSON which an error repeats."""
_LOST = (aiohttp.ClientError, ConnectionError, OSError)

Headers = list[tuple[bytes, bytes]]


class Failed(Exception):
    """A call that ends with an error, as the agent is to get it."""

    def __init__(self, status: int, message: str, *, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b""):
        super().__init__(message)
        self.status = status
        self.headers: Headers = list(headers)
        self.body = body or error_body(status, message)


class _Passing(Exception):
    """A try that failed for a reason that may pass."""

    def __init__(self, failed: Failed, seconds: float = 0.0) -> None:
        super().__init__(str(failed))
        self.failed = failed
        self.status = failed.status
        self.seconds = seconds
        """How long the upstream asks to be left alone."""


def error_body(status: int, message: str, kind: str | None = None) -> bytes:
    """An error as OpenAI's API writes it."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kind or kinds.get(status, "invalid_request_error" if status < 500 else "upstream_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})


class Exchange:
    """A call under way at an upstream: its answer has begun. ``close`` it in the end, also when it is not read."""

    def __init__(self, pool: Pool, seat: Seat, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.status = response.status
        self.headers: Headers = [
            (name.encode(), response.headers[name].encode("latin-1", "replace"))
            for name in _KEPT_HEADERS
            if name in response.headers
        ]
        self.first = first
        """The whole answer, or of a stream the first piece."""
        self.is_stream = is_stream(response)
        self._pool, self._seat, self._response = pool, seat, response

    async def pieces(self) -> AsyncIterator[bytes]:
        """A stream as it comes. Raises Failed if the upstream goes away before its end."""
        yield self.first
        num_bytes = len(self.first)
        try:
            async for data in self._response.content.iter_any():
                num_bytes += len(data)
                if num_bytes > MAX_ANSWER_BYTES:
                    raise Failed(502, f"the upstream's answer has more than {MAX_ANSWER_BYTES:,} bytes")
                yield data
        except _LOST as error:
            raise Failed(502, f"the upstream went away in the middle of its answer ({type(error).__name__})") from error

    def close(self) -> None:
        """Release the upstream. If it is still writing, it sees that nobody listens."""
        if not self._response.content.at_eof():
            self._response.close()
        self._response.release()
        self._pool.release(self._seat)


def is_stream(response: aiohttp.ClientResponse) -> bool:
    """Whether the answer comes as server-sent events."""
    return response.content_type == "text/event-stream"


@dataclass(frozen=True)
class Outgoing:
    """How a call is sent."""

    method: str
    target: str
    """Behind the upstream's URL: path and query."""
    content_type: str | None


class Forwarder:
    """The proxy's HTTP client. To be used on one event loop; close it there."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            # The whole call has a limit of its own.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        # Its own source of chance: the global one belongs to training, which must repeat to the last bit.
        self._chance = random.Random()
        self._proxies: dict[str, str | None] = {}
        self._redactions: dict[str, Redaction] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def begin(self, pool: Pool, call: Call, request: Outgoing, deadline: float) -> Exchange:
        """The answer to a call, once its first piece is here. ``deadline`` is when the caller gives up, in seconds of
        the loop's clock; to do so is the caller's own affair.

        Raises Failed when no try succeeded, or none can in time.
        """
        tried: list[Seat] = []
        while True:
            seat = await pool.take(tried)
            try:
                return await self._try(pool, seat, call, request)
            except _Passing as error:
                pool.release(seat)
                passing = error
            except BaseException:
                pool.release(seat)
                raise
            tried.append(seat)
            seat.leave_alone(passing.seconds)
            seconds = 0.0 if passing.seconds or pool.has_other(tried) else self._backoff(len(tried))
            left = deadline - asyncio.get_running_loop().time()
            if len(tried) > seat.upstream.max_retries or max(seconds, pool.seconds_until_ready()) > left:
                raise passing.failed
            logger.warning("Model %s, try %d: HTTP %d of %s", pool.name, len(tried), passing.status, seat.upstream.url)
            await asyncio.sleep(seconds)

    def _backoff(self, num_tries: int) -> float:
        return min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** (num_tries - 1)) * self._chance.uniform(0.5, 1.0)

    async def _try(self, pool: Pool, seat: Seat, call: Call, request: Outgoing) -> Exchange:
        upstream = seat.upstream
        data = call.body_for(upstream)
        headers = {"accept-encoding": "identity"}
        if request.content_type is not None:
            headers["content-type"] = request.content_type
        if upstream.api_key is not None:
            headers["authorization"] = f"Bearer {upstream.api_key}"
        if upstream.url not in self._proxies:
            self._proxies[upstream.url] = environment_proxy(upstream.url)
        response = None
        try:
            response = await self._session.request(
                request.method,
                URL(upstream.url + request.target, encoded=True),
                data=io.BytesIO(data) if len(data) > _LARGE_BYTES else data or None,
                headers=headers,
                allow_redirects=False,  # the key is meant for this address
                proxy=self._proxies[upstream.url],
            )
            if not 200 <= response.status < 300:
                failed = await self._failed(upstream, response)
                if response.status in PASSING_STATUSES or response.status >= 500:
                    raise _Passing(failed, retry_after(response))
                raise failed
            first = await (response.content.readany() if is_stream(response) else _whole(response))
            if is_stream(response) and not first:
                raise _Passing(Failed(502, f"{_name(upstream)} ended its stream before it began"))
            return Exchange(pool, seat, response, first)
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, _LOST):
                reason = f"{_name(upstream)} cannot be reached, or broke off its answer ({type(error).__name__})"
                raise _Passing(Failed(502, reason)) from error
            raise

    async def _failed(self, upstream: Upstream, response: aiohttp.ClientResponse) -> Failed:
        """The error that an upstream answers with. It may repeat the key that it was sent."""
        status = response.status
        if status < 400:
            return Failed(502, f"{_name(upstream)} answers with HTTP {status}, which is not followed; correct its url")
        text = (await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
        headers = [
            (name.encode(), response.headers[name].encode("latin-1", "replace"))
            for name in _ERROR_HEADERS & response.headers.keys()
        ]
        if upstream.api_key is not None:
            redaction = self._redactions.setdefault(upstream.api_key, Redaction(upstream.api_key))
            text = redaction.hide(text)
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            found = None
        error = found.get("error") if isinstance(found, dict) else None
        if isinstance(error, dict):
            return Failed(status, str(error.get("message", "")), headers=headers, body=text.encode())
        said = found if isinstance(found, dict) else {}
        message = error or said.get("message") or said.get("detail") or text
        return Failed(status, str(message)[:MAX_SHOWN] or f"{_name(upstream)} gives no reason", headers=headers)


def _name(upstream: Upstream) -> str:
    return f"the upstream {upstream.url}"


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise Failed(502, f"the upstream's answer has more than {MAX_ANSWER_BYTES:,} bytes")
    return bytes(body)
