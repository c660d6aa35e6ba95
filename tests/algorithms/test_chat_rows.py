"""Which tokens of a conversation are trained, on a real tokenizer with a real chat template."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_core.base.errors import ConfigError
from rollout_core.config import LossOn
from rollout_core.data.datasets import PromptRow, SftRow
from rollout_core.data.examples import EXAMPLES, DataReport, Example, each_example, longest_sequence
from rollout_core.data.text import tokenize_prompts
from rollout_core.data.tokenized import ItemTable, ItemWriter
from rollout_core.models.messages import ChatMessage
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.plans.memory_and_disk import row_tokens
from tests.support.rows import tokenize_sft

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's, with its own system prompt, and with the marks by which transformers tells an assistant's tokens."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    made = load_tokenizer(tiny_model)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = CHATML
    return made


def chat(*turns: tuple[str, str]) -> SftRow:
    return SftRow(messages=tuple(ChatMessage(role=role, content=content) for role, content in turns))  # pyright: ignore[reportArgumentType]


def tokenize(tokenizer: Any, *rows: SftRow, kind: str = "assistant_only", limit: int = 512) -> list[Example]:
    return report(tokenizer, *rows, kind=kind, limit=limit)[0]


def report(
    tokenizer: Any, *rows: SftRow, kind: str = "assistant_only", limit: int = 512
) -> tuple[list[Example], DataReport]:
    return tokenize_sft(tokenizer, rows, loss_on=LossOn.model_validate({"kind": kind}), max_seq_len=limit)


def trained_parts(tokenizer: Any, example: Example) -> list[str]:
    """Text of each unbroken run of trained tokens."""
    parts: list[list[int]] = []
    before = False
    for token, trained in zip(example.token_ids, example.trained, strict=True):
        if trained and not before:
            parts.append([])
        if trained:
            parts[-1].append(token)
        before = trained
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


TURNS = (
    ("system", "Sort."),
    ("user", "2 1"),
    ("assistant", "1 2"),
    ("tool", "9"),
    ("user", "4 3"),
    ("assistant", "3 4"),
)


def test_every_assistant_turn_is_trained_with_what_ends_it_and_nothing_else(tokenizer: Any):
    [example] = tokenize(tokenizer, chat(*TURNS))
    assert trained_parts(tokenizer, example) == [f"1 2{END}\n", f"3 4{END}\n"]
    whole = "".join(f"{START}{role}\n{content}{END}\n" for role, content in TURNS)
    assert tokenizer.decode(example.token_ids, skip_special_tokens=False) == whole


def test_full_trains_every_token_of_the_same_sequence(tokenizer: Any):
    [assistant], [full] = tokenize(tokenizer, chat(*TURNS)), tokenize(tokenizer, chat(*TURNS), kind="full")
    assert full.token_ids == assistant.token_ids and all(full.trained) and not all(assistant.trained)


def test_the_templates_own_system_prompt_is_not_trained(tokenizer: Any):
    [example] = tokenize(tokenizer, chat(("user", "2 1"), ("assistant", "1 2")))
    assert tokenizer.decode(example.token_ids, skip_special_tokens=False).startswith(f"{START}system\nBe brief.{END}")
    assert trained_parts(tokenizer, example) == [f"1 2{END}\n"]


def test_a_conversation_may_begin_with_the_assistant(tokenizer: Any):
    row = chat(("assistant", "Numbers?"), ("user", "2 1"), ("assistant", "1 2"))
    assert trained_parts(tokenizer, tokenize(tokenizer, row)[0]) == [f"Numbers?{END}\n", f"1 2{END}\n"]


def test_turns_of_the_assistant_in_a_row_are_each_trained(tokenizer: Any):
    row = chat(("user", "2 1"), ("assistant", "1"), ("assistant", "2"))
    assert trained_parts(tokenizer, tokenize(tokenizer, row)[0]) == [f"1{END}\n", f"2{END}\n"]


def test_chat_rows_and_pairs_keep_their_order(tokenizer: Any):
    rows = (
        SftRow(prompt="2 1 =", completion=" 1 2"),
        chat(("user", "4 3"), ("assistant", "3 4")),
        SftRow(prompt="6 5 =", completion=" 5 6"),
    )
    parts = [trained_parts(tokenizer, example) for example in tokenize(tokenizer, *rows)]
    assert parts == [[" 1 2" + tokenizer.eos_token], [f"3 4{END}\n"], [" 5 6" + tokenizer.eos_token]]


def test_rows_are_cut_at_the_right_and_those_left_without_a_target_are_counted(tokenizer: Any):
    row = chat(*TURNS)
    [whole] = tokenize(tokenizer, row)
    first = whole.trained.index(True)
    examples, told = report(tokenizer, row, chat(("user", "9 " * 100), ("assistant", "9")), limit=first + 2)
    assert [example.token_ids for example in examples] == [whole.token_ids[: first + 2]]
    assert examples[0].trained == [False] * first + [True] * 2
    assert (told.num_rows, told.num_examples, told.num_truncated, told.num_left_out) == (2, 1, 2, 1)
    assert (told.num_tokens, told.num_trained_tokens) == (first + 2, 2)
    with pytest.raises(ConfigError, match=f"none of 1 rows has a token to train within sequence.max_length {first}"):
        tokenize(tokenizer, row, limit=first)


TEXT = st.text(st.sampled_from("1 2\n=ü€é<>|"), min_size=1, max_size=8)
CONVERSATION = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXT), max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=CONVERSATION, answer=TEXT)
def test_the_mask_equals_transformers_own(tokenizer: Any, turns: list[tuple[str, str]], answer: str):
    """From the template's generation marks, an independent way to the same answer."""
    row = chat(*turns, ("assistant", answer))
    messages = [message.document() for message in row.messages or ()]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(on) for on in theirs["assistant_masks"]]
    assert tokenize(tokenizer, row) == [Example(theirs["input_ids"], mask)]
    asked = [*messages, {"role": "user", "content": "2 1"}]
    [prompt] = tokenize_prompts(tokenizer, [PromptRow.model_validate({"messages": asked})])
    assert prompt == tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_a_token_that_straddles_the_edge_of_a_turn_does_no_harm():
    """Real tokenizers join line breaks: that of the header, and one that the answer begins with."""
    words = ["<unk>", "</s>", "\n", "\n\n", "user", "assistant", "hi", "yo"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(pattern="\n", behavior="contiguous")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    [example] = tokenize(made, chat(("user", "hi"), ("assistant", "\nyo")))
    tokens = made.convert_ids_to_tokens(example.token_ids)
    assert tokens == ["user", "\n", "hi", "</s>", "assistant", "\n\n", "yo", "</s>"]
    assert example.trained == [False] * 5 + [True] * 3


# Masks that rows bring themselves


def test_a_rows_own_mask_says_which_turns_are_trained(tokenizer: Any):
    turns = SftRow.model_validate({**chat(*TURNS).document(), "loss_mask": [0, 1, 0, 0, 0, 1]})
    [example] = tokenize(tokenizer, turns, kind="custom")
    assert trained_parts(tokenizer, example) == [f"{START}user\n2 1{END}\n", f"3 4{END}\n"]
    [same] = tokenize(tokenizer, chat(*TURNS))
    assert example.token_ids == same.token_ids
    first = SftRow.model_validate({**chat(*TURNS[:3]).document(), "loss_mask": [1, 0, 1]})
    [example] = tokenize(tokenizer, first, kind="custom")
    assert trained_parts(tokenizer, example) == [f"{START}system\nSort.{END}\n", f"1 2{END}\n"]


def test_token_ids_are_taken_as_they_are(tokenizer: Any):
    labels = SftRow(input_ids=(5, 6, 7, 8), labels=(-100, -100, 7, 8))
    mask = SftRow(input_ids=(5, 6, 7, 8), loss_mask=(False, False, True, True))
    nothing = SftRow(input_ids=(5, 6), labels=(5, -100))
    examples, told = report(tokenizer, labels, mask, nothing, kind="custom", limit=3)
    assert examples == [Example([5, 6, 7], [False, False, True])] * 2
    assert (told.num_left_out, told.num_truncated, told.num_trained_tokens) == (1, 2, 2)
    assert tokenize(tokenizer, labels, kind="full") == [Example([5, 6, 7, 8], [True] * 4)]


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"prompt": "1", "completion": "2"}, "custom", "row 1 has neither loss_mask nor labels"),
        ({"input_ids": [1, 2]}, "custom", "row 1 has neither loss_mask nor labels"),
        ({"input_ids": [1, 2]}, "assistant_only", "row 1 has token ids without roles; set loss_on.kind to 'custom'"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "assistant_only", "row 1 has labels; set loss_on.kind to 'custom'"),
        ({"input_ids": [1, 99999], "labels": [1, 99999]}, "custom", "row 1: token id 99999 is none of the tokenizer's"),
    ],
)
def test_a_mask_and_what_is_asked_for_must_fit(tokenizer: Any, row: dict[str, Any], kind: str, message: str):
    with pytest.raises(ConfigError, match=message):
        tokenize(tokenizer, SftRow.model_validate(row), kind=kind)


