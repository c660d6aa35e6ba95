"""A prompt set of a million rows: its first run by the scripted backend, and a second over samples that are all done.

Each run is the command as a user types it, `rollout infer batch`, as a process of its own against a Prefect server that
runs already: reading and cutting the input, the ledger in SQLite, the objects in a folder, the output file. Seconds are
those of the whole process; the peak is its own resident memory.

Run: python benchmarks/million.py [--quick] [--rows 1000000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from harness import PROJECT, Figures, own_place, own_server

CONFIG = """
[model]
uri = "model"
[sampling]
max_tokens = 16
[input]
glob = "prompts.jsonl"
[output]
dir = "completions"
[backend]
kind = "scripted"
text = "yes"
"""


def make_inputs(folder: Path, rows: int) -> None:
    """A model with its tokenizer, and ``rows`` different short prompts."""
    from examples.make_tiny import make_model

    make_model(folder / "model")
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"prompt": f"sort {number} =", "id": f"row-{number}"}) + "\n" for number in range(rows)
        )
    (folder / "batch.toml").write_text(CONFIG, encoding="utf-8")


def run(address: str) -> tuple[float, float]:
    """Seconds and peak MiB of one `rollout infer batch`. Raises RuntimeError when it does not end well."""
    command = [Path(sys.executable).with_name("rollout"), "infer", "batch", "--config", "batch.toml"]
    environment = os.environ | {"PREFECT_API_URL": address, "PYTHONPATH": str(PROJECT)}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            try:
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                return
            time.sleep(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"rollout infer batch ended with {process.returncode}: {said[-3000:]}")
    return time.perf_counter() - started, peak / 2**20


def check_output(path: Path, rows: int) -> None:
    """Raises RuntimeError unless every row is there once, in order."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if json.loads(line)["id"] != f"row-{number}":
                raise RuntimeError(f"{path}:{number + 1} is not the row of that place")
    if number + 1 != rows:
        raise RuntimeError(f"{path} has {number + 1} rows, expected {rows}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 rows, to see that it runs")
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    rows = 20_000 if arguments.quick else arguments.rows
    figures = Figures(f"Batch inference of {rows:,} prompts by the scripted backend: SQLite, local objects")
    with own_place() as folder, own_server(folder) as address:
        make_inputs(folder, rows)
        for what in ("first run", "second run, all done"):
            seconds, peak = run(address)
            check_output(folder / "completions" / "completions.jsonl", rows)
            figures.add(f"{what}, seconds", f"{seconds:,.1f} s")
            figures.add(f"{what}, samples/s", f"{rows / seconds:,.0f}")
            figures.add(f"{what}, peak memory", f"{peak:,.0f} MiB")
        database = sum(file.stat().st_size for file in folder.glob("rollout.db*"))
        figures.add("database", f"{database / 2**20:,.0f} MiB")
    figures.show()


if __name__ == "__main__":
    main()
