"""The batch inference flow: prompts in a file, completions in a file, in the same order."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.healing import run_body
from rollout_core.config import InferBatchConfig
from rollout_core.inference.engines import close_engine
from rollout_core.inference.output import resolve_run_id
from rollout_core.plan import context_limit, plan_batch
from tasks.generate import batch_inference as generate
from tasks.journal import Journal
from tasks.keep import import_model
from tasks.output import import_glob, write_completions
from tasks.places import connections, working_folder
from tasks.prompts import enqueue_prompts


@flow(name="batch-inference", flow_run_name="{config.model.uri}", persist_result=False)
def batch_inference(config: InferBatchConfig, run_id: str | None = None) -> dict[str, Any]:
    """Complete every prompt of the input and write ``completions.jsonl`` in input order; returns what was written.

    ``run_id`` names an earlier run to go on with; without it the output folder's own run is taken up.
    """
    plan_batch(config, working_folder(), run_id, connections())
    run_id = resolve_run_id(working_folder() / config.output.dir, run_id)

    def body(journal: Journal) -> dict[str, Any]:
        model = import_model(config.model)
        prompts = import_glob(config.input.glob)
        shards = []
        share = -(-prompts.num_rows // config.workers.count)
        for first in range(0, prompts.num_rows, share):
            prompt_set = enqueue_prompts(
                prompts.data,
                model.model,
                config.sampling,
                first=first,
                count=min(share, prompts.num_rows - first),
                max_model_len=context_limit(config.backend),
                mode="test",
            )
            shards.append(generate(prompt_set, config.sampling, config.backend, mode="test"))
        return write_completions(shards, config, run_id).model_dump(mode="json")

    try:
        return run_body(body, config.run)
    finally:
        close_engine()
