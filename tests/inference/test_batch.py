"""Batch inference: every sample gets exactly one completion, whatever breaks, is killed or runs at the same time."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batches import PARAMS, Batch, MoodyEngine, Ready, WatchedEngine, make_batch

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.config import ScriptedBackend, TransformersBackend
from rollout_core.data.samples import Completion, decode_completions_blob, encode_completion
from rollout_core.inference import ledger as ledger_module
from rollout_core.inference.backend import ScriptedEngine
from rollout_core.inference.batch import Progress
from rollout_core.inference.hf import TransformersEngine
from rollout_core.inference.ledger import COMPLETION_SPAN, Answer, SampleLedger
from rollout_core.inference.training_samples import complete_batch
from rollout_core.store import SqlLightningStore
from tests.store.patience import FOREVER, LONG, until

CHILD = Path(__file__).with_name("batch_child.py")


def texts(batch: Batch, record) -> list[str]:
    return [row.text for row in decode_completions_blob(batch.objects.get_bytes(record.completions))]


def wait_until(holds: Callable[[], bool]) -> None:
    """Holds up the engine's thread."""
    while not holds():
        time.sleep(0.005)


async def blobs_of(batch: Batch) -> dict[str, list[str]]:
    """Sample ids by the blob that holds their completion."""
    found: dict[str, list[str]] = {}
    async with SqlLightningStore.from_url(batch.database) as store:
        for span in await store.query_many_spans(batch.ids, name=COMPLETION_SPAN):
            found.setdefault(str(span.attributes["rollout.completion.blob"]), []).append(span.rollout_id)
    return found


# One completion each


async def test_every_sample_gets_one_completion_in_order(batch, watched):
    record = await batch.complete(watched)
    rows = decode_completions_blob(batch.objects.get_bytes(record.completions))
    assert [row.id for row in rows] == batch.ids, "the engine answers in another order"
    assert [row.text for row in rows] == [f"SCRIPTED:{sample.prompt}" for sample in batch.samples]
    assert sorted(watched.asked) == sorted(batch.ids)
    assert (record.samples, record.model, record.num_samples) == (batch.samples_id, watched.model_id, 10)
    assert record.num_tokens == sum(len(row.token_ids) for row in rows)
    assert record.finish_reasons == {"stop": 10}
    assert await batch.statuses() == {"succeeded": 10}


async def test_a_second_call_generates_nothing_and_gives_the_same_record(batch, watched, tiny):
    first = await batch.complete(watched)
    again = WatchedEngine(tiny)
    assert await batch.complete(again) == first
    assert again.asked == []


async def test_the_record_does_not_depend_on_the_size_of_commits(batch, watched, tiny, tmp_path):
    records = []
    for commit_size in (1, 4, 100):
        other = make_batch(tmp_path / str(commit_size), tiny, [sample.prompt for sample in batch.samples])
        records.append(await other.complete(WatchedEngine(tiny), commit_size=commit_size))
    assert records[0] == records[1] == records[2] == await batch.complete(watched)


async def test_sets_that_share_samples_share_completions(tmp_path, tiny, watched):
    small = make_batch(tmp_path, tiny, ["a", "b"])
    large = make_batch(tmp_path, tiny, ["b", "c", "a"])
    await small.complete(watched)
    watched.asked.clear()
    record = await large.complete(watched)
    assert watched.asked == [large.ids[1]]
    assert texts(large, record) == ["SCRIPTED:b", "SCRIPTED:c", "SCRIPTED:a"]


async def test_equal_prompts_get_completions_of_their_own(tmp_path, tiny):
    batch = make_batch(tmp_path, tiny, ["sort 1 ="] * 2, samples_per_prompt=2)
    record = await batch.complete(TransformersEngine(TransformersBackend(), tiny))
    rows = decode_completions_blob(batch.objects.get_bytes(record.completions))
    assert len({tuple(row.token_ids) for row in rows}) == 4


async def test_no_samples_are_complete_at_once(tmp_path, tiny, watched):
    record = await make_batch(tmp_path, tiny, []).complete(watched)
    assert (record.num_samples, record.num_tokens, record.finish_reasons) == (0, 0, {})


