"""Rows are read strictly, errors name file and line, and equal rows have equal bytes."""

from __future__ import annotations

import json
import pickle
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError, DataError
from rollout_core.config import JsonlDataset
from rollout_core.data.dataset_sources import read_dataset
from rollout_core.data.datasets import (
    MAX_VIOLATIONS,
    PairRow,
    PromptRow,
    Reading,
    SftRow,
    numbered_lines,
    parse_documents,
    parse_rows,
    to_jsonl,
)
from rollout_core.models.messages import ChatMessage
from tests.support.rows import iter_prompts, parse_pairs, parse_prompts, parse_sft, parse_unpaired, read_prompts

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def problem(data: bytes, parse=parse_prompts) -> str:
    """The one violation of ``data``, without the name it was parsed under."""
    with pytest.raises(DataError) as caught:
        parse(data, "in.jsonl")
    assert str(caught.value) == caught.value.violations[0] and len(caught.value.violations) == 1
    return str(caught.value).removeprefix("in.jsonl:")


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompt_rows_keep_id_and_other_keys_in_order():
    (row,) = parse_prompts(b'{"zeta": 1, "prompt": "hi", "answer": {"b": 1, "a": null}, "id": "7"}', "x")
    assert row == PromptRow(prompt="hi", id="7", extras={"zeta": 1, "answer": {"b": 1}})
    assert list(row.extras) == ["zeta", "answer"]


def test_prompt_rows_hold_a_text_or_messages():
    text, chat = parse_prompts(lines({"prompt": "hi"}, {"messages": CHAT[:1]}), "x")
    assert text.prompt == "hi" and text.messages is None
    assert chat.prompt is None and chat.messages == (ChatMessage(role="user", content="2 + 2?"),)


def test_null_counts_as_absent():
    (row,) = parse_prompts(lines({"prompt": None, "messages": CHAT[:1], "id": None}), "x")
    assert row.messages is not None and row.id is None and row.extras == {}
    turn = {"role": "user", "content": "a", "name": None}
    (row,) = parse_prompts(lines({"messages": [turn], "score": None, "deep": [{"a": None, "b": [None]}]}), "x")
    assert row == PromptRow(messages=(ChatMessage(role="user", content="a"),), extras={"deep": [{"b": [None]}]})
    assert parse_prompts(lines({"prompt": "a", "score": None}), "x") == [PromptRow(prompt="a")]


def test_an_integer_is_taken_as_the_text_of_an_id():
    rows = parse_prompts(lines({"prompt": "a", "id": 7}, {"messages": CHAT[:1], "id": 2**70}), "x")
    assert [row.id for row in rows] == ["7", str(2**70)]
    assert problem(b'{"prompt": "a", "id": true}') == "1: id: expected a string, got true"


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt" : "a", "prompt": "b"}',
        b'{"prompt"\t:"a","n":1,"prompt":"b"}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "x", "prompt": "y"}',
    ],
)
def test_a_key_that_stands_twice_is_refused_by_its_name(line: bytes):
    assert problem(line) == "1: key 'prompt' stands twice in one object; remove one"


def test_a_key_that_stands_twice_further_down_is_refused_too():
    assert problem(b'{"prompt": "a", "x": [{"y": 1, "y": 1}]}') == ("1: key 'y' stands twice in one object; remove one")
    assert parse_prompts(rb'{"prompt": "the \"prompt\": it", "a : b": 1}', "x")[0].extras == {"a : b": 1}


