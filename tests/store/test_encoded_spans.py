"""Spans as stores take and keep them; and what a server reads into structs: rows and errors are those of pydantic,
whatever is sent."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import canonical_json
from rollout_core.store import Event, LightningStore, Link, Span, TraceStatus
from rollout_core.store.codec import decode
from rollout_core.store.encoded_spans import EncodedSpan, encode_plain, encode_span, span_ids
from rollout_core.store.http.large_bodies import list_fields, read_large
from rollout_core.store.http.span_bodies import read_encoded
from rollout_core.store.http.wire import SpansRequest, dump_spans
from tests.store.test_span_bodies import spans


def outcome(read, data: bytes):
    """The rows that come of a body, or the error; texts of JSON by their values, since spaces may differ."""
    try:
        found = read(data)
    except ValidationError as error:
        return "refused", error.errors(include_url=False, include_input=False)
    except ConfigError as error:
        return "refused", str(error)
    return [(*span[:-1], canonical_json(decode(span.body))) for span in found]


def by_pydantic(data: bytes) -> list[EncodedSpan]:
    return [encode_span(span) for span in SpansRequest.model_validate_json(data).spans]


def by_structs(data: bytes) -> list[EncodedSpan]:
    return SpansRequest.read(data).encoded()


def places(value, path=()):
    """All places in a value of JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def deep(depth: int):
    value: object = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"x": value}
    return value


depths = (2, 3, 4, 5, 6, 100, *range(190, 201), 300)
numbers = (-1, 0, 7, 2**63 - 1, 2**63, 2**64, 10**40, 0.1, -0.0, 1e16, 1e22, 5e-324)
others = (
    None,
    True,
    "",
    "x",
    "5",
    "true",
    "é\U0001f600",
    "\0",
    "OK",
    [],
    {},
    [{}],
    {"a": None},
    {"a": [1, 2.0, "b", None]},
)
odd = st.sampled_from([*numbers, *others, *map(deep, depths)])
not_quite_json = b"NaN Infinity -Infinity 1e999 -1E999 01 1. - +1 nul , }".split()
bad_texts = b'"\\ud800" "\\ude00\\ud83d" "\\x" "\xff" "\xed\xa0\x80"'.split()
rare_json = b'"\\ud83d\\ude00" "\\u00e9\\u0000" 1,"rollout_id":"other" 1,"x":2,"x":3 1e-400'.split()
marks = st.sampled_from(
    [*not_quite_json, *bad_texts, *rare_json, b"", b"1 ", b'"a\nb"', b"1" + b"0" * 400 + b".5", b"1" + b"0" * 5000]
)
MARK = "a mark that stands for other bytes"


def plain(value):
    """Without what structs leave to pydantic."""
    if isinstance(value, dict):
        return {key.replace("\0", ""): plain(inner) for key, inner in value.items() if key != "further"}
    if isinstance(value, list):
        return list(map(plain, value))
    return value.replace("\0", "") if isinstance(value, str) else value


@st.composite
def requests(draw) -> bytes:
    """Bodies of requests with up to two faults, or what looks like one."""
    some = st.lists(spans.map(plain), max_size=3) | st.lists(spans, max_size=2)
    body = {"spans": copy.deepcopy(draw(some))}
    mark = draw(marks)
    for _ in range(draw(st.integers(0, 2))):
        found = list(places(body))[1:]
        if not found:
            break
        *path, key = draw(st.sampled_from(found))
        holder: Any = body
        for step in path:
            holder = holder[step]
        kind = draw(st.sampled_from(["replace", "remove", "add", "mark"]))
        if kind == "remove":
            del holder[key]
            continue
        if kind == "add" and isinstance(holder, dict):
            key = draw(st.sampled_from(["kind", "instrumentation_scope", "further", "timestamp"]))
        holder[key] = MARK if kind == "mark" else copy.deepcopy(draw(odd))
    return json.dumps(body, ensure_ascii=draw(st.booleans())).encode().replace(f'"{MARK}"'.encode(), mark)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_whatever_is_sent_rows_and_errors_are_those_of_pydantic(body):
    assert outcome(by_structs, body) == outcome(by_pydantic, body)


