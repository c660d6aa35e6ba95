"""Templates, tokenizers, configurations and weights that were made to hang or to eat memory: one line, in bounded time,
and of batch inference only the samples that are touched."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from rollout_core.base import stopping
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import hash_bytes
from rollout_core.base.isolation import child as isolation_child
from rollout_core.base.isolation.child import KeptChild
from rollout_core.base.processes import Limits
from rollout_core.config import ModelSource, SamplingParams, TransformersBackend
from rollout_core.data.datasets import PromptRow
from rollout_core.data.text import tokenize_prompts, try_prompts
from rollout_core.inference.backend import ModelRef, Request
from rollout_core.inference.hf import TransformersEngine
from rollout_core.models.bounded import inspecting, tokenizing
from rollout_core.models.bounded.tokenizing import Chat, Problem, encode, how_prompts_vary, render
from rollout_core.models.messages import ChatMessage
from rollout_core.models.pretrained import load_tokenizer
from rollout_core.plans.plan import check_model
from rollout_core.store.sql.by_url import is_postgres

CHILDREN = {tokenizing: "texts", inspecting: "inspection"}
FORTY_DOUBLINGS = [{"type": "Replace", "pattern": {"String": " "}, "content": "  "}] * 40


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def small_child() -> Iterator[KeptChild]:
    child = KeptChild("rollout_core.models.bounded.texts:handle", replace(tokenizing.LIMITS, memory_bytes=600 * 2**20))
    yield child
    child.close()


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child starts in time."""
    children = {
        place: KeptChild(f"rollout_core.models.bounded.{name}:handle", Limits()) for place, name in CHILDREN.items()
    }
    for place, child in children.items():
        monkeypatch.setattr(place, "_child", child)
    monkeypatch.setattr(isolation_child, "START_SECONDS", 0.0)
    yield
    for child in children.values():
        child.close()


