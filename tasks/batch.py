"""Stages of batch inference: a prompt set cut into shards, each brought to its completions, and the output written."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, InferBatchConfig, SamplingParams, Settings, WorkersConfig
from rollout_core.data.dataset_sources import open_prompts
from rollout_core.data.samples import decode_completions_blob
from rollout_core.inference.base import ModelRef
from rollout_core.inference.batch import BatchOptions, Progress, Work
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.folders import output_folder
from rollout_core.inference.ledger import this_worker
from rollout_core.inference.output import file_name, output_chunks, output_id, shard_rows, write_known
from rollout_core.inference.runs import EventLog, FailureLimit, RunWork, note_work, tally
from rollout_core.inference.shards import (
    ShardWork,
    assist_shard,
    complete_shard,
    finished_ref,
    forget_import,
    import_shards,
    record_shards,
)
from rollout_core.models.facts import max_positions
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import PromptShards, Record, ShardCompletions
from rollout_core.objects.retention.unstored import local_model
from tasks.generate import Help, generator_id
from tasks.runtime import artifacts, connections, events
from tasks.runtime.arguments import Arguments
from tasks.runtime.artifacts import import_progress
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage

T = TypeVar("T")


@stage(version=1, cached=False, imports=True, time="importing")
def import_prompts(config: InferBatchConfig) -> PromptShards:
    """Cut the input into shards in the object store; an input that was read before is not read again."""
    objects = current_stage().objects
    prompts = open_prompts(config.input, connections.working_folder(), objects)
    with import_progress(f"Prompts of {config.input.glob} are looked at"):
        source = prompts.identity()
    with import_progress(f"Prompts of {config.input.glob}"):
        record = import_shards(objects, prompts.rows(), shard_size=config.workers.shard_size, source=source)
    if prompts.identity() != source:
        if source is not None:
            forget_import(objects, source, config.workers.shard_size)
        raise Recoverable("the input changed while it was read; it is read again")
    for remark in prompts.remarks():
        stage_logger().info("prompts of %s: %s", config.input.glob, remark)
    record_shards(objects, record, prompts.source())
    stage_logger().info("%d prompts in shards of %d", record.num_rows, record.shard_size)
    return record


class Reporting(Settings):
    """What is reported of a shard while it is worked on; no part of its cache key."""

    run_id: str
    events: bool
    failures: FailureLimit
    """Of all shards together; more end the run."""

    def cache_identity(self) -> Any:
        return None


@dataclass(frozen=True)
class ShardJob(Arguments):
    """What is asked of a shard. Each field counts as an argument of the stages that take it."""

    rows: ContentId
    model: ContentId
    sampling: SamplingParams
    backend: BackendConfig
    workers: WorkersConfig
    samples_per_prompt: int
    limit: int | None
    """Longest sequence, in tokens, where the backend has a limit of its own: it decides which samples fail."""
    reporting: Reporting
    label: str
    """Its number among the run's shards, such as ``3/17``."""


@stage(version=3, concurrency="engine", optional=("limit",), time="generating")
def infer_shard(job: ShardJob) -> ShardCompletions:
    """Bring every sample of a shard to its outcome, exactly once; an interrupted run resumes with what is missing.

    On a cluster other processes may take unclaimed samples meanwhile (`help_shard`).
    """
    record, work = _ShardRun(job).complete()
    stage_logger().info("shard %s: %d samples, %d generated now", job.label, record.num_samples, work.samples)
    return record


@stage(version=1, cached=False, retries=0, concurrency="engine", time="generating")
def help_shard(job: ShardJob) -> Help:
    """Generate samples of a shard that its worker has not claimed yet; returns at once where there are none."""
    work = _ShardRun(job).help()
    stage_logger().info("shard %s: %d samples generated for its worker", job.label, work.samples)
    return Help(num_samples=work.samples)


