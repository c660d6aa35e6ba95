"""From spans to trees, triplets and messages: a real client's spans, the proxy's, the peer's, and made-up ones."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings, strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollout_core.agents.adapters.adapter import Triplet
from rollout_core.agents.adapters.chat_messages import TraceToMessages
from rollout_core.agents.adapters.containment import tightest_containers
from rollout_core.agents.adapters.credit import RewardMatchPolicy
from rollout_core.agents.adapters.drawing import draw_trace
from rollout_core.agents.adapters.token_sequences import token_turns
from rollout_core.agents.adapters.tree import TraceTree
from rollout_core.agents.adapters.triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet
from rollout_core.agents.emitters import emit_reward, reward_attributes
from rollout_core.agents.operation_spans import operation
from rollout_core.agents.otel import OtelTracer
from rollout_core.base.errors import ConfigError
from rollout_core.store import OtelResource, Span, TraceStatus
from rollout_core.store.semconv import AGL_ANNOTATION, AGL_OPERATION, AGL_VIRTUAL, LLM_CALL
from tests.agents.scripted_chat import completion, scripted_chat

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "sky"}'}}
ANSWERS = [
    completion(1, {"content": None, "tool_calls": [CALL]}, "tool_calls"),
    completion(2, {"content": "It is blue."}),
]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What colour is the sky?"}]
WITH_RESULT = [
    *QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "blue", "tool_call_id": "call-1"},
]


async def trace_of_real_client(*, stream: bool = False) -> list[Span]:
    """Two turns with a tool call, a reward after each, inside an operation; a call that fails, and a judge's."""
    tracer = OtelTracer(instrument=["openai"])
    with scripted_chat([*ANSWERS, completion(3, {"content": "good"})]) as url, tracer.lifespan():
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)

        def ask(messages: Any, **options: Any) -> None:
            found = client.chat.completions.create(model="m", messages=messages, **options)
            if options.get("stream"):
                assert len(list(found)) == 3

        async with tracer.trace_context() as trace:
            with operation(name="agent"):
                ask(QUESTION, tools=[TOOL], temperature=0.5, stream=stream)
                emit_reward(0.25)
                ask(WITH_RESULT, tools=[TOOL], temperature=0.5, stream=stream)
            emit_reward({"right": 1.0, "short": 0.5}, primary_key="right")
            with operation(name="agentlightning.reward"):
                ask([{"role": "user", "content": "judge"}])
            with pytest.raises(openai.BadRequestError):
                ask(QUESTION)
        client.close()
        return trace.spans


@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_clients_calls_become_triplets(stream: bool):
    spans = await trace_of_real_client(stream=stream)
    found = TracerTraceToTriplet().adapt(spans)
    assert [triplet.reward for triplet in found] == [0.25, 1.0]
    assert [triplet.metadata["response_id"] for triplet in found] == ["chatcmpl-1", "chatcmpl-2"]
    assert found[0].prompt == {"token_ids": [], "raw_content": QUESTION, "image_urls": []}
    assert found[1].response == {"token_ids": [], "raw_content": [{"role": "assistant", "content": "It is blue."}]}
    assert found[1].metadata["request"] == {"model": "m", "temperature": 0.5}
    assert found[1].metadata["agent_name"] == "*" and found[1].metadata["finish_reason"] == "stop"
    with_judge = TracerTraceToTriplet(exclude_llm_call_in_reward=False).adapt(spans)
    assert [triplet.metadata["response_id"] for triplet in with_judge] == ["chatcmpl-1", "chatcmpl-2", "chatcmpl-3"]
    siblings = TracerTraceToTriplet(reward_match="first_sibling").adapt(spans)
    assert [triplet.reward for triplet in siblings] == [0.25, None], "the last reward is outside the operation"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_clients_calls_become_messages_with_tools(stream: bool):
    found = TraceToMessages().adapt(await trace_of_real_client(stream=stream))
    first, second = found[:2]
    assert first["messages"] == WITH_RESULT[:3] and first["tools"] == second["tools"] == [TOOL]
    assert second["messages"] == [*WITH_RESULT, {"role": "assistant", "content": "It is blue."}]
    assert [len(item["messages"]) for item in found] == [3, 5, 2, 2], "the judge's, and what failed has no answer"
    json.dumps(found)