def test_a_number_that_json_cannot_hold_leaves_its_row_where_no_own_key_holds_it():
    reading = Reading()
    data = [b'{"prompt": "a", "score": 1.5}', b'{"prompt": "b", "score": NaN, "deep": [{"x": -Infinity}], "n": 1}']
    data += [b'{"prompt": "c", "score": 1e999}']
    found = list(parse_documents(numbered_lines("in.jsonl", data), PromptRow, reading))
    assert [row.extras for _, _, row in found] == [{"score": 1.5}, {"n": 1}, {}]
    assert reading.remarks() == (
        "key 'score' is left out of 2 rows, where it holds NaN or an infinite number; first at in.jsonl:2",
        "key 'deep' is left out of 1 rows, where it holds NaN or an infinite number; first at in.jsonl:2",
    )
    pair = b'{"chosen": "a", "rejected": "b", "margin": -Infinity}'
    assert problem(pair, parse_pairs) == (
        "1: margin: expected a finite number, got -inf; correct it or leave the key out"
    )


def test_blank_lines_are_skipped_but_counted():
    data = b'\n{"prompt": "a"}\r\n   \n\t\n'
    assert [row.prompt for row in parse_prompts(data, "x")] == ["a"]
    assert problem(data + b'{"prompt": }').startswith("5: not valid JSON")


def test_only_a_line_feed_ends_a_line():
    assert [row.prompt for row in parse_prompts('{"prompt": "a\u2028b\u0085c"}\n'.encode(), "x")] == ["a\u2028b\u0085c"]


def test_a_byte_order_mark_is_skipped():
    assert parse_prompts(b"\xef\xbb\xbf" + lines({"prompt": "a"}), "x")[0].prompt == "a"


def test_no_bytes_are_no_rows():
    assert parse_prompts(b"", "x") == [] and parse_sft(b"\n\n", "x") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "a"', "1: not valid JSON: Expecting ',' delimiter at column 15"),
        (b'{"prompt": "a"} {}', "1: not valid JSON: Extra data at column 17"),
        (b'{"prompt": "\xff"}', "1: not valid UTF-8 at byte 13"),
        (b'{"prompt": NaN}', "1: prompt: expected a finite number, got nan; correct it or leave the key out"),
        (b'["prompt"]', '1: expected a JSON object, got ["prompt"]'),
        (b"null", "1: expected a JSON object, got null"),
        (b'{"prompt": 5}', "1: prompt: expected a string, got 5"),
        (b'{"prompt": "a", "id": 7.5}', "1: id: expected a string, got 7.5"),
        (
            b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}',
            "1: has both prompt and messages; give one of them",
        ),
        (b'{"promt": "a"}', "1: needs prompt or messages; did you mean 'prompt' by 'promt'?"),
        (b'{"Messages": []}', "1: needs prompt or messages; did you mean 'messages' by 'Messages'?"),
        (b'{"question": "a", "n": 1}', "1: needs prompt or messages; other keys found: question, n"),
        (b"{}", "1: needs prompt or messages; other keys found: none"),
        (b'{"messages": []}', "1: messages: expected at least one message, got []"),
        (b'{"messages": "hi"}', '1: messages: expected a list of messages, got "hi"'),
        (b'{"messages": ["hi"]}', '1: messages.0: expected an object with role and content, got "hi"'),
        (b'{"messages": [{"role": "user"}]}', "1: messages.0.content: required, but not given"),
        (
            b'{"messages": [{"role": "asistant", "content": "a"}]}',
            "1: messages.0.role: expected 'system', 'developer', 'user', 'assistant' or 'tool', got \"asistant\"",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a", "nam": "b"}]}',
            "1: messages.0.nam: unknown key; did you mean 'name'?",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a", "score": 1}]}',
            "1: messages.0.score: unknown key; a message has role and content",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            "1: messages.0.content: a part of type 'image_url' cannot be read; expected text, or parts of type 'text', "
            'got [{"type": "image_url", "image_url": {"url": "x"}}]',
        ),
        (
            b'{"prompt": "a", "tools": [{"name": "f"}]}',
            "1: has tools but a text prompt, which shows none; give the prompt as messages",
        ),
    ],
)
def test_a_malformed_line_says_what_is_wrong(line: bytes, expected: str):
    assert problem(line) == expected


