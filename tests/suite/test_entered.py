"""How many of the project's own files a piece of work goes through: what someone reads who follows it.

The figures are those of today; a change that needs more files should be a reasoned one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_core.algorithms import sft_update, training
from rollout_core.base.ids import hash_bytes
from rollout_core.config import InferBatchConfig, SnapshotPolicy, parse_config
from rollout_core.data import to_jsonl
from rollout_core.store import LightningStoreClient, LightningStoreServer, SqlLightningStore
from tests.algorithms import updates
from tests.suite.entered import EnteredFiles

ENQUEUE, BATCH_RUN = 21, 93
"""Two more since each write tells those who watch, by changes and their rows; of a batch run a third, which is the form
of logs, and one more since it says what its machine has."""
SFT_STEPS = 13
"""Two more since the output layer and what is kept of an update under way stand in files of their own."""


@pytest.mark.asyncio
async def test_an_enqueue_over_http_into_sqlite(tmp_path: Path):
    with EnteredFiles() as entered:
        server = LightningStoreServer(SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'store.db'}"))
        await server.start()
        client = LightningStoreClient(server.endpoint)
        for _ in range(3):
            await client.enqueue_rollout({"task": 1})
        found: list[set[str]] = []
        for _ in range(5):
            with entered.noting():
                await client.enqueue_rollout({"task": 2})
            found.append(set(entered.files()))
        await client.close()
        await server.close()
    files = sorted(set.intersection(*found))  # what a server does from time to time comes between some of them
    assert "rollout_core/store/sql/sql_store.py" in files, "calls in the server's thread are seen too"
    assert len(files) <= ENQUEUE, files


def test_steps_of_sft(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    settings = updates.sft_settings(snapshots=SnapshotPolicy(every_steps=100))

    def update(key: bytes) -> None:
        context = updates.update_context(tmp_path, key=hash_bytes(key))
        dataset = context.objects.put_bytes(to_jsonl(updates.sft_rows(20)))
        sft_update(context.objects.put_tree(tiny_model), dataset, settings, context)

    with EnteredFiles() as entered:

        def noted(*arguments, **options):
            with entered.noting():
                train(*arguments, **options)

        train = training.train
        update(b"first")
        monkeypatch.setattr(training, "train", noted)
        update(b"second")
    files = entered.files()
    assert "rollout_core/algorithms/loop.py" in files
    assert len(files) <= SFT_STEPS, files


@pytest.mark.server
def test_a_batch_run(tmp_path: Path, tiny_model: Path, prefect_server: str):
    """Of the scripted backend into SQLite: from the flow's call to the output file. Prefect's process is not seen."""
    from flows.batch import batch_inference

    def run(name: str) -> None:
        rows = (json.dumps({"prompt": f"{name} {number} =", "id": f"row-{number}"}) + "\n" for number in range(40))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        document = {
            "model": {"uri": str(tiny_model)},
            "sampling": {"max_tokens": 8},
            "input": {"glob": str(tmp_path / f"{name}.jsonl")},
            "output": {"dir": str(tmp_path / name)},
            "backend": {"kind": "scripted"},
        }
        batch_inference(parse_config(document, InferBatchConfig))

    with EnteredFiles() as entered:
        run("first")
        with entered.noting():
            run("second")
    files = entered.files()
    assert "rollout_core/store/sql/sql_store.py" in files and "rollout_core/inference/ledger.py" in files
    assert len(files) <= BATCH_RUN, files
