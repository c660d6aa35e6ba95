"""What is trained of a conversation with the chat templates that people have: docs/templates.md is this test's table.

TRL's wheel holds the templates of many models; those of the others here are written to the same structure.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout_core.base.errors import ConfigError
from rollout_core.config import LossOn
from rollout_core.data.datasets import PairRow, PromptRow, SftRow
from rollout_core.data.examples import DataReport, Example
from rollout_core.data.text import tokenize_prompts
from tests.support.rows import tokenize_pairs, tokenize_sft

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"

_INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""Llama 2's and Mistral's have no mark of their own before an answer."""


def _turns(head: str, tail: str, *, before: str = "", prompt: str | None = None) -> str:
    """A template that writes every turn alike; ``%`` stands for the role."""
    first, second = head.split("%")
    asked = first + "assistant" + second if prompt is None else prompt
    return (
        f"{before}{{% for m in messages %}}{first}{{{{ m.role }}}}{second}{{{{ m.content }}}}{tail}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{asked}{{% endif %}}"
    )


OWN = {
    "Llama 2, Mistral": _INST,
    "Llama 4": _turns("<|header_start|>%<|header_end|>\n\n", "<|eot|>", before="{{ bos_token }}"),
    "SmolLM2": _turns("<|im_start|>%\n", "<|im_end|>\n", before="<|im_start|>system\nYou help.<|im_end|>\n"),
    "OLMo": _turns("<|%|>\n", "{{ eos_token if m.role == 'assistant' else '' }}\n"),
    "Granite": _turns("<|start_of_role|>%<|end_of_role|>", "<|end_of_text|>\n"),
    "Phi 4": _turns("<|im_start|>%<|im_sep|>", "<|im_end|>"),
    "GLM 4": _turns("<|%|>\n", "", before="[gMASK]<sop>", prompt="<|assistant|>\n"),
    "Kimi": _turns("<|im_%|>%<|im_middle|>".replace("%|>%", "x|>%"), "<|im_end|>"),
    "User: / Assistant:": _turns("%: ", "\n"),
    "SmolLM3": _turns("<|im_start|>%\n", "<|im_end|>\n", prompt="<|im_start|>assistant\n<think>\n\n</think>\n").replace(
        "{{ m.content }}", "{{ '<think>\n\n</think>\n' if m.role == 'assistant' else '' }}{{ m.content }}"
    ),
}
TRL = {
    "Cohere": "cohere", "Cohere 2": "cohere2", "DeepSeek R1 distills": "deepseek_r1_distill",
    "DeepSeek V3": "deepseekv3", "Gemma, Gemma 2": "gemma", "Gemma 3": "gemma3", "Gemma 4": "gemma4_v5",
    "GLM 4.5": "glm4moe", "gpt-oss": "gptoss", "LFM2": "lfm2_v2", "Llama 3": "llama3", "Llama 3.1": "llama3_1",
    "Llama 3.2": "llama3_2", "Nemotron 3 Nano": "nemotron_3_nano", "Nemotron 3 Ultra": "nemotron_3_ultra",
    "Phi 3": "phi3", "Phi 3.5": "phi3_5", "Qwen2.5": "qwen2_5", "Qwen3": "qwen3",
    "Qwen3 Instruct 2507": "qwen3_instruct_2507", "Qwen3.5, thinking": "qwen3_5_think",
    "Qwen3.5, not thinking": "qwen3_5_nothink", "Qwen3.6": "qwen3_6", "Qwen3.8": "qwen3_8",
}  # fmt: skip
FAMILIES = sorted({*OWN, *TRL}, key=str.lower)
_MARKS = re.compile(r"<\|?[\w▁]+\|>|<\|[\w▁]+\|?>|<｜[\w▁]+｜>|</?think>|</?tool_call>|<(?:start|end)_of_turn>")


def template_of(name: str) -> str:
    """The template of a family."""
    file = f"trl/chat_templates/{TRL.get(name)}.jinja"
    return OWN[name] if name in OWN else Path(str(distribution("trl").locate_file(file))).read_text(encoding="utf-8")


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes that has the template, and its marks as tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([""], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<eos>")
    template = template_of(name)
    made.add_special_tokens({"additional_special_tokens": sorted(set(_MARKS.findall(template)))})
    made.chat_template = template
    return made


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


CALL = {"id": "123456789", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "description": "x"}},
    }}}
]  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "123456789", "name": "look_up", "content": "3"}
ONE = [user("hi"), assistant("yes")]
TWO = [*ONE, user("hello"), assistant("no")]
THOUGHT = [user("hi"), assistant("yes", reasoning_content="hm"), user("hello"), assistant("no", reasoning_content="so")]
INLINE = [user("hi"), assistant("<think>\nhm\n</think>\n\nyes")]
CALLING = [user("hi"), assistant(None, tool_calls=[CALL]), RESULT, assistant("three")]


def trained(name: str, messages: list[Any], **keys: Any) -> tuple[list[list[str]], DataReport]:
    """Of each sequence that a row becomes, the texts that are trained."""
    row = SftRow.model_validate({"messages": messages, **keys})
    loss_on = LossOn(kind="assistant_only")
    [example], told = tokenize_sft(tokenizer_of(name), [row], loss_on=loss_on, max_seq_len=8192)
    return [_parts(tokenizer_of(name), Example(*sequence)) for sequence in example.sequences()], told