def test_a_misspelt_message_key_is_hinted_at():
    with pytest.raises(DataError) as caught:
        parse_prompts(b'{"messages": [{"role": "user", "contents": "a"}]}', "in.jsonl")
    assert caught.value.violations == (
        "in.jsonl:1: messages.0.content: required, but not given",
        "in.jsonl:1: messages.0.contents: unknown key; did you mean 'content'?",
    )


def test_deep_nesting_and_half_a_surrogate_pair_are_refused():
    assert problem(b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}") == "1: nested too deeply"
    assert "no canonical JSON form" in problem(rb'{"prompt": "\ud83d"}')
    assert parse_prompts(rb'{"prompt": "\ud83d\ude00"}', "x")[0].prompt == "\U0001f600"


def test_long_values_are_shortened_in_messages():
    assert len(problem(lines({"prompt": dict.fromkeys("abcdefgh" * 30, "x" * 300)}))) < 200


def test_all_problems_of_a_file_are_shown_together():
    good, bad = {"prompt": "a"}, {"promt": "a"}
    with pytest.raises(DataError) as caught:
        parse_prompts(lines(good, bad, good, 5), "in.jsonl")
    assert [line.split(" ")[0] for line in caught.value.violations] == ["in.jsonl:2:", "in.jsonl:4:"]
    assert str(caught.value).splitlines() == list(caught.value.violations)
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations  # noqa: S301


def test_at_most_twenty_problems_are_collected():
    rows = [{"prompt": "a", "tools": []}, *({chr(ord("b") + number): "a"} for number in range(24))]
    with pytest.raises(DataError) as caught:
        parse_prompts(lines(*rows), "in.jsonl")
    assert len(caught.value.violations) == MAX_VIOLATIONS
    assert str(caught.value).splitlines()[-1] == "stopped at 20 problems; there may be more"


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([b'{"promt": "a"}\n'] * 50, "needs prompt or messages; did you mean 'prompt' by 'promt'?"),
        ([b'{"prompt": "%s\xfc"}\n' % (b"a" * number) for number in range(50)], "not valid UTF-8 at byte 13"),
        ([b'{"prompt": %d}\n' % number for number in range(50)], "prompt: expected a string, got 0"),
    ],
)
def test_one_problem_of_many_rows_is_said_once(rows: list[bytes], first: str):
    with pytest.raises(DataError) as caught:
        parse_prompts(b"".join(rows), "in.jsonl")
    assert caught.value.violations == (f"in.jsonl:1: {first} (and 19 more like it, the last at in.jsonl:20)",)


