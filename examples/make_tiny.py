"""Make the example's model and data: a small language model with random weights that is to learn to sort digits.

Everything follows from the seed. A prompt is ``sort 4 0 9 1 1 7 =``, its answer ``0 1 1 4 7 9``. Training and held-out
prompts never overlap. The tokenizer is a byte-level BPE trained here on the task's own text; the model is a Qwen2 of
about 3.3 million parameters, saved in Hugging Face format.

Run: python examples/make_tiny.py [FOLDER]   (default: data/example)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_core.base.locks import exclusive

SEED = 20260
DIGITS = 6
NUM_SFT = 4_000
NUM_PROMPTS = 8_000
NUM_HELD_OUT = 512
VOCABULARY = 320
NUM_PAIRS = 2_000
FILES = ("sft.jsonl", "prompts.jsonl", "held-out.jsonl", "held-out.parquet", "pairs.jsonl", "judged.jsonl")


def make_problems(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """``count`` different prompts with their answers, in random order."""
    problems: dict[str, str] = {}
    while len(problems) < count:
        digits = [rng.choice("0123456789") for _ in range(DIGITS)]
        problems[f"sort {' '.join(digits)} ="] = " ".join(sorted(digits))
    return list(problems.items())


def spoil(answer: str, rng: random.Random) -> str:
    """A wrong answer of the same digits, in another order."""
    digits = answer.split()
    if len(set(digits)) == 1:
        return " ".join(digits[:-1])
    while digits == answer.split():
        rng.shuffle(digits)
    return " ".join(digits)


def make_pairs(problems: list[tuple[str, str]], rng: random.Random) -> list[dict[str, str]]:
    """The right answer preferred to a wrong one."""
    return [{"prompt": prompt, "chosen": answer, "rejected": spoil(answer, rng)} for prompt, answer in problems]


def make_judged(problems: list[tuple[str, str]], rng: random.Random) -> list[dict[str, str | bool]]:
    """Answers, half of them wrong, with a label that says so."""
    return [
        {"prompt": prompt, "completion": spoil(answer, rng) if number % 2 else answer, "label": number % 2 == 0}
        for number, (prompt, answer) in enumerate(problems)
    ]


def make_data(folder: Path) -> None:
    """Write all rows; the held-out prompts appear nowhere else."""
    import pyarrow
    import pyarrow.parquet

    problems = make_problems(NUM_HELD_OUT + NUM_PROMPTS, random.Random(SEED))
    held_out, training = problems[:NUM_HELD_OUT], problems[NUM_HELD_OUT:]
    _write(folder / "held-out.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in held_out])
    rows = {"prompt": [prompt for prompt, _ in held_out], "answer": [answer for _, answer in held_out]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "held-out.parquet")
    _write(folder / "prompts.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in training])
    _write(folder / "sft.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in training[:NUM_SFT]])
    _write(folder / "pairs.jsonl", make_pairs(training[-NUM_PAIRS:], random.Random(SEED)))
    _write(folder / "judged.jsonl", make_judged(training[-2 * NUM_PAIRS :], random.Random(SEED)))


def _write(path: Path, rows: Sequence[Mapping[str, str | bool]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, *, hidden_size: int = 256, num_layers: int = 4, seed: int = SEED) -> None:
    """Train the tokenizer and save a randomly initialised Qwen2 next to it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    corpus = [f"{prompt} {answer}" for prompt, answer in make_problems(2_000, random.Random(SEED + 1))]
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<pad>")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),  # pyright: ignore[reportArgumentType]
        pad_token_id=tokenizer.convert_tokens_to_ids("<pad>"),  # pyright: ignore[reportArgumentType]
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("data/example"), help="default: data/example")
    folder: Path = parser.parse_args().folder
    # Two first commands may be started together.
    with exclusive(folder.with_name(f".{folder.name}.lock")):
        if all((folder / name).is_file() for name in FILES) and (folder / "model" / "config.json").is_file():
            print(f"{folder}: already made")
            return
        if others := sorted({entry.name for entry in folder.glob("*")} - {*FILES, "model"}):
            sys.exit(f"{folder} holds {others[0]}, which is not of this example; name a folder that is new or empty")
        make(folder)
    print(
        f"{folder}: model and {NUM_SFT} SFT rows, {NUM_PROMPTS} prompts, {NUM_HELD_OUT} held-out prompts, "
        f"{NUM_PAIRS} pairs, {2 * NUM_PAIRS} labelled answers"
    )


def make(folder: Path) -> None:
    """Model and data in ``folder``, all or nothing."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    make_data(scratch)
    make_model(scratch / "model")
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


if __name__ == "__main__":
    main()
