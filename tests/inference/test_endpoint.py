"""The OpenAI backend against a real HTTP server that misbehaves: what is tried again, what fails, what ends the run."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler

import pytest
from batches import PARAMS, Batch, make_batch
from endpoint_server import (
    MAX_MODEL_LEN,
    config_of,
    drop_midway,
    no_json,
    no_object,
    outcomes,
    requests,
    reset,
    status,
)

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.settings import require_secret
from rollout_core.config import (
    InferBatchConfig,
    JsonSchemaOutput,
    OpenAIBackend,
    RegexOutput,
    SamplingParams,
    TrainPPOConfig,
    identity,
    parse_config,
)
from rollout_core.data.samples import Completion, Failure, decode_completions_blob, encode_completion
from rollout_core.inference.backend import Request
from rollout_core.inference.endpoint import environment_proxy
from rollout_core.inference.openai_http import OpenAIEngine
from rollout_core.inference.pace import shared_pace
from tests.store.patience import LONG, wait_until
from tests.store.ports import own_port

# What is asked and what comes back


def test_token_ids_go_out_and_token_ids_and_logprobs_come_back(server, engine_of, tokenizer):
    asked = requests(tokenizer)
    for request, completion in zip(asked, engine_of().generate(asked), strict=True):
        assert completion.token_ids == request.prompt_token_ids[::-1]
        assert completion.logprobs == [-1.0] * len(completion.token_ids)
        assert completion.text == tokenizer.decode(completion.token_ids) and completion.finish_reason == "stop"
    bodies = {tuple(seen.body["prompt"]): seen.body for seen in server.asked}
    for request in asked:
        body = bodies[tuple(request.prompt_token_ids)]
        assert body["seed"] == request.seed and body["model"] == "served" and body["max_tokens"] == 64


def test_nobody_waits_for_answers_that_nobody_wants(server, engine_of, tokenizer):
    server.held = threading.Event()
    engine = engine_of(max_concurrency=2)
    engine.interrupt()  # of no stream: it is none of the next one's
    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(lambda: list(engine.stream(requests(tokenizer))))
        wait_until(lambda: server.asked)
        engine.interrupt()
        assert outcomes.result(LONG) == []
    server.held.set()
    assert len(engine.generate(requests(tokenizer))) == 5, "the next stream is another one"


def test_every_field_reaches_a_vllm_server_and_no_default_of_its_own_counts(server, engine_of, tokenizer):
    params = SamplingParams(
        temperature=0.0,
        top_p=0.9,
        top_k=5,
        max_tokens=9,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(7, 3),
        ignore_eos=True,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logprobs=2,
        structured=RegexOutput(pattern="[0-9]+"),
    )
    asked = requests(tokenizer, params, ["hello"])
    server.text = tokenizer.decode(asked[0].prompt_token_ids[::-1])[:2]
    [completion] = engine_of().generate(asked)
    [seen] = server.asked
    assert {key: value for key, value in seen.body.items() if key != "prompt"} == {
        "model": "served",
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [3, 7],
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logprobs": 2,
        "structured_outputs": {"regex": "[0-9]+"},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert completion.text == server.text, "with stop strings the server knows where the text ends"
    assert completion.top_logprobs[0] == [(0, -0.5), (completion.token_ids[0], -1.0)], "none of probability 0"
    row = json.loads(encode_completion(completion))
    assert row["top_logprobs"][0] == [[0, -0.5], [completion.token_ids[0], -1.0]]


def test_a_vllm_server_is_sent_the_token_that_ends_a_turn(server, engine_of, tokenizer):
    for params, expected in (
        (SamplingParams(max_tokens=9), [tokenizer.eos_token_id, 7]),
        (SamplingParams(max_tokens=9, ignore_eos=True), []),
    ):
        engine_of().generate([replace(request, ends=[7]) for request in requests(tokenizer, params, ["hello"])])
        assert server.asked[-1].body["stop_token_ids"] == expected


def test_servers_of_other_makes_are_asked_only_what_openai_documents(server, engine_of, tokenizer):
    server.plain = True
    schema = JsonSchemaOutput(definition={"type": "object"})
    chat = engine_of(api="chat", dialect="openai")
    asked = requests(tokenizer, SamplingParams(structured=schema), ["hello"])
    [completion] = chat.generate(asked)
    assert completion.text == "olleh" and completion.logprobs == []
    assert completion.token_ids == tokenizer("olleh")["input_ids"]
    body = server.asked[-1].body
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    [completion] = engine_of(dialect="openai").generate(requests(tokenizer, prompts=["hello"]))
    assert completion.text == "olleh"
    documented = {"model", "prompt", "temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty"}
    assert set(server.asked[-1].body) == documented | {"seed"}


def test_messages_go_to_a_chat_endpoint_as_they_are(server, engine_of):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "abc"}]
    request = Request("r", [1, 2], PARAMS, 0, messages=messages)
    [completion] = engine_of(api="chat", dialect="openai").generate([request])
    assert server.asked[-1].body["messages"] == messages and completion.text == "cba"


def test_a_server_without_token_ids_is_told_to_be_no_vllm(server, engine_of, tokenizer):
    server.plain = True
    with pytest.raises(ConfigError, match=r"set backend\.dialect = 'openai'"):
        engine_of().generate(requests(tokenizer))


def test_many_requests_are_under_way_and_no_more_than_allowed(server, engine_of, tokenizer):
    server.held = threading.Event()
    drawn = 0

    def let_go() -> None:
        wait_until(lambda: server.most_at_once >= 8)
        time.sleep(0.05)  # for one too many
        server.held.set()

    def source():
        nonlocal drawn
        for number in range(40):
            drawn += 1
            yield Request(f"r{number}", [5, 6, 7 + number], PARAMS, number)

    releasing = threading.Thread(target=let_go)
    releasing.start()
    stream = engine_of(max_concurrency=8).stream(source())
    next(stream)
    assert drawn == 8, "drawn as there is room"
    assert len(list(stream)) == 39
    releasing.join()
    assert server.most_at_once == 8


def test_requests_that_come_later_are_taken_while_others_are_under_way(server, engine_of, tokenizer):
    server.slow_seconds = 0.1
    first, *rest = requests(tokenizer)

    def source():
        yield first
        for request in rest:
            yield None
            yield request

    assert len(outcomes(engine_of(), source())) == 5


def test_an_abandoned_stream_asks_no_more_and_leaves_the_engine_usable(server, engine_of, tokenizer):
    server.slow_seconds = 0.02
    engine = engine_of(max_concurrency=2)
    stream = engine.stream(requests(tokenizer))
    next(stream)
    stream.close()
    assert len(engine.generate(requests(tokenizer))) == 5
    assert len(server.asked) < 10, "of the first five, those after the ones under way were not asked"


# What goes wrong


@pytest.mark.parametrize(
    "mishaps",
    [
        [status(429, retry_after="0")],
        [status(503), status(503)],
        [status(500), status(502), status(504)],
        [drop_midway],
        [reset, drop_midway],
        [no_json],
        [no_object],
        [status(408), status(425)],
    ],
    ids=["429", "503 twice", "5xx", "dropped midway", "reset", "a proxy's page", "no object", "408 and 425"],
)
def test_what_passes_is_tried_again_and_leaves_no_trace(server, engine_of, tokenizer, mishaps):
    engine = engine_of(max_concurrency=1)
    expected = engine.generate(requests(tokenizer))
    server.mishaps.extend(mishaps)
    before = len(server.asked)
    assert engine.generate(requests(tokenizer)) == expected
    assert len(server.asked) - before == 5 + len(mishaps)


@pytest.mark.parametrize(("given", "expected"), [("sk-1\n", "sk-1"), ("sk-\u00fc", None), ("sk-\n1", None)])
def test_a_key_is_stripped_and_one_that_is_none_is_never_shown(monkeypatch, given, expected):
    monkeypatch.setenv("ROLLOUT_SECRETS", "KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_KEY", given)
    if expected is not None:
        assert require_secret("KEY") == expected
        return
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        require_secret("KEY")
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_endpoint_says_when_to_come_back_for_all_requests(server, engine_of, tokenizer, form):
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        status(429, Retry_After={"seconds": "1", "date": date}[form])(handler)

    server.mishaps.append(refuse)
    engine = engine_of(max_concurrency=1)
    engine.generate(requests(tokenizer))
    refused, *others = server.asked
    assert others[0].moment - refused.moment >= 0.9
    assert [seen.body["prompt"] for seen in others] == [request.prompt_token_ids for request in requests(tokenizer)]


def test_what_an_endpoint_asked_for_holds_for_the_next_engine(server, engine_of, tokenizer):
    server.mishaps.append(status(429, retry_after="1"))
    outcomes(engine_of(max_concurrency=8, max_retries=0), requests(tokenizer)[:1])
    [refused] = server.asked
    engine_of(max_concurrency=8, max_retries=0)
    assert server.seen[-1].moment - refused.moment >= 0.9 and len(server.seen) == 3
    assert shared_pace(server.url, "", 8).window == 4


def test_the_wait_grows_with_every_try(server, engine_of, tokenizer):
    server.mishaps.extend([status(503)] * 4)
    engine_of(max_concurrency=1, backoff_seconds=0.1, max_retries=4).generate(requests(tokenizer)[:1])
    moments = [seen.moment for seen in server.asked]
    waits = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert all(wait >= 0.05 * 2**attempt for attempt, wait in enumerate(waits)), waits


def test_a_refused_prompt_fails_for_good_and_alone(server, engine_of, tokenizer):
    asked = requests(tokenizer)
    server.refused_token = asked[3].prompt_token_ids[0]
    found = outcomes(engine_of(), asked)
    assert found["r3"] == Failure("r3", "the endpoint refuses it (HTTP 400): too long by far and worse", passing=False)
    assert [isinstance(found[key], Completion) for key in ("r0", "r1", "r2", "r4")] == [True] * 4
    assert len(server.asked) == 5, "a refusal is not tried again"


def test_an_endpoint_that_wants_to_be_paid_first_fails_a_sample_for_now(server, engine_of, tokenizer):
    server.mishaps.append(status(402))
    found = outcomes(engine_of(), requests(tokenizer)[:1])
    assert found["r0"] == Failure("r0", "the endpoint refuses it (HTTP 402): status 402", passing=True)


def test_one_sample_that_gets_no_answer_fails_for_now_and_alone(server, engine_of, tokenizer):
    server.mishaps.extend([reset] * 4)
    found = outcomes(engine_of(max_concurrency=1), requests(tokenizer)[:1]) | {}
    assert found["r0"].passing and "after 4 tries" in found["r0"].reason


def test_an_endpoint_that_is_gone_ends_the_stream_for_now(server, engine_of, tokenizer):
    engine = engine_of(max_concurrency=2)
    many = [Request(f"r{number}", [5, 6, 7], PARAMS, number) for number in range(1000)]
    stream = engine.stream(many)
    next(stream)
    server.stop()
    server.mishaps.extend([reset] * 10_000)  # of connections that are still open
    got = []
    with pytest.raises(Recoverable, match="8 samples in a row got no answer"):
        got.extend(stream)
    assert len(got) < 20, "not a thousand failures"


@pytest.mark.parametrize(
    ("code", "message"),
    [(401, "refuses access"), (403, "refuses access"), (404, "look at backend.url"), (307, "look at backend.url")],
)
def test_what_every_request_would_meet_ends_the_run(server, engine_of, tokenizer, code, message):
    server.mishaps.append(status(code))
    with pytest.raises(ConfigError, match=message):
        engine_of().generate(requests(tokenizer))


def test_a_model_that_goes_away_ends_the_run(server, engine_of, tokenizer):
    engine = engine_of()
    server.models = ["another"]
    with pytest.raises(ConfigError, match=r"The model `served` does not exist\.\); look at"):
        engine.generate(requests(tokenizer))


@pytest.mark.parametrize(("reason", "passing"), [("abort", True), ("content_filter", False)])
def test_a_completion_that_did_not_end_by_itself_is_none(server, engine_of, tokenizer, reason, passing):
    server.finish_reason = reason
    [failure] = engine_of().stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and failure.passing is passing and repr(reason) in failure.reason


# The start


def test_the_served_model_is_the_only_one_or_must_be_named(server, engine_of):
    assert engine_of().max_model_len == MAX_MODEL_LEN
    assert engine_of(max_model_len=50).max_model_len == 50
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match=r"serves 2 models \(a, b\); name one as backend\.served_model"):
        engine_of()
    with pytest.raises(ConfigError, match=r"serves no model 'c', but a, b"):
        engine_of(served_model="c")
    engine_of(served_model="b")


def test_nobody_at_the_address_is_a_passing_fault(server, tiny):
    with own_port() as port, pytest.raises(Recoverable, match="does not answer"):
        OpenAIEngine(config_of(server, url=f"http://127.0.0.1:{port}/v1", max_retries=1), tiny)


def test_the_key_comes_from_a_secret_that_is_allowed_and_is_never_shown(
    server, engine_of, tokenizer, monkeypatch, caplog
):
    caplog.set_level(logging.DEBUG)
    server.key = "sk-very-secret"
    with pytest.raises(ConfigError, match=r"refuses access .*name its key as backend\.api_key"):
        engine_of()
    monkeypatch.setenv("ROLLOUT_SECRET_SERVER_KEY", "sk-very-secret")
    with pytest.raises(ConfigError, match=r"'SERVER_KEY' is not among those allowed here .*ROLLOUT_SECRETS"):
        engine_of(api_key="SERVER_KEY")
    monkeypatch.setenv("ROLLOUT_SECRETS", "OTHER, SERVER_KEY")
    assert len(engine_of(api_key="SERVER_KEY").generate(requests(tokenizer))) == 5
    monkeypatch.setenv("ROLLOUT_SECRET_OTHER", "sk-other")
    with pytest.raises(ConfigError, match="is secret 'OTHER' its key") as caught:
        engine_of(api_key="OTHER")
    monkeypatch.delenv("ROLLOUT_SECRET_OTHER")
    with pytest.raises(ConfigError, match="set it in ROLLOUT_SECRET_OTHER"):
        engine_of(api_key="OTHER")
    assert "sk-" not in caplog.text + str(caught.value) + repr(caught.value.__cause__)


# Configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "localhost:8000"}, r"backend\.url: expected an address such as http://"),
        ({"url": "http://user:sk-1@host/v1"}, r"backend\.url: an address is kept and shown, so it holds no key"),
        ({"url": "http://host/v1?key=sk-1"}, r"backend\.url: an address is kept and shown"),
        ({"api_key": "sk-1"}, r"backend\.api_key: "),
        ({"api": "responses"}, r"backend\.api: "),
    ],
)
def test_a_wrong_endpoint_is_named_with_its_key(change, message):
    document = {
        "model": {"uri": "m"},
        "sampling": {},
        "input": {"glob": "x"},
        "output": {"dir": "y"},
        "backend": {"kind": "openai", "url": "http://host/v1", **change},
    }
    with pytest.raises(ConfigError, match=message):
        parse_config(document, InferBatchConfig)


@pytest.mark.parametrize("key", [None, "SERVER_KEY"])
def test_logins_of_a_netrc_file_are_not_sent(server, engine_of, tokenizer, monkeypatch, tmp_path, key):
    netrc = tmp_path / ".netrc"
    netrc.write_text("default login somebody password hunter2\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("ROLLOUT_SECRETS", "SERVER_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_SERVER_KEY", "sk-of-this-server-only")
    engine_of(api_key=key).generate(requests(tokenizer))
    assert {seen.key for seen in server.seen} == {None if key is None else "Bearer sk-of-this-server-only"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, "http://proxy.example:3128"),
        ({"ALL_PROXY": "proxy.example:3128"}, "http://proxy.example:3128"),
        ({"HTTP_PROXY": "http://one.example:1", "ALL_PROXY": "http://all.example:2"}, "http://one.example:1"),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, None),
        ({"HTTP_PROXY": "http://proxy.example:3128", "NO_PROXY": "server.example"}, None),
    ],
)
def test_the_environments_proxy_is_used(monkeypatch, variables, expected):
    _set_proxies(monkeypatch, variables)
    assert environment_proxy("http://server.example:8000/v1") == expected


@pytest.mark.parametrize("proxy", ["socks5://user:hunter2@proxy.example:1", "http://:3128", "http://proxy.example:x"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(monkeypatch, proxy):
    _set_proxies(monkeypatch, {"HTTP_PROXY": proxy})
    with pytest.raises(ConfigError, match=r"names the proxy .* expected http://host:port in HTTP_PROXY") as caught:
        environment_proxy("http://server.example:8000/v1")
    assert "hunter2" not in str(caught.value)


def _set_proxies(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_an_endpoint_is_nothing_to_train_with():
    document = {
        "algorithm": {"base_model": {"uri": "m"}, "prompts": {"path": "p"}, "optimizer": {"lr": 1}},
        "backend": {"kind": "openai", "url": "http://host/v1"},
    }
    with pytest.raises(ConfigError, match=r"backend\.kind: .*'vllm' or 'transformers' or 'scripted'; got 'openai'"):
        parse_config(document, TrainPPOConfig)


def test_who_answers_is_part_of_the_identity_and_how_often_it_is_asked_is_not():
    one = OpenAIBackend(url="http://host/v1/")
    assert identity(one) == identity(one.model_copy(update={"max_concurrency": 2, "max_retries": 0, "api_key": "A"}))
    for change in ({"url": "http://other/v1"}, {"served_model": "m"}, {"api": "chat"}, {"dialect": "openai"}):
        assert identity(one) != identity(one.model_copy(update=change))


# In a batch


async def test_samples_commit_one_by_one_and_failures_that_pass_are_generated_by_the_next_run(
    server, tiny, tmp_path, engine_of
):
    """The endpoint dies in the middle and comes back: nothing that was acknowledged is asked for again."""
    batch = make_batch(tmp_path, tiny, [f"sort {number} =" for number in range(60)])
    engine = engine_of(max_concurrency=4, max_retries=1)
    server.slow_seconds = 0.01
    options = {"deterministic": engine._config.owns_batches, "commit_size": 5}
    die_after = 25

    class Gone(list):
        def append(self, seen) -> None:
            super().append(seen)
            if len(server.asked) >= die_after:
                server.mishaps.append(reset)

    server.seen = Gone()
    with pytest.raises(Recoverable):
        await batch.complete(engine, **options)
    kept = await _done(batch)
    assert 10 <= len(kept) < 60, "those from before are kept"
    server.mishaps.clear()
    server.seen = []
    record = await batch.complete(engine, **options)
    again = {tuple(seen.body["prompt"]) for seen in server.asked}
    ids = {sample.id: tuple(sample.prompt_token_ids) for sample in batch.samples}
    assert again == {tokens for sample, tokens in ids.items() if sample not in kept}
    rows = decode_completions_blob(batch.objects.get_bytes(record.completions))
    assert [tuple(row.token_ids[::-1]) for row in rows] == [ids[row.id] for row in rows]
    assert set((await batch.successes()).values()) == {1}


async def _done(batch: Batch) -> set[ContentId]:
    return {ContentId(name) for name, rollout in (await batch.rollouts()).items() if rollout.status == "succeeded"}