REWRITING = CHATML.replace("{{ message.content }}<|im_end|>\n{% endgeneration %}", (
    "{% if not loop.last %}{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "<|im_end|>\n{% endgeneration %}"
))  # fmt: skip
"""Drops earlier turns' thoughts, as Qwen3's and others do: an earlier turn reads differently once it is the last."""
THOUGHTS = (("user", "2 1"), ("assistant", "<think>swap</think>1 2"), ("user", "4 3"), ("assistant", "3 4"))


def test_where_turns_are_rewritten_the_templates_own_marks_decide(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", REWRITING)
    [example], told = report(tokenizer, chat(*THOUGHTS))
    assert trained_parts(tokenizer, example) == [f"1 2{END}\n", f"3 4{END}\n"]
    assert told.template_problems == ("row 1: the chat template leaves out or rewrites turn 2, the assistant's",)
    bare = REWRITING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    monkeypatch.setattr(tokenizer, "chat_template", bare)
    [example], told = report(tokenizer, chat(*THOUGHTS))
    assert trained_parts(tokenizer, example) == [f"<think>swap</think>1 2{END}\n", f"3 4{END}\n"]
    assert len(example.lengths) == 2 and told.num_turn_by_turn == 1
    monkeypatch.setattr(tokenizer, "chat_template", REWRITING)
    mask = {"loss_mask": [False, True, False, False]}
    [example] = tokenize(tokenizer, SftRow.model_validate({**chat(*THOUGHTS).document(), **mask}), kind="custom")
    assert trained_parts(tokenizer, example) == [f"<think>swap</think>1 2{END}\n"]


# How turns are trained


def turns(tokenizer: Any, row: SftRow, turns: str | None, limit: int = 512) -> tuple[list[list[str]], DataReport]:
    """The trained parts of each sequence that a row becomes."""
    examples: list[Example] = []
    told = each_example(
        tokenizer, [row], examples.append, loss_on=LossOn(), max_seq_len=limit, turns=turns  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return [trained_parts(tokenizer, Example(*sequence)) for sequence in examples[0].sequences()], told


def test_turns_are_trained_together_each_or_only_the_last(tokenizer: Any):
    first, last = f"1 2{END}\n", f"3 4{END}\n"
    assert turns(tokenizer, chat(*TURNS), "all")[0] == turns(tokenizer, chat(*TURNS), None)[0] == [[first, last]]
    parts, told = turns(tokenizer, chat(*TURNS), "each")
    assert parts == [[first], [last]]
    # They lie in memory together.
    assert row_tokens(told, 512) == told.num_longest_by_turn == told.num_tokens > told.longest[0][1]
    parts, told = turns(tokenizer, chat(*TURNS), "last")
    assert parts == [[last]] and (told.num_examples, told.num_turn_by_turn) == (1, 1)


def test_all_turns_of_a_template_that_rewrites_them_are_refused_where_asked_for(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    bare = REWRITING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    monkeypatch.setattr(tokenizer, "chat_template", bare)
    with pytest.raises(ConfigError, match=r"row 1: .* leave out sequence.turns, or set it to 'each' or 'last'"):
        turns(tokenizer, chat(*THOUGHTS), "all")


def test_a_turn_of_weight_zero_is_not_trained(tokenizer: Any):
    row = chat(*TURNS).document()
    row["messages"][2]["weight"] = 0
    assert turns(tokenizer, SftRow.model_validate(row), None)[0] == [[f"3 4{END}\n"]]


def test_each_sequence_of_a_row_is_cut_and_those_that_nothing_is_left_of_are_dropped(tokenizer: Any):
    [first, _] = turns_of(tokenizer, chat(*TURNS))
    parts, told = turns(tokenizer, chat(*TURNS), "each", limit=len(first.token_ids))
    assert parts == [[f"1 2{END}\n"]] and (told.num_truncated, told.num_examples) == (1, 1)
    assert told.longest[0][1] > told.num_tokens == len(first.token_ids)


def turns_of(tokenizer: Any, row: SftRow) -> list[Example]:
    examples: list[Example] = []
    each_example(tokenizer, [row], examples.append, loss_on=LossOn(), max_seq_len=512, turns="each")
    return [Example(*sequence) for sequence in examples[0].sequences()]


def test_a_row_of_several_sequences_is_one_item_whose_turns_do_not_see_each_other(tokenizer: Any, tiny_model: Path):
    """The loss of the row is that of its sequences alone, weighed by their trained tokens."""
    import torch
    from updates import sft_settings

    from rollout_core.algorithms.policy import Policy
    from rollout_core.algorithms.supervised import SFT
    from rollout_core.models.pretrained import load_causal_lm

    examples: list[Example] = []
    each_example(tokenizer, [chat(*TURNS)], examples.append, loss_on=LossOn(), max_seq_len=512, turns="each")
    plain = load_causal_lm(tiny_model)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    settings = sft_settings(minibatch_size=1, gradient_accumulation=1)
    learner = SFT(Policy(copy.deepcopy(plain)), examples, settings, seed=0, device=torch.device("cpu"))
    [batch] = learner.minibatches(0)
    assert learner.num_items == 1 and batch.num_rows == 2
    total, count = 0.0, 0
    for sequence in turns_of(tokenizer, chat(*TURNS)):
        ids = torch.tensor([sequence.token_ids])
        logprobs = plain(input_ids=ids).logits[0, :-1].log_softmax(-1)
        kept = torch.tensor(sequence.trained[1:])
        total -= logprobs.gather(1, ids[0, 1:, None])[:, 0][kept].sum().item()
        count += int(kept.sum())
    assert learner.loss(batch, [batch]).loss.item() == pytest.approx(total / count, rel=1e-5)


def test_a_row_of_which_no_turn_is_trained_is_one_sequence_however_turns_are_trained(tokenizer: Any):
    row = chat(*TURNS).document()
    for message in row["messages"]:
        message["weight"] = 0
    good, untrained = chat(*TURNS), SftRow.model_validate(row)
    for way in ("each", "last"):
        examples: list[Example] = []
        told = each_example(
            tokenizer, [good, untrained], examples.append, loss_on=LossOn(), max_seq_len=512, turns=way
        )  # fmt: skip
        assert (told.num_examples, told.num_left_out) == (1, 1)
        [whole] = tokenize(tokenizer, good, kind="full")
        each_example(tokenizer, [good], examples.append, loss_on=LossOn(kind="full"), max_seq_len=512, turns=way)
        assert examples[-1] == whole


def test_the_longest_sequence_of_a_table_is_no_sum_of_a_rows_sequences(tmp_path: Path):
    rows = [Example([1] * 9, [True] * 9, [4, 5]), Example([1] * 6, [True] * 6), Example([1] * 2, [True] * 2)]
    with ItemWriter(EXAMPLES, tmp_path) as writer:
        for row in rows:
            writer.append(row)
    table = ItemTable(EXAMPLES, tmp_path)
    assert list(table) == rows and longest_sequence(table) == 6


WORDY = (
    "Use null or None for what is missing.\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Speaks of nothing itself, and expects arguments as text and content always."""


def test_a_call_is_written_as_json_where_the_template_speaks_of_nothing_itself(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenizer, "chat_template", WORDY)
    call = {"name": "get", "arguments": {"city": "Paris", "unit": None}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "content": "got {'city': 'Paris', 'unit': None}"}
    row = SftRow.model_validate({"messages": [*turns, result, {"role": "assistant", "content": "b"}]})
    [example] = tokenize(tokenizer, row)
    written = 'get {"city": "Paris", "unit": null}'
    assert trained_parts(tokenizer, example) == [f"{written}{END}\n", f"b{END}\n"]
