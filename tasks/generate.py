"""The stage that generates: samples through this process's engine, committed as they finish."""

from __future__ import annotations

import time
from contextlib import nullcontext

from rollout_core.base.ids import content_id
from rollout_core.base.locks import exclusive
from rollout_core.base.stopping import run_async
from rollout_core.config import BackendConfig, SamplingParams, identity
from rollout_core.inference.base import ModelRef
from rollout_core.inference.batch import BatchOptions, Work
from rollout_core.inference.engines import EngineOf
from rollout_core.inference.training_completions import Failed, FailedSamples, complete_batch
from rollout_core.inference.workers import this_worker
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, PromptSet
from rollout_core.store.types import RolloutMode
from tasks import artifacts, connections
from tasks.logs import stage_logger
from tasks.stage import current_stage, stage


@stage(version=1, concurrency="engine")
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
    """Complete every sample of a prompt set exactly once; an interrupted run goes on with what is missing.

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
        stage_logger().warning("%d samples are left out: they failed, or their group did", completions.num_left_out)
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


def generator_id(backend: BackendConfig) -> str:
    """What answers beside the model: software, dtype and device, as far as they decide what is generated."""
    return content_id("generator/1", identity(backend)).short


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
    model = ModelRef(prompts.model, objects.local_tree(prompts.model, connections.cache_folder()))
    local = connections.storage_is_local()

    async def complete() -> tuple[Completions, Work]:
        async with connections.open_store() as store:
            return await complete_batch(
                store,
                objects,
                EngineOf(backend, model, stage_logger().info),
                prompts.samples,
                sampling,
                failed=failed or FailedSamples(),
                worker_id=this_worker(),
                options=BatchOptions(
                    mode=mode, deterministic=deterministic, exclusive=local, generator=generator_id(backend)
                ),
                on_progress=lambda progress: bar.show(progress.done, progress.total),
            )

    # Other settings of the same samples are another stage with another key, which may run at the same time.
    alone = exclusive(connections.lock_folder() / f"samples-{prompts.samples}.lock") if local else nullcontext()
    with alone, artifacts.ProgressBar("inference-progress", "Batch inference") as bar:
        started = time.monotonic()
        completions, work = run_async(complete())
        seconds = time.monotonic() - started - work.waited_seconds
    stage_logger().info(
        "%d samples complete, %d tokens generated now in %.1f s", completions.num_samples, work.tokens, seconds
    )
    return completions, seconds, work
