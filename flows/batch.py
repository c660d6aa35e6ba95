"""The batch inference flow: prompts in files, completions in a file in the same order; and what a person sees of it."""

from __future__ import annotations

import contextvars
import io
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rollout_core.base.ids import ContentId
from rollout_core.config import InferBatchConfig, WorkersConfig
from rollout_core.inference.batch import Progress as ShardProgress
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import output_folder
from rollout_core.inference.runs import (
    FailureLimit,
    RunWork,
    begin_run,
    forget_tally,
    forget_work,
    parameters_of,
    resolve_run_id,
    tally,
    work_of,
)
from rollout_core.inference.shards import shards_of
from rollout_core.objects.records import ShardCompletions
from rollout_core.plans.batch_plan import plan_batch
from rollout_core.plans.plan import context_limit
from tasks.batch import Reporting, ShardJob, help_shard, import_prompts, infer_shard, write_completions
from tasks.imports import import_model
from tasks.runtime import artifacts, connections
from tasks.runtime.artifacts import draw_histogram
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import current_dry_run, end_of_stages
from tasks.runtime.flow_run import pipeline, through_stderr
from tasks.runtime.journal import Journal, Outcome, Speed, stage_logger
from tasks.runtime.placement import FanOut, Fleet, local_fleet
from tasks.runtime.run_record import record_refusal
from tasks.runtime.stage import retry

REFRESH_SECONDS = 0.5
LOG_SECONDS = 30.0


@flow(name="batch-inference", flow_run_name="{config.model.uri}", persist_result=False, on_failure=[record_refusal])
def batch_inference(config: InferBatchConfig, run_id: str | None = None) -> dict[str, Any]:
    """Complete every prompt of the input and write the completions in input order; returns what was written.

    ``run_id`` names an earlier run to resume; without it the output folder's own run is resumed, if it has one.
    """
    body = _infer if current_dry_run() is None else _run_dry
    return pipeline(partial(plan_batch, run_id=run_id), closes=(close_engine,))(body)(config, run_id)


