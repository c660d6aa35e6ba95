"""What the parts around an agent cost.

With ``--proxy``: a chat completion through the LLM proxy, recorded token by token, beside the same request sent
straight to the upstream, in turns. The upstream is scripted, in a process of its own: it answers 64 tokens with their
ids and log-probabilities after 150 to 350 ms, or streams them. 64 requests are under way at a time. Latencies are what
comes on top of the script's own delay. The proxy has a process to itself, its store in memory or SQLite.

Requests a second on one core are what the proxy's processor time allows, so that a busy machine does not hide it; the
rate that was reached with upstream, client and proxy on the machine's cores stands beside it.

With ``--engine``: tokens a second of one vLLM engine with a tiny model, fed the same prompts by batch inference, as
chat completions through the engine's server, and as chat completions through LLM proxy and server, recorded in a SQLite
store; in turns. The client has a process of its own; engine's server and proxy are threads beside the engine, as in a
run that trains an agent.

With ``--noop``: an agent that does nothing, on a store in memory, ours and the peer's (agentlightning) in turns, with
runners in threads of one process (``shm``) and in processes (``cs``). Each run is a process of its own; the peer has a
virtual environment of its own, made on demand in ~/.cache/rollout-bench.

Run: python benchmarks/agents.py --proxy [--quick] [--store memory|sqlite] [--spare-collector]
     python benchmarks/agents.py --engine [--quick] [--concurrency N]
     python benchmarks/agents.py --noop [--quick] [--without-peer]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from harness import PROJECT, Figures, own_place, percentile

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
    from rollout_core.agents.proxy.proxy_server import LLMProxy
    from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream as ProxyUpstream
    from rollout_core.store import InMemoryLightningStore, SqlLightningStore
    from rollout_core.web.listening import tune_gc

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
        tune_gc()
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


# The engine behind the proxy

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def run_client(pipe: Connection) -> None:
    """A process's work: ask what it is sent (urls, number of requests, concurrency), and answer with the completion
    tokens that came back and the seconds that it took."""
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(uvloop.run(_chats(*pipe.recv())))


async def _chats(urls: Sequence[str], count: int, concurrency: int) -> tuple[int, float]:
    numbers = iter(range(count))
    num_tokens = 0

    async def agent(session: aiohttp.ClientSession, url: str) -> None:
        nonlocal num_tokens
        for number in numbers:
            body = {"model": "policy", "messages": talk(number), "max_tokens": NUM_TOKENS}
            async with session.post(url + "/chat/completions", data=orjson.dumps(body), headers=JSON) as response:
                answer = await response.json()
                assert response.status == 200, answer
                num_tokens += answer["usage"]["completion_tokens"]

    started = time.perf_counter()
    async with connections() as session:
        await asyncio.gather(*(agent(session, urls[place % len(urls)]) for place in range(concurrency)))
    return num_tokens, time.perf_counter() - started


def talk(number: int) -> list[dict[str, str]]:
    """The messages of a request."""
    return [{"role": "user", "content": f"sort {' '.join(str(number % base) for base in (3, 5, 7, 8, 9, 10))} ="}]


def make_model(folder: Path, size: int) -> Any:
    """A tiny model with a chat template."""
    from examples.make_tiny import make_model as make
    from rollout_core.inference import ModelRef
    from rollout_core.objects import ObjectStore

    make(folder, **({} if size == 0 else {"hidden_size": size, "num_layers": 8}))
    settings = folder / "tokenizer_config.json"
    settings.write_bytes(orjson.dumps(orjson.loads(settings.read_bytes()) | {"chat_template": TEMPLATE}))
    return ModelRef(ObjectStore.from_url("memory://models").put_tree(folder), folder)


async def batch(folder: Path, backend: Any, model: Any, count: int, round_number: int) -> tuple[int, float]:
    """The same prompts by batch inference: tokens and seconds."""
    from rollout_core.config import SamplingParams
    from rollout_core.data.datasets import PromptRow
    from rollout_core.data.samples import encode_samples, make_samples
    from rollout_core.inference.engines import EngineOf
    from rollout_core.inference.training_samples import complete_batch
    from rollout_core.models.pretrained import load_tokenizer
    from rollout_core.objects import ObjectStore
    from rollout_core.store import SqlLightningStore

    params = SamplingParams(max_tokens=NUM_TOKENS, seed=round_number)
    started = time.perf_counter()
    rows = [PromptRow.model_validate({"messages": talk(number)}) for number in range(count)]
    samples = make_samples(load_tokenizer(model.folder), rows, model=model.content_id, params=params)
    objects = ObjectStore.from_url(f"file://{folder}/objects")
    samples_id = objects.put_bytes(encode_samples(samples))
    async with SqlLightningStore.from_url(f"sqlite:///{folder}/batch.db") as store:
        engine = EngineOf(backend, model)
        record, _ = await complete_batch(store, objects, engine, samples_id, params, worker_id="bench")
    return record.num_tokens, time.perf_counter() - started


async def bench_engine(figures: Figures, folder: Path, *, quick: bool, concurrency: int, size: int) -> None:
    """All rows of the engine's server."""
    from rollout_core.agents import LLMProxy, ModelEntry, Upstream as ProxyUpstream
    from rollout_core.config import VLLMBackend
    from rollout_core.inference.engines import close_engine
    from rollout_core.inference.serving import EngineServer
    from rollout_core.store import SqlLightningStore

    rounds, count = (1, 256) if quick else (3, 2048)
    model, backend = make_model(folder / "model", size), VLLMBackend(max_model_len=256)
    server = EngineServer(backend)
    await server.start(model)
    store = SqlLightningStore.from_url(f"sqlite:///{folder}/proxy.db")
    entry = ModelEntry("policy", [ProxyUpstream(url=server.url, model_id=model.content_id)])
    proxy = LLMProxy(0, [entry], store)
    await proxy.start()
    rollouts = [await store.start_rollout(number) for number in range(concurrency)]
    proxied = [proxy.as_resource(found.rollout_id, found.attempt.attempt_id).endpoint for found in rollouts]
    with process(run_client) as (_, pipe, _):

        async def chats(urls: Sequence[str], number: int) -> tuple[int, float]:
            pipe.send((urls, number, concurrency))
            return await asyncio.to_thread(pipe.recv)

        async def watched(urls: Sequence[str], number: int) -> tuple[int, float]:
            watching = asyncio.create_task(watch(server, running))
            try:
                return await chats(urls, number)
            finally:
                watching.cancel()

        running: list[int] = []
        rates: dict[str, list[float]] = {"batch inference": [], "server": [], "proxy and server": []}
        for round_number in range(rounds + 1):
            number = count if round_number else 2 * concurrency  # the first is to warm up
            found = {
                "batch inference": await batch(folder, backend, model, number, round_number),
                "server": await chats([server.url], number),
                "proxy and server": await watched(proxied, number),
            }
            for side, (num_tokens, seconds) in found.items() if round_number else ():
                rates[side].append(num_tokens / seconds)
    await proxy.stop()
    await server.stop()
    spans = [(await store.query_spans(found.rollout_id, limit=0)).total for found in rollouts]
    assert sum(spans) == rounds * count + 2 * concurrency, "every request is recorded"
    await store.close()
    close_engine()
    base = rates["batch inference"]
    for side, reached in rates.items():
        ratio = statistics.median(mine / other for mine, other in zip(reached, base, strict=True))
        what = f"tokens/s by {side}: {ratio:.2f}"
        figures.add(what, f"{statistics.median(reached):,.0f}", f"{statistics.median(base):,.0f}", rounds=rounds)
    idle = sum(not count for count in running) / len(running)
    figures.add("share of the time without a request in the engine, proxy and server", f"{idle:.1%}", rounds=rounds)
    figures.add("requests in the engine, mean", f"{statistics.fmean(running):.0f}", rounds=rounds)


