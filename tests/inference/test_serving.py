"""The engine's server, asked by OpenAI's own client: what is answered, refused, counted and swapped."""

from __future__ import annotations

import ast
import asyncio
import http.client
import importlib.util
import json
import shutil
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import openai
import pytest
from batches import ref
from make_tiny import make_model
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as CHAT_FIELDS
from openai.types.completion_create_params import CompletionCreateParamsBase as COMPLETION_FIELDS
from tokenizers.processors import TemplateProcessing

from rollout_core.agents import LLMProxy, ModelEntry, Upstream
from rollout_core.base.errors import ConfigError
from rollout_core.config import SamplingParams, ScriptedBackend, TransformersBackend
from rollout_core.data.text import token_ids_of
from rollout_core.inference.backend import ModelRef, Request, ScriptedEngine
from rollout_core.inference.chat_api import RULED, Answered, ApiError, Writer, hermes_calls, read_ask
from rollout_core.inference.engines import EngineOf, build_backend, close_engine, engine
from rollout_core.inference.hf import TransformersEngine
from rollout_core.inference.serving import EngineServer
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.store import InMemoryLightningStore
from tests.store.patience import LONG, until

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "sort 3 1 2"}]
RENDERED = "user: sort 3 1 2\nassistant: "
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def no_engine_left():
    yield
    close_engine()


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> list[ModelRef]:
    """Two models of one architecture with a chat template."""
    return [_chatty(tmp_path_factory.mktemp("chatty") / "model", seed) for seed in (1, 2)]


def _chatty(folder: Path, seed: int) -> ModelRef:
    make_model(folder, hidden_size=64, num_layers=2, seed=seed)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return ref(folder)


@asynccontextmanager
async def serving(backend: Any, model: ModelRef, sampling: SamplingParams | None = None, **options: Any):
    """A server and a client of it."""
    server = EngineServer(backend, **options)
    await server.start(model, sampling)
    try:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="EMPTY", max_retries=0) as client:
            yield server, client
    finally:
        await server.stop()


def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("return_token_ids", "top_k", "min_tokens") if name in fields}
    return client.chat.completions.create(**{"model": "policy", "messages": HELLO, "extra_body": extra, **fields})


# What is answered


async def test_chat_is_rendered_and_answered(chatty):
    async with serving(ScriptedBackend(text="<{prompt}>"), chatty[0]) as (server, client):
        answer = await chat(client, return_token_ids=True)
        assert answer.choices[0].message.content == f"<{RENDERED}>"
        assert (answer.model, answer.choices[0].finish_reason) == ("policy", "stop")
        tokenizer = load_tokenizer(chatty[0].folder)
        [ids] = token_ids_of(tokenizer, [RENDERED], special_tokens=False)
        assert answer.prompt_token_ids == ids and answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)
        parts = [{"role": "user", "content": [{"type": "text", "text": "sort 3 "}, {"type": "text", "text": "1 2"}]}]
        assert (await chat(client, messages=parts)).choices[0].message.content == f"<{RENDERED}>"
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert server.model_id == chatty[0].content_id
        assert httpx.get(server.url.removesuffix("/v1") + "/health").json() == {"status": "ok"}


async def test_tokens_are_those_of_the_backend(chatty):
    backend = TransformersBackend()
    direct = TransformersEngine(backend, chatty[0])
    tokenizer = load_tokenizer(chatty[0].folder)
    [ids] = token_ids_of(tokenizer, [RENDERED], special_tokens=False)
    async with serving(backend, chatty[0]) as (_, client):
        fields = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
        answer = await chat(
            client, logprobs=True, top_logprobs=2, n=2, frequency_penalty=0.5, return_token_ids=True, **fields
        )
        fields.pop("seed")
        params = SamplingParams(**fields, frequency_penalty=0.5, logprobs=2)
        wanted = direct.generate([Request(str(seed), ids, params, seed) for seed in (7, 8)])
        for choice, completion in zip(answer.choices, wanted, strict=True):
            assert choice.token_ids == completion.token_ids and choice.message.content == completion.text
            assert [entry.logprob for entry in choice.logprobs.content] == completion.logprobs
            top = [[likely.logprob for likely in entry.top_logprobs] for entry in choice.logprobs.content]
            assert top == [[logprob for _, logprob in place] for place in completion.top_logprobs]
        again = await client.completions.create(
            model="policy", prompt=ids, max_tokens=12, seed=7, logprobs=1, extra_body={"return_token_ids": True}
        )
        [plain] = direct.generate([Request("plain", ids, SamplingParams(max_tokens=12, logprobs=1), 7)])
        assert again.choices[0].token_ids == plain.token_ids and again.choices[0].text == plain.text
        assert again.choices[0].logprobs.token_logprobs == plain.logprobs
        assert again.choices[0].prompt_token_ids == ids


