"""A proxy before a storage service that spoils some of the exchanges, each kind as often as it is told, and that can be
away for a while."""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KINDS = (
    "throttled",  # 503 SlowDown, and nothing done
    "failed",  # 500, and nothing done
    "unheard",  # done, and no answer
    "failed late",  # done, and 500
    "cut",  # the answer ends in the middle
    "flipped",  # a wrong bit in what is read
    "wrong tag",  # a wrong ETag or checksum
)
OUTAGES = (
    "throttled",  # 503 SlowDown for all
    "refused",  # nothing listens, and open connections end
    "hanging",  # no answer, until it is over
)
STRUCTURED = ("application/xml", "text/xml", "application/json; charset=UTF-8")
"""Answers that are no file."""
_CHECKSUM = re.compile(rb'("(?:md5Hash|crc32c)": ")(.)')


class FaultyProxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.rate = rate
        self.done: Counter[str] = Counter()
        self.outage = ""
        """One of `OUTAGES` while it is away."""
        self.is_over = threading.Event()
        self._random = random.Random(7)
        self._lock = threading.Lock()
        self._serving: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def begin(self) -> None:
        """Serve, in threads of this process."""
        self._serving = threading.Thread(target=self.serve_forever, daemon=True)
        self._serving.start()

    def end(self) -> None:
        """Take no further connection."""
        self.shutdown()
        if self._serving is not None:
            self._serving.join()

    @contextmanager
    def away(self, outage: str) -> Iterator[None]:
        """Be away in one of the ways of `OUTAGES` for the length of the block."""
        assert outage in OUTAGES, outage
        address = self.server_address
        self.is_over.clear()
        self.outage = outage
        if outage == "refused":
            self.end()
            self.socket.close()
        try:
            yield
        finally:
            if outage == "refused":
                self.socket, self.server_address = socket.socket(self.address_family, self.socket_type), address
                self.server_bind()
                self.server_activate()
                self.begin()
            self.outage = ""
            self.is_over.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients are killed."""

    def draw(self) -> str:
        """What is done to the next exchange; the empty text: nothing."""
        with self._lock:
            place = int(self._random.random() / self.rate) if self.rate else len(KINDS)
            kind = KINDS[place] if place < len(KINDS) else ""
            self.done[kind] += 1
            return kind

    def flip(self, data: bytes) -> bytes:
        """``data`` with a wrong bit anywhere."""
        with self._lock:
            place = self._random.randrange(8 * len(data)) if data else 0
        return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :] if data else b""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyProxy

    def log_message(self, *_: object) -> None: ...

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        outage = self.server.outage
        if outage == "throttled":
            return self._refuse(503)
        if outage:
            if outage == "hanging":
                self.server.is_over.wait()
            self.close_connection = True
            return
        kind = self.server.draw()
        if kind in ("throttled", "failed"):
            return self._refuse(503 if kind == "throttled" else 500)
        status, headers, answer = self._ask(body)
        if kind == "unheard":
            self.close_connection = True
            return
        if kind == "failed late":
            return self._refuse(500)
        is_read = self.command == "GET" and status < 300
        if kind == "flipped" and is_read and headers.get("Content-Type") not in STRUCTURED:
            answer = self.server.flip(answer)
        if kind == "wrong tag":
            headers = {name: f'"{"0" * 32}"' if name.lower() == "etag" else value for name, value in headers.items()}
            answer = _CHECKSUM.sub(rb"\1-", answer) if b'"kind": "storage#object"' in answer else answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "cut" and len(answer) > 1:
            answer = answer[: len(answer) // 2]
            self.close_connection = True
        self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The service's answer, without headers of the connection."""
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect",)}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            dropped = ["connection", "transfer-encoding", "server", "date"]
            dropped += [] if self.command == "HEAD" else ["content-length"]
            return answer.status, {n: v for n, v in answer.getheaders() if n.lower() not in dropped}, data
        finally:
            connection.close()

    def _refuse(self, status: int) -> None:
        code = "SlowDown" if status == 503 else "InternalError"
        body = f"<Error><Code>{code}</Code><Message>{code}, said the proxy</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def faulty_proxy(upstream: str, rate: float) -> Iterator[FaultyProxy]:
    """A proxy in threads of this process; each kind of `KINDS` befalls this share of the requests."""
    with FaultyProxy(upstream, rate) as proxy:
        proxy.begin()
        try:
            yield proxy
        finally:
            proxy.end()
