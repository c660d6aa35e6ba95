"""Whatever one client sends, the server goes on answering the others: nothing large is handled on its event loop."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollout_core.store import LightningStoreServer, SqlLightningStore
from tests.store.patience import LONG

AGL = "/v1/agl"
SLOWEST_SECONDS = 1.0
"""Longest that a probe may take where other tests have the processors too, as is usual; alone it is below 0.1 s."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """In a process of its own, so that its event loop and its interpreter's lock are what is looked at."""
    store = SqlLightningStore.from_url(f"sqlite:///{tmp_path_factory.mktemp('responsive')}/store.db")
    server = LightningStoreServer(store, launch_mode="mp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_core.store.http.server.START_SECONDS", LONG)
        asyncio.run(server.start())
    asyncio.run(server.enqueue_rollout("one", rollout_id="one"))
    asyncio.run(server.start_rollout("two"))
    yield server
    asyncio.run(server.close())


class Yardstick:
    """A process that does the same small piece of work again and again, beside all that is measured: how long it takes
    says how fast this machine is now, with all that it does besides."""

    PROGRAM = """
import sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    began = time.monotonic()
    sum(range(500_000))
    print(began, time.monotonic() - began, flush=True)
    ended.wait(0.03)
"""
    USUAL_SECONDS = 0.012
    """Of a piece, where `SLOWEST_SECONDS` was chosen; alone it takes half as long."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pieces: list[tuple[float, float]] = []
        """When each began, and its seconds."""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            began, seconds = map(float, line.split())
            with self._news:
                self._pieces.append((began, seconds))
                self._news.notify_all()

    def pieces(self, since: float) -> list[float]:
        """Seconds of those that were done, in part at least, between this monotonic time and now."""
        now = time.monotonic()
        with self._news:
            assert self._news.wait_for(lambda: self._pieces and self._pieces[-1][0] > now, LONG)
            return [seconds for began, seconds in self._pieces if began + seconds >= since]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join()
        self._process.wait()


@pytest.fixture(scope="module")
def yardstick() -> Iterator[Yardstick]:
    made = Yardstick()
    yield made
    made.close()


class Prober(threading.Thread):
    """Asks for the server's health, again and again, while the block runs."""

    def __init__(self, server: LightningStoreServer) -> None:
        super().__init__()
        self._address = urlsplit(server.endpoint).netloc
        self._done = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=LONG)
        while True:  # at least once: what is asked may be answered before this thread runs
            started = time.perf_counter()
            connection.request("GET", f"{AGL}/health")
            connection.getresponse().read()
            self.seconds.append(time.perf_counter() - started)
            if self._done.wait(0.005):
                break
        connection.close()

    def __enter__(self) -> Prober:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()


def send(server: LightningStoreServer, path: str, data: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=LONG)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, data, {"Content-Type": "application/json", **given})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def otlp(num_spans: int, num_rollouts: int) -> bytes:
    """Spans of so many unknown rollouts."""
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for n in range(num_spans):
        span = spans.add(name="s", trace_id=b"t" * 16, span_id=n.to_bytes(8, "big"))
        for key, value in (("rollout", f"r{n % num_rollouts}"), ("attempt", "a")):
            span.attributes.add(key=f"agentlightning.{key}_id").value.string_value = value
    return request.SerializeToString()


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def enqueue(records: bytes) -> bytes:
    return b'{"rollouts":[%b]}' % records


