"""What the parts around an agent cost.

With ``--proxy``: a chat completion through the LLM proxy, recorded token by token, beside the same request sent
straight to the upstream, in turns. The upstream is scripted, in a process of its own: it answers 64 tokens with their
ids and log-probabilities after 150 to 350 ms, or streams them. 64 requests are under way at a time. Latencies are what
comes on top of the script's own delay. The proxy has a process to itself, its store in memory or SQLite.

Requests a second on one core are what the proxy's processor time allows, so that a busy machine does not hide it; the
rate that was reached with upstream, client and proxy on the machine's cores stands beside it.

Run: python benchmarks/agents.py --proxy [--quick] [--store memory|sqlite] [--spare-collector]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from harness import Figures, percentile

CONCURRENCY = 64
NUM_PROMPT_TOKENS = 200
NUM_TOKENS = 64
NUM_PIECES = 16
"""Of a streamed answer."""
PIECE_SECONDS = 0.005
Timed = tuple[float, float]
"""Seconds to the first byte of the answer, and to its last, less those that the script waits."""


# The upstream


def delay_of(seed: int) -> float:
    """Seconds that the script waits before it answers a request of this seed."""
    return random.Random(seed).uniform(0.15, 0.35)


def _answer(first: int, count: int, *, is_stream: bool) -> dict[str, Any]:
    ids = list(range(first, first + count))
    content = [{"token": "word ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
    text = {"role": "assistant", "content": "word " * count}
    choice = {
        "index": 0,
        "delta" if is_stream else "message": text,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    prompt = {} if first else {"prompt_token_ids": list(range(NUM_PROMPT_TOKENS))}
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], **prompt}


WHOLE = orjson.dumps(_answer(0, NUM_TOKENS, is_stream=False))
PIECES = [
    b"data: " + orjson.dumps(_answer(first, NUM_TOKENS // NUM_PIECES, is_stream=True)) + b"\n\n"
    for first in range(0, NUM_TOKENS, NUM_TOKENS // NUM_PIECES)
]


class Upstream(asyncio.Protocol):
    """As little of HTTP as the requests here need, so that the upstream bounds nothing."""

    def connection_made(self, transport: Any) -> None:  # uvloop's are not asyncio's
        self._transport = transport
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = bytes(self._data).partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if end and len(rest) >= length:
            self._data.clear()
            body = orjson.loads(rest)
            delay = delay_of(body["seed"]) if body["seed"] else 0.0
            asyncio.get_running_loop().call_later(delay, self._reply, bool(body.get("stream")))

    def _reply(self, is_stream: bool) -> None:
        kind, size = (
            ("text/event-stream", "transfer-encoding: chunked")
            if is_stream
            else (
                "application/json",
                f"content-length: {len(WHOLE)}",
            )
        )
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{size}\r\n\r\n".encode()
        if is_stream:
            self._transport.write(head)
            self._stream(NUM_PIECES)
        else:
            self._transport.write(head + WHOLE)

    def _stream(self, left: int) -> None:
        if not left:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(_chunk(PIECES[-left]))
        asyncio.get_running_loop().call_later(PIECE_SECONDS, self._stream, left - 1)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def run_upstream(pipe: Connection) -> None:
    """A process's work: say the port, and serve until the pipe is closed."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(_until_closed, pipe)

    uvloop.run(serve())


def _until_closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


def run_proxy(pipe: Connection, upstream_port: int, database: str | None, spares_collector: bool) -> None:
    """A process's work: a proxy, whose recorded calls are counted at the end."""
    from rollout_core.agents.proxy.server import LLMProxy
    from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream as ProxyUpstream
    from rollout_core.store import InMemoryLightningStore, SqlLightningStore
    from rollout_core.store.http.listening import spare_collector

    async def serve() -> None:
        store = InMemoryLightningStore() if database is None else SqlLightningStore.from_url(database)
        url = f"http://127.0.0.1:{upstream_port}/v1"
        proxy = LLMProxy(0, [ModelEntry("m", [ProxyUpstream(url=url)])], store)
        await proxy.start()
        rollouts = [await store.start_rollout(number) for number in range(CONCURRENCY)]
        pipe.send([proxy.as_resource(found.rollout_id, found.attempt.attempt_id).endpoint for found in rollouts])
        await asyncio.to_thread(_until_closed, pipe)
        await proxy.stop()
        spans = [await store.query_spans(found.rollout_id, limit=0) for found in rollouts]
        pipe.send(sum(page.total for page in spans))
        await store.close()

    if spares_collector:
        spare_collector()
    asyncio.run(serve())