async def test_progress_rises_from_what_was_done_to_the_end(batch, watched):
    watched.fail_after = 5
    with pytest.raises(RuntimeError):
        await batch.complete(watched)
    done = [progress.done for progress in batch.progress]
    assert done == [0, 3]
    batch.progress.clear()
    watched.fail_after = None
    record = await batch.complete(watched)
    done = [progress.done for progress in batch.progress]
    assert done == sorted(done) and done[0] == 3 and done[-1] == 10
    assert {progress.total for progress in batch.progress} == {10}
    rows = decode_completions_blob(batch.objects.get_bytes(record.completions))
    fresh = set(watched.asked[10:])
    tokens = sum(len(row.token_ids) for row in rows if row.id in fresh)
    assert batch.progress[-1] == Progress(10, 10, tokens, samples=7), "what was done before is not counted again"


async def test_a_sample_whose_numbers_cannot_be_kept_fails_alone(batch, tiny):
    class Broken(WatchedEngine):
        def finish(self, completion: Completion) -> Completion:
            broken = [math.nan] * len(completion.token_ids)
            return replace(completion, logprobs=broken) if completion.key == batch.ids[3] else completion

    with pytest.raises(Fatal, match=r"1 of 10 samples failed; first .*: sample .* log-probabilities that are not fin"):
        await batch.complete(Broken(tiny))
    assert await batch.statuses() == {"succeeded": 9, "failed": 1}


# Interrupted, broken


async def test_a_half_done_batch_goes_on_with_only_what_is_missing(batch, tiny, tmp_path):
    broken = WatchedEngine(tiny)
    broken.fail_after = 7
    with pytest.raises(RuntimeError, match="the engine broke"):
        await batch.complete(broken)
    done = {sample for sample, rollout in (await batch.rollouts()).items() if rollout.status == "succeeded"}
    assert len(done) == 6, "two groups of three"
    engine = WatchedEngine(tiny)
    record = await batch.complete(engine)
    assert sorted(engine.asked) == sorted(set(batch.ids) - done)
    undisturbed = make_batch(tmp_path / "undisturbed", tiny, [sample.prompt for sample in batch.samples])
    assert record == await undisturbed.complete(WatchedEngine(tiny))


async def test_a_failing_engine_gives_back_what_it_did_not_finish(batch, tiny):
    broken = WatchedEngine(tiny)
    broken.fail_after = 4
    with pytest.raises(RuntimeError):
        await batch.complete(broken)
    assert await batch.statuses() == {"failed": 7, "succeeded": 3}
    again = batch.complete(WatchedEngine(tiny), worker="w2", exclusive=False, stale_after_seconds=FOREVER)
    await asyncio.wait_for(again, LONG)  # another worker need not wait for them to go stale


async def test_a_cancelled_batch_gives_back_what_it_did_not_finish(batch, tiny):
    slow = WatchedEngine(tiny, delay_seconds=0.05)
    running = asyncio.create_task(batch.complete(slow))
    while not batch.progress or batch.progress[-1].done < 3:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    statuses = await batch.statuses()
    assert set(statuses) == {"failed", "succeeded"} and statuses["succeeded"] >= 3
    assert slow.closed_streams == 1, "the engine is free again"


async def test_what_is_being_claimed_when_the_engine_fails_is_given_back(batch, tiny, monkeypatch):
    begin, claims = SampleLedger.begin, []

    async def slow(self, samples, claimed, **options):
        claims.append(await begin(self, samples, claimed, **options))
        if len(claims) > 1:
            await asyncio.sleep(0.3)

    monkeypatch.setattr(SampleLedger, "begin", slow)
    broken = WatchedEngine(tiny)
    broken.fail_after = 1
    with pytest.raises(RuntimeError, match="the engine broke"):
        await batch.complete(broken, claim_size=4)
    assert len(claims) == 2 and await batch.statuses() == {"failed": 8}


