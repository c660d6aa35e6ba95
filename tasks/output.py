"""The stage that writes the result of batch inference where the user wants it. Never cached."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import InferBatchConfig
from rollout_core.data.samples import decode_completions_blob
from rollout_core.inference.folders import output_folder
from rollout_core.inference.output import file_name, output_chunks, output_id, shard_rows, write_known
from rollout_core.inference.shard_run import finished_ref
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Record, ShardCompletions
from tasks import artifacts, connections
from tasks.logs import stage_logger
from tasks.stage import current_stage, stage


class OutputFile(Record):
    """What was written where."""

    path: str
    num_rows: int
    num_failed: int
    run_id: str


@stage(version=2, cached=False)
def write_completions(shards: list[ShardCompletions], config: InferBatchConfig, run_id: str) -> OutputFile:
    """Write the completions of all shards in input order, unless they are there; the file is replaced at once."""
    storage = current_stage().objects
    folder = output_folder(config.output.dir, connections.working_folder(), storage)
    name = file_name(config.output)

    def chunks() -> Iterator[bytes]:
        parts = ((shard, _ended(storage, shard)) for shard in shards)
        rows = (row for shard, ended in parts for row in shard_rows(storage, shard, config, ended))
        return output_chunks(config, rows)

    write_known(storage, folder, name, output_id(config, shards), chunks)
    count = sum(shard.num_samples for shard in shards)
    path = folder.where(name)
    stage_logger().info("%d completions in %s", count, path)
    tokens = sum(shard.num_tokens for shard in shards)
    failed = sum(shard.num_failed for shard in shards)
    row = {"file": path, "rows": count, "failed": failed, "tokens": tokens}
    artifacts.table("output", [row], "Completions written")
    return OutputFile(path=path, num_rows=count, num_failed=failed, run_id=run_id)


def _ended(storage: ObjectStore, shard: ShardCompletions) -> list[float]:
    """When each of a shard's samples was finished: from the note beside it, or else from the store."""
    noted = storage.cached_bytes(finished_ref(shard.completions))
    if noted is not None:
        return orjson.loads(noted)
    ids = [row.id for row in decode_completions_blob(storage.get_bytes(shard.completions))]
    times = run_async(_end_times(ids))
    return [times.get(sample_id, 0.0) for sample_id in ids]


async def _end_times(sample_ids: list[ContentId]) -> dict[str, float]:
    times: dict[str, float] = {}
    async with connections.open_store() as store:
        for start in range(0, len(sample_ids), 5_000):
            for rollout in await store.query_rollouts(rollout_id_in=sample_ids[start : start + 5_000]):
                if rollout.end_time is not None:
                    times[rollout.rollout_id] = rollout.end_time
    return times