def test_rows_built_in_code_are_checked_too():
    with pytest.raises(ValidationError, match="prompt would hide the row's own"):
        PromptRow(messages=(ChatMessage(role="user", content="a"),), extras={"prompt": "b"})
    with pytest.raises(ValidationError, match="frozen"):
        PromptRow(prompt="a").prompt = "b"


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_pattern_reads_its_files_sorted_by_path(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "[x].jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(lines({"prompt": name}))

    def read(pattern: str) -> list[str | None]:
        return [row.prompt for row in read_prompts(pattern, base=tmp_path)]

    assert read("*.jsonl") == ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert read("?.jsonl") == ["a.jsonl", "b.jsonl"]
    assert read("[x]*") == ["[x].jsonl"]
    assert read("**/?.jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert read("a.jsonl") == ["a.jsonl"]
    assert [row.prompt for row in read_prompts(tmp_path / "*.txt", base=Path("elsewhere"))] == ["notes.txt"]


def test_a_relative_path_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl").write_bytes(lines({"prompt": "a"}))
    monkeypatch.chdir(tmp_path)
    assert len(read_prompts("a.jsonl")) == len(read_prompts("*.jsonl")) == 1


def test_input_without_rows_is_an_error(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(ConfigError, match=r"no input rows matched '\*\.jsonl': 1 files without a row"):
        read_prompts("*.jsonl", base=tmp_path)
    with pytest.raises(ConfigError, match=r"no input rows matched 'x\*': no such file"):
        read_prompts("x*", base=tmp_path)
    with pytest.raises(ConfigError, match=r"no input rows matched 'x\.jsonl': no such file"):
        read_prompts("x.jsonl", base=tmp_path)
    with pytest.raises(ConfigError, match=r"dataset 'x\.jsonl' cannot be read: No such file"):
        list(read_dataset(JsonlDataset(path="x.jsonl"), SftRow, base=tmp_path))


def test_a_folder_or_an_unreadable_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is a folder; name a file, or a pattern such as .*\*\.jsonl"):
        read_prompts(tmp_path)
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"dangling\.jsonl: not readable: No such file"):
        read_prompts("*.jsonl", base=tmp_path)


def test_rows_stream_up_to_the_first_problem_and_then_all_problems_are_raised(tmp_path: Path):
    (tmp_path / "1.jsonl").write_bytes(lines({"prompt": "a"}, {"prompt": "b"}, 5, {"prompt": "c"}))
    (tmp_path / "2.jsonl").write_bytes(lines({"prompt": "d"}, {"promt": "e"}, 6))
    rows = iter_prompts("*.jsonl", base=tmp_path)
    assert [next(rows).prompt, next(rows).prompt] == ["a", "b"]
    with pytest.raises(DataError) as caught:
        next(rows)
    first, other = caught.value.violations
    assert first.startswith(f"{tmp_path}/1.jsonl:3: expected a JSON object, got 5 (and 1 more like it, the last at ")
    assert first.endswith("/2.jsonl:3)") and other.startswith(f"{tmp_path}/2.jsonl:2: needs prompt")


# -- demonstrations ----------------------------------------------------------------------------------------------------


def test_demonstrations_are_pairs_or_conversations(tmp_path: Path):
    (tmp_path / "sft.jsonl").write_bytes(lines({"prompt": "a", "completion": "b", "source": "web"}, {"messages": CHAT}))
    pair, chat = read_dataset(JsonlDataset(path="sft.jsonl"), SftRow, base=tmp_path)
    assert (pair.prompt, pair.completion, pair.messages, pair.extras) == ("a", "b", None, {"source": "web"})
    assert chat.messages is not None and [message.role for message in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, "1: has prompt but no completion; other keys found: none"),
        (
            {"prompt": "a", "completions": "b"},
            "1: has prompt but no completion; did you mean 'completion' by 'completions'?",
        ),
        ({"completion": "a", "pormpt": "b"}, "1: has completion but no prompt; did you mean 'prompt' by 'pormpt'?"),
        ({"text": "a"}, "1: needs prompt and completion, or messages; other keys found: text"),
        ({"prompt": "a", "completion": ""}, "1: completion is empty; there is nothing to train"),
        ({"prompt": "a", "messages": CHAT}, "1: has both messages and prompt or completion; give one form"),
        ({"messages": CHAT[:1]}, "1: the last message is the user's; a demonstration ends with the assistant's"),
        (
            {"messages": [{"role": "assistant", "content": ""}, *CHAT]},
            "1: an assistant message is empty; there is nothing to train",
        ),
    ],
)
def test_a_malformed_demonstration_says_what_is_wrong(row: dict[str, Any], expected: str):
    assert problem(lines(row), parse_sft) == expected


# -- canonical bytes ---------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=8)
json_values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
extras = st.dictionaries(st.text(string.ascii_letters + "_ é", min_size=3, max_size=6), json_values, max_size=3)
messages = st.lists(
    st.builds(ChatMessage, role=st.sampled_from(["system", "user", "tool"]), content=texts), min_size=1, max_size=3
).map(tuple)
answer = st.builds(ChatMessage, role=st.just("assistant"), content=st.text(string.printable, min_size=1, max_size=5))


def harmless(found: dict[str, Any]) -> dict[str, Any]:
    own = {"prompt", "messages", "completion", "id", "tools"}
    return {key: value for key, value in found.items() if key not in own}


