"""Batch inference: prompts in files; completions, or episodes of an environment, in a file in the same order."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.playing import Environment
from rollout_core.base.ids import ContentId
from rollout_core.config import InferBatchConfig, OpenAIBackend
from rollout_core.inference.batch_runs import (
    FailureLimit,
    Reporting,
    begin_run,
    closing_figures,
    forget_work,
    parameters_of,
    resolve_run_id,
    work_of,
)
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import output_folder
from rollout_core.inference.shards import shards_of
from rollout_core.objects.records import PromptShards, ShardCompletions
from rollout_core.plans.batch_plan import plan_batch
from rollout_core.plans.plan import context_limit
from tasks.batch import help_shard, import_prompts, infer_shard, write_completions
from tasks.environments import write_episodes
from tasks.imports import import_model
from tasks.runtime.artifacts import draw_histogram
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dask.placed_stages import open_fleet
from tasks.runtime.dry_run import current_dry_run, end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.generation import ShardJob, ShardsProgress
from tasks.runtime.journal import Journal, Outcome, stage_logger
from tasks.runtime.placement import FanOut
from tasks.runtime.run_record import record_refusal
from tasks.runtime.stage import retry


@flow(name="batch-inference", flow_run_name="{config.model.uri}", persist_result=False, on_failure=[record_refusal])
def batch_inference(config: InferBatchConfig, run_id: str | None = None) -> dict[str, Any]:
    """Complete every prompt of the input, or play the episodes that its rows begin, and write what came of it in input
    order; returns what was written.

    ``run_id`` names an earlier run to resume; without it the output folder's own run is resumed, if it has one.
    """
    body = _complete_all if config.environment is None else _play
    return pipeline(partial(plan_batch, run_id=run_id), closes=(close_engine,))(body)(config, run_id)


def _begun(config: InferBatchConfig, model: ContentId, requested: str | None) -> str:
    """The id of the run, which is noted before its first sample."""
    folder = output_folder(config.output.dir, working_folder(), objects())
    run_id = retry(lambda: resolve_run_id(folder, requested))
    is_resumed = begin_run(objects(), run_id, parameters_of(config, model), folder, requested)
    stage_logger().info("run %s %s", run_id, "resumes" if is_resumed else "starts")
    return run_id


def _play(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    """Episodes in place of completions."""
    assert config.environment is not None and not isinstance(config.backend, OpenAIBackend), "as the settings ask for"
    model = import_model(config.model).model
    run_id = "" if current_dry_run() is not None else _begun(config, model, requested)
    environment = Environment.of(config.environment, config.backend, seed=0)
    rows, sampling = environment.rows(config.input.as_dataset()), config.sampling
    options = {"mode": "test", "episodes_per_row": sampling.n, "label": "episodes"}
    episodes, played = environment.play(model, rows, sampling.params, **options)
    end_of_stages()
    written = write_episodes(episodes, played, config, run_id)
    figures = {
        "rows": episodes.num_tasks,
        "episodes": written.num_rows,
        "failed": written.num_failed,
        "mean reward": round(played.mean_reward, 4),
        "turns and calls of tools (spans)": played.num_spans,
    }
    facts = {"output": written.path, **{name: f"{value:,}" for name, value in figures.items()}}
    journal.outcome = Outcome(facts=facts)
    return {**written.model_dump(mode="json"), "figures": figures, "what": "episodes"}


def _infer(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    model = import_model(config.model).model
    run_id = _begun(config, model, requested)
    prompts = import_prompts(config)
    records, figures = _complete(config, _jobs(config, run_id, model, prompts), _limit(config, prompts))
    written = write_completions(records, config, run_id)
    facts = {"output": written.path, **{name: f"{value:,}" for name, value in figures.items()}}
    journal.outcome = Outcome(facts=facts, pictures=_picture_of_lengths(config, records))
    return {**written.model_dump(mode="json"), "figures": figures}


def _complete_all(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    body = _infer if current_dry_run() is None else _run_dry
    return body(config, journal, requested)


def _run_dry(config: InferBatchConfig, journal: Journal, requested: str | None) -> dict[str, Any]:
    """The stages of a run. Its output folder, where a run begins by writing, is left out."""
    for job in _jobs(config, "", import_model(config.model).model, import_prompts(config)):
        infer_shard(job)
    end_of_stages()
    return {}


def _jobs(config: InferBatchConfig, run_id: str, model: ContentId, prompts: PromptShards) -> list[ShardJob]:
    """What is asked of each shard."""
    reporting = Reporting(run_id=run_id, events=config.output.events, failures=_limit(config, prompts))
    shards = shards_of(objects(), prompts)
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


def _limit(config: InferBatchConfig, prompts: PromptShards) -> FailureLimit:
    return FailureLimit(config.failures.max_share, prompts.num_rows * config.sampling.n)


def _complete(
    config: InferBatchConfig, jobs: Sequence[ShardJob], failures: FailureLimit
) -> tuple[list[ShardCompletions], dict[str, Any]]:
    """Records of all shards, and the figures of the closing table."""
    run_id = str(flow_run.id)
    with (
        # A run with a budget that is started again has one shard at most of which it does not yet know what it took.
        open_fleet(config.shard_workers, run_id, in_turn=config.has_budget) as fleet,
        ShardsProgress(run_id, failures.num_samples, draws_bar=not config.output.events) as progress,
    ):
        work = FanOut(
            infer_shard.submit,
            help_shard.submit,
            progress=lambda job: progress.of(job.rows),
            name=lambda job: f"shard {job.label}",
            on_result=lambda job, record: progress.finish(job.rows, record, failures),
        )
        records = fleet.run_all(jobs, work)
    figures = closing_figures(config, records, work_of(objects(), run_id), fleet.average_workers())
    forget_work(objects(), run_id)
    return records, figures


def _picture_of_lengths(config: InferBatchConfig, records: Sequence[ShardCompletions]) -> dict[str, bytes]:
    """A histogram of the completions' lengths, by its title."""
    lengths = [sum(counts) for counts in zip(*(record.lengths for record in records), strict=True)]
    if not any(lengths):
        return {}
    width = math.ceil(config.sampling.max_tokens / len(lengths))
    image, title = io.BytesIO(), "Completion lengths"
    draw_histogram(image, lengths, width=width, title=title, x_label="tokens", y_label="completions")
    return {title: image.getvalue()}
