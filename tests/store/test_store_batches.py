"""The contract of batches that name one thing several times, also with contradictions: as the single forms would do."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rollout_core.base.errors import ConfigError, Conflict, NotFound
from rollout_core.store import (
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStore,
    RolloutConfig,
    Span,
    SqlLightningStore,
)
from rollout_core.store.encoded_spans import encode_span


def request(rollout_id: str, input: Any = 1, **fields: Any) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(input=input, rollout_id=rollout_id, **fields)


def ids(rollout) -> dict[str, str]:
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


def ending(rollout, status, span_id):
    span = Span.from_attributes(**ids(rollout), sequence_id=1, span_id=span_id, name=span_id, attributes={})
    return span, AttemptUpdate(**ids(rollout), status=status)


# Each batch form, over every store


async def test_a_rollout_enqueued_twice_in_a_batch_is_queued_once_as_it_came_first(store):
    batch = [request("a"), request("a", mode="val", metadata={"n": 2}), request("b", 2), request("a")]
    first, *others = await store.enqueue_many_rollouts(batch)
    assert (first.mode, first.metadata) == (None, {})
    assert [rollout.rollout_id for rollout in others] == ["a", "b", "a"] and others[0] == others[2] == first
    assert [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)] == ["a", "b"]


@pytest.mark.parametrize("form", ["enqueue_many_rollouts", "start_many_rollouts"])
async def test_two_inputs_of_one_rollout_in_a_batch_are_refused_and_nothing_is_stored(store, form):
    with pytest.raises(Conflict, match="another input"):
        await getattr(store, form)([request("b"), request("a", 1), request("a", 2)])
    assert len(await store.query_rollouts()) == 0 and await store.dequeue_many_rollouts(limit=9) == []


async def test_a_rollout_started_twice_in_a_batch_is_started_once(store):
    first, again, other = await store.start_many_rollouts([request("a"), request("a"), request("b")], worker_id="w")
    assert again is None and (first.rollout_id, other.rollout_id) == ("a", "b")
    assert await store.start_many_rollouts([request("b"), request("b")]) == [None, None]
    [one, same] = await store.start_many_attempts(["a", "a"], worker_id="w")
    assert one == same and one.attempt.sequence_id == 2
    assert (await store.get_worker_by_id("w")).current_attempt_id == one.attempt.attempt_id


async def test_a_rollout_put_back_twice_is_dequeued_once(store):
    await store.enqueue_many_rollouts([request("a"), request("b")])
    claimed = await store.dequeue_many_rollouts(limit=2)
    for _ in range(2):
        await store.update_rollout("a", status="requeuing")
    assert [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)] == ["a"]
    await store.release_rollouts([claimed[1], claimed[1]])
    assert [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)] == ["b"]


async def test_of_spans_with_one_id_in_a_batch_the_first_is_stored(store, make):
    rollout = await store.start_rollout(1)
    first, same, contrary = [make.span(rollout, n, span_id="s", name=f"{n}") for n in (2, 2, 7)]
    other = make.span(rollout, 3, span_id="o")
    assert list(await store.add_many_spans([first, same, other, contrary])) == [first, other]
    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["2", other.name]
    assert await store.get_next_span_sequence_id(**ids(rollout)) == 8, "also a span that is left out had its number"
    found = await store.query_many_spans([rollout.rollout_id, "nope", rollout.rollout_id])
    assert [span.span_id for span in found] == ["s", "o"]


async def test_sequence_ids_of_one_rollout_in_a_batch_go_up(store):
    await store.enqueue_many_rollouts([request("a"), request("b")])
    pairs = [("a", "x"), ("b", "x"), ("a", "x"), ("a", "y"), ("b", "x")]
    assert list(await store.get_many_span_sequence_ids(pairs)) == [1, 1, 2, 3, 2]
    with pytest.raises(NotFound):
        await store.get_many_span_sequence_ids([("a", "x"), ("nope", "x"), ("a", "x")])
    assert list(await store.get_many_span_sequence_ids(pairs[:1])) == [4]


@pytest.mark.parametrize("fenced", [False, True])
async def test_contradictory_updates_of_one_attempt_each_yield_what_they_left(store, make, clock, fenced):
    rollout = await make.claimed(store)
    updates = [
        AttemptUpdate(**ids(rollout), status="running", worker_id="w1", metadata={"n": 1}),
        AttemptUpdate(**ids(rollout), metadata={"n": 2}),
        AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="latest", status="failed", worker_id="w2"),
        AttemptUpdate(**ids(rollout), status="succeeded"),
        AttemptUpdate(**ids(rollout), status="failed"),
        AttemptUpdate(**ids(rollout), status="running", last_heartbeat_time=3.0),
    ]
    outcomes = await store.update_many_attempts(updates, fenced=fenced)
    seen = [
        "Conflict" if isinstance(item, Conflict) else (item.status, item.worker_id, item.metadata, item.end_time)
        for item in outcomes
    ]
    now = clock.now
    first = [("running", "w1", {"n": 1}, None), ("running", "w1", {"n": 2}, None), ("failed", "w2", {"n": 2}, now)]
    if fenced:
        assert seen == [*first, "Conflict", first[-1], "Conflict"]
    else:
        ends = [("succeeded", now), ("failed", now), ("running", None)]
        assert seen == first + [(status, "w2", {"n": 2}, end) for status, end in ends]
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.attempt) == ("failed", outcomes[4 if fenced else 5])
    workers = [await store.get_worker_by_id(worker_id) for worker_id in ("w1", "w2")]
    assert [worker.status for worker in workers] == ["busy", "idle" if fenced else "busy"]


async def test_contradictory_ends_of_one_attempt_count_once(store, make):
    rollout = await make.claimed(store)
    first, again, contrary = await store.end_attempts(
        [ending(rollout, "succeeded", "s1"), ending(rollout, "succeeded", "s1"), ending(rollout, "failed", "s2")]
    )
    assert first == again and first.status == "succeeded" and isinstance(contrary, Conflict)
    assert await make.status(store, rollout.rollout_id) == "succeeded"
    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["s1", "s2"]


async def test_a_rollout_waited_for_or_asked_for_twice_is_given_once(store):
    await store.start_many_rollouts([request("a"), request("b")])
    await store.update_rollout("a", status="cancelled")
    assert [item.rollout_id for item in await store.wait_for_rollouts(rollout_ids=["a", "b", "a"], timeout=0)] == ["a"]
    found = await store.query_rollouts(rollout_id_in=["b", "a", "b"], status_in=["cancelled", "cancelled", "preparing"])
    assert [rollout.rollout_id for rollout in found] == ["a", "b"]


async def test_a_rollout_that_leaves_and_rejoins_the_queue_in_a_batch_goes_to_its_tail(store):
    retried = RolloutConfig(max_attempts=9, retry_condition=["failed"])
    await store.enqueue_many_rollouts([request("a", config=retried), request("b", config=retried), request("c")])
    claimed = await store.dequeue_many_rollouts(limit=2)
    for rollout in claimed:
        await store.update_attempt(**ids(rollout), status="failed")
    first, second = [ids(rollout) for rollout in claimed]
    changes = [(second, "running"), (second, "failed"), (first, "running"), (first, "failed"), (second, "running")]
    changes.append((second, "failed"))
    await store.update_many_attempts([AttemptUpdate(**one, status=status) for one, status in changes])
    assert [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)] == ["c", "a", "b"]


async def test_a_worker_keeps_the_times_of_all_that_a_batch_did_to_it(store, make, clock):
    rollouts = await store.start_many_rollouts([request("a"), request("b")], worker_id="w")
    clock.advance(1)
    done, begun = [ids(rollout) for rollout in rollouts]
    await store.update_many_attempts(
        [AttemptUpdate(**done, status="succeeded"), AttemptUpdate(**begun, status="running")]
    )
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id) == ("busy", "b")
    assert worker.last_idle_time == worker.last_busy_time == clock()


async def test_metadata_comes_back_as_json_from_the_update_itself(store):
    [rollout] = await store.start_many_rollouts([request("a")])
    metadata = {"pair": (1, 2)}
    updated = await store.update_attempt(**ids(rollout), metadata=metadata)
    assert updated.metadata == {"pair": [1, 2]} == (await store.get_latest_attempt("a")).metadata


# Dicts in the place of models


async def test_dicts_of_fields_will_do_for_models(store, make):
    [queued] = await store.enqueue_many_rollouts([{"input": 1, "rollout_id": "a", "config": {"max_attempts": 2}}])
    assert queued.config == RolloutConfig(max_attempts=2)
    [started] = await store.start_many_rollouts([{"input": 2}], worker_id="w")
    span = make.span(started)
    assert await store.add_span(span.model_dump()) == span
    assert [one.span_id for one in await store.add_many_spans([span.model_dump()])] == []
    [outcome] = await store.update_many_attempts([{**ids(started), "status": "succeeded"}], fenced=True)
    assert outcome.status == "succeeded"


@pytest.mark.parametrize(
    "call",
    [
        lambda store, given: store.enqueue_many_rollouts([{"rollout_id": "x"}]),
        lambda store, given: store.enqueue_many_rollouts([{"input": 1, "config": {"max_attempts": 0}}]),
        lambda store, given: store.enqueue_many_rollouts(["input"]),
        lambda store, given: store.enqueue_many_rollouts([{5: 1}]),
        lambda store, given: store.start_many_rollouts([{"input": 1, "mode": "nope"}]),
        lambda store, given: store.add_span({"rollout_id": "a"}),
        lambda store, given: store.add_many_spans([None]),
        lambda store, given: store.update_many_attempts([{**given, "status": "done"}]),
        lambda store, given: store.update_many_attempts([5]),
        lambda store, given: store.update_attempt(**given, metadata=[1]),
        lambda store, given: store.update_attempt(**given, metadata={"a": float("nan")}),
    ],
)
async def test_dicts_that_are_no_models_are_refused(store, call):
    [rollout] = await store.start_many_rollouts([request("a")])
    with pytest.raises(ConfigError):
        await call(store, ids(rollout))
    assert len(await store.query_rollouts()) == 1


# Any batch: in memory and in SQL it does the same, and what the single forms do


NAMES = ("a", "b")
CONFIG = RolloutConfig(max_attempts=2, retry_condition=["failed", "timeout"])
statuses = st.sampled_from(["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"])
places = st.tuples(st.sampled_from(NAMES), st.sampled_from([0, 1, -1]))
updates = st.tuples(
    places,
    st.fixed_dictionaries(
        {},
        optional={
            "status": statuses,
            "worker_id": st.sampled_from(["w1", "w2"]),
            "metadata": st.builds(lambda n: {"n": n}, st.integers(0, 2)),
            "last_heartbeat_time": st.sampled_from([1.0, 2.0]),
        },
    ),
)
rollout_statuses = st.sampled_from(["queuing", "requeuing", "running", "succeeded", "cancelled"])
ends = st.tuples(places, st.sampled_from(["succeeded", "failed"]), st.sampled_from(["s1", "s2", "s3"]))
batches = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.lists(updates, max_size=6), st.booleans()),
        st.tuples(st.just("end"), st.lists(ends, max_size=5)),
        st.tuples(st.just("spans"), st.lists(st.tuples(places, st.sampled_from("st"), st.integers(0, 9)), max_size=5)),
        st.tuples(st.just("start"), st.lists(st.tuples(st.sampled_from([*NAMES, "c"]), st.integers(0, 1)), max_size=4)),
        st.tuples(st.just("enqueue"), st.lists(st.tuples(st.sampled_from([*NAMES, "d"]), st.just(0)), max_size=4)),
        st.tuples(st.just("restart"), st.lists(st.sampled_from([*NAMES, "nope"]), max_size=3)),
        st.tuples(st.just("status"), st.lists(st.tuples(st.sampled_from(NAMES), rollout_statuses), max_size=3)),
        st.tuples(st.just("cancel"), st.lists(st.sampled_from([*NAMES, "nope"]), max_size=3)),
        st.tuples(st.just("dequeue"), st.integers(0, 3)),
        st.tuples(st.just("release"), st.lists(st.integers(-1, 3), max_size=3)),
        st.tuples(st.just("numbers"), st.lists(st.sampled_from([*NAMES, "nope"]), max_size=4)),
    ),
    max_size=5,
)


class Applied:
    """A store to which batches are applied, as they are or item by item. Attempts are told by their places."""

    def __init__(self, store: LightningStore, *, singly: bool = False) -> None:
        self.store = store
        self.singly = singly
        self.attempts: dict[tuple[str, int], str] = {}
        self.claimed: list[AttemptedRollout] = []

    async def prepare(self) -> None:
        for name in NAMES:
            await self.store.enqueue_rollout(0, config=CONFIG, rollout_id=name)
            for _ in range(2):
                await self.store.start_attempt(name)
        await self.note_attempts()

    async def note_attempts(self) -> None:
        for rollout in await self.store.query_rollouts():
            for attempt in await self.store.query_attempts(rollout.rollout_id):
                self.attempts[rollout.rollout_id, attempt.sequence_id - 1] = attempt.attempt_id

    def shown(self, value: Any) -> Any:
        """A result or record, without what differs from store to store."""
        text = repr(value)
        for place, attempt_id in self.attempts.items():
            text = text.replace(attempt_id, f"<{place}>")
        return text

    def ids(self, place: tuple[str, int]) -> dict[str, str]:
        name, number = place
        return {"rollout_id": name, "attempt_id": "latest" if number < 0 else self.attempts[name, number]}

    async def apply(self, kind: str, items: Any, *further: Any) -> Any:
        alone = self.singly and kind not in ("dequeue", "release")
        try:
            if alone:
                outcomes = [one for item in items for one in await self.call(kind, [item], *further)]
            else:
                outcomes = await self.call(kind, items, *further)
        except (Conflict, NotFound) as error:
            outcomes = type(error)
        await self.note_attempts()
        return self.shown(outcomes)

    async def call(self, kind: str, items: Any, *further: Any) -> list[Any]:
        store = self.store
        if kind == "update":
            changes = [AttemptUpdate(**self.ids(place), **fields) for place, fields in items]
            return list(await store.update_many_attempts(changes, fenced=further[0]))
        if kind == "end":
            lasts = []
            for (name, number), status, span_id in items:
                given = self.ids((name, max(number, 0)))
                drawn = {"trace_id": "t" * 32, "span_id": span_id, "sequence_id": 1}
                span = Span.from_attributes(**given, **drawn, name="last", attributes={"x": status})
                lasts.append((span, AttemptUpdate(**given, status=status)))
            return list(await store.end_attempts(lasts))
        if kind == "spans":
            spans = []
            for (name, number), span_id, sequence_id in items:
                given = self.ids((name, max(number, 0)))
                drawn = {"trace_id": "t" * 32, "span_id": span_id, "sequence_id": sequence_id}
                spans.append(Span.from_attributes(**given, **drawn, name=f"{sequence_id}", attributes={}))
            return list(await store.add_encoded_spans(list(map(encode_span, spans))))
        if kind == "numbers":
            return list(await store.get_many_span_sequence_ids([(name, "any") for name in items]))
        if kind == "restart":
            # An id given twice gets one attempt, so each stands for itself.
            return [list(await store.start_many_attempts([name], worker_id="w1")) for name in items]
        if kind == "status":
            return [await store.update_rollout(name, status=status) for name, status in items]
        if kind == "cancel":
            return list(await store.cancel_rollouts(items))
        if kind == "dequeue":
            claimed = list(await store.dequeue_many_rollouts(limit=items, worker_id="w3"))
            self.claimed += claimed
            return claimed
        if kind == "release":
            unknown = self.claimed[0].model_copy(update={"rollout_id": "nope"}) if self.claimed else None
            released = [unknown if place < 0 else self.claimed[place] for place in items if place < len(self.claimed)]
            return [await store.release_rollouts([rollout for rollout in released if rollout is not None])]
        requests = [request(name, input, config=CONFIG) for name, input in items]
        form = store.start_many_rollouts if kind == "start" else store.enqueue_many_rollouts
        return list(await form(requests))

    async def state(self) -> list[str]:
        """All that the store holds, but for the order of the queue."""
        kept = [self.shown(rollout) for rollout in await self.store.query_rollouts()]
        for rollout in await self.store.query_rollouts():
            kept += map(self.shown, await self.store.query_attempts(rollout.rollout_id))
            spans = await self.store.query_spans(rollout.rollout_id)
            kept += [self.shown((span.attempt_id, span.span_id, span.name, span.attributes)) for span in spans]
        for worker in await self.store.query_workers(sort_by="worker_id"):
            kept.append(self.shown(worker))
        return kept


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches)
def test_any_batch_does_the_same_in_memory_in_sql_and_item_by_item(batches):
    async def run(folder: Path) -> None:
        def clock() -> float:
            return 1_000.0

        given = {"clock": clock, "scan_debounce_seconds": 1e9}
        all_of_it = [
            Applied(InMemoryLightningStore(**given)),
            Applied(SqlLightningStore.from_url(f"sqlite:///{folder}/a.db", **given)),
            Applied(SqlLightningStore.from_url(f"sqlite:///{folder}/b.db", **given), singly=True),
        ]
        for applied in all_of_it:
            await applied.prepare()
        failed = False
        for batch in batches:
            memory, sql, singly = [await applied.apply(*batch) for applied in all_of_it]
            assert memory == sql
            # A batch that fails does nothing, where single calls have done what came before.
            failed = sql in (repr(Conflict), repr(NotFound)) or singly in (repr(Conflict), repr(NotFound))
            if failed:
                break
            assert sql == singly
            states = [await applied.state() for applied in all_of_it]
            assert states[0] == states[1] == states[2]
        queues = [[one.rollout_id for one in await a.store.dequeue_many_rollouts(limit=99)] for a in all_of_it]
        assert queues[0] == queues[1] == queues[2] or failed
        for applied in all_of_it:
            await applied.store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