async def test_a_claim_that_fails_ends_the_batch_with_its_reason(batch, watched, monkeypatch):
    begin = SampleLedger.begin

    async def refuse_others(self, samples, claimed, **options):
        if samples[0].id != batch.ids[0]:
            raise Recoverable("no database")
        await begin(self, samples, claimed, **options)

    monkeypatch.setattr(SampleLedger, "begin", refuse_others)
    with pytest.raises(Recoverable, match="no database"):
        await batch.complete(watched, claim_size=4)
    assert watched.closed_streams == 1 and "preparing" not in await batch.statuses()


async def test_a_claim_that_fails_halfway_leaves_nothing_claimed(batch, watched, monkeypatch):
    """Some samples of the block are rollouts already, so it takes two operations of the store."""
    async with SqlLightningStore.from_url(batch.database) as store:
        ledger = SampleLedger(store, batch.objects, worker_id="w1", stale_after_seconds=60)
        await ledger.enqueue(batch.samples[:3], mode="train", source=batch.samples_id)

    async def refuse(self, samples, claimed, **options):
        assert len(claimed) == 3
        raise Recoverable("no database")

    monkeypatch.setattr(SampleLedger, "begin", refuse)
    with pytest.raises(Recoverable, match="no database"):
        await batch.complete(watched)
    assert await batch.statuses() == {"failed": 3}
    monkeypatch.undo()
    again = batch.complete(watched, exclusive=False, stale_after_seconds=FOREVER)
    record = await asyncio.wait_for(again, LONG)
    assert record.num_samples == 10, "this worker does not wait for its own claims to go stale"


async def test_samples_are_committed_while_the_next_are_claimed(batch, tiny, monkeypatch):
    begin, claims = SampleLedger.begin, []

    async def until_the_first_are_done(self, samples, claimed, **options):
        claims.append([sample.id for sample in samples])
        if len(claims) == 2:
            await until(lambda: batch.progress and batch.progress[-1].done >= 4)
        await begin(self, samples, claimed, **options)

    monkeypatch.setattr(SampleLedger, "begin", until_the_first_are_done)
    await batch.complete(WatchedEngine(tiny), claim_size=4, commit_size=1)
    assert list(map(len, claims)) == [4, 4, 2]


async def test_an_engine_with_room_for_more_than_a_claim_is_filled(batch, tiny):
    class Roomy(WatchedEngine):
        def stream(self, requests):
            waiting, group = iter(requests), []
            deadline = time.monotonic() + LONG
            while len(group) < len(batch.ids) and time.monotonic() < deadline:
                group += filter(None, [next(waiting)])
            filled.extend(request.key for request in group)
            yield from super().stream(group)
            yield from super().stream(waiting)

    filled: list[str] = []
    await batch.complete(Roomy(tiny), claim_size=3)
    assert filled == batch.ids, "all are with the engine before one is done"


async def test_the_wait_for_the_engine_is_told_apart_from_the_work(batch, watched):
    class Slow(Ready):
        @contextmanager
        def open(self):
            time.sleep(0.5)
            yield self._lanes

    async with SqlLightningStore.from_url(batch.database) as store:
        began = time.monotonic()
        _, work = await complete_batch(store, batch.objects, Slow(watched), batch.samples_id, PARAMS, worker_id="w1")
        seconds = time.monotonic() - began
        _, again = await complete_batch(store, batch.objects, Slow(watched), batch.samples_id, PARAMS, worker_id="w1")
    assert 0.5 <= work.waited_seconds < seconds
    assert again.waited_seconds == 0.0, "nothing is missing, so no engine is waited for"


async def test_a_commit_that_fails_stops_the_engine_before_the_error_is_raised(batch, watched, monkeypatch):
    async def refuse(self, group):
        raise Recoverable("no room")

    monkeypatch.setattr(SampleLedger, "commit", refuse)
    with pytest.raises(Recoverable, match="no room"):
        await batch.complete(watched, commit_size=1)
    assert watched.closed_streams == 1


