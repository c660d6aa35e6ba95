"""Log-probabilities of continuations: tokenised as lm-evaluation-harness does, the same from every backend as from a
plain forward pass, and asked for once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_core.base.errors import ConfigError
from rollout_core.config import EndpointModel, OpenAIBackend, ScriptedBackend, TransformersBackend
from rollout_core.data.continuations import (
    SCORING,
    Continued,
    Loglikelihood,
    encode_continuations,
    scored_samples,
    scored_texts,
)
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import (
    Completion,
    Failure,
    decode_completions_blob,
    decode_samples,
    encode_samples,
)
from rollout_core.data.text import tokenize_prompts
from rollout_core.inference.backend import ModelRef, Request, cannot_score
from rollout_core.inference.endpoint_model import EndpointEngine, endpoint_id
from rollout_core.inference.engines import build_backend
from rollout_core.objects import ObjectStore
from tests.support.answer_server import WORD, AnswerServer

PAIRS = [
    ("sort 3 1 2 =", " 1 2 3"),
    ("sort 3 1 2 =", " 3 2 1"),
    ("sort 9 9 0 4 4 1 = ", "0 1 4 4 9 9"),
    ("sort 5 \n", "5"),
    ("", "sort 1 ="),
]


def pairs(texts: Sequence[tuple[str, str]] = PAIRS) -> list[Continued]:
    return [Continued(PromptRow(prompt=prompt), continuation) for prompt, continuation in texts]


def harness(folder: Path, prompt: str, continuation: str) -> tuple[list[int], list[int], float, bool]:
    """What `loglikelihood` of lm-evaluation-harness is for one request, written anew from its description."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, continuation = prompt[:-spaces], prompt[-spaces:] + continuation
    before = tokenizer.encode(prompt) if prompt else [tokenizer.bos_token_id or tokenizer.eos_token_id]
    after = tokenizer.encode(prompt + continuation)[len(before) if prompt else 0 :]
    with torch.no_grad():
        logprobs = policy(torch.tensor([[*before, *after][:-1]])).logits[0].log_softmax(-1)[-len(after) :]
    total = sum(float(logprobs[place, token]) for place, token in enumerate(after))
    return before, after, total, logprobs.argmax(-1).tolist() == after


def requests_of(model: ModelRef, texts: Sequence[tuple[str, str]] = PAIRS) -> list[Request]:
    samples = scored_samples(model.folder, pairs(texts), model=model.content_id)
    return [
        Request(
            str(sample.id),
            sample.prompt_token_ids,
            SCORING,
            0,
            sample.prompt,
            continuation=sample.continuation,
            scored=sample.scored,
        )
        for sample in samples
    ]


def test_pairs_are_tokenised_as_the_harness_does(tiny: ModelRef, tokenizer: Any):
    for (prompt, continuation), (ids, scored) in zip(PAIRS, encode_continuations(tokenizer, pairs()), strict=True):
        before, after, *_ = harness(tiny.folder, prompt, continuation)
        assert (ids, ids[-scored:]) == ([*before, *after], after), (prompt, continuation)


def test_transformers_gives_the_harness_log_likelihoods(tiny: ModelRef):
    asked = requests_of(tiny)
    engine = build_backend(TransformersBackend(), tiny)
    greedy = engine.generate([Request("g", asked[0].prompt_token_ids[: -asked[0].scored], SCORING, 0)])[0].text
    asked += requests_of(tiny, [("sort 3 1 2 =", greedy)])
    for (prompt, continuation), one in zip([*PAIRS, ("sort 3 1 2 =", greedy)], engine.generate(asked), strict=True):
        _, after, total, is_greedy = harness(tiny.folder, prompt, continuation)
        assert (one.token_ids, one.text, one.greedy) == (after, continuation, is_greedy)
        assert sum(one.logprobs) == pytest.approx(total, abs=1e-4)
    assert is_greedy


def test_a_padded_vocabulary_counts_as_it_does_for_the_harness(padded: ModelRef):
    [one] = build_backend(TransformersBackend(), padded).generate(requests_of(padded, PAIRS[:1]))
    assert sum(one.logprobs) == pytest.approx(harness(padded.folder, *PAIRS[0])[2], abs=1e-4)


def test_a_conversation_is_continued_behind_the_chat_template(tiny: ModelRef, tokenizer: Any):
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    row = PromptRow.model_validate({"messages": [{"role": "user", "content": "sort 2 1"}]})
    [(ids, scored)] = encode_continuations(tokenizer, [Continued(row, "1 2")])
    assert tokenizer.decode(ids) == "<user>sort 2 1<a>1 2"
    assert tokenizer.decode(ids[-scored:]) == "1 2"


def test_a_conversation_that_ends_with_an_answer_is_refused_as_for_generation(tiny: ModelRef):
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    turns = [{"role": "user", "content": "sort 2 1"}, {"role": "assistant", "content": "1"}]
    row = PromptRow.model_validate({"messages": turns})
    expected = "prompt 1 has the assistant's message as its last: nothing is asked; leave the answer out"
    with pytest.raises(ConfigError, match=expected):
        tokenize_prompts(tokenizer, [row])
    with pytest.raises(ConfigError, match=expected):
        encode_continuations(tokenizer, [Continued(row, " 2")])


