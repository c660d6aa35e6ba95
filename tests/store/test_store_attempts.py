"""The contract of attempts: status propagation, retries, fencing, updates, the watchdog and workers."""

from __future__ import annotations

import asyncio

import pytest

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store import AttemptUpdate, EnqueueRolloutRequest, RolloutConfig, Span
from rollout_core.store.encoded_spans import encode_span

pytestmark = pytest.mark.asyncio


async def test_success_finishes_the_rollout(store, make, clock):
    rollout = await make.claimed(store)
    clock.advance(7)
    attempt = await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    assert (attempt.status, attempt.end_time) == ("succeeded", clock.now)
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.end_time, read.attempt) == ("succeeded", clock.now, attempt)


@pytest.mark.parametrize("outcome", ["failed", "timeout", "unresponsive"])
async def test_a_retryable_outcome_queues_again_until_attempts_are_used_up(store, make, outcome):
    rollout = await make.claimed(store, max_attempts=2, retry_condition=[outcome])
    await store.update_attempt(rollout.rollout_id, "latest", status=outcome)
    assert await make.status(store, rollout.rollout_id) == "requeuing"
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)
    await store.update_attempt(rollout.rollout_id, "latest", status=outcome)
    assert await make.status(store, rollout.rollout_id) == "failed"
    assert await store.dequeue_rollout() is None


@pytest.mark.parametrize("outcome", ["failed", "timeout", "unresponsive"])
async def test_an_outcome_outside_the_retry_condition_fails_the_rollout(store, make, outcome, clock):
    others = [status for status in ("failed", "timeout", "unresponsive") if status != outcome]
    rollout = await make.claimed(store, max_attempts=5, retry_condition=others)
    await store.update_attempt(rollout.rollout_id, "latest", status=outcome)
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.end_time) == ("failed", clock.now)
    assert read.attempt.end_time == (clock.now if outcome == "failed" else None)


async def test_an_older_attempt_changes_itself_but_not_the_rollout(store, make):
    first = await make.claimed(store)
    second = await store.start_attempt(first.rollout_id)
    changed = await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")
    assert changed.status == "failed"
    read = await store.get_rollout_by_id(first.rollout_id)
    assert (read.status, read.attempt.attempt_id) == ("preparing", second.attempt.attempt_id)


async def test_running_does_not_revive_a_cancelled_rollout(store, make):
    rollout = await make.claimed(store)
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    await store.update_attempt(rollout.rollout_id, "latest", status="running")
    assert await make.status(store, rollout.rollout_id) == "cancelled"


async def test_an_update_without_status_leaves_the_rollout_alone(store, make):
    rollout = await make.claimed(store)
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    attempt = await store.update_attempt(
        rollout.rollout_id, "latest", worker_id="w", last_heartbeat_time=5.0, metadata={"a": [1]}
    )
    assert (attempt.worker_id, attempt.last_heartbeat_time, attempt.metadata) == ("w", 5.0, {"a": [1]})
    assert (await store.query_attempts(rollout.rollout_id))[0] == attempt
    assert await make.status(store, rollout.rollout_id) == "cancelled"


async def test_an_empty_worker_id_takes_the_attempt_from_its_worker(store, make):
    rollout = await make.claimed(store, worker_id="w")
    assert (await store.get_worker_by_id("w")).status == "busy"
    attempt = await store.update_attempt(rollout.rollout_id, "latest", worker_id="")
    assert attempt.worker_id == "" and attempt.status == "preparing"
    assert (await store.query_attempts(rollout.rollout_id))[0] == attempt
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id, worker.current_attempt_id) == ("unknown", None, None)
    ended = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert (ended.worker_id, ended.status) == ("", "succeeded") and len(await store.query_workers()) == 1


async def test_fenced_success_of_the_holder_wins_once(store, make):
    rollout = await make.claimed(store)
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    first = await store.update_attempt(*ids, status="succeeded", metadata={"n": 1}, fenced=True)
    again = await store.update_attempt(*ids, status="succeeded", metadata={"n": 2}, fenced=True)
    assert again == first and again.metadata == {"n": 1}, "a repeated completion is acknowledged and changes nothing"
    with pytest.raises(Conflict, match="already succeeded"):
        await store.update_attempt(*ids, status="failed", fenced=True)