async def test_a_failed_release_does_not_hide_what_went_wrong(batch, watched, monkeypatch):
    async def refuse(self, rollouts):
        raise Recoverable("the database is gone")

    watched.fail_after = 4
    monkeypatch.setattr(SampleLedger, "release", refuse)
    with pytest.raises(RuntimeError, match="the engine broke"):
        await batch.complete(watched)


async def test_a_full_disk_is_a_passing_fault_and_the_next_run_goes_on(batch, tiny):
    """Not simulated: the system refuses to let files of this process grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = WatchedEngine(tiny)

    def fill_disk() -> None:
        wait_until(lambda: batch.progress[-1].done == 3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))

    engine.at[5] = fill_disk
    try:
        with pytest.raises(Recoverable):
            await batch.complete(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (await batch.statuses())["succeeded"] == 3
    engine = WatchedEngine(tiny)
    record = await batch.complete(engine)
    assert len(engine.asked) == 7 and record.num_samples == 10
    assert set((await batch.successes()).values()) == {1}


async def test_a_database_held_by_another_program_is_a_passing_fault(batch, tiny, monkeypatch):
    file = batch.database.removeprefix("sqlite:///")
    other = sqlite3.connect(file, timeout=LONG, isolation_level=None, check_same_thread=False)
    monkeypatch.setattr(
        SqlLightningStore, "from_url", lambda url, open=SqlLightningStore.from_url: open(url, busy_timeout_seconds=0.2)
    )
    await batch.statuses()  # makes the file
    engine = WatchedEngine(tiny)
    engine.at[5] = lambda: other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Recoverable, match="held by another process"):
        await batch.complete(engine)
    other.execute("ROLLBACK")
    other.close()
    await batch.complete(engine)
    assert set((await batch.successes()).values()) == {1}


# Damage


@pytest.mark.parametrize("damage", ["deleted", "a flipped bit", "cut short", "another blob's bytes"])
async def test_samples_of_a_damaged_blob_are_generated_again_and_no_others(batch, watched, tiny, damage):
    record = await batch.complete(watched)
    blobs = await blobs_of(batch)
    assert len(blobs) == 4
    victim, hit = min(blobs.items())
    path = Path(batch.objects.url.removeprefix("file://")) / "cas" / victim[:2] / victim[2:4] / victim
    data = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        other = batch.objects.get_bytes(ContentId(max(blobs)))
        flipped = data[:40] + bytes([data[40] ^ 1]) + data[41:]
        path.write_bytes({"a flipped bit": flipped, "cut short": data[:-5], "another blob's bytes": other}[damage])
    engine = WatchedEngine(tiny)
    assert await batch.complete(engine) == record
    assert sorted(engine.asked) == sorted(hit)
    assert await batch.complete(WatchedEngine(tiny)) == record


async def test_completions_of_another_generator_do_not_count_and_come_back_with_it(batch, tiny):
    """The sample ids are the same: a scripted trial must not pass for the model's own answers later."""
    scripted = ScriptedEngine(ScriptedBackend(text="a trial"), tiny)
    trial = await batch.complete(scripted, generator="scripted")
    engine = WatchedEngine(tiny)
    real = await batch.complete(engine, generator="real")
    assert sorted(engine.asked) == sorted(batch.ids) and real.completions != trial.completions
    again = WatchedEngine(tiny)
    assert await batch.complete(again, generator="real") == real and again.asked == []
    assert await batch.complete(again, generator="scripted") == trial and again.asked == []


