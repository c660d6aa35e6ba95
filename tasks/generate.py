"""The stages that generate: prompts, in their order, become samples and rollouts of the store, and this process's
engine completes them, at once or in parts."""

from __future__ import annotations

from typing import Literal

from rollout_core.base.ids import ContentId
from rollout_core.config import AnyBackend, SamplingParams
from rollout_core.data import curriculum, partial_rollouts
from rollout_core.data.curriculum import OpenPrompts, PromptOrder
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.examples import positions_between
from rollout_core.data.partial_rollouts import JoinedCompletions, decode_carried, unfinished
from rollout_core.data.samples import decode_samples, draw_again, file_samples, samples_of_model
from rollout_core.inference.batch import assist
from rollout_core.inference.training_samples import Failed, FailedSamples
from rollout_core.objects.records import Completions, PromptSet, Record, Scores
from rollout_core.store.types import RolloutMode
from tasks.runtime import artifacts, connections
from tasks.runtime.generation import Generation, enqueue, generate, model_for, model_here
from tasks.runtime.journal import stage_logger
from tasks.runtime.placement import shared_with
from tasks.runtime.stage import current_stage, stage


@stage(version=1, optional=("scores",))
def order_prompts(
    prompts: ContentId,
    model: ContentId,
    *,
    by: Literal["length", "key", "reward"],
    key: str | None = None,
    scores: Scores | None = None,
    label: str = "",
) -> PromptOrder:
    """Order prompts by length in the tokens of ``model``, by a key of theirs, or by ``scores`` of equally many
    completions of each, which stand in the order of the prompts. Raises ConfigError where a prompt has none."""
    objects, models, warn = current_stage().objects, connections.cache_folder(), stage_logger().warning
    found = curriculum.order_prompts(objects, prompts, model, by=by, key=key, scores=scores, models=models, warn=warn)
    ends = found.easiest, found.hardest
    stage_logger().info("%d prompts ordered by %s, from %.4g to %.4g", found.num_prompts, key or by, *ends)
    return found


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
    filed = file_samples(objects, samples, model)
    enqueue(samples, source=filed.samples, mode=mode)
    stage_logger().info("%d samples enqueued for model %s", len(samples), model.short)
    made_from = {"prompt file": prompts, "model": model}
    artifacts.origin("prompts", f"Prompts {label}".strip(), {"samples": filed.samples}, made_from)
    return filed


@stage(version=1, concurrency="engine", time="generating", place="generation")
def batch_inference(
    prompts: PromptSet,
    sampling: SamplingParams,
    backend: AnyBackend,
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
    prompts: PromptSet, sampling: SamplingParams, backend: AnyBackend, *, deterministic: bool = True, label: str = ""
) -> Help:
    """Complete samples of a set that its worker has not claimed yet; returns at once where there are none."""
    samples = decode_samples(current_stage().objects.get_bytes(prompts.samples))
    run = Generation(model_for(prompts.model, backend), backend, shared_with(), deterministic=deterministic)
    work = run.assist(assist, samples, sampling)
    stage_logger().info("%d samples generated for another worker", work.samples)
    return Help(num_samples=work.samples)


batch_inference.helped_by(help_inference)


@stage(version=1, optional=("fresh",))
def continue_samples(
    carried: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    *,
    fresh: PromptSet | None = None,
    label: str = "",
) -> PromptSet:
    """Samples of ``model`` that go on with the completions of ``carried``, enqueued, and behind them ``fresh`` ones."""
    objects = current_stage().objects
    waiting = unfinished(decode_carried(objects.get_bytes(carried)))
    others = [] if fresh is None else decode_samples(objects.get_bytes(fresh.samples))
    samples = [*(partial.next_part(model, sampling) for partial in waiting), *others]
    filed = file_samples(objects, samples, model)
    enqueue(samples[: len(waiting)], source=filed.samples, mode="train")
    stage_logger().info("%d completions go on with model %s, %d are new", len(waiting), model.short, len(others))
    return filed


@stage(version=1, optional=("carried",))
def join_completions(
    completions: Completions,
    sampling: SamplingParams,
    *,
    carried: ContentId | None,
    number: int,
    group_size: int,
    label: str = "",
) -> JoinedCompletions:
    """Add what iteration ``number`` drew to what was carried into it. Groups that are whole are learned from, the
    others are carried on. ``sampling`` is that of whole completions."""
    options = {"carried": carried, "number": number, "group_size": group_size, "models": connections.cache_folder()}
    joined, figures = partial_rollouts.join_completions(current_stage().objects, completions, sampling, **options)
    artifacts.figures("partial-rollouts", figures, label)
    stage_logger().info("%s: %s", label, ", ".join(f"{name} {value}" for name, value in figures.items()))
    return joined