async def test_a_superseded_attempt_is_refused_at_the_fence(store, make):
    first = await make.claimed(store)
    second = await store.start_attempt(first.rollout_id)
    with pytest.raises(Conflict, match=f"superseded by {second.attempt.attempt_id}"):
        await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="succeeded", fenced=True)
    assert (await store.query_attempts(first.rollout_id))[0].status == "failed"


async def take_over_by_start(store, rollout):
    return await store.start_attempt(rollout.rollout_id)


async def take_over_by_dequeue(store, rollout):
    await store.update_rollout(rollout.rollout_id, status="requeuing")
    return await store.dequeue_rollout()


@pytest.mark.parametrize("take_over", [take_over_by_start, take_over_by_dequeue])
@pytest.mark.parametrize("running", [False, True])
async def test_a_newer_attempt_ends_the_one_under_way(store, make, clock, take_over, running):
    first = await make.claimed(store)
    if running:
        await store.add_span(make.span(first))
    clock.advance(3)
    second = await take_over(store, first)
    clock.advance(3)
    # What a stopped worker does when it goes on.
    with pytest.raises(Conflict, match="superseded"):
        await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="succeeded", fenced=True)
    await store.add_span(make.span(first, span_id="late"))
    [old, new] = await store.query_attempts(first.rollout_id)
    assert (old.status, old.end_time, old.last_heartbeat_time) == ("failed", clock.now - 3, clock.now)
    assert new == second.attempt
    assert await make.status(store, first.rollout_id) == "preparing", "what the old one does is its own affair"


@pytest.mark.parametrize("finish", ["attempt", "ending", "watchdog", "by hand"])
async def test_no_attempt_of_a_finished_rollout_is_under_way(store, make, clock, finish):
    first = await make.claimed(store, timeout_seconds=50, max_attempts=2, retry_condition=["unresponsive"])
    await store.update_attempt(first.rollout_id, "latest", status="unresponsive")
    second = await store.dequeue_rollout()
    await store.add_span(make.span(first))
    [old, _] = await store.query_attempts(first.rollout_id)
    assert old.status == "running", "a sign of life of an attempt that was silent"
    clock.advance(5)
    finished = clock.now
    if finish == "attempt":
        await store.update_attempt(second.rollout_id, second.attempt.attempt_id, status="succeeded", fenced=True)
    elif finish == "ending":
        await store.end_attempts([ending(first, span_id="refused"), ending(second)])
    elif finish == "watchdog":
        clock.advance(50)
        finished = clock.now
        await make.status(store, first.rollout_id)
    else:
        await store.update_rollout(first.rollout_id, status="cancelled")
    clock.advance(1)
    [old, _] = await store.query_attempts(first.rollout_id)
    assert (old.status, old.end_time) == ("failed", finished)
    await store.add_span(make.span(first, span_id="late"))
    [old, _] = await store.query_attempts(first.rollout_id)
    assert (old.status, old.end_time, old.last_heartbeat_time) == ("failed", finished, clock.now)


async def test_a_silent_attempt_is_not_revived_once_its_rollout_is_finished(store, make):
    first = await make.claimed(store, max_attempts=2, retry_condition=["unresponsive"])
    await store.update_attempt(first.rollout_id, "latest", status="unresponsive")
    second = await store.dequeue_rollout()
    await store.update_attempt(second.rollout_id, second.attempt.attempt_id, status="succeeded")
    await store.add_span(make.span(first))
    assert [attempt.status for attempt in await store.query_attempts(first.rollout_id)] == ["unresponsive", "succeeded"]


async def test_an_older_attempt_set_back_under_way_ends_though_the_latest_is_lost(store, make, clock):
    first = await make.claimed(store)
    second = await store.start_attempt(first.rollout_id)
    await store.update_attempt(first.rollout_id, second.attempt.attempt_id, status="unresponsive")
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="preparing")
    await store.start_attempt(first.rollout_id)
    statuses = [(attempt.status, attempt.end_time) for attempt in await store.query_attempts(first.rollout_id)]
    assert statuses == [("failed", clock.now), ("unresponsive", None), ("preparing", None)]


