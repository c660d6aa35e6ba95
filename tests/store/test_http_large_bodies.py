"""A large body, read in parts, is what it would be if it were read at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from pydantic import TypeAdapter

from rollout_core.base.errors import ConfigError
from rollout_core.store.codec import encode_stored
from rollout_core.store.http import large_bodies, requests as http_requests, wire
from rollout_core.store.http.large_bodies import list_fields, read_large
from rollout_core.store.resources import NamedResources
from rollout_core.store.types import PaginatedResult, Rollout
from rollout_core.web.http_errors import unprocessable

texts = st.text(max_size=30) | st.sampled_from(["\\", '"', '\\"', '"]}', "é\n\t", "😀" * 9, "\\" * 9 + '"'])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
requests = st.fixed_dictionaries({"input": values}, optional={"mode": st.sampled_from(["train", "no"])})
bodies = st.fixed_dictionaries(
    {"rollouts": st.lists(requests, max_size=12)}, optional={"worker_id": texts, "more": values, 'a"b': values}
)
START_MANY = TypeAdapter(wire.StartManyRequest)
LISTS = list_fields(wire.StartManyRequest)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(large_bodies, "LOOP_BYTES", 64)
    for module in (large_bodies, http_requests):
        monkeypatch.setattr(module, "LOOP_RECORDS", 3)


def at_once(data: bytes) -> Any:
    try:
        return START_MANY.validate_json(data)
    except ValueError as error:
        return type(unprocessable(error))  # pyright: ignore[reportArgumentType] - pydantic's own


def in_parts(data: bytes) -> Any:
    try:
        return asyncio.run(read_large(START_MANY.validate_json, LISTS, data))
    except ConfigError as error:
        # What is large besides its list is refused; here that is nearly everything.
        return None if "besides its list" in str(error) or "long lists" in str(error) else type(error)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies, ascii=st.booleans(), indent=st.sampled_from([None, 0, 7]))
def test_a_body_read_in_parts_is_the_same(body, ascii, indent):
    data = json.dumps(body, ensure_ascii=ascii, indent=indent).encode(errors="surrogatepass")
    assert in_parts(data) in (at_once(data), None)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=bodies, place=st.integers(0, 400), change=st.sampled_from([b"", b",", b"]", b"}", b'"', b"\\", b"\xff", b" "])
)
@example(body={"rollouts": [{"input": n} for n in range(9)]}, place=-2, change=b",")
@example(body={"rollouts": [{"input": n} for n in range(9)]}, place=14, change=b",")
def test_a_body_with_a_fault_is_refused_as_it_would_be(body, place, change):
    data = json.dumps(body).encode()
    data = data[:place] + change + data[place + 1 :]
    expected, got = at_once(data), in_parts(data)
    # A fault that comes after a record that is not as it should be may be named first.
    assert got in (expected, None) or (isinstance(expected, type) and isinstance(got, type)), data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"rollouts": [' + b'{"input": 1},' * 9 + b'{"input": 2}], "rollouts": []}', "'rollouts' twice"),
        (b'{"rollouts": [' + b'{"input": 1},' * 9 + b'{}], "worker_id": "w"}', r"rollouts\.9\.input: Field required"),
        (b'{"rollouts": [' + b'{"input": 1},' * 9 + b'{"input": 2}], "more": "%b"}' % (b"x" * 99), "besides its list"),
        (b'{"rollouts": [' + b'{"input": 1},' * 9 + b'{"input": 2}]}' + b" " * 9 + b"x", "trailing"),
        (b'{"rollouts": [' + b'{"input": 1},' * 9, "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_what_cannot_be_read_in_parts_is_said(data, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(read_large(START_MANY.validate_json, LISTS, data))


def test_a_large_body_without_a_list_is_read_at_once():
    resources = {"main": {"resource_type": "prompt_template", "template": "x" * 500, "engine": "f-string"}}
    adapter = TypeAdapter(NamedResources)
    data = json.dumps(resources).encode()
    assert asyncio.run(read_large(adapter.validate_json, list_fields(NamedResources), data)) == adapter.validate_json(
        data
    )


def test_a_large_reply_is_the_same_as_a_small_one():
    rollouts = [Rollout(rollout_id=f"r{n}", input={"n": n}, start_time=0.0) for n in range(10)]
    page = PaginatedResult[Rollout](items=rollouts, limit=-1, offset=0, total=10)
    for result in (rollouts, tuple(rollouts), page):
        assert http_requests.is_large(result)
        assert asyncio.run(http_requests.encode_large(result)) == encode_stored(result)
