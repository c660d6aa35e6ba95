"""What emitters write, and how it is read back."""

from __future__ import annotations

import _thread
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from opentelemetry import trace as otel
from opentelemetry.context import Context

from rollout_core.agents import (
    DummyTracer,
    OtelTracer,
    active_trace,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    find_final_reward,
    flat,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    make_link_attributes,
    make_tag_attributes,
    nested,
    operation,
    query_linked_spans,
)
from rollout_core.base.errors import ConfigError
from rollout_core.store import LLM, Span
from rollout_core.store.semconv import LinkPydanticModel

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def traced():
    """Run a function in a trace, and return the spans."""
    tracer = OtelTracer(instrument=[])

    def run(function):
        async def body():
            async with tracer.trace_context():
                function()
                return tracer.get_last_trace()

        with tracer.lifespan():
            return asyncio.run(body())

    return run


def test_a_reward_is_one_number_or_several_by_name(traced):
    def agent():
        emit_reward(1)
        emit_reward({"speed": 0.25, "truth": np.float32(0.5)}, primary_key="truth", attributes={"why": {"so": 1}})

    one, several = traced(agent)
    assert one.name == "agentlightning.annotation" and one.status.status_code == "OK"
    assert one.attributes == {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
    assert get_rewards_from_span(several) == [("truth", 0.5), ("speed", 0.25)]
    assert several.attributes["why.so"] == 1
    assert find_final_reward([one, several]) == 0.5


def test_rewards_carry_tags_and_links_to_what_they_judge(traced):
    def agent():
        emit_annotation({"gen_ai.response.id": "r1"})
        emit_annotation({"gen_ai.response.id": "r2"})
        marks = {**make_tag_attributes(["judge", "short"]), **make_link_attributes({"gen_ai.response.id": "r2"})}
        emit_reward({"truth": 1.0, "speed": 0.5}, primary_key="truth", attributes=marks)

    *calls, judged = traced(agent)
    assert judged.attributes["agentlightning.tag.1"] == "short"
    assert judged.attributes["agentlightning.link.0.key_match"] == "gen_ai.response.id"
    assert extract_tags_from_attributes(judged.attributes) == ["judge", "short"]
    links = extract_links_from_attributes(judged.attributes)
    assert links == [LinkPydanticModel(key_match="gen_ai.response.id", value_match="r2")]
    assert query_linked_spans(calls, links) == [calls[1]]
    by_ids = make_link_attributes({"span_id": calls[0].span_id, "trace_id": calls[0].trace_id})
    assert query_linked_spans(calls, extract_links_from_attributes(by_ids)) == [calls[0]]
    by_both = make_link_attributes({"span_id": calls[0].span_id, "gen_ai.response.id": "r2"})
    assert query_linked_spans(calls, extract_links_from_attributes(by_both)) == []
    assert extract_tags_from_attributes({}) == extract_links_from_attributes({}) == []
    for reward in get_rewards_from_span(judged):
        assert (reward.name, reward.value) == tuple(reward)
    for wrong in (lambda: make_tag_attributes("judge"), lambda: make_link_attributes({"a": 1})):
        with pytest.raises(ConfigError, match="expected a"):
            wrong()


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        ("1", TypeError),
        (None, TypeError),
        ({"a": 1}, ConfigError),
        (float("inf"), ConfigError),
        ([1], TypeError),
        (np.array([1.0, 2.0]), TypeError),
    ],
)
def test_what_is_no_reward(reward, error):
    with pytest.raises(error):
        emit_reward(reward, propagate=False)


def test_rewards_of_other_tools_are_read():
    def span(name, **attributes):
        return Span.from_attributes(attributes=attributes, name=name)

    agentops = span("task", **{"agentops.task.output": json.dumps({"type": "reward", "value": 0.75})})
    older = span("agentlightning.annotation", reward=0.5)
    assert [get_reward_value(found) for found in (agentops, older, span("other", reward=0.5))] == [0.75, 0.5, None]
    assert get_reward_value(span("task", **{"agentops.task.output": "not json"})) is None