@pytest.fixture
def quick_limits(small_child: KeptChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that tests need not wait for it."""
    monkeypatch.setattr(tokenizing, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(tokenizing, "_child", small_child)


def chats(*contents: str) -> list[Chat]:
    return [Chat([ChatMessage(role="user", content=content)], generation_prompt=True) for content in contents]


def on_bad(what: str) -> str:
    """A template that does something for one message alone."""
    return "{% if messages[0].content == 'bad' %}" + what + "{% endif %}<{{ messages[0].content }}>"


# Templates


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("{{ 1/0 }}", "refuses these messages: ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without end"),
        ("{% set n = range(9999) %}{% for a in n %}{% for b in n %}{% endfor %}{% endfor %}", "more than 0.3 s"),
        ("{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n else '' }}{% endmacro %}{{ f(60) }}", "more than 0.3 s"),
        ("{% set x = (10**10)**(10**8) %}", "more than 0.3 s"),
        ("{% set s = namespace(x='aa') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}", "takes more"),
        ("{{ 'a'.center(10**12) }}", "more memory than it may have"),
        ("{{ 'a'.center(2 * 10**7) }}", "makes 20000005 characters"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)  # fmt: skip
def test_a_template_fails_the_sample_it_hangs_or_breaks_for_and_no_other(tokenizer, quick_limits, what, reason):
    tokenizer.chat_template = on_bad(what)
    before, bad, after = render(tokenizer, chats("one", "bad", "two"))
    assert (before, after) == ("<one>", "<two>")
    assert isinstance(bad, Problem) and reason in bad.reason and "\n" not in bad.reason


def test_a_template_that_hangs_for_every_message_is_given_up(tokenizer, quick_limits):
    tokenizer.chat_template = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"takes more than 0\.3 s for these messages, as did 2 earlier rows; choose"):
        render(tokenizer, chats(*"abcdefgh"))


def test_the_prompts_of_a_batch_keep_their_places_beside_those_that_fail(tokenizer):
    tokenizer.chat_template = on_bad("{{ 1/0 }}")
    talk = {word: (ChatMessage(role="user", content=word),) for word in ("good", "bad")}
    rows = [
        PromptRow(prompt="sort 1 ="),
        PromptRow(messages=talk["bad"]),
        PromptRow(prompt="sort 1 =\ud800"),
        PromptRow(messages=talk["good"]),
        PromptRow(prompt=""),
    ]
    token_ids, problems = try_prompts(tokenizer, rows)
    assert token_ids == [tokenizer("sort 1 =")["input_ids"], [], [], tokenizer("<good>")["input_ids"], []]
    assert list(problems) == [1, 2, 4]
    assert problems[4] == "has no tokens; give at least one character"
    with pytest.raises(ConfigError, match=r"^prompt 1: the chat template refuses these messages: ZeroDivisionError"):
        tokenize_prompts(tokenizer, rows[1:])


REAL = """{{- bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- elif message.role == 'tool' %}{{ message | tojson(indent=2) }}{% else %}
{% generation %}{{ message.content }}{% endgeneration %}{% endif %}{% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_what_is_rendered_and_tokenised_is_what_transformers_makes_of_it(tokenizer):
    tokenizer.bos_token, tokenizer.chat_template = "<pad>", REAL
    turns = [
        ChatMessage(role=role, content=f" {role} ä\u2028💡\\ {{{{ 1 }}}} ") for role in ("user", "tool", "assistant")
    ]
    some = [Chat((turns * 3)[:count], generation_prompt=prompt) for count in range(1, 8) for prompt in (True, False)]
    expected = [
        tokenizer.apply_chat_template(chat.plain(), add_generation_prompt=chat.generation_prompt, tokenize=False)
        for chat in some
    ]
    assert render(tokenizer, some) == expected
    for special_tokens in (True, False):
        theirs = tokenizer(expected, add_special_tokens=special_tokens)["input_ids"]
        assert encode(tokenizer, expected, special_tokens=special_tokens) == theirs
    marks = tokenizer.apply_chat_template(some[5].plain(), return_dict=True, return_assistant_tokens_mask=True)
    ids, marked = tokenizing.marked_tokens(tokenizer, some[5])
    assert (ids, marked) == (marks["input_ids"], [bool(mark) for mark in marks["assistant_masks"]]) and any(marked)


def test_a_child_that_forgets_the_tokenizer_between_two_requests_is_asked_all_the_same(tokenizer, monkeypatch):
    """Another thread's row may end the child, or another tokenizer take the place of this one, at any time."""
    tokenizer.chat_template = REAL
    child = KeptChild("rollout_core.models.bounded.texts:handle", tokenizing.LIMITS)

    class Forgetful:
        def call(self, request: Any) -> Any:
            answer = child.call(request)
            child.close()
            return answer

    monkeypatch.setattr(tokenizing, "_child", Forgetful())
    expected = tokenizer(["sort 1 ="])["input_ids"]
    assert encode(tokenizer, ["sort 1 ="], special_tokens=True) == expected
    turns = [ChatMessage(role=role, content=role) for role in ("user", "assistant")]
    assert any(tokenizing.marked_tokens(tokenizer, Chat(turns))[1])


def test_a_template_that_draws_draws_the_same_again_and_its_plan_says_so(tokenizer):
    tokenizer.chat_template = "{{ range(1000000) | random }}"
    first, second = (render(tokenizer, chats("a", "b")) for _ in range(2))
    assert first == second and first[0] == first[1]
    assert "draws at random" in (how_prompts_vary(tokenizer.chat_template) or "")
    assert "asks for the date" in (how_prompts_vary("{{ strftime_now('%Y') }}") or "")
    assert how_prompts_vary(REAL) is None


def test_a_busy_machine_is_nobodys_fault_and_worth_another_try(model, tokenizer, busy_machine):
    """Neither a row's, whose failure would be kept, nor the model's."""
    tokenizer.chat_template = on_bad("{{ 1/0 }}")
    for ask in (
        lambda: render(tokenizer, chats("one", "two")),
        lambda: encode(tokenizer, ["sort 1 ="], special_tokens=True),
        lambda: inspecting.inspect_bounded(model, has_weights=True),
    ):
        with pytest.raises(Recoverable, match="took longer than 0 s to start"):
            ask()


# Tokenizers


def test_a_normalizer_that_doubles_spaces_without_end_fails_its_sample(model, quick_limits):
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": FORTY_DOUBLINGS}
    (model / "tokenizer.json").write_text(json.dumps(content))
    good, bad, last = encode(load_tokenizer(model), ["sort1=", "sort 1 =", "1"], special_tokens=True)
    assert good and last and not isinstance(good, Problem)
    assert isinstance(bad, Problem) and bad.reason.startswith("the tokenizer ")


def test_a_decoder_that_makes_a_book_of_every_token_is_refused(model):
    content = json.loads((model / "tokenizer.json").read_text())
    longer = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 50_000}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], longer]}
    (model / "tokenizer.json").write_text(json.dumps(content))
    Tokenizer.from_file(str(model / "tokenizer.json"))
    assert "characters of its 262 tokens" in refusal(model)