class _ShardRun:
    """A shard with this process's connections."""

    def __init__(self, job: ShardJob) -> None:
        self._job = job
        self._objects: ObjectStore = current_stage().objects
        self._run_id = current_stage().run_id
        folder = local_model(self._objects, job.model, connections.cache_folder())
        self._work = ShardWork(job.rows, job.sampling, job.samples_per_prompt, folder)
        self._engine = EngineOf(job.backend, ModelRef(job.model, folder), stage_logger().info)
        self._events = EventLog(job.reporting.run_id, job.label) if job.reporting.events else None
        self._count = events.SampleCount(current_stage().name)
        self._max_model_len = job.limit or max_positions(folder)

    def _options(self) -> BatchOptions:
        return BatchOptions(
            mode="test",
            # Whole shards, where that makes them repeatable; see `rollout_core.config.inference`.
            deterministic=self._job.backend.owns_batches,
            keep_done=True,
            # Otherwise the stage's lock, a file, does not keep all others out.
            exclusive=connections.storage_is_local() and self._job.workers.dask is None,
            claim_size=self._job.workers.claimed_together,
            stale_after_seconds=self._job.workers.stale_after_seconds,
            max_model_len=self._max_model_len,
            generator=generator_id(self._job.backend),
        )

    def complete(self) -> tuple[ShardCompletions, Work]:
        started = time.time()
        record, work = self._run(complete_shard, self._note)
        self._file_work(started, work)
        return record, work

    def help(self) -> Work:
        started = time.time()
        work = self._run(assist_shard, self._note_help)
        self._file_work(started, work)
        return work

    def _run(self, job: Callable[..., Awaitable[T]], on_progress: Callable[[Progress], None]) -> T:
        """`complete_shard` or `assist_shard` with what both are given."""

        async def run() -> T:
            async with connections.open_store() as store:
                return await job(
                    store,
                    self._objects,
                    self._engine,
                    self._work,
                    worker_id=this_worker(),
                    options=self._options(),
                    on_progress=on_progress,
                    events=self._events,
                )

        return run_async(run())

    def _note(self, progress: Progress) -> None:
        self._count.note(progress.samples, progress.tokens, running=progress.running, waiting=progress.waiting)
        noted = tally(self._run_id)
        noted.note(self._job.rows, progress)
        self._job.reporting.failures.check(noted)

    def _note_help(self, progress: Progress) -> None:
        self._count.note(progress.samples, progress.tokens, running=progress.running, waiting=progress.waiting)
        # What is done of the shard is its own worker's to tell.
        tally(self._run_id).note(f"{self._job.rows} {this_worker()}", Progress(0, 0, progress.tokens))

    def _file_work(self, started: float, work: Work) -> None:
        self._count.end(work.samples, work.tokens)
        if work.samples:
            note_work(self._objects, self._run_id, self._job.rows, RunWork.of(work, started, time.time()))


class OutputFile(Record):
    """What was written where."""

    path: str
    num_rows: int
    num_failed: int
    run_id: str


@stage(version=2, cached=False)
def write_completions(shards: list[ShardCompletions], config: InferBatchConfig, run_id: str) -> OutputFile:
    """Write the completions of all shards in input order, unless they are there; the file is replaced at once."""
    storage = current_stage().objects
    folder = output_folder(config.output.dir, connections.working_folder(), storage)
    name = file_name(config.output)

    def chunks() -> Iterator[bytes]:
        parts = ((shard, _ended(storage, shard)) for shard in shards)
        rows = (row for shard, ended in parts for row in shard_rows(storage, shard, config, ended))
        return output_chunks(config, rows)

    write_known(storage, folder, name, output_id(config, shards), chunks)
    count = sum(shard.num_samples for shard in shards)
    path = folder.where(name)
    stage_logger().info("%d completions in %s", count, path)
    tokens = sum(shard.num_tokens for shard in shards)
    failed = sum(shard.num_failed for shard in shards)
    row = {"file": path, "rows": count, "failed": failed, "tokens": tokens}
    artifacts.table("output", [row], "Completions written")
    return OutputFile(path=path, num_rows=count, num_failed=failed, run_id=run_id)


def _ended(storage: ObjectStore, shard: ShardCompletions) -> list[float]:
    """When each of a shard's samples was finished: from the note next to it, or else from the store."""
    noted = storage.cached_bytes(finished_ref(shard.completions))
    if noted is not None:
        return orjson.loads(noted)
    ids = [row.id for row in decode_completions_blob(storage.get_bytes(shard.completions))]
    times = run_async(_end_times(ids))
    return [times.get(sample_id, 0.0) for sample_id in ids]


async def _end_times(sample_ids: list[ContentId]) -> dict[str, float]:
    times: dict[str, float] = {}
    async with connections.open_store() as store:
        for start in range(0, len(sample_ids), 5_000):
            for rollout in await store.query_rollouts(rollout_id_in=sample_ids[start : start + 5_000]):
                if rollout.end_time is not None:
                    times[rollout.rollout_id] = rollout.end_time
    return times
