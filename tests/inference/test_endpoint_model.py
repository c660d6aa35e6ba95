"""A model at an endpoint: what a request's body has, and what its answers mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_core.config import EndpointModel, SamplingParams
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.endpoint_model import EndpointEngine, endpoint_id
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
