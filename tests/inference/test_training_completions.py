"""Completions to train on: failed samples stop the run or are left out, with all they would be compared with."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from batches import PARAMS, Batch, Ready, WatchedEngine, make_batch

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.data.samples import Completion, Failure, decode_samples
from rollout_core.inference.training_samples import FailedSamples, complete_batch
from rollout_core.objects.records import Completions
from rollout_core.store import SqlLightningStore

LEAVE_OUT = FailedSamples("leave_out", group_size=2)


class Refusing(WatchedEngine):
    """Fails the samples with these places among those of its batch."""

    refused: frozenset[str] = frozenset()
    passing = False

    def finish(self, completion: Completion) -> Completion:
        if completion.key in self.refused:
            return Failure(completion.key, "it is refused", passing=self.passing)  # type: ignore[return-value]
        return completion


@pytest.fixture
def pairs(tmp_path: Path, tiny) -> Batch:
    """Three groups of two."""
    return make_batch(tmp_path, tiny, [f"prompt {number}" for number in range(3)], samples_per_prompt=2)


async def complete(batch: Batch, engine: Refusing, failed: FailedSamples, *places: int) -> Completions:
    engine.refused = frozenset(batch.ids[place] for place in places)
    async with SqlLightningStore.from_url(batch.database) as store:
        record, _ = await complete_batch(
            store, batch.objects, Ready(engine), batch.samples_id, PARAMS, failed=failed, worker_id="w1"
        )
        return record


async def test_a_failed_sample_takes_its_group_with_it_and_is_counted(pairs: Batch, tiny):
    record = await complete(pairs, Refusing(tiny), LEAVE_OUT, 3)
    kept = [pairs.ids[place] for place in (0, 1, 4, 5)]
    assert [sample.id for sample in decode_samples(pairs.objects.get_bytes(record.samples))] == kept
    lines = pairs.objects.get_bytes(record.completions).splitlines()
    assert [orjson.loads(line)["id"] for line in lines] == kept
    assert (record.num_samples, record.num_left_out) == (4, 2)
    assert sum(record.finish_reasons.values()) == 4
    assert await pairs.statuses() == {"failed": 1, "succeeded": 5}, "the ledger says which it was"
    assert await complete(pairs, Refusing(tiny), LEAVE_OUT) == record, "and it is not tried again"


async def test_nothing_is_filed_anew_where_nothing_failed(pairs: Batch, tiny):
    record = await complete(pairs, Refusing(tiny), LEAVE_OUT)
    assert (record.samples, record.num_samples, record.num_left_out) == (pairs.samples_id, 6, 0)
    assert await complete(pairs, Refusing(tiny), FailedSamples()) == record


async def test_failures_stop_the_run_where_they_are_to(pairs: Batch, tiny):
    with pytest.raises(Fatal, match=r"1 of 6 samples failed; first .*: it is refused"):
        await complete(pairs, Refusing(tiny), FailedSamples(), 3)


async def test_a_set_of_which_nothing_is_left_is_an_error(pairs: Batch, tiny):
    with pytest.raises(Fatal, match=r"3 of 6 samples failed, which leaves no whole group; first \w+: it is refused"):
        await complete(pairs, Refusing(tiny), LEAVE_OUT, 0, 3, 4)


async def test_a_passing_failure_is_tried_again_before_it_is_left_out(pairs: Batch, tiny):
    engine = Refusing(tiny)
    engine.passing = True
    with pytest.raises(Recoverable, match=r"1 of 6 samples failed; first \w+: it is refused"):
        await complete(pairs, engine, LEAVE_OUT, 3)