@pytest.mark.parametrize("ends", [False, True])
async def test_what_one_generator_has_completed_stays_done_while_another_works_on_it(batch, tiny, ends):
    first = await batch.complete(WatchedEngine(tiny), generator="first")
    async with SqlLightningStore.from_url(batch.database) as store:
        other = SampleLedger(store, batch.objects, worker_id="other", stale_after_seconds=60, generator="other")
        standing = await other.shard_status(batch.ids, exclusive=False)
        assert sorted(standing.free) == sorted(batch.ids) and not standing.done
        claimed: dict = {}
        await other.claim(batch.ids[:3], standing, claimed)
        if ends:
            failure = Answer(claimed[batch.ids[0]], b"{}\n", failure="refused")
            assert all(await other.commit([failure, Answer(claimed[batch.ids[1]], line_of(batch, 1, "other"))]))
            await other.release([claimed[batch.ids[2]]])
        ours = SampleLedger(store, batch.objects, worker_id="ours", stale_after_seconds=60, generator="first")
        standing = await ours.shard_status(batch.ids, exclusive=False)
        assert standing.done.keys() == standing.ended.keys() == set(batch.ids) and all(standing.ended.values())
        assert not standing.free and not standing.busy and not standing.failed
        assert len((await other.shard_status(batch.ids, exclusive=False)).busy) == (0 if ends else 3)
        asked: list[str] = []
        query = store.query_spans

        async def noted(rollout_id: str, *rest: Any, **options: Any) -> Any:
            asked.append(rollout_id)
            return await query(rollout_id, *rest, **options)

        store.query_spans = noted  # type: ignore[method-assign]
        third = SampleLedger(store, batch.objects, worker_id="third", stale_after_seconds=60, generator="third")
        for _ in range(2):
            await third.shard_status(batch.ids, exclusive=False)
        assert sorted(asked) == sorted(batch.ids[:3]), "what is not ours is looked up once"
    again = WatchedEngine(tiny)
    assert await batch.complete(again, generator="first") == first and again.asked == []


async def test_an_outcome_that_cannot_be_kept_ends_the_batch_though_the_next_ones_are_far_away(batch, tiny):
    class Far(WatchedEngine):
        interrupted = threading.Event()

        def interrupt(self) -> None:
            self.interrupted.set()

        def finish(self, completion: Completion) -> Completion:
            if self._made == 4:
                assert self.interrupted.wait(LONG), "nobody left"
            return completion

    def full(progress: Progress) -> None:
        if progress.done:
            raise Fatal("too many failed")

    batch.progress = SimpleNamespace(append=full)  # type: ignore[assignment]
    with pytest.raises(Fatal, match="too many failed"):
        await batch.complete(Far(tiny))


# Who may commit


async def enqueued(batch: Batch, store: SqlLightningStore, worker: str) -> SampleLedger:
    ledger = SampleLedger(store, batch.objects, worker_id=worker, stale_after_seconds=60)
    await ledger.enqueue(batch.samples, mode="train", source=batch.samples_id)
    return ledger


async def claim(ledger: SampleLedger, samples: list[str]) -> dict:
    standing = await ledger.shard_status(samples, exclusive=True)  # type: ignore[arg-type]
    claimed: dict = {}
    await ledger.claim(standing.free, standing, claimed)
    return claimed


def line_of(batch: Batch, number: int, text: str) -> bytes:
    return encode_completion(Completion(batch.ids[number], [1], [0.0], text, "stop"))


async def test_a_superseded_attempt_cannot_commit(batch):
    async with SqlLightningStore.from_url(batch.database) as store:
        early, late = await enqueued(batch, store, "early"), await enqueued(batch, store, "late")
        old, new = await claim(early, batch.ids), await claim(late, batch.ids)
        sample = batch.ids[0]
        assert await early.commit([Answer(old[sample], line_of(batch, 0, "from the early"))]) == [None]
        assert (await late.shard_status([sample], exclusive=True)).done == {}
        assert all(await late.commit([Answer(new[sample], line_of(batch, 0, "from the late"))]))
        assert await early.commit([Answer(old[sample], line_of(batch, 0, "from the early"))]) == [None]
        [line] = (await early.shard_status([sample], exclusive=True)).done.values()
        assert b"from the late" in line
    assert (await batch.successes())[sample] == 1


async def test_of_a_group_only_the_superseded_samples_are_refused(batch):
    async with SqlLightningStore.from_url(batch.database) as store:
        early, late = await enqueued(batch, store, "early"), await enqueued(batch, store, "late")
        old = await claim(early, batch.ids)
        await claim(late, batch.ids[1:2])
        group = [Answer(old[sample], line_of(batch, number, "early")) for number, sample in enumerate(batch.ids[:3])]
        assert [ended is not None for ended in await early.commit(group)] == [True, False, True]


