"""The stages that generate: prompts become samples and rollouts of the store, which this process's engine completes."""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, SamplingParams
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.examples import positions_between
from rollout_core.data.samples import decode_samples, draw_again, encode_samples, samples_of_model
from rollout_core.inference.batch import assist
from rollout_core.inference.training_samples import Failed, FailedSamples
from rollout_core.objects.records import Completions, PromptSet, Record
from rollout_core.store.types import RolloutMode
from tasks.curriculum import OpenPrompts
from tasks.runtime import artifacts
from tasks.runtime.generation import Generation, enqueue, generate, model_here
from tasks.runtime.journal import stage_logger
from tasks.runtime.placement import shared_with
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
    if opened is None:
        order = positions_between(0, last, num_items=len(rows), seed=seed)
    else:
        order = opened.positions(objects, last, seed=seed or 0)
    samples = samples_of_model(
        model_here(model).folder,
        [rows[position] for position in order],
        first,
        model=model,
        params=sampling,
        samples_per_prompt=samples_per_prompt,
        max_model_len=max_model_len,
    )
    samples = samples if drawing is None else draw_again(samples, drawing)
    blob = objects.put_bytes(encode_samples(samples))
    enqueue(samples, source=blob, mode=mode)
    stage_logger().info("%d samples enqueued for model %s", len(samples), model.short)
    artifacts.origin("prompts", f"Prompts {label}".strip(), {"samples": blob}, {"prompt file": prompts, "model": model})
    num_tokens = sum(len(sample.prompt_token_ids) for sample in samples)
    return PromptSet(samples=blob, model=model, num_samples=len(samples), num_prompt_tokens=num_tokens)


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
    allowed = FailedSamples(failed, group_size)
    completions, seconds, work = generate(
        prompts, sampling, backend, mode=mode, deterministic=deterministic, failed=allowed
    )
    figures = {
        "samples": completions.num_samples,
        "left out": completions.num_left_out,
        "tokens": completions.num_tokens,
        "generated now (tokens)": work.tokens,
        "engine ready after (s)": round(work.waited_seconds, 2),
        "seconds": round(seconds, 2),
        "tokens/s": round(work.tokens / seconds) if seconds else 0,
        **{f"finish: {reason}": count for reason, count in completions.finish_reasons.items()},
    }
    artifacts.figures("inference", figures, f"Inference {label}")
    return completions


class Help(Record):
    """What an idle worker did for a busy one."""

    num_samples: int


@stage(version=1, cached=False, retries=0, concurrency="engine", time="generating")
def help_inference(
    prompts: PromptSet, sampling: SamplingParams, backend: BackendConfig, *, deterministic: bool = True, label: str = ""
) -> Help:
    """Complete samples of a set that its worker has not claimed yet; returns at once where there are none."""
    samples = decode_samples(current_stage().objects.get_bytes(prompts.samples))
    run = Generation(model_here(prompts.model), backend, shared_with(), deterministic=deterministic)
    work = run.assist(assist, samples, sampling)
    stage_logger().info("%d samples generated for another worker", work.samples)
    return Help(num_samples=work.samples)


batch_inference.helped_by(help_inference)