async def test_each_of_a_thousand_superseded_attempts_ends(store):
    ids = [f"r{n}" for n in range(1000)]
    await store.start_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id=rollout_id) for rollout_id in ids])
    await store.start_many_attempts(ids)
    assert await store.update_many_attempts(
        [AttemptUpdate(rollout_id=rollout_id, attempt_id="latest", status="succeeded") for rollout_id in ids]
    )
    for rollout_id in ids[::100]:
        assert [item.status for item in await store.query_attempts(rollout_id)] == ["failed", "succeeded"]


@pytest.mark.parametrize("retry", [[], ["timeout"]])
async def test_a_timed_out_attempt_is_refused_at_the_fence(store, make, clock, retry):
    rollout = await make.claimed(store, timeout_seconds=10, max_attempts=2, retry_condition=retry)
    clock.advance(11)
    with pytest.raises(Conflict, match="already timeout"):
        await store.update_attempt(rollout.rollout_id, "latest", status="succeeded", fenced=True)
    assert await make.status(store, rollout.rollout_id) == ("requeuing" if retry else "failed")


async def test_an_unresponsive_attempt_may_still_finish_until_somebody_takes_over(store, make, clock):
    rollout = await make.claimed(store, unresponsive_seconds=10, max_attempts=3, retry_condition=["unresponsive"])
    clock.advance(11)
    assert await make.status(store, rollout.rollout_id) == "requeuing"
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", fenced=True)
    assert await make.status(store, rollout.rollout_id) == "succeeded"
    assert await store.dequeue_rollout() is None


async def test_the_fence_refuses_changes_to_a_cancelled_rollout(store, make):
    rollout = await make.claimed(store)
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    with pytest.raises(Conflict, match="the rollout is already cancelled"):
        await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=1.0, fenced=True)


async def test_conflicts_of_a_batch_stand_in_their_place_and_the_others_apply(store, make):
    rollouts = [await store.start_rollout(n) for n in range(3)]
    await store.start_attempt(rollouts[1].rollout_id)
    outcomes = await store.update_many_attempts(
        [
            AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, status="succeeded")
            for rollout in rollouts
        ],
        fenced=True,
    )
    assert [isinstance(outcome, Conflict) for outcome in outcomes] == [False, True, False]
    statuses = [await make.status(store, rollout.rollout_id) for rollout in rollouts]
    assert statuses == ["succeeded", "preparing", "succeeded"]


async def test_updates_of_one_attempt_in_a_batch_apply_in_order(store, make):
    rollout = await make.claimed(store)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    outcomes = await store.update_many_attempts(
        [
            AttemptUpdate(**ids, status="running"),
            AttemptUpdate(**ids, status="succeeded"),
            AttemptUpdate(**ids, status="failed"),
        ],
        fenced=True,
    )
    assert isinstance(outcomes[2], Conflict)
    assert await make.status(store, rollout.rollout_id) == "succeeded"


def ending(rollout, status="succeeded", span_id=None):
    """The end of an attempt, with its last span."""
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    span = Span.from_attributes(**ids, sequence_id=1, span_id=span_id, name="outcome", attributes={"row": 7})
    return span, AttemptUpdate(**ids, status=status)


async def test_attempts_end_with_their_last_spans(store, make, clock):
    rollouts = [await store.start_rollout(n, worker_id="w") for n in range(3)]
    newer = await store.start_attempt(rollouts[1].rollout_id)
    clock.advance(3)
    outcomes = await store.end_attempts(
        [ending(rollouts[0]), ending(rollouts[1]), ending(rollouts[2], "failed"), ending(newer)]
    )
    assert isinstance(outcomes[1], Conflict)
    ended = [outcome for outcome in outcomes if not isinstance(outcome, Conflict)]
    assert [(item.status, item.end_time) for item in ended] == [
        ("succeeded", clock.now),
        ("failed", clock.now),
        ("succeeded", clock.now),
    ]
    for rollout, status in zip(rollouts, ["succeeded", "succeeded", "failed"], strict=True):
        read = await store.get_rollout_by_id(rollout.rollout_id)
        assert (read.status, read.end_time) == (status, clock.now)
        assert read.attempt in ended
        assert {span.attributes["row"] for span in await store.query_spans(rollout.rollout_id)} == {7}
    spans = await store.query_spans(rollouts[1].rollout_id)
    assert {span.attempt_id for span in spans} == {rollouts[1].attempt.attempt_id, newer.attempt.attempt_id}
    assert await store.get_next_span_sequence_id(newer.rollout_id, newer.attempt.attempt_id) == 2
    assert (await store.get_worker_by_id("w")).status == "idle"