async def test_releasing_a_superseded_attempt_leaves_the_new_one_alone(batch):
    async with SqlLightningStore.from_url(batch.database) as store:
        early, late = await enqueued(batch, store, "early"), await enqueued(batch, store, "late")
        old, new = await claim(early, batch.ids), await claim(late, batch.ids)
        await early.release(old.values())
        assert len((await early.shard_status(batch.ids, exclusive=False)).busy) == 10
        assert all(await late.commit([Answer(new[batch.ids[0]], line_of(batch, 0, "late"))]))


async def test_a_batch_that_is_superseded_takes_the_other_ones_completions(batch, tiny):
    """The thief claims everything while the first is generating; the first then waits and returns the thief's."""
    engine, thief = WatchedEngine(tiny, text="first"), WatchedEngine(tiny, text="thief", delay_seconds=0.02)
    loop = asyncio.get_running_loop()
    stolen: list[asyncio.Future] = []

    def steal() -> None:
        wait_until(lambda: batch.progress[-1].done == 3)
        stolen.append(asyncio.run_coroutine_threadsafe(batch.complete(thief, worker="w2"), loop))  # type: ignore
        wait_until(lambda: len(thief.asked) == 7)

    engine.at[4] = steal
    record = await batch.complete(engine, commit_size=1)
    assert await asyncio.wrap_future(stolen[0]) == record
    assert sorted(texts(batch, record)) == ["first"] * 3 + ["thief"] * 7
    assert sorted(work.samples for work in batch.works) == [3, 7], "what was generated and not kept does not count"
    assert sum(work.tokens for work in batch.works) == record.num_tokens
    assert sorted(len(work.latencies) for work in batch.works) == [3, 7]
    assert set((await batch.successes()).values()) == {1}


async def test_a_worker_leaves_alone_what_a_living_one_is_generating(batch, tiny, monkeypatch):
    now = [began := time.time()]
    beat = SampleLedger.heartbeat

    async def beat_as_time_passes(self) -> None:
        await beat(self)
        now[0] += 0.2  # and by nothing else: no beat is late, however busy the machine is

    monkeypatch.setattr(SampleLedger, "heartbeat", beat_as_time_passes)
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(
        SqlLightningStore, "from_url", lambda url, open=SqlLightningStore.from_url: open(url, clock=lambda: now[0])
    )
    slow, fast = WatchedEngine(tiny), WatchedEngine(tiny)
    slow.at[1] = lambda: wait_until(lambda: now[0] - began > 2.5)
    first = asyncio.create_task(batch.complete(slow, worker="w1", exclusive=False, stale_after_seconds=1.0))
    await until(lambda: slow.asked)
    second = asyncio.create_task(batch.complete(fast, worker="w2", exclusive=False, stale_after_seconds=1.0))
    assert await first == await second
    assert fast.asked == [], "2.5 seconds are longer than stale_after, but the first shows that it lives"
    assert set((await batch.successes()).values()) == {1}


async def test_a_worker_takes_over_from_one_that_fell_silent(batch, tiny):
    started = time.monotonic()
    async with SqlLightningStore.from_url(batch.database) as store:
        await claim(await enqueued(batch, store, "the dead"), batch.ids)
    engine = WatchedEngine(tiny)
    taking_over = batch.complete(engine, worker="w2", exclusive=False, stale_after_seconds=1.0)
    await asyncio.wait_for(taking_over, LONG)
    assert time.monotonic() - started > 0.5
    assert sorted(engine.asked) == sorted(batch.ids)


async def test_a_worker_does_not_wait_for_its_own_claims_that_a_failed_release_left(batch, tiny, monkeypatch):
    async def refuse(self, rollouts):
        raise Recoverable("the database is away")

    broken = WatchedEngine(tiny)
    broken.fail_after = 4
    with monkeypatch.context() as patched:
        patched.setattr(SampleLedger, "release", refuse)
        with pytest.raises(RuntimeError, match="the engine broke"):
            await batch.complete(broken, exclusive=False)
    assert (await batch.statuses())["preparing"] == 7
    again = batch.complete(WatchedEngine(tiny), exclusive=False, stale_after_seconds=FOREVER)
    await asyncio.wait_for(again, LONG)  # claims of others would be waited for longer


