"""The input of batch inference as a stage, on a real Prefect server: its shards are those of the files it names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import InferBatchConfig
from rollout_core.inference.shards import read_shard, shards_of
from rollout_core.objects import ObjectStore

pytestmark = pytest.mark.server


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