prompt_rows = st.builds(PromptRow, prompt=texts, id=st.none() | texts, extras=extras.map(harmless)) | st.builds(
    PromptRow, messages=messages, extras=extras.map(harmless)
)
sft_rows = st.builds(
    SftRow, prompt=texts, completion=st.text(string.printable, min_size=1), extras=extras.map(harmless)
) | st.builds(SftRow, messages=st.builds(lambda turns, last: (*turns, last), messages, answer))


@settings(max_examples=100, deadline=None)
@given(st.lists(prompt_rows, max_size=4))
def test_prompt_rows_survive_their_canonical_bytes(rows: list[PromptRow]):
    data = to_jsonl(rows)
    assert parse_prompts(data, "x") == rows
    assert to_jsonl(parse_prompts(data, "x")) == data
    assert data.count(b"\n") == len(rows)


@settings(max_examples=50, deadline=None)
@given(st.lists(sft_rows, max_size=4))
def test_demonstrations_survive_their_canonical_bytes(rows: list[SftRow]):
    data = to_jsonl(rows)
    assert parse_sft(data, "x") == rows
    assert to_jsonl(parse_sft(data, "x")) == data


@settings(max_examples=50, deadline=None)
@given(prompt_rows, st.randoms(use_true_random=False))
def test_canonical_bytes_ignore_key_order_and_spacing(row: PromptRow, shuffler: Any):
    items = list(json.loads(to_jsonl([row])).items())
    shuffler.shuffle(items)
    respaced = json.dumps(dict(items), separators=(" , ", " : ")).encode()
    assert to_jsonl(parse_prompts(b"\n" + respaced + b"\r\n\n", "x")) == to_jsonl([row])


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(lambda text: ('{"prompt": "a", ' + text).encode(errors="surrogatepass"))
)
def test_no_bytes_raise_anything_but_a_data_error(data: bytes):
    for parse in (parse_prompts, parse_sft):
        try:
            parse(data, "x")
        except DataError as error:
            assert str(error).startswith("x:")


def test_canonical_bytes_of_an_example_are_pinned():
    """Changing these bytes changes the content id of every data set."""
    rows = [
        PromptRow(prompt="hé", id="1", extras={"b": 1.0, "a": None}),
        PromptRow(messages=(ChatMessage(role="user", content="x"),)),
        SftRow(prompt="p", completion="c"),
    ]
    assert to_jsonl(rows).decode() == (
        '{"a":null,"b":1.0,"id":"1","prompt":"hé"}\n'
        '{"messages":[{"content":"x","role":"user"}]}\n'
        '{"completion":"c","prompt":"p"}\n'
    )


def test_extras_that_are_not_json_have_no_canonical_bytes():
    with pytest.raises(ConfigError, match="no canonical JSON form"):
        to_jsonl([PromptRow(prompt="a", extras={"x": float("nan")})])


# -- rows with a mask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"labels": [1]}, "has labels but no input_ids"),
        ({"input_ids": [1, 2], "prompt": "x"}, "has both input_ids and prompt, completion or messages"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [1, 1]}, "has both labels and loss_mask"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels.0 is 2; expected 1, as in input_ids, or -100"),
        ({"input_ids": [1, -2]}, "input_ids.1: Input should be greater than or equal to 0, got -2"),
        ({"input_ids": "1 2"}, 'input_ids: expected a list of numbers, got "1 2"'),
        ({"messages": CHAT, "loss_mask": [1]}, "loss_mask has 1 entries for 2 messages"),
        ({"prompt": "a", "completion": "b", "loss_mask": [1, 1]}, "has loss_mask but neither messages nor input_ids"),
    ],
)
def test_a_mask_that_fits_no_row_is_refused(row: dict[str, Any], expected: str):
    assert problem(lines(row), parse_sft).startswith(f"1: {expected}")


def test_rows_of_token_ids_have_a_canonical_form():
    (row,) = parse_sft(lines({"input_ids": [1, 2], "loss_mask": [0, True], "source": "x"}), "x")
    assert row == SftRow(input_ids=(1, 2), loss_mask=(False, True), extras={"source": "x"})
    assert to_jsonl([row]) == b'{"input_ids":[1,2],"loss_mask":[false,true],"source":"x"}\n'


