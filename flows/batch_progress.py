"""What a person sees of a batch: a bar and an artifact while it runs, a table and a histogram at its end."""

from __future__ import annotations

import contextvars
import io
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flows.log_lines import through_stderr
from rollout_core.base.ids import ContentId
from rollout_core.base.plots import draw_histogram
from rollout_core.config import InferBatchConfig
from rollout_core.inference.batch import Progress as ShardProgress
from rollout_core.inference.tally import FailureLimit, RunWork, forget_tally, forget_work, tally, work_of
from rollout_core.objects.records import ShardCompletions
from tasks import artifacts, connections
from tasks.logs import stage_logger

REFRESH_SECONDS = 0.5
LOG_SECONDS = 30.0
SPEED_SECONDS = 30.0


class RunProgress:
    """Shows how far a run is until the block ends: a bar in a terminal, log lines elsewhere, an artifact in the UI."""

    def __init__(self, run_id: str, total: int, *, bar: bool = True) -> None:
        self._run_id = run_id
        self._total = total
        self._bar = bar and sys.stderr.isatty()
        self._tally = tally(run_id)
        self._speed = Speed()
        self._stopped = threading.Event()
        # In the flow run's context, to which artifacts and log lines belong.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._show), name="rollout-progress", daemon=True)

    def __enter__(self) -> RunProgress:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        forget_tally(self._run_id)

    def check(self, failures: FailureLimit) -> None:
        """Raises Fatal where more samples have failed than may."""
        failures.check(self._tally)

    def finish(self, shard: ContentId, record: ShardCompletions) -> None:
        """A shard's result is there, computed or cached."""
        tokens, count = self._tally.of(shard).tokens, record.num_samples
        self._tally.note(shard, ShardProgress(count, count, tokens, record.num_failed, record.first_failure))

    def of(self, shard: ContentId) -> ShardProgress:
        """How far a shard is; zeros before its worker told."""
        return self._tally.of(shard)

    def _show(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self._bar)
        task = bar.add_task("completions", total=self._total, told="")
        artifact = artifacts.ProgressArtifact("inference-progress", "Batch inference")
        next_log = time.monotonic() + LOG_SECONDS
        with bar, through_stderr() if self._bar else nullcontext():
            while not self._stopped.wait(REFRESH_SECONDS):
                now = self._tally.total()
                self._speed.note(time.monotonic(), now.done - self._tally.earlier, now.tokens)
                bar.update(task, completed=now.done, told=self._told(now))
                artifact.show(now.done, self._total)
                if time.monotonic() > next_log and not self._bar:
                    next_log = time.monotonic() + LOG_SECONDS
                    stage_logger().info("%d of %d samples, %s", now.done, self._total, self._told(now))
        artifact.end(self._tally.total().done, self._total)

    def _told(self, now: ShardProgress) -> str:
        samples, tokens = self._speed.per_second
        told = [f"{now.failed:,} failed"] if now.failed else []
        told += [f"{samples:,.0f} samples/s", f"{tokens:,.0f} tokens/s"]
        if samples:
            told.append(f"{timedelta(seconds=round((self._total - now.done) / samples))} left")
        return ", ".join(told)


class Speed:
    """What was generated of late: in the last half minute, beginning with the first sample."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int, int]] = deque()

    def note(self, seconds: float, samples: int, tokens: int) -> None:
        """So many were generated up to a moment of a monotonic clock."""
        if samples == 0 and self._noted:
            self._noted.clear()
        self._noted.append((seconds, samples, tokens))
        while len(self._noted) > 2 and seconds - self._noted[1][0] > SPEED_SECONDS:
            self._noted.popleft()

    @property
    def per_second(self) -> tuple[float, float]:
        """Samples and tokens a second; zeros where nothing is known yet."""
        if len(self._noted) < 2:
            return 0.0, 0.0
        (begun, samples, tokens), (now, more_samples, more_tokens) = self._noted[0], self._noted[-1]
        return (more_samples - samples) / (now - begun), (more_tokens - tokens) / (now - begun)


def close_run(
    config: InferBatchConfig, run_id: str, records: Sequence[ShardCompletions], workers: float
) -> dict[str, Any]:
    """File the table and the histogram of a finished run, and return the table's figures.

    ``workers``: how many there were, on the average.
    """
    objects = connections.objects()
    figures = closing_figures(config, records, work_of(objects, run_id), workers)
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    artifacts.table("batch-inference", rows, "Batch inference")
    lengths = [sum(counts) for counts in zip(*(record.lengths for record in records), strict=True)]
    if any(lengths):
        width = math.ceil(config.sampling.max_tokens / len(lengths))
        image = io.BytesIO()
        draw_histogram(image, lengths, width=width, title="Completion lengths", x_label="tokens", y_label="completions")
        artifacts.image("completion-lengths", image.getvalue(), "Completion lengths")
    forget_work(objects, run_id)
    return figures


def closing_figures(
    config: InferBatchConfig, records: Sequence[ShardCompletions], work: RunWork, workers: float
) -> dict[str, Any]:
    """What a finished run tells, by name."""
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
        "seconds, without the engine's start": round(work.seconds, 2),
    }
    if work.seconds:
        figures["samples/s"] = round(work.samples / work.seconds, 1)
        figures["tokens/s"] = round(work.tokens / work.seconds, 1)
        for share in (0.5, 0.9, 0.99):
            figures[f"latency, {share:.0%} of samples (s)"] = float(f"{work.latency(share):.3g}")
    if config.workers.price_per_hour is not None and work.tokens:
        cost = config.workers.price_per_hour * workers * work.seconds / 3600
        figures["cost per million tokens"] = round(1e6 * cost / work.tokens, 4)
    return figures