async def test_tracers_one_after_the_other_record_each_call_once():
    """The instrumentation of openai cannot be undone; begun again it would record calls twice."""
    first, second = await trace_of_real_client(), await trace_of_real_client()
    assert [item.name for item in first] == [item.name for item in second]
    assert sum(item.name == "openai.chat" for item in second) == 4


async def test_a_call_that_the_proxy_recorded_too_is_one_with_its_tokens():
    spans = await trace_of_real_client()
    records = [
        llm_call(number, [number], [7, 8], start=0.0, message=answer["choices"][0]["message"], sent=sent)
        for number, answer, sent in zip((1, 2), ANSWERS, (QUESTION, WITH_RESULT), strict=True)
    ]
    found = TracerTraceToTriplet().adapt([*records, *spans])
    assert [triplet.prompt["token_ids"] for triplet in found] == [[1], [2]]
    assert [triplet.response["logprobs"] for triplet in found] == [[{"logprob": -0.5}, {"logprob": -0.5}]] * 2
    assert [triplet.reward for triplet in found] == [0.25, 1.0]
    assert [triplet.metadata["model_id"] for triplet in found] == ["weights-1"] * 2
    assert [item["messages"] for item in TraceToMessages().adapt([*records, *spans])[:2]] == [
        WITH_RESULT[:3],
        [*WITH_RESULT, {"role": "assistant", "content": "It is blue."}],
    ]
    # The proxy's clock is no use, and numbers were given as spans came; the tracer's times decide.
    for number, span in enumerate(records, start=101):
        span.sequence_id = number
    assert [item.reward for item in LlmProxyTraceToTriplet().adapt([*spans, *records])] == [0.25, 1.0]


async def test_spans_of_the_sdk_are_taken_too():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("agent", attributes={"agent.name": "solver"}):
        tracer.start_span("openai.chat.completion", attributes=peer_call("r", [1], [2])).end()
        tracer.start_span(AGL_ANNOTATION, attributes=reward_attributes(0.5)).end()
    [found] = TracerTraceToTriplet(agent_match="^solver$").adapt(exporter.get_finished_spans())
    assert found.reward == 0.5 and found.metadata["agent_name"] == "solver"


# Spans by hand


def span(
    name: str,
    start: float | None,
    end: float | None = None,
    *,
    id: str | None = None,
    parent: str | None = None,
    number: int = 0,
    attributes: dict[str, Any] | None = None,
    host: str | None = None,
    status: Any = "OK",
) -> Span:
    return Span.from_attributes(
        rollout_id="ro",
        attempt_id="at",
        name=name,
        span_id=id,
        parent_id=parent,
        sequence_id=number,
        start_time=start,
        end_time=start if end is None else end,
        attributes=attributes or {},
        resource=OtelResource(attributes={"host.name": host} if host else {}, schema_url=""),
        status=TraceStatus(status_code=status),
    )


def reward(value: float, at: float | None, **options: Any) -> Span:
    return span(AGL_ANNOTATION, at, attributes=reward_attributes(value), **options)