@pytest.mark.parametrize("status", ["succeeded", "failed"])
@pytest.mark.parametrize("form", [encode_span, lambda span: span])
async def test_ends_that_are_all_alike_are_as_those_of_which_one_differs(store, make, clock, status, form):
    requests = [EnqueueRolloutRequest(rollout_id=f"s{n}", input=n) for n in range(12)]
    started = await store.start_many_rollouts(requests, worker_id="w")
    alike, mixed = started[:6], [*started[6:11], await store.start_attempt("s11", worker_id="w")]
    clock.advance(3)
    seen = []
    for group in (alike, mixed):
        ends = [(form(span), update) for span, update in (ending(rollout, status) for rollout in group)]
        seen.append(list(await store.end_attempts(ends)))
    for group, attempts in zip((alike, mixed), seen, strict=True):
        assert [attempt.attempt_id for attempt in attempts] == [rollout.attempt.attempt_id for rollout in group]
        rollouts = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in group]
        assert [rollout.attempt for rollout in rollouts] == attempts
        assert {(rollout.status, rollout.end_time) for rollout in rollouts} == {(status, clock.now)}
    common = {"status": status, "end_time": clock.now, "last_heartbeat_time": clock.now, "worker_id": "w"}
    fields = [attempt.model_dump() for attempts in seen for attempt in attempts]
    assert all(field.items() >= common.items() for field in fields)
    spans = [await store.query_spans(rollout.rollout_id) for rollout in started]
    assert [[span.attributes for span in found] for found in spans] == [[{"row": 7}]] * 12
    assert await store.get_next_span_sequence_id("s0", seen[0][0].attempt_id) == 2
    statistics = await store.statistics()
    assert (statistics["total_attempts"], statistics["total_spans"]) == (13, 12)
    assert (await store.query_rollouts(status_in=[status])).total == 12
    assert (await store.query_rollouts(status_in=["preparing", "running"])).total == 0
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id) == ("idle", None)
    finished = await store.wait_for_rollouts(rollout_ids=["s0", "s11"])
    assert {rollout.rollout_id for rollout in finished} == {"s0", "s11"}


async def test_who_waits_hears_of_ends_that_are_all_alike(store):
    requests = [EnqueueRolloutRequest(rollout_id=f"s{n}", input=n) for n in range(3)]
    started = await store.start_many_rollouts(requests, worker_id="w")
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=["s0", "s1", "s2"]))
    await asyncio.sleep(0.05)
    await store.end_attempts([ending(rollout) for rollout in started])
    assert {rollout.status for rollout in await waiting} == {"succeeded"}


async def test_last_spans_without_a_number_get_the_next_one(store):
    first, second = [await store.start_rollout(n) for n in range(2)]
    await store.get_many_span_sequence_ids([(first.rollout_id, first.attempt.attempt_id)] * 4)
    ends = [ending(rollout) for rollout in (first, second)]
    ends[0][0].sequence_id = ends[1][0].sequence_id = 0
    await store.end_attempts(ends)
    for rollout, number in ((first, 5), (second, 1)):
        [span] = await store.query_spans(rollout.rollout_id)
        assert span.sequence_id == number
        assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == number + 1


async def test_to_end_attempts_again_changes_nothing(store, make, clock):
    rollout = await make.claimed(store)
    end = ending(rollout)
    [first] = await store.end_attempts([end])
    clock.advance(3)
    assert list(await store.end_attempts([end])) == [first]
    assert len(await store.query_spans(rollout.rollout_id)) == 1
    with pytest.raises(NotFound, match="has no attempt at-nope"):
        unknown = rollout.model_copy(update={"attempt": first.model_copy(update={"attempt_id": "at-nope"})})
        await store.end_attempts([ending(rollout, span_id="other"), ending(unknown)])
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_ends_that_cannot_be_stored_leave_nothing_behind(store, make):
    one, other = [await store.start_rollout(n) for n in range(2)]
    [(span, update), (foreign, _)] = [ending(one), ending(other)]
    unfit = update.model_copy(update={"metadata": {"x": float("nan")}})
    for end, message in [((foreign, update), "give each end a span of its own attempt"), ((span, unfit), "NaN|nan")]:
        with pytest.raises(ConfigError, match=message):
            await store.end_attempts([end])
    assert not [*await store.query_spans(one.rollout_id), *await store.query_spans(other.rollout_id)]


