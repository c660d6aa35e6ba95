"""Stages with an effect outside the object store: reading input patterns and writing result files. Never cached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rollout_core.config import InferBatchConfig
from rollout_core.datasets import read_prompts, to_jsonl
from rollout_core.ids import ContentId
from rollout_core.inference.output import COMPLETIONS_FILE, output_rows, write_atomically
from rollout_core.inference.samples import decode_completions_blob, decode_samples
from rollout_core.records import Completions, Dataset, Record
from tasks import artifacts, places
from tasks.stage import current_stage, stage, stage_logger


class OutputFile(Record):
    """What was written where."""

    path: str
    num_rows: int
    run_id: str


@stage(version=1, cached=False)
def import_glob(glob: str) -> Dataset:
    """File all prompt rows of a file or pattern, in order, in the object store."""
    rows = read_prompts(glob, base=places.working_folder())
    return Dataset(data=current_stage().objects.put_bytes(to_jsonl(rows)), num_rows=len(rows))


@stage(version=1, cached=False)
def write_completions(shards: list[Completions], config: InferBatchConfig, run_id: str) -> OutputFile:
    """Write the completions of all shards in input order; the file is replaced at once."""
    objects = current_stage().objects
    path = places.working_folder() / config.output.dir / COMPLETIONS_FILE

    def lines() -> Iterator[bytes]:
        for shard in shards:
            samples = decode_samples(objects.get_bytes(shard.samples))
            yield from output_rows(
                samples,
                decode_completions_blob(objects.get_bytes(shard.completions)),
                params=config.sampling,
                model_uri=config.model.uri,
                model_id=shard.model,
                blob_id=shard.completions,
                finished_at=asyncio.run(_end_times([sample.id for sample in samples])),
            )

    write_atomically(path, lines())
    count = sum(shard.num_samples for shard in shards)
    stage_logger().info("%d completions written to %s", count, path)
    tokens = sum(shard.num_tokens for shard in shards)
    artifacts.table("output", [{"file": str(path), "rows": count, "tokens": tokens}], "Completions written")
    return OutputFile(path=str(path), num_rows=count, run_id=run_id)


async def _end_times(sample_ids: list[ContentId]) -> dict[str, float]:
    times: dict[str, float] = {}
    async with places.open_store() as store:
        for start in range(0, len(sample_ids), 5_000):
            for rollout in await store.query_rollouts(rollout_id_in=sample_ids[start : start + 5_000]):
                if rollout.end_time is not None:
                    times[rollout.rollout_id] = rollout.end_time
    return times