@settings(deadline=None)
@given(Json)
def test_objects_are_read_back_as_they_were(value):
    span = Span.from_core_fields(emit_object(value, propagate=False), rollout_id="r", attempt_id="a", sequence_id=1)
    assert get_object_value(span) == value


def test_other_emitters(traced):
    def agent():
        emit_message("hello", {"to": "you"})
        emit_exception(ValueError("bad"))
        emit_annotation({"a": {"b": [1, 2], "c": [1, "x"]}, "d": b"raw"})
        emit_object(b"\x00\xff")

    message, error, annotation, data = traced(agent)
    assert (get_message_value(message), message.status.status_code) == ("hello", "UNSET")
    assert error.attributes["exception.type"] == "ValueError"
    assert annotation.attributes == {"a.b": [1, 2], "a.c": '[1, "x"]', "d": '"cmF3"'}
    assert get_object_value(data) == b"\x00\xff"
    with pytest.raises(ConfigError, match="contradict"):
        emit_annotation({"a": 1, "a.b": 2}, propagate=False)
    with pytest.raises(RuntimeError, match="no JSON"):
        emit_object(object(), propagate=False)
    for wrong in (lambda: emit_message(3), lambda: emit_exception("bad")):
        with pytest.raises(TypeError):
            wrong()


def test_outside_a_trace_emitters_say_so():
    with pytest.raises(RuntimeError, match="no trace is active"):
        emit_reward(1.0)
    assert emit_reward(1.0, propagate=False).end_time is not None


def test_operations_nest_and_record_errors(traced):
    seen = []

    @operation(kind="tool")
    def search(query, *more, limit=3):
        with operation(name="inner") as inner:
            inner.set_output([1])
        seen.append(inner.span())
        return query + more[0]

    @operation
    async def fail():
        raise LookupError("nothing")

    def agent():
        search("a", "b")
        with pytest.raises(LookupError):
            fail().send(None)  # the loop runs already, so the coroutine is driven by hand

    inner, outer, failed = traced(agent)
    assert inner.parent_id == outer.span_id and seen[0].attributes["agentlightning.operation.output"] == [1]
    assert outer.attributes == {
        "agentlightning.operation.name": "search",
        "kind": "tool",
        "agentlightning.operation.input.query": "a",
        "agentlightning.operation.input.more.0": "b",
        "agentlightning.operation.input.limit": 3,
        "agentlightning.operation.output": "ab",
    }
    assert failed.status.status_code == "ERROR"
    assert failed.events[0].attributes["exception.message"] == "nothing"
    assert search("c", "d") == "cd", "outside a trace it is the function"
    with pytest.raises(RuntimeError, match="no trace is active"), operation(propagate=True):
        pass


def test_traces_follow_their_context_and_nothing_else():
    tracer = OtelTracer(instrument=[])
    found = {}

    async def one(name):
        async with tracer.trace_context() as trace:
            emit_annotation({"of": name})
            await asyncio.sleep(0.01)
            await asyncio.to_thread(emit_annotation, {"of": name})
            # Not threading.Thread, which a tracer of an earlier test may have made to carry its context.
            looked = threading.Event()
            _thread.start_new_thread(lambda: (found.setdefault(f"thread of {name}", active_trace()), looked.set()), ())
            looked.wait()
            found[name] = [span.attributes["of"] for span in trace.spans]

    async def many():
        await asyncio.gather(*[one(name) for name in "abc"])
        assert active_trace() is None

    with tracer.lifespan():
        asyncio.run(many())
    assert found == {**{name: [name, name] for name in "abc"}, **{f"thread of {name}": None for name in "abc"}}


def test_a_span_that_ends_after_its_trace_is_left_out(caplog):
    tracer = OtelTracer(instrument=[])
    late = []

    async def body():
        async with tracer.trace_context() as trace:
            late.append(tracer.operation_context("late"))
            late[0].__enter__()
        return trace

    with tracer.lifespan():
        trace = asyncio.run(body())
        assert "Span 'late' had not ended when attempt attempt-dummy of rollout rollout-dummy did" in caplog.text
        late[0].__exit__(None, None, None)
    assert trace.spans == []
    assert caplog.text.count("is left out") == 1


