"""`rollout serve` with vLLM, as clients see it. One engine for the file, which is killed by the last test."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from anthropic import Anthropic
from make_tiny import make_model
from openai import APIError, OpenAI

from rollout_core.agents.adapters.span_samples import adapt_rollouts
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import search_path
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.vllm_backend import trainer_logprobs
from rollout_core.models.pretrained import load_causal_lm, load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.promotion.history import Change, change_latest, roll_back
from rollout_core.store import SqlLightningStore
from tests.serving.fronts import events_of
from tests.serving.test_front import rows_of_the_table
from tests.store.patience import LONG, wait_until
from tests.support.alive import lives

pytestmark = pytest.mark.engine
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SECRET_PROMPT = "a prompt that no log has"


@dataclass
class Latest:
    """What is followed."""

    objects: ObjectStore
    database: str

    def promote(self, model: ContentId) -> None:
        async def change() -> None:
            async with SqlLightningStore.from_url(self.database) as store:
                await change_latest(store, self.objects, Change("promote", "policy", model, "a test", "it is better"))

        asyncio.run(change())

    def roll_back(self) -> None:
        async def change() -> None:
            async with SqlLightningStore.from_url(self.database) as store:
                await roll_back(store, self.objects, "policy", to=None, by="a test")

        asyncio.run(change())


@dataclass
class Served:
    url: str
    models: dict[ContentId, Path]
    latest: Latest
    process: subprocess.Popen[str]
    log: Path

    @property
    def model_id(self) -> ContentId:
        """Of the first model, which most tests have."""
        return next(iter(self.models))

    @property
    def folder(self) -> Path:
        return self.models[self.model_id]

    def answers(self, model_id: ContentId) -> bool:
        with urllib.request.urlopen(f"{self.url}/ready") as response:
            return response.headers["x-rollout-model"] == model_id

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="the-key", max_retries=0, timeout=LONG)

    def figure(self, name: str) -> float:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"authorization": "Bearer the-key"})
        with urllib.request.urlopen(request) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{| )", line))

    def engines(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in below if child.name().startswith("VLLM")]


def database_in(place: Path) -> str:
    return f"sqlite:///{place}/store.db"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("serve")
    folders = [place / "small", place / "better"]
    for seed, folder in enumerate(folders, start=1):
        make_model(folder, hidden_size=128, num_layers=2, seed=seed)
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    objects = ObjectStore.from_url(str(place / "objects"))
    models = {objects.put_tree(folder): folder for folder in folders}
    latest = Latest(objects, database_in(place))
    latest.promote(next(iter(models)))
    options = ["--follow", "policy", "--name", "small", "--port", "0", "--api-key-env", "SERVE_KEY"]
    options += ["--set", "backend.max_model_len=256", "--set", "backend.num_threads=1"]
    options += ["--set", "backend.max_num_seqs=16", "--record", "1"]
    options += ["--tool-call-parser", "hermes"]
    own = {"SERVE_KEY": "the-key", "PYTHONPATH": search_path(), "ROLLOUT_DATABASE": latest.database}
    own |= {"ROLLOUT_STORAGE": objects.url, "ROLLOUT_CACHE": str(place / "cache")}
    log = place / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout_core", "serve", *options],
            cwd=place,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    with process, process.stdout:
        line = process.stdout.readline()
        assert "serves at" in line, log.read_text()
        server = Served(line.split()[-1], models, latest, process, log)
        yield server
        below, said = psutil.Process(process.pid).children(recursive=True), log.stat().st_size
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0, log.read_text()
        assert below and psutil.wait_procs(below, timeout=LONG)[1] == []
        assert b"leaked" not in log.read_bytes()[said:], "neither shared memory nor what Triton has"


def test_a_chat_names_the_weights_that_answer(served: Served):
    answered = served.client().chat.completions.with_raw_response.create(
        model="small", messages=[{"role": "user", "content": SECRET_PROMPT}], max_tokens=5, n=2, seed=3
    )
    assert answered.headers["x-rollout-model"] == served.model_id
    chat = answered.parse()
    assert len(chat.choices) == 2 and chat.usage is not None and chat.usage.completion_tokens <= 10
    assert SECRET_PROMPT not in served.log.read_text()
    assert served.client().models.list().data[0].to_dict()["root"] == served.model_id


def test_tokens_come_as_they_are_made(served: Served):
    letters = load_tokenizer(served.folder).encode("abcdefgh", add_special_tokens=False)
    before = served.figure("vllm:generation_tokens_total")
    extra = {"allowed_token_ids": letters, "ignore_eos": True}
    times: list[float] = []
    made = 0.0
    for chunk in served.client().chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=200,
        stream=True,
        extra_body=extra,
    ):
        if chunk.choices[0].delta.content:
            times.append(time.monotonic())
        if len(times) == 50 and not made:
            made = served.figure("vllm:generation_tokens_total") - before
    assert len(times) >= 50 and len(set(times)) == len(times)
    assert 0 < made < 200  # the first fifty were here before the last were made


def test_log_probabilities_are_those_of_the_trainer(served: Served):
    prompt = load_tokenizer(served.folder).encode("sort 3 1 2 =", add_special_tokens=False)
    choice = (
        served.client()
        .completions.create(
            model=served.model_id,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            logprobs=1,
            extra_body={"return_token_ids": True},
        )
        .choices[0]
    )
    tokens = choice.to_dict()["token_ids"]
    wanted = trainer_logprobs(ModelRef(served.model_id, served.folder), prompt, tokens)  # pyright: ignore[reportArgumentType]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_chat_that_was_rated_can_be_learnt_from(served: Served, is_stream: bool):
    body = {"model": "small", "messages": [{"role": "user", "content": "sort 3 1 2 ="}], "max_tokens": 6, "seed": 1}
    async with aiohttp.ClientSession(served.url, headers={"authorization": "Bearer the-key"}) as session:
        async with session.post("/v1/chat/completions", json=body | {"stream": is_stream}) as response:
            said = await response.text()
            answers = events_of(said)[:-1] if is_stream else [json.loads(said)]
        for answer in answers:
            assert answer.get("prompt_token_ids") is None
            assert all(choice.get(key) is None for choice in answer["choices"] for key in ("token_ids", "logprobs"))
        rated = {"id": answers[0]["id"], "reward": 0.5, "text": "so so"}
        async with session.post("/v1/feedback", json=rated) as response:
            assert response.status == 200, await response.text()
    async with SqlLightningStore.from_url(database_in(served.folder.parent)) as store:
        rollout_id = f"served-{answers[0]['id']}"
        [sample] = (await adapt_rollouts(store, ObjectStore.from_url(str(served.folder)), [rollout_id])).samples
    assert sample.reward == 0.5 and sample.model_ids == [served.model_id]
    prompt = load_tokenizer(served.folder).encode("<user>sort 3 1 2 =<assistant>", add_special_tokens=False)
    assert list(sample.prompt_token_ids) == prompt
    model = ModelRef(ContentId(served.model_id), served.folder)
    wanted = trainer_logprobs(model, prompt, list(sample.token_ids))
    assert list(sample.logprobs) == pytest.approx(wanted, abs=2e-3)


def test_responses_and_messages_are_answered(served: Served):
    response = served.client().responses.create(model="small", input="hi", max_output_tokens=4)
    assert response.usage is not None and response.usage.output_tokens == 4
    with pytest.raises(APIError, match="previous_response_id is not supported"):
        served.client().responses.create(model="small", input="hi", previous_response_id=response.id)
    anthropic = Anthropic(base_url=served.url, api_key="the-key", max_retries=0)
    message = anthropic.messages.create(model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert message.usage.output_tokens == 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_has_what_its_tool_takes(served: Served, choice: Any):
    way = {"type": "object", "properties": {"way": {"enum": ["up", "down"]}}, "required": ["way"]}
    parameters = way | {"additionalProperties": False}
    tokenizer = load_tokenizer(served.folder)
    blanks = [number for number in range(len(tokenizer)) if tokenizer.decode([number]).isspace()]
    answered = served.client().chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "look", "parameters": parameters}}],  # without `strict`
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        logit_bias={str(number): -100 for number in blanks},  # which an untrained model writes without end
    )
    [call] = answered.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "look"
    assert json.loads(call.function.arguments)["way"] in ("up", "down")


def test_vllm_knows_the_fields_that_the_page_has_for_honoured():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": AnthropicMessagesRequest,
    }
    honoured = [(set(fields), where) for fields, where, fate in rows_of_the_table() if fate == "honoured"]
    assert [where for _, where in honoured] == list(requests)
    for fields, where in honoured:
        assert fields <= requests[where].model_fields.keys()


def test_answers_are_those_of_the_weights_that_they_name_while_others_are_promoted_and_gone_back_from(served: Served):
    first, second = served.models
    prompt = load_tokenizer(served.folder).encode("sort 3 1 2 =", add_special_tokens=False)
    wanted = {model: greedy(folder, prompt, 12) for model, folder in served.models.items()}
    assert wanted[first][1] != pytest.approx(wanted[second][1], abs=0.02)
    seen: list[str] = []
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            answered = served.client().completions.with_raw_response.create(
                model="small",
                prompt=prompt,
                max_tokens=12,
                temperature=0,
                logprobs=1,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            named = ContentId(answered.headers["x-rollout-model"])
            [choice] = answered.parse().choices
            tokens, logprobs = wanted[named]
            assert choice.logprobs is not None and choice.to_dict()["token_ids"] == tokens
            assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=2e-3)
            seen.append(named)

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(client) for _ in range(3)]
        for _ in range(2):
            for change, model in ((lambda: served.latest.promote(second), second), (served.latest.roll_back, first)):
                change()
                wait_until(lambda model=model: served.answers(model) or any(each.done() for each in clients))
        is_over.set()
        for each in clients:
            each.result()
    assert set(seen) == {first, second}
    assert served.figure("rollout_serve_engine_starts") == 1 and served.figure("rollout_serve_weight_changes") == 4


def test_weights_that_are_damaged_in_storage_never_answer(served: Served):
    damaged = damage(served.latest.objects, served.models)
    served.latest.promote(damaged)

    def said() -> str:
        with urllib.request.urlopen(f"{served.url}/ready") as response:
            return json.load(response).get("problem", "")

    wait_until(lambda: damaged in said())
    assert "cannot be served" in said() and served.answers(served.model_id)
    served.latest.roll_back()
    wait_until(lambda: not said())


def damage(objects: ObjectStore, models: dict[ContentId, Path]) -> ContentId:
    """A third model, one byte of whose weights is another than it was."""
    folder = next(iter(models.values())).with_name("damaged")
    make_model(folder, hidden_size=128, num_layers=2, seed=3)
    model = objects.put_tree(folder)
    weights = next(file for file in objects.manifest(model).files if file.path.endswith(".safetensors"))
    [stored] = [
        file for file in Path(objects.url.removeprefix("file://")).rglob("*") if file.name == weights.content_id
    ]
    stored.chmod(0o644)
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    return model


def greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """What transformers' own implementation decodes, with its log-probabilities."""
    model, tokens, logprobs = load_causal_lm(folder), [*prompt], []
    with torch.no_grad():
        for _ in range(count):
            logprob, token = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1).max(-1)
            tokens.append(int(token))
            logprobs.append(float(logprob))
    return tokens[len(prompt) :], logprobs


def test_a_killed_engine_comes_back_by_itself(served: Served):
    old = served.engines()
    completions = served.client().completions
    stream = completions.create(
        model="small", prompt="hi", max_tokens=240, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    for engine in old:
        engine.kill()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(completions.create, model="small", prompt="hi", max_tokens=3)
        with pytest.raises(APIError):
            list(stream)
        assert asked.result().choices[0].finish_reason == "length"
    wait_until(lambda: not any(map(lives, old)))
    assert served.figure("rollout_serve_engine_starts") == 2
    assert SECRET_PROMPT not in served.log.read_text()