async def watch(server: Any, running: list[int]) -> None:
    """Note how many requests the engine has, until cancelled."""
    while True:
        running.append(server.num_running)
        await asyncio.sleep(0.005)


# A no-op agent

PEER = "agentlightning==0.3.0"
PEER_NEEDS = ["opentelemetry-sdk<1.40"]
"""From 1.40 on the peer's exporter no longer reaches its store."""
NOOP_CASES = {("shm", 1): 200, ("shm", 4): 200, ("cs", 1): 60, ("cs", 2): 60, ("cs", 4): 60}
"""Rollouts of the peer by strategy and number of runners; ours runs NOOP_FACTOR times as many, for as long a time."""
NOOP_FACTOR = 5
NOOP_ROUNDS = 3
RUN_SECONDS = 180.0


def peer_python() -> Path:
    """The interpreter of the peer's virtual environment, which is made if there is none."""
    folder = Path.home() / ".cache" / "rollout-bench" / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {PEER} in {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER, *PEER_NEEDS], check=True)
        (folder / "complete").touch()
    return python


def run_noop(python: Path, side: str, kind: str, num_runners: int, count: int) -> tuple[float, int]:
    """Rollouts a second of one run, and how many did not succeed: all, where the run did not end."""
    command = [str(python), str(PROJECT / "benchmarks" / "noop_agents.py"), side, kind, str(num_runners), str(count)]
    # The peer's LiteLLM would ask the network for prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(PROJECT)}
    try:
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return 0.0, count
    return (count - found["failed"]) / found["seconds"], int(found["failed"])


