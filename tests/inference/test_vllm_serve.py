"""The OpenAI backend against a real ``vllm serve``: what it answers is what the engine in process does; it may die."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from alike import GREEDY, PROMPTS, assert_alike, assert_close, requests
from batches import make_batch
from openai import AsyncOpenAI
from served import VLLMServer
from test_scoring import PAIRS, requests_of

from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.base.errors import Recoverable
from rollout_core.config import (
    ChoiceOutput,
    JsonSchemaOutput,
    OpenAIBackend,
    RegexOutput,
    SamplingParams,
)
from rollout_core.data.samples import Completion, decode_completions_blob
from rollout_core.inference.backend import Request
from rollout_core.inference.openai_http import OpenAIEngine
from rollout_core.store import InMemoryLightningStore

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(small, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    running = VLLMServer(small.folder, Path(tmp_path_factory.mktemp("serve")) / "log")
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(autouse=True)
def small_in_engine(vllm_engine, small):
    vllm_engine.update_weights(small)


@pytest.fixture
def engine_of(server, small):
    built: list[OpenAIEngine] = []

    def build(**config) -> OpenAIEngine:
        built.append(OpenAIEngine(OpenAIBackend(**{"url": server.url, **config}), small))
        return built[-1]

    yield build
    for engine in built:
        engine.close()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"logprobs": 3},
        {"stop": ("=",), "min_tokens": 4},
        {"stop_token_ids": (20, 23, 26, 260), "min_tokens": 3},
        {"ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2},
        {"structured": RegexOutput(pattern="[0-9]{3} [ab]{2,5}"), "logprobs": 2},
    ],
    ids=["plain", "alternatives", "stop", "stop tokens", "penalties", "guided"],
)
def test_greedy_completions_equal_those_of_the_engine_in_process(engine_of, vllm_engine, tokenizer, change):
    asked = requests(tokenizer, SamplingParams(temperature=0.0, max_tokens=24, **change))
    assert_alike(engine_of().generate(asked), vllm_engine.generate(asked))


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_continuations_are_scored_as_by_the_engine_in_process(engine_of, vllm_engine, small, dialect):
    asked = requests_of(small, PAIRS[:-1])
    for one, other in zip(engine_of(dialect=dialect).generate(asked), vllm_engine.generate(asked), strict=True):
        assert (one.text, one.greedy) == (other.text, other.greedy)
        assert_close(one.logprobs, other.logprobs)


def test_sampled_completions_too_for_a_request_has_its_own_seed(engine_of, vllm_engine, tokenizer):
    asked = requests(tokenizer, SamplingParams(temperature=0.9, max_tokens=24, logprobs=2), PROMPTS * 4)
    assert_alike(engine_of().generate(asked), vllm_engine.generate(asked))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_texts_cut_at_stop_strings_are_believed_whatever_bytes_they_hold(engine_of, tokenizer, api):
    """A model that was never trained writes bytes that make no characters."""
    params = SamplingParams(temperature=1.0, max_tokens=24, stop=("=", "1", "e", "\ufffd!"), logprobs=2)
    completions = engine_of(api=api).generate(requests(tokenizer, params, PROMPTS * 20))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert any("\ufffd" in completion.text for completion in completions)


def test_a_chat_endpoint_gives_its_tokens_and_their_alternatives(engine_of, tokenizer):
    engine = engine_of(api="chat")
    params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=3)
    [completion] = engine.generate(requests(tokenizer, params, ["hello"]))
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.top_logprobs)
    assert {len(top) for top in completion.top_logprobs} == {3}
    for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
        assert list(top) == sorted(top, key=lambda entry: -entry[1])
        assert dict(top).get(token, logprob) == logprob and (token in dict(top) or logprob <= top[-1][1])


@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        (ChoiceOutput(choices=("yes", "no", "12 3")), lambda text: text in ("yes", "no", "12 3")),
        (RegexOutput(pattern="[ab]{2,4}[0-9]"), lambda text: re.fullmatch("[ab]{2,4}[0-9]", text)),
        (JsonSchemaOutput(definition={"enum": ["a", 5]}), lambda text: json.loads(text) in ("a", 5)),
    ],
)
def test_guided_completions_have_their_form(engine_of, tokenizer, structured, fits):
    params = SamplingParams(max_tokens=40, structured=structured)
    for completion in engine_of().generate(requests(tokenizer, params, PROMPTS * 4)):
        assert completion.finish_reason == "stop" and fits(completion.text), completion.text


def test_a_prompt_too_long_for_the_server_fails_alone(engine_of, tokenizer):
    """One longer than its context is refused, one that leaves too little room is cut by the server, unasked."""
    long = [Request(f"long{tokens}", [5] * tokens, GREEDY, 0) for tokens in (97, 90)]
    found = {outcome.key: outcome for outcome in engine_of().stream([*requests(tokenizer, GREEDY), *long])}
    assert "HTTP 400" in found["long97"].reason and not found["long97"].passing
    assert "the endpoint cut it after 6 tokens" in found["long90"].reason and not found["long90"].passing
    assert sum(isinstance(outcome, Completion) for outcome in found.values()) == 5


async def test_the_proxy_records_the_tokens_of_a_chat_streamed_or_not(server, tokenizer):
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(1)
        proxy = LLMProxy(0, [ModelEntry("m", [Upstream(url=server.url, model="small", model_id="weights")])], store)
        await proxy.start()
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        messages: list = [{"role": "user", "content": "sort 3 1 2 ="}]
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            create = client.chat.completions.create
            whole = await create(model="m", messages=messages, temperature=0.0, max_tokens=12)
            stream = await create(model="m", messages=messages, temperature=0.0, max_tokens=12, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
        await proxy.stop()
        first, second = [span.attributes for span in await store.query_spans(rollout.rollout_id)]
    assert whole.choices[0].logprobs is None and {chunk.logprobs for chunk in chunks} == {None}
    text = whole.choices[0].message.content
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    assert {json.loads(call["gen_ai.output.messages"])[0]["content"] for call in (first, second)} == {text}
    assert tokenizer.decode(first["rollout.prompt_token_ids"]).endswith("<user>sort 3 1 2 =")
    for key in ("rollout.prompt_token_ids", "rollout.choices.0.token_ids", "rollout.choices.0.finish_reason"):
        assert first[key] == second[key]
    logprobs = first["rollout.choices.0.logprobs"]
    assert len(logprobs) == len(first["rollout.choices.0.token_ids"]) == 12 and max(logprobs) <= 0
    assert second["rollout.choices.0.logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert first["rollout.model_id"] == "weights" and first["rollout.served_model"] == "small"


@pytest.mark.campaign
async def test_a_server_killed_in_the_middle_ends_for_now_and_the_next_run_does_the_rest(
    engine_of, server, small, tmp_path
):
    batch = make_batch(tmp_path, small, [f"sort {number} 3 1 =" for number in range(80)])
    first = engine_of(max_retries=1, backoff_seconds=0.05, max_concurrency=8)
    stream = first.stream

    def until_killed(requests):
        for count, outcome in enumerate(stream(requests)):
            if count == 30:
                server.kill()
            yield outcome

    first.stream = until_killed
    with pytest.raises(Recoverable, match="8 samples in a row got no answer"):
        await batch.complete(first, deterministic=False, commit_size=5)
    done = {name for name, rollout in (await batch.rollouts()).items() if rollout.status == "succeeded"}
    assert 30 <= len(done) < 80
    server.start()
    second = engine_of()
    asked: list[str] = []
    ask = second._complete

    def remember(request):
        asked.append(request.key)
        return ask(request)

    second._complete = remember
    record = await batch.complete(second, deterministic=False)
    assert set(asked) == set(batch.ids) - done and len(asked) == len(set(asked)), "nothing twice"
    assert set((await batch.successes()).values()) == {1}
    rows = decode_completions_blob(batch.objects.get_bytes(record.completions))
    assert [row.id for row in rows] == batch.ids and all(row.token_ids for row in rows)