async def test_a_failed_end_queues_again_where_the_config_says_so(store, make):
    rollout = await make.claimed(store, max_attempts=2, retry_condition=["failed"])
    await store.end_attempts([ending(rollout, "failed")])
    assert await make.status(store, rollout.rollout_id) == "requeuing"
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_an_unknown_attempt_fails_the_whole_batch(store, make):
    rollout = await make.claimed(store)
    queued = await store.enqueue_rollout(2)
    good = AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="latest", status="succeeded")
    for bad, message in [
        (("nope", "latest"), "rollout nope does not exist"),
        ((rollout.rollout_id, "at-nope"), "has no attempt at-nope"),
        ((queued.rollout_id, "latest"), "has no attempts yet"),
    ]:
        update = AttemptUpdate(rollout_id=bad[0], attempt_id=bad[1], status="failed")
        with pytest.raises(NotFound, match=message):
            await store.update_many_attempts([good, update])
    assert await make.status(store, rollout.rollout_id) == "preparing"


@pytest.mark.parametrize("field", ["status", "worker_id", "last_heartbeat_time", "metadata"])
async def test_none_is_refused_for_every_field_of_an_attempt(store, make, field):
    rollout = await make.claimed(store)
    with pytest.raises(ConfigError, match=f"{field} is None"):
        await store.update_attempt(rollout.rollout_id, "latest", **{field: None})


async def test_cancelling_ends_what_is_under_way_and_leaves_what_has_finished(store, make, clock):
    done = await make.claimed(store)
    await store.update_attempt(done.rollout_id, "latest", status="succeeded")
    working = await make.claimed(store, worker_id="w")
    silent = await make.claimed(store, unresponsive_seconds=10, max_attempts=3, retry_condition=["unresponsive"])
    clock.advance(11)
    queued = await store.enqueue_rollout(1)
    wanted = [queued, silent, working, done, working]
    found = await store.cancel_rollouts([rollout.rollout_id for rollout in wanted])
    assert [rollout.rollout_id for rollout in found] == [rollout.rollout_id for rollout in wanted]
    assert [rollout.status for rollout in found] == ["cancelled"] * 3 + ["succeeded", "cancelled"]
    assert [rollout.attempt.status for rollout in found[1:4]] == ["failed", "failed", "succeeded"]
    assert all(rollout.end_time is not None for rollout in found)
    assert (await store.get_worker_by_id("w")).status == "idle"
    assert await store.dequeue_rollout() is None
    with pytest.raises(NotFound, match="rollout nope"):
        await store.cancel_rollouts([queued.rollout_id, "nope"])
    assert list(await store.cancel_rollouts([])) == []


async def test_an_attempt_that_was_cancelled_stays_so_when_its_rollout_is_queued_again(store, make):
    rollout = await make.claimed(store, timeout_seconds=3)
    await store.cancel_rollouts([rollout.rollout_id])
    await store.update_rollout(rollout.rollout_id, status="queuing")
    with pytest.raises(Conflict, match="already failed"):
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", fenced=True)
    await store.add_span(make.span(rollout))
    assert await make.status(store, rollout.rollout_id) == "queuing", "a late span does not take it off the queue"
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_update_rollout_replaces_what_is_given_and_keeps_the_rest(store):
    rollout = await store.enqueue_rollout({"a": 1}, "train", "rs-1", RolloutConfig(max_attempts=2), {"m": 1, "n": 2})
    same = await store.update_rollout(rollout.rollout_id)
    assert same == rollout
    changed = await store.update_rollout(
        rollout.rollout_id, input=None, mode=None, resources_id=None, config=RolloutConfig(), metadata={"n": 3}
    )
    assert (changed.input, changed.mode, changed.resources_id) == (None, None, None)
    assert (changed.config, changed.metadata, changed.status) == (RolloutConfig(), {"n": 3}, "queuing")
    assert (await store.update_rollout(rollout.rollout_id, metadata=None)).metadata is None
    assert await store.get_rollout_by_id(rollout.rollout_id) == changed.model_copy(update={"metadata": None})


