"""How long the pages of `rollout ui` take over many runs, rollouts and samples; `--runs N` and `--rollouts N` say how
many.

Runs are records of 300 calls of stages and 500 steps. Rollouts are in SQLite, the last twentieth of them with an
attempt and a reward. One run is a batch of as many samples, in shards of 2,000. Each page is asked for over HTTP from a
real server, once to warm it and then several times; a row is the median, and the first answer beside it. Paint is the
time to the first contentful paint in Chromium, the median too, where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from rollout_core.agents.emitters import reward_attributes
from rollout_core.base.ids import content_id
from rollout_core.data.samples import Completion, encode_completion
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import MetricsOf, Moment, RunDetail, RunHead, RunRecords, StageCall
from rollout_core.store import Span, SqlLightningStore
from rollout_core.store.semconv import AGL_ANNOTATION
from rollout_core.store.types import AttemptUpdate, EnqueueRolloutRequest

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ROUNDS = 5
CALLS, STEPS = 300, 500
AT_ONCE = 10_000
WITH_REWARD = 20
"""One of so many rollouts, the last ones, has an attempt with a reward."""
SHARD = 2_000
BATCH = "ba7c4000-0000"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
WORDS = "the digits of number %d in their order, as far as they go"


def fill_runs(objects: ObjectStore, count: int) -> None:
    """Records that differ, each with the figures of one update."""
    records = RunRecords(objects)
    calls = tuple(
        StageCall(stage=f"stage_{n % 9}", label=f"iteration {n}", state="Completed", ended=1e9 + n, seconds=0.7)
        for n in range(CALLS)
    )
    for run in range(count):
        rows = (json.dumps({"step": step, "loss": run / step, "kl": step / 99}) for step in range(1, STEPS + 1))
        metrics = objects.put_bytes("\n".join(rows).encode())
        began = BEGAN + timedelta(hours=run)
        head = RunHead(
            id=f"{run:08x}-0000",
            name=f"night-{run % 7}",
            flow="nightly",
            state="completed",
            began=began,
            written=began,
            held_out=(Moment(name="before", reward=0.1), Moment(name="after", reward=run / count)),
            metrics=(MetricsOf(stage="ppo_update", label="", metrics=metrics),),
        )
        records.write(head, RunDetail(config={"seed": run, "ppo": {"lr": run}}, calls=calls))


async def fill_rollouts(database: str, count: int) -> None:
    """Rollouts, each with a prompt; of the last ones some have succeeded, with a reward."""
    async with SqlLightningStore.from_url(database) as store:
        for start in range(0, count, AT_ONCE):
            numbers = range(start, min(count, start + AT_ONCE))
            requests = [EnqueueRolloutRequest(input={"prompt": f"sort {n}"}) for n in numbers]
            if start < count - count // WITH_REWARD:
                await store.enqueue_many_rollouts(requests)
                continue
            begun = [each for each in await store.start_many_rollouts(requests) if each is not None]
            spans = [
                Span.from_attributes(
                    rollout_id=each.rollout_id,
                    attempt_id=each.attempt.attempt_id,
                    sequence_id=1,
                    name=AGL_ANNOTATION,
                    attributes=reward_attributes(n % 100 / 100),
                )
                for n, each in enumerate(begun)
            ]
            await store.add_many_spans(spans)
            await store.update_many_attempts(
                [
                    AttemptUpdate(rollout_id=each.rollout_id, attempt_id=each.attempt.attempt_id, status="succeeded")
                    for each in begun
                ]
            )


def fill_batch(objects: ObjectStore, count: int) -> None:
    """The record of a batch, whose completions have some words each."""
    calls, model = [], content_id("m", [])
    for start in range(0, count, SHARD):
        numbers = range(start, min(count, start + SHARD))
        rows = b"".join(orjson.dumps({"prompt": f"sort {n} {n * 7919 % 1000} ="}) + b"\n" for n in numbers)
        lines = [
            encode_completion(Completion(content_id("s", [n]), [n % 500] * 24, [-0.125] * 24, WORDS % n, "stop"))
            for n in numbers
        ]
        result = {
            "rows": objects.put_bytes(rows),
            "completions": objects.put_bytes(b"".join(lines)),
            "num_samples": len(numbers),
            "model": model,
        }
        plain = StageCall(stage="infer_shard", label=f"shard {start}", state="Completed", ended=1e9, seconds=1.0)
        calls.append(plain.model_copy(update={"kind": "ShardCompletions", "result": result}))
    head = RunHead(id=BATCH, name="million", flow="batch-inference", state="completed", began=BEGAN, written=BEGAN)
    RunRecords(objects).write(head, RunDetail(config={}, calls=tuple(calls)))


def timed(address: str) -> tuple[float, int]:
    """Milliseconds and bytes of an answer."""
    began = time.perf_counter()
    with urllib.request.urlopen(address, timeout=120) as answer:
        size = len(answer.read())
    return 1000 * (time.perf_counter() - began), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        objects, database = ObjectStore.from_url(f"{folder}/objects"), f"sqlite:///{folder}/rollout.db"
        fill_runs(objects, options.runs)
        asyncio.run(fill_rollouts(database, options.rollouts))
        fill_batch(objects, options.rollouts)
        settings = {
            "ROLLOUT_STORAGE": objects.url,
            "ROLLOUT_DATABASE": database,
            "PREFECT_API_URL": "http://127.0.0.1:9",
        }
        command = [sys.executable, "-c", "from deployments.cli import app; app()", "ui", "--port", "0"]
        log = Path(folder) / "log"
        with log.open("w") as output:
            server = subprocess.Popen(command, stdout=output, env={**os.environ, **settings})
        try:
            while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
                if server.poll() is not None:
                    raise SystemExit("rollout ui has ended before it served")
                time.sleep(0.1)
            show(found[1], options.runs, options.rollouts)
        finally:
            server.terminate()
            server.wait()


def pages_of(address: str, runs: int, rollouts: int) -> dict[str, str]:
    """Pages, then filters, by what they are."""
    last, before = f"{runs - 1:08x}-0000", f"{runs - 2:08x}-0000"
    with urllib.request.urlopen(f"{address}/rollouts", timeout=120) as answer:
        older = re.search(rb'href="([^"]+)" rel="next"', answer.read())
    assert older is not None
    samples = f"/runs/{BATCH}/samples"
    return {
        "runs": "/",
        "a run": f"/runs/{last}",
        "its curves": f"/runs/{last}/curves.json",
        "five runs laid over each other": f"/runs/{last}?" + "&".join(f"with={runs - n:08x}-0000" for n in range(2, 6)),
        "two runs compared": f"/compare?run={last}&run={before}",
        "samples": samples,
        "samples, in the middle": f"{samples}?from={rollouts // 2}",
        "a sample": f"{samples}/{rollouts - 1}",
        "rollouts": "/rollouts",
        "rollouts, older": "/rollouts" + html.unescape(older[1].decode()),
        "queue": "/queue",
        "models": "/models",
        "filter: runs by text": "/?q=night-3",
        "filter: runs by state and flow": "/?state=completed&flow=nightly",
        "sort: runs by gain": "/?sort=gain",
        "filter: rollouts by status": "/rollouts?status=succeeded",
        "filter: rollouts by a text, found": f"/rollouts?q=sort+{rollouts - 7}",
        "filter: rollouts by a text, nowhere": "/rollouts?q=nowhere",
        "filter: rollouts by reward, found": "/rollouts?below=0.5",
        "filter: rollouts by reward, nowhere": "/rollouts?below=-1",
        "filter: rollouts of a run": f"/rollouts?run={BATCH}",
        "filter: samples by a text, found": f"{samples}?q=number+1+",
        "filter: samples by a text, nowhere": f"{samples}?q=nowhere",
        "filter: samples by end": f"{samples}?end=length",
    }


def show(address: str, runs: int, rollouts: int) -> None:
    """The table."""
    pages = pages_of(address, runs, rollouts)
    table = Table(title=f"{runs:,} runs, {rollouts:,} rollouts and samples; median of {ROUNDS}")
    for column in ("page", "first, ms", "ms", "paint, ms", "KB"):
        table.add_column(column, justify="left" if column == "page" else "right")
    rows = {}
    for name, path in pages.items():
        first, size = timed(address + path)
        rows[name] = (first, statistics.median(timed(address + path)[0] for _ in range(ROUNDS)), size)
    paints = painted(address, pages)
    for name, (first, again, size) in rows.items():
        table.add_row(name, f"{first:.0f}", f"{again:.0f}", f"{paints.get(name, math.nan):.0f}", f"{size / 1000:.0f}")
    Console(width=110).print(table)


def painted(address: str, pages: dict[str, str]) -> dict[str, float]:
    """Milliseconds to the first contentful paint in Chromium; nothing without one."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        return {}
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        for name, path in pages.items():
            if path.endswith(".json"):
                continue
            times = []
            for _ in range(ROUNDS):
                page.goto(address + path)
                # The pages' policy lets nobody evaluate texts, as waiting for a function would.
                while (paint := page.evaluate(PAINT)) is None:
                    page.wait_for_timeout(10)
                times.append(paint)
            found[name] = statistics.median(times)
    return found


if __name__ == "__main__":
    main()
