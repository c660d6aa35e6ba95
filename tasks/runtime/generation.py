"""How a stage completes samples: with this process's engine, in the run's store, alone or with workers that help."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.base.errors import CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.locks import exclusive
from rollout_core.base.stopping import run_async
from rollout_core.config import (
    AnyBackend,
    BackendConfig,
    EndpointModel,
    OpenAIBackend,
    SamplingParams,
    WorkersConfig,
)
from rollout_core.data.samples import Sample
from rollout_core.inference import engines
from rollout_core.inference.backend import ModelRef, generator_id
from rollout_core.inference.batch import BatchOptions, Progress, Work
from rollout_core.inference.batch_runs import EventLog, FailureLimit, Reporting, forget_tally, tally
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.ledger import SampleLedger, this_worker
from rollout_core.inference.shards import ShardWork
from rollout_core.inference.spending import Account
from rollout_core.inference.training_samples import FailedSamples, complete_batch
from rollout_core.models.facts import max_positions
from rollout_core.objects.records import Completions, PromptSet, ShardCompletions
from rollout_core.objects.retention.unstored import local_model
from rollout_core.store.types import RolloutMode
from tasks.runtime import artifacts, connections, events
from tasks.runtime.arguments import Arguments
from tasks.runtime.endpoint_costs import generated_so_far
from tasks.runtime.journal import Journal, Speed, current_journal, stage_logger
from tasks.runtime.placement import shared_with
from tasks.runtime.stage import current_stage

T = TypeVar("T")

REFRESH_SECONDS = 0.5


def model_here(model: ContentId) -> ModelRef:
    """A model in a folder of this machine. Raises NotFound where it is not stored."""
    return ModelRef(model, local_model(connections.objects(), model, connections.cache_folder()))


def model_for(model: ContentId, backend: AnyBackend) -> ModelRef:
    """A model that a backend answers with; of one at an endpoint there is no folder."""
    return ModelRef(model, Path()) if isinstance(backend, EndpointModel) else model_here(model)


def account_of(backend: OpenAIBackend | EndpointModel) -> Account:
    """In what answers of an endpoint are counted in the running stage."""
    spending = generated_so_far(current_journal() or Journal(), backend, connections.objects())
    return Account(backend, backend.budget, spending)


class Generation:
    """A model on a backend, for samples of the running stage.

    ``workers``: how the samples are shared with workers of a cluster, if they are. ``options``: of `BatchOptions`.
    """

    def __init__(self, model: ModelRef, backend: AnyBackend, workers: WorkersConfig | None, **options: Any) -> None:
        self._engine = EngineOf(backend, model, stage_logger().info)
        self._count = events.SampleCount(current_stage().name)
        self.is_exclusive = connections.storage_is_local() and (workers is None or workers.dask is None)
        """Whether the lock of the samples, a file, keeps all others out."""
        if workers is not None:
            options["claim_size"] = workers.claimed_together
            options["stale_after_seconds"] = workers.stale_after_seconds
        if isinstance(backend, OpenAIBackend | EndpointModel):
            options["account"] = account_of(backend)
            if backend.budget is not None:
                options["commit_size"] = 1  # it is paid for, so it is kept at once
        self._options = BatchOptions(exclusive=self.is_exclusive, generator=generator_id(backend), **options)

    def complete(
        self,
        job: Callable[..., Awaitable[tuple[T, Work]]],
        *inputs: Any,
        note: Callable[[Progress], None],
        **more: Any,
    ) -> tuple[T, Work]:
        """What ``job`` comes to, which completes samples, such as `complete_batch`; ``note`` hears how far it is."""
        record, work = self._run(job, inputs, note, more)
        self._count.end(work.samples, work.tokens)
        return record, work

    def assist(
        self,
        job: Callable[..., Awaitable[Work]],
        *inputs: Any,
        note: Callable[[Progress], None] = lambda progress: None,
        **more: Any,
    ) -> Work:
        """The same for a ``job`` that takes work off another worker's hands, such as `batch.assist`."""
        work = self._run(job, inputs, note, more)
        self._count.end(work.samples, work.tokens)
        return work

    def _run(
        self,
        job: Callable[..., Awaitable[T]],
        inputs: tuple[Any, ...],
        note: Callable[[Progress], None],
        more: dict[str, Any],
    ) -> T:
        def on_progress(progress: Progress) -> None:
            running, waiting = progress.running, progress.waiting
            self._count.note(progress.samples, progress.tokens, running=running, waiting=waiting)
            note(progress)

        async def run() -> T:
            common = {"worker_id": this_worker(), "options": self._options, "on_progress": on_progress}
            async with connections.open_store() as store:
                return await job(store, current_stage().objects, self._engine, *inputs, **common, **more)

        return run_async(run())


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

    def prepare(self) -> tuple[Generation, ShardWork, EventLog | None]:
        """What completes the shard in the running stage, what is to be done, and where each sample's end is written."""
        model = model_here(self.model)
        limit = self.limit or max_positions(model.folder)
        # Whole shards, where that makes them repeatable; see `rollout_core.config.inference`.
        options = {
            "mode": "test",
            "deterministic": self.backend.owns_batches,
            "keep_done": True,
            "max_model_len": limit,
        }
        work = ShardWork(self.rows, self.sampling, self.samples_per_prompt, model.folder)
        events = EventLog(self.reporting.run_id, self.label) if self.reporting.events else None
        return Generation(model, self.backend, self.workers, **options), work, events


