"""Spans that pydantic reads as dicts: the same rules as the models', and nothing slips in that JSON cannot hold."""

from __future__ import annotations

import json
import math

import aiohttp
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError
from rollout_core.store import Event, LightningStoreServer, Link, Span, SqlLightningStore
from rollout_core.store.encoded_spans import encode_span, fields_of, num_nulls
from rollout_core.store.http.span_bodies import SpanFields

CHECKED = TypeAdapter(SpanFields)

texts = st.sampled_from(["", "a", "é", "null", "\u0000"])
kept_texts = texts.map(lambda text: text.replace("\0", ""))
ids = kept_texts.filter(bool)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
attributes = st.dictionaries(texts, values | st.lists(values, max_size=3), max_size=3)
times = st.none() | st.floats(0, 1e12)


def part(required, optional=None):
    """A dict of these fields, perhaps with one more that no model knows."""
    return st.builds(
        lambda fields, further: {**further, **fields},
        st.fixed_dictionaries(required, optional=optional),
        st.dictionaries(st.just("further"), values | st.lists(values, max_size=2), max_size=1),
    )


contexts = part({"trace_id": texts, "span_id": texts, "is_remote": st.booleans(), "trace_state": st.just({"k": "v"})})
spans = part(
    {
        **dict.fromkeys(["rollout_id", "attempt_id", "span_id"], ids),
        **dict.fromkeys(["trace_id", "name"], kept_texts),
        "sequence_id": st.integers(0, 2**63 - 1),
        "parent_id": st.none() | kept_texts,
        "status": part({"status_code": st.just("OK")}, {"description": st.none() | texts}),
        "attributes": attributes,
        "events": st.lists(part({"name": texts, "attributes": attributes}, {"timestamp": times}), max_size=2),
        "links": st.lists(part({"context": contexts}, {"attributes": st.none() | attributes}), max_size=2),
        "start_time": times,
        "end_time": times,
        "context": st.none() | contexts,
        "parent": st.none() | contexts,
        "resource": part({"attributes": attributes, "schema_url": texts}),
    }
)


@settings(deadline=None)
@given(spans)
def test_fields_checked_are_those_of_the_model(span):
    text = json.dumps(span)
    fields, model = CHECKED.validate_json(text), Span.model_validate_json(text)
    assert Span.model_validate(fields) == model
    assert encode_span(fields) == encode_span(model)


@settings(deadline=None)
@given(spans, st.data())
def test_what_the_model_refuses_is_refused_in_the_same_place(span, data):
    name = data.draw(st.sampled_from(sorted(Span.model_fields)))
    if data.draw(st.booleans()):
        del span[name]
    else:
        span[name] = data.draw(st.sampled_from([None, -1, "x", {}, [{}], 1e999]))
    faults = []
    for adapter in (CHECKED, TypeAdapter(Span)):
        try:
            adapter.validate_json(json.dumps(span))
        except ValidationError as error:
            faults.append(
                [(fault["loc"], fault["type"].replace("model_type", "dict_type")) for fault in error.errors()]
            )
        else:
            faults.append([])
    assert faults[0] == faults[1]


@settings(deadline=None)
@given(spans, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_number_that_is_none_is_found_among_nulls(span, number, data):
    fields = CHECKED.validate_python(span)
    encode_span(fields)
    parts = [*fields["events"], *fields["links"], *filter(None, [fields["context"], fields["parent"]])]
    holder = data.draw(st.sampled_from([fields, fields["status"], fields["resource"], *parts]))
    holder["further"] = data.draw(st.sampled_from([number, [None, number], {"x": number}]))
    with pytest.raises(ConfigError, match="JSON has no NaN"):
        encode_span(fields)


def test_nulls_of_missing_fields_are_known():
    span = Span.from_attributes(attributes={"x": 1})
    span.events = [Event(name="e", attributes={}), Event(name="e", attributes={}, timestamp=1.0)]
    span.links = [Link(context=span.context, attributes=None)]
    assert num_nulls(fields_of(span)) == num_nulls(span.model_dump()) == span.model_dump_json().count("null") == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_a_server_refuses_numbers_that_are_none(url, make, number):
    """Written by hand, since our own client does not send them."""
    async with LightningStoreServer(SqlLightningStore.from_url(url)) as server:
        await server.start()
        rollout = await make.claimed(server)
        good = make.span(rollout).model_dump()
        holed = [
            {**good, "attributes": {"x": math.nan, "none": None}},
            {**good, "attributes": {"deep": [{"x": math.nan}]}},
            {**good, "events": [{"name": "e", "attributes": {}, "timestamp": math.nan}]},
            {**good, "resource": {"attributes": {"x": math.nan}, "schema_url": ""}},
            {**good, "further": math.nan},
        ]
        async with aiohttp.ClientSession(server.endpoint) as web:
            for span in holed:
                body = json.dumps({"spans": [good, span]}).replace("NaN", number)
                async with web.post(
                    "/v1/agl/spans/batch", data=body, headers={"Content-Type": "application/json"}
                ) as reply:
                    assert reply.status == 400, await reply.text()
                    assert "JSON has no NaN" in (await reply.json())["detail"]
        assert len(await server.query_spans(rollout.rollout_id)) == 0