def bench_noop(figures: Figures, *, quick: bool, with_peer: bool) -> None:
    """A row for each strategy and number of runners."""
    sides = {"ours": Path(sys.executable), **({"peer": peer_python()} if with_peer else {})}
    for (kind, num_runners), count in NOOP_CASES.items():
        rates: dict[str, list[float]] = {side: [] for side in sides}
        failed, asked = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0)
        for _ in range(1 if quick else NOOP_ROUNDS):
            for side, python in sides.items():
                num = (count // 4 if quick else count) * (NOOP_FACTOR if side == "ours" else 1)
                rate, num_failed = run_noop(python, side, kind, num_runners, num)
                rates[side].append(rate)
                failed[side] += num_failed
                asked[side] += num
        lost = ", ".join(f"{side} {failed[side]} of {asked[side]}" for side in sides)
        what = f"rollouts/s, {kind} {num_runners} (failed: {lost})"
        if with_peer and all(rates["peer"]):
            figures.compare(what, rates["ours"], rates["peer"])
        else:
            figures.add(what, f"{statistics.median(rates['ours']):,.0f}", rounds=len(rates["ours"]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--proxy", action="store_true", help="the LLM proxy")
    part.add_argument("--engine", action="store_true", help="the engine's server")
    parser.add_argument("--concurrency", type=int, default=128, help="requests at a time, with --engine")
    parser.add_argument("--hidden-size", type=int, default=0, help="of the model, instead of 3.3 million parameters")
    part.add_argument("--noop", action="store_true", help="an agent that does nothing, beside the peer's")
    parser.add_argument("--without-peer", action="store_true", help="with --noop: our side alone")
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it runs")
    parser.add_argument("--store", choices=("memory", "sqlite"), default="memory", help="where the proxy records")
    parser.add_argument("--spare-collector", action="store_true", help="collect garbage as the store's server does")
    given = parser.parse_args()
    if given.engine:
        figures = Figures(f"One vLLM engine, {given.concurrency} requests at a time")
        with own_place() as folder:
            work = bench_engine(
                figures, folder, quick=given.quick, concurrency=given.concurrency, size=given.hidden_size
            )
            asyncio.run(work)
        return figures.show("baseline: batch inference")
    if given.noop:
        figures = Figures("No-op agent, store in memory")
        bench_noop(figures, quick=given.quick, with_peer=not given.without_peer)
        figures.show(f"baseline: {PEER}")
        return
    figures = Figures(f"LLM proxy, {CONCURRENCY} requests at a time, recorded in {given.store}")
    bench_proxy(figures, quick=given.quick, store=given.store, spares_collector=given.tune_gc)
    figures.show("baseline: straight to the upstream")


if __name__ == "__main__":
    sys.exit(main())
