"""HTTP as uvicorn speaks it, but bounded: what comes before the application sees a request is small, and comes soon."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

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
    goes on and on is refused (431) before it fills the memory."""

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
