"""Speed of the stores: calls per second of each operation, for one caller and for 16 at once.

A row is a store, a column an operation; ``STORES`` is the place to add one. Each round opens a fresh store and runs
every operation on it, so that what one leaves behind is the next one's work; the table shows medians over rounds. Batch
columns count rollouts, all others calls. Callers are tasks of one event loop, and Python's collector is left running.

With ``--flat`` it measures instead how the cost of a call in SQLite changes with what is stored: dequeue, add_span, a
call that runs the watchdog with nothing due, and one that finds lost attempts, at 10,000 and at 1,000,000 rollouts, a
tenth of them under way. Rounds alternate between the two files; the ratio is the median of the rounds' own.

With ``--commits`` it measures what one caller's writes to SQLite reach of the disk's rate: calls a second, each of them
one transaction and one sync, beside bare transactions of one short row, with the same settings, in turns.

With ``--spans`` it measures batches of 100 spans a second into a server over SQLite, in both ways a server takes them:
``add_many_spans`` of a client, and OTLP's protobuf as an exporter sends it.

Run: python benchmarks/store.py [--quick] [--flat | --commits | --spans] [--stores "memory;http, memory"]
The row of PostgreSQL needs ROLLOUT_BENCH_POSTGRES=postgresql://... of a database it may make schemas in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
from harness import PROJECT, Figures, median_ratio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from psycopg import sql
from rich.console import Console
from rich.table import Table

from rollout_core.store import (
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreThreaded,
    RolloutConfig,
    Span,
    SqlLightningStore,
)
from rollout_core.store.semconv import LightningResourceAttributes
from rollout_core.store.sql import sqlite as sqlite_file

NUM_ROLLOUTS = 10_000
"""Rollouts among which a query looks for 50 of one status."""
BATCH = 256
SPANS = 100
"""Spans of one call of add_many_spans, and of one answer of query_spans."""
NUM_LOST = 100
"""Lost attempts that the watchdog finds in one call."""
PEER_SINGLE = {
    "peer, memory": (8_200, 5_300, 5_100, 324, 52_000, 12_800, 5_500, 175),
    "peer, HTTP": (617, 553, 515, 5, 658, 593, 217, 119),
}
"""agentlightning 0.3.0 on a machine of this kind, one caller: the columns up to the batches, as the project was given
them; not measured here."""


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[LightningStore]:
    yield InMemoryLightningStore()


@asynccontextmanager
async def threaded(folder: Path) -> AsyncIterator[LightningStore]:
    yield LightningStoreThreaded(InMemoryLightningStore())


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[LightningStore]:
    async with SqlLightningStore.from_url(f"sqlite:///{folder}/store.db") as store:
        yield store


@asynccontextmanager
async def postgres(folder: Path) -> AsyncIterator[LightningStore]:
    """A schema of its own in the database that ROLLOUT_BENCH_POSTGRES names."""
    url = os.environ["ROLLOUT_BENCH_POSTGRES"]
    schema = folder.name.lower().replace("-", "_")
    name = sql.Identifier(schema)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
        try:
            async with SqlLightningStore.from_url(f"{url}{'&' if '?' in url else '?'}search_path={schema}") as store:
                yield store
        finally:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(name))


def http(folder: Path) -> AbstractAsyncContextManager[LightningStore]:
    """A server over SQLite."""
    command = ["from deployments.cli import main; main()", "store", "serve", "--port", "0", "--database"]
    return _client_of([*command, f"sqlite:///{folder}/store.db"])


def http_memory(folder: Path) -> AbstractAsyncContextManager[LightningStore]:
    """A server over memory: what HTTP itself lets through."""
    return _client_of([SERVE_MEMORY])


SERVE_MEMORY = """
import asyncio
from rollout_core.store import InMemoryLightningStore, LightningStoreServer

async def serve():
    async with LightningStoreServer(InMemoryLightningStore(), launch_mode="asyncio") as server:
        await server.start()
        print(server.endpoint, flush=True)
        await asyncio.Event().wait()

