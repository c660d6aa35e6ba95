"""The contract of the queue: enqueue, dequeue and start."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store import (
    LLM,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
)
from tests.store.conftest import SHARED

pytestmark = pytest.mark.asyncio


async def test_enqueued_rollout_has_the_documented_defaults(store, clock):
    rollout = await store.enqueue_rollout({"prompt": "hi"})
    assert rollout.rollout_id.startswith("ro-")
    assert rollout == Rollout(
        rollout_id=rollout.rollout_id, input={"prompt": "hi"}, start_time=clock.now, status="queuing", metadata={}
    )
    assert rollout.config == RolloutConfig(
        timeout_seconds=None, unresponsive_seconds=None, max_attempts=1, retry_condition=[]
    )


@pytest.mark.parametrize("limit", [10**6, 2**63 - 1, 10**20])
async def test_a_dequeue_may_ask_for_more_than_there_ever_is(store, limit):
    assert len(await store.dequeue_many_rollouts(limit=limit)) == 0
    for n in range(3):
        await store.enqueue_rollout(n)
    assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=limit)] == [0, 1, 2]


async def test_everything_given_at_enqueue_comes_back(store):
    config = RolloutConfig(timeout_seconds=5.5, unresponsive_seconds=2, max_attempts=3, retry_condition=["failed"])
    given = await store.enqueue_rollout([1, None, "é\u0000"], "val", "rs-x", config, {"k": [1.5]})
    read = await store.get_rollout_by_id(given.rollout_id)
    assert read == given
    assert (read.input, read.mode, read.resources_id) == ([1, None, "é\u0000"], "val", "rs-x")
    assert (read.config, read.metadata) == (config, {"k": [1.5]})


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 2**80 + 1, -1.5e-300, {"a": {"b": [[]]}}])
async def test_any_json_value_can_be_an_input(store, value):
    rollout = await store.enqueue_rollout(value)
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert read.input == value and type(read.input) is type(value)


async def test_scalars_of_numpy_are_the_numbers_that_they_equal(store):
    given = {"i": np.int64(3), "f": np.float32(0.1), "b": np.bool_(True), "deep": [np.uint8(7), np.float64(0.5)]}
    queued = await store.enqueue_rollout(given)
    found = (await store.get_rollout_by_id(queued.rollout_id)).input
    assert found == given and [type(found[name]) for name in "ifb"] == [int, float, bool]
    for refused in (np.array([1.0]), np.float32("nan"), np.datetime64("2026-01-01")):
        with pytest.raises(ConfigError, match="input"):
            await store.enqueue_rollout({"x": refused})


async def test_later_changes_to_what_was_given_do_not_reach_the_store(store):
    value, metadata, config = {"n": 1}, {"m": 1}, RolloutConfig()
    rollout = await store.enqueue_rollout(value, config=config, metadata=metadata)
    value["n"], metadata["m"], config.max_attempts = 2, 2, 9
    rollout.input["n"] = 3
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.input, read.metadata, read.config.max_attempts) == ({"n": 1}, {"m": 1}, 1)


async def test_missing_resources_resolve_to_the_latest_at_enqueue(store):
    assert (await store.enqueue_rollout(1)).resources_id is None
    first = await store.add_resources({"m": LLM(endpoint="http://a", model="m")})
    rollout = await store.enqueue_rollout(1)
    await store.add_resources({"m": LLM(endpoint="http://b", model="m")})
    assert (await store.get_rollout_by_id(rollout.rollout_id)).resources_id == first.resources_id


async def test_unknown_resources_are_accepted_at_enqueue(store):
    assert (await store.enqueue_rollout(1, resources_id="rs-nowhere")).resources_id == "rs-nowhere"


async def test_enqueue_returns_rollouts_in_request_order(store):
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(500)])
    assert [rollout.input for rollout in rollouts] == list(range(500))
    assert len({rollout.rollout_id for rollout in rollouts}) == 500


async def test_an_empty_batch_is_nothing(store):
    assert list(await store.enqueue_many_rollouts([])) == []
    assert list(await store.start_many_attempts([])) == []
    assert list(await store.update_many_attempts([])) == []
    assert list(await store.add_many_spans([])) == []
    assert list(await store.get_many_span_sequence_ids([])) == []
    assert list(await store.query_many_spans([])) == []
    assert await store.dequeue_rollout() is None


async def test_enqueueing_a_given_id_twice_is_one_rollout(store):
    first = await store.enqueue_rollout({"a": 1, "b": 2}, rollout_id="sample-1")
    again = await store.enqueue_rollout({"b": 2, "a": 1}, rollout_id="sample-1", mode="train")
    assert again == first and again.mode is None
    assert len(await store.query_rollouts()) == 1
    assert await store.dequeue_rollout() is not None
    assert await store.dequeue_rollout() is None


async def test_enqueueing_a_finished_rollout_again_leaves_it_finished(store):
    await store.enqueue_rollout(1, rollout_id="sample-1")
    await store.dequeue_rollout()
    await store.update_attempt("sample-1", "latest", status="succeeded")
    again = await store.enqueue_rollout(1, rollout_id="sample-1")
    assert again.status == "succeeded" and isinstance(again, AttemptedRollout)
    assert await store.dequeue_rollout() is None


async def test_one_id_with_two_inputs_is_a_conflict_and_queues_nothing(store):
    await store.enqueue_rollout(1, rollout_id="a")
    with pytest.raises(Conflict, match="rollout a exists with another input"):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=5, rollout_id="b"), EnqueueRolloutRequest(input=2, rollout_id="a")]
        )
    with pytest.raises(Conflict, match="rollout c exists"):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=1, rollout_id="c"), EnqueueRolloutRequest(input=2, rollout_id="c")]
        )
    for almost in (True, 1.0, "1"):
        with pytest.raises(Conflict):
            await store.enqueue_rollout(almost, rollout_id="a")
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == ["a"]


async def test_an_id_twice_in_one_batch_is_one_rollout(store):
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id="a")] * 3)
    assert [rollout.rollout_id for rollout in rollouts] == ["a"] * 3
    assert len(await store.dequeue_many_rollouts(limit=9)) == 1


async def test_dequeue_is_first_in_first_out(store):
    for n in range(5):
        await store.enqueue_rollout(n)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5, 10)])
    one = await store.dequeue_rollout()
    rest = await store.dequeue_many_rollouts(limit=100)
    assert [one.input, *[rollout.input for rollout in rest]] == list(range(10))


async def test_dequeue_begins_an_attempt(store, clock):
    await store.enqueue_rollout(1)
    clock.advance(3)
    claimed = await store.dequeue_rollout("w")
    attempt = claimed.attempt
    assert claimed.status == "preparing"
    assert attempt.attempt_id.startswith("at-")
    assert (attempt.rollout_id, attempt.sequence_id, attempt.status) == (claimed.rollout_id, 1, "preparing")
    assert (attempt.start_time, attempt.worker_id, attempt.last_heartbeat_time) == (clock.now, "w", None)
    assert await store.get_rollout_by_id(claimed.rollout_id) == claimed


@pytest.mark.parametrize("limit", [0, -1])
async def test_dequeue_without_a_positive_limit_claims_nothing(store, limit):
    await store.enqueue_rollout(1)
    assert list(await store.dequeue_many_rollouts(limit=limit)) == []
    assert await store.dequeue_rollout() is not None


async def test_a_retry_waits_behind_what_was_queued_before(store, make):
    first = await make.claimed(store, max_attempts=2, retry_condition=["failed"])
    second = await store.enqueue_rollout("second")
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")
    third = await store.enqueue_rollout("third")
    claimed = await store.dequeue_many_rollouts(limit=9)
    assert [rollout.rollout_id for rollout in claimed] == [second.rollout_id, first.rollout_id, third.rollout_id]
    assert claimed[1].attempt.sequence_id == 2


async def test_rollouts_that_left_the_queue_are_skipped(store):
    cancelled, started, kept = [await store.enqueue_rollout(n) for n in range(3)]
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.start_attempt(started.rollout_id)
    assert (await store.dequeue_rollout()).rollout_id == kept.rollout_id
    assert await store.dequeue_rollout() is None


async def test_a_finished_rollout_can_be_queued_again_by_hand(store, make):
    rollout = await make.claimed(store)
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    requeued = await store.update_rollout(rollout.rollout_id, status="requeuing")
    assert (requeued.status, requeued.end_time) == ("requeuing", None)
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_requeuing_what_is_queued_keeps_its_place_and_queues_it_once(store):
    first = await store.enqueue_rollout(1)
    await store.enqueue_rollout(2)
    await store.update_rollout(first.rollout_id, status="requeuing")
    await store.update_rollout(first.rollout_id, status="queuing")
    assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == [1, 2]


async def test_start_rollout_never_passes_through_the_queue(store, clock):
    started = await store.start_rollout({"x": 1}, mode="train", worker_id="w", metadata={"a": 1})
    assert (started.status, started.attempt.sequence_id, started.attempt.worker_id) == ("preparing", 1, "w")
    assert started.start_time == started.attempt.start_time == clock.now
    assert await store.dequeue_rollout() is None
    assert (await store.get_worker_by_id("w")).current_attempt_id == started.attempt.attempt_id


async def test_start_attempt_ignores_max_attempts_and_supersedes(store, make, clock):
    first = await make.claimed(store, max_attempts=1)
    second = await store.start_attempt(first.rollout_id, "w2")
    assert second.attempt.sequence_id == 2
    assert (await store.get_latest_attempt(first.rollout_id)).attempt_id == second.attempt.attempt_id
    ended = {"status": "failed", "end_time": clock.now}
    assert (await store.query_attempts(first.rollout_id))[0] == first.attempt.model_copy(update=ended)


async def test_start_attempt_reopens_a_finished_rollout(store, make):
    first = await make.claimed(store)
    await store.update_attempt(first.rollout_id, "latest", status="succeeded")
    again = await store.start_attempt(first.rollout_id)
    assert (again.status, again.end_time) == ("preparing", None)


async def test_start_many_attempts_claims_these_rollouts_in_request_order(store):
    ids = [f"s{n}" for n in range(300)]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=id, rollout_id=id) for id in ids])
    wanted = ids[200:100:-1]
    started = await store.start_many_attempts(wanted, worker_id="w")
    assert [rollout.rollout_id for rollout in started] == wanted == [rollout.input for rollout in started]
    assert all(rollout.attempt.worker_id == "w" for rollout in started)
    rest = await store.dequeue_many_rollouts(limit=1000)
    assert [rollout.rollout_id for rollout in rest] == [id for id in ids if id not in set(wanted)]


async def test_start_many_attempts_with_an_id_twice_starts_one_attempt(store):
    await store.enqueue_rollout(1, rollout_id="a")
    started = await store.start_many_attempts(["a", "a"])
    assert started[0] == started[1] and started[0].attempt.sequence_id == 1


async def test_start_many_attempts_of_an_unknown_rollout_starts_none(store):
    await store.enqueue_rollout(1, rollout_id="a")
    with pytest.raises(NotFound, match=r"rollout b \(and 1 others"):
        await store.start_many_attempts(["a", "b", "c"])
    assert await store.get_latest_attempt("a") is None
    with pytest.raises(ValueError):
        await store.start_attempt("nope")


async def test_concurrent_dequeues_never_share_a_rollout(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(200)])

    async def drain() -> list[int]:
        mine = []
        while (claimed := await store.dequeue_rollout()) is not None:
            mine.append(claimed.input)
        return mine

    shares = await asyncio.gather(*[drain() for _ in range(16)])
    assert sorted(n for share in shares for n in share) == list(range(200))
    assert all(share == sorted(share) for share in shares)


async def test_concurrent_enqueues_of_one_id_make_one_rollout(store):
    rollouts = await asyncio.gather(*[store.enqueue_rollout(1, rollout_id="a") for _ in range(20)])
    assert all(rollout == rollouts[0] for rollout in rollouts)
    assert len(await store.dequeue_many_rollouts(limit=9)) == 1


async def test_a_cancelled_dequeue_loses_no_rollout(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(60)])
    received = []
    for n in range(60):
        task = asyncio.create_task(store.dequeue_rollout("w"))
        for _ in range(n % 4):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * (n % 7))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            received.append((await task).input)
    rest = [rollout.input for rollout in await store.dequeue_many_rollouts(limit=100)]
    assert sorted(received + rest) == list(range(60))
    assert rest == sorted(rest), "a claim that was taken back keeps its place"
    assert all(rollout.attempt.sequence_id == 1 for rollout in await store.query_rollouts())


async def test_a_batch_of_ten_thousand_goes_round_within_one_call_each(store):
    ids = [f"{n:064x}" for n in range(10_000)]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, rollout_id=id) for n, id in enumerate(ids)])
    started = await store.start_many_attempts(ids)
    updates = [
        AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status="succeeded")
        for rollout in started
    ]
    assert {attempt.status for attempt in await store.update_many_attempts(updates, fenced=True)} == {"succeeded"}
    found = await store.query_rollouts(rollout_id_in=ids, status_in=["succeeded"])
    assert [rollout.rollout_id for rollout in found] == ids


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "training"},
        {"config": {"max_attempts": 0}},
        {"config": {"timeout_seconds": float("nan")}},
        {"config": {"retry_condition": ["cancelled"]}},
        {"metadata": [1]},
        {"rollout_id": ""},
        {"rollout_id": 7},
        {"resources_id": 7},
    ],
)
async def test_bad_fields_are_refused_by_name(store, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        await store.enqueue_rollout(1, **bad)
    assert len(await store.query_rollouts()) == 0


async def test_a_workers_id_is_text_and_nothing_is_started_for_another(store, make):
    rollout = await store.enqueue_rollout(1)
    for start in (
        lambda: store.start_many_attempts([rollout.rollout_id], worker_id=5),
        lambda: store.start_rollout(2, worker_id=5),
        lambda: store.start_many_rollouts([EnqueueRolloutRequest(rollout_id="other", input=3)], worker_id=5),
        lambda: store.dequeue_rollout(worker_id=5),
    ):
        with pytest.raises(ConfigError):
            await start()
    assert (await store.query_rollouts()).total == 1
    assert await make.status(store, rollout.rollout_id) == "queuing"


async def test_many_rollouts_start_at_once_and_are_never_in_the_queue(store, make, clock):
    requests = [EnqueueRolloutRequest(rollout_id=f"s{n}", input={"n": n}, metadata={"m": n}) for n in range(300)]
    started = await store.start_many_rollouts(requests, worker_id="w")
    assert [(item.rollout_id, item.input, item.metadata) for item in started] == [
        (f"s{n}", {"n": n}, {"m": n}) for n in range(300)
    ]
    assert {(item.status, item.attempt.sequence_id, item.attempt.worker_id) for item in started} == {
        ("preparing", 1, "w")
    }
    assert len({item.attempt.attempt_id for item in started}) == 300
    assert await store.dequeue_rollout() is None
    read = await store.query_rollouts(rollout_id_in=["s7"])
    assert list(read) == [started[7]] and started[7].start_time == clock.now
    assert (await store.get_worker_by_id("w")).current_attempt_id == started[-1].attempt.attempt_id
    statistics = await store.statistics()
    assert (statistics["total_rollouts"], statistics["total_attempts"]) == (300, 300)


async def test_first_attempts_are_those_of_rollouts_that_are_started(store, make):
    queued = await store.enqueue_rollout(2)
    requests = [
        EnqueueRolloutRequest(rollout_id=rollout_id, input=n)
        for rollout_id, n in (("new", 1), (queued.rollout_id, 2), ("new", 1))
    ]
    first, second, again = await store.start_first_attempts(requests, worker_id="w")
    assert again is None
    for attempt in (first, second):
        read = await store.get_rollout_by_id(attempt.rollout_id)
        assert (read.status, read.attempt) == ("preparing", attempt) and attempt.worker_id == "w"
    assert await store.dequeue_rollout() is None


async def test_rollouts_that_were_attempted_are_not_started_again(store, make):
    done = await store.start_rollout(1)
    queued = await store.enqueue_rollout(2)
    requests = [
        EnqueueRolloutRequest(rollout_id=rollout_id, input=n)
        for rollout_id, n in ((done.rollout_id, 1), (queued.rollout_id, 2), ("new", 3), ("new", 3))
    ]
    first, second, third, again = await store.start_many_rollouts(requests)
    assert first is None
    assert (second.rollout_id, second.attempt.sequence_id, third.rollout_id) == (queued.rollout_id, 1, "new")
    assert again is None  # it has had an attempt, this call's
    assert (await store.get_rollout_by_id(done.rollout_id)).attempt == done.attempt
    assert await store.dequeue_rollout() is None
    assert list(await store.start_many_rollouts(requests)) == [None] * 4
    with pytest.raises(Conflict, match="exists with another input"):
        await store.start_many_rollouts([EnqueueRolloutRequest(rollout_id="new", input=4)])
    assert list(await store.start_many_rollouts([])) == []


@pytest.mark.parametrize("num_queued", [0, 1_500, 2_000])
async def test_rollouts_that_two_callers_start_at_once_are_given_to_one(store, num_queued):
    await start_at_once(store, store, num_queued)


@pytest.mark.parametrize("num_queued", [0, 1_500, 2_000])
@pytest.mark.parametrize("make_store", SHARED, indirect=True)
async def test_rollouts_that_two_stores_of_one_database_start_at_once_are_given_to_one(make_store, num_queued):
    await start_at_once(await make_store(), await make_store(), num_queued)


async def start_at_once(store, other, num_queued):
    requests = [EnqueueRolloutRequest(rollout_id=f"s{n}", input=n) for n in range(2_000)]
    await store.enqueue_many_rollouts(requests[:num_queued])
    await other.statistics()  # connects, so that both begin at the same time
    first, second = await asyncio.gather(
        store.start_many_rollouts(requests, worker_id="a"), other.start_many_rollouts(requests, worker_id="b")
    )
    given = [(rollout, "a") for rollout in first if rollout] + [(rollout, "b") for rollout in second if rollout]
    assert sorted(rollout.rollout_id for rollout, _ in given) == sorted(request.rollout_id for request in requests)
    assert all((item.attempt.sequence_id, item.attempt.worker_id) == (1, worker) for item, worker in given)
    assert (await store.statistics())["total_attempts"] == len(requests)


async def test_a_started_rollout_is_watched_and_tried_again(store, make, clock):
    config = RolloutConfig(timeout_seconds=5, max_attempts=2, retry_condition=["timeout"])
    [rollout] = await store.start_many_rollouts([EnqueueRolloutRequest(rollout_id="r", input=1, config=config)])
    clock.advance(6)
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_released_claims_are_as_if_they_had_not_been_made(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, rollout_id=n) for n in "abc"])
    claimed = await store.dequeue_many_rollouts(limit=2, worker_id="w")
    await store.release_rollouts(claimed)
    for name in "ab":
        rollout = await store.get_rollout_by_id(name)
        assert rollout.status == "queuing" and not isinstance(rollout, AttemptedRollout)
        assert len(await store.query_attempts(name)) == 0
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id) == ("idle", None)
    again = await store.dequeue_many_rollouts(limit=9)
    assert [(rollout.rollout_id, rollout.attempt.sequence_id) for rollout in again] == [("a", 1), ("b", 1), ("c", 1)]


async def test_a_released_retry_waits_as_a_retry_at_the_head(store, make, clock):
    rollout = await make.claimed(store, max_attempts=2, retry_condition=["failed"])
    await store.enqueue_rollout("behind")
    await store.update_attempt(rollout.rollout_id, "latest", status="failed")
    await store.update_rollout((await store.dequeue_rollout()).rollout_id, status="cancelled")
    retry = await store.dequeue_rollout()
    await store.enqueue_rollout("behind")
    await store.release_rollouts([retry])
    waiting = await store.get_rollout_by_id(rollout.rollout_id)
    assert (waiting.status, waiting.attempt.sequence_id, waiting.attempt.status) == ("requeuing", 1, "failed")
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_releasing_an_unknown_rollout_releases_none(store, make):
    claimed = await make.claimed(store)
    with pytest.raises(NotFound):
        await store.release_rollouts([claimed, renamed(claimed)])
    assert await make.status(store, claimed.rollout_id) == "preparing"


async def test_claims_that_were_touched_are_not_released(store, make):
    claimed = await make.claimed(store)
    await store.add_span(make.span(claimed))
    await store.release_rollouts([claimed])
    assert await make.status(store, claimed.rollout_id) == "running"


def renamed(claimed: AttemptedRollout) -> AttemptedRollout:
    attempt = claimed.attempt.model_copy(update={"rollout_id": "nope"})
    return claimed.model_copy(update={"rollout_id": "nope", "attempt": attempt})


async def test_a_task_is_claimed_with_the_resources_that_it_names(store):
    assert await store.claim_task("claim-0", worker_id="w") is None
    older = await store.add_resources({"llm": LLM(endpoint="http://localhost:1/v1", model="older")})
    named = await store.enqueue_rollout(1, resources_id=older.resources_id)
    unknown = await store.enqueue_rollout(2, resources_id="rs-nonesuch")
    found = [await store.claim_task(f"claim-{number}", worker_id="w") for number in (1, 2)]
    assert [claimed.rollout.rollout_id for claimed in found] == [named.rollout_id, unknown.rollout_id]
    assert [claimed.rollout.attempt.worker_id for claimed in found] == ["w", "w"]
    assert [claimed.resources for claimed in found] == [older, None]
    assert await store.claim_task("claim-3", worker_id="w") is None