def _parts(tokenizer: Any, example: Example) -> list[str]:
    parts: list[list[int]] = []
    for place, (token, is_trained) in enumerate(zip(example.token_ids, example.trained, strict=True)):
        if is_trained and not (place and example.trained[place - 1]):
            parts.append([])
        if is_trained:
            parts[-1].append(token)
    return [tokenizer.decode(part) for part in parts]


def engine_prompt(name: str, messages: list[Any], **keys: Any) -> list[int]:
    """What an engine is sent when it is the assistant's turn."""
    [ids] = tokenize_prompts(tokenizer_of(name), [PromptRow.model_validate({"messages": messages, **keys})])
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_trained_behind_the_prompt_that_an_engine_sends_and_ends(name: str):
    row = SftRow.model_validate({"messages": TWO})
    loss_on = LossOn(kind="assistant_only")
    [example], told = tokenize_sft(tokenizer_of(name), [row], loss_on=loss_on, max_seq_len=8192)
    tokenizer, sequences = tokenizer_of(name), example.sequences()
    assert told.num_examples == 1 and not told.num_template_problems
    texts = trained(name, TWO)[0]
    for turn, (asked, answer) in enumerate(((TWO[:1], "yes"), (TWO[:3], "no"))):
        prompt = engine_prompt(name, asked)
        token_ids, is_trained = sequences[-1] if len(sequences) == 1 else sequences[turn]
        # The first trained token behind the prompt is the one that an engine would draw.
        assert token_ids[: len(prompt)] == prompt
        assert is_trained[len(prompt)] and not is_trained[len(prompt) - 1]
        [written] = [text for text in (texts[0] if len(texts) == 1 else texts[turn]) if answer in text]
        assert ends(tokenizer, written), written


def ends(tokenizer: Any, written: str) -> bool:
    """Whether a text ends with a token of the tokenizer's own, white space aside."""
    return any(written.rstrip().endswith(token) for token in tokenizer.all_special_tokens if "</" not in token)


@pytest.mark.parametrize("name", FAMILIES)
def test_pairs_have_the_engines_prompt_and_end_their_answers(name: str):
    row = PairRow.model_validate({"prompt": [user("hi")], "chosen": "yes", "rejected": "\n\nno"})
    [pair], _ = tokenize_pairs(tokenizer_of(name), [row], max_seq_len=8192, need_prompts=True)
    assert pair.prompt == engine_prompt(name, [user("hi")])
    for answer, text in ((pair.chosen, "yes"), (pair.rejected, "no")):
        written = tokenizer_of(name).decode(answer)
        assert text in written and ends(tokenizer_of(name), written)


NO_TOOLS = {
    "Cohere", "Cohere 2", "Gemma, Gemma 2", "Gemma 3", "Llama 3", "Phi 3", "Phi 3.5", *OWN,
}  # fmt: skip
"""Their templates refuse a tool's message, or write no calls."""


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_tools_are_trained_and_results_are_not(name: str):
    try:
        texts, told = trained(name, CALLING, tools=TOOLS)
    except ConfigError as error:
        assert name in NO_TOOLS and "the chat template refuses these messages" in str(error)
        return
    written = [text for sequence in texts for text in sequence]
    assert not any("None" in text or "'a'" in text for text in written)
    if name in NO_TOOLS:
        assert told.num_template_problems == 1
        return
    assert not told.num_template_problems
    assert "look_up" in written[0] and "three" in written[-1] and "look_up" not in written[-1]
    as_objects = {**CALL, "function": {"name": "look_up", "arguments": {"a": 1}}}
    assert trained(name, [user("hi"), assistant("", tool_calls=[as_objects]), RESULT, assistant("three")], tools=TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_are_trained_or_named(name: str):
    for messages in (THOUGHT, INLINE):
        texts, told = trained(name, messages)
        written = "".join(text for sequence in texts for text in sequence)
        assert ("hm" in written) is not bool(told.num_template_problems) or name == "GLM 4.5"
        assert "</think>\n\n<think>" not in written, "an empty thought before the thought"


def special(name: str) -> str:
    """In words, what is special about a family."""
    _, told = trained(name, TWO)
    _, thoughts = trained(name, THOUGHT)
    prompt = tokenizer_of(name).decode(engine_prompt(name, [user("hi")]))
    said = []
    if told.num_ended:
        said.append("the template ends no turn: EOS is trained")
    if prompt.rstrip().endswith("<think>"):
        said.append("the prompt begins the thought")
    if prompt.rstrip().endswith("</think>"):
        said.append("the prompt holds an empty thought")
    if thoughts.num_template_problems:
        said.append("shows no `reasoning_content`")
    if name in NO_TOOLS:
        said.append("shows no tools")
    return "; ".join(said) or "—"


def code(text: str) -> str:
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`"


def test_the_page_has_the_table():
    lines = [
        "| Family | Template | Sequences of a row of two turns | Trained of its last turn | Special |",
        "|---|---|---|---|---|",
    ]
    for name in FAMILIES:
        texts, _ = trained(name, TWO)
        source = f"TRL's `{TRL[name]}`" if name in TRL else "of this structure"
        lines.append(f"| {name} | {source} | {len(texts)} | {code(texts[-1][-1])} | {special(name)} |")
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    wanted = "\n" + "\n".join(lines) + "\n\n"
    assert table == wanted, f"write this between the marks of docs/templates.md:\n{wanted}"
