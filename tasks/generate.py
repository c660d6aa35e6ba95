"""The stages that generate: prompts become samples and rollouts of the store, which this process's engine completes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rollout_core.base.errors import CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.locks import exclusive
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, SamplingParams, identity
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.examples import positions_between
from rollout_core.data.samples import Sample, decode_samples, draw_again, encode_samples, ends_of, make_samples
from rollout_core.inference import engines
from rollout_core.inference.base import ModelRef
from rollout_core.inference.batch import BatchOptions, Progress, Work, assist
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.ledger import SampleLedger, this_worker
from rollout_core.inference.runs import tally
from rollout_core.inference.training_samples import Failed, FailedSamples, complete_batch
from rollout_core.models.facts import known_ids, max_positions
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, PromptSet, Record
from rollout_core.objects.retention.unstored import local_model
from rollout_core.store.types import RolloutMode
from tasks.curriculum import OpenPrompts
from tasks.runtime import artifacts, connections, events
from tasks.runtime.journal import Speed, stage_logger
from tasks.runtime.placement import RunsTasks, Submitted, shared_with
from tasks.runtime.stage import current_stage, stage


@stage(version=3, optional=("seed", "opened", "drawing"))
def enqueue_prompts(
    prompts: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    *,
    first: int = 0,
    count: int | None = None,
    samples_per_prompt: int = 1,
    seed: int | None = None,
    max_model_len: int | None = None,
    mode: RolloutMode = "train",
    opened: OpenPrompts | None = None,
    drawing: str | None = None,
    label: str = "",
) -> PromptSet:
    """Turn prompt rows into samples of a model and enqueue them in the store.

    ``first`` and ``count`` choose rows, going around the end of the file; with a ``seed`` each time around is in an
    order of its own, which follows from it. With ``opened`` they are drawn from what is open then. Enqueueing a sample
    twice is one rollout. With a ``drawing`` they have ids of their own under that name, so that they are generated
    whether or not the store has completions of them.
    """
    objects = current_stage().objects
    rows = parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow)
    last = len(rows) if count is None else first + count
    order = _order(last, len(rows), seed) if opened is None else opened.positions(objects, last, seed=seed or 0)
    folder = local_model(objects, model, connections.cache_folder())
    limit = max_model_len or max_positions(folder)
    tokenizer = load_tokenizer(folder)
    drawn = [rows[position] for position in order[first:]]
    samples = make_samples(
        tokenizer,
        drawn,
        model=model,
        params=sampling,
        samples_per_prompt=samples_per_prompt,
        max_model_len=limit,
        earlier=[rows[position] for position in order[:first]],
        known_ids=known_ids(folder, tokenizer),
        ends=ends_of(folder, tokenizer, drawn, sampling),
    )
    if drawing is not None:
        samples = draw_again(samples, drawing)
    blob = objects.put_bytes(encode_samples(samples))
    enqueue(samples, source=blob, mode=mode)
    stage_logger().info("%d samples enqueued for model %s", len(samples), model.short)
    artifacts.origin("prompts", f"Prompts {label}".strip(), {"samples": blob}, {"prompt file": prompts, "model": model})
    return PromptSet(
        samples=blob,
        model=model,
        num_samples=len(samples),
        num_prompt_tokens=sum(len(sample.prompt_token_ids) for sample in samples),
    )


def enqueue(samples: Sequence[Sample], *, source: ContentId, mode: RolloutMode) -> None:
    """Make samples of the running stage, which blob ``source`` holds, known as rollouts of the store."""
    objects = current_stage().objects

    async def add() -> None:
        async with connections.open_store() as store:
            ledger = SampleLedger(store, objects, worker_id="enqueue", stale_after_seconds=0.0)
            await ledger.enqueue(samples, mode=mode, source=source)

    run_async(add())


def _order(count: int, num_rows: int, seed: int | None) -> list[int]:
    """Positions of the first ``count`` rows of all times around."""
    if seed is None:
        return [position % num_rows for position in range(count)]
    return positions_between(0, count, num_items=num_rows, seed=seed)


@stage(version=1, concurrency="engine", time="generating", place="generation")
def batch_inference(
    prompts: PromptSet,
    sampling: SamplingParams,
    backend: BackendConfig,
    *,
    mode: RolloutMode = "train",
    deterministic: bool = True,
    failed: Failed = "stop",
    group_size: int = 1,
    label: str = "",
) -> Completions:
    """Complete every sample of a prompt set exactly once; an interrupted run resumes with what is missing.

    Where one fails for good, the stage does, or with ``failed = "leave_out"`` leaves its group out and counts it.
    """
    completions, seconds, work = generate(
        current_stage().objects,
        prompts,
        sampling,
        backend,
        mode=mode,
        deterministic=deterministic,
        failed=FailedSamples(failed, group_size),
    )
    if completions.num_left_out:
        reason = "they failed, or their group did"
        stage_logger().warning("%d samples are left out: %s", completions.num_left_out, reason)
        skipped = events.SamplesSkipped(stage=current_stage().name, samples=completions.num_left_out, reason=reason)
        events.emit(skipped)
    rows = {
        "samples": completions.num_samples,
        "left out": completions.num_left_out,
        "tokens": completions.num_tokens,
        "generated now (tokens)": work.tokens,
        "engine ready after (s)": round(work.waited_seconds, 2),
        "seconds": round(seconds, 2),
        "tokens/s": round(work.tokens / seconds) if seconds else 0,
        **{f"finish: {reason}": count for reason, count in completions.finish_reasons.items()},
    }
    artifacts.table("inference", [{"figure": key, "value": value} for key, value in rows.items()], f"Inference {label}")
    return completions


def load_ahead(model: ContentId) -> None:
    """Have this process's engine, where there is an idle one, take the weights of a model that will draw the next
    samples, while these are made ready."""
    try:
        # Not in the thread: the stage that makes the samples would read and hash the weights at the same time.
        folder = local_model(connections.objects(), model, connections.cache_folder())
    except (NotFound, Recoverable):  # the stage that needs it says so
        return
    except CorruptObject as error:  # set aside by now, so that stage finds it missing
        stage_logger().warning("%s", error)
        return
    engines.load_ahead(ModelRef(model, folder))


def generator_id(backend: BackendConfig) -> str:
    """What answers besides the model: software, dtype and device, as far as they decide what is generated."""
    return content_id("generator/1", identity(backend)).short


class Help(Record):
    """What an idle worker did for a busy one."""

    num_samples: int


@stage(version=1, cached=False, retries=0, concurrency="engine", time="generating")
def help_inference(
    prompts: PromptSet, sampling: SamplingParams, backend: BackendConfig, *, deterministic: bool = True, label: str = ""
) -> Help:
    """Complete samples of a set that its worker has not claimed yet; returns at once where there are none."""
    objects, run = current_stage().objects, _Generation(prompts, sampling, backend)
    samples = decode_samples(objects.get_bytes(prompts.samples))

    async def help_out() -> Work:
        async with connections.open_store() as store:
            return await assist(
                store,
                objects,
                run.engine,
                samples,
                sampling,
                worker_id=this_worker(),
                options=run.options("train", deterministic=deterministic),
                on_progress=run.note,
            )

    work = run_async(help_out())
    run.count.end(work.samples, work.tokens)
    stage_logger().info("%d samples generated for another worker", work.samples)
    return Help(num_samples=work.samples)


@batch_inference.helped_by
def start_help(runner: RunsTasks, inputs: dict[str, Any], key: ContentId) -> Submitted[Help]:
    """Help with a call whose samples are completed, also that of an evaluation."""
    return help_inference.submit(
        runner,
        inputs["prompts"],
        inputs["sampling"],
        inputs["backend"],
        deterministic=inputs.get("deterministic", True),
        label=inputs["label"],
    )


class _Generation:
    """A prompt set with this process's engine."""

    def __init__(self, prompts: PromptSet, sampling: SamplingParams, backend: BackendConfig) -> None:
        model = ModelRef(prompts.model, local_model(current_stage().objects, prompts.model, connections.cache_folder()))
        self.engine = EngineOf(backend, model, stage_logger().info)
        self.count = events.SampleCount(current_stage().name)
        self.is_exclusive = connections.storage_is_local() and shared_with() is None
        """Whether the lock of the set, a file, keeps all others out."""
        self._generator = generator_id(backend)

    def options(self, mode: RolloutMode, *, deterministic: bool) -> BatchOptions:
        options = BatchOptions(
            mode=mode, deterministic=deterministic, exclusive=self.is_exclusive, generator=self._generator
        )
        workers = shared_with()
        if workers is None:
            return options
        return replace(options, claim_size=workers.claimed_together, stale_after_seconds=workers.stale_after_seconds)

    def note(self, progress: Progress) -> None:
        self.count.note(progress.samples, progress.tokens, running=progress.running, waiting=progress.waiting)