asyncio.run(serve())
"""


@asynccontextmanager
async def _client_of(program: list[str]) -> AsyncIterator[LightningStore]:
    """A client of a server in a process of its own, a Python program whose first line ends with its address."""
    server = subprocess.Popen(
        [sys.executable, "-c", *program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        async with LightningStoreClient(address) as store:
            yield store
    finally:
        server.terminate()
        server.wait()


STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[LightningStore]]] = {
    "memory": memory,
    "threaded": threaded,
    "sqlite": sqlite,
    "http, memory": http_memory,
    "http, SQLite": http,
}
"""For each row a function that opens an empty store, in a folder of its own, for the length of a block."""
if "ROLLOUT_BENCH_POSTGRES" in os.environ:
    STORES["postgres"] = postgres


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    calls: int
    """Calls of each operation in a round; a tenth of it for those on many spans."""
    batches: int
    rounds: int


@dataclass
class Round:
    """One pass over all operations of one store by ``callers`` at once; rates by column."""

    store: LightningStore
    size: Size
    callers: int
    rates: dict[str, float] = field(default_factory=dict)

    async def run(self) -> dict[str, float]:
        """Calls per second (rollouts per second in batch columns)."""
        store, calls = self.store, self.size.calls
        await self.measure("enqueue", [lambda n=n: store.enqueue_rollout({"task": n}) for n in range(calls)])
        claimed: list[AttemptedRollout] = []

        async def dequeue() -> None:
            rollout = await store.dequeue_rollout("worker")
            assert rollout is not None
            claimed.append(rollout)

        await self.measure("dequeue", [dequeue] * calls)
        spans = [make_span(rollout, 1) for rollout in claimed]
        await self.measure("add_span", [lambda span=span: store.add_span(span) for span in spans])
        traced = [await store.start_rollout(n) for n in range(max(1, calls // 10))]
        batches = [[make_span(rollout, n + 1) for n in range(SPANS)] for rollout in traced]
        await self.measure(
            f"add_many_spans({SPANS})", [lambda batch=batch: store.add_many_spans(batch) for batch in batches]
        )
        ids = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in claimed]
        await self.measure("sequence id", [lambda id=id: store.get_next_span_sequence_id(*id) for id in ids])
        await self.measure(
            "update_attempt", [lambda id=id: store.update_attempt(*id, status="succeeded") for id in ids]
        )

        async def query_spans(rollout_id: str) -> None:
            assert len(await store.query_spans(rollout_id)) == SPANS

        rollout_ids = [rollout.rollout_id for rollout in traced] * 5
        await self.measure(f"query_spans({SPANS})", [lambda id=id: query_spans(id) for id in rollout_ids])
        await fill(store, NUM_ROLLOUTS - len(claimed) - len(traced))

        async def query_rollouts() -> None:
            page = await store.query_rollouts(status_in=["succeeded"], limit=50)
            assert (len(page), page.total) == (50, calls)

        await self.measure("query_rollouts(50)", [query_rollouts] * (calls // 2))
        await drain(store)
        await self.measure_batches()
        return self.rates

    async def measure_batches(self) -> None:
        """Enqueue, then dequeue and complete, in batches."""
        store, batches = self.store, self.size.batches
        requests = [EnqueueRolloutRequest(input={"task": n}) for n in range(BATCH)]
        await self.measure(f"enqueue x{BATCH}", [lambda: store.enqueue_many_rollouts(requests)] * batches, BATCH)

        async def work() -> None:
            claimed = await store.dequeue_many_rollouts(limit=BATCH, worker_id="worker")
            await store.update_many_attempts(
                [
                    AttemptUpdate(
                        rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status="succeeded"
                    )
                    for rollout in claimed
                ],
                fenced=True,
            )

        await self.measure(f"complete x{BATCH}", [work] * batches, BATCH)

    async def measure(self, column: str, calls: Sequence[Callable[[], Awaitable[Any]]], items: int = 1) -> None:
        """Make these calls, and note how many ``items`` a second they did."""
        gc.collect()
        started = time.perf_counter()
        await share(calls, self.callers)
        self.rates[column] = items * len(calls) / (time.perf_counter() - started)


async def share(calls: Iterable[Callable[[], Awaitable[Any]]], callers: int) -> None:
    """Make all calls, at most ``callers`` of them at once."""
    left = iter(calls)

    async def caller() -> None:
        for call in left:
            await call()

    if callers == 1:
        await caller()
    else:
        await asyncio.gather(*(caller() for _ in range(callers)))


def make_span(rollout: AttemptedRollout, sequence_id: int) -> Span:
    """A span such as an agent's call of a model leaves."""
    return Span.from_attributes(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=sequence_id,
        name="openai.chat.completion",
        start_time=1_700_000_000.25,
        end_time=1_700_000_001.5,
        attributes={
            "gen_ai.request.model": "Qwen/Qwen2.5-0.5B-Instruct",
            "gen_ai.usage.completion_tokens": 12,
            "gen_ai.completion.0.content": "The answer is 42.",
            "reward": 0.5,
            "token_ids": [785, 4226, 374, 220, 19, 17, 13],
        },
    )


