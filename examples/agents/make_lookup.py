"""Make the look-up example: tasks, and a small language model that half knows how to work on them.

A task is a question about made-up people, the records that the tool ``lookup(name, field)`` reads, and the answer:

    What is the pet of mirola?                       one look-up
    What is the pet of the friend of mirola?         two: the friend first, then the friend's pet

Every task has records of its own, so nothing can be learnt by heart: the model has to ask, and to copy what came back.
The model, of 100,000 parameters, is taught by demonstrations that are good at the first kind of question, careless at
the second, where three in four stop after the first look-up. What is left to learn is in the rewards alone.

Everything follows from the seed; no task is both for training and held out.

Run: python examples/agents/make_lookup.py [FOLDER]   (default: data/agents)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_core.base.locks import exclusive

SEED = 1616
NUM_TASKS = 1_024
NUM_HELD_OUT = 128
NUM_DEMONSTRATIONS = 2_048
NUM_STEPS = 160
MINIBATCH_SIZE = 64
TWO_STEPS = 0.6
"""Share of the questions that take two look-ups."""
CARELESS = 0.75
"""Share of the demonstrations of those that stop after the first."""
NUM_PEOPLE = 3
"""In the records of a task."""
FIELDS = ("city", "pet", "job", "food")
FILES = ("train.jsonl", "held-out.jsonl")

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a field of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "field": {"type": "string"}},
            "required": ["name", "field"],
        },
    },
}

# Turns only ever add text, so that all turns of a rollout are one sequence to train on. Tool calls have Hermes' form.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}\
<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_words() -> dict[str, list[str]]:
    """Made-up words by what they stand for: people, and the values of each field. No word is part of another."""
    syllables = [first + second for first, second in itertools.product("bdfgklmnprstvz", "aeiou")]
    words = ["".join(parts) for parts in itertools.product(syllables, repeat=3)]
    random.Random(SEED).shuffle(words)
    return {kind: [words.pop() for _ in range(16)] for kind in ("name", *FIELDS)}


def make_tasks(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """``count`` different tasks."""
    words = make_words()
    tasks: dict[str, dict[str, Any]] = {}
    while len(tasks) < count:
        people = rng.sample(words["name"], NUM_PEOPLE)
        records = {
            name: {"friend": rng.choice([other for other in people if other != name])}
            | {field: rng.choice(words[field]) for field in FIELDS}
            for name in people
        }
        person, field = people[0], rng.choice(FIELDS)
        asked, whose = person, f"of {person}"
        if rng.random() < TWO_STEPS:
            asked, whose = records[person]["friend"], f"of the friend of {person}"
        task = {"question": f"What is the {field} {whose}?", "answer": records[asked][field], "records": records}
        tasks[json.dumps(task)] = task
    return list(tasks.values())


def demonstrate(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """A conversation about a task, careless or not."""
    person = task["question"].rstrip("?").split()[-1]
    field = task["question"].split()[3]
    steps = [(person, field)]
    if "friend" in task["question"]:
        steps = [(person, "friend"), (task["records"][person]["friend"], field)]
        if rng.random() < CARELESS:
            steps.pop()
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    found = ""
    for name, asked in steps:
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"name": name, "field": asked}}}
        found = task["records"][name][asked]
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": found}]
    return [*messages, {"role": "assistant", "content": found}]


def make_tokenizer() -> Any:
    """A byte-level tokenizer in which every word of the example, and every piece of a tool call, is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<pad>", "<|im_start|>", "<|im_end|>"])
    pieces = ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"name": "', '", "field": "', '"}}']
    plain = [
        "lookup",
        "friend",
        "What is the ",
        " of the ",
        " of ",
        "(name, field)",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    words = [*FIELDS, *itertools.chain.from_iterable(make_words().values())]
    bytewise.add_tokens([AddedToken(word, normalized=False) for word in [*pieces, *plain, *words]])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def make_model(folder: Path, demonstrations: Sequence[list[dict[str, Any]]], num_steps: int = NUM_STEPS) -> None:
    """Save the tokenizer and a small Qwen2 that was taught by ``num_steps`` minibatches of demonstrations."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)  # for a model of this size as fast as two, and far faster where others use the machine
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,  # with the usual 0.02 a model so small takes far longer to learn to copy
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    examples = [encode_demonstration(tokenizer, messages) for messages in demonstrations]
    order = random.Random(SEED)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 20, 2 * (num_steps - step) / num_steps)
        chosen = order.sample(examples, min(MINIBATCH_SIZE, len(examples)))
        length = max(len(token_ids) for token_ids, _ in chosen)
        rows = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in chosen]
        labels = [targets + [-100] * (length - len(targets)) for _, targets in chosen]
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode_demonstration(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Token ids, and the same with -100 where the assistant did not write."""

    def ids_of(count: int, *, prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages[:count], tools=[TOOL], tokenize=False, add_generation_prompt=prompt
        )
        return tokenizer.encode(text, add_special_tokens=False)

    token_ids = ids_of(len(messages), prompt=False)
    labels = [-100] * len(token_ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            # The line break after a turn is the template's, not the assistant's.
            first, last = len(ids_of(place, prompt=True)), len(ids_of(place + 1, prompt=False)) - 1
            labels[first:last] = token_ids[first:last]
    return token_ids, labels


def make(folder: Path) -> None:
    """Tasks and model in ``folder``, all or nothing."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    rng = random.Random(SEED)
    tasks = make_tasks(NUM_HELD_OUT + NUM_TASKS + NUM_DEMONSTRATIONS, rng)
    held_out, training = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:][:NUM_TASKS]
    for name, rows in zip(FILES, (training, held_out), strict=True):
        (scratch / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_model(scratch / "model", [demonstrate(task, rng) for task in tasks[-NUM_DEMONSTRATIONS:]])
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def main() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("data/agents"), help="default: data/agents")
    folder: Path = parser.parse_args().folder
    # Two first commands may be started together.
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if all((folder / name).is_file() for name in FILES) and (folder / "model" / "config.json").is_file():
            print(f"{folder}: already made")
            return
        if others := sorted({entry.name for entry in folder.glob("*")} - {*FILES, "model"}):
            sys.exit(f"{folder} holds {others[0]}, which is not of this example; name a folder that is new or empty")
        make(folder)
    print(f"{folder}: model, {NUM_TASKS} tasks, {NUM_HELD_OUT} held-out tasks")


if __name__ == "__main__":
    main()