async def test_a_chat_stops_where_the_template_ends_a_turn_and_a_text_does_not(chat_base):
    backend, model = TransformersBackend(), ref(chat_base)
    tokenizer = load_tokenizer(model.folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fields = {"max_tokens": 12, "temperature": 0.0, "min_tokens": 2}
    async with serving(backend, model) as (_, client):
        answer = await chat(client, return_token_ids=True, **fields)
        ids = answer.prompt_token_ids
        assert tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
        text = await client.completions.create(
            model="policy", prompt=ids, extra_body={"return_token_ids": True, "min_tokens": 2}, **fields_of(fields)
        )
    direct, greedy = TransformersEngine(backend, model), SamplingParams(**fields)
    for got, ends in ((answer, [end]), (text, [])):
        [wanted] = direct.generate([Request("x", ids, greedy, 1, ends=ends)])
        assert got.choices[0].token_ids == wanted.token_ids


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "min_tokens"}


async def test_a_text_is_tokenised_with_one_bos_or_without_special_tokens(tmp_path, chatty):
    folder = tmp_path / "adds bos"
    shutil.copytree(chatty[0].folder, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.bos_token = "<pad>"
    form = {"single": "<pad> $A", "special_tokens": [("<pad>", tokenizer.bos_token_id)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**form)
    tokenizer.save_pretrained(folder)
    bos, [plain] = tokenizer.bos_token_id, token_ids_of(tokenizer, ["sort 1"], special_tokens=False)
    async with serving(ScriptedBackend(), ref(folder)) as (_, client):

        async def ids(prompt: str, **fields: Any) -> list[int]:
            extra = {"return_token_ids": True, **fields}
            answer = await client.completions.create(model="policy", prompt=prompt, extra_body=extra)
            return answer.choices[0].prompt_token_ids  # pyright: ignore[reportAttributeAccessIssue]

        assert await ids("sort 1") == await ids("<pad>sort 1") == [bos, *plain]
        assert await ids("sort 1", add_special_tokens=False) == plain
        assert await ids("sort 1", add_special_tokens=True) == [bos, *plain]
        with pytest.raises(openai.BadRequestError, match="add_special_tokens is 'no'; expected true or false"):
            await ids("sort 1", add_special_tokens="no")
        with pytest.raises(openai.BadRequestError, match="the chat template writes them, and none are added"):
            await client.chat.completions.create(
                model="policy", messages=HELLO, extra_body={"add_special_tokens": True}
            )


async def test_many_prompts_and_stop(chatty):
    async with serving(TransformersBackend(), chatty[0]) as (_, client):
        short = await client.completions.create(model="policy", prompt="sort 1", extra_body={"ignore_eos": True})
        assert short.usage is not None and short.usage.completion_tokens == 16, "OpenAI's default"
        answer = await client.completions.create(model="policy", prompt=["sort 1", "sort 2"], n=2, max_tokens=4)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens <= 16
        whole = (await chat(client, max_tokens=24, seed=3)).choices[0].message.content
        stop = whole[4:6]
        cut = (await chat(client, max_tokens=24, seed=3, stop=stop)).choices[0]
        assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"


async def test_seeds_do_not_depend_on_the_order(chatty):
    async def answers(server_seed: int, delays: list[float]) -> list[str]:
        async with serving(TransformersBackend(), chatty[0], seed=server_seed) as (_, client):

            async def one(delay: float, text: str) -> str:
                await asyncio.sleep(delay)
                messages = [{"role": "user", "content": text}]
                return (await chat(client, messages=messages, max_tokens=8)).choices[0].message.content

            texts = ["sort 1", "sort 1", "sort 1", "sort 2"]
            return sorted(await asyncio.gather(*map(one, delays, texts)))

    first = await answers(0, [0.0, 0.0, 0.0, 0.0])
    assert len(set(first)) == 4
    assert await answers(0, [0.3, 0.2, 0.1, 0.0]) == first
    assert await answers(1, [0.0, 0.0, 0.0, 0.0]) != first


async def test_the_servers_sampling_rules(chatty, caplog):
    sampling = SamplingParams(temperature=0.0, max_tokens=6, stop=("\n",))
    async with serving(TransformersBackend(), chatty[0], sampling) as (server, client):
        answers = [await chat(client, temperature=2.0, return_token_ids=True, max_tokens=99) for _ in range(3)]
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        assert all(len(answer.choices[0].token_ids) <= 6 for answer in answers)
        assert sum("temperature" in record.message for record in caplog.records) == 1
        await server.load(chatty[0])
        answers = [await chat(client, max_tokens=9) for _ in range(3)]
        assert len({answer.choices[0].message.content for answer in answers}) == 3


# Tools


async def test_tool_calls(chatty):
    text = f"let me see {CALL}{CALL}<tool_call>{{broken</tool_call>"
    async with serving(ScriptedBackend(text=text), chatty[0]) as (_, client):
        [choice] = (await chat(client, tools=[TOOL])).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "let me see <tool_call>{broken</tool_call>"
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("look_up", '{"key":"a"}')] * 2
        assert len({call.id for call in calls}) == 2
        same = [(await chat(client, tools=[TOOL], seed=5)).choices[0].message.tool_calls[0].id for _ in range(2)]
        assert same[0] == same[1]
        [choice] = (await chat(client, tools=[TOOL], tool_choice="none")).choices
        assert choice.message.content == text and choice.message.tool_calls is None


async def test_tools_and_calls_reach_the_template(chatty):
    called = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    async with serving(ScriptedBackend(text="{prompt}"), chatty[0]) as (_, client):
        [choice] = (await chat(client, messages=talk, tools=[TOOL])).choices
    expected = '[look_up]user: sort 3 1 2\nassistant: {"key": "a"}\ntool: found\nassistant: '
    assert choice.message.content == expected


def test_hermes_calls_of_odd_texts():
    assert hermes_calls("no call") == ("no call", [])
    assert hermes_calls('<tool_call>{"name": 3}</tool_call> x') == ('<tool_call>{"name": 3}</tool_call> x', [])
    assert hermes_calls('<tool_call>{"name": "f", "arguments": {}}') == ("", [("f", "{}")])
    broken = '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'
    assert hermes_calls(broken) == (broken, [])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', '{"x":1}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "f", "arguments": {"x": "a</tool_call>b"}}', '{"x":"a</tool_call>b"}'),
        ('{"name": "f", "arguments": {"x": "<think>"}}', '{"x":"<think>"}'),
        ('{"name": "f", "arguments": {"x": 123456789012345678901234567890}}', '{"x":123456789012345678901234567890}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "x is 1"}', None),
        ('{"name": "f", "arguments": {"x": 1}, "parameters": {"x": 2}}', None),
        ('{"name": "f", "arguments": {"x": 1e999}}', None),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', None),
        ('{"name": "f", "arguments": ' + '{"x": ' * 100_000, None),
    ],
)
def test_a_tool_call_has_the_arguments_that_the_model_wrote_or_stays_text(written, arguments):
    text = f"see <tool_call>\n{written}\n</tool_call> so"
    assert hermes_calls(text) == ((text, []) if arguments is None else ("see  so", [("f", arguments)]))


