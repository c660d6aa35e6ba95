"""Running an application under uvicorn: where it listens, what headers and slow clients it accepts, and what signals
and forks do to it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
import socket
import weakref
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rollout_core.base.errors import ConfigError
from rollout_core.base.loops import end_waits

HEADER_SECONDS = 20.0
"""Longest time from the first byte of a request, or from the connection, to the end of its header."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's header, line included, and of what stands between the parts of a body."""
MAX_HEADERS = 100
"""Most headers of a request, trailers included."""
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


def url_of(host: str, port: int) -> str:
    """The address by which clients on this machine reach a server that listens there."""
    reachable = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def uvicorn_config(app: Any, *, factory: bool = False, workers: int = 1) -> uvicorn.Config:
    """uvicorn's settings for a store. The listening socket is made by ``listen``."""
    return uvicorn.Config(
        app,
        factory=factory,
        workers=workers,
        http=BoundedProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks for a client's address
        log_level="warning",
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
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
