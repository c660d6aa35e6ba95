"""Fan-out over Dask: one worker against two, on an engine that takes a fixed time a sample.

The scripted backend sleeps for each sample while a GPU would work, so the figures show what coordination costs and not
how many cores there are. Each side has a running scheduler and warm workers of its own (processes of this machine),
the Prefect server, storage and database are shared; a run is the whole `batch-inference` flow, from prompts in a file
to ``completions.jsonl``. Sides alternate, and each round has a new sampling seed, so nothing of it is cached.

Run: python benchmarks/fan_out.py [--quick]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import PROJECT, Figures, own_place, own_server, quick_asked
from inference import make_inputs

DELAY_SECONDS = 0.01


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_prompts: int
    shard_size: int
    rounds: int


@contextmanager
def cluster(folder: Path, num_workers: int) -> Iterator[str]:
    """Address of a scheduler with its workers, each a process, for the length of the block."""
    from rollout_core.base.errors import ConfigError
    from rollout_core.config import DaskConfig
    from rollout_core.plans.cluster import check_cluster
    from tasks.runtime.prefect_server import _free_port

    address = f"tcp://127.0.0.1:{_free_port()}"
    place = folder / f"dask-{num_workers}"
    place.mkdir()
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-dashboard"]
    worker = ["worker", address, "--nthreads", "2", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
    commands = [scheduler, *([*worker, "--local-directory", str(place / str(n))] for n in range(num_workers))]
    with (place / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "dask", *command], stdout=log, stderr=log, cwd=folder, env=environment()
            )
            for command in commands
        ]
        try:
            for _ in range(60):
                try:
                    if f" {num_workers} workers" in check_cluster(DaskConfig(address=address)):
                        break
                except ConfigError:
                    pass
                time.sleep(1)
            else:
                raise RuntimeError(f"no {num_workers} workers within a minute; see {place / 'log'}")
            yield address
        finally:
            for process in processes:
                process.kill()
                process.wait()


def environment() -> dict[str, str]:
    """Of the workers: this process's, and where the project is."""
    return {**os.environ, "PYTHONPATH": str(PROJECT)}


def run_flow(address: str, size: Size, seed: int) -> float:
    """Seconds of a whole run."""
    from flows.batch import batch_inference
    from rollout_core.config import (
        BatchSampling,
        DaskConfig,
        InferBatchConfig,
        InputGlob,
        ModelSource,
        OutputDir,
        ScriptedBackend,
        WorkersConfig,
    )

    config = InferBatchConfig(
        model=ModelSource(uri="model"),
        sampling=BatchSampling(max_tokens=32, seed=seed),
        input=InputGlob(glob="prompts.jsonl"),
        output=OutputDir(dir=f"completions-{seed}"),
        workers=WorkersConfig(shard_size=size.shard_size, claim_size=32, dask=DaskConfig(address=address)),
        backend=ScriptedBackend(delay_seconds=DELAY_SECONDS),
    )
    started = time.perf_counter()
    batch_inference(config)
    return time.perf_counter() - started


def measure(folder: Path, size: Size) -> Figures:
    """All rounds."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        addresses = {count: stack.enter_context(cluster(folder, count)) for count in seconds}
        # The first round imports what the workers need; it does not count.
        for number in range(size.rounds + 1):
            for count in sorted(seconds, reverse=number % 2 == 1):
                taken = run_flow(addresses[count], size, seed=2 * number + count)
                if number:
                    seconds[count].append(taken)
    samples = f"{size.num_prompts} samples of {1000 * DELAY_SECONDS:.0f} ms"
    figures = Figures(f"Fan-out over Dask: {samples}, two workers (ours) over one (baseline)")
    rates = {count: [size.num_prompts / taken for taken in values] for count, values in seconds.items()}
    figures.compare("whole flow, samples/s", rates[2], rates[1])
    ideal = [1 / DELAY_SECONDS] * size.rounds
    figures.compare("one worker / its engine alone, samples/s", rates[1], ideal)
    figures.compare("two workers / their engines alone, samples/s", rates[2], [2 * rate for rate in ideal])
    return figures


def main() -> None:
    size = Size(1_000, 100, 1) if quick_asked(__doc__) else Size(10_000, 500, 2)
    with own_place() as folder, own_server(folder):
        make_inputs(folder, size.num_prompts)
        figures = measure(folder, size)
    figures.show()


if __name__ == "__main__":
    main()
