"""Answers that cannot be true, over real HTTP: each fails its own sample with a reason, and none is believed."""

from __future__ import annotations

import copy
import gzip
import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from batches import make_batch
from endpoint_server import CHAT_TOKENS, FaultyServer, config_of, outcomes, requests, send
from hypothesis import HealthCheck, given, settings, strategies as st

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Completion, Failure
from rollout_core.inference.backend import problem_with
from rollout_core.inference.openai_http import OpenAIEngine
from rollout_core.inference.openai_wire import longest_answer
from rollout_core.models.facts import vocab_size
from tests.store.patience import LONG

WITH_TOP = SamplingParams(max_tokens=64, logprobs=2)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    """A change of an answer: another value at a path below its choice."""

    def change(answer: dict[str, Any]) -> Any:
        place = answer["choices"][0]
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        return answer

    return change


DRAWN = "the drawn token"


def change_first_place(likely: dict[str, float]) -> Callable[[dict[str, Any]], Any]:
    """The likely tokens of the first place are others."""

    def change(answer: dict[str, Any]) -> Any:
        drawn = answer["choices"][0]["logprobs"]["tokens"][0]
        named = {drawn if name == DRAWN else name: p for name, p in likely.items()}
        return put("logprobs", "top_logprobs", 0, value=named)(answer)

    return change


def choices(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: {**answer, "choices": change(answer["choices"])}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a token beyond the vocabulary": (
        put("token_ids", 0, value=100_000),
        "token id 100000, which is outside",
    ),
    "a token of 2**40": (put("token_ids", 0, value=2**40), "token id 1099511627776, which is outside the vocabulary"),
    "a negative token": (put("token_ids", 0, value=-1), "token id -1, which is outside the vocabulary"),
    "true as a token": (put("token_ids", 0, value=True), "a token id is a truth value"),
    "a text as a token": (put("token_ids", 0, value="5"), "a token id is a text"),
    "a float as a token": (put("token_ids", 0, value=5.0), "a token id is a number but not a whole one"),
    "null as a token": (put("token_ids", 0, value=None), "a token id is null"),
    "no list of tokens": (put("token_ids", value={"0": 5}), "token_ids is an object, not a list"),
    "no tokens": (put("token_ids", value=[]), "0 tokens"),
    "more tokens than asked for": (
        put("token_ids", value=[5] * 65),
        "65 tokens, but sampling.max_tokens is 64",
    ),
    "a log-probability above 0": (put("logprobs", "token_logprobs", 0, value=0.7), "a log-probability of 0.7, above 0"),
    "a log-probability of null": (put("logprobs", "token_logprobs", 0, value=None), "a log-probability is null"),
    "a log-probability of true": (put("logprobs", "token_logprobs", 0, value=False), "is a truth value"),
    "a token drawn that was impossible": (put("logprobs", "token_logprobs", 0, value=-9999.0), "has no probability"),
    "fewer log-probabilities than tokens": (
        put("logprobs", "token_logprobs", value=[-0.5]),
        "tokens, but log-probabilities of 1",
    ),
    "no log-probabilities": (put("logprobs", "token_logprobs", value=[]), "log-probabilities of 0"),
    "log-probabilities of other tokens": (
        put("logprobs", "tokens", 0, value="token_id:6"),
        "those of other tokens than token_ids",
    ),
    "ids of other tokens, and a text": (
        put("logprobs", "tokens", value=["token_id:6", *"x" * 7]),
        "those of other tokens than token_ids",
    ),
    "ids, and a text": (put("logprobs", "tokens", 3, value="x"), "those of other tokens than token_ids"),
    "names of fewer tokens": (put("logprobs", "tokens", value=["x"]), "8 tokens, but names of 1"),
    "a name that is none": (put("logprobs", "tokens", 0, value=5), "the name of a token is a number, not a text"),
    "no logprobs": (put("logprobs", value=None), "lacks token ids or log-probabilities"),
    "logprobs of another form": (put("logprobs", value=[-0.5]), "logprobs is a list, not an object"),
    "likely tokens of fewer places": (put("logprobs", "top_logprobs", value=[]), "top_logprobs of 0 tokens"),
    "no likely tokens": (put("logprobs", "top_logprobs", value=None), "top_logprobs is null"),
    "a likely token beyond the vocabulary": (
        put("logprobs", "top_logprobs", 0, value={"token_id:100000": -0.5}),
        "no id of the model's vocabulary",
    ),
    "a likely token that is none": (
        put("logprobs", "top_logprobs", 0, value={"token_id: 1_2": -0.5}),
        "no id of the model's vocabulary",
    ),
    "a likely token named by its text": (
        put("logprobs", "top_logprobs", 0, value={"5": -0.5}),
        "no id of the model's vocabulary",
    ),
    "a likely token twice": (
        put("logprobs", "top_logprobs", 0, value={"token_id:5": -2, "token_id:05": -2}),
        "top_logprobs names token 5 twice",
    ),
    "no likely token of a place": (
        put("logprobs", "top_logprobs", 1, value={}),
        "top_logprobs names no token that could be drawn",
    ),
    "likely tokens that are impossible": (
        put("logprobs", "top_logprobs", 1, value={"token_id:5": -9999.0, "token_id:6": -9999.0}),
        "top_logprobs names no token that could be drawn",
    ),
    "a token drawn that is likely by another number": (
        change_first_place({DRAWN: -7.0, "token_id:0": -3.0}),
        "has a log-probability of -1, and -7 in top_logprobs",
    ),
    "a token drawn that is impossible by another number": (
        change_first_place({DRAWN: -9999.0, "token_id:0": -3.0}),
        "has a log-probability of -1, and -9999 in top_logprobs",
    ),
    "two certain tokens": (
        change_first_place({DRAWN: -1.0, "token_id:0": 0.0, "token_id:1": 0.0}),
        "probabilities add to 2.37",
    ),
    "a certain token beside the one drawn": (
        change_first_place({"token_id:0": 0.0}),
        "probabilities add to 1.37",
    ),
    "a likely token with a log-probability of null": (
        put("logprobs", "top_logprobs", 0, value={"token_id:5": None}),
        "a log-probability is null",
    ),
    "a likely token of probability e": (
        put("logprobs", "top_logprobs", 0, value={"token_id:5": 1}),
        "a log-probability of 1, above 0",
    ),
    "a text that is none": (put("text", value=["a"]), "text is a list, not a text"),
    "an unknown end": (put("finish_reason", value="moved"), "the endpoint ended it with 'moved'"),
    "a list of ends": (put("finish_reason", value=["stop"]), "finish_reason is a list, not a text"),
    "no end": (put("finish_reason", value=None), "finish_reason is null, not a text"),
    "another index": (put("index", value=1), "an index other than 0"),
    "no choices": (choices(lambda found: None), "choices is null, not a list"),
    "an empty list of choices": (choices(lambda found: []), "0 choices, but one was asked for"),
    "the choice twice": (choices(lambda found: found * 2), "2 choices, but one was asked for"),
    "a choice that is none": (choices(lambda found: ["stop"]), "a choice is a text, not an object"),
    "another object": (lambda answer: {"object": "error"}, "choices is null, not a list"),
}


