"""`rollout serve` beside `vllm serve`: the same engine, model and settings, streams of chat completions of one length.

Both servers run at once, one of them idle while the other is asked, in turn, each first in every other round. Clients
are coroutines of this process, each of which asks again as soon as it has an answer, with prompts that nobody else asks
in the round. With 1, 8 and 64 clients:

- tokens per second of all clients;
- milliseconds from a request to its first token, the median and the 99th percentile over all rounds;
- processor milliseconds a token: of the whole server, and of our front alone, which `vllm serve` does not have.

The model is the real one of `real.py`, or ``--model FOLDER``; ``--quick`` makes a small one. With ``--change`` a second
model of the same architecture is promoted and gone back from, and the table says how long requests waited for it, and
how long the engine took to read the weights.

Run: python benchmarks/serving.py [--quick] [--model FOLDER] [--rounds 4] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from harness import Figures, own_place, percentile
from real import machine, read_model

CLIENTS = (1, 8, 64)
MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 64
START_SECONDS = 600.0
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@dataclass(frozen=True)
class Server:
    """One that answers."""

    url: str
    process: psutil.Process
    front: psutil.Process | None = None

    def seconds(self) -> float:
        """Processor time of all its processes so far."""
        return sum(_seconds(each) for each in [self.process, *self.process.children(recursive=True)])


@dataclass
class Side:
    """What a server showed with some number of clients, a value a round."""

    tokens_per_second: list[float] = field(default_factory=list)
    processor_ms: list[float] = field(default_factory=list)
    front_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """A value a request."""


def _seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


@contextmanager
def server(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A child process, ended at the end of the block."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | environment
        )
    with process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def ours(model: Path, folder: Path, threads: int) -> Iterator[Server]:
    """`rollout serve` of a folder."""
    options = ["--name", "m", "--port", "0", "--max-queue", "1000", "--no-canary"]
    for name, value in {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "num_threads": threads}.items():
        options += ["--set", f"backend.{name}={value}"]
    command = [sys.executable, "-m", "rollout_core", "serve", str(model), *options]
    with server(command, folder / "ours.log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "serves at" not in line:
            sys.exit(f"rollout serve did not start: {(folder / 'ours.log').read_text()[-3000:]}")
        yield Server(line.split()[-1], psutil.Process(process.pid), psutil.Process(process.pid))


@contextmanager
def theirs(model: Path, folder: Path, threads: int) -> Iterator[Server]:
    """`vllm serve` of the same folder with the same options of its engine."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": MAX_NUM_SEQS, "dtype": "float32", "port": port}
    options |= {"served-model-name": "m", "uvicorn-log-level": "warning", "host": "127.0.0.1"}
    flags = ["--enforce-eager", "--no-enable-chunked-prefill", "--disable-uvicorn-access-log"]
    # `vllm serve` itself asks for a distribution called vllm, which the CPU's is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "4"}
    with server(command, folder / "theirs.log", **own) as process:
        ends = time.monotonic() + START_SECONDS
        url = f"http://127.0.0.1:{port}"
        while not _is_well(url):
            if process.poll() is not None or time.monotonic() > ends:
                sys.exit(f"vllm serve did not start: {(folder / 'theirs.log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield Server(url, psutil.Process(process.pid))


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return response.status == 200
    except OSError:
        return False


async def ask(session: aiohttp.ClientSession, prompt: str, tokens: int) -> float:
    """Milliseconds to the first token of a stream, all of which is read."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": tokens}
    body |= {"temperature": 0.0, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            sys.exit(f"HTTP {response.status}: {await response.text()}")
        while piece := await response.content.readany():
            first = first or time.perf_counter() - began
    if not piece and not first:
        sys.exit("an answer without a token")
    return 1000 * first


async def load(side: Server, mark: str, clients: int, requests: int, tokens: int) -> tuple[float, list[float]]:
    """Seconds that ``clients`` take for ``requests`` each, and the times to their first tokens."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(side.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client(number: int) -> list[float]:
            return [await ask(session, f"{mark} {number} {turn}: tell a story", tokens) for turn in range(requests)]

        began = time.perf_counter()
        firsts = await asyncio.gather(*(client(number) for number in range(clients)))
        return time.perf_counter() - began, [value for each in firsts for value in each]


def measure(server: Server, side: Side, mark: str, clients: int, requests: int, tokens: int) -> None:
    """One round of a side."""
    before = server.seconds(), _seconds(server.front) if server.front else 0.0
    seconds, firsts = asyncio.run(load(server, mark, clients, requests, tokens))
    after = server.seconds(), _seconds(server.front) if server.front else 0.0
    count = clients * requests * tokens
    side.tokens_per_second.append(count / seconds)
    side.processor_ms.append(1000 * (after[0] - before[0]) / count)
    side.front_ms.append(1000 * (after[1] - before[1]) / count)
    side.first_ms += firsts


def changes(models: Sequence[Path], folder: Path, threads: int, rounds: int, figures: Figures) -> None:
    """Promote one model after the other while 8 clients ask; how long requests waited for it."""
    from rollout_core.objects import ObjectStore
    from rollout_core.promotion.history import Change, change_latest
    from rollout_core.store import SqlLightningStore

    objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
    ids = [objects.put_tree(model) for model in models]

    async def promote(number: int) -> None:
        async with SqlLightningStore.from_url(os.environ["ROLLOUT_DATABASE"]) as store:
            await change_latest(store, objects, Change("promote", "policy", ids[number % 2], "benchmark", "turns"))

    asyncio.run(promote(0))
    options = ["--follow", "policy", "--name", "m", "--port", "0", "--set", f"backend.max_model_len={MAX_MODEL_LEN}"]
    options += ["--set", f"backend.num_threads={threads}"]
    with server([sys.executable, "-m", "rollout_core", "serve", *options], folder / "follow.log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "serves at" not in line:
            sys.exit(f"rollout serve did not start: {(folder / 'follow.log').read_text()[-3000:]}")
        url, held, worst, loading = line.split()[-1], [], [], []

        async def turns() -> None:
            async with aiohttp.ClientSession(url) as session:
                longest, is_over = 0.0, False

                async def client(number: int) -> None:
                    nonlocal longest
                    while not is_over:
                        longest = max(longest, await ask(session, f"{number} {time.monotonic()}", 8))

                clients = [asyncio.create_task(client(number)) for number in range(4)]
                for number in range(1, rounds + 3):
                    await promote(number)
                    longest = 0.0
                    while _changes(figured := await _figures(session)) < number:
                        await asyncio.sleep(0.05)
                    if number > 2:  # first the trainer's scores are made
                        held.append(1000 * _figure(figured, "rollout_serve_weight_change_held_seconds"))
                        loading.append(1000 * _figure(figured, "rollout_serve_weight_change_loading_seconds"))
                        worst.append(longest)
                is_over = True
                await asyncio.gather(*clients)

        asyncio.run(turns())
    figures.add("a change of weights: new requests wait, ms", f"{statistics.median(held):,.0f}", rounds=len(held))
    figures.add("of that, the engine takes the weights, ms", f"{statistics.median(loading):,.0f}", rounds=len(held))
    figures.add("slowest first token meanwhile, 4 clients, ms", f"{statistics.median(worst):,.0f}", rounds=len(held))


async def _figures(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()


def _changes(figures: str) -> float:
    return _figure(figures, "rollout_serve_weight_changes")


def _figure(figures: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", figures, re.MULTILINE)
    return float(found[1]) if found else 0.0


def small_model(folder: Path, seed: int) -> Path:
    """A model of 3.3 million parameters with a chat template."""
    from examples.make_tiny import make_model

    make_model(folder, seed=seed)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def other_weights(model: Path, folder: Path) -> Path:
    """The same model with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and little work, to see that it runs")
    parser.add_argument("--model", type=Path, help="a folder, instead of the real model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--requests", type=int, default=64, help="of each round, at least one a client")
    parser.add_argument("--threads", type=int, default=1, help="of either engine")
    parser.add_argument("--change", action="store_true", help="measure changes of weights alone")
    asked = parser.parse_args()
    given = asked.model.resolve() if asked.model else None
    with own_place() as folder:
        if given is None:
            given = small_model(folder / "model", 1) if asked.quick else read_model(folder / "model")
        figures = Figures(f"rollout serve beside vllm serve, {machine()}")
        if asked.change:
            changes([given, other_weights(given, folder / "other")], folder, asked.threads, asked.rounds, figures)
            figures.show()
            return
        with ours(given, folder, asked.threads) as first, theirs(given, folder, asked.threads) as second:
            warm = Side()
            for each in (first, second):
                measure(each, warm, "warm", 8, 1, 8)
            for clients in CLIENTS:
                sides = {first: Side(), second: Side()}
                requests = max(1, (8 if asked.quick else asked.requests) // clients)
                for turn in range(asked.rounds):
                    for each in (first, second) if turn % 2 == 0 else (second, first):
                        measure(each, sides[each], f"{turn}", clients, requests, asked.tokens)
                add_rows(figures, clients, sides[first], sides[second])
        figures.show(f"answers of {asked.tokens} tokens, {asked.threads} threads an engine, {asked.rounds} rounds")


def add_rows(figures: Figures, clients: int, mine: Side, other: Side) -> None:
    """What both sides showed with so many clients."""
    who = "1 client" if clients == 1 else f"{clients} clients"
    figures.compare(f"{who}: tokens/s", mine.tokens_per_second, other.tokens_per_second, form="{:,.1f}")
    figures.compare(f"{who}: processor ms/token", mine.processor_ms, other.processor_ms, form="{:.2f}")
    figures.add(f"{who}: of that our front", f"{statistics.median(mine.front_ms):.3f}", rounds=len(mine.front_ms))
    for name, share in (("median", 0.5), ("99th percentile", 0.99)):
        first, second = percentile(mine.first_ms, share), percentile(other.first_ms, share)
        difference = f"{first - second:+.1f}"
        figures.add(f"{who}: ms to first token, {name} ({difference})", f"{first:,.1f}", f"{second:,.1f}")


if __name__ == "__main__":
    main()
