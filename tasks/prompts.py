"""Stages that bring prompts in: as samples with identities, and as rollouts of the store."""

from __future__ import annotations

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import parse_prompts
from rollout_core.data.examples import positions_between
from rollout_core.data.samples import encode_samples, make_samples
from rollout_core.inference.ledger import SampleLedger
from rollout_core.models.facts import max_positions
from rollout_core.models.tokenizers import load_tokenizer
from rollout_core.objects.records import PromptSet
from rollout_core.store.types import RolloutMode
from tasks import artifacts, connections
from tasks.logs import stage_logger
from tasks.stage import current_stage, stage


@stage(version=1, optional=("seed",))
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
    label: str = "",
) -> PromptSet:
    """Turn prompt rows into samples of a model and enqueue them in the store.

    ``first`` and ``count`` choose rows, going around the end of the file; with a ``seed`` each time around is in an
    order of its own, which follows from it. Enqueueing a sample twice is one rollout.
    """
    objects = current_stage().objects
    rows = parse_prompts(objects.get_bytes(prompts), name=f"prompts {prompts.short}")
    last = len(rows) if count is None else first + count
    order = _order(last, len(rows), seed)
    folder = objects.local_tree(model, connections.cache_folder())
    limit = max_model_len or max_positions(folder)
    samples = make_samples(
        load_tokenizer(folder),
        [rows[position] for position in order[first:]],
        model=model,
        params=sampling,
        samples_per_prompt=samples_per_prompt,
        max_model_len=limit,
        earlier=[rows[position] for position in order[:first]],
    )
    blob = objects.put_bytes(encode_samples(samples))

    async def enqueue() -> None:
        async with connections.open_store() as store:
            ledger = SampleLedger(store, objects, worker_id="enqueue", stale_after_seconds=0.0)
            await ledger.enqueue(samples, mode=mode, source=blob)

    run_async(enqueue())
    stage_logger().info("%d samples enqueued for model %s", len(samples), model.short)
    artifacts.origin("prompts", f"Prompts {label}".strip(), {"samples": blob}, {"prompt file": prompts, "model": model})
    return PromptSet(
        samples=blob,
        model=model,
        num_samples=len(samples),
        num_prompt_tokens=sum(len(sample.prompt_token_ids) for sample in samples),
    )


def _order(count: int, num_rows: int, seed: int | None) -> list[int]:
    """Positions of the first ``count`` rows of all times around."""
    if seed is None:
        return [position % num_rows for position in range(count)]
    return positions_between(0, count, num_items=num_rows, seed=seed)