@pytest.mark.parametrize("change", WRONG)
def test_an_answer_that_cannot_be_true_fails_its_own_sample_and_no_other(server, engine_of, tokenizer, change):
    changed, reason = WRONG[change]
    engine = engine_of(max_concurrency=1)
    first, second, third = requests(tokenizer, WITH_TOP)[:3]
    engine.generate([first])  # from now on it is known to speak the dialect
    server.change = lambda answer: changed(answer) if len(server.asked) == 2 else answer
    found = outcomes(engine, [first, second, third])
    failure = found["r0"]
    assert isinstance(failure, Failure) and reason in failure.reason, failure
    assert isinstance(found["r1"], Completion) and isinstance(found["r2"], Completion)
    assert failure.passing == ("ended it with" not in failure.reason), "the next run asks again"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("logprobs", "content", 0, "logprob"), 0.7, "a log-probability of 0.7, above 0"),
        (("logprobs", "content", 0, "logprob"), None, "a log-probability is null"),
        (("logprobs", "content", 0, "token"), "token_id:6", "those of other tokens"),
        (("logprobs", "content", 0, "token"), "x", "those of other tokens"),
        (("logprobs", "content", 0, "token"), None, "the name of a token is null"),
        (("logprobs", "content", 1, "top_logprobs"), [], "names no token that could be drawn"),
        (("logprobs", "content", 1, "top_logprobs", 0, "logprob"), -7.0, "of -1, and -7 in top_logprobs"),
        (("logprobs", "content", 1, "top_logprobs", 0, "token"), "token_id:0", "names token 0 twice"),
        (("logprobs", "content", 1, "top_logprobs", 1, "logprob"), 0.0, "probabilities add to 1.37"),
        (("logprobs", "content", 0), [], "an item of logprobs.content is a list"),
        (("logprobs", "content", 0, "top_logprobs"), None, "top_logprobs is null"),
        (("logprobs", "content", 0, "top_logprobs", 0), "x", "a likely token is a text"),
        (("logprobs", "content"), None, "log-probabilities of 0"),
        (("token_ids",), [7, 8], "2 tokens, but log-probabilities of 3"),
        (("message",), "hello", "message is a text, not an object"),
        (("message", "content"), 5, "content is a number, not a text"),
    ],
)
def test_a_chats_answer_is_held_to_the_same(server, engine_of, tokenizer, path, value, reason):
    engine = engine_of(api="chat", max_concurrency=1)
    asked = requests(tokenizer, WITH_TOP)[:1]
    assert engine.generate(asked)[0].token_ids == list(CHAT_TOKENS)
    server.change = put(*path, value=value)
    [failure] = engine.stream(asked)
    assert isinstance(failure, Failure) and reason in failure.reason


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        ({"completion_tokens": 65}, "65 tokens, but sampling.max_tokens is 64"),
        ({"completion_tokens": "many"}, "usage.completion_tokens is no number of tokens"),
        ({"completion_tokens": True}, "usage.completion_tokens is no number of tokens"),
        ({"completion_tokens": -1}, "usage.completion_tokens is no number of tokens"),
        ([7], "usage is a list, not an object"),
    ],
)
def test_usage_that_cannot_be_is_not_believed_either(server, engine_of, tokenizer, usage, reason):
    server.change = lambda answer: {**answer, "usage": usage}
    [failure] = engine_of(dialect="openai").stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and reason in failure.reason


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize(
    ("text", "told", "reason"),
    [
        (
            "12 " * 300_000,
            {"finish_reason": "stop", "usage": {"completion_tokens": 2}},
            "a text of 900,000 characters, more than the 1,024 that fit sampling.max_tokens 4",
        ),
        (
            "12" * 400,
            {"finish_reason": "length", "usage": None},
            "a text of 800 tokens, more than 8 times sampling.max_tokens 4",
        ),
    ],
)
def test_a_text_far_longer_than_asked_for_is_not_believed(server, engine_of, tokenizer, api, text, told, reason):
    def change(answer: dict[str, Any]) -> Any:
        said = {"message": {"content": text}} if api == "chat" else {"text": text}
        return {"choices": [{**said, "finish_reason": told["finish_reason"]}], "usage": told["usage"]}

    server.change = change
    [failure] = engine_of(dialect="openai", api=api).stream(requests(tokenizer, SamplingParams(max_tokens=4))[:1])
    assert isinstance(failure, Failure) and failure.passing and reason in failure.reason


