"""Preference rows: read strictly, tokenised apart from their prompts, cut at the right, counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError, DataError
from rollout_core.data.datasets import PairRow, UnpairedRow, to_jsonl
from rollout_core.data.preference_data import Pair, UnpairedPreference
from rollout_core.models.pretrained import load_tokenizer
from tests.support.rows import parse_pairs, parse_unpaired, tokenize_pairs, tokenize_unpaired

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture
def chat(tokenizer) -> Any:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def pairs(*rows: dict) -> list[PairRow]:
    return parse_pairs(b"".join(json.dumps(row).encode() + b"\n" for row in rows), "pairs.jsonl")


def judged(*rows: dict) -> list[UnpairedRow]:
    return parse_unpaired(b"".join(json.dumps(row).encode() + b"\n" for row in rows), "judged.jsonl")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "needs chosen and rejected, but has no rejected; other keys found: none"),
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, "did you mean 'rejected' by 'rejcted'?"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 5}, "expected a string, got 5"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin: "),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]}, "prompt is a text, but chosen"),
        ({"chosen": "b", "rejected": [user("a"), assistant("c")]}, "one of chosen and rejected is a text"),
        ({"prompt": [user("a")], "chosen": [user("b")], "rejected": "c"}, "chosen must end with an assistant's"),
        ({"prompt": [user("a")], "chosen": [assistant("")], "rejected": "c"}, "message that is not empty"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, "expected at least one message"),
    ],
)
def test_a_malformed_pair_is_named_by_its_line(row, reason):
    with pytest.raises(DataError) as caught:
        pairs({"prompt": "x", "chosen": "y", "rejected": "z"}, row)
    assert str(caught.value).startswith("pairs.jsonl:2: ") and reason in str(caught.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "needs prompt, completion and label, but has no label"),
        ({"completion": "b", "label": True}, "has no prompt"),
        ({"prompt": "a", "completion": "", "label": True}, "completion is empty"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label: "),
    ],
)
def test_a_malformed_judged_answer_is_named_by_its_line(row, reason):
    with pytest.raises(DataError) as caught:
        judged(row)
    assert str(caught.value).startswith("judged.jsonl:1: ") and reason in str(caught.value)


def test_rows_survive_their_canonical_bytes():
    rows = pairs(
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5, "source": "x"},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        {"chosen": "b", "rejected": "c"},
    )
    assert parse_pairs(to_jsonl(rows), "again") == rows
    items = judged({"prompt": [user("a")], "completion": "b", "label": False})
    assert parse_unpaired(to_jsonl(items), "again") == items


def test_texts_are_tokenised_apart_and_answers_end_with_eos(tokenizer):
    rows = pairs({"prompt": "sort 2 1 =", "chosen": " 1 2", "rejected": " 2 1", "margin": 0.5})
    [pair], report = tokenize_pairs(tokenizer, rows, max_seq_len=64, need_prompts=True)
    prompt, chosen, rejected = (tokenizer(text)["input_ids"] for text in ("sort 2 1 =", " 1 2", " 2 1"))
    eos = tokenizer.eos_token_id
    assert pair == Pair(prompt, [*chosen, eos], [*rejected, eos], 0.5)
    assert report.num_tokens == len(prompt) + len(chosen) + len(rejected) + 2
    assert (report.num_prompt_tokens, report.num_truncated, report.num_left_out) == (len(prompt), 0, 0)
    [item], _ = tokenize_unpaired_with_other(tokenizer, {"prompt": "sort 2 1 =", "completion": " 1 2", "label": True})
    assert item == UnpairedPreference(prompt, [*chosen, eos], True)


def test_an_answer_that_ends_with_eos_gets_no_second_one(tokenizer):
    eos = tokenizer.eos_token
    row = {"prompt": "1 =", "chosen": f" 1{eos}", "rejected": f" 2{eos}{eos}"}
    [pair], _ = tokenize_pairs(tokenizer, pairs(row), max_seq_len=64, need_prompts=True)
    one, two = (tokenizer(text)["input_ids"] for text in (" 1", " 2"))
    assert (pair.chosen, pair.rejected) == ([*one, tokenizer.eos_token_id], [*two, *2 * [tokenizer.eos_token_id]])
    [item], _ = tokenize_unpaired_with_other(tokenizer, {"prompt": "1 =", "completion": f" 1{eos}", "label": True})
    assert item.completion == pair.chosen
    with pytest.raises(ConfigError, match="give the same tokens"):
        row = {"prompt": "1 =", "chosen": " 1", "rejected": f" 1{eos}"}
        tokenize_pairs(tokenizer, pairs(row), max_seq_len=64, need_prompts=True)


def tokenize_unpaired_with_other(tokenizer, row: dict, max_seq_len: int = 64):
    """KTO needs both kinds; the second row is the other one."""
    other = {"prompt": "x", "completion": "y", "label": not row["label"]}
    items, report = tokenize_unpaired(tokenizer, judged(row, other), max_seq_len=max_seq_len)
    return items[:1], report


def test_conversations_are_what_the_template_adds(chat):
    forms = (
        {"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"prompt": [user("hi")], "chosen": "yes", "rejected": "no"},
        {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
    )
    found = [tokenize_pairs(chat, pairs(row), max_seq_len=99, need_prompts=True)[0][0] for row in forms]
    assert found[0] == found[1] == found[2]
    assert chat.decode(found[0].prompt) == "[user] hi<|endoftext|>\n[assistant] "
    assert chat.decode(found[0].chosen) == "yes<|endoftext|>\n"
    [item], _ = tokenize_unpaired_with_other_chat(chat)
    assert item.completion == found[0].chosen


def tokenize_unpaired_with_other_chat(chat):
    rows = judged(
        {"prompt": [user("hi")], "completion": "yes", "label": True},
        {"prompt": [user("hi")], "completion": [assistant("no")], "label": False},
    )
    items, report = tokenize_unpaired(chat, rows, max_seq_len=99)
    return items[:1], report


def test_answers_that_begin_alike_share_their_turns_only(chat):
    row = {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
           "rejected": [user("a"), assistant("b"), user("c"), assistant("e")]}  # fmt: skip
    [pair], _ = tokenize_pairs(chat, pairs(row), max_seq_len=99, need_prompts=True)
    assert chat.decode(pair.chosen) == "d<|endoftext|>\n" and "[user] c" in chat.decode(pair.prompt)


def test_answers_in_which_others_speak_are_counted_and_named(chat):
    plain = {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}
    shared = {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("e")]}
    _, report = tokenize_pairs(chat, pairs(plain, shared), max_seq_len=99, need_prompts=True)
    assert (
        report.figures()["rows whose answers hold turns of others, which count as the answer"] == "1, row 2 the first"
    )
    assert report.document()["num_shared_answers"] == 1
    _, report = tokenize_pairs(chat, pairs(plain), max_seq_len=99, need_prompts=True)
    assert not any("of others" in name for name in report.figures())
    assert not {"num_shared_answers", "first_shared_answer"} & report.document().keys()
    rows = judged(
        {"prompt": [user("a")], "completion": [assistant("b"), user("c"), assistant("d")], "label": True},
        {"prompt": [user("a")], "completion": [assistant("b")], "label": False},
    )
    assert tokenize_unpaired(chat, rows, max_seq_len=99)[1].num_shared_answers == 1


def test_whole_sequences_have_no_prompt_and_train_reward_models_only(tokenizer):
    rows = pairs({"chosen": "sort 1 = 1", "rejected": "sort 1 = 2"})
    [pair], _ = tokenize_pairs(tokenizer, rows, max_seq_len=64, need_prompts=False)
    assert pair.prompt == [] and pair.chosen[-1] == tokenizer.eos_token_id
    with pytest.raises(ConfigError, match="row 1 has no prompt; only a reward model"):
        tokenize_pairs(tokenizer, rows, max_seq_len=64, need_prompts=True)
    empty = pairs({"prompt": "", "chosen": "a", "rejected": "b"})
    with pytest.raises(ConfigError, match="row 1 has no prompt tokens"):
        tokenize_pairs(tokenizer, empty, max_seq_len=64, need_prompts=True)


def test_rows_are_cut_at_the_right_and_those_without_a_difference_left_are_left_out(tokenizer):
    rows = pairs(
        {"prompt": "sort 1 2 =", "chosen": " 1 2", "rejected": " 2 1"},
        {"prompt": "sort 1 2 =", "chosen": " 1 2 3", "rejected": " 1 2 4"},
        {"prompt": "sort 1 2 3 4 5 6 7 8 =", "chosen": " 1", "rejected": " 2"},
    )
    prompt = len(tokenizer("sort 1 2 =")["input_ids"])
    [pair], report = tokenize_pairs(tokenizer, rows, max_seq_len=prompt + 3, need_prompts=True)
    assert len(pair.chosen) == len(pair.rejected) == 3
    assert (report.num_rows, report.num_examples, report.num_left_out, report.num_truncated) == (3, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"none of 3 rows has an answer to judge within sequence\.max_length 2"):
        tokenize_pairs(tokenizer, rows, max_seq_len=2, need_prompts=True)


def test_kto_needs_both_kinds_and_counts_them(tokenizer):
    good = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(ConfigError, match="all 2 rows have label true; KTO needs desirable and undesirable ones"):
        tokenize_unpaired(tokenizer, judged(good, good), max_seq_len=64)
    _, report = tokenize_unpaired(tokenizer, judged(good, good, {**good, "label": False}), max_seq_len=64)
    assert (report.num_desirable, report.num_undesirable) == (2, 1)


def test_messages_without_a_template_and_templates_that_rewrite_prompts_are_refused(tokenizer, chat):
    rows = pairs({"prompt": [user("a")], "chosen": "b", "rejected": "c"})
    chat.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="row 1: the chat template renders the prompt differently"):
        tokenize_pairs(chat, rows, max_seq_len=64, need_prompts=True)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="row 1 holds chat messages, but the tokenizer has no chat template"):
        tokenize_pairs(tokenizer, rows, max_seq_len=64, need_prompts=True)
