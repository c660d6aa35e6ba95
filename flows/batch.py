"""The batch inference flow: prompts in files, completions in a file, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import flow
from prefect.context import FlowRunContext

from flows.batch_progress import RunProgress, close_run
from flows.fan_out import FanOut
from flows.fleets import open_fleet
from flows.flow_run import recompute_missing
from rollout_core.base.ids import ContentId
from rollout_core.config import InferBatchConfig
from rollout_core.inference.engines import close_engine
from rollout_core.inference.folders import output_folder
from rollout_core.inference.prompt_shards import shards_of
from rollout_core.inference.runs import begin_run, parameters_of, resolve_run_id
from rollout_core.inference.tally import FailureLimit
from rollout_core.objects.records import Record, ShardCompletions
from rollout_core.objects.short_ids import with_whole_ids
from rollout_core.plans.batch_plan import plan_batch
from rollout_core.plans.plan import context_limit
from tasks.connections import current_connections, objects, working_folder
from tasks.imports import import_model
from tasks.journal import Journal
from tasks.logs import stage_logger
from tasks.output import write_completions
from tasks.shards import Reporting, help_shard, import_prompts, infer_shard
from tasks.stage import RunsTasks, Stage, Submitted

R = TypeVar("R", bound=Record)


@flow(name="batch-inference", flow_run_name="{config.model.uri}", persist_result=False)
def batch_inference(config: InferBatchConfig, run_id: str | None = None) -> dict[str, Any]:
    """Complete every prompt of the input and write the completions in input order; returns what was written.

    ``run_id`` names an earlier run to go on with; without it the output folder's own run is taken up.
    """
    config = with_whole_ids(config, working_folder(), objects)
    plan_batch(config, working_folder(), run_id, current_connections())
    folder = output_folder(config.output.dir, working_folder(), objects())
    asked, run_id = run_id, resolve_run_id(folder, run_id)

    def body(journal: Journal) -> dict[str, Any]:
        model = import_model(config.model)
        goes_on = begin_run(objects(), run_id, parameters_of(config, model.model), folder, asked)
        stage_logger().info("run %s %s", run_id, "goes on" if goes_on else "begins")
        prompts = import_prompts(config)
        shards = shards_of(objects(), prompts)
        records, figures = _complete(config, run_id, model.model, shards, prompts.num_rows * config.sampling.n)
        written = write_completions(records, config, run_id)
        return {**written.model_dump(mode="json"), "figures": figures}

    try:
        return recompute_missing(body, config)
    finally:
        close_engine()


def _complete(
    config: InferBatchConfig, run_id: str, model: ContentId, shards: list[tuple[ContentId, int]], num_samples: int
) -> tuple[list[ShardCompletions], dict[str, Any]]:
    """Records of all shards, and the figures of the closing table."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "called inside the flow"
    flow_run_id = str(context.flow_run.id)
    failures = FailureLimit(config.failures.max_share, num_samples)
    reporting = Reporting(run_id=run_id, events=config.output.events, failures=failures)
    labels = {shard: f"{number}/{len(shards)}" for number, (shard, _) in enumerate(shards, start=1)}

    def call(stage: Stage[..., R]) -> Callable[[RunsTasks, tuple[ContentId, int]], Submitted[R]]:
        def submit(runner: RunsTasks, item: tuple[ContentId, int]) -> Submitted[R]:
            shard, _ = item
            return stage.submit(
                runner,
                shard,
                model,
                config.sampling.params,
                config.backend,
                config.workers,
                samples_per_prompt=config.sampling.n,
                limit=context_limit(config.backend),
                reporting=reporting,
                label=labels[shard],
            )

        return submit

    def on_result(item: tuple[ContentId, int], record: ShardCompletions) -> None:
        progress.finish(item[0], record)
        progress.check(failures)

    bar = not config.output.events
    with (
        open_fleet(config.workers, flow_run_id) as fleet,
        RunProgress(flow_run_id, num_samples, bar=bar) as progress,
    ):
        work = FanOut(call(infer_shard), call(help_shard), lambda item: progress.of(item[0]), on_result)
        records = fleet.run_all(shards, work)
    return records, close_run(config, flow_run_id, records, fleet.average_workers())