def test_a_text_of_broken_characters_has_more_tokens_than_were_sampled_and_is_kept(server, engine_of, tokenizer):
    """Each sampled byte that is no character reads as U+FFFD, which has three."""
    server.change = put("text", value="\ufffd" * 4)
    engine = engine_of(dialect="openai")
    [completion] = engine.generate(requests(tokenizer, SamplingParams(max_tokens=4))[:1])
    assert len(completion.token_ids) == 12 and tokenizer.decode(completion.token_ids) == "\ufffd" * 4


def test_a_text_is_tokenised_beside_the_other_requests(server, engine_of, tokenizer):
    """Two are, at the same time: neither call returns before the other began."""
    both = threading.Barrier(2, timeout=LONG)

    def meet(text: str, **options: Any) -> Any:
        both.wait()
        return tokenizer(text, **options)

    engine = engine_of(dialect="openai", max_concurrency=2)
    engine._tokenizer = meet
    assert {type(outcome) for outcome in engine.stream(requests(tokenizer)[:2])} == {Completion}


def test_a_log_probability_that_rounding_put_above_0_counts_as_0(server, engine_of, tokenizer):
    server.change = put("logprobs", "token_logprobs", 0, value=3e-5)
    [completion] = engine_of().generate(requests(tokenizer)[:1])
    assert completion.logprobs[0] == 0.0 and completion.logprobs[1] == -1.0


