"""What a person sees of a batch: a bar and an artifact while it runs, a table and a histogram at its end."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollout_core.config import InferBatchConfig
from rollout_core.ids import ContentId
from rollout_core.inference.batch import Progress as ShardProgress
from rollout_core.inference.tally import RunWork, forget_tally, forget_work, tally, work_of
from rollout_core.records import ShardCompletions
from rollout_core.telemetry import draw_histogram
from tasks import artifacts, places
from tasks.stage import stage_logger

REFRESH_SECONDS = 0.5
LOG_SECONDS = 30.0


class RunProgress:
    """Shows how far a run is until the block ends."""

    def __init__(self, run_id: str, total: int) -> None:
        self._run_id = run_id
        self._total = total
        self._tally = tally(run_id)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, name="rollout-progress", daemon=True)
        self._began = time.monotonic()

    def __enter__(self) -> RunProgress:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        forget_tally(self._run_id)

    @property
    def failed(self) -> int:
        """Samples that failed so far."""
        return self._tally.total().failed

    def finish(self, shard: ContentId, record: ShardCompletions) -> None:
        """A shard's result is there, computed or cached."""
        tokens = self._tally.of(shard).tokens
        self._tally.note(shard, ShardProgress(record.num_samples, record.num_samples, tokens, record.num_failed))

    def of(self, shard: ContentId) -> ShardProgress:
        """How far a shard is; zeros before its worker told."""
        return self._tally.of(shard)

    def _show(self) -> None:
        columns = (
            TextColumn("batch inference"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        task = bar.add_task("", total=self._total, rates="")
        artifact = artifacts.ProgressArtifact("inference-progress", "Batch inference")
        next_log = time.monotonic() + LOG_SECONDS
        with bar:
            while not self._stopped.wait(REFRESH_SECONDS):
                now = self._tally.total()
                bar.update(task, completed=now.done, rates=self._rates(now))
                artifact.show(now.done, self._total)
                if time.monotonic() > next_log and not sys.stderr.isatty():
                    next_log = time.monotonic() + LOG_SECONDS
                    stage_logger().info("%d of %d samples, %s", now.done, self._total, self._rates(now))

    def _rates(self, now: ShardProgress) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        failed = f"{now.failed} failed, " if now.failed else ""
        return f"{failed}{now.done / seconds:,.0f} samples/s, {now.tokens / seconds:,.0f} tokens/s"


def close_run(config: InferBatchConfig, run_id: str, records: Sequence[ShardCompletions], workers: float) -> None:
    """File the table and the histogram of a finished run. ``workers``: how many there were, on the average."""
    objects = places.objects()
    work = work_of(objects, run_id)
    artifacts.table("batch-inference", closing_table(config, records, work, workers), "Batch inference")
    lengths = [sum(counts) for counts in zip(*(record.lengths for record in records), strict=True)]
    if any(lengths):
        width = math.ceil(config.sampling.max_tokens / len(lengths))
        image = io.BytesIO()
        draw_histogram(image, lengths, width=width, title="Completion lengths", x_label="tokens", y_label="completions")
        artifacts.image("completion-lengths", image.getvalue(), "Completion lengths")
    forget_work(objects, run_id)


def closing_table(
    config: InferBatchConfig, records: Sequence[ShardCompletions], work: RunWork, workers: float
) -> list[dict[str, Any]]:
    """Rows of figure and value."""
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record.finish_reasons)
    figures: dict[str, Any] = {
        "samples": sum(record.num_samples for record in records),
        "failed": sum(record.num_failed for record in records),
        "prompt tokens": sum(record.num_prompt_tokens for record in records),
        "completion tokens": sum(record.num_tokens for record in records),
        **{f"finish: {reason}": count for reason, count in sorted(reasons.items())},
        "generated now": work.samples,
        "generated now, tokens": work.tokens,
        "seconds": round(work.seconds, 2),
    }
    if work.seconds:
        figures["samples/s"] = round(work.samples / work.seconds, 1)
        figures["tokens/s"] = round(work.tokens / work.seconds, 1)
        for share in (0.5, 0.9, 0.99):
            figures[f"latency, {share:.0%} of samples (s)"] = float(f"{work.latency(share):.3g}")
    if config.workers.price_per_hour is not None and work.tokens:
        cost = config.workers.price_per_hour * workers * work.seconds / 3600
        figures["cost per million tokens"] = round(1e6 * cost / work.tokens, 4)
    return [{"figure": name, "value": value} for name, value in figures.items()]
