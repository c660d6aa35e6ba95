"""Running an application under uvicorn: where it listens, which requests it answers, what headers and slow clients it
accepts, and what signals and forks do to it.

A server answers requests with its key; and without a key, only those of programs on this machine, never those of
other sites' web pages. A web page can make the browser of somebody on this machine send requests to a server on
loopback: with the page's address as Origin, or, where a name of the page's owner leads to 127.0.0.1 (DNS rebinding),
with that name as Host.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import ipaddress
import os
import signal
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rollout_core.base.errors import ConfigError
from rollout_core.base.logs import is_json
from rollout_core.base.loops import end_waits
from rollout_core.web.certificates import TLSFiles
from rollout_core.web.http_errors import Forbidden, TooLarge, TooSlow, Unauthorized
from rollout_core.web.replies import error_reply

HEADER_SECONDS = 20.0
"""Longest time from the first byte of a request, or from the connection, to the end of its header."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's header, line included, and of what stands between the parts of a body."""
MAX_HEADERS = 100
"""Most headers of a request, trailers included."""
MAX_BODY_BYTES = 64 << 20
"""Most bytes of a request's body, unless a server is given another number."""
LINGER_SECONDS = 1.0
"""How long a connection stays open after a refusal, so that the client can read why."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits to the header: half a request holds a connection only so long, and a header that
    does not end is refused (431) before it fills the memory."""

    _waiting: asyncio.TimerHandle | None = None
    _bytes_without_progress = 0
    _has_progress = True
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In parts, because a part in which a header ends may hold other things as well, and is not counted.
        for start in range(0, len(data), MAX_HEADER_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            part = data[start : start + MAX_HEADER_BYTES] if len(data) > MAX_HEADER_BYTES else data
            self._has_progress = False
            super().data_received(part)
            self._bytes_without_progress = 0 if self._has_progress else self._bytes_without_progress + len(part)
            if self._bytes_without_progress > MAX_HEADER_BYTES:
                self._refuse(f"the header is larger than {MAX_HEADER_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Called for what is not HTTP, and for errors that the callbacks below raise."""
        if not self._is_refused:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_header()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(f"the request has more than {MAX_HEADERS} headers")
            raise ValueError("too many headers")  # ends the parsing

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._has_progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progress = True
        super().on_message_complete()

    def _refuse(self, reason: str) -> None:
        """Answer 431, or nothing if the request is being answered, and read no more."""
        self._is_refused = True
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.close()
        text = f'{{"detail":"{reason}","error":"ConfigError"}}'.encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[431] + head + text)
        # Closed at once, with bytes unread, the connection would be reset, and the answer lost.
        self.flow.pause_reading()
        self._waiting = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _wait_for_header(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


DEFAULT_HOST = "127.0.0.1"
UNREAD_SECONDS = 60
"""Longest time that a client may leave its replies unread before the connection is cut."""
IDLE_SECONDS = 75
"""How long an unused connection stays open; longer than clients keep theirs, so that it is they who close it."""
BACKLOG = 2048
"""Most connections that wait to be let in."""
GRACE_SECONDS = 5
"""How long a server that is asked to stop lets requests finish."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_key(host: str, api_key: str | None) -> None:
    """Raise ConfigError for a server that everybody could use, or a key that no client could send."""
    if api_key is None:
        if not is_loopback(host):
            raise ConfigError(
                f"host is {host}, which other machines can reach, and there is no API key; give one (--api-key-env), "
                f"or listen on {DEFAULT_HOST}"
            )
    elif not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ConfigError("the API key is empty, or holds spaces at its ends or characters that a header cannot hold")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ConfigError if it cannot be had."""
    if not 0 <= port < 65536:
        raise ConfigError(f"port is {port}; expected 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named a TCP socket, because asyncio sends small packets at once (TCP_NODELAY) only on sockets that say so; on
    # others the second part of a reply waits 40 ms for the client's acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these: the kernel cuts those whose other end is dead or does not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
        listener.bind((host, port))
        # From now on clients are let in, and wait until there is somebody to answer.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; another server may have it"
        ) from error
    _listeners.add(listener)
    return listener


_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Held open by a child, the port could not be taken again when the server has stopped.
    for listener in _listeners:
        with contextlib.suppress(OSError):
            os.close(listener.detach())


os.register_at_fork(after_in_child=_after_fork_in_child)


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """The address by which clients on this machine reach a server that listens there."""
    reachable = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def uvicorn_config(app: Any, *, factory: bool = False, workers: int = 1, tls: TLSFiles | None = None) -> uvicorn.Config:
    """uvicorn's settings for a store. The listening socket is made by ``listen``. Raises ConfigError where the files of
    ``tls`` are of no use."""
    return uvicorn.Config(
        app,
        factory=factory,
        workers=workers,
        http=BoundedProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None if is_json() else LOGGING_CONFIG,
        server_header=False,
        proxy_headers=False,  # nothing here asks for a client's address
        log_level="warning",
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        **({} if tls is None else tls.server_options()),
    )


class _EndsWaits(uvicorn.Server):
    """A server that does not spend its grace on requests that wait."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_waits()
        await super().shutdown(sockets)


class Server(_EndsWaits):
    """uvicorn's server, which leaves signals to the program that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class MainServer(_EndsWaits):
    """uvicorn's server as a program of its own: SIGTERM and SIGINT stop it, and then it ends like any other.

    ``on_serving`` is called when it answers requests.
    """

    def __init__(self, config: uvicorn.Config, on_serving: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_serving = on_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_serving()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def tune_gc() -> None:
    """Keep the garbage collector from looking at what a server process never frees, and from looking all the time.

    Requests make thousands of objects and leave no cycles; with the usual settings half of the time goes there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


# Which requests are answered


class Gate:
    """Middleware that answers requests which are not allowed with an error, and keeps paths as they were sent.

    Args:
        app: serves what is allowed.
        api_key: what clients must send as ``Authorization: Bearer KEY``; None: nothing.
        allowed_origins: origins of web pages that may use a server without a key; ``*``: all.
        public: paths that need neither key nor origin.
        direct: what serves a request of a method and path, instead of ``app``.
        watch: runs the application for a request, to measure it.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        *,
        allowed_origins: Collection[str] = (),
        public: Collection[str] = (),
        direct: Mapping[tuple[str, str], ASGIApp] | None = None,
        watch: Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]] | None = None,
    ) -> None:
        self._app = app
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._allowed_origins = frozenset(origin.lower().encode() for origin in allowed_origins)
        self._public = frozenset(public)
        self._direct = direct or {}
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Ids may hold slashes. So routes are matched before %2F is decoded, and endpoints decode their parts.
        scope["path"] = scope["raw_path"].decode("latin-1")
        refusal = self.refusal(scope)
        if refusal is not None:
            return await error_reply(refusal)(scope, receive, send)
        app = self._direct.get((scope["method"], scope["path"]), self._app)
        if self._watch is None:
            return await app(scope, receive, send)
        await self._watch(app, scope, receive, send)

    def refusal(self, scope: Scope) -> Exception | None:
        """Why this request, whose path is as it was sent, is not allowed; None where it is."""
        return None if scope["path"] in self._public else self.why_refused(scope)

    def why_refused(self, scope: Scope) -> Exception | None:
        """Why the sender of this request is not allowed; None where it is."""
        if self._authorization is None:
            return self._foreign(scope)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._authorization):
            return None
        return Unauthorized("no valid API key; send it as Authorization: Bearer KEY")

    def _foreign(self, scope: Scope) -> Exception | None:
        """Why this may be the request of a web page of others."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        # Old programs send no Host; browsers always do.
        if len(hosts) > 1 or not all(map(_is_local, hosts)):
            shown = b", ".join(hosts).decode("latin-1")
            return Forbidden(
                f"the request is for the host {shown!r:.200}; without an API key this server answers only to localhost "
                "and loopback addresses; give it a key to use it by another name"
            )
        for name, value in scope["headers"]:
            if name == b"origin" and not self._is_allowed(value.lower(), hosts):
                return Forbidden(
                    f"the request comes from the web page {value.decode('latin-1')!r:.200}; without an API key this "
                    "server accepts none from other sites' pages, unless it was started with their origin "
                    "(--cors-allow-origin)"
                )
        return None

    def _is_allowed(self, origin: bytes, hosts: Sequence[bytes]) -> bool:
        is_own = any(origin in (b"http://" + host.lower(), b"https://" + host.lower()) for host in hosts)
        return is_own or origin in self._allowed_origins or b"*" in self._allowed_origins


@lru_cache(256)
def _is_local(host: bytes) -> bool:
    """Whether a Host header names this machine as only this machine can."""
    text = host.decode("latin-1").lower()
    try:
        parts = urlsplit(f"//{text}")
        return parts.netloc == text and "@" not in text and is_loopback(parts.hostname or "")
    except ValueError:
        return False


# Their bodies


class Gone(Exception):
    """The client has gone away, and nobody reads an answer."""


@dataclass(frozen=True)
class BodyLimits:
    """What a server puts up with."""

    max_bytes: int = MAX_BODY_BYTES
    """Most bytes of a body, unpacked."""
    silent_seconds: float = 30.0
    """Longest silence in the middle of a body."""
    whole_seconds: float = 300.0
    """Longest time for a body as a whole."""
    advice: str = ""
    """For who sent one that is too large."""

    def refuse(self) -> TooLarge:
        """The error for a body above the limit."""
        return TooLarge(f"the body is larger than the {self.max_bytes} bytes this server takes{self.advice}")


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits) -> bytes:
    """The body of a request as it was sent. Raises TooLarge, TooSlow and Gone."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if length.isdigit() and int(length) > limits.max_bytes:
        raise limits.refuse()
    parts: list[bytes] = []
    num_bytes, ends = 0, time.monotonic() + limits.whole_seconds
    more = True
    while more:
        try:
            async with asyncio.timeout(min(limits.silent_seconds, ends - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise TooSlow(
                f"the body stopped for {limits.silent_seconds:g} s, or took more than {limits.whole_seconds:g} s; send "
                "it again"
            ) from None
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > limits.max_bytes:
            raise limits.refuse()
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)