def test_log_probabilities_of_a_coarse_number_format_are_believed(server, engine_of, tokenizer):
    """Logarithms of 0.35, 0.29, 0.26 and 0.1 as bfloat16 rounds them: such probabilities add to 1.0035."""
    first, second, third, rest = -1.046875, -1.234375, -1.34375, -2.296875

    def change(answer: dict[str, Any]) -> Any:
        drawn = answer["choices"][0]["logprobs"]["tokens"][0]
        likely = {drawn: rest, "token_id:0": first, "token_id:1": second, "token_id:2": third}
        put("logprobs", "token_logprobs", 0, value=rest)(answer)
        return put("logprobs", "top_logprobs", 0, value=likely)(answer)

    server.change = change
    [completion] = engine_of().generate(requests(tokenizer, WITH_TOP)[:1])
    assert completion.logprobs[0] == rest and completion.top_logprobs[0] == [(0, first), (1, second)]


def test_a_server_may_name_tokens_by_their_texts(server, engine_of, tokenizer):
    server.change = put("logprobs", "tokens", value=["2", " =", "x", "token", "1", " ", "", "sort"])
    asked = requests(tokenizer)[:1]
    [completion] = engine_of().generate(asked)
    assert completion.token_ids == asked[0].prompt_token_ids[::-1]


def test_a_text_may_hold_any_character_but_reasons_hold_only_those_that_print(server, engine_of, tokenizer):
    engine = engine_of(dialect="openai")
    server.change = put("text", value="a\x00\x1b[31m\u202eb")
    [completion] = engine.generate(requests(tokenizer)[:1])
    assert completion.text == "a\x00\x1b[31m\u202eb"
    server.change = put("finish_reason", value="\x00\x1b[31mred\n" + "\u202e" + "x" * 5000)
    [failure] = engine.stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and failure.reason.isprintable() and len(failure.reason) <= 300


WITH_STOP = SamplingParams(max_tokens=64, stop=("zz",), stop_token_ids=(6,))


def say(tokens: list[int], text: Any) -> Callable[[dict[str, Any]], Any]:
    """An answer of these tokens, with that text."""

    def change(answer: dict[str, Any]) -> Any:
        choice = answer["choices"][0]
        logprobs = {"token_logprobs": [-1.0] * len(tokens)}
        return {**answer, "choices": [{**choice, "token_ids": tokens, "text": text, "logprobs": logprobs}]}

    return change


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("completely different text " * 10, "the text is not that of its tokens"),
        ("hello worldzz", "the text is not that of its tokens"),
        ("ello", "the text is not that of its tokens"),
        ("  hello", "the text is not that of its tokens"),
        ("hello\ufffd", "the text is not that of its tokens"),
        (None, "text is null, not a text"),
        ("hello world", None),
        ("hello wo", None),
        (" hello wo", None),
        ("", None),
    ],
)
def test_with_stop_strings_a_text_is_what_its_tokens_begin_with(server, engine_of, tokenizer, text, reason):
    """The stop token at the end, and an end of sequence, are no part of it."""
    tokens = [*tokenizer("hello world")["input_ids"], tokenizer.eos_token_id, 6]
    server.change = say(tokens, text)
    [outcome] = engine_of().stream(requests(tokenizer, WITH_STOP)[:1])
    if reason is None:
        assert isinstance(outcome, Completion) and outcome.text == text and outcome.token_ids == tokens
    else:
        assert isinstance(outcome, Failure) and outcome.passing and reason in outcome.reason


@pytest.mark.parametrize(("text", "believed"), [("a\u20ac", True), ("a\u20ac\ufffd", True), ("a\u20acb", False)])
def test_a_text_may_lack_the_character_that_its_tokens_only_begin(server, engine_of, tokenizer, text, believed):
    tokens = [*tokenizer("a\u20ac")["input_ids"], *tokenizer("\u20ac")["input_ids"][:2]]
    server.change = say(tokens, text)
    [outcome] = engine_of().stream(requests(tokenizer, WITH_STOP)[:1])
    assert isinstance(outcome, Completion) is believed, outcome


# Bodies


