"""Stages of batch inference: the shards are those of the input as it was read, and a shard's key never changes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.ids import hash_bytes
from rollout_core.config import InferBatchConfig, SamplingParams, ScriptedBackend, WorkersConfig
from rollout_core.inference.batch_runs import FailureLimit, Reporting
from rollout_core.inference.shards import read_shard, shards_of
from rollout_core.objects import ObjectStore


def test_a_shard_job_has_the_key_that_its_fields_had_as_single_arguments():
    """Values of the third version, in which conversations also end where the chat template ends a turn."""
    from tasks.batch import infer_shard
    from tasks.runtime.generation import ShardJob

    job = ShardJob(
        rows=hash_bytes(b"a"),
        model=hash_bytes(b"b"),
        sampling=SamplingParams(max_tokens=3),
        backend=ScriptedBackend(),
        workers=WorkersConfig(),
        samples_per_prompt=2,
        limit=None,
        reporting=Reporting(run_id="r", events=False, failures=FailureLimit(0.1, 4)),
        label="1/2",
    )
    known = "629a45715b6cff70c74b746dcfa8c41b1b094dfbcbbcf6657e89420ac98b0351"
    assert infer_shard.key({"job": job}) == known
    assert infer_shard.key({"job": replace(job, label="2/2")}) == known
    limited = "d631fff772a9a7f7c1f442fade3452a7201f77c77abcf3e862630ba193d98f1f"
    assert infer_shard.key({"job": replace(job, limit=64)}) == limited


@pytest.mark.server
def test_an_input_edited_while_it_is_read_is_read_again(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from prefect import flow

    from tasks import batch

    monkeypatch.chdir(tmp_path)
    first, second = '{"prompt": "first"}\n', '{"prompt": "second"}\n'
    file = Path("prompts.jsonl")
    file.write_text(first)
    config = InferBatchConfig.model_validate(
        {
            "model": {"uri": "m"},
            "sampling": {"max_tokens": 4},
            "input": {"glob": "prompts.jsonl"},
            "output": {"dir": "out"},
        }
    )
    imported = batch.import_shards

    def edit_and_import(*arguments: Any, **options: Any) -> Any:
        file.write_text(second)
        return imported(*arguments, **options)

    @flow(name="test-import", persist_result=False)
    def prompts() -> list[str | None]:
        objects = ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])
        found = shards_of(objects, batch.import_prompts(config))
        return [shard_row.row.prompt for shard, _ in found for shard_row in read_shard(objects, shard)]

    monkeypatch.setattr(batch, "import_shards", edit_and_import)
    assert prompts() == ["second"]
    monkeypatch.setattr(batch, "import_shards", imported)
    file.write_text(first)
    assert prompts() == ["first"], "what was read of the edited file is not kept for this one"
