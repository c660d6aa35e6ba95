"""Samples that are asked for one by one: each is kept before it is given, and drawn once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import Recoverable
from rollout_core.data.samples import Completion, Failure, Outcome, Sample, decode_completions_blob
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.batch import BatchOptions, Progress
from rollout_core.inference.ledger import Answer, SampleLedger
from rollout_core.inference.on_demand import OnDemand
from rollout_core.store import SqlLightningStore
from tests.inference.batches import PARAMS, Batch, Ready, WatchedEngine, make_batch

GENERATOR = "g"


@pytest.fixture
def asked(tmp_path: Path, tiny: ModelRef) -> Batch:
    return make_batch(tmp_path, tiny, [f"sort {number} 1 =" for number in range(12)])


@asynccontextmanager
async def demand(
    asked: Batch,
    engine: Any,
    *,
    worker: str = "w",
    note: Callable[[Progress], None] = lambda progress: None,
    **how: Any,
) -> AsyncIterator[OnDemand]:
    options: dict[str, Any] = {"exclusive": False, "generator": GENERATOR, "wait_seconds": 0.05, "mode": "test"}
    async with SqlLightningStore.from_url(asked.database) as store:
        found = OnDemand(
            store,
            asked.objects,
            Ready(engine),
            worker_id="w",
            options=BatchOptions(deterministic=False, **options),
            on_progress=note,
        )
        async with found.running():
            yield found


def text_of(line: bytes) -> str:
    [row] = decode_completions_blob(line)
    return row.text


class NoEngine:
    """One that must not be started."""

    model_id = batch_invariant = max_model_len = None

    def stream(self, requests: Any) -> Any:
        raise AssertionError("an engine was asked")


async def test_each_is_drawn_once_and_kept_for_the_next(asked: Batch, watched: WatchedEngine):
    progress: list[Progress] = []
    async with demand(asked, watched, note=progress.append) as found:
        lines = await asyncio.gather(*(found.complete(sample, PARAMS) for sample in asked.samples))
        assert found.work.samples == 12 and sorted(watched.asked) == sorted(asked.ids)
    assert [text_of(line) for line in lines] == [f"SCRIPTED:sort {number} 1 =" for number in range(12)]
    assert (progress[-1].done, progress[-1].total, progress[-1].samples) == (12, 12, 12)
    assert await asked.statuses() == {"succeeded": 12} and set((await asked.successes()).values()) == {1}
    async with demand(asked, NoEngine()) as found:
        assert await asyncio.gather(*(found.complete(sample, PARAMS) for sample in asked.samples)) == lines
        assert found.work.samples == 0


async def test_one_answer_leads_to_the_next_question(asked: Batch, watched: WatchedEngine):
    async with demand(asked, watched) as found:
        texts = [text_of(await found.complete(sample, PARAMS)) for sample in asked.samples[:4]]
    assert len(set(texts)) == 4 and watched.asked == asked.ids[:4]


async def test_one_that_is_asked_for_twice_is_drawn_once_and_counted_once(asked: Batch, watched: WatchedEngine):
    progress: list[Progress] = []
    async with demand(asked, watched, note=progress.append) as found:
        sample = asked.samples[0]
        first = asyncio.create_task(found.complete(sample, PARAMS))
        lines = await asyncio.gather(*(found.complete(sample, PARAMS) for _ in range(2)))
        assert [await first, await found.complete(sample, PARAMS)] == lines
    assert watched.asked == asked.ids[:1] and (progress[-1].done, progress[-1].total) == (1, 1)


async def test_one_that_another_worker_has_is_waited_for(asked: Batch, watched: WatchedEngine):
    sample = asked.samples[0]
    async with SqlLightningStore.from_url(asked.database) as store:
        other = SampleLedger(store, asked.objects, worker_id="other", stale_after_seconds=300.0, generator=GENERATOR)
        claimed: dict[Any, Any] = {}
        await other.heartbeat()
        await other.begin([sample], claimed, mode="test", source=asked.samples_id)
        async with demand(asked, watched) as found:
            waiting = asyncio.create_task(found.complete(sample, PARAMS))
            mine = await found.complete(asked.samples[1], PARAMS)
            assert text_of(mine) == "SCRIPTED:sort 1 1 =" and not waiting.done()
            theirs = Completion(str(sample.id), [3], [-0.5], "theirs", "stop")
            await other.commit([Answer.of(claimed[sample.id], theirs, PARAMS)])
            assert text_of(await waiting) == "theirs"
    assert watched.asked == asked.ids[1:2]


async def test_an_engine_that_breaks_ends_all_that_wait_and_gives_back_what_was_claimed(
    asked: Batch, watched: WatchedEngine
):
    watched.fail_after = 5
    async with demand(asked, watched) as found:
        waiting = [asyncio.create_task(found.complete(sample, PARAMS)) for sample in asked.samples]
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        broken = [error for error in ended if isinstance(error, RuntimeError)]
        assert {str(error) for error in broken} == {"the engine broke"} and 7 <= len(broken) <= 12
        with pytest.raises(RuntimeError, match="the engine broke"):
            await found.complete(asked.samples[0], PARAMS)
    assert set(await asked.statuses()) <= {"succeeded", "failed"}, "nothing is left as running"
    watched.fail_after = None
    async with demand(asked, watched) as found:
        await asyncio.gather(*(found.complete(sample, PARAMS) for sample in asked.samples))
    assert set((await asked.successes()).values()) == {1}


async def test_what_is_left_in_the_middle_is_given_back(asked: Batch, watched: WatchedEngine):
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    watched.at = {1: lambda: loop.call_soon_threadsafe(begun.set)}
    async with demand(asked, watched) as found:
        waiting = [asyncio.create_task(found.complete(sample, PARAMS)) for sample in asked.samples]
        await begun.wait()
    for task in waiting:
        task.cancel()
    assert "running" not in await asked.statuses() and "preparing" not in await asked.statuses()


class Refusing(WatchedEngine):
    """Refuses every other prompt for good, or for now."""

    passing = False

    def finish(self, completion: Completion) -> Any:
        refused: Outcome = Failure(completion.key, "not this one", self.passing)
        return refused if int(completion.text.split()[1]) % 2 else completion


async def test_a_failure_for_good_is_an_answer_and_one_for_now_an_error(asked: Batch, tiny: ModelRef):
    engine = Refusing(tiny)
    first, second = asked.samples[:2]
    async with demand(asked, engine) as found:
        lines = await asyncio.gather(found.complete(first, PARAMS), found.complete(second, PARAMS))
    [row] = decode_completions_blob(lines[1])
    assert row.error == "not this one" and text_of(lines[0]) == "SCRIPTED:sort 0 1 ="
    engine.passing = True
    third: Sample = asked.samples[3]
    async with demand(asked, engine) as found:
        with pytest.raises(Recoverable, match="not this one"):
            await found.complete(third, PARAMS)
    engine.passing = False
    async with demand(asked, engine) as found:
        [row] = decode_completions_blob(await found.complete(third, PARAMS))
    assert row.error == "not this one" and engine.asked.count(str(third.id)) == 2