def raw(body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send(handler, 200, body, {name.replace("_", "-"): told for name, told in headers.items()})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"choices": [{"finish_reason": "stop", "token_ids": [NaN]}]}', "the answer is no JSON"),
        (b'{"choices": [{"finish_reason": "stop", "token_ids": [1e999]}]}', "the answer is no JSON"),
        (b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the answer is no JSON"),
        (b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}", "a choice is a list, not an object"),
        (b'{"choices": [{"finish_reason": "\\ud800"}]}', "the answer is no JSON"),
        (b'{"choices": [{"finish_reason": "\xff"}]}', "the answer is no JSON"),
        (b'{"choices": []} and more', "the answer is no JSON"),
        (b"[]", "the answer is no JSON object"),
        (b"", "the answer is no JSON"),
    ],
)
def test_a_body_that_is_no_answer_fails_its_sample(server, engine_of, tokenizer, body, reason):
    server.mishaps.append(raw(body))
    [failure] = engine_of(max_retries=0).stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and failure.passing and reason in failure.reason


def test_an_error_of_deep_json_is_told_like_any_other(server, engine_of, tokenizer):
    body = b'{"error": {"message": ' + b"[" * 1000 + b"]" * 1000 + b"}}"
    server.mishaps.append(lambda handler: send(handler, 400, body))
    [failure] = engine_of().stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and "HTTP 400" in failure.reason and len(failure.reason) <= 300


