"""The LLM proxy with a real upstream, real clients and a real store: what agents get, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import nullcontext

import aiohttp
import httpx
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI, OpenAI
from proxied import LONG, asked, attempt, calls, client, close_clients, ids_of, proxy_of, until
from scripted_upstream import ScriptedUpstream, cut_stream, hang, no_answer, status
from yarl import URL

from rollout_core.agents.adapters.token_sequences import token_turns
from rollout_core.agents.proxy.proxy_server import LLMProxy
from rollout_core.agents.proxy.upstreams import ModelEntry, Upstream
from rollout_core.base.errors import ConfigError
from rollout_core.store import ProxyLLM

KEY = "sk-of-the-upstream-0123456789"


@pytest.fixture
async def store(memory):
    return memory


@pytest.fixture
async def proxy(store, upstream) -> AsyncIterator[LLMProxy]:
    settings = Upstream(url=upstream.url, model="served", api_key=KEY, model_id="weights-1", timeout=LONG)
    async with proxy_of(store, settings) as proxy:
        yield proxy


async def test_a_chat_is_answered_and_recorded_token_by_token(store, upstream, proxy):
    ids = await attempt(store)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    answer = await client(proxy, ids).chat.completions.create(
        model="m", messages=asked("abc"), temperature=0.5, max_tokens=9, stop=["x"], seed=3, tools=tools
    )
    assert answer.choices[0].message.content == "cba"
    assert answer.choices[0].logprobs is None, "the agent did not ask for them"
    [seen] = upstream.seen
    assert (seen.path, seen.body["model"], seen.headers["Authorization"]) == (
        "/v1/chat/completions",
        "served",
        f"Bearer {KEY}",
    )
    assert seen.body["return_token_ids"] is True and seen.body["logprobs"] is True
    [span] = await calls(store, proxy, ids[0])
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == (*ids, 1)
    assert span.status.status_code == "OK" and span.start_time and span.end_time and span.start_time <= span.end_time
    assert span.attributes == {
        "gen_ai.request.model": "m",
        "rollout.served_model": "served",
        "rollout.model_id": "weights-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stop_sequences": ["x"],
        "gen_ai.request.seed": 3,
        "gen_ai.input.messages": span.attributes["gen_ai.input.messages"],
        "gen_ai.output.messages": span.attributes["gen_ai.output.messages"],
        "rollout.tools": span.attributes["rollout.tools"],
        "gen_ai.response.id": "weights-1",
        "rollout.prompt_token_ids": ids_of("abc"),
        "rollout.choices.0.token_ids": ids_of("cba"),
        "rollout.choices.0.logprobs": [-0.099, -0.098, -0.097],
        "rollout.choices.0.finish_reason": "stop",
    }
    assert json.loads(span.attributes["gen_ai.input.messages"]) == asked("abc")
    assert json.loads(span.attributes["gen_ai.output.messages"]) == [{"role": "assistant", "content": "cba"}]
    assert json.loads(span.attributes["rollout.tools"]) == tools


async def test_calls_get_seeds_that_follow_from_rollout_and_number_alone(store, upstream):
    async def seeds(ids: tuple[str, str], **options) -> list[int | None]:
        before = len(upstream.seen)
        agent = client(proxy, ids)
        for _ in range(2):
            await agent.chat.completions.create(model="m", messages=asked("abc"), **options)
        return [seen.body.get("seed") for seen in upstream.seen[before:]]

    first, second = await attempt(store), await attempt(store)
    seeded = Upstream(url=upstream.url, seeds=True)
    async with proxy_of(store, seeded) as proxy:
        drawn = await seeds(first)
        assert len({*drawn, *await seeds(second)}) == 4
        assert await seeds(first, seed=7) == [7, 7]
    async with proxy_of(store, seeded) as proxy:  # started again, and another attempt
        again = await store.start_attempt(first[0])
        assert await seeds((first[0], again.attempt.attempt_id)) == drawn
    async with proxy_of(store, Upstream(url=upstream.url)) as proxy:
        assert await seeds(first) == [None, None]


async def test_logprobs_that_the_agent_asks_for_stay(store, upstream, proxy):
    ids = await attempt(store)
    create = client(proxy, ids).chat.completions.create
    answer = await create(model="m", messages=asked("ab"), logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [-0.098, -0.097]
    assert upstream.seen[-1].body["top_logprobs"] == 2
    streamed = await create(model="m", messages=asked("ab"), logprobs=True, stream=True)
    found = [chunk.choices[0].logprobs async for chunk in streamed]
    assert [entry.content[0].logprob for entry in found if entry and entry.content] == [-0.098, -0.097]
    assert [span.attributes["rollout.choices.0.logprobs"] for span in await calls(store, proxy, ids[0])] == [
        [-0.098, -0.097]
    ] * 2


async def test_a_stream_comes_token_by_token_and_is_recorded_as_a_whole(store, upstream, proxy):
    ids = await attempt(store)
    upstream.hold_after = (2, asyncio.Event())
    stream = await client(proxy, ids).chat.completions.create(model="m", messages=asked("abcd"), stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        assert chunk.choices[0].logprobs is None
        if text == "dc":
            upstream.hold_after[1].set()  # the upstream says no more before it was heard so far
    assert text == "dcba"
    [span] = await calls(store, proxy, ids[0])
    assert json.loads(span.attributes["gen_ai.output.messages"]) == [{"role": "assistant", "content": "dcba"}]
    assert span.attributes["rollout.prompt_token_ids"] == ids_of("abcd")
    assert span.attributes["rollout.choices.0.token_ids"] == ids_of("dcba")
    assert span.attributes["rollout.choices.0.logprobs"] == [-0.1, -0.099, -0.098, -0.097]
    assert span.attributes["rollout.choices.0.finish_reason"] == "stop"


async def test_tool_calls_come_through_whole_and_streamed(store, upstream, proxy):
    ids = await attempt(store)
    upstream.tool_call = ("look_up", '{"key": "of the house", "n": 3}')
    create = client(proxy, ids).chat.completions.create
    whole = await create(model="m", messages=asked("abc"))
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.arguments == upstream.tool_call[1]
    arguments = ""
    async for chunk in await create(model="m", messages=asked("abc"), stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            arguments += (piece.function and piece.function.arguments) or ""
    assert arguments == upstream.tool_call[1]
    recorded = [json.loads(span.attributes["gen_ai.output.messages"])[0] for span in await calls(store, proxy, ids[0])]
    function = {"name": "look_up", "arguments": upstream.tool_call[1]}
    for message in recorded:
        assert message["tool_calls"] == [{"id": "call-1", "type": "function", "function": function}]


async def test_completions_and_several_choices(store, upstream, proxy):
    ids = await attempt(store)
    agent = client(proxy, ids)
    answer = await agent.completions.create(model="m", prompt="xy", n=2)
    assert [choice.text for choice in answer.choices] == ["yx", "yx"] and answer.choices[0].logprobs is None
    assert upstream.seen[-1].body["logprobs"] == 0
    pieces = [
        chunk.choices[0].text async for chunk in await agent.completions.create(model="m", prompt="uvw", stream=True)
    ]
    assert pieces == ["w", "v", "u"]
    first, second = await calls(store, proxy, ids[0])
    assert json.loads(first.attributes["gen_ai.input.messages"]) == "xy"
    assert json.loads(first.attributes["gen_ai.output.messages"]) == [{"role": "assistant", "content": "yx"}] * 2
    assert first.attributes["rollout.choices.1.token_ids"] == ids_of("yx")
    assert first.attributes["gen_ai.request.choice.count"] == 2
    assert second.attributes["rollout.prompt_token_ids"] == ids_of("uvw")
    assert second.attributes["rollout.choices.0.logprobs"] == [-0.119, -0.118, -0.117]


async def test_the_synchronous_client_works_too(store, upstream, proxy):
    ids = await attempt(store)
    llm = proxy.as_resource(*ids)

    def agent() -> tuple[str | None, str]:
        with OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as sync:
            whole = sync.chat.completions.create(model="m", messages=asked("ab"))
            stream = sync.chat.completions.create(model="m", messages=asked("ab"), stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(agent) == ("ba", "ba")
    assert [span.sequence_id for span in await calls(store, proxy, ids[0])] == [1, 2]


async def test_without_ids_and_at_other_paths_requests_pass(store, upstream, proxy):
    ids = await attempt(store)
    agent = client(proxy)
    answer = await agent.chat.completions.create(model="m", messages=asked("ab"))
    assert answer.choices[0].message.content == "ba"
    assert "return_token_ids" not in upstream.seen[-1].body
    embedded = await agent.embeddings.create(model="m", input="t", encoding_format="float")
    assert embedded.data[0].embedding == [0.5] and upstream.seen[-1].body["model"] == "served"
    assert [model.id async for model in agent.models.list()] == ["m"]
    assert (await agent.models.retrieve("m")).id == "m"
    await client(proxy, ids).embeddings.create(model="m", input="t", encoding_format="float")
    [span] = await calls(store, proxy, ids[0])
    assert span.attributes == {
        "gen_ai.request.model": "m",
        "rollout.served_model": "served",
        "rollout.model_id": "weights-1",
    }
    async with aiohttp.ClientSession() as session:
        for path, code in [("/health", 200), ("/v1/../metrics", 404), ("/v1/%2e%2E/metrics", 404)]:
            async with session.get(URL(proxy.url + path, encoded=True)) as response:
                assert response.status == code, path


async def test_ids_are_any_text(store, upstream, proxy):
    rollout = await store.enqueue_rollout(1, rollout_id="a/b c?d#é%2F")
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    ids = (rollout.rollout_id, claimed.attempt.attempt_id)
    resource = proxy.as_resource()
    assert isinstance(resource, ProxyLLM)
    async with AsyncOpenAI(base_url=resource.get_base_url(*ids), api_key=resource.api_key) as agent:
        await agent.chat.completions.create(model="m", messages=asked("ab"))
    [span] = await calls(store, proxy, ids[0])
    assert span.attempt_id == ids[1]


async def test_rollouts_at_once_keep_their_calls_apart_and_in_order(store, upstream, proxy):
    upstream.delay = 0.005
    attempts = [await attempt(store) for _ in range(8)]

    async def agent(ids: tuple[str, str], name: str) -> None:
        for turn in range(5):
            await client(proxy, ids).chat.completions.create(model="m", messages=asked(f"{name}{turn}"))

    await asyncio.gather(*(agent(ids, f"agent{number}-") for number, ids in enumerate(attempts)))
    await proxy.flush()
    for number, ids in enumerate(attempts):
        spans = await store.query_spans(ids[0])
        messages = [json.loads(span.attributes["gen_ai.input.messages"])[0]["content"] for span in spans]
        assert messages == [f"agent{number}-{turn}" for turn in range(5)]
        assert [span.sequence_id for span in spans] == [1, 2, 3, 4, 5]


async def test_parallel_calls_of_an_agent_are_numbered_as_they_begin(store, upstream, proxy):
    ids = await attempt(store)
    upstream.hold_after = (0, asyncio.Event())

    async def call(text: str, stream: bool) -> None:
        found = await client(proxy, ids).chat.completions.create(model="m", messages=asked(text), stream=stream)
        if stream:
            async for _ in found:  # type: ignore[union-attr]
                pass

    slow = asyncio.create_task(call("first", True))
    while not upstream.seen:
        await asyncio.sleep(0.005)
    await call("second", False)
    upstream.hold_after[1].set()
    await slow
    spans = await calls(store, proxy, ids[0])
    assert [json.loads(span.attributes["gen_ai.input.messages"])[0]["content"] for span in spans] == ["first", "second"]


# What goes wrong


async def test_passing_errors_are_tried_again_unseen(store, upstream, proxy):
    ids = await attempt(store)
    upstream.mishaps += [status(503), no_answer, status(429, retry_after="0.2")]
    started = asyncio.get_running_loop().time()
    answer = await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
    assert answer.choices[0].message.content == "ba" and len(upstream.seen) == 4
    assert asyncio.get_running_loop().time() - started > 0.2
    [span] = await calls(store, proxy, ids[0])
    assert span.status.status_code == "OK"


async def test_errors_that_stay_reach_the_agent_in_openais_form(store, upstream, proxy, caplog):
    ids = await attempt(store)
    agent = client(proxy, ids)
    upstream.mishaps += [status(400, f"bad {KEY} request")]
    with pytest.raises(openai.BadRequestError, match=r"bad \*\*\* request"):
        await agent.chat.completions.create(model="m", messages=asked("the prompt is private"))
    upstream.mishaps += [status(500)] * 4
    with pytest.raises(openai.InternalServerError, match="by script"):
        await agent.chat.completions.create(model="m", messages=asked("the prompt is private"))
    with pytest.raises(openai.NotFoundError, match="serves no model 'mm'; did you mean 'm'"):
        await agent.chat.completions.create(model="mm", messages=asked("the prompt is private"))
    assert len(upstream.seen) == 5
    spans = await calls(store, proxy, ids[0])
    assert [span.status.status_code for span in spans] == ["ERROR"] * 3
    assert [str(span.status.description)[:8] for span in spans] == ["HTTP 400", "HTTP 500", "HTTP 404"]
    told = caplog.text + "".join(span.model_dump_json() for span in spans)
    assert KEY not in told and "private" not in caplog.text


async def test_a_429_that_asks_for_longer_than_there_is_time_is_passed_on_at_once(store, upstream):
    async with proxy_of(store, Upstream(url=upstream.url, timeout=LONG)) as proxy:
        upstream.mishaps += [status(429, retry_after="600")]
        with pytest.raises(openai.RateLimitError) as raised:
            await client(proxy).chat.completions.create(model="m", messages=asked("ab"))
        assert raised.value.response.headers["retry-after"] == "600"


async def test_a_stream_cut_in_the_middle_raises_at_the_agent(store, upstream, proxy):
    ids = await attempt(store)
    upstream.mishaps += [cut_stream]
    stream = await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"), stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="went away in the middle"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "ab"
    [span] = await calls(store, proxy, ids[0])
    assert span.status.status_code == "ERROR" and "went away" in str(span.status.description)
    assert span.attributes["rollout.choices.0.token_ids"] == ids_of("ab")


async def test_an_upstream_that_hangs_meets_the_time_limit(store, upstream):
    ids = await attempt(store)
    async with proxy_of(store, Upstream(url=upstream.url, timeout=2)) as proxy:
        upstream.mishaps += [hang]
        with pytest.raises(openai.InternalServerError, match=r"did not answer within 2 s") as raised:
            await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
        assert raised.value.status_code == 504
        await until(lambda: upstream.seen[0].was_cancelled)
        upstream.hold_after = (1, asyncio.Event())
        stream = await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"), stream=True)
        with pytest.raises(openai.APIError, match="did not answer within"):
            async for _ in stream:
                pass
        assert [span.status.status_code for span in await calls(store, proxy, ids[0])] == ["ERROR"] * 2


async def test_nobody_listens(store):
    async with proxy_of(store, Upstream(url="http://127.0.0.1:9/v1", max_retries=1)) as proxy:
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as raised:
            await client(proxy).chat.completions.create(model="m", messages=asked("ab"))
        assert raised.value.status_code == 502


async def test_an_agent_that_goes_away_ends_the_upstreams_work(store, upstream, proxy):
    ids = await attempt(store)
    upstream.mishaps += [hang]
    call = asyncio.create_task(client(proxy, ids).chat.completions.create(model="m", messages=asked("ab")))
    await until(lambda: upstream.in_flight == 1)
    call.cancel()
    await until(lambda: upstream.seen[0].was_cancelled)
    upstream.hold_after = (2, asyncio.Event())
    stream = await client(proxy, ids).chat.completions.create(model="m", messages=asked("abcd"), stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content == "c":
            break
    await stream.close()
    await until(lambda: upstream.seen[1].was_cancelled)
    first, second = await calls(store, proxy, ids[0])
    assert first.status.status_code == second.status.status_code == "ERROR"
    assert second.attributes["rollout.choices.0.token_ids"] == ids_of("dc")


@pytest.mark.parametrize("end", ["left", "cut", "slow"])
async def test_a_stream_whose_choices_have_ended_is_whole_without_its_last_event(store, upstream, end):
    async def no_last_event(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(json.loads(await request.read()).get("n", 1)):
            for letter, reason in (("b", None), ("a", "stop" if index == 0 else None)):
                choice = {"index": index, "delta": {"content": letter}, "finish_reason": reason}
                choice |= {"token_ids": [ord(letter)], "logprobs": {"content": [{"token": letter, "logprob": -0.5}]}}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
                await response.write(f"data: {json.dumps(chunk | {'prompt_token_ids': [1]})}\n\n".encode())
        if end == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        await asyncio.Event().wait()
        return response

    ids = await attempt(store)
    upstream.mishaps += [no_last_event, no_last_event]
    settings = Upstream(url=upstream.url, timeout=1 if end == "slow" else LONG)
    async with proxy_of(store, settings) as proxy:
        for count in (1, 2):
            create = client(proxy, ids).chat.completions.create
            stream = await create(model="m", messages=asked("ab"), stream=True, n=count)
            letters, whole = "", count == 1
            with nullcontext() if whole or end == "left" else pytest.raises(openai.APIError):
                async for chunk in stream:
                    letters += chunk.choices[0].delta.content or ""
                    if end == "left" and letters == "ba" * count:
                        break
            await stream.close()
            assert letters == "ba" * count
        whole, cut = await calls(store, proxy, ids[0])
    assert whole.status.status_code != "ERROR" and [len(turn.logprobs) for turn in token_turns([whole])] == [2]
    assert cut.status.status_code == "ERROR" and not token_turns([cut]), "one of two choices has no end"


async def test_integers_of_any_size_reach_the_upstream_and_the_span(store, upstream, proxy):
    ids, number = await attempt(store), 123456789012345678901234567890
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "maximum": number}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"), tools=[tool])
    assert upstream.seen[0].body["tools"] == [tool] and upstream.seen[0].body["return_token_ids"]
    [span] = await calls(store, proxy, ids[0])
    assert json.loads(span.attributes["rollout.tools"]) == [tool]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_with_half_a_surrogate_pair_is_recorded(store, upstream, proxy, streams):
    async def odd(request: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [7]}
        choice |= {"logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
        choice["delta" if streams else "message"] = {"role": "assistant", "content": "a\ud800"}
        answer = json.dumps({"id": "c", "model": "m", "created": 1, "prompt_token_ids": [1], "choices": [choice]})
        if not streams:
            return web.Response(text=answer, content_type="application/json")
        events = f"data: {answer}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    ids = await attempt(store)
    upstream.mishaps += [odd]
    url = f"{client(proxy, ids).base_url}chat/completions"
    async with httpx.AsyncClient() as asking:
        text = (await asking.post(url, json={"model": "m", "messages": asked("ab"), "stream": streams})).text
    found = json.loads(text.removeprefix("data: ").removesuffix("\n\ndata: [DONE]\n\n"))["choices"][0]
    assert found["delta" if streams else "message"]["content"] == "a\ud800" and found["logprobs"] is None
    [span] = await calls(store, proxy, ids[0])
    assert span.status.status_code != "ERROR" and len(token_turns([span])) == 1
    assert json.loads(span.attributes["gen_ai.output.messages"])[0]["content"] == "a\ud800"


async def test_large_prompts_pass_and_larger_ones_are_refused(store, upstream, proxy):
    ids = await attempt(store)
    prompt = "x" * (20 << 20)
    upstream.mishaps += [status(400, "too long")]
    with pytest.raises(openai.BadRequestError):
        await client(proxy, ids).chat.completions.create(model="m", messages=asked(prompt))
    assert len(upstream.seen[0].body["messages"][0]["content"]) == 20 << 20
    [span] = await calls(store, proxy, ids[0])
    assert len(span.attributes["gen_ai.input.messages"]) > 20 << 20
    async with proxy_of(store, Upstream(url=upstream.url), max_body_bytes=1000) as small:
        with pytest.raises(openai.APIStatusError) as raised:
            await client(small).chat.completions.create(model="m", messages=asked("x" * 1000))
        assert raised.value.status_code == 413


async def test_what_is_no_request_is_refused_in_openais_form(store, upstream, proxy):
    async with aiohttp.ClientSession() as session:
        for body, words in [(b"{", "no JSON"), (b"[]", "expected an object"), (b"{}", "")]:
            async with session.post(f"{proxy.url}/v1/chat/completions", data=body) as response:
                if words:
                    assert response.status == 400 and words in (await response.json())["error"]["message"]


async def test_a_key_of_its_own_keeps_others_out(store, upstream):
    async with proxy_of(store, Upstream(url=upstream.url), api_key="key-of-the-proxy") as proxy:
        answer = await client(proxy).chat.completions.create(model="m", messages=asked("ab"))
        assert answer.choices[0].message.content == "ba"
        async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="guessed", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError, match="no valid API key"):
                await stranger.chat.completions.create(model="m", messages=asked("ab"))
    with pytest.raises(ConfigError, match="no API key"):
        LLMProxy(0, [], store, host="0.0.0.0")


async def test_pages_of_others_are_kept_out(store, upstream, proxy):
    async with aiohttp.ClientSession() as session:
        for header in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            async with session.get(f"{proxy.url}/v1/models", headers=header) as response:
                assert response.status == 403


# As a resource, and other things of the object


async def test_as_resource(store, upstream, proxy):
    resource = proxy.as_resource(sampling_parameters={"temperature": 0.0})
    assert isinstance(resource, ProxyLLM) and resource.model == "m"
    assert resource.get_base_url("r", "a") == f"{proxy.url}/rollout/r/attempt/a/v1"
    plain = proxy.as_resource("r", "a", model="m", sampling_parameters={"temperature": 0.0})
    assert plain.resource_type == "llm" and plain.endpoint == resource.get_base_url("r", "a")
    assert plain.sampling_parameters == {"temperature": 0.0}
    with pytest.raises(ConfigError, match="give both"):
        proxy.as_resource("r")
    await proxy.update_model_list([ModelEntry(name, [Upstream(url=upstream.url)]) for name in ("one", "two")])
    with pytest.raises(ConfigError, match="serves 2 models"):
        proxy.as_resource()
    assert proxy.as_resource(model="two").model == "two"


async def test_the_model_list_of_litellms_users(store, upstream, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    params = {"model": "hosted_vllm/org/served", "api_base": upstream.url, "api_key": "os.environ/KEY_OF_TEST"}
    proxy = LLMProxy(port=0, model_list=[{"model_name": "m", "litellm_params": params}], store=store)
    await proxy.start()
    try:
        ids = await attempt(store)
        await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
        assert upstream.seen[0].body["model"] == "org/served"
        assert upstream.seen[0].headers["Authorization"] == f"Bearer {KEY}"
        assert KEY not in repr(proxy) + repr(proxy._pools.entries())
    finally:
        await proxy.stop()
        await close_clients()
    for wrong, words in [
        ({"model": "anthropic/claude"}, "does not speak OpenAI's API"),
        ({"model": "hosted_vllm/x"}, "no api_base"),
        ({"model": "openai/x", "tmeout": 3}, "did you mean 'timeout'"),
        ({"model": "openai/x", "api_key": "os.environ/NOT_SET"}, "not set"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLMProxy(0, [{"model_name": "m", "litellm_params": wrong}], store)


async def test_start_stop_and_restart(store, upstream, caplog):
    proxy = LLMProxy(0, [ModelEntry("m", [Upstream(url=upstream.url)])])
    with pytest.raises(ConfigError, match="no store"):
        await proxy.start()
    proxy.set_store(store)
    with pytest.raises(ConfigError, match="no port"):
        proxy.as_resource()
    assert not proxy.is_running()
    await proxy.start()
    await proxy.start()
    port = proxy.port
    await client(proxy).models.list()
    await proxy.restart()
    assert proxy.is_running() and proxy.port == port
    await client(proxy).models.list()
    await proxy.stop()
    await proxy.stop()
    assert not proxy.is_running()
    with pytest.raises(openai.APIConnectionError):
        await client(proxy).models.list()
    await close_clients()
    # Not asyncio's: clients of earlier tests may be collected just now, without a loop to close their connections on.
    ours = [record for record in caplog.records if record.name.partition(".")[0] in ("rollout_core", "uvicorn")]
    assert not [record for record in ours if record.levelno >= logging.ERROR]


async def test_two_proxies_in_a_process(store, upstream):
    async with proxy_of(store, Upstream(url=upstream.url)) as one, proxy_of(store, Upstream(url=upstream.url)) as two:
        for proxy in (one, two):
            ids = await attempt(store)
            await client(proxy, ids).chat.completions.create(model="m", messages=asked("ab"))
            assert len(await calls(store, proxy, ids[0])) == 1


async def test_a_redirect_is_not_followed_as_the_key_is_for_the_upstream_alone(memory, upstream):
    async def elsewhere(request):
        raise web.HTTPTemporaryRedirect(f"{other.url}/chat/completions")

    other = ScriptedUpstream()
    await other.start()
    upstream.mishaps += [elsewhere]
    ids = await attempt(memory)
    try:
        async with proxy_of(memory, Upstream(url=upstream.url, api_key=KEY, max_retries=0)) as proxy:
            with pytest.raises(openai.APIStatusError):
                # The client would follow it too, without a key of ours.
                asking = client(proxy, ids, http_client=httpx.AsyncClient(follow_redirects=False))
                await asking.chat.completions.create(model="m", messages=asked("ab"))
        assert upstream.seen and not other.seen
    finally:
        await other.stop()