ENQUEUE, SEARCH, DEQUEUE = [
    f"{AGL}/{path}" for path in ("queues/rollouts/enqueue", "rollouts/search", "queues/rollouts/dequeue")
]
PROTOBUF = {"Content_Type": "application/x-protobuf"}
CASES: dict[str, tuple[str, Callable[[], bytes], int, str, dict[str, str]]] = {
    # Path, body, expected status, what the answer says, headers.
    "spaces": (ENQUEUE, lambda: b" " * (63 << 20), 400, "not JSON", {}),
    "many ids": (
        SEARCH,
        lambda: json.dumps({"rollout_id_in": [f"ro-{n:018d}" for n in range(2_000_000)]}).encode(),
        413,
        "more than 100000 records",
        {},
    ),
    "as many ids as can be": (
        SEARCH,
        lambda: json.dumps({"rollout_id_in": [f"ro-{n:018d}" for n in range(100_000)]}).encode(),
        200,
        '"items":[]',
        {},
    ),
    "a million enqueues": (
        ENQUEUE,
        lambda: enqueue(b",".join([b'{"input":1}'] * 1_000_000)),
        413,
        "more than 100000 records",
        {},
    ),
    "bad enqueues": (ENQUEUE, lambda: enqueue(b",".join([b"{}"] * 100_000)), 422, "rollouts.0.input", {}),
    "a bad enqueue at the end": (
        ENQUEUE,
        lambda: enqueue(b'{"input":1},' * 99_000 + b"{}"),
        422,
        "rollouts.99000.input",
        {},
    ),
    "many enqueues": (ENQUEUE, lambda: enqueue(b",".join([b'{"input":1}'] * 20_000)), 201, "queuing", {}),
    "many dequeues": (DEQUEUE, lambda: b'{"limit":100000}', 200, "preparing", {}),
    "all rollouts": (SEARCH, lambda: b"{}", 200, "preparing", {}),
    "numbers in a rollout": (
        ENQUEUE,
        lambda: enqueue(b'{"input":[%b1]}' % (b"1," * 8_000_000)),
        413,
        "too many values",
        {},
    ),
    "lists in a rollout": (ENQUEUE, lambda: enqueue(b'{"input":[%b1]}' % (b"[]," * 4_000_000)), 413, "too many", {}),
    "a large text": (ENQUEUE, lambda: enqueue(b'{"input":"%b"}' % (b"\\n" * (3 << 20))), 201, "queuing", {}),
    "a larger text": (ENQUEUE, lambda: enqueue(b'{"input":"%b"}' % (b"x" * (20 << 20))), 413, "8388608 bytes", {}),
    "quotes": (ENQUEUE, lambda: enqueue(b'{"input":"%b' % (b'\\"' * (10 << 20))), 413, "8388608 bytes", {}),
    "depth": (ENQUEUE, lambda: b"[" * (40 << 20), 413, "", {}),
    "a number": (ENQUEUE, lambda: enqueue(b'{"input":%b}' % (b"1" * (1 << 20))), 400, "out of range", {}),
    "a limit of 20 digits": (DEQUEUE, lambda: b'{"limit":99999999999999999999}', 422, "limit", {}),
    "a page of 20 digits": (SEARCH, lambda: b'{"limit":99999999999999999999}', 400, "", {}),
    "gzip members": (
        ENQUEUE,
        lambda: gzip.compress(b"") * 100_000,
        400,
        "more than 1000 gzip members",
        {"Content_Encoding": "gzip"},
    ),
    "a gzip bomb": (ENQUEUE, lambda: gzip.compress(b" " * (65 << 20)), 413, "", {"Content_Encoding": "gzip"}),
    "spans of unknown rollouts": (
        "/v1/traces",
        lambda: otlp(2_000, 2_000),
        200,
        "does not exist in this store",
        PROTOBUF,
    ),
    "empty spans": (
        "/v1/traces",
        lambda: message(1, message(2, b"\x12\x00" * (8 << 20))),
        413,
        "more than 500000 messages",
        PROTOBUF,
    ),
    "a resource for each span": (
        "/v1/traces",
        lambda: message(1, message(1, message(1, message(1, b"k" * (1 << 20)))) + message(2, b"\x12\x00" * 1_000)),
        413,
        "stored with each of their spans",
        PROTOBUF,
    ),
    "traces of spaces": ("/v1/traces", lambda: b" " * (16 << 20), 400, "not", {}),
    "traces of lists": ("/v1/traces", lambda: b'{"a":[%b1]}' % (b"[]," * 4_000_000), 413, "too many values", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_server_answers_others_while_it_gets(server, yardstick, case):
    path, make, status, text, headers = CASES[case]
    data = make()
    with Prober(server) as idle:
        time.sleep(0.3)
    began = time.monotonic()
    with Prober(server) as prober:
        got, answer = send(server, path, data, **headers)
    said = answer.decode(errors="replace")
    assert got == status and text in said, said[:500]
    pieces = yardstick.pieces(since=began)
    limit = SLOWEST_SECONDS * max(1.0, statistics.median(pieces) / yardstick.USUAL_SECONDS)
    assert statistics.median(prober.seconds) < limit / 4
    assert max(prober.seconds) < limit + max(*idle.seconds, *pieces)