def test_spans_name_the_machine_that_they_come_from(traced):
    [span] = traced(lambda: emit_annotation({"a": 1}))
    assert span.resource.attributes["host.name"] == socket.gethostname()


def test_spans_with_a_context_of_their_own_belong_to_their_parents_trace(traced):
    """As of instrumentations that keep parents in a table of theirs, and are called back on any thread."""

    def instrumented():
        with operation(name="parent"):
            parent = otel.get_current_span()
            start = partial(
                otel.get_tracer("a library").start_span, context=otel.set_span_in_context(parent, Context())
            )
            start("child").end()
            thread = threading.Thread(target=lambda: start("of a thread").end())
            thread.start()
            thread.join()
            otel.get_tracer("a library").start_span("root", context=Context()).end()

    assert [span.name for span in traced(instrumented)] == ["child", "of a thread", "root", "agentlightning.operation"]


def test_a_dummy_tracers_operation_is_only_built():
    with DummyTracer().operation_context("name", {"a": {"b": 1}}) as recording:
        recording.record_status("ERROR", "so")
        with pytest.raises(RuntimeError, match="has not ended"):
            recording.get_recorded_span()
    span = recording.get_recorded_span()
    assert (span.attributes, span.status.description) == ({"a.b": 1}, "so")


Keys = st.text("abc", min_size=1, max_size=2)
Leaves = st.integers() | st.text(max_size=3) | st.booleans()


@settings(deadline=None)
@given(
    st.recursive(Leaves, lambda inner: st.dictionaries(Keys, inner, min_size=1, max_size=3)).filter(
        lambda value: isinstance(value, dict)
    )
)
def test_flat_and_nested_are_each_others_reverse(value):
    assert nested(flat(value)) == value


def test_nested_lists_and_prefixes():
    attributes = {"x.0.a": 1, "x.1.a": 2, "y": 3}
    assert nested(attributes, "x") == [{"a": 1}, {"a": 2}]
    assert nested(attributes, "y") == 3
    assert nested(attributes, "z") is None
    assert flat({"empty": {}, "none": None, "nan": float("nan")}) == {"empty": "{}", "nan": "NaN"}


def test_no_attribute_is_dropped_however_many_there_are(traced):
    def agent():
        emit_reward({f"d{place}": place for place in range(200)}, primary_key="d7")

    [span] = traced(agent)
    assert len(get_rewards_from_span(span)) == 200
    assert get_reward_value(span) == 7


SEES = """
import asyncio, logging, sys
logging.basicConfig(stream=sys.stdout)
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rollout_core.agents import OtelTracer, emit_annotation, emit_reward
if "own" in sys.argv:
    trace.set_tracer_provider(TracerProvider())
tracer = OtelTracer(instrument=[])
async def main():
    async with tracer.trace_context():
        emit_reward(0.5)
        emit_annotation({"text": "x" * 10_000})
    print([len(str(value)) for span in tracer.get_last_trace() for value in span.attributes.values()])
with tracer.lifespan():
    asyncio.run(main())
"""


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT=4096"])
def test_variables_of_opentelemetry_hide_nothing_without_a_word(variable, own):
    name, value = variable.split("=")
    command = [sys.executable, "-c", SEES, *(["own"] if own else [])]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, check=False)
    if own:
        assert name in done.stdout.splitlines()[0], done.stdout
    else:
        assert done.stdout == "[7, 3, 10000]\n", done.stderr


def test_operations_never_break_what_they_record_and_keep_no_secret(traced):
    knot: dict = {}
    knot["self"] = knot

    @operation
    def solve(task, llm):
        return task

    def agent():
        solve(knot, LLM(endpoint="http://h/v1", model="m", api_key="sk-secret"))

    [span] = traced(agent)
    assert "sk-secret" not in span.model_dump_json()
    with pytest.raises(ConfigError, match="is a generator"):

        @operation
        def items():
            yield 1