# -- forms that people have --------------------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"a": None, "b": "é"}}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "form",
    [
        {"tool_calls": [{**CALL, "function": {"name": "get", "arguments": '{"b": "\\u00e9", "a": null}'}}]},
        {"tool_calls": [{"id": "1", "name": "get", "arguments": {"a": None, "b": "é"}, "index": 0}]},
        {"content": None, "tool_calls": [CALL], "name": None, "tool_call_id": None, "reasoning_content": ""},
    ],
)
def test_a_call_of_a_tool_is_one_row_in_each_form(form: dict[str, Any]):
    def row(call: dict[str, Any], tools: Any, content: Any) -> bytes:
        turns = [{"role": "user", "content": content}, {"role": "assistant", **call}]
        result = {"role": "tool", "tool_call_id": "1", "content": "3", "tool_calls": []}
        row = {"messages": [*turns, result, {"role": "assistant", "content": "three"}], "tools": tools}
        return to_jsonl(parse_sft(lines(row), "x"))

    plain = row({"tool_calls": [CALL]}, [TOOL], "hi")
    assert row(form, json.dumps([TOOL]), [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]) == plain
    [read] = parse_sft(plain, "x")
    assert to_jsonl([read]) == plain, "what is stored reads as what was read"
    assert json.loads(plain)["tools"] == [TOOL]
    assert read.messages[1].plain() == {"role": "assistant", "content": None, "tool_calls": [CALL]}  # pyright: ignore[reportOptionalSubscript]


def test_names_of_thoughts_are_one():
    rows = [
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "1 2", key: "swap"}]}
        for key in ("reasoning_content", "thinking", "reasoning")
    ]
    assert len({to_jsonl(parse_sft(lines(row), "x")) for row in rows}) == 1


def test_a_prompt_and_a_completion_of_messages_are_a_conversation_of_which_the_completion_is_trained():
    earlier = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    for completion in ("d", [{"role": "assistant", "content": "d"}]):
        [row] = parse_sft(lines({"prompt": earlier, "completion": completion}), "x")
        assert [(turn.content, turn.weight) for turn in row.messages or ()] == [
            ("a", None), ("b", 0), ("c", None), ("d", None)
        ]  # fmt: skip
    both = {"prompt": earlier, "completion": "d", "messages": CHAT}
    assert problem(lines(both), parse_sft) == "1: has both messages and prompt or completion; give one form"
    [asked] = parse_prompts(lines({"prompt": earlier, "answer": 1}), "x")
    assert [turn.content for turn in asked.messages or ()] == ["a", "b", "c"] and asked.extras == {"answer": 1}
    assert problem(lines({"prompt": earlier, "completion": []}), parse_sft) == "1: has prompt but no completion"


