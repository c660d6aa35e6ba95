"""Speed and memory of every learner beside TRL's trainer: same weights, same token ids, alternating in one run.

TRL needs an interpreter of its own (its dependencies are no concern of ours); give the path to its python:
     python -m venv trl && trl/bin/pip install trl==1.16.0 torch transformers accelerate
     python benchmarks/against_trl.py --python trl/bin/python [--case NAME ...] [--rounds 3] [--steps 10] [--threads 2]

Each side is a process of its own that trains on a file of rows, so that its peak memory is its own. The table's ratio
is the median over rounds of ours / TRL's, in real tokens per second (padding never counts); memory is above what the
process holds with the weights loaded. On a machine that others use, too, the ratio by processor time is the steadier
one, and steadiest with one thread: several wait for each other by spinning. The packed mode of TRL rearranges rows, so
its tokens a step are an average.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import Figures, median_ratio
from memory import memory_of
from training import make_policy, pair_rows, sft_rows

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Comparison:
    """One row of the table."""

    what: str
    case: str
    rows: list[dict[str, Any]]
    batch: int = 8
    vocabulary: int = 512
    model: Path | None = None
    """Folder of the weights; otherwise they are drawn, of ``vocabulary``."""
    theirs: str | None = None
    """TRL's case, where it has another name."""
    options: tuple[str, ...] = field(default=())
    """Of both sides."""
    script: str = "training.py"
    """Our side."""
    their_options: tuple[str, ...] = field(default=())


def judged_rows(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts with one answer, good and bad in turn, and the answer of the row before for KTO's KL."""
    rows, count = [], len(pairs)
    for number, pair in enumerate(pairs):
        before = pairs[number - 1 if number % 8 else min(number + 7, count - 1)]
        rows.append(
            {
                "prompt_ids": pair["prompt_ids"],
                "completion_ids": pair["chosen_ids"],
                "label": number % 2 == 0,
                "KL_completion_ids": before["chosen_ids"],
            }
        )
    return rows


def comparisons(steps: int) -> dict[str, Comparison]:
    """By short name."""
    count = 8 * (steps + 2)
    rng = random.Random(2)
    prompts = [{"prompt_ids": [rng.randrange(1, 512) for _ in range(32)]} for _ in range(4 * (steps + 2))]
    uneven, equal = pair_rows(count), pair_rows(count, equal=True)
    documents, wide = sft_rows(count, (32, 256)), sft_rows(count, (256, 256), trained=0.3, vocabulary=151_936)
    return {
        "sft": Comparison("SFT, 8 x 256 tokens", "sft", sft_rows(count, (256, 256))),
        "documents": Comparison("SFT, 32 to 256 tokens", "sft", documents),
        "packed": Comparison("SFT, 32 to 256 tokens, TRL packed", "sft", documents, theirs="sft-packed"),
        "vocabulary": Comparison("SFT, vocabulary 151,936, 30 % trained", "sft", wide, vocabulary=151_936),
        "reward": Comparison("reward model", "reward", whole_pairs(uneven)),
        "reward-equal": Comparison("reward model, rows of 104", "reward", whole_pairs(equal)),
        "dpo": Comparison("DPO, inline reference", "dpo", uneven),
        "dpo-equal": Comparison("DPO, inline reference, rows of 64 + 40", "dpo", equal),
        "ipo": Comparison("IPO, inline reference", "ipo", uneven),
        "ipo-equal": Comparison("IPO, inline reference, rows of 64 + 40", "ipo", equal),
        "kto": Comparison("KTO, inline reference", "kto", judged_rows(uneven)),
        "kto-equal": Comparison("KTO, inline reference, rows of 64 + 40", "kto", judged_rows(equal)),
        "dpo-cached": Comparison("DPO, cached reference, rows of 64 + 40", "dpo-cached", equal),
        "kto-cached": Comparison("KTO, cached reference, rows of 64 + 40", "kto-cached", judged_rows(equal)),
        "grpo": Comparison(
            "GRPO, 4 x 8 of 32 + 64", "grpo", prompts, batch=4, options=("--completions", "8", "--tokens", "64")
        ),
    }


def whole_pairs(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole sequences, as a reward model sees a prompt with its answer."""
    return [{key: pair["prompt_ids"] + pair[key] for key in ("chosen_ids", "rejected_ids")} for pair in pairs]


@dataclass(frozen=True)
class Side:
    """A process that measures one side."""

    python: str
    script: str
    case: str
    options: tuple[str, ...] = ()


def measure(side: Side, one: Comparison, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of one side's process; ``tree_mib`` is what all its processes together held at most."""
    out = folder / "figures.json"
    out.unlink(missing_ok=True)
    command = [side.python, HERE / side.script, "--case", side.case, "--work", folder / "rows.jsonl"]
    command += ["--model", one.model or folder / "model", "--batch", one.batch, "--steps", arguments.steps]
    command += ["--json", out, *one.options, *side.options]
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    parts, environment = [str(part) for part in command], {**os.environ, **threads}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(parts, stdout=said, stderr=said, env=environment)
        peak = tree_peak(process)
        if process.returncode:
            said.seek(0)
            end = said.read()[-2000:]
            raise RuntimeError(f"{side.script} --case {side.case} ended with {process.returncode}: {end}")
    return {**json.loads(out.read_text(encoding="utf-8")), "tree_mib": peak / 2**20}


def tree_peak(process: subprocess.Popen[Any]) -> int:
    """Wait for the end of ``process``; the most that it and its descendants held together, bytes that no file backs."""
    peak = 0
    while True:
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
                peak = max(peak, sum(map(memory_of, tree)))
        else:
            return peak


def both_sides(one: Comparison, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The figures of both sides in turn, a dictionary a round, each side first in every other round."""
    with tempfile.TemporaryDirectory(prefix="rollout-trl-") as name:
        folder = Path(name)
        if one.model is None:
            make_policy(one.vocabulary).save_pretrained(folder / "model")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one.rows), encoding="utf-8")
        sides = (
            Side(sys.executable, one.script, one.case),
            Side(arguments.python, "trl_side.py", one.theirs or one.case, one.their_options),
        )
        return in_turn(sides, one, folder, arguments)


def in_turn(
    sides: Sequence[Side], one: Comparison, folder: Path, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two sides on what ``folder`` holds."""
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for number in range(arguments.rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            found[index].append(measure(sides[index], one, folder, arguments))
    return found


def compare(figures: Figures, one: Comparison, arguments: argparse.Namespace) -> None:
    """A row for each figure."""
    found = both_sides(one, arguments)
    for name, unit in (("tokens_per_second", "tokens/s"), ("tokens_per_processor_second", "tokens/processor second")):
        ours, theirs = ([each[name] for each in side] for side in found)
        figures.compare(f"{one.what}, {unit}", ours, theirs)
    compare_memory(figures, one.what, found)


def compare_memory(
    figures: Figures, what: str, found: Sequence[Sequence[dict[str, Any]]], key: str = "peak_rss_mib"
) -> None:
    """A row of what both sides held at most; ``key``: ``tree_mib`` counts all processes of a side."""
    ours, theirs = ([each[key] for each in side] for side in found)
    figures.add(f"{what}, peak MiB", f"{min(ours):,.0f}", f"{min(theirs):,.0f}", median_ratio(ours, theirs), len(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has TRL")
    parser.add_argument("--case", nargs="*", help="by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    arguments = parser.parse_args()
    known = comparisons(arguments.steps)
    figures = Figures("rollout against TRL, float32, two processes in turn")
    for name in arguments.case or known:
        compare(figures, known[name], arguments)
    figures.show()


if __name__ == "__main__":
    main()
