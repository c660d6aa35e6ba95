"""The contract of spans: storing, numbering, heartbeats and queries."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import threading

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.store import Event, Link, OtelResource, PaginatedResult, Span, SpanContext, TraceStatus

pytestmark = pytest.mark.asyncio


async def test_a_span_comes_back_as_it_went_in(store, make):
    rollout = await make.claimed(store)
    context = SpanContext(trace_id="a" * 32, span_id="b" * 16, is_remote=True, trace_state={"k": "v"})
    span = Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=3,
        trace_id="c" * 32,
        span_id="d" * 16,
        parent_id="e" * 16,
        name="llm",
        status=TraceStatus(status_code="ERROR", description="boom"),
        attributes={"ids": [1, 2, 3], "reward": 0.25, "ok": True, "text": "é\u0000", "none": None, "big": 2**70 + 1},
        events=[Event(name="e", attributes={"x": 1}, timestamp=5.5)],
        links=[Link(context=context, attributes=None)],
        start_time=1.5,
        end_time=None,
        context=context,
        parent=None,
        resource=OtelResource(attributes={"service.name": "agent"}, schema_url="s"),
        extra_field={"kept": [1]},
    )
    assert await store.add_span(span) == span
    [read] = await store.query_spans(rollout.rollout_id)
    assert read == span
    assert read.extra_field == {"kept": [1]}


USES = {
    "model_dump": lambda span: span.model_dump(),
    "model_dump_json": lambda span: span.model_dump_json(),
    "within another model": lambda span: PaginatedResult(items=[span], limit=-1, offset=0, total=1).model_dump(),
    "by an adapter": lambda span: TypeAdapter(list[Span]).dump_json([span]),
    "validated": lambda span: TypeAdapter(Span).validate_python(span),
    "repr": repr,
    "str": str,
    "dict": dict,
    "vars": lambda span: dict(vars(span)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda span: span.model_copy(update={"name": "other"}),
    "pickle": lambda span: pickle.loads(pickle.dumps(span)),  # noqa: S301 - our own
    "fields that were set": lambda span: span.model_fields_set >= set(Span.model_fields),
    "further fields": lambda span: (span.model_extra, span.kind),
    "field of the body": lambda span: span.attributes,
    "hasattr": lambda span: (hasattr(span, "resource"), hasattr(span, "nope")),
    "set a column": lambda span: (setattr(span, "name", "other"), span)[1],
    "set a part": lambda span: (setattr(span, "status", None), span)[1],
    "set a further field": lambda span: (setattr(span, "new", 1), span)[1],
    "delete": lambda span: (delattr(span, "kind"), span)[1],
    "its class called": lambda span: type(span)(**vars(span)),
    "its class validating": lambda span: type(span).model_validate(span.model_dump()),
    "its class constructing": lambda span: type(span).model_construct(None, **vars(span)),
}


@pytest.mark.parametrize("use", USES)
async def test_a_span_that_was_read_is_a_model_like_any_other(store, make, use):
    rollout = await make.claimed(store)
    await store.add_span(Span.model_validate({**make.span(rollout).model_dump(), "kind": "SERVER", "body": "text"}))
    [read] = await store.query_spans(rollout.rollout_id)
    [other] = await store.query_spans(rollout.rollout_id)
    fields = {**vars(other), **other.model_extra}
    plain = Span.model_construct(set(Span.model_fields), **fields)
    used, expected = USES[use](read), USES[use](plain)
    assert used == expected
    assert type(used) is type(expected)
    [one], [two] = [await store.query_spans(rollout.rollout_id) for _ in range(2)]
    assert one == two


async def test_what_one_thread_sets_on_a_span_that_was_read_stays_while_others_look_at_it(store, make):
    rollout = await make.claimed(store)
    await store.add_span(make.span(rollout))
    for _ in range(50):
        [read] = await store.query_spans(rollout.rollout_id)
        start = threading.Barrier(4)

        def look(read: Span = read, start: threading.Barrier = start) -> None:
            start.wait()
            assert read.status.status_code == "OK"

        def change(read: Span = read, start: threading.Barrier = start) -> None:
            start.wait()
            read.attributes = {"changed": True}

        await asyncio.gather(*(asyncio.to_thread(work) for work in (look, change, look, look)))
        assert read.attributes == {"changed": True}


async def test_the_first_span_makes_attempt_and_rollout_run(store, make, clock):
    rollout = await make.claimed(store)
    clock.advance(2)
    await store.add_span(make.span(rollout))
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.attempt.status, read.attempt.last_heartbeat_time) == ("running", "running", clock.now)


async def test_a_duplicate_span_is_left_out_and_is_no_heartbeat(store, make, clock):
    rollout = await make.claimed(store)
    span = make.span(rollout)
    await store.add_span(span)
    heartbeat = clock.now
    clock.advance(2)
    assert await store.add_span(span) is None
    assert (await store.get_latest_attempt(rollout.rollout_id)).last_heartbeat_time == heartbeat
    new = make.span(rollout, 2)
    assert await store.add_many_spans([span, new, new, span]) == [new]
    assert [read.span_id for read in await store.query_spans(rollout.rollout_id)] == [span.span_id, new.span_id]


async def test_the_same_span_id_in_two_attempts_is_two_spans(store, make):
    first = await make.claimed(store)
    second = await store.start_attempt(first.rollout_id)
    spans = [make.span(rollout, span_id="a" * 16) for rollout in (first, second)]
    assert await store.add_many_spans(spans) == spans


async def test_spans_of_unknown_rollouts_or_attempts_are_refused_with_their_batch(store, make):
    rollout = await make.claimed(store)
    good = make.span(rollout)
    for bad, message in [
        (good.model_copy(update={"rollout_id": "nope"}), "rollout nope does not exist"),
        (good.model_copy(update={"attempt_id": "at-nope"}), "has no attempt at-nope"),
    ]:
        with pytest.raises(NotFound, match=message):
            await store.add_many_spans([good, bad])
    assert len(await store.query_spans(rollout.rollout_id)) == 0
    assert await make.status(store, rollout.rollout_id) == "preparing"


async def test_a_span_revives_an_unresponsive_attempt_and_takes_its_rollout_off_the_queue(store, make, clock):
    rollout = await make.claimed(store, unresponsive_seconds=10, max_attempts=2, retry_condition=["unresponsive"])
    clock.advance(11)
    assert await make.status(store, rollout.rollout_id) == "requeuing"
    await store.add_span(make.span(rollout))
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.attempt.status) == ("running", "running")
    assert await store.dequeue_rollout() is None
    clock.advance(11)
    assert await make.status(store, rollout.rollout_id) == "requeuing", "it is watched again"


async def test_a_span_on_a_timed_out_attempt_is_only_a_heartbeat(store, make, clock):
    rollout = await make.claimed(store, timeout_seconds=10)
    clock.advance(11)
    assert await make.status(store, rollout.rollout_id) == "failed"
    await store.add_span(make.span(rollout))
    read = await store.get_rollout_by_id(rollout.rollout_id)
    assert (read.status, read.attempt.status, read.attempt.last_heartbeat_time) == ("failed", "timeout", clock.now)


async def test_a_span_of_an_old_attempt_leaves_the_retry_alone(store, make):
    first = await make.claimed(store)
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(make.span(first))
    read = await store.get_rollout_by_id(first.rollout_id)
    assert (read.status, read.attempt) == ("preparing", second.attempt)
    assert (await store.query_attempts(first.rollout_id))[0].status == "failed"


async def test_sequence_ids_count_up_per_rollout_across_attempts(store, make):
    first = await make.claimed(store)
    other = await store.start_rollout(2)
    ids = [(first.rollout_id, first.attempt.attempt_id), (other.rollout_id, "unknown-attempt")]
    assert await store.get_next_span_sequence_id(*ids[0]) == 1
    assert list(await store.get_many_span_sequence_ids([ids[0], ids[1], ids[0], ids[1]])) == [2, 1, 3, 2]
    second = await store.start_attempt(first.rollout_id)
    assert await store.get_next_span_sequence_id(first.rollout_id, second.attempt.attempt_id) == 4


async def test_an_explicit_sequence_id_raises_the_counter(store, make):
    rollout = await make.claimed(store)
    await store.add_many_spans([make.span(rollout, 7), make.span(rollout, 3)])
    assert await store.get_next_span_sequence_id(rollout.rollout_id, "any") == 8
    await store.add_span(make.span(rollout, 2))
    assert await store.get_next_span_sequence_id(rollout.rollout_id, "any") == 9


async def test_sequence_ids_of_an_unknown_rollout_are_refused(store):
    with pytest.raises(NotFound, match="rollout nope does not exist"):
        await store.get_next_span_sequence_id("nope", "at")


async def test_concurrent_callers_never_share_a_sequence_id(store, make):
    rollout = await make.claimed(store)
    numbers = await asyncio.gather(*[store.get_next_span_sequence_id(rollout.rollout_id, "a") for _ in range(100)])
    assert sorted(numbers) == list(range(1, 101))


@pytest_asyncio.fixture
async def traced(store, make):
    """A rollout with two attempts: spans a1, a2 in the first and b1, b2, b3 in the second."""
    first = await make.claimed(store)
    spans = [
        make.span(first, 2, name="a2.llm", trace_id="1" * 32, span_id="0a2", start_time=1.0),
        make.span(first, 1, name="a1", trace_id="2" * 32, span_id="0a1", parent_id="0a2"),
    ]
    second = await store.start_attempt(first.rollout_id)
    spans += [
        make.span(second, 3, name="b3", span_id="0b3", start_time=9.0),
        make.span(second, 3, name="b2.llm", span_id="0b2", start_time=8.0, parent_id="0b1"),
        make.span(second, 1, name="b1", span_id="0b1"),
    ]
    await store.add_many_spans(spans)
    return first, second


async def _names(result) -> list[str]:
    return [span.name for span in await result]


async def test_spans_come_in_order_of_sequence_then_time(store, traced):
    rollout_id = traced[0].rollout_id
    assert await _names(store.query_spans(rollout_id)) == ["a1", "b1", "a2.llm", "b2.llm", "b3"]
    assert await _names(store.query_spans(rollout_id, "latest")) == ["b1", "b2.llm", "b3"]
    assert await _names(store.query_spans(rollout_id, traced[0].attempt.attempt_id)) == ["a1", "a2.llm"]
    assert await _names(store.query_spans(rollout_id, sort_by=None)) == ["a2.llm", "a1", "b3", "b2.llm", "b1"]
    assert await _names(store.query_spans(rollout_id, sort_by="name", sort_order="desc", limit=2, offset=1)) == [
        "b2.llm",
        "b1",
    ]


async def test_span_filters_join_within_the_attempt_only(store, traced):
    rollout_id = traced[0].rollout_id
    assert await _names(store.query_spans(rollout_id, name="b1")) == ["b1"]
    assert await _names(store.query_spans(rollout_id, name_contains=".llm")) == ["a2.llm", "b2.llm"]
    assert await _names(store.query_spans(rollout_id, name_contains="llm", trace_id_contains="1111")) == ["a2.llm"]
    assert await _names(store.query_spans(rollout_id, parent_id="0b1")) == ["b2.llm"]
    assert await _names(store.query_spans(rollout_id, span_id_contains="0b", parent_id_contains="b")) == ["b2.llm"]
    either = {"name": "b1", "span_id": "0a1", "filter_logic": "or"}
    assert await _names(store.query_spans(rollout_id, **either)) == ["a1", "b1"]
    assert await _names(store.query_spans(rollout_id, "latest", **either)) == ["b1"]
    assert await _names(store.query_spans(rollout_id, "latest", filter_logic="or")) == ["b1", "b2.llm", "b3"]
    assert await _names(store.query_spans(rollout_id, name="%")) == []
    assert await _names(store.query_spans(rollout_id, name_contains="B1")) == [], "substrings mind their case"


async def test_spans_of_what_is_unknown_are_none(store):
    assert len(await store.query_spans("nope")) == 0
    assert len(await store.query_spans("nope", "latest")) == 0
    queued = await store.enqueue_rollout(1)
    assert len(await store.query_spans(queued.rollout_id, "latest")) == 0


async def test_many_spans_are_those_of_the_latest_attempts_in_the_order_asked_for(store, traced, make):
    other = await store.start_rollout("other")
    await store.add_span(make.span(other, 1, name="other"))
    queued = await store.enqueue_rollout("queued")
    asked = [other.rollout_id, queued.rollout_id, "nope", traced[0].rollout_id]
    assert await _names(store.query_many_spans(asked)) == ["other", "b1", "b2.llm", "b3"]
    assert await _names(store.query_many_spans(asked, name="b1")) == ["b1"]
    assert {span.rollout_id for span in await store.query_many_spans(asked)} == {
        other.rollout_id,
        traced[0].rollout_id,
    }


async def test_after_the_largest_number_there_is_none(store, make):
    rollout = await make.claimed(store)
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    await store.add_span(make.span(rollout, 2**63 - 2))
    with pytest.raises(ConfigError, match="largest"):
        await store.get_many_span_sequence_ids([ids, ids])
    assert await store.get_next_span_sequence_id(*ids) == 2**63 - 1
    with pytest.raises(ConfigError, match="largest"):
        await store.get_next_span_sequence_id(*ids)
    for beyond in (2**63, -1):
        with pytest.raises(ConfigError):
            await store.add_span(make.span(rollout).model_copy(update={"sequence_id": beyond}))
    assert [span.sequence_id for span in await store.query_spans(ids[0])] == [2**63 - 2]


async def test_a_program_is_traced_whatever_it_calls_its_spans(store, make):
    from opentelemetry.sdk.trace import TracerProvider

    rollout = await make.claimed(store)
    span = TracerProvider().get_tracer("test").start_span("a\0b\ud800")
    span.end()
    added = await store.add_otel_span(rollout.rollout_id, rollout.attempt.attempt_id, span)
    assert added.name == "a\ufffdb?"


async def test_otel_spans_are_numbered_unless_they_have_a_number(store, make):
    from opentelemetry.sdk.trace import TracerProvider

    rollout = await make.claimed(store)
    tracer = TracerProvider().get_tracer("test")
    spans = []
    for name in ("one", "two", "three"):
        with tracer.start_as_current_span(name) as span:
            span.set_attribute("k", name)
        spans.append(span)
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    assert (await store.add_otel_span(*ids, spans[0])).sequence_id == 1
    assert (await store.add_otel_span(*ids, spans[1], 5)).sequence_id == 5
    assert (await store.add_otel_span(*ids, spans[2])).sequence_id == 6
    assert await store.add_otel_span(*ids, spans[2]) is None
    read = await store.query_spans(rollout.rollout_id)
    assert [(span.name, span.sequence_id, span.attributes) for span in read] == [
        ("one", 1, {"k": "one"}),
        ("two", 5, {"k": "two"}),
        ("three", 6, {"k": "three"}),
    ]
    with pytest.raises(NotFound):
        await store.add_otel_span(rollout.rollout_id, "at-nope", spans[0])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"attributes'\]\['x'\] is nan"),
        ([1.0, float("-inf")], r"\['x'\]\[1\] is -inf"),
        ({1, 2}, "of type set"),
        (b"bytes", "of type bytes"),
        ({1: 2}, "key 1 "),
        ("\ud800", "lone surrogate"),
        (object(), "of type object"),
    ],
)
async def test_attributes_that_json_cannot_hold_are_refused_by_place(store, make, value, message):
    rollout = await make.claimed(store)
    with pytest.raises(ConfigError, match=message):
        await store.add_span(make.span(rollout, attributes={"fine": None, "x": value}))
    with pytest.raises(ConfigError, match=message):
        event = Event(name="e", attributes={"attributes": {"x": value}})
        await store.add_span(make.span(rollout).model_copy(update={"events": [event]}))
    assert len(await store.query_spans(rollout.rollout_id)) == 0


@pytest.mark.parametrize("time", [math.inf, -math.inf, math.nan])
async def test_times_that_are_no_times_are_refused(store, make, time):
    rollout = await make.claimed(store)
    spans = [make.span(rollout, n) for n in (1, 2)]
    spans[0].start_time = spans[1].end_time = time  # models do not check what is assigned
    for given in ([spans[0]], [spans[1]], spans):
        with pytest.raises(ConfigError, match="_time"):
            await store.add_many_spans(given)
    assert len(await store.query_spans(rollout.rollout_id)) == 0