def generate(
    objects: ObjectStore,
    prompts: PromptSet,
    sampling: SamplingParams,
    backend: BackendConfig,
    *,
    mode: RolloutMode,
    deterministic: bool,
    failed: FailedSamples | None = None,
) -> tuple[Completions, float, Work]:
    """Completions of ``prompts``, the seconds it took once the engine was ready, and what was done now."""
    run = _Generation(prompts, sampling, backend)

    def on_progress(progress: Progress) -> None:
        speed.note(time.monotonic(), progress.samples, progress.tokens)
        bar.show(progress.done, progress.total, speed.figures)
        run.note(progress)
        if shared_with() is not None:  # the fleet asks how much is left to help with
            tally(current_stage().run_id).note(prompts.samples, progress)

    async def complete() -> tuple[Completions, Work]:
        async with connections.open_store() as store:
            return await complete_batch(
                store,
                objects,
                run.engine,
                prompts.samples,
                sampling,
                failed=failed or FailedSamples(),
                worker_id=this_worker(),
                options=run.options(mode, deterministic=deterministic),
                on_progress=on_progress,
            )

    speed = Speed()
    # Other settings of the same samples are another stage with another key, which may run at the same time.
    lock = connections.lock_folder() / f"samples-{prompts.samples}.lock"
    alone = exclusive(lock) if run.is_exclusive else nullcontext()
    with alone, artifacts.ProgressBar("inference-progress", "Batch inference") as bar:
        started = time.monotonic()
        completions, work = run_async(complete())
        seconds = time.monotonic() - started - work.waited_seconds
    run.count.end(work.samples, work.tokens)
    stage_logger().info(
        "%d samples complete, %d tokens generated now in %.1f s", completions.num_samples, work.tokens, seconds
    )
    return completions, seconds, work