async def test_a_sample_finished_between_look_and_claim_is_not_generated_again(batch, tiny):
    """Another worker claims and commits in the moment between this one's look at the ledger and its own claim."""
    async with SqlLightningStore.from_url(batch.database) as store:
        mine, other = await enqueued(batch, store, "mine"), await enqueued(batch, store, "other")
        standing = await mine.shard_status(batch.ids, exclusive=False)
        claimed = await claim(other, batch.ids[:2])
        group = [
            Answer(claimed[sample], line_of(batch, number, "other")) for number, sample in enumerate(batch.ids[:1])
        ]
        assert all(await other.commit(group))
        others: dict = {}
        await mine.claim(standing.free, standing, others)
        assert list(others) == batch.ids[1:], "the finished one stays finished"
        standing = await mine.shard_status(batch.ids, exclusive=False)
        assert list(standing.done) == batch.ids[:1]
        assert await other.commit([Answer(claimed[batch.ids[1]], line_of(batch, 1, "other"))]) == [None]


# Whole sets: engines whose answers depend on the batch


async def test_a_whole_set_is_committed_at_once(batch, tiny):
    moody = MoodyEngine(tiny)
    moody.fail_after = 9
    with pytest.raises(RuntimeError):
        await batch.complete(moody)
    assert await batch.statuses() == {"failed": 10}
    assert [progress.done for progress in batch.progress] == [0]


async def test_an_interrupted_whole_set_is_generated_again_from_the_start(batch, tiny):
    moody = MoodyEngine(tiny)
    moody.fail_after = 9
    with pytest.raises(RuntimeError):
        await batch.complete(moody)
    moody.fail_after = None
    moody.asked.clear()
    record = await batch.complete(moody)
    assert moody.asked == batch.ids, "all of them, in the order of the set"
    assert len(await blobs_of(batch)) == 1
    assert all(text.endswith("in stream 1") for text in texts(batch, record))


async def test_a_damaged_whole_set_is_generated_again_as_a_whole(batch, tiny):
    """Part of it may have been made by an engine of the other kind."""
    await batch.complete(WatchedEngine(tiny))
    batch.objects.delete(ContentId(min(await blobs_of(batch))))
    moody = MoodyEngine(tiny)
    record = await batch.complete(moody)
    assert moody.asked == batch.ids and len(await blobs_of(batch)) == 1
    moody.asked.clear()
    assert await batch.complete(moody) == record and moody.asked == []


async def test_what_is_done_of_a_whole_set_may_be_kept(batch, tiny):
    """Batch inference never asks twice for what was acknowledged; the rest is generated together."""
    known = await batch.complete(WatchedEngine(tiny))
    victim, lost = next((blob, hit) for blob, hit in (await blobs_of(batch)).items() if len(hit) == 3)
    batch.objects.delete(ContentId(victim))
    moody = MoodyEngine(tiny)
    moody.fail_after = 1
    with pytest.raises(RuntimeError):
        await batch.complete(moody, keep_done=True)
    assert await batch.statuses() == {"failed": 3, "succeeded": 7}
    moody.fail_after = None
    moody.asked.clear()
    record = await batch.complete(moody, keep_done=True)
    assert sorted(moody.asked) == sorted(lost)
    kept = dict(zip(batch.ids, texts(batch, known), strict=True))
    for sample, text in zip(batch.ids, texts(batch, record), strict=True):
        assert (text == kept[sample]) is (sample not in lost)


async def test_samples_too_long_for_one_limit_are_tried_again_under_another(batch, watched):
    for _ in range(2):
        with pytest.raises(Fatal, match=r"10 of 10 samples failed; .* exceed the model's context of 66 tokens"):
            await batch.complete(watched, max_model_len=66)
    assert watched.asked == []
    record = await batch.complete(watched, max_model_len=200)
    assert record.num_samples == 10 and sorted(watched.asked) == sorted(batch.ids)