def telemetry_span() -> Span:
    """One with all that OpenTelemetry's spans have."""
    span = Span.from_attributes(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=3,
        parent_id="0123456789abcdef",
        name="é\n",
        start_time=1.5,
        status=TraceStatus(status_code="ERROR", description='"why"'),
        attributes={"text": "\x7f\u2028\\", "numbers": [1, 2.5, -1e-7], "none": None, "deep": {"a": [{"b": [True]}]}},
    )
    assert span.context is not None
    span.events = [Event(name="e", attributes={"x": 1}), Event(name="e", attributes={}, timestamp=2.0)]
    span.links = [Link(context=span.context, attributes={"y": "z"}), Link(context=span.context)]
    return Span.model_validate(
        {**span.model_dump(), "kind": "CLIENT", "instrumentation_scope": {"name": "n", "version": None}}
    )


@pytest.mark.parametrize(
    "span", [Span.from_attributes(rollout_id="ro-1", attempt_id="at-1", attributes={"x": 1}), telemetry_span()]
)
def test_what_our_client_sends_takes_the_short_way_and_is_stored_byte_for_byte(span):
    [encoded] = read_encoded(dump_spans([span])) or []
    assert Span.model_validate(encoded.fields()) == span
    assert encode_span(span) == encoded


def test_a_large_body_is_encoded_part_by_part():
    odd = {**telemetry_span().model_dump(), "further": 1}
    ordinary = [telemetry_span().model_dump() for _ in range(700)]
    for sent in (ordinary, [*ordinary, odd]):
        body = json.dumps({"spans": sent}).encode()
        read = asyncio.run(read_large(SpansRequest.read, list_fields(SpansRequest), body))
        assert read.encoded() == by_structs(body) and len(read.spans) == len(sent)


@pytest.mark.asyncio
async def test_encoded_spans_are_stored_as_models_are(store: LightningStore, make):
    rollout = await make.claimed(store)
    first, second = make.span(rollout, 1), make.span(rollout, 2, attributes={"none": None, "big": 2**70})
    encoded = {span.span_id: encode_span(span) for span in (first, second)}
    assert list(await store.add_encoded_spans([encoded[first.span_id]])) == [True]
    given = [encoded[span.span_id] for span in (first, second, second)]
    assert list(await store.add_encoded_spans(given)) == [False, True, False]
    assert list(await store.query_spans(rollout.rollout_id)) == [first, second]
    with pytest.raises(NotFound):
        await store.add_encoded_spans([given[0], given[1]._replace(attempt_id="nope")])


@pytest.mark.asyncio
async def test_spans_without_a_number_get_the_next_ones_whatever_numbers_others_bring(store: LightningStore, make):
    rollout, other = await make.claimed(store), await make.claimed(store)
    spans = [make.span(owner, 5) for owner in (rollout, rollout, other, rollout, rollout)]
    given = [encode_span(span) for span in spans]
    given = [span if place == 1 else span._replace(sequence_id=None) for place, span in enumerate(given)]
    assert list(await store.add_encoded_spans([*given, given[0]])) == [True] * 5 + [False]
    found = {span.span_id: span.sequence_id for span in await store.query_spans(rollout.rollout_id)}
    assert [found.get(span.span_id) for span in spans] == [1, 5, None, 2, 3]
    assert [span.sequence_id for span in await store.query_spans(other.rollout_id)] == [1]
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 6


def test_a_plain_span_is_encoded_as_its_fields_are():
    attributes = {"rollout.completion.blob": "b" * 64, "n": 7, "reason": 'TRACE SPAN %s "é"\n'}
    [ids] = span_ids(1)
    given = {"rollout_id": "r", "attempt_id": "at-1", "name": "rollout.completion"}
    text = json.dumps(attributes, ensure_ascii=False, separators=(",", ":"))
    span = Span.from_attributes(**given, sequence_id=1, trace_id=ids[0], span_id=ids[1], attributes=attributes)
    assert encode_plain(ids, **given, attributes=text) == encode_span(span)
