"""Stages of batch inference: a prompt set cut into shards, each brought to its completions, and the output written."""

from __future__ import annotations

import time

from rollout_core.base.errors import Recoverable
from rollout_core.config import InferBatchConfig
from rollout_core.data.dataset_sources import open_prompts
from rollout_core.inference.batch_runs import ShardReport
from rollout_core.inference.folders import output_folder
from rollout_core.inference.output import OutputFile, write_shards
from rollout_core.inference.shards import assist_shard, complete_shard, forget_import, import_shards, record_shards
from rollout_core.objects.records import PromptShards, ShardCompletions
from tasks.generate import Help
from tasks.runtime import artifacts, connections
from tasks.runtime.artifacts import import_progress
from tasks.runtime.generation import ShardJob
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, stage


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


@stage(version=3, concurrency="engine", optional=("limit",), time="generating")
def infer_shard(job: ShardJob) -> ShardCompletions:
    """Bring every sample of a shard to its outcome, exactly once; an interrupted run resumes with what is missing.

    On a cluster other processes may take unclaimed samples meanwhile (`help_shard`).
    """
    generation, asked, events = job.prepare()
    report, started = ShardReport(current_stage().run_id, job.rows, job.reporting.failures), time.time()
    record, work = generation.complete(complete_shard, asked, note=report.progress, events=events)
    report.file(current_stage().objects, work, started)
    stage_logger().info("shard %s: %d samples, %d generated now", job.label, record.num_samples, work.samples)
    return record


@stage(version=1, cached=False, retries=0, concurrency="engine", time="generating")
def help_shard(job: ShardJob) -> Help:
    """Generate samples of a shard that its worker has not claimed yet; returns at once where there are none."""
    generation, asked, events = job.prepare()
    report, started = ShardReport(current_stage().run_id, job.rows, job.reporting.failures), time.time()
    work = generation.assist(assist_shard, asked, note=report.help, events=events)
    report.file(current_stage().objects, work, started)
    stage_logger().info("shard %s: %d samples generated for its worker", job.label, work.samples)
    return Help(num_samples=work.samples)


@stage(version=2, cached=False)
def write_completions(shards: list[ShardCompletions], config: InferBatchConfig, run_id: str) -> OutputFile:
    """Write the completions of all shards in input order, unless they are there; the file is replaced at once."""
    objects = current_stage().objects
    folder = output_folder(config.output.dir, connections.working_folder(), objects)
    written = write_shards(objects, folder, config, shards, connections.open_store, run_id)
    stage_logger().info("%d completions in %s", written.num_rows, written.path)
    row = {"file": written.path, "rows": written.num_rows, "failed": written.num_failed}
    row["tokens"] = sum(shard.num_tokens for shard in shards)
    artifacts.table("output", [row], "Completions written")
    return written
