"""Text in and out: context for decoding, chat templates, and prompts that cannot be."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout_core.base.errors import ConfigError
from rollout_core.data.datasets import PromptRow
from rollout_core.data.text import decode_as_streamed, decode_completions, token_ids_of, tokenize_prompts, with_own_bos
from rollout_core.models.messages import ChatMessage
from rollout_core.models.pretrained import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer that marks the starts of words, as SentencePiece models do."""
    words = ["<unk>", "</s>", "▁", "▁one", "▁two", "▁three", "!", "▁fo", "ur"]
    inner = Tokenizer(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


def decode(tokenizer, prompt: str, completion: list[int]) -> str:
    [text] = decode_completions(tokenizer, [tokenizer(prompt)["input_ids"]], [completion])
    return text


def test_a_completion_keeps_its_first_space(sentencepiece):
    two = sentencepiece.convert_tokens_to_ids(["▁two", "▁three"])
    assert sentencepiece.decode(two) == "two three", "decoded alone, the space is lost"
    assert decode(sentencepiece, "one", two) == " two three"


def test_a_completion_that_goes_on_with_a_word_has_no_space(sentencepiece):
    prompt = sentencepiece("one fo")["input_ids"]
    rest = sentencepiece.convert_tokens_to_ids(["ur", "!"])
    assert decode_completions(sentencepiece, [prompt], [rest]) == ["ur!"]


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer that spells characters it has no word for in bytes."""
    words = ["<unk>", "</s>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: token for token, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("spelt", "then", "streamed", "whole"),
    [
        ("你好".encode(), ["▁a"], " a你好 a", " a你好 a"),
        ("你好".encode()[:5], [], " a你", " a" + "\ufffd" * 5),
        ("你好".encode()[:5], ["▁a", "a"], " a你aa", " a" + "\ufffd" * 5 + " aa"),
        (b"", ["</s>"], " a", " a"),
    ],
)
def test_a_text_streamed_keeps_characters_that_later_bytes_take_back_in_the_whole(
    byte_fallback, spelt, then, streamed, whole
):
    """What is held back when the bytes come to nothing is lost, as it is at servers."""
    words = ["▁a", *(f"<0x{byte:02X}>" for byte in spelt), *then]
    prompt, tokens = byte_fallback.convert_tokens_to_ids(["a", "▁a"]), byte_fallback.convert_tokens_to_ids(words)
    assert decode_completions(byte_fallback, [prompt], [tokens]) == [whole]
    assert decode_as_streamed(byte_fallback, prompt, tokens) == streamed


def test_the_end_of_sequence_is_no_part_of_the_text(sentencepiece):
    ids = [*sentencepiece.convert_tokens_to_ids(["▁two"]), sentencepiece.eos_token_id]
    assert decode(sentencepiece, "one", ids) == " two"
    assert decode(sentencepiece, "one", [sentencepiece.eos_token_id]) == ""


def test_a_prompt_longer_than_the_context_for_decoding_changes_nothing(sentencepiece):
    two = sentencepiece.convert_tokens_to_ids(["▁two"])
    assert decode(sentencepiece, "one " * 40, two) == " two"


def test_each_completion_is_decoded_behind_its_own_prompt(sentencepiece):
    prompts = [sentencepiece(text)["input_ids"] for text in ("one", "three three three")]
    completions = [sentencepiece.convert_tokens_to_ids([word]) for word in ("▁two", "!")]
    assert decode_completions(sentencepiece, prompts, completions) == [" two", "!"]


def test_a_character_split_between_prompt_and_completion_does_no_harm(tokenizer):
    euro = tokenizer("€", add_special_tokens=False)["input_ids"]
    assert len(euro) == 3, "one token a byte"
    [text] = decode_completions(tokenizer, [euro[:1]], [[*euro[1:], *tokenizer(" 5")["input_ids"]]])
    assert text.endswith(" 5")
    [text] = decode_completions(tokenizer, [tokenizer("1")["input_ids"]], [[*euro, *euro[:2]]])
    assert text.startswith("€")


@pytest.mark.parametrize("text", ["1 2 3", "  two spaces", "tab\tand\nline", "ünïcödé €", "'s n't ."])
def test_byte_level_text_comes_back_as_it_was(tokenizer, text):
    completion = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, "sort 3 1 2 =", completion) == text


def test_messages_go_through_the_chat_template_with_the_generation_prompt(tokenizer, tiny_model):
    chatty = load_tokenizer(tiny_model)
    chatty.chat_template = TEMPLATE
    rows = [
        PromptRow(prompt="plain"),
        PromptRow(messages=(ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="1 2"))),
        PromptRow(prompt="also plain"),
    ]
    ids = tokenize_prompts(chatty, rows)
    assert [chatty.decode(one) for one in ids] == ["plain", "<system>be brief<user>1 2<assistant>", "also plain"]


def test_messages_without_a_chat_template_are_refused_by_number(tokenizer):
    rows = [PromptRow(prompt="fine"), PromptRow(messages=(ChatMessage(role="user", content="hello"),))]
    with pytest.raises(ConfigError, match="prompt 2 holds chat messages, but the tokenizer has no chat template"):
        tokenize_prompts(tokenizer, rows)


def test_a_prompt_without_tokens_is_refused_by_number(tokenizer):
    with pytest.raises(ConfigError, match="prompt 3 has no tokens"):
        tokenize_prompts(tokenizer, [PromptRow(prompt="a"), PromptRow(prompt="b"), PromptRow(prompt="")])


@pytest.fixture
def beginning(tiny_model):
    """Adds its BOS token to every text, as Llama's tokenizers do."""
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.bos_token = "<pad>"
    form = {"single": "<pad> $A", "special_tokens": [("<pad>", tokenizer.bos_token_id)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**form)
    return tokenizer


def test_a_text_that_begins_with_bos_gets_no_second_one(beginning, tokenizer, tiny_model):
    bos, [plain] = beginning.bos_token_id, tokenize_prompts(tokenizer, [PromptRow(prompt="1 2")])
    texts = ["1 2", "<pad>1 2", "<pad><pad>1 2", "1 2<pad><pad>"]
    rows = [PromptRow(prompt=text) for text in texts]
    expected = [[bos, *plain], [bos, *plain], [bos, bos, *plain], [bos, *plain, bos, bos]]
    assert tokenize_prompts(beginning, rows) == expected == token_ids_of(beginning, texts, special_tokens=True)
    assert token_ids_of(beginning, texts[:2], special_tokens=False) == [plain, [bos, *plain]]
    assert with_own_bos(beginning, rows) == {1, 2}
    adds_none = load_tokenizer(tiny_model)
    adds_none.bos_token = "<pad>"
    assert tokenize_prompts(adds_none, rows) == [plain, *expected[1:3], expected[3][1:]]
    assert not with_own_bos(adds_none, rows)


def test_no_prompts_give_no_ids(tokenizer):
    assert tokenize_prompts(tokenizer, []) == []


def test_a_prompt_that_ends_with_the_assistant_asks_nothing(tokenizer):
    tokenizer.chat_template = TEMPLATE
    turns = (ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b"))
    with pytest.raises(ConfigError, match="prompt 1 has the assistant's message as its last: nothing is asked"):
        tokenize_prompts(tokenizer, [PromptRow(messages=turns)])