def peer_call(response_id: str, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
    """Attributes of an LLM call as AgentOps' instrumentation and the peer write them."""
    return {
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.functions.0.name": "look_up",
        "gen_ai.request.functions.0.description": "Finds things.",
        "gen_ai.request.functions.0.parameters": '{"type": "object"}',
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": "m-1",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": '[{"type": "image_url", "image_url": {"url": "http://x/1.png"}}]',
        "gen_ai.prompt.1.tool_calls.0.id": "call-1",
        "gen_ai.prompt.1.tool_calls.0.name": "look_up",
        "gen_ai.prompt.1.tool_calls.0.arguments": "{}",
        "gen_ai.prompt.2.content": "nobody knows who said this",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "hi",
        "gen_ai.completion.0.finish_reason": "stop",
        "prompt_token_ids": list(prompt),
        "response_token_ids": list(response),
        "logprobs.content": json.dumps([{"token": "t", "logprob": -0.25} for _ in response]),
    }


def llm_call(
    number: int,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    start: float,
    message: Any = None,
    sent: Any = None,
    host: str | None = None,
    **more: Any,
) -> Span:
    """A call as our proxy records it, with its number as sequence id."""
    attributes = {
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.response.id": f"chatcmpl-{number}",
        "gen_ai.input.messages": json.dumps(sent or [{"role": "user", "content": "hi"}]),
        "gen_ai.output.messages": json.dumps([message or {"role": "assistant", "content": "yes"}]),
        "rollout.tools": json.dumps([TOOL]),
        "rollout.prompt_token_ids": list(prompt),
        "rollout.choices.0.token_ids": list(response),
        "rollout.choices.0.logprobs": [-0.5] * len(response),
        "rollout.choices.0.finish_reason": "stop",
        "rollout.model_id": "weights-1",
        "rollout.served_model": "m@1",
    }
    return span(LLM_CALL, start, start + 1, number=number, attributes={**attributes, **more}, host=host)


def test_traces_without_calls_have_no_triplets():
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet(), TraceToMessages()):
        assert adapter([]) == [] and adapter([reward(1.0, 1.0)]) == []
    with pytest.raises(ConfigError, match="no spans"):
        TraceTree.from_spans([])


def test_options_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="reward_match is 'last'; expected one of first_occurrence, first_sibling"):
        TracerTraceToTriplet(reward_match="last")
    with pytest.raises(ConfigError, match=r"agent_match is '\(', which is no regular expression"):
        TracerTraceToTriplet(agent_match="(")


def test_the_peers_spans_are_read():
    spans = [span("openai.chat.completion", 1, 2, attributes=peer_call("r", [1, 2], [3])), reward(1.0, 3)]
    [found] = TracerTraceToTriplet().adapt(spans)
    assert found.prompt["token_ids"] == [1, 2] and found.prompt["image_urls"] == ["http://x/1.png"]
    assert found.prompt["raw_content"][1] == {"tool_calls": [{"id": "call-1", "name": "look_up", "arguments": "{}"}]}
    assert found.response == {
        "token_ids": [3],
        "raw_content": [{"role": "assistant", "content": "hi", "finish_reason": "stop"}],
        "logprobs": [{"logprob": -0.25}],
    }
    assert found.reward == 1.0 and found.metadata["response"] == {"id": "r", "model": "m-1"}
    [conversation] = TraceToMessages().adapt(spans)
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "assistant"]
    assert conversation["messages"][1]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    ]
    assert conversation["tools"] == [
        {
            "type": "function",
            "function": {"name": "look_up", "description": "Finds things.", "parameters": {"type": "object"}},
        }
    ]


