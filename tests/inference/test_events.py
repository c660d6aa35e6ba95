"""Events of samples: one for each that ended in this run, once its outcome is acknowledged, and none by default."""

from __future__ import annotations

import json
from typing import Any

import pytest
from batches import PARAMS, Batch, Ready, WatchedEngine

from rollout_core.data.datasets import PromptRow
from rollout_core.inference.batch import BatchOptions
from rollout_core.inference.batch_runs import EventLog
from rollout_core.inference.shards import ShardWork, complete_shard, import_shards, shards_of
from rollout_core.store import SqlLightningStore

ROWS = [PromptRow(prompt=f"sort {number} =", id=f"row-{number}") for number in range(6)] + [PromptRow(prompt="9 " * 99)]


async def run(batch: Batch, engine: WatchedEngine, tiny: Any, **options: Any) -> None:
    prompts = import_shards(batch.objects, ROWS, shard_size=100)
    [(shard, _)] = shards_of(batch.objects, prompts)
    async with SqlLightningStore.from_url(batch.database) as store:
        await complete_shard(
            store,
            batch.objects,
            Ready(engine),
            ShardWork(shard, PARAMS, 1, tiny.folder),
            worker_id="w",
            options=BatchOptions(commit_size=2, max_model_len=100),
            **options,
        )


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_each_sample_is_told_once_when_it_is_acknowledged(
    batch: Batch, watched: WatchedEngine, tiny: Any, capsys: pytest.CaptureFixture[str]
):
    log = EventLog("run-1", "1/1")
    watched.fail_after = 5
    with pytest.raises(RuntimeError, match="the engine broke"):
        await run(batch, watched, tiny, events=log)
    first = told(capsys)
    done = [rollout for rollout, row in (await batch.rollouts()).items() if row.status in ("succeeded", "failed")]
    acknowledged = {event["sample"] for event in first}
    assert acknowledged <= set(done) and 0 < len(acknowledged) < len(ROWS)
    watched.fail_after = None
    await run(batch, watched, tiny, events=log)
    events = first + told(capsys)
    assert len({event["sample"] for event in events}) == len(events) == len(ROWS)
    by_id = {event.pop("id"): event for event in events}
    sample = by_id["row-3"].pop("sample")
    assert sample in await batch.rollouts()
    assert by_id["row-3"] == {
        "topic": "sample_completed",
        "run_id": "run-1",
        "shard": "1/1",
        "finish_reason": "stop",
        "tokens": by_id["row-3"]["tokens"],
    }
    assert by_id["row-3"]["tokens"] > 5
    assert by_id[None]["topic"] == "sample_failed" and by_id[None]["finish_reason"] == "error"
    assert "exceed the model's context of 100 tokens" in by_id[None]["error"] and by_id[None]["tokens"] == 0
    await run(batch, watched, tiny, events=log)
    assert told(capsys) == [], "what was done before is not told again"


async def test_a_run_that_asks_for_none_has_none(
    batch: Batch, watched: WatchedEngine, tiny: Any, capsys: pytest.CaptureFixture[str]
):
    await run(batch, watched, tiny)
    assert capsys.readouterr().err == ""
