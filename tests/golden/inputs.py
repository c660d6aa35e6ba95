"""Inputs of the example configurations, the same bytes on every machine: constant weights, a tokenizer and rows.

Nothing here is drawn by torch or trained, and no library writes a file: another version would change content ids.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 64, 1, 2, 96
SPECIAL = ("<pad>", "<|endoftext|>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_ROWS = 520
"""More than the 512 prompts of an iteration that the nightly example asks for."""
AGENTS = {
    "examples/agents/lookup_agent.py": (
        "from rollout_core.agents import rollout\nfrom rollout_core.store import LLM\n\n\n"
        "@rollout\ndef lookup_agent(task: dict, llm: LLM) -> float:\n    return float(task['answer'] == llm.model)\n"
    ),
    "examples/agents/wording_agent.py": (
        "from rollout_core.agents import rollout\nfrom rollout_core.store import LLM, PromptTemplate\n\n\n"
        "@rollout\ndef wording_agent(task: dict, llm: LLM, prompt_template: PromptTemplate) -> float:\n"
        "    return float(prompt_template.format(name=task['name'], field=task['field']) == llm.model)\n"
    ),
    "examples/environments/lookup.py": (
        "class Lookup:\n"
        "    def reset(self, row, seed):\n        return str(row)\n\n"
        '    def lookup(self, name: str) -> str:\n        """Look up."""\n        return name\n\n'
        "    def step(self, message):\n        return None\n\n"
        "    def reward(self):\n        return 1.0\n"
    ),
    "examples/environments/notebook.py": (
        "class Notebook:\n"
        "    def load_memory(self, memory):\n        self.memory = memory\n\n"
        "    def reset(self, row, seed):\n        return str(row)\n\n"
        "    def step(self, message):\n        return None\n\n"
        "    def reward(self):\n        return 1.0\n\n"
        "    def save_memory(self):\n        return None\n\n"
        "    def merge_memory(self, memory, notes):\n        return notes\n"
    ),
    "examples/suites/arithmetic.toml": (
        'name = "arithmetic"\nrows = { path = "data/example/held-out.jsonl" }\nsamples = 2\n'
        'prompt = { text = "{{ prompt }}" }\nsampling = { temperature = 0.7, max_tokens = 8 }\n'
    ),
    "plugins/length/rollout-plugin.toml": (
        'name = "length"\nversion = "1"\nkind = "reward-model"\ntrait_id = "rollout_core::RewardModel"\n'
        'mode = "in-process"\nnetwork_allowlist = []\nruntime = { python_min = "3.11" }\n'
        'entry = { in-process = { module = "length", factory = "create_plugin" } }\n'
    ),
    "plugins/length/length.py": "def create_plugin(config):\n    return lambda sample: float(len(sample.completion))\n",
    "plugins/letters/rollout-plugin.toml": (
        'name = "letters"\nversion = "1"\nkind = "env-harness"\ntrait_id = "rollout_core::EnvHarness"\n'
        'mode = "in-process"\nnetwork_allowlist = []\nruntime = { python_min = "3.11" }\n'
        'entry = { in-process = { module = "letters", factory = "create_plugin" } }\n'
    ),
    "plugins/letters/letters.py": (
        "class Letters:\n"
        "    def reset(self, row, seed):\n        return str(row)\n\n"
        "    def step(self, message):\n        return None\n\n"
        "    def reward(self):\n        return 1.0\n\n\n"
        "def create_plugin(config):\n    return Letters\n"
    ),
    "examples/real/last_number.py": "def score(sample):\n    return float(sample.completion.endswith(sample.answer))\n",
}
"""In place of the examples' own code and suites, whose content enters keys: to edit them changes no key here."""


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes

@task
def sorting():
    rows = json_dataset("data/example/held-out.jsonl", FieldSpec(input="prompt", target="answer"))
    return Task(dataset=rows, scorer=includes())