def test_tool_calls_may_be_spans_below_the_call():
    tool = {"tool.name": "look_up", "tool.parameters": '{"a": 1}', "tool.call.id": "c9", "tool.call.type": "function"}
    spans = [
        span("openai.chat.completion", 1, 2, id="aa", attributes=peer_call("r", [1], [2])),
        span("tool_usage", 1.5, parent="aa", attributes=tool),
    ]
    [conversation] = TraceToMessages().adapt(spans)
    assert conversation["messages"][-1]["tool_calls"] == [
        {"id": "c9", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
    ]


def test_weaves_spans_are_read():
    attributes = {
        "agentlightning.operation.input.model": "m",
        "agentlightning.operation.input.messages.0.role": "user",
        "agentlightning.operation.input.messages.0.content": "hi",
        "agentlightning.operation.output.id": "r",
        "agentlightning.operation.output.prompt_token_ids": [1],
        "agentlightning.operation.output.choices.0.token_ids": [2, 3],
        "agentlightning.operation.output.choices.0.message.role": "assistant",
        "agentlightning.operation.output.choices.0.message.content": "yes",
    }
    spans = [span("openai.chat.completions.create", 1, 2, attributes=attributes)]
    [found] = TracerTraceToTriplet().adapt(spans)
    assert (found.prompt["token_ids"], found.response["token_ids"]) == ([1], [2, 3])
    assert found.metadata["request"] == {"model": "m"} and found.metadata["response"] == {"id": "r"}
    [conversation] = TraceToMessages().adapt(spans)
    assert conversation["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_litellms_spans_are_read():
    raw = {
        "llm.hosted_vllm.id": "r1",
        "llm.hosted_vllm.prompt_token_ids": "[1, 2]",
        "llm.hosted_vllm.choices": "[{'token_ids': [3], 'finish_reason': None, 'stop_reason': None}]",
    }
    older = {**raw, "llm.hosted_vllm.id": "r2", "llm.hosted_vllm.response_token_ids": "[[4, 5]]"}
    spans = [
        span("litellm_request", 3, number=2, attributes={"prompt_token_ids": [9], "response_token_ids": "[8]"}),
        span("raw_gen_ai_request", 2, number=1, attributes=older),
        span("raw_gen_ai_request", 1, number=1, attributes=raw),
        span("litellm_request", 1, number=1, attributes={"gen_ai.response.id": "r1"}),
        span("raw_gen_ai_request", 4, number=4, attributes=raw),
        span("raw_gen_ai_request", 4, number=5, attributes={**raw, "llm.hosted_vllm.prompt_token_ids": "no list ("}),
        reward(1.0, None, number=2),
        reward(2.0, None, number=6),
    ]
    found = LlmProxyTraceToTriplet().adapt(spans)
    assert [(item.prompt["token_ids"], item.response["token_ids"]) for item in found] == [
        ([1, 2], [3]),
        ([1, 2], [4, 5]),
        ([9], [8]),
        ([1, 2], [3]),
    ]
    assert [item.reward for item in found] == [None, 1.0, None, 2.0], (
        "the smaller number comes first, an equal one does not"
    )


# The proxy's


def test_a_server_that_repeats_its_ids_loses_no_call():
    records = [llm_call(number, [number], [7, 8], start=number) for number in (1, 2, 3)]
    traced = [
        span("openai.chat", number, number + 0.5, number=number + 10, attributes={"gen_ai.response.id": "x"})
        for number in (1, 2)
    ]
    for record in records:
        record.attributes["gen_ai.response.id"] = "x"
    inner = span("openai.chat", 1.1, 1.4, number=20, attributes={"gen_ai.response.id": "x"})
    inner.parent_id = traced[0].span_id
    spans = [*records, *traced, inner, traced[1].model_copy(update={"sequence_id": 21})]
    earned = [reward(0.25, 1.7, number=30), reward(0.5, 2.7, number=31)]
    assert [turn.prompt_ids for turn in token_turns(spans)] == [[1], [2], [3]]
    assert [turn.reward for turn in token_turns([s for s in [*spans, *earned] if s is not records[2]])] == [0.25, 0.5]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        found = sorted(item.prompt["token_ids"] for item in adapter.adapt(spans))
        assert found == [[1], [2], [3]], adapter
    assert len(TraceToMessages().adapt(spans)) == 3
    assert draw_trace([*records, *traced]).count("2 out") == 3


def test_the_proxys_calls_are_ordered_by_number_and_failed_ones_are_none():
    broken = llm_call(2, [1], [2], start=1.5)
    broken.status = TraceStatus(status_code="ERROR")
    no_ids = llm_call(4, [], [], start=6)
    spans = [
        llm_call(3, [1, 5], [6], start=0),
        broken,
        llm_call(1, [1], [5], start=5),
        no_ids,
        reward(1.0, 2, number=9),
    ]
    found = LlmProxyTraceToTriplet().adapt(spans)
    assert [triplet.prompt["token_ids"] for triplet in found] == [[1], [1, 5]]
    assert [triplet.reward for triplet in found] == [None, 1.0]
    assert found[0].response["raw_content"] == [{"role": "assistant", "content": "yes"}]
    assert found[0].metadata == {
        "request": {"model": "m", "temperature": 0.7},
        "response": {"id": "chatcmpl-1"},
        "response_id": "chatcmpl-1",
        "agent_name": None,
        "finish_reason": "stop",
        "model_id": "weights-1",
    }
    [conversation, *_] = TraceToMessages().adapt(spans[2:3])
    assert conversation["tools"] == [TOOL] and len(conversation["messages"]) == 2


def test_time_decides_over_numbers_where_one_clock_saw_both():
    """The tracer delivers in batches: the first turn's reward is numbered after the second call."""
    late = reward(0.25, 2.5, number=3, host="h")
    final = reward(1.0, 9, number=4, host="h")
    one, two = ([llm_call(n, [n], [n], start=2.0 * n - 1, host=host) for n in (1, 2)] for host in ("h", "elsewhere"))
    assert [item.reward for item in LlmProxyTraceToTriplet().adapt([late, *one, final])] == [0.25, 1.0]
    assert [item.reward for item in LlmProxyTraceToTriplet().adapt([late, *two, final])] == [1.0, 0.25]
    at_once = reward(0.25, 1.9, number=3, host="h")
    assert [item.reward for item in LlmProxyTraceToTriplet().adapt([at_once, *one, final])] == [0.25, 1.0]
    early = reward(0.25, 2.5, number=0, host="h")
    assert [item.reward for item in LlmProxyTraceToTriplet().adapt([early, *one, final])] == [0.25, 1.0]


# Trees


def names(tree: TraceTree) -> Any:
    return tree.names_tuple()


def test_a_tree_has_virtual_nodes_for_what_is_missing():
    spans = [
        span("b", 3, 4, id="b", parent="lost"),
        span("a", 1, 2, id="a", parent="lost"),
        span("c", 2.5, 2.6, id="c", parent="a"),
        span("root", 0, 1, id="root"),
    ]
    tree = TraceTree.from_spans(spans)
    assert names(tree) == (
        "virtual-root",
        [("root", []), (AGL_VIRTUAL, [("a", [("c", [])]), ("b", [])])],
    )
    assert (tree.start_time, tree.end_time) == (0, 4)
    lost = tree.find_id("lost")
    assert lost is not None and (lost.start_time, lost.end_time) == (1, 4) and tree.find_id("nothing") is None
    assert [node.id for node in tree.traverse()] == ["virtual-root", "root", "lost", "a", "c", "b"]
    assert tree.draw().splitlines()[2:4] == [f"  {AGL_VIRTUAL} 3000 ms", "    a 1000 ms"]


def test_a_tree_is_json_with_its_children():
    spans = [
        span("agent", 0, 9, number=1, id="a" * 16),
        span("tool", 1, 2, number=2, id="b" * 16, parent="a" * 16, attributes={"x": 1}),
    ]
    found = json.loads(json.dumps(TraceTree.from_spans(spans).to_json()))
    assert (found["id"], found["span"]["name"]) == ("a" * 16, "agent")
    [child] = found["children"]
    assert child["span"]["attributes"] == {"x": 1} and child["children"] == []
    assert Span.model_validate(child["span"]) == spans[1]


def test_loops_are_cut_and_the_same_span_twice_counts_once(caplog: pytest.LogCaptureFixture):
    spans = [
        span("tail", 9, id="t", parent="b"),
        span("b", 2, 3, id="b", parent="a"),
        span("a", 1, 4, id="a", parent="b"),
        span("self", 5, id="s", parent="s"),
        span("b", 2, 3, id="b", parent="a"),
        span("other", 7, id="b", parent="a"),
    ]
    with caplog.at_level(logging.WARNING):
        tree = TraceTree.from_spans(spans)
    assert names(tree) == ("virtual-root", [("a", [("b", [("tail", [])]), ("other", [])]), ("self", [])])
    assert tree.find_id("b#2") is not None
    assert "each other's parents, such as a" in caplog.text and "several spans of one id, such as b" in caplog.text


def test_floating_calls_move_under_the_agent_around_them():
    spans = [
        span("session", 0, 100, id="s"),
        span("outer", 1, 50, id="o", parent="s", attributes={"agent.name": "outer"}),
        span("inner", 2, 20, id="i", parent="o", attributes={"agent.name": "inner"}),
        span("dispatch", 60, 61, id="d", parent="s"),
        span("worker", 60.5, 90, id="w", parent="d", attributes={"agent.name": "worker"}),
        *(
            span("openai.chat", start, start + 1, parent="s", attributes={"gen_ai.response.id": f"{start}"})
            for start in (5, 30, 70, 95)
        ),
    ]
    adapter = TracerTraceToTriplet()
    assert [triplet.metadata["agent_name"] for triplet in adapter.adapt(spans)] == ["inner", "outer", "worker", "*"]
    kept = TracerTraceToTriplet(repair_hierarchy=False)
    assert [triplet.metadata["agent_name"] for triplet in kept.adapt(spans)] == ["*"] * 4
    matched = TracerTraceToTriplet(agent_match="outer|worker").adapt(spans)
    assert [triplet.metadata["response_id"] for triplet in matched] == ["30", "70"], "the nearest agent counts"


def test_of_concurrent_calls_none_swallows_another():
    spans = [
        span("agent", 0, 10, id="a"),
        span("openai.chat", 1, 9, parent="a"),
        span("openai.chat", 2, 3, parent="a"),
        span("openai.chat", 2, 3, parent="a", id="x"),
        span("openai.chat", 2.5, 3, parent="x"),
    ]
    assert len(TracerTraceToTriplet().adapt(spans)) == 3, "one recorded inside another is the same"


def test_a_span_never_comes_below_itself():
    """Children that outlive their parents contain them, and two of them each other's."""
    spans = [
        span("x", 0, 2, id="x"),
        span("x2", 0, 10, id="x2", parent="x"),
        span("y", 1, 3, id="y"),
        span("y2", 0, 5, id="y2", parent="y"),
    ]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert sorted(node.id for node in tree.traverse()) == ["virtual-root", "x", "x2", "y", "y2"]


intervals = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: (float(pair[0]), float(sum(pair))))


@settings(deadline=None)
@given(st.lists(st.lists(intervals, min_size=1, max_size=4), max_size=6))
def test_containers_are_those_that_a_plain_search_finds(families: list[list[tuple[float, float]]]):
    nodes = [
        [TraceTree(f"{family}.{place}", span("n", *times)) for place, times in enumerate(members)]
        for family, members in enumerate(families)
    ]
    found = tightest_containers(nodes, lambda node: True)
    below = {one.id.split(".")[0]: other.id.split(".")[0] for one, other in found}
    for family in below:
        seen, place = set(), family
        while place in below:
            assert place not in seen, "a loop"
            seen.add(place)
            place = below[place]
    is_nested = all(covers(members[0], node) for members in nodes for node in members)
    lengths = {one.id: length(other) for one, other in found}
    for family, members in enumerate(nodes):
        first = members[0]
        others = (node for other, rest in enumerate(nodes) if other != family for node in rest)
        wider = [length(node) for node in others if covers(node, first) and length(node) > length(first)]
        if first.id in lengths:
            assert lengths[first.id] == min(wider)
        elif is_nested:
            assert not wider, "only children that outlive their parents could close a loop"


def length(node: TraceTree) -> float:
    return node.end_time - node.start_time


def covers(one: TraceTree, other: TraceTree) -> bool:
    return one.start_time <= other.start_time and one.end_time >= other.end_time


# Rewards


def rewards_of(spans: Sequence[Span], **options: Any) -> list[float | None]:
    return [triplet.reward for triplet in TracerTraceToTriplet(**options).adapt(spans)]


def test_a_reward_goes_to_the_latest_call_that_is_over_and_has_none():
    calls = [span("openai.chat", start, end, number=n) for n, (start, end) in enumerate([(1, 2), (3, 4), (5, 9)])]
    assert rewards_of([*calls, reward(0.5, 4.5)]) == [None, 0.5, None]
    assert rewards_of([*calls, reward(0.5, 10), reward(0.25, 11)]) == [None, 0.25, 0.5], "two in a row fill backwards"
    assert rewards_of([*calls, reward(0.5, 6), reward(1.0, 7), reward(2.0, 8)]) == [1.0, 0.5, None], "one is in flight"
    assert rewards_of([*calls, reward(0.5, 0.5)]) == [None] * 3
    assert rewards_of([*calls, reward(0.5, None)]) == [None, None, 0.5], "one without a time comes last"


def test_siblings_are_looked_for_below_one_parent():
    spans = [
        span("agent", 0, 10, id="a"),
        span("openai.chat", 1, 2, parent="a"),
        span("tool", 3, 6, id="t", parent="a"),
        span("openai.chat", 4, 5, parent="t"),
        reward(0.5, 7, parent="a"),
    ]
    assert rewards_of(spans) == [None, 0.5]
    assert rewards_of(spans, reward_match=RewardMatchPolicy.FIRST_SIBLING) == [0.5, None]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cr"), st.integers(0, 20), st.integers(0, 5)), max_size=30))
def test_rewards_match_as_a_plain_search_does(items: list[tuple[str, int, int]]):
    spans = [
        span("openai.chat", start, start + length + 1, number=number)
        if kind == "c"
        else reward(float(number), start + 0.5, number=number)
        for number, (kind, start, length) in enumerate(items)
    ]
    ordered = sorted((TraceTree(item.name, item) for item in spans), key=lambda node: node.order)
    calls = [node for node in ordered if node.id == "openai.chat"]
    expected: dict[int, float] = {}
    for node in ordered:
        over = [place for place, call in enumerate(calls) if call.end_time <= node.start_time and place not in expected]
        if node.id == AGL_ANNOTATION and over:
            expected[over[-1]] = float(node.span.sequence_id)
    assert rewards_of(spans, repair_hierarchy=False) == [expected.get(place) for place in range(len(calls))]


def test_ten_thousand_spans_take_less_than_seconds():
    spans_of_a_kind = [_flat_and_deep(count) for count in (500, 10_000)]
    few, many = (min(_seconds_of_trees(kinds) for _ in range(2)) for kinds in spans_of_a_kind)
    assert many < 100 * few, "what is quadratic takes 400 times as long"
    [_, [_, deep]] = spans_of_a_kind
    assert len(TracerTraceToTriplet(exclude_llm_call_in_reward=False).adapt(deep)) == 6_666


def _flat_and_deep(count: int) -> tuple[list[Span], list[Span]]:
    flat = [
        span(
            "openai.chat",
            i,
            i + (99 if i % 7 else 5),
            id=f"{i:016x}",
            number=i,
            attributes={"gen_ai.response.id": f"{i}"},
        )
        if i % 3
        else reward(1.0, i, id=f"{i:016x}", number=i)
        for i in range(count)
    ]
    return flat, [item.model_copy(update={"parent_id": f"{i - 1:016x}" if i else None}) for i, item in enumerate(flat)]


def _seconds_of_trees(kinds: Sequence[list[Span]]) -> float:
    """Of this thread's own work, whatever else the machine does."""
    started = time.thread_time()
    for spans in kinds:
        tree = TraceTree.from_spans(spans)
        tree.repair_hierarchy()
        assert len(tree.traverse()) >= len(spans)
        assert TracerTraceToTriplet(exclude_llm_call_in_reward=False).adapt(spans)
    return time.thread_time() - started


def test_a_triplet_is_a_model():
    [found] = LlmProxyTraceToTriplet().adapt([llm_call(1, [1], [2], start=0)])
    assert Triplet.model_validate_json(found.model_dump_json()) == found


def test_operations_that_find_rewards_are_reward_spans():
    judge = span(AGL_OPERATION, 1, 2, attributes={"agentlightning.operation.name": "agentlightning.reward"})
    assert TraceTree.from_spans([judge]).is_reward_span() and not TraceTree.from_spans([span("a", 1)]).is_reward_span()