def test_a_tool_call_inside_a_thought_is_none():
    thought = '<think>I could call <tool_call>{"name": "rm", "arguments": {}}</tool_call> but no</think>'
    assert hermes_calls(f"{thought}Done") == (f"{thought}Done", [])
    assert hermes_calls(f"{thought}{CALL}") == (thought, [("look_up", '{"key":"a"}')])
    cut = "<think>so <tool_call>{}"
    assert hermes_calls(cut) == (cut, [])
    opened = thought.removeprefix("<think>")
    assert hermes_calls(f"{opened}{CALL}", in_thought=True) == (opened, [("look_up", '{"key":"a"}')])
    assert hermes_calls(CALL, in_thought=True) == (CALL, [])


async def test_a_thought_that_the_template_begins_calls_nothing(tmp_path, chatty):
    folder = tmp_path / "thinks"
    shutil.copytree(chatty[0].folder, folder)
    settings = folder / "tokenizer_config.json"
    thinking = TEMPLATE.replace("assistant: {%", "assistant: <think>{{ '\\n' }}{%")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": thinking}))
    async with serving(ScriptedBackend(text=f"maybe {CALL}"), ref(folder)) as (_, client):
        [choice] = (await chat(client, tools=[TOOL])).choices
    assert (choice.message.content, choice.message.tool_calls) == (f"maybe {CALL}", None)
    assert choice.finish_reason == "stop"