@contextmanager
def process(work: Callable[..., None], *arguments: Any):
    """A process at work: its first message, the pipe to it, and itself."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours.recv(), ours, psutil.Process(child.pid)
    finally:
        ours.close()
        child.join(30)


# The client


@asynccontextmanager
async def connections() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=False)) as session:
        yield session


async def ask(session: aiohttp.ClientSession, url: str, seed: int, is_stream: bool) -> Timed:
    """One request. Straight to the upstream it asks for what the proxy asks for."""
    messages = [{"role": "user", "content": "What is the answer to all of this? " * 10}]
    body = {"model": "m", "messages": messages, "seed": seed, "stream": is_stream, "temperature": 1.0}
    started = time.perf_counter()
    async with session.post(url + "/chat/completions", data=orjson.dumps(body), headers=JSON) as response:
        first = await response.content.readany()
        at_first = time.perf_counter() - started
        size = len(first)
        async for data in response.content.iter_any():
            size += len(data)
        assert response.status == 200 and size > 1000, (response.status, first)
    taken = time.perf_counter() - started
    delay = delay_of(seed) if seed else 0.0
    return at_first - delay, taken - delay - is_stream * NUM_PIECES * PIECE_SECONDS


JSON = {"content-type": "application/json"}


async def load(urls: Sequence[str], count: int, *, is_stream: bool = False, has_delay: bool = True) -> list[Timed]:
    """``count`` requests, one after the other of each url."""
    seeds = iter(range(1, count + 1))

    async def agent(session: aiohttp.ClientSession, place: int, url: str) -> list[Timed]:
        if has_delay:
            await asyncio.sleep(0.3 * place / len(urls))  # as agents come, not all in the same moment
        return [await ask(session, url, seed if has_delay else 0, is_stream) for seed in seeds]

    async with connections() as session:
        found = await asyncio.gather(*(agent(session, place, url) for place, url in enumerate(urls)))
    return [timed for part in found for timed in part]


def compare(figures: Figures, what: str, ours: Sequence[float], direct: Sequence[float], rounds: int) -> None:
    """Rows for the median and the 99th percentile of both sides, and what is added."""
    for name, quantile in (("median", statistics.median), ("p99", lambda values: percentile(values, 0.99))):
        mine, base = quantile(ours) * 1e3, quantile(direct) * 1e3
        figures.add(f"{what}, {name}: +{mine - base:.2f} ms", f"{mine:.2f} ms", f"{base:.2f} ms", rounds=rounds)


def bench_proxy(figures: Figures, *, quick: bool, store: str, spares_collector: bool) -> None:
    """All rows of the proxy."""
    rounds, count = (1, 256) if quick else (3, 1024)
    with tempfile.TemporaryDirectory() as folder, process(run_upstream) as (port, _, _):
        database = f"sqlite:///{folder}/store.db" if store == "sqlite" else None
        with process(run_proxy, port, database, spares_collector) as (proxied, pipe, proxy):
            direct = [f"http://127.0.0.1:{port}/v1"] * CONCURRENCY
            num_recorded = 0
            for is_stream in (False, True):
                sides: dict[str, list[Timed]] = {"ours": [], "direct": []}
                for urls in (proxied, direct):
                    uvloop.run(load(urls, CONCURRENCY, is_stream=is_stream))  # warm
                for _ in range(rounds):
                    sides["direct"] += uvloop.run(load(direct, count, is_stream=is_stream))
                    sides["ours"] += uvloop.run(load(proxied, count, is_stream=is_stream))
                num_recorded += rounds * count + CONCURRENCY
                what = "first streamed piece" if is_stream else "whole answer"
                part = 0 if is_stream else 1
                ours, base = ([timed[part] for timed in sides[side]] for side in ("ours", "direct"))
                compare(figures, what, ours, base, rounds)
            rates, per_core = [], []
            for _ in range(rounds):
                before, started = sum(proxy.cpu_times()[:2]), time.perf_counter()
                uvloop.run(load(proxied, 4 * count, has_delay=False))
                seconds = sum(proxy.cpu_times()[:2]) - before
                rates.append(4 * count / (time.perf_counter() - started))
                per_core.append(4 * count / seconds)
                num_recorded += 4 * count
            figures.add(
                "recorded requests/s, as the proxy's processor time allows",
                f"{statistics.median(per_core):,.0f}",
                rounds=rounds,
            )
            figures.add(
                "recorded requests/s, reached beside client and upstream",
                f"{statistics.median(rates):,.0f}",
                rounds=rounds,
            )
            pipe.send("end")
            assert pipe.recv() == num_recorded, "every request is recorded"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy", action="store_true", required=True, help="the LLM proxy")
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    parser.add_argument("--store", choices=("memory", "sqlite"), default="memory", help="where the proxy records")
    parser.add_argument("--spare-collector", action="store_true", help="collect garbage as the store's server does")
    given = parser.parse_args()
    figures = Figures(f"LLM proxy, {CONCURRENCY} requests at a time, recorded in {given.store}")
    bench_proxy(figures, quick=given.quick, store=given.store, spares_collector=given.spare_collector)
    figures.show("baseline: straight to the upstream")


if __name__ == "__main__":
    sys.exit(main())
