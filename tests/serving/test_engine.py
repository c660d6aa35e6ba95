"""`rollout serve` with vLLM, as clients see it. One engine for the file, which is killed by the last test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from anthropic import Anthropic
from make_tiny import make_model
from openai import APIError, OpenAI

from rollout_core.base.ids import ContentId
from rollout_core.base.processes import search_path
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.vllm_backend import trainer_logprobs
from rollout_core.models.pretrained import load_tokenizer
from tests.serving.test_front import rows_of_the_table
from tests.store.patience import LONG, wait_until
from tests.support.alive import lives

pytestmark = pytest.mark.engine
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SECRET_PROMPT = "a prompt that no log has"


@dataclass
class Served:
    url: str
    model_id: str
    folder: Path
    process: subprocess.Popen[str]
    log: Path

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("serve")
    folder = place / "small"
    make_model(folder, hidden_size=128, num_layers=2, seed=1)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    options = ["--port", "0", "--api-key-env", "SERVE_KEY", "--set", "backend.max_model_len=256"]
    options += ["--set", "backend.num_threads=1", "--set", "backend.max_num_seqs=16"]
    log = place / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout_core", "serve", str(folder), *options],
            cwd=place,
            env=os.environ | {"SERVE_KEY": "the-key", "PYTHONPATH": search_path()},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    with process, process.stdout:
        line = process.stdout.readline()
        assert "serves at" in line, log.read_text()
        model_id = re.findall(r"with model (\w{64})", log.read_text())[0]
        server = Served(line.split()[-1], model_id, folder, process, log)
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
    wanted = trainer_logprobs(ModelRef(ContentId(served.model_id), served.folder), prompt, tokens)  # pyright: ignore[reportArgumentType]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=2e-3)


def test_responses_and_messages_are_answered(served: Served):
    response = served.client().responses.create(model="small", input="hi", max_output_tokens=4)
    assert response.usage is not None and response.usage.output_tokens == 4
    with pytest.raises(APIError, match="previous_response_id is not supported"):
        served.client().responses.create(model="small", input="hi", previous_response_id=response.id)
    anthropic = Anthropic(base_url=served.url, api_key="the-key", max_retries=0)
    message = anthropic.messages.create(model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert message.usage.output_tokens == 4


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