def test_a_text_prompt_that_both_conversations_begin_with_is_theirs():
    chosen, rejected = ([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in "bc")
    [row] = parse_rows(lines({"prompt": "a", "chosen": chosen, "rejected": rejected}), "x", PairRow)
    assert row.prompt is None
    [same] = parse_rows(lines({"chosen": chosen, "rejected": rejected}), "x", PairRow)
    assert to_jsonl([row]) == to_jsonl([same])
    with pytest.raises(DataError, match="prompt is a text, but chosen is a list of messages"):
        parse_rows(lines({"prompt": "other", "chosen": chosen, "rejected": rejected}), "x", PairRow)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only the assistant calls tools, not the user"),
        ({"role": "assistant", "content": None}, "1: messages.0.content: required, but not given"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "1: messages.0.tool_calls.0.function.arguments: not the JSON text of an object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]},
            "not the JSON text of an object: NaN is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]},
            "1: messages.0.tool_calls.0.function.arguments: not the JSON text of an object",
        ),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "tool_calls.0.function: required, but not given"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(message: dict[str, Any], expected: str):
    assert expected in problem(lines({"messages": [message]}), parse_sft)


# -- rows of others' making --------------------------------------------------------------------------------------------


def test_alpacas_input_is_joined_to_its_instruction():
    rows = [
        {"instruction": "Add.", "input": "2 2", "output": "4", "id": 1},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "output": "ho"},
    ]
    assert parse_sft(lines(*rows), "x") == [
        SftRow(prompt="Add.\n\n2 2", completion="4", extras={"id": 1}),
        SftRow(prompt="Say hi.", completion="hi"),
        SftRow(prompt="Say ho.", completion="ho"),
    ]
    assert parse_prompts(lines(rows[0]), "x") == [PromptRow(prompt="Add.\n\n2 2", id="1", extras={"output": "4"})]
    (pair,) = parse_pairs(lines({"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"}), "x")
    assert (pair.prompt, pair.chosen, pair.rejected) == ("a\n\nb", "c", "d")
    (judged,) = parse_unpaired(lines({"instruction": "a", "output": "c", "label": True}), "x")
    assert (judged.prompt, judged.completion) == ("a", "c")


def test_sharegpts_conversations_are_messages():
    turns = [
        {"from": "human", "value": "2 + 2?"},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4", "weight": None},
    ]
    (row,) = parse_sft(lines({"id": "1", "system": "Be brief.", "conversations": turns}), "x")
    assert row.messages is not None and row.extras == {"id": "1"}
    assert [(message.role, message.content) for message in row.messages] == [
        ("system", "Be brief."),
        ("user", "2 + 2?"),
        ("tool", "4"),
        ("assistant", "4"),
    ]
    (row,) = parse_sft(lines({"conversations": CHAT}), "x")
    assert row == parse_sft(lines({"messages": CHAT}), "x")[0], "some write role and content there"
    answers = {"chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}}
    assert parse_pairs(lines({"conversations": turns[:1], **answers}), "x") == parse_pairs(
        lines(
            {
                "prompt": CHAT[:1],
                "chosen": [{"role": "assistant", "content": "4"}],
                "rejected": [{"role": "assistant", "content": "5"}],
            }
        ),
        "x",
    )


def test_a_call_in_sharegpts_form_is_a_tool_call_of_the_assistant():
    calls = [{"name": "add", "arguments": {"a": 2, "b": 2}}, {"name": "stop", "arguments": "{}"}]
    for value in (json.dumps(calls), calls):
        (row,) = parse_sft(lines({"conversations": [{"from": "function_call", "value": value}]}), "x")
        assert row.messages is not None
        assert row.messages[0].document() == {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}},
                {"type": "function", "function": {"name": "stop", "arguments": {}}},
            ],
        }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": 1, "output": "a"}, "instruction: expected a string, as in Alpaca's rows, got 1"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "history: no part of a prompt and its completion; give such rows as messages",
        ),
        (
            {"conversations": [{"from": "me", "value": "a"}]},
            "conversations.0.from: expected one of human, user, gpt, assistant, chatgpt, bard, bing, model, system, "
            'tool, observation, function_response, function_call, got "me"',
        ),
        ({"conversations": ["a"]}, 'conversations.0: expected an object with from and value, got "a"'),
        (
            {"conversations": [{"from": "function_call", "value": "add(2)"}]},
            'conversations.0.value: expected a call as JSON, with name and arguments, got "add(2)"',
        ),
        ({"conversations": "a"}, 'conversations: expected a list of objects with from and value, got "a"'),
    ],
)
def test_a_row_that_is_nearly_of_anothers_form_says_what_is_wrong(row: dict[str, Any], expected: str):
    assert problem(lines(row), parse_sft) == f"1: {expected}"


def test_a_row_of_ours_stays_as_it_is():
    row = {"prompt": "a", "completion": "b", "instruction": "c", "output": "d", "conversations": []}
    assert parse_sft(lines(row), "x")[0].extras == {"instruction": "c", "output": "d", "conversations": []}