async def test_one_call_of_several_where_parallel_ones_are_not_wanted(chatty):
    async with serving(ScriptedBackend(text=CALL * 3), chatty[0]) as (_, client):
        for wanted, count in ((True, 3), (False, 1)):
            [choice] = (await chat(client, tools=[TOOL], parallel_tool_calls=wanted)).choices
            assert len(choice.message.tool_calls) == count


async def test_integers_of_any_size_reach_the_template(chatty):
    number = 123456789012345678901234567890
    called = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": f'{{"key": {number}}}'}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [called]}]
    async with serving(ScriptedBackend(text="{prompt}"), chatty[0]) as (_, client):
        [choice] = (await chat(client, messages=talk, tools=[TOOL])).choices
    assert f'{{"key": {number}}}' in choice.message.content


def test_markers_that_are_special_tokens_are_seen(tmp_path):
    folder = tmp_path / "special"
    make_model(folder, hidden_size=64, num_layers=2, seed=1)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    backend = build_backend(ScriptedBackend(text=f"see {CALL}"), ref(folder))
    ask = read_ask({"messages": HELLO, "tools": [TOOL]}, is_chat=True, sampling=None, vocab_size=len(tokenizer))
    request = Request("k", [1, 2], SamplingParams(max_tokens=200), 0)
    [completion] = backend.generate([request])
    # As engines with a model decode.
    completion = replace(completion, text=tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    assert "<tool_call>" not in completion.text
    writer = Writer(load_tokenizer(folder), "policy", True)
    answer = writer.answer(ask, [Answered(request, completion)], "id", 0)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"key":"a"}'}
    assert answer["choices"][0]["message"]["content"] == "see"


