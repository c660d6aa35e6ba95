"""Samples: identities that depend on what is generated and on nothing else, and rows that come back as they went."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers.processors import TemplateProcessing

from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import hash_bytes, sample_id
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import (
    Completion,
    decode_completions_blob,
    decode_samples,
    encode_completion,
    encode_samples,
    identities_of,
    make_samples,
)
from rollout_core.inference.shards import ShardRow, shard_samples
from rollout_core.models.messages import ChatMessage
from rollout_core.models.pretrained import load_tokenizer

MODEL = hash_bytes(b"model")
PARAMS = SamplingParams(max_tokens=8)


def rows(*prompts: str) -> list[PromptRow]:
    return [PromptRow(prompt=prompt) for prompt in prompts]


def make(tokenizer, prompt_rows, **options):
    return make_samples(tokenizer, prompt_rows, **{"model": MODEL, "params": PARAMS, **options})


def test_equal_prompts_get_different_samples(tokenizer):
    samples = make(tokenizer, rows("a", "b", "a", "a"))
    assert [sample.index for sample in samples] == [0, 0, 1, 2]
    assert len({sample.id for sample in samples}) == 4


def test_samples_of_a_padded_vocabulary_and_of_a_prompt_with_its_own_bos_are_others(tiny_model, tokenizer):
    """Earlier versions drew ids beyond the tokenizer, and gave such a prompt a second BOS; others keep their ids."""
    [plain] = make(tokenizer, rows("<pad>1"))
    assert plain.id == sample_id(MODEL, "<pad>1", PARAMS, 0)
    [padded] = make(tokenizer, rows("<pad>1"), known_ids=262)
    adds_bos = load_tokenizer(tiny_model)
    adds_bos.bos_token = "<pad>"
    form = {"single": "<pad> $A", "special_tokens": [("<pad>", adds_bos.bos_token_id)]}
    adds_bos.backend_tokenizer.post_processor = TemplateProcessing(**form)
    once, other = make(adds_bos, rows("<pad>1", "1"))
    assert once.prompt_token_ids == other.prompt_token_ids == plain.prompt_token_ids
    assert other.id == sample_id(MODEL, "1", PARAMS, 0)
    assert len({plain.id, padded.id, once.id}) == 3
    [sharded], _ = shard_samples(adds_bos, [ShardRow(rows("<pad>1")[0], 0)], identities_of(MODEL, PARAMS, None))
    assert sharded == once


def test_several_samples_of_one_prompt_stand_together(tokenizer):
    samples = make(tokenizer, rows("a", "b", "a"), samples_per_prompt=2)
    assert [(sample.prompt, sample.index) for sample in samples] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3)
    ]  # fmt: skip


@settings(deadline=None)  # the first example starts the process that tokenises
@given(cut=st.integers(0, 9), samples_per_prompt=st.integers(1, 3))
def test_ids_do_not_depend_on_how_a_file_is_cut_into_shards(tokenizer, cut, samples_per_prompt):
    everything = rows(*"abacabadab")
    whole = make(tokenizer, everything, samples_per_prompt=samples_per_prompt)
    first = make(tokenizer, everything[:cut], samples_per_prompt=samples_per_prompt)
    second = make(tokenizer, everything[cut:], samples_per_prompt=samples_per_prompt, earlier=everything[:cut])
    assert first + second == whole


def test_equal_conversations_are_told_apart_too(tokenizer, tiny_model):
    from rollout_core.models.pretrained import load_tokenizer

    chatty = load_tokenizer(tiny_model)
    chatty.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    conversation = PromptRow(messages=(ChatMessage(role="user", content="hello"),))
    first, second = make(chatty, [conversation, conversation])
    assert (first.index, second.index) == (0, 1) and first.id != second.id
    assert first.prompt == [{"role": "user", "content": "hello"}]
    text = make(chatty, rows("hello"))[0]
    assert text.prompt_token_ids == first.prompt_token_ids and text.id != first.id


@pytest.mark.parametrize(
    "change",
    [
        {"model": hash_bytes(b"another model")},
        {"params": PARAMS.model_copy(update={"temperature": 0.5})},
        {"params": PARAMS.model_copy(update={"seed": 1})},
        {"params": PARAMS.model_copy(update={"stop": ("x",)})},
        {"params": PARAMS.model_copy(update={"max_tokens": 9})},
    ],
)
def test_whatever_changes_the_outcome_changes_the_id(tokenizer, change):
    assert make(tokenizer, rows("a"))[0].id != make(tokenizer, rows("a"), **change)[0].id


def test_the_callers_own_id_and_extras_do_not_change_the_id(tokenizer):
    plain, adorned = PromptRow(prompt="a"), PromptRow(prompt="a", id="mine", extras={"answer": "1"})
    [one], [other] = make(tokenizer, [plain]), make(tokenizer, [adorned])
    assert one.id == other.id and (other.row_id, other.extras) == ("mine", {"answer": "1"})


def test_prompts_too_long_for_the_context_are_refused_by_number(tokenizer):
    long = "1 " * 20
    assert len(make(tokenizer, rows("1 2"), max_model_len=16)) == 1
    with pytest.raises(ConfigError, match=r"prompt 2 \(and 1 more\): 4\d tokens \+ sampling.max_tokens 8 .* 16 tokens"):
        make(tokenizer, rows("1 2", long, "3", long), max_model_len=16)


def test_a_prompt_that_just_fits_is_taken(tokenizer):
    length = len(tokenizer("1 2 3")["input_ids"])
    make(tokenizer, rows("1 2 3"), max_model_len=length + PARAMS.max_tokens)
    with pytest.raises(ConfigError):
        make(tokenizer, rows("1 2 3"), max_model_len=length + PARAMS.max_tokens - 1)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(deadline=None)
@given(prompts=st.lists(text, max_size=5), extras=st.dictionaries(text, st.one_of(text, st.integers(-5, 5), st.none())))
def test_samples_come_back_as_they_went(tokenizer, prompts, extras):
    extras = {f"x{key}": value for key, value in extras.items()}
    samples = make(tokenizer, [PromptRow(prompt=prompt, id=prompt, extras=extras) for prompt in prompts])
    data = encode_samples(samples)
    assert decode_samples(data) == samples
    assert data.count(b"\n") == len(samples), "one line each, whatever the text holds"


@settings(deadline=None)
@given(
    logprobs=st.lists(st.floats(-50, 0, width=32), max_size=6),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_completions_come_back_bit_for_bit(logprobs, text):
    completion = Completion(MODEL, list(range(len(logprobs))), logprobs, text, "stop")
    line = encode_completion(completion)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    [back] = decode_completions_blob(line)
    assert (back.id, back.token_ids, back.text, back.finish_reason) == (MODEL, completion.token_ids, text, "stop")
    assert np.asarray(back.logprobs, np.float32).tobytes() == np.asarray(logprobs, np.float32).tobytes()


def test_equal_completions_give_equal_bytes():
    one = Completion(MODEL, [1, 2], [-0.1, -0.25], "x", "stop")
    other = Completion(MODEL, (1, 2), tuple(np.asarray([-0.1, -0.25], np.float32)), "x", "stop")
    assert encode_completion(one) == encode_completion(other)
    assert list(orjson.loads(encode_completion(one))) == ["finish_reason", "id", "logprobs", "text", "token_ids"]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_not_finite_is_refused_by_sample(bad):
    with pytest.raises(Fatal, match=rf"sample {MODEL.short} has log-probabilities that are not finite"):
        encode_completion(Completion(MODEL, [1, 2], [-0.5, bad], "x", "stop"))
