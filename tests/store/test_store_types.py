"""The models by themselves: conversions, JSON, sentinels, and what importing them costs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

import rollout_core.store as package
from rollout_core.base.errors import ConfigError
from rollout_core.store import (
    LLM,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    Span,
    TraceStatus,
)
from rollout_core.store.codec import decode, encode

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def same(left, right) -> bool:
    """Equal, types of numbers included."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@settings(deadline=None)
@given(json_values)
def test_json_comes_back_as_it_went_in(value):
    text = encode(value, "value")
    assert same(decode(text), value)
    assert same(json.loads(text), value)


@settings(deadline=None)
@given(json_values, st.sampled_from([float("nan"), float("inf"), float("-inf")]), st.booleans())
def test_a_number_that_is_none_is_found_wherever_it_hides(value, bad, deep):
    with pytest.raises(ConfigError, match=r"value.*JSON has no NaN"):
        encode([value, {"k": [None, bad]}] if deep else bad, "value")


def test_what_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        encode(loop, "input")


def test_unset_is_one_object_and_false():
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET  # noqa: S301 - our own
    assert not UNSET and repr(UNSET) == "UNSET"
    update = AttemptUpdate(rollout_id="r", attempt_id="a")
    assert update.status is UNSET and update.metadata is UNSET


def test_an_attempted_rollout_holds_its_own_attempt_only():
    attempt = Attempt(rollout_id="other", attempt_id="a", sequence_id=1, start_time=0)
    with pytest.raises(ValueError, match="attempt is of rollout other"):
        AttemptedRollout(rollout_id="r", input=1, start_time=0, attempt=attempt)


def test_a_page_is_a_sequence_and_a_model():
    page = PaginatedResult[Rollout](
        items=[Rollout(rollout_id=f"r{n}", input=n, start_time=0) for n in range(3)], limit=3, offset=0, total=9
    )
    assert len(page) == 3 and page[-1].rollout_id == "r2" and [rollout.input for rollout in page[:2]] == [0, 1]
    assert page.items[1] in page and page.index(page.items[1]) == 1
    assert PaginatedResult[Rollout].model_validate_json(page.model_dump_json()) == page


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://h:1/v1", "http://h:1/rollout/r/attempt/a/v1"),
        ("http://h:1/v1/", "http://h:1/rollout/r/attempt/a/v1"),
        ("http://h:1", "http://h:1/rollout/r/attempt/a"),
        ("http://h:1/", "http://h:1/rollout/r/attempt/a"),
    ],
)
def test_a_proxy_names_rollout_and_attempt_in_its_url(endpoint, expected):
    proxy = ProxyLLM(endpoint=endpoint, model="m", api_key="k", sampling_parameters={"t": 1})
    assert proxy.get_base_url("r", "a") == expected
    assert proxy.get_base_url(None, None) == endpoint
    with pytest.raises(ValueError, match="give both"):
        proxy.get_base_url("r", None)
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0)
    llm = proxy.with_attempted_rollout(AttemptedRollout(rollout_id="r", input=1, start_time=0, attempt=attempt))
    assert llm == LLM(endpoint=expected, model="m", api_key="k", sampling_parameters={"t": 1})
    assert type(llm) is LLM


def test_reading_the_endpoint_of_a_proxy_warns(caplog):
    proxy = ProxyLLM(endpoint="http://h", model="m")
    proxy.get_base_url()
    assert not caplog.records
    assert proxy.endpoint == "http://h"
    assert "get_base_url" in caplog.text


def test_prompt_templates_are_filled_in():
    assert PromptTemplate(template="Hi {name}", engine="f-string").format(name="you") == "Hi you"
    assert PromptTemplate(template="Hi {{ name }}", engine="jinja").format(name="you") == "Hi you"
    with pytest.raises(NotImplementedError, match="engine is poml"):
        PromptTemplate(template="Hi", engine="poml").format(name="you")