"""
LM_EVAL_TASK = """
task: sorting
dataset_path: json
dataset_kwargs: {data_files: {test: data/example/held-out.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{prompt}}"
doc_to_target: " {{answer}}"
"""


def write_inputs(folder: Path) -> None:
    """Everything that the examples name, under the names that they have for it."""
    for place in ("example/model", "example/student", "agents/model", "real/model.gguf"):
        write_model(folder / "data" / place)
    write_model(folder / "data" / "example" / "teacher", weight=0.02)
    write_model(folder / "data" / "example" / "half", dtype="bfloat16")
    write_model(folder / "data" / "example" / "reward-model", is_reward_model=True)
    example = {
        "sft": ({"prompt": prompt, "completion": answer} for prompt, answer in problems()),
        "prompts": ({"prompt": prompt, "answer": answer} for prompt, answer in problems()),
        "held-out": ({"prompt": f"{prompt} ", "answer": answer} for prompt, answer in problems()),
        "pairs": ({"prompt": prompt, "chosen": answer, "rejected": f"{answer} 0"} for prompt, answer in problems()),
        "judged": (
            {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
            for number, (prompt, answer) in enumerate(problems())
        ),
    }
    for name, rows in example.items():
        _write_rows(folder / "data" / "example" / f"{name}.jsonl", rows)
    people = {"mira": {"pet": "cat"}}
    lookups = ({"question": f"What is {n}?", "answer": f"{n}", "records": people} for n in range(NUM_ROWS))
    wordings = ({"name": "mira", "field": "pet", "answer": f"{n}", "records": people} for n in range(NUM_ROWS))
    for room, tasks in {"agents": list(lookups), "wording": list(wordings)}.items():
        _write_rows(folder / "data" / room / "train.jsonl", tasks)
        _write_rows(folder / "data" / room / "held-out.jsonl", tasks[:64])
    asked = [[{"role": "user", "content": f"What is {n} + 1?"}] for n in range(NUM_ROWS)]
    sums = [{"messages": messages, "answer": str(n + 1)} for n, messages in enumerate(asked)]
    _write_rows(folder / "data" / "real" / "prompts.jsonl", sums)
    _write_rows(folder / "data" / "real" / "held-out.jsonl", sums[:64])
    _write_rows(folder / "data" / "real" / "larger-sums.jsonl", sums[64:80])
    told = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    _write_rows(
        folder / "data" / "real" / "instructions.jsonl", ({"instruction": f"Name {n}.", **told} for n in range(4))
    )
    (folder / "sorting.yaml").write_text(LM_EVAL_TASK)
    (folder / "sorting.py").write_text(INSPECT_TASK)
    answers = [[*messages, {"role": "assistant", "content": str(n + 1)}] for n, messages in enumerate(asked)]
    _write_rows(folder / "data" / "real" / "sft.jsonl", ({"messages": messages} for messages in answers))
    for name, text in AGENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def problems() -> Iterator[tuple[str, str]]:
    """Prompts with their answers."""
    for number in range(NUM_ROWS):
        digits = f"{number * 7919:07d}"
        yield f"sort {' '.join(digits)} =", " ".join(sorted(digits))


def write_model(folder: Path, *, weight: float = 0.01, dtype: str = "float32", is_reward_model: bool = False) -> None:
    """A Qwen2 in Hugging Face format all of whose weights are ``weight``."""
    alphabet = list(SPECIAL) + _byte_letters()
    config = {
        "architectures": ["Qwen2ForSequenceClassification" if is_reward_model else "Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": dtype,
        "vocab_size": len(alphabet),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if is_reward_model else {}),
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(alphabet)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
        "model_max_length": 256,
    }
    generation = {"eos_token_id": 1, "pad_token_id": 0}
    folder.mkdir(parents=True)
    documents = {
        "config": config,
        "tokenizer": tokenizer,
        "tokenizer_config": settings,
        "generation_config": generation,
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    shapes = _shapes(len(alphabet)) | ({"score.weight": (1, HIDDEN)} if is_reward_model else {})
    (folder / "model.safetensors").write_bytes(_safetensors(shapes, weight, dtype))


def _byte_letters() -> list[str]:
    """The letter that a byte-level tokenizer writes for each byte, as GPT-2 has it."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for part in "qkv":
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{at}.self_attn.{part}_proj.bias"] = (HIDDEN,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {**shapes, "model.norm.weight": (HIDDEN,)}


def _safetensors(shapes: Mapping[str, tuple[int, ...]], weight: float, dtype: str) -> bytes:
    """A safetensors file: the header's length, the header, and the values."""
    value, name_of_dtype = struct.pack("<f", weight), "F32"
    if dtype == "bfloat16":  # the upper half of a float32
        value, name_of_dtype = value[2:], "BF16"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values, start = bytearray(), 0
    for name, shape in shapes.items():
        values += value * math.prod(shape)
        header[name] = {"dtype": name_of_dtype, "shape": list(shape), "data_offsets": [start, len(values)]}
        start = len(values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(values)


def _write_rows(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