def _infer(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    folder = output_folder(config.output.dir, working_folder(), objects())
    run_id = retry(lambda: resolve_run_id(folder, requested))
    model = import_model(config.model)
    is_resumed = begin_run(objects(), run_id, parameters_of(config, model.model), folder, requested)
    stage_logger().info("run %s %s", run_id, "resumes" if is_resumed else "starts")
    prompts = import_prompts(config)
    shards = shards_of(objects(), prompts)
    records, figures, pictures = _complete(config, run_id, model.model, shards, prompts.num_rows * config.sampling.n)
    written = write_completions(records, config, run_id)
    facts = {"output": written.path, **{name: f"{value:,}" for name, value in figures.items()}}
    journal.outcome = Outcome(facts=facts, pictures=pictures)
    return {**written.model_dump(mode="json"), "figures": figures}


def _run_dry(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    """The stages of a run. Its output folder, where a run begins by writing, is left out."""
    model = import_model(config.model).model
    prompts = import_prompts(config)
    num_samples = prompts.num_rows * config.sampling.n
    for job in _jobs(config, "", model, shards_of(objects(), prompts), num_samples):
        infer_shard(job)
    end_of_stages()
    return {}


def _jobs(
    config: InferBatchConfig, run_id: str, model: ContentId, shards: list[tuple[ContentId, int]], num_samples: int
) -> list[ShardJob]:
    """What is asked of each shard."""
    failures = FailureLimit(config.failures.max_share, num_samples)
    reporting = Reporting(run_id=run_id, events=config.output.events, failures=failures)
    return [
        ShardJob(
            rows=shard,
            model=model,
            sampling=config.sampling.params,
            backend=config.backend,
            workers=config.shard_workers,
            samples_per_prompt=config.sampling.n,
            limit=context_limit(config.backend),
            reporting=reporting,
            label=f"{number}/{len(shards)}",
        )
        for number, (shard, _) in enumerate(shards, start=1)
    ]


def _complete(
    config: InferBatchConfig, run_id: str, model: ContentId, shards: list[tuple[ContentId, int]], num_samples: int
) -> tuple[list[ShardCompletions], dict[str, Any], dict[str, bytes]]:
    """Records of all shards, the figures of the closing table, and pictures for the run's summary."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "called inside the flow"
    flow_run_id = str(context.flow_run.id)
    failures = FailureLimit(config.failures.max_share, num_samples)
    jobs = _jobs(config, run_id, model, shards, num_samples)

    def on_result(job: ShardJob, record: ShardCompletions) -> None:
        progress.finish(job.rows, record)
        progress.check(failures)

    bar = not config.output.events
    with (
        open_fleet(config.shard_workers, flow_run_id) as fleet,
        RunProgress(flow_run_id, num_samples, bar=bar) as progress,
    ):
        work = FanOut(
            infer_shard.submit,
            help_shard.submit,
            progress=lambda job: progress.of(job.rows),
            name=lambda job: f"shard {job.label}",
            on_result=on_result,
        )
        records = fleet.run_all(jobs, work)
    objects = connections.objects()
    figures = closing_figures(config, records, work_of(objects, flow_run_id), fleet.average_workers())
    forget_work(objects, flow_run_id)
    return records, figures, picture_of_lengths(config, records)


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
        """How far a shard is; zeros before its worker reported."""
        return self._tally.of(shard)

    def _show(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self._bar)
        task = bar.add_task("completions", total=self._total, figures="")
        artifact = artifacts.Progress("inference-progress", "Batch inference")
        next_log = time.monotonic() + LOG_SECONDS
        with bar, through_stderr() if self._bar else nullcontext():
            while not self._stopped.wait(REFRESH_SECONDS):
                now = self._tally.total()
                self._speed.note(time.monotonic(), now.done - self._tally.earlier, now.tokens)
                bar.update(task, completed=now.done, figures=self._figures(now))
                artifact.show(now.done, self._total)
                if time.monotonic() > next_log and not self._bar:
                    next_log = time.monotonic() + LOG_SECONDS
                    stage_logger().info("%d of %d samples, %s", now.done, self._total, self._figures(now))
        artifact.end(self._tally.total().done, self._total)

    def _figures(self, now: ShardProgress) -> str:
        samples, _ = self._speed.per_second
        figures = [f"{now.failed:,} failed"] if now.failed else []
        figures.append(self._speed.figures)
        if samples:
            figures.append(f"{timedelta(seconds=round((self._total - now.done) / samples))} left")
        return ", ".join(figures)


def picture_of_lengths(config: InferBatchConfig, records: Sequence[ShardCompletions]) -> dict[str, bytes]:
    """A histogram of the completions' lengths, by its title."""
    lengths = [sum(counts) for counts in zip(*(record.lengths for record in records), strict=True)]
    if not any(lengths):
        return {}
    width = math.ceil(config.sampling.max_tokens / len(lengths))
    image, title = io.BytesIO(), "Completion lengths"
    draw_histogram(image, lengths, width=width, title=title, x_label="tokens", y_label="completions")
    return {title: image.getvalue()}


def closing_figures(
    config: InferBatchConfig, records: Sequence[ShardCompletions], work: RunWork, workers: float
) -> dict[str, Any]:
    """Figures of a finished run, by name. ``workers``: their average number over the run."""
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


@contextmanager
def open_fleet(workers: WorkersConfig, run_id: str) -> Iterator[Fleet]:
    """The configured workers, for the length of the block."""
    if workers.dask is None:
        with local_fleet(workers.count) as fleet:
            yield fleet
    else:
        # Dask need not be installed for workers of this machine.
        from tasks.runtime.dask.fleet import dask_fleet

        with dask_fleet(workers, workers.dask, run_id) as fleet:
            yield fleet