@pytest.mark.parametrize(
    "bad", [{"status": None}, {"status": "timeout"}, {"config": None}, {"mode": "x"}, {"metadata": 3}]
)
async def test_update_rollout_refuses_what_a_rollout_cannot_be(store, bad):
    rollout = await store.enqueue_rollout(1)
    with pytest.raises(ConfigError, match=next(iter(bad))):
        await store.update_rollout(rollout.rollout_id, **bad)
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_update_of_an_unknown_rollout_is_a_value_error(store):
    with pytest.raises(ValueError, match="rollout nope does not exist"):
        await store.update_rollout("nope", status="cancelled")


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled"])
async def test_a_terminal_status_by_hand_sets_the_end_time(store, clock, status):
    rollout = await store.enqueue_rollout(1)
    clock.advance(5)
    finished = await store.update_rollout(rollout.rollout_id, status=status)
    assert (finished.status, finished.end_time) == (status, clock.now)
    assert await store.dequeue_rollout() is None


# The watchdog


async def test_timeout_counts_from_the_start_and_is_strict(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=10)
    clock.advance(6)
    await store.add_span(make.span(rollout))
    clock.advance(4)
    assert await make.status(store, rollout.rollout_id) == "running", "exactly at the limit is still in time"
    clock.advance(0.001)
    assert await make.status(store, rollout.rollout_id) == "failed"
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert (attempt.status, attempt.end_time) == ("timeout", None)


async def test_silence_counts_from_the_last_heartbeat_or_else_the_start(store, make, clock):
    silent = await make.claimed(store, unresponsive_seconds=10)
    lively = await make.claimed(store, unresponsive_seconds=10)
    clock.advance(8)
    await store.add_span(make.span(lively))
    clock.advance(3)
    assert await make.status(store, silent.rollout_id) == "failed"
    assert (await store.get_latest_attempt(silent.rollout_id)).status == "unresponsive"
    assert await make.status(store, lively.rollout_id) == "running"
    clock.advance(7)
    assert await make.status(store, lively.rollout_id) == "running"
    clock.advance(0.5)
    assert await make.status(store, lively.rollout_id) == "failed"


async def test_a_timeout_wins_over_silence(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=10, unresponsive_seconds=5)
    clock.advance(11)
    assert (await store.get_latest_attempt(rollout.rollout_id)).status == "timeout"


async def test_explicit_heartbeats_count_and_may_go_back_in_time(store, make, clock):
    rollout = await make.claimed(store, unresponsive_seconds=10)
    clock.advance(9)
    await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=clock.now)
    clock.advance(9)
    assert await make.status(store, rollout.rollout_id) == "preparing"
    await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=clock.now - 20)
    assert await make.status(store, rollout.rollout_id) == "failed"


async def test_a_stricter_config_applies_to_the_attempt_under_way(store, make, clock):
    rollout = await make.claimed(store)
    clock.advance(100)
    assert await make.status(store, rollout.rollout_id) == "preparing"
    await store.update_rollout(rollout.rollout_id, config=RolloutConfig(timeout_seconds=50))
    assert await make.status(store, rollout.rollout_id) == "failed"


async def test_the_watchdog_leaves_finished_and_queued_rollouts_alone(store, make, clock):
    done = await make.claimed(store, timeout_seconds=10)
    await store.update_attempt(done.rollout_id, "latest", status="succeeded")
    cancelled = await make.claimed(store, timeout_seconds=10)
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    queued = await store.enqueue_rollout(1, config=RolloutConfig(timeout_seconds=10))
    clock.advance(1000)
    statuses = [await make.status(store, rollout.rollout_id) for rollout in (done, cancelled, queued)]
    assert statuses == ["succeeded", "cancelled", "queuing"]
    assert (await store.get_latest_attempt(cancelled.rollout_id)).status == "preparing"