async def fill(store: LightningStore, count: int, config: RolloutConfig | None = None) -> None:
    """Enqueue ``count`` rollouts."""
    for start in range(0, count, 2_000):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"task": n}, config=config) for n in range(start, min(start + 2_000, count))]
        )


async def drain(store: LightningStore) -> None:
    """Claim all that is queued."""
    while await store.dequeue_many_rollouts(limit=2_000):
        pass


async def measure_store(name: str, callers: int, size: Size) -> dict[str, float]:
    """Medians over rounds, after one that does not count."""
    rounds: list[dict[str, float]] = []
    for counted in range(size.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
            async with STORES[name](Path(folder)) as store:
                rates = await Round(store, size, callers).run()
        if counted:
            rounds.append(rates)
    return {column: statistics.median(rates[column] for rates in rounds) for column in rounds[0]}


async def measure_all(names: Sequence[str], size: Size) -> Table:
    """The one table."""
    rows = {(name, callers): await measure_store(name, callers, size) for name in names for callers in (1, 16)}
    table = Table(
        title=f"Store: calls per second (x{BATCH}: rollouts), medians of {size.rounds} rounds",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    columns = list(next(iter(rows.values())))
    for column in ("store", "callers", *columns):
        table.add_column(column, justify="left" if column == "store" else "right", no_wrap=column == "store")
    for (name, callers), rates in rows.items():
        table.add_row(name, str(callers), *(f"{rates[column]:,.0f}" for column in columns))
    for name, figures in PEER_SINGLE.items():
        table.add_row(name, "1", *(f"{figure:,}" for figure in figures))
    return table


# Spans over HTTP


def otlp_request(spans: Sequence[Span]) -> bytes:
    """The spans of one attempt as an exporter of OpenTelemetry sends them."""
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    for name, value in (
        (LightningResourceAttributes.ROLLOUT_ID.value, spans[0].rollout_id),
        (LightningResourceAttributes.ATTEMPT_ID.value, spans[0].attempt_id),
    ):
        of_resource.resource.attributes.add(key=name).value.string_value = value
    sent = of_resource.scope_spans.add()
    for span in spans:
        source = sent.spans.add(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            name=span.name,
            start_time_unix_nano=1_700_000_000_250_000_000,
            end_time_unix_nano=1_700_000_001_500_000_000,
        )
        for key, value in span.attributes.items():
            held = source.attributes.add(key=key).value
            if isinstance(value, list):
                for number in value:
                    held.array_value.values.add(int_value=number)
            else:
                kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
                setattr(held, kind, value)
    return request.SerializeToString()


async def measure_spans(size: Size) -> Table:
    """Batches of spans a second over HTTP into SQLite; medians over rounds, after one that does not count."""
    rounds: list[dict[tuple[str, int], float]] = []
    for _ in range(size.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
            async with http(Path(folder)) as store, aiohttp.ClientSession() as web:
                rounds.append(await _span_rates(store, web, size.calls))
    table = Table(
        title=f"Batches of {SPANS} spans a second\nover HTTP into SQLite,\nmedians of {size.rounds} rounds",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("sent as", "callers", "batches"):
        table.add_column(column, justify="left" if column == "sent as" else "right")
    for kind, callers in rounds[0]:
        rate = statistics.median(rates[kind, callers] for rates in rounds[1:])
        table.add_row(kind, str(callers), f"{rate:,.0f}")
    return table


async def _span_rates(store: LightningStore, web: aiohttp.ClientSession, calls: int) -> dict[tuple[str, int], float]:
    rates: dict[tuple[str, int], float] = {}
    for callers in (1, 16):
        traced = [await store.start_rollout(n) for n in range(calls)]
        batches = [[make_span(rollout, n + 1) for n in range(SPANS)] for rollout in traced]
        other = Round(store, Size(calls, 0, 1), callers)
        await other.measure("spans", [lambda batch=batch: store.add_many_spans(batch) for batch in batches])
        requests = [otlp_request([make_span(rollout, 1) for _ in range(SPANS)]) for rollout in traced]

        async def export(request: bytes) -> None:
            headers = {"content-type": "application/x-protobuf"}
            async with web.post(store.otlp_traces_endpoint(), data=request, headers=headers) as reply:
                assert reply.status == 200 and await reply.read() == b""

        await other.measure("otlp", [lambda request=request: export(request) for request in requests])
        rates["add_many_spans", callers] = other.rates["spans"]
        rates["OTLP protobuf", callers] = other.rates["otlp"]
    return rates


# How the cost changes with what is stored


class Flat:
    """A SQLite store with many rollouts, a tenth of them under way, and a clock that tests may turn."""

    CONFIG = RolloutConfig(timeout_seconds=1_000.0, unresponsive_seconds=500.0)

    def __init__(self, folder: Path, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        self._ahead = 0.0
        self.store = SqlLightningStore.from_url(
            f"sqlite:///{folder}/{num_rollouts}.db",
            scan_debounce_seconds=0,
            clock=lambda: time.time() + self._ahead,
        )
        self._claimed: list[AttemptedRollout] = []

    async def prepare(self) -> None:
        """Fill the store."""
        await fill(self.store, self.num_rollouts, self.CONFIG)
        for _ in range(10):
            self._claimed += (await self.store.dequeue_many_rollouts(limit=self.num_rollouts // 100))[:100]

    async def seconds(self, calls: int) -> dict[str, float]:
        """Seconds of one call of each kind, over ``calls`` of them."""
        store = self.store
        spans = [make_span(rollout, 1) for rollout in itertools.islice(itertools.cycle(self._claimed), calls)]
        seconds = {
            "dequeue": await self._time([store.dequeue_rollout] * calls),
            "add_span": await self._time([lambda span=span: store.add_span(span) for span in spans]),
            "watchdog, nothing due": await self._time([lambda: store.get_worker_by_id("nobody")] * calls),
        }
        # Some attempts begin long ago, and are lost now; the others stay in time.
        self._ahead = -2_000.0
        await store.dequeue_many_rollouts(limit=NUM_LOST)
        self._ahead = 0.0
        seconds[f"watchdog, {NUM_LOST} lost"] = await self._time([lambda: store.update_worker("nobody")])
        return seconds

    @staticmethod
    async def _time(calls: Sequence[Callable[[], Awaitable[Any]]]) -> float:
        gc.collect()
        started = time.perf_counter()
        await share(calls, 1)
        return (time.perf_counter() - started) / len(calls)


async def measure_flat(sizes: tuple[int, int], calls: int, rounds: int) -> Figures:
    """Cost of a call with few and with many rollouts."""
    figures = Figures(f"SQLite, one caller: microseconds a call at {sizes[1]:,} rollouts (ours) and {sizes[0]:,}")
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            sides = [Flat(Path(folder), num_rollouts) for num_rollouts in sizes]
            for side in sides:
                await stack.enter_async_context(side.store)
                await side.prepare()
                await side.seconds(calls)
            measured = [[await side.seconds(calls) for side in sides] for _ in range(rounds)]
    for kind in measured[0][0]:
        few, many = ([1e6 * results[side][kind] for results in measured] for side in (0, 1))
        figures.add(
            kind,
            f"{statistics.median(many):,.0f}",
            f"{statistics.median(few):,.0f}",
            ratio=median_ratio(many, few),
            rounds=rounds,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures.add("peak memory of this process", f"{peak:,.0f} MiB")
    return figures


# What writes reach of the disk's rate


async def measure_commits(calls: int, rounds: int) -> Figures:
    """Calls a second of one caller, and bare commits a second, in turns."""
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        bare = sqlite_file.connect(Path(folder, "bare.db"), busy_timeout_seconds=30)
        bare.execute("CREATE TABLE rows (key INTEGER PRIMARY KEY, value TEXT)")
        rates: dict[str, list[tuple[float, float]]] = {}
        async with SqlLightningStore.from_url(f"sqlite:///{folder}/store.db") as store:
            for counted in range(rounds + 1):
                async for operation, rate in _write_rates(store, calls):
                    if counted:
                        rates.setdefault(operation, []).append((rate, _commit_rate(bare, calls)))
        bare.close()
    figures = Figures("SQLite, one caller: calls a second (ours) and bare commits a second")
    for operation, measured in rates.items():
        figures.compare(operation, *zip(*measured, strict=True))
    return figures


def _commit_rate(bare: sqlite3.Connection, commits: int) -> float:
    started = time.perf_counter()
    for _ in range(commits):
        bare.execute("BEGIN IMMEDIATE")
        bare.execute("INSERT INTO rows (value) VALUES (?)", ["x" * 200])
        bare.execute("COMMIT")
    return commits / (time.perf_counter() - started)


async def _write_rates(store: LightningStore, calls: int) -> AsyncIterator[tuple[str, float]]:
    """Each write with its calls a second."""
    claimed: list[AttemptedRollout] = []

    async def dequeue() -> None:
        rollout = await store.dequeue_rollout("worker")
        assert rollout is not None
        claimed.append(rollout)

    async def rate(operations: Sequence[Callable[[], Awaitable[Any]]]) -> float:
        started = time.perf_counter()
        await share(operations, 1)
        return len(operations) / (time.perf_counter() - started)

    yield "enqueue", await rate([lambda: store.enqueue_rollout({"task": 1})] * calls)
    yield "dequeue", await rate([dequeue] * calls)
    ids = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in claimed]
    spans = [make_span(rollout, 1) for rollout in claimed]
    yield "add_span", await rate([lambda span=span: store.add_span(span) for span in spans])
    yield "sequence id", await rate([lambda id=id: store.get_next_span_sequence_id(*id) for id in ids])
    yield "update_attempt", await rate([lambda id=id: store.update_attempt(*id, status="succeeded") for id in ids])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    parser.add_argument("--flat", action="store_true", help="cost of a call with many rollouts stored")
    parser.add_argument("--commits", action="store_true", help="one caller's writes beside bare commits")
    parser.add_argument("--spans", action="store_true", help="batches of spans over HTTP into SQLite")
    parser.add_argument("--stores", default=";".join(STORES), help="the rows, joined by semicolons")
    arguments = parser.parse_args()
    if arguments.flat:
        sizes, calls, rounds = ((1_000, 10_000), 20, 2) if arguments.quick else ((10_000, 1_000_000), 200, 5)
        asyncio.run(measure_flat(sizes, calls, rounds)).show()
        return
    if arguments.commits:
        asyncio.run(measure_commits(*((20, 2) if arguments.quick else (100, 15)))).show()
        return
    size = Size(calls=100, batches=2, rounds=1) if arguments.quick else Size(calls=1_000, batches=10, rounds=5)
    if arguments.spans:
        Console().print(asyncio.run(measure_spans(size)))
        return
    names = arguments.stores.split(";")
    if unknown := set(names) - set(STORES):
        parser.error(
            f"argument --stores: unknown store {', '.join(sorted(unknown))}; expected some of {'; '.join(STORES)}"
            + ("" if "postgres" in STORES else " (postgres needs ROLLOUT_BENCH_POSTGRES, see above)")
        )
    table = asyncio.run(measure_all(names, size))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