def test_an_empty_prompt_needs_a_token_that_begins_texts(tiny: ModelRef):
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"a prompt is empty, and the tokenizer \w+ of '.*' has neither a BOS nor"):
        encode_continuations(tokenizer, pairs([("sort", " 1"), ("", " 1")]))
    assert encode_continuations(tokenizer, pairs([("sort", " 1")]))


def test_what_cannot_be_scored_is_refused(tiny: ModelRef, tokenizer: Any):
    with pytest.raises(ConfigError, match="prompt 1: the continuation '' adds no token"):
        encode_continuations(tokenizer, pairs([("sort", "")]))
    with pytest.raises(ConfigError, match="exceed the model's context of 8 tokens"):
        scored_samples(tiny.folder, pairs([("sort 1 2 3", " 4 5 6 7 8 9")]), model=tiny.content_id, max_model_len=8)


def test_ids_follow_from_prompt_continuation_and_model_and_tell_equal_pairs_apart(tiny: ModelRef, other_tiny: ModelRef):
    twice = scored_samples(tiny.folder, pairs([PAIRS[0], PAIRS[1], PAIRS[0]]), model=tiny.content_id)
    again = scored_samples(tiny.folder, pairs([PAIRS[1], PAIRS[0]]), model=tiny.content_id)
    assert len({sample.id for sample in twice}) == 3
    assert [sample.id for sample in again] == [twice[1].id, twice[0].id]
    other = scored_samples(tiny.folder, pairs([PAIRS[0]]), model=other_tiny.content_id)
    assert other[0].id != twice[0].id
    assert scored_texts(pairs([PAIRS[0]]), model=tiny.content_id)[0].id == twice[0].id


def test_the_scripted_text_is_certain(tiny: ModelRef):
    engine = build_backend(ScriptedBackend(text="1 2 3"), tiny)
    first, second = engine.generate(requests_of(tiny, PAIRS[:2]))
    assert sum(first.logprobs) == 0 and first.greedy
    assert sum(second.logprobs) == -len(second.token_ids) and not second.greedy


def test_scored_continuations_are_samples_of_the_ledger_and_asked_for_once(tmp_path: Path, tiny: ModelRef):
    objects = ObjectStore.from_url(f"file://{tmp_path / 'objects'}")
    samples = scored_samples(tiny.folder, pairs(), model=tiny.content_id)
    filed = objects.put_bytes(encode_samples(samples))
    assert decode_samples(objects.get_bytes(filed)) == samples
    batch = Batch(objects, f"sqlite:///{tmp_path / 'rollout.db'}", samples, filed)
    engine = build_backend(TransformersBackend(), tiny)
    first, again = (asyncio.run(batch.complete(engine)) for _ in range(2))
    assert first == again and [work.samples for work in batch.works] == [5, 0]
    assert asyncio.run(batch.successes()) == dict.fromkeys(batch.ids, 1)
    known = asyncio.run(batch.rollouts())
    assert [known[key].input["continuation"] for key in batch.ids] == [text for _, text in PAIRS]
    scored = decode_completions_blob(objects.get_bytes(first.completions))
    assert [row.text for row in scored] == [text for _, text in PAIRS]
    for (prompt, continuation), row in zip(PAIRS, scored, strict=True):
        _, after, total, is_greedy = harness(tiny.folder, prompt, continuation)
        found = Loglikelihood.of(row)
        assert (found.num_tokens, found.is_greedy) == (len(after), is_greedy)
        assert found.total == pytest.approx(total, abs=1e-4)


SCORES = {"capital of France is": {" Paris": -0.25, " Rome": -3.0}}


@pytest.fixture
def scoring():
    with AnswerServer(scores=SCORES) as running:
        yield running


def endpoint(server: AnswerServer, **keys: Any) -> EndpointModel:
    return EndpointModel.model_validate({"kind": "endpoint", "url": server.url, "model": "wise", **keys})


def score(config: EndpointModel, *texts: tuple[str, str]) -> list[Completion | Failure]:
    engine = EndpointEngine(config, ModelRef(endpoint_id(config), Path()))
    try:
        asked = [
            Request(str(place), (), SCORING, 0, prompt, continuation=continuation)
            for place, (prompt, continuation) in enumerate(texts)
        ]
        found = {outcome.key: outcome for outcome in engine.stream(asked)}
        return [found[request.key] for request in asked]
    finally:
        engine.close()