async def test_only_the_latest_attempt_is_watched(store, make, clock):
    first = await make.claimed(store, timeout_seconds=10)
    clock.advance(8)
    await store.start_attempt(first.rollout_id)
    clock.advance(8)
    assert await make.status(store, first.rollout_id) == "preparing"
    assert (await store.query_attempts(first.rollout_id))[0].status == "failed", "superseded, not timed out"


async def test_a_lost_attempt_is_offered_again_by_the_dequeue_that_notices(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=10, max_attempts=2, retry_condition=["timeout"])
    clock.advance(11)
    again = await store.dequeue_rollout()
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_thousands_of_lost_attempts_are_all_found(store, make, clock):
    config = RolloutConfig(timeout_seconds=10, max_attempts=2, retry_condition=["timeout"])
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(2500)])
    assert len(await store.dequeue_many_rollouts(limit=2500)) == 2500
    clock.advance(11)
    again = []
    while claimed := await store.dequeue_many_rollouts(limit=2500):
        again += claimed
    assert sorted(rollout.input for rollout in again) == list(range(2500))


async def test_spans_sequence_ids_and_resources_do_not_wake_the_watchdog(store, make, clock):
    rollout = await make.claimed(store, unresponsive_seconds=10)
    clock.advance(11)
    await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id)
    await store.get_latest_resources()
    await store.query_resources()
    await store.add_span(make.span(rollout))
    assert await make.status(store, rollout.rollout_id) == "running", "the span came before anybody looked"


async def test_the_watchdog_runs_at_once_and_then_once_per_debounce(make_store, make, clock):
    store = await make_store(scan_debounce_seconds=10)
    first = await make.claimed(store, timeout_seconds=1)
    clock.advance(5)
    assert await make.status(store, first.rollout_id) == "preparing", "looked 5 s ago, at the first call"
    clock.advance(5)
    assert await make.status(store, first.rollout_id) == "failed"


# Workers


async def test_a_worker_follows_its_attempts(store, make, clock):
    rollout = await make.claimed(store, worker_id="w")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.last_busy_time, worker.last_dequeue_time) == ("busy", clock.now, clock.now)
    assert (worker.current_rollout_id, worker.current_attempt_id) == (rollout.rollout_id, rollout.attempt.attempt_id)
    clock.advance(5)
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.last_idle_time, worker.current_attempt_id) == ("idle", clock.now, None)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("preparing", "busy"),
        ("running", "busy"),
        ("succeeded", "idle"),
        ("failed", "idle"),
        ("timeout", "unknown"),
        ("unresponsive", "unknown"),
    ],
)
async def test_the_worker_named_in_an_update_gets_the_matching_status(store, make, status, expected):
    rollout = await make.claimed(store)
    await store.update_attempt(rollout.rollout_id, "latest", worker_id="w", status=status)
    assert (await store.get_worker_by_id("w")).status == expected


async def test_the_watchdog_makes_a_lost_worker_unknown(store, make, clock):
    await make.claimed(store, worker_id="w", timeout_seconds=10)
    clock.advance(11)
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_attempt_id) == ("unknown", None)


async def test_an_empty_dequeue_makes_the_worker_idle_from_the_first_time_on(store, clock):
    await store.dequeue_rollout("w")
    since = clock.now
    clock.advance(5)
    await store.dequeue_rollout("w")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.last_idle_time, worker.last_dequeue_time) == ("idle", since, clock.now)


async def test_a_worker_heartbeat_touches_nothing_but_heartbeat_and_stats(store, make, clock):
    assert (await store.update_worker("new")).status == "unknown"
    await make.claimed(store, worker_id="w")
    before = await store.get_worker_by_id("w")
    clock.advance(5)
    after = await store.update_worker("w", {"cpu": 0.5})
    assert after == before.model_copy(update={"last_heartbeat_time": clock.now, "heartbeat_stats": {"cpu": 0.5}})
    assert (await store.update_worker("w")).heartbeat_stats == {"cpu": 0.5}
    with pytest.raises(ConfigError, match="heartbeat_stats is None"):
        await store.update_worker("w", None)


async def test_a_batch_dequeue_shows_its_worker_on_the_last_rollout(store):
    for n in range(3):
        await store.enqueue_rollout(n)
    claimed = await store.dequeue_many_rollouts(limit=3, worker_id="w")
    assert (await store.get_worker_by_id("w")).current_rollout_id == claimed[-1].rollout_id
