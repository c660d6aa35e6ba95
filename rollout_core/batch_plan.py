"""What is checked of a batch inference run before any engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_core.config import InferBatchConfig
from rollout_core.errors import ConfigError
from rollout_core.inference.output import earlier_run_id
from rollout_core.inference.prompt_files import open_prompts
from rollout_core.inference.prompt_shards import imported_before
from rollout_core.plan import Connections, Plan


def plan_batch(
    config: InferBatchConfig, base: Path, run_id: str | None = None, connections: Connections | None = None
) -> dict[str, Any]:
    """Check a batch inference run, perhaps one to go on with. Raises ConfigError naming all that is wrong.

    Every line of the input is read, unless the same files were read before.
    """
    plan = Plan(base, connections)
    plan.places()
    plan.model("model", config.model)
    plan.backend("backend", config.backend)
    inputs = plan.check("input.glob", lambda: _count_prompts(plan, config))
    folder = plan.output_folder("output.dir", config.output.dir)
    plan.check("output.dir", lambda: earlier_run_id(folder, run_id))
    workers: int | str | None = config.workers.count
    if config.workers.dask is not None:
        from rollout_core.dask_cluster import check_cluster

        dask = config.workers.dask
        workers = plan.check("workers.dask", lambda: check_cluster(dask))
    return {**plan.done(), "inputs": inputs or 0, "workers": workers}


def _count_prompts(plan: Plan, config: InferBatchConfig) -> int:
    prompts = open_prompts(config.input, plan.base)
    if plan.objects is not None and (source := prompts.identity()) is not None:
        known = imported_before(plan.objects, source, config.workers.shard_size)
        if known is not None:
            return known.num_rows
    count = chats = 0
    for row in prompts.rows():
        count += 1
        chats += row.messages is not None
    if chats and plan.tokenizer is not None and not plan.tokenizer.chat_template:
        raise ConfigError(
            f"{chats} rows hold chat messages, but the tokenizer has no chat template; give plain text, or a model or "
            "model.tokenizer with a template"
        )
    return count