def test_thoughts_between_special_tokens_call_nothing(tmp_path):
    folder = tmp_path / "special"
    make_model(folder, hidden_size=64, num_layers=2, seed=1)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.save_pretrained(folder)
    tools = {"messages": HELLO, "tools": [TOOL]}
    ask = read_ask(tools, is_chat=True, sampling=None, vocab_size=len(tokenizer))
    request = Request("k", [1, 2], SamplingParams(max_tokens=200), 0)
    messages = []
    for text in (f"<think>no {CALL}</think>see {CALL}", f"<think>no {CALL}</think>see"):
        [completion] = build_backend(ScriptedBackend(text=text), ref(folder)).generate([request])
        completion = replace(completion, text=tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        answer = Writer(load_tokenizer(folder), "policy", True).answer(ask, [Answered(request, completion)], "id", 0)
        messages.append(answer["choices"][0]["message"])
    assert messages[0]["content"] == f"no {CALL}see" and len(messages[0]["tool_calls"]) == 1
    assert messages[1]["content"] == f"no {CALL}see" and "tool_calls" not in messages[1]


# Streams


async def test_streams(chatty):
    async with serving(ScriptedBackend(text=f"see {CALL}"), chatty[0]) as (_, client):
        whole = await chat(client, tools=[TOOL], logprobs=True, return_token_ids=True, seed=1)
        chunks = [
            chunk
            async for chunk in await chat(
                client,
                tools=[TOOL],
                logprobs=True,
                return_token_ids=True,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids and chunks[-1].usage == whole.usage
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    [call] = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert call.id == whole.choices[0].message.tool_calls[0].id
    ids = [token for choice in deltas for token in getattr(choice, "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids


# Errors


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"extra_body": {"add_generation_prompt": False}}, 400, "add_generation_prompt"),
        ({"extra_body": {"skip_special_tokens": False}}, 400, "skip_special_tokens"),
        (
            {"extra_body": {"structured_outputs": {"whitespace_pattern": " "}}},
            400,
            "structured_outputs.whitespace_pattern",
        ),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, 400, "structured"),
        ({"extra_body": {"structured_outputs": "json"}}, 400, "structured_outputs"),
        ({"extra_body": {"vllm_xargs": {"a": 1}}}, 400, "vllm_xargs"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"verbosity": "low"}, 400, "verbosity"),
        ({"modalities": ["text", "audio"]}, 400, "modalities"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, 400, "parallel_tool_calls"),
        ({"tool_choice": "required", "tools": [TOOL]}, 400, "tool_choice"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 0.5}, 400, "n"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "sort 1 " * 2000}]}, 400, "messages"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, 400, "structured"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_is_refused(chatty, fields, status, param):
    async with serving(TransformersBackend(max_model_len=128), chatty[0]) as (_, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await chat(client, **fields)
        assert (caught.value.status_code, caught.value.body["param"]) == (status, param)
        if param in ("messages", "max_tokens") and "128" in str(caught.value):
            assert "maximum context length is 128 tokens" in str(caught.value)
        assert (await chat(client, max_tokens=1, user="me", metadata={"a": "b"})).choices


IGNORED = {
    *("metadata", "priority", "request_id", "safety_identifier", "service_tier", "session_id", "store", "user"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("include_reasoning", "logprob_token_ids", "mm_payload", "return_prompt_text", "return_token_offsets"),
    *("cache_salt", "ec_transfer_params", "kv_transfer_params", "return_mm_kwargs", "stream_interval"),
    *("return_tokens_as_token_ids", "routed_experts_prompt_start"),
}
"""Fields that say what is done with an answer, and not what is generated."""
HONOURED = {
    *("max_completion_tokens", "max_tokens", "messages", "model", "n", "prompt", "response_format", "seed", "stop"),
    *("add_special_tokens", "logprobs", "parallel_tool_calls", "return_token_ids", "stream", "stream_options"),
    *("structured_outputs", "tool_choice", "tools", "top_logprobs", "min_tokens", "stop_token_ids", *RULED),
}


def test_every_field_that_openai_and_vllm_know_is_honoured_refused_or_harmless():
    fields = {name for kind in (CHAT_FIELDS, COMPLETION_FIELDS) for name in get_type_hints(kind)}
    spec = importlib.util.find_spec("vllm")
    for room in ("chat_completion", "completion") if spec is not None and spec.origin is not None else ():
        source = Path(spec.origin).parent / "entrypoints" / "openai" / room / "protocol.py"
        requests = [
            node
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name in ("ChatCompletionRequest", "CompletionRequest")
        ]
        [body] = [node.body for node in requests]
        targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
        fields |= {target.id for target in targets if isinstance(target, ast.Name) and target.id[0] != "_"}
    refused = set()
    for name in fields - HONOURED - IGNORED:
        with suppress(ApiError):
            body = {"messages": HELLO, "prompt": "x", name: "anything else"}
            read_ask(body, is_chat=True, sampling=None, vocab_size=9)
            continue
        refused.add(name)
    assert fields - HONOURED - IGNORED == refused


async def test_a_model_without_template_and_bad_bodies(tiny):
    async with serving(ScriptedBackend(), tiny) as (server, client):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await chat(client)
        assert (await client.completions.create(model="policy", prompt="x")).choices[0].text == "SCRIPTED:x"
        assert httpx.post(server.url + "/chat/completions", content=b"{").status_code == 400
        assert httpx.post(server.url + "/chat/completions", content=b"[]").status_code == 400
        assert httpx.get(server.url + "/elsewhere").status_code == 404
        connection = http.client.HTTPConnection("127.0.0.1", server.url.rsplit(":", 1)[1].removesuffix("/v1"))
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(65 << 20))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


async def test_the_key_is_asked_for(tiny):
    async with serving(ScriptedBackend(), tiny, api_key="right") as (_, client):
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="policy", prompt="x")
        await client.with_options(api_key="right").completions.create(model="policy", prompt="x")


# Many requests, swaps, and who has the engine


async def test_64_requests_at_once(chatty):
    async with serving(ScriptedBackend(text="<{prompt}>", delay_seconds=0.002), chatty[0]) as (_, client):
        talks = [[{"role": "user", "content": f"task {number}"}] for number in range(64)]
        answers = await asyncio.gather(*(chat(client, messages=talk) for talk in talks))
        expected = [f"<user: task {number}\nassistant: >" for number in range(64)]
        assert [answer.choices[0].message.content for answer in answers] == expected


