"""A model at an endpoint: what a request's body has, and what its answers mean."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout_core.config import EndpointModel, SamplingParams
from rollout_core.data.samples import Completion, Failure
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.endpoint_model import EndpointEngine, endpoint_id
from rollout_core.models.messages import ChatMessage
from tests.support.answer_server import AnswerServer

PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


def endpoint(url: str = "http://127.0.0.1:1/v1", **keys: Any) -> EndpointModel:
    return EndpointModel.model_validate({"kind": "endpoint", "url": url, "model": "wise", **keys})


def answers(config: EndpointModel, *prompts: str) -> Mapping[str, Any]:
    engine = EndpointEngine(config, ModelRef(endpoint_id(config), Path()))
    try:
        asked = [Request(prompt, (), PARAMS, 0, prompt) for prompt in prompts]
        return {outcome.key: outcome for outcome in engine.stream(asked)}
    finally:
        engine.close()


def test_the_most_tokens_are_sent_under_the_key_that_the_model_wants():
    keys: dict[str, Any] = {"max_tokens_key": "max_completion_tokens", "body": {"reasoning_effort": "low"}}
    with AnswerServer({"one": "1", "two": "2"}) as server:
        answers(endpoint(server.url), "one")
        answers(endpoint(server.url, leave_out=["temperature"], **keys), "two")
        plain, renamed = server.asked
    assert plain["max_tokens"] == 24 and "max_completion_tokens" not in plain
    assert renamed["max_completion_tokens"] == 24 and "max_tokens" not in renamed
    assert renamed["reasoning_effort"] == "low" and "temperature" not in renamed


def test_the_key_of_the_most_tokens_enters_an_endpoints_identity_only_where_it_is_another_one():
    assert "max_tokens_key" not in endpoint().cache_identity()
    assert endpoint_id(endpoint(max_tokens_key="max_completion_tokens")) != endpoint_id(endpoint())


def test_a_refusal_in_place_of_a_content_is_no_completion():
    with AnswerServer({"one": "1"}) as server:
        assert answers(endpoint(server.url), "one")["one"].text == "1"
        server.refusal = "I cannot help with that."
        refused = answers(endpoint(server.url), "one")["one"]
    assert refused == Failure("one", "the model refuses to answer it")


def test_tokens_of_a_cache_of_prompts_count_as_the_prompts():
    with AnswerServer({"one": "1"}) as server:
        server.usage = {"cache_creation_input_tokens": 40, "cache_read_input_tokens": 500}
        assert answers(endpoint(server.url, api="anthropic"), "one")["one"].usage == (547, 3)


@pytest.mark.parametrize("count", [None, -1, True, "7", 10**12])
def test_usage_of_anthropics_form_that_cannot_be_is_not_believed(count: Any):
    with AnswerServer({"one": "1"}) as server:
        server.usage = {"input_tokens": count}
        failed = answers(endpoint(server.url, api="anthropic"), "one")["one"]
    assert failed == Failure("one", "the answer is malformed: its usage counts no tokens", passing=True)


def test_tokens_a_minute_that_an_answer_did_not_take_are_given_back():
    # A second's worth each. If the 20,000 that are reckoned were taken, three seconds would be a minute.
    params, moments = SamplingParams(max_tokens=20_000), []
    with AnswerServer(
        {str(n): "1" for n in range(4)}, on_answer=lambda count: moments.append(time.monotonic())
    ) as server:
        server.usage = {"input_tokens": 1_000, "output_tokens": 100}
        config = endpoint(server.url, api="anthropic", tokens_per_minute=66_000, max_concurrency=1)
        engine = EndpointEngine(config, ModelRef(endpoint_id(config), Path()))
        try:
            found = list(engine.stream([Request(str(n), (), params, 0, str(n)) for n in range(4)]))
        finally:
            engine.close()
    assert len(found) == 4 and 1.5 <= moments[-1] - moments[0] < 30


def call(name: str, key: str | None = None, **arguments: Any) -> dict[str, Any]:
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if key is None else {**found, "id": key}


WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a town.", "parameters": {"x": 1}}}


def test_calls_of_tools_and_their_answers_are_blocks_of_anthropics_form():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("weather", town="Ulm"), call("weather", "b")]},
        {"role": "tool", "content": "3", "tool_call_id": "b"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": None, "tool_calls": [call("clock")], "reasoning_content": "hm"},
        {"role": "tool", "content": "noon"},
        {"role": "user", "content": "one"},
    ]
    rows = [ChatMessage.model_validate(message).plain() for message in messages]
    with AnswerServer({"one": "1"}) as server:
        config = endpoint(server.url, api="anthropic")
        engine = EndpointEngine(config, ModelRef(endpoint_id(config), Path()))
        try:
            [outcome] = engine.stream([Request("a", (), PARAMS, 0, messages=rows, tools=[WEATHER])])
        finally:
            engine.close()
        [body] = server.asked
    assert isinstance(outcome, Completion) and body["system"] == "Be brief."
    assert body["tools"] == [{"name": "weather", "description": "Of a town.", "input_schema": {"x": 1}}]
    assert body["messages"] == [
        {"role": "user", "content": "Where is it warmer?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Ulm"}},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": "3"},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "4"},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_3", "name": "clock", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_3", "content": "noon"}]},
        {"role": "user", "content": "one"},
    ]