async def test_without_determinism_a_moody_engine_commits_as_it_goes(batch, tiny):
    moody = MoodyEngine(tiny)
    moody.fail_after = 7
    with pytest.raises(RuntimeError):
        await batch.complete(moody, deterministic=False)
    assert await batch.statuses() == {"failed": 4, "succeeded": 6}


# Real processes


class Child:
    """A process that completes a batch; see ``batch_child``."""

    def __init__(self, start_process, batch: Batch, model, **options) -> None:
        options["model_id"] = model.content_id
        folder = Path(batch.database.removeprefix("sqlite:///")).parent
        self.process: subprocess.Popen[str] = start_process(
            str(CHILD),
            str(folder),
            str(model.folder),
            batch.samples_id,
            json.dumps(options),
            stdin=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        self.lines += []
        for line in self.process.stdout:
            self.lines.append(line.split(maxsplit=1))

    def wait_for(self, word: str, count: int = 1) -> None:
        while len(self.said(word)) < count:
            assert self.process.poll() is None or self._reader.is_alive(), self.lines
            time.sleep(0.005)

    def said(self, word: str) -> list[str]:
        return [line[1].strip() if len(line) > 1 else "" for line in list(self.lines) if line[0] == word]

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        code = self.process.wait(timeout=LONG)
        self._reader.join()
        assert code == 0, self.lines

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()


def record_of(child: Child) -> dict:
    [record] = child.said("record")
    return json.loads(record)


async def test_two_processes_at_once_end_with_one_record_and_commit_nothing_twice(tmp_path, tiny, start_process):
    batch = make_batch(tmp_path, tiny, [f"sort {number} =" for number in range(300)])
    await batch.statuses()  # makes the database
    options = {"exclusive": False, "commit_size": 5, "wait_seconds": 0.05, "delay_seconds": 0.0005, "wait_for_go": True}
    children = [Child(start_process, batch, tiny, **options) for _ in range(2)]
    for child in children:
        child.wait_for("ready")
    for child in children:
        child.go()
    for child in children:
        child.finish()
    assert record_of(children[0]) == record_of(children[1])
    kept = [sample for child in children for sample in child.said("kept")]
    assert sorted(kept) == sorted(batch.ids)
    assert set((await batch.successes()).values()) == {1}


async def test_a_killed_batch_goes_on_where_it_was_and_ends_byte_equal(tmp_path, tiny, start_process):
    prompts = [f"sort {number} =" for number in range(120)]
    undisturbed = make_batch(tmp_path / "undisturbed", tiny, prompts)
    expected = await undisturbed.complete(ScriptedEngine(ScriptedBackend(), tiny))
    batch = make_batch(tmp_path / "killed", tiny, prompts)
    await batch.statuses()  # makes the database
    options = {"commit_size": 4, "wait_for_go": True}
    # The engine of a victim stops before all is done: it is killed at work, however late.
    started = [Child(start_process, batch, tiny, delay_seconds=0.005, hold_after=30, **options) for _ in range(3)]
    *victims, last = [*started, Child(start_process, batch, tiny, **options)]
    acknowledged: set[str] = set()
    for turn, child in enumerate(victims, start=1):
        child.wait_for("ready")
        child.go()
        child.wait_for("kept", 4 * turn)
        child.kill()
        assert not acknowledged & set(child.said("asked")), "an acknowledged sample was generated again"
        acknowledged |= set(child.said("kept"))
        assert child.said("record") == []
    last.go()
    last.finish()
    # The kill may fall between a commit and its acknowledgement, so a few more may be done than were acknowledged.
    assert acknowledged & set(last.said("asked")) == set()
    assert len(acknowledged) >= 20
    assert record_of(last) == expected.model_dump(mode="json")
    assert batch.objects.get_bytes(expected.completions) == undisturbed.objects.get_bytes(expected.completions)
    assert set((await batch.successes()).values()) == {1}