def test_an_endpoint_scores_the_texts_that_it_repeats(scoring: AnswerServer):
    texts = [("The capital of France is", " Paris"), ("The capital of France is ", "Rome"), ("The", " capital of")]
    paris, rome, two = score(endpoint(scoring, api="completions", max_concurrency=1), *texts)
    assert isinstance(paris, Completion) and isinstance(rome, Completion) and isinstance(two, Completion)
    assert (paris.logprobs, paris.greedy, paris.text, paris.token_ids) == ([-0.25], True, " Paris", [])
    assert (rome.logprobs, rome.greedy) == ([-3.0], False)  # the space at the prompt's end is the word's
    assert two.logprobs == [-9.0, -9.0]
    [first, *_] = scoring.asked
    assert first == {
        "model": "wise",
        "prompt": "The capital of France is Paris",
        "max_tokens": 1,
        "temperature": 0.0,
        "echo": True,
        "logprobs": 1,
    }


GRIN_FACE = "\N{GRINNING FACE}"
GRIN = {
    "the last has the character": ["", "", GRIN_FACE],
    "bytes by their numbers": ["bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80"],
}
"""One character of three tokens, as vLLM and OpenAI name them."""


def words(text: str) -> list[str]:
    return WORD.findall(text)


@pytest.mark.parametrize(
    "tokens",
    [
        lambda text: ["<s>", *words(text)],
        lambda text: ["<|begin_of_text|>", *words(text)],
        lambda text: ["", *words(text)],
        lambda text: ["<s>", *words(" " + text)],
        lambda text: ["[gMASK]", "<sop>", *words(text)],
        lambda text: ["<s>", "\ufffd", "\ufffd", *words(text)[1:]],
    ],
    ids=["<s>", "longer than a choice", "empty", "a space of the tokenizer's", "two", "half characters in the prompt"],
)
def test_tokens_before_the_text_move_no_choice(scoring: AnswerServer, tokens: Any):
    scoring.tokens = tokens
    config = endpoint(scoring, api="completions", max_concurrency=1)
    paris, capital, whole = score(
        config, ("The capital of France is", " Paris"), ("The", " capital of"), ("", "Paris is")
    )
    assert isinstance(paris, Completion) and isinstance(capital, Completion)
    assert (paris.logprobs, capital.logprobs) == ([-0.25], [-9.0, -9.0])
    if "\ufffd" not in tokens(""):
        assert isinstance(whole, Completion) and whole.logprobs == [-9.0, -9.0]


@pytest.mark.parametrize("named", GRIN)
def test_all_tokens_of_a_character_count(scoring: AnswerServer, named: str):
    parts = GRIN[named]
    scoring.tokens = lambda text: [
        part for word in re.findall(r"<s>|\s?\w+|\S", text) for part in (parts if word == GRIN_FACE else [word])
    ]
    scoring.width = lambda name: 0 if name in parts[:-1] else 1 if name == parts[-1] else len(name)
    [first, inner] = score(endpoint(scoring, api="completions"), ("Smile:", GRIN_FACE), ("Smile:", " wide" + GRIN_FACE))
    assert isinstance(first, Completion) and first.logprobs == [-9.0] * 3
    assert isinstance(inner, Completion) and inner.logprobs == [-9.0] * 4


def test_an_endpoint_that_does_not_return_the_token_that_ends_a_text_scores_it(scoring: AnswerServer):
    scoring.drawn = ()
    [paris] = score(endpoint(scoring, api="completions"), ("The capital of France is", " Paris"))
    assert isinstance(paris, Completion) and paris.logprobs == [-0.25]


@pytest.mark.parametrize(
    "tokens",
    [
        lambda text: [word.strip() for word in words(text)],
        lambda text: ["<s>", *(word.strip() for word in words(text))],
        lambda text: [word.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}") for word in words(text)],
    ],
    ids=["no spaces", "no spaces behind a special token", "vocabulary pieces"],
)
def test_tokens_that_do_not_write_the_choice_score_nothing(scoring: AnswerServer, tokens: Any):
    scoring.tokens = tokens
    with pytest.raises(ConfigError, match="or its tokens do not write the prompt"):
        score(endpoint(scoring, api="completions"), ("The capital of France is", " Paris"))


def test_an_endpoint_that_gives_no_log_probabilities_of_prompts_ends_the_run_with_one_line(scoring: AnswerServer):
    scoring.scores_prompts = False
    with pytest.raises(ConfigError, match="answers without log-probabilities of the prompt"):
        score(endpoint(scoring, api="completions"), ("The", " capital"))


def test_a_backend_over_an_endpoint_of_another_kind_scores_texts_too(scoring: AnswerServer, tiny: ModelRef):
    config = OpenAIBackend(url=scoring.url, served_model="wise", dialect="openai")
    engine = build_backend(config, tiny)
    try:
        [paris] = engine.generate(requests_of(tiny, [("The capital of France is", " Paris")]))
    finally:
        engine.close()
    assert (paris.logprobs, paris.greedy, paris.token_ids) == ([-0.25], True, [])


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_endpoints_of_messages_alone_cannot_score(api: Any):
    assert "gives no log-probabilities of prompts" in (
        cannot_score(EndpointModel(kind="endpoint", url="http://127.0.0.1:1/v1", model="m", api=api)) or ""
    )
    assert cannot_score(OpenAIBackend(url="http://127.0.0.1:1/v1", api="chat")) is not None
    assert cannot_score(OpenAIBackend(url="http://127.0.0.1:1/v1")) is None
