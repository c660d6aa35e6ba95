"""Stages of batch inference: a prompt set cut into shards, each brought to its completions where there is an engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollout_core.base.errors import Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, InferBatchConfig, SamplingParams, Settings, WorkersConfig
from rollout_core.data.prompt_files import open_prompts
from rollout_core.inference.base import ModelRef
from rollout_core.inference.batch import BatchOptions, Progress, Work
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.events import EventLog
from rollout_core.inference.prompt_shards import forget_import, import_shards
from rollout_core.inference.shard_run import ShardWork, assist_shard, complete_shard
from rollout_core.inference.tally import FailureLimit, RunWork, note_work, tally
from rollout_core.inference.workers import this_worker
from rollout_core.models.facts import max_positions
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import PromptShards, Record, ShardCompletions
from tasks import connections
from tasks.generate import generator_id
from tasks.logs import stage_logger
from tasks.stage import current_stage, stage

T = TypeVar("T")


@stage(version=1, cached=False)
def import_prompts(config: InferBatchConfig) -> PromptShards:
    """Cut the input into shards in the object store; an input that was read before is not read again."""
    objects = current_stage().objects
    prompts = open_prompts(config.input, connections.working_folder(), objects)
    source = prompts.identity()
    record = import_shards(objects, prompts.rows(), shard_size=config.workers.shard_size, source=source)
    if prompts.identity() != source:
        if source is not None:
            forget_import(objects, source, config.workers.shard_size)
        raise Recoverable("the input changed while it was read; it is read again")
    stage_logger().info("%d prompts in shards of %d", record.num_rows, record.shard_size)
    return record


class Reporting(Settings):
    """What is told of a shard while it is worked on; no part of its cache key."""

    run_id: str
    events: bool
    failures: FailureLimit
    """Of all shards together; more end the run."""

    def cache_identity(self) -> Any:
        return None


@stage(version=1, concurrency="engine", optional=("limit",))
def infer_shard(
    rows: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    backend: BackendConfig,
    workers: WorkersConfig,
    *,
    samples_per_prompt: int = 1,
    limit: int | None = None,
    reporting: Reporting,
    label: str = "",
) -> ShardCompletions:
    """Bring every sample of a shard to its outcome, exactly once; an interrupted run goes on with what is missing.

    On a cluster other processes may take unclaimed samples meanwhile (`help_shard`). ``limit`` is the longest sequence,
    in tokens, where the backend has one of its own: it decides which samples fail.
    """
    run = _ShardRun(rows, model, sampling, backend, workers, samples_per_prompt, limit, reporting, label)
    record, work = run.complete()
    stage_logger().info("shard %s: %d samples, %d generated now", label or rows.short, record.num_samples, work.samples)
    return record


class Help(Record):
    """What an idle worker did for a busy one."""

    num_samples: int


@stage(version=1, cached=False, retries=0, concurrency="engine")
def help_shard(
    rows: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    backend: BackendConfig,
    workers: WorkersConfig,
    *,
    samples_per_prompt: int = 1,
    limit: int | None = None,
    reporting: Reporting,
    label: str = "",
) -> Help:
    """Generate samples of a shard that its worker has not claimed yet; returns at once where there are none."""
    run = _ShardRun(rows, model, sampling, backend, workers, samples_per_prompt, limit, reporting, label)
    work = run.help()
    stage_logger().info("shard %s: %d samples generated for its worker", label or rows.short, work.samples)
    return Help(num_samples=work.samples)


class _ShardRun:
    """A shard with this process's connections."""

    def __init__(
        self,
        rows: ContentId,
        model: ContentId,
        sampling: SamplingParams,
        backend: BackendConfig,
        workers: WorkersConfig,
        samples_per_prompt: int,
        limit: int | None,
        reporting: Reporting,
        label: str,
    ) -> None:
        self._objects: ObjectStore = current_stage().objects
        self._run_id = current_stage().run_id
        self._rows = rows
        folder = self._objects.local_tree(model, connections.cache_folder())
        self._work = ShardWork(rows, sampling, samples_per_prompt, folder)
        self._engine = EngineOf(backend, ModelRef(model, folder), stage_logger().info)
        self._backend = backend
        self._events = EventLog(reporting.run_id, label) if reporting.events else None
        self._failures = reporting.failures
        self._workers = workers
        self._limit = limit or max_positions(folder)

    def _options(self) -> BatchOptions:
        return BatchOptions(
            mode="test",
            # Whole shards, where that makes them repeatable; see `rollout_core.config.backends`.
            deterministic=self._backend.owns_batches,
            keep_done=True,
            # Otherwise the stage's lock, a file, does not keep all others out.
            exclusive=connections.storage_is_local() and self._workers.dask is None,
            claim_size=self._workers.claimed_together,
            stale_after_seconds=self._workers.stale_after_seconds,
            max_model_len=self._limit,
            generator=generator_id(self._backend),
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
        noted = tally(self._run_id)
        noted.note(self._rows, progress)
        self._failures.check(noted)

    def _note_help(self, progress: Progress) -> None:
        # What is done of the shard is its own worker's to tell.
        tally(self._run_id).note(f"{self._rows} {this_worker()}", Progress(0, 0, progress.tokens))

    def _file_work(self, started: float, work: Work) -> None:
        if work.samples:
            note_work(self._objects, self._run_id, self._rows, RunWork.of(work, started, time.time()))