def test_resources_are_told_apart_by_their_type():
    update = ResourcesUpdate.model_validate(
        {
            "resources_id": "rs-1",
            "create_time": 0,
            "update_time": 0,
            "version": 1,
            "resources": {
                "a": {"resource_type": "llm", "endpoint": "e", "model": "m"},
                "b": {"resource_type": "proxy_llm", "endpoint": "e", "model": "m"},
                "c": {"resource_type": "prompt_template", "template": "t", "engine": "poml"},
            },
        }
    )
    assert [type(resource) for resource in update.resources.values()] == [LLM, ProxyLLM, PromptTemplate]


def test_a_span_made_by_hand_has_ids_and_is_ok():
    span = Span.from_attributes(attributes={"a": 1})
    assert (span.name, span.status) == ("agentlightning.virtual", TraceStatus(status_code="OK"))
    assert (len(span.trace_id), len(span.span_id), span.sequence_id, span.rollout_id) == (32, 16, 0, "")
    assert (span.context.trace_id, span.context.span_id) == (span.trace_id, span.span_id)
    child = Span.from_attributes(attributes={}, trace_id=span.trace_id, parent_id=span.span_id, start_time=1.0)
    assert (child.parent.span_id, child.parent.trace_id) == (span.span_id, span.trace_id)
    assert child.span_id != span.span_id


@pytest.mark.parametrize("bad", [{"start_time": float("nan")}, {"sequence_id": 2**63}, {"sequence_id": -1}])
def test_spans_refuse_numbers_that_no_database_orders(bad):
    with pytest.raises(ValueError):
        Span.from_attributes(attributes={}, **bad)


def test_an_opentelemetry_span_is_converted_whole():
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

    tracer = TracerProvider(resource=Resource({"service.name": "agent"})).get_tracer("scope", "1.2")
    linked = SpanContext(trace_id=0xAB, span_id=0xCD, is_remote=True, trace_flags=TraceFlags(1))
    with tracer.start_as_current_span("parent") as parent:
        with tracer.start_as_current_span("child", links=[Link(linked, {"why": "x"})]) as child:
            child.set_attribute("ids", [1, 2])
            child.set_attribute("loss", float("nan"))
            child.add_event("token", {"n": 1}, timestamp=1_700_000_000_500_000_000)
            child.set_status(Status(StatusCode.ERROR, "boom"))
    child.note = {"public": "field"}
    span = Span.from_opentelemetry(child, "r", "a", 7)
    assert (span.rollout_id, span.attempt_id, span.sequence_id, span.name) == ("r", "a", 7, "child")
    assert span.trace_id == f"{parent.get_span_context().trace_id:032x}"
    assert span.parent_id == span.parent.span_id == f"{parent.get_span_context().span_id:016x}"
    assert span.status == TraceStatus(status_code="ERROR", description="boom")
    assert span.attributes == {"ids": [1, 2], "loss": "NaN"}, "telemetry is kept, as OTLP writes it in JSON"
    assert (span.events[0].name, span.events[0].timestamp) == ("token", 1_700_000_000.5)
    assert (span.links[0].context.trace_id, span.links[0].attributes) == (f"{0xAB:032x}", {"why": "x"})
    assert span.resource.attributes["service.name"] == "agent"
    assert 0 <= span.end_time - span.start_time < 60 and span.start_time > 1.6e9
    assert span.model_extra == {
        "kind": "INTERNAL",
        "instrumentation_scope": {"name": "scope", "version": "1.2"},
        "note": {"public": "field"},
    }
    assert Span.model_validate_json(span.model_dump_json()) == span


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (Rollout, "rollout_id input start_time end_time mode resources_id status config metadata"),
        (
            Attempt,
            "rollout_id attempt_id sequence_id start_time end_time status worker_id last_heartbeat_time metadata",
        ),
        (EnqueueRolloutRequest, "input mode resources_id config metadata rollout_id"),
        (ResourcesUpdate, "resources_id create_time update_time version resources"),
    ],
)
def test_models_have_the_documented_fields(model, fields):
    assert " ".join(model.model_fields) == fields


def test_every_public_name_can_be_imported():
    assert len(package.__all__) > 50
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nope"):
        _ = package.nope


def test_importing_the_package_imports_nothing_heavy():
    script = (
        "import sys, rollout_core.store as s; s.SqlLightningStore; s.Span\n"
        "heavy = ('sqlalchemy', 'opentelemetry', 'fastapi', 'torch')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