def generate(
    prompts: PromptSet,
    sampling: SamplingParams,
    backend: AnyBackend,
    *,
    mode: RolloutMode,
    deterministic: bool,
    failed: FailedSamples | None = None,
) -> tuple[Completions, float, Work]:
    """Completions of ``prompts``, the seconds it took once the engine was ready, and what was done now."""
    workers = shared_with()
    run = Generation(model_for(prompts.model, backend), backend, workers, mode=mode, deterministic=deterministic)
    speed, reason = Speed(), "they failed, or their group did"

    def note(progress: Progress) -> None:
        nonlocal reason
        reason = f"one failed: {progress.first_failure}" if progress.first_failure else reason
        speed.note(time.monotonic(), progress.samples, progress.tokens)
        bar.show(progress.done, progress.total, speed.figures)
        if workers is not None:  # the fleet asks how much is left to help with
            tally(current_stage().run_id).note(prompts.samples, progress)

    # Other settings of the same samples are another stage with another key, which may run at the same time.
    lock = connections.lock_folder() / f"samples-{prompts.samples}.lock"
    alone = exclusive(lock) if run.is_exclusive else nullcontext()
    with alone, artifacts.ProgressBar("inference-progress", "Batch inference") as bar:
        started = time.monotonic()
        completions, work = run.complete(complete_batch, prompts.samples, sampling, note=note, failed=failed)
        seconds = time.monotonic() - started - work.waited_seconds
    stage_logger().info(
        "%d samples complete, %d tokens generated now in %.1f s", completions.num_samples, work.tokens, seconds
    )
    if completions.num_left_out:
        stage_logger().warning("%d samples are left out: %s", completions.num_left_out, reason)
        skipped = events.SamplesSkipped(stage=current_stage().name, samples=completions.num_left_out, reason=reason)
        events.emit(skipped)
    return completions, seconds, work


def generate_on_demand(
    job: Callable[..., Awaitable[tuple[T, Work]]],
    *inputs: Any,
    model: ContentId,
    backend: AnyBackend,
    mode: RolloutMode = "test",
    what: str = "Answers",
    at_least: int = 0,
    counted: str = "",
    **more: Any,
) -> T:
    """What ``job`` comes to, which asks ``model`` for samples as it goes. Its progress is of ``what``, which are
    ``at_least`` so many; ``counted`` says how many of something else."""
    run = Generation(model_for(model, backend), backend, None, mode=mode, deterministic=False)
    # Another stage that asks the same would have to wait for its samples anyway.
    lock = connections.lock_folder() / f"on-demand-{content_id('on-demand/1', [model, current_stage().name])}.lock"
    alone = exclusive(lock) if run.is_exclusive else nullcontext()
    with alone, artifacts.ProgressBar("inference-progress", what) as bar:

        def note(progress: Progress) -> None:
            bar.show(progress.done, max(progress.total, at_least), counted)

        found, work = run.complete(job, *inputs, note=note, **more)
    stage_logger().info("%d answers generated now, %d tokens", work.samples, work.tokens)
    return found


def enqueue(samples: Sequence[Sample], *, source: ContentId, mode: RolloutMode) -> None:
    """Make samples of the running stage, which blob ``source`` holds, known as rollouts of the store."""

    async def add() -> None:
        async with connections.open_store() as store:
            ledger = SampleLedger(store, current_stage().objects, worker_id="enqueue", stale_after_seconds=0.0)
            await ledger.enqueue(samples, mode=mode, source=source)

    run_async(add())


def load_ahead(model: ContentId) -> None:
    """Have this process's engine, where there is an idle one, take the weights of a model that will draw the next
    samples, while these are made ready."""
    try:
        # Not in the thread: the stage that makes the samples would read and hash the weights at the same time.
        found = model_here(model)
    except (NotFound, Recoverable):  # the stage that needs it says so
        return
    except CorruptObject as error:  # set aside by now, so that stage finds it missing
        stage_logger().warning("%s", error)
        return
    engines.load_ahead(found)


class ShardsProgress:
    """Shows how far a run's shards are, on whichever workers, until the block ends."""

    def __init__(self, run_id: str, total: int, *, draws_bar: bool) -> None:
        self._run_id, self._total, self._draws_bar = run_id, total, draws_bar
        self._tally = tally(run_id)
        self._stopped = threading.Event()
        # In the flow run's context, to which artifacts and log lines belong.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._show), name="rollout-progress", daemon=True)

    def __enter__(self) -> ShardsProgress:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        forget_tally(self._run_id)

    def of(self, shard: ContentId) -> Progress:
        """How far a shard is; zeros before its worker reported."""
        return self._tally.of(shard)

    def finish(self, shard: ContentId, record: ShardCompletions, failures: FailureLimit) -> None:
        """A shard's result is there, computed or cached. Raises Fatal where more samples have failed than may."""
        tokens, count = self._tally.of(shard).tokens, record.num_samples
        self._tally.note(shard, Progress(count, count, tokens, record.num_failed, record.first_failure))
        failures.check(self._tally)

    def _show(self) -> None:
        speed = Speed()
        with artifacts.ProgressBar("inference-progress", "Batch inference", draws_bar=self._draws_bar) as bar:
            while not self._stopped.wait(REFRESH_SECONDS):
                now = self._tally.total()
                speed.note(time.monotonic(), now.done - self._tally.earlier, now.tokens)
                failed = f"{now.failed:,} failed, " if now.failed else ""
                bar.show(now.done, self._total, failed + speed.figures)
            bar.end(self._tally.total().done, self._total)