async def test_swaps_under_load_through_the_proxy(chatty):
    """Every answer is whole, and of the weights that its span names."""
    backend = TransformersBackend()
    direct = {model.content_id: TransformersEngine(backend, model) for model in chatty}
    store = InMemoryLightningStore()
    async with serving(backend, chatty[0]) as (server, _):
        entry = ModelEntry("policy", [Upstream(url=server.url, model_id=chatty[0].content_id)])
        proxy = LLMProxy(0, [entry], store)
        await proxy.start()
        found = await store.start_rollout({"task": 1})
        endpoint = proxy.as_resource(found.rollout_id, found.attempt.attempt_id).endpoint
        async with openai.AsyncOpenAI(base_url=endpoint, api_key="EMPTY", max_retries=0) as client:
            is_over, total = False, 0

            async def ask(number: int) -> None:
                nonlocal total
                while not is_over:
                    await chat(client, seed=number, max_tokens=6)
                    total += 1

            async def answered(count: int) -> None:
                wanted = total + count
                await until(lambda: total >= wanted or any(task.done() for task in asking))

            asking = [asyncio.create_task(ask(number)) for number in range(6)]
            for number in (1, 0, 1):
                await answered(12)
                async with proxy.paused("policy", model_id=chatty[number].content_id):
                    await server.load(chatty[number])
            await answered(12)
            is_over = True
            await asyncio.gather(*asking)
        await proxy.flush()
        await proxy.stop()
    spans = await store.query_spans(found.rollout_id)
    assert len(spans) == total
    assert {span.attributes["rollout.model_id"] for span in spans} == {model.content_id for model in chatty}
    known: dict[Any, Any] = {}
    for span in spans:
        fields = span.attributes
        model_id, seed = fields["rollout.model_id"], fields["gen_ai.request.seed"]
        if (model_id, seed) not in known:
            ids = list(fields["rollout.prompt_token_ids"])
            request = Request("k", ids, SamplingParams(max_tokens=6), seed)
            [known[model_id, seed]] = direct[model_id].generate([request])
        assert list(fields["rollout.choices.0.token_ids"]) == known[model_id, seed].token_ids


async def test_the_engine_is_lent(chatty):
    backend = ScriptedBackend(text="ok")
    async with serving(backend, chatty[0]) as (server, client):

        def use(model: ModelRef) -> str:
            with engine(backend, model) as running:
                return running.model_id

        # The same model is shared.
        assert await asyncio.to_thread(use, chatty[0]) == chatty[0].content_id
        async with server.lent():
            waiting = asyncio.create_task(chat(client))
            assert await asyncio.wait_for(asyncio.to_thread(use, chatty[1]), LONG) == chatty[1].content_id
            await server.load(chatty[1])
            assert not waiting.done()
        assert (await asyncio.wait_for(waiting, LONG)).choices[0].message.content == "ok"
        assert server.model_id == chatty[1].content_id


async def test_a_lane_of_batch_inference_beside_the_server(chatty):
    """It does not wait for the server's lane, which never ends."""
    backend = ScriptedBackend(text="ok")
    async with serving(backend, chatty[0]) as (_, client):
        with EngineOf(backend, chatty[0]).open() as lanes:
            lane = lanes.open()
            await asyncio.wait_for(lane.turn(), LONG)
            lane.submit([Request("mine", [1, 2], SamplingParams(), 0)])
            [outcome] = await asyncio.wait_for(lane.outcomes(), LONG)
            assert outcome.key == "mine"
            assert (await chat(client)).choices
            await asyncio.to_thread(lane.close)


async def test_a_client_that_goes_away(chatty, monkeypatch):
    taken: list[Request] = []
    may_end, complete = threading.Event(), ScriptedEngine._complete

    def held(self: ScriptedEngine, group: list[Request]) -> Any:
        taken.extend(group)
        may_end.wait(LONG)
        return complete(self, group)

    monkeypatch.setattr(ScriptedEngine, "_complete", held)
    backend = ScriptedBackend(text="ok", delay_seconds=0.001)  # so the engine takes one at a time
    async with serving(backend, chatty[0]) as (server, client):
        tasks = [asyncio.create_task(chat(client)) for _ in range(200)]
        await until(lambda: taken and server.num_running == 200)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: server.num_running == 0)
        may_end.set()
        await asyncio.wait_for(server.load(chatty[1]), LONG)
        assert len(taken) == 1, "what the engine has not taken is not generated"
        assert (await chat(client)).choices


async def test_a_model_that_cannot_be_loaded(chatty, tmp_path):
    async with serving(ScriptedBackend(text="ok"), chatty[0]) as (server, client):
        broken = ModelRef(chatty[1].content_id, tmp_path)
        with pytest.raises((ConfigError, OSError)):
            await server.load(broken)
        with pytest.raises(openai.InternalServerError, match="was not loaded") as caught:
            await chat(client)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        await server.load(chatty[0])
        assert (await chat(client)).choices
    with pytest.raises(ConfigError, match="does not run"):
        await server.load(chatty[0])