def test_no_more_of_an_answer_is_read_than_an_honest_one_could_have(server, engine_of, tokenizer):
    [request] = requests(tokenizer)[:1]
    sent = 0

    def flood(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(200)
        handler.end_headers()  # no length: until the connection ends
        handler.close_connection = True
        for _ in range(1000):
            handler.wfile.write(b" " * 2**20)
            sent += 2**20

    server.mishaps.append(flood)
    engine = engine_of()
    [failure] = engine.stream([request])
    assert isinstance(failure, Failure) and failure.passing and "more than the" in failure.reason
    assert sent < longest_answer(request) + 64 * 2**20, "what the kernel holds"
    assert isinstance(engine.generate([request])[0], Completion)


@pytest.mark.parametrize("code", [200, 500])
def test_a_compressed_answer_is_not_unpacked(server, engine_of, tokenizer, code):
    bomb = gzip.compress(b" " * 50_000_000)
    server.mishaps.append(lambda handler: send(handler, code, bomb, {"content-encoding": "gzip"}))
    [failure] = engine_of(max_retries=0).stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and ("is compressed" in failure.reason or "HTTP 500" in failure.reason)
    assert "accept-encoding" not in server.asked[0].headers or server.asked[0].headers["accept-encoding"] == "identity"


def test_an_answer_that_drips_is_given_up(server, engine_of, tokenizer, monkeypatch):
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        while True:  # until nobody listens
            handler.wfile.write(b" ")
            time.sleep(0.1)

    engine = engine_of(max_retries=0, timeout_seconds=1.0)
    monkeypatch.setattr("rollout_core.inference.endpoint._CONNECT_SECONDS", 0.2)
    server.mishaps.append(drip)
    [failure] = engine.stream(requests(tokenizer)[:1])
    assert isinstance(failure, Failure) and "no whole answer within 1 s" in failure.reason


def test_a_redirect_is_not_followed_with_the_key_in_hand(server, engine_of, tokenizer, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_KEY", "sk-for-this-host-only")
    elsewhere = FaultyServer()
    elsewhere.start()
    engine = engine_of(api_key="KEY")
    server.mishaps.append(lambda handler: send(handler, 307, {}, {"location": f"{elsewhere.url}/completions"}))
    with pytest.raises(ConfigError, match=r"does not serve this \(HTTP 307"):
        engine.generate(requests(tokenizer)[:1])
    elsewhere.stop()
    assert elsewhere.seen == []


@pytest.mark.parametrize("limit", [True, "77", -5, 77.0, None])
def test_a_context_length_that_is_none_is_not_taken(server, engine_of, limit):
    server.max_model_len = limit
    assert engine_of().max_model_len is None


# Any answer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changes(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Something in an answer is dropped, doubled, or replaced by any JSON."""
    steps = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    what, value = draw(st.sampled_from(["replace", "drop", "double"])), draw(JSON)

    def change(answer: Any) -> Any:
        answer = copy.deepcopy(answer)
        place: Any = answer
        for number, step in enumerate(steps):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = keys[step % len(keys)]
            if number < len(steps) - 1 and isinstance(place[key], dict | list) and place[key]:
                place = place[key]
                continue
            if what == "replace":
                place[key] = value
            elif what == "drop":
                place.pop(key)
            elif isinstance(place, list):
                place.append(place[key])
            break
        return answer

    return change


@pytest.mark.parametrize("form", ["completions", "chat", "openai", "openai chat"])
def test_whatever_an_endpoint_answers_a_sample_ends_and_only_the_possible_is_believed(server, tiny, tokenizer, form):
    api, dialect = ("chat" if "chat" in form else "completions"), ("openai" if "openai" in form else "vllm")
    engine = OpenAIEngine(config_of(server, api=api, dialect=dialect, max_retries=0), tiny)
    size = vocab_size(tiny.folder)
    asked = requests(tokenizer, WITH_TOP if dialect == "vllm" else SamplingParams(max_tokens=64))[:1]
    engine.generate(asked)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(changes=st.lists(changes(), min_size=1, max_size=3))
    def check(changes: list[Callable[[Any], Any]]) -> None:
        def change(answer: Any) -> Any:
            for one in changes:
                answer = one(answer) if isinstance(answer, dict | list) else answer
            return json.dumps(answer).encode()  # NaN and infinities as Python writes them

        server.change = change
        [outcome] = engine.stream(asked)
        if isinstance(outcome, Failure):
            assert outcome.reason.isprintable() and 0 < len(outcome.reason) <= 300
            return
        assert isinstance(outcome.text, str) and outcome.finish_reason in ("stop", "length")
        assert all(type(token) is int and 0 <= token < size for token in outcome.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in outcome.logprobs)
        if dialect == "vllm":
            assert 0 < len(outcome.token_ids) == len(outcome.logprobs) <= 64
            tops = [entry for top in outcome.top_logprobs for entry in top]
            assert all(0 <= token < size and logprob <= 0 for token, logprob in tops)

    try:
        check()
    finally:
        engine.close()


# In a batch, whatever the backend


async def test_malformed_answers_are_kept_as_failures_and_asked_for_again_by_the_next_run(
    server, tiny, tmp_path, engine_of
):
    batch = make_batch(tmp_path, tiny, [f"sort {number} =" for number in range(30)])
    engine, lock, count = engine_of(max_concurrency=4), threading.Lock(), 0

    def every_third(answer: dict[str, Any]) -> Any:
        nonlocal count
        with lock:
            count += 1
            return put("logprobs", "token_logprobs", 0, value=None)(answer) if count % 3 == 0 else answer

    server.change = every_third
    with pytest.raises(Recoverable, match=r"10 of 30 samples failed; .* malformed: a log-probability is null"):
        await batch.complete(engine, deterministic=False)
    assert await batch.statuses() == {"failed": 10, "succeeded": 20}
    server.change = None
    await batch.complete(engine, deterministic=False)
    assert await batch.statuses() == {"succeeded": 30} and len(server.asked) == 40


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "problem"),
    [
        ([5, 6], [-0.5, -0.5], None),
        ([5, 6], [], None),
        ([5] * 64, [], None),
        ([5] * 65, [], "a text of 65 tokens, more than 8 times sampling.max_tokens 8"),
        ([], [], None),
        (
            [5, -6],
            [-0.5, -0.5],
            "token id -6, which is outside the vocabulary; the tokenizer has 262 ids",
        ),
        (
            [5, 262],
            [-0.5, -0.5],
            "token id 262, which is outside the vocabulary; the tokenizer has 262 ids",
        ),
        ([5, 6], [-0.5], "2 tokens, but log-probabilities of 1"),
        ([5] * 9, [-0.5] * 9, "9 tokens, but sampling.max_tokens is 8"),
        ([5], [0.5], "a log-probability of 0.5, above 0"),
    ],
)
def test_a_completion_of_any_backend_is_held_against_its_request(token_ids, logprobs, problem):
    assert problem_with(token_ids, logprobs, SamplingParams(max_tokens=8), 262) == problem


async def test_an_engine_in_this_process_is_not_believed_either(batch, watched):
    """A fault of ours or of vLLM's ends as a failed sample, not as training data."""
    watched.finish = lambda completion: (
        Completion(completion.key, [*completion.token_ids, -1], [*completion.logprobs, 0.0], "", "stop")
        if completion.key == batch.ids[3]
        else completion
    )
    with pytest.raises(Fatal, match=r"1 of 10 samples failed; .* cannot be kept: token id -1, which is outside"):
        await batch.complete(watched)
    assert await batch.statuses() == {"failed": 1, "succeeded": 9}