# Configurations


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stop_while_the_child_gets_ready_prints_nothing(monkeypatch, capfd):
    child = KeptChild("rollout_core.models.bounded.inspecting:handle", inspecting.LIMITS)
    monkeypatch.setattr(inspecting, "_child", child)
    before = set(threading.enumerate())
    with stopping.watching(ends_process=False):
        stopping.request_stop()
        inspecting.prepare()
        for thread in set(threading.enumerate()) - before:
            if thread.name != "rollout-signals" and not isinstance(thread, threading.Timer):
                thread.join(120)
    child.close()
    assert capfd.readouterr().err == ""


def refusal(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(ModelSource(uri=str(model)), Path())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": -1, "layer_types": None},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": 10**9, "layer_types": None},
        {"num_hidden_layers": True, "layer_types": None},
        {"hidden_size": 0},
        {"hidden_size": 10**12},
        {"hidden_size": None},
        {"hidden_act": "no-such"},
        {"hidden_act": ["silu"]},
        {"vocab_size": 10**15},
        {"vocab_size": "262"},
        {"rope_parameters": {"rope_type": "no-such"}},
        {"rope_parameters": 3},
        {"architectures": 3},
        {"architectures": [3]},
        {"model_type": ["qwen2"]},
        {"text_config": 5},
        {"quantization_config": {"quant_method": "gptq"}},
        {"tie_word_embeddings": "perhaps"},
    ],
    ids=str,
)
def test_a_value_that_no_model_has_is_one_line(model, change):
    edit(model / "config.json", **change)
    assert str(model) in refusal(model)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("text", ['{"a": ' * 100_000, "[" * 100_000 + "]" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_json_of_any_depth_is_one_line(model, name, text):
    (model / name).write_text(text)
    assert name in refusal(model) or str(model) in refusal(model)


def test_a_model_that_takes_too_much_to_build_is_ended(model, monkeypatch):
    child = KeptChild("rollout_core.models.bounded.inspecting:handle", Limits(seconds=300.0, memory_bytes=450 * 2**20))
    monkeypatch.setattr(inspecting, "_child", child)
    edit(model / "config.json", num_hidden_layers=10_000, layer_types=None)
    message = refusal(model)
    child.close()
    assert "cannot be inspected: it used " in message and "of memory" in message


def test_a_million_empty_tensors_are_no_reason_to_wait(model):
    header = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(1_000_000)}
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert str(model) in refusal(model)


# Weights and addresses


def test_weights_that_are_no_numbers_are_one_line(model):
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, model / "model.safetensors"
    )
    engine = TransformersEngine(TransformersBackend(), ModelRef(hash_bytes(b"nan"), model))
    request = Request(key="one", prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=2), seed=0)
    with pytest.raises(ConfigError, match="gives logits that are not numbers: its weights are broken"):
        engine.generate([request])


@pytest.mark.parametrize("host", ["here:abc", "here:99999", "here:5432,there:x", "[::1]:y", "me:5:6@here:0"])
def test_a_port_that_is_no_number_is_one_line(host):
    with pytest.raises(ConfigError, match=r"database URL has port '.*'; expected a number from 1 to 65535"):
        is_postgres(f"postgresql://{host}/db")
    for good in ("here", "here:5432", "me:5:6@here:1,there", "[::1]:5", "/db?host=/run"):
        assert is_postgres(f"postgresql://{good}/db")
