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

from harness import Figures, median_ratio
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
    theirs: str | None = None
    """TRL's case, where it has another name."""
    options: tuple[str, ...] = field(default=())


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


def measure(
    python: str, script: str, case: str, one: Comparison, folder: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """The figures of one side's process."""
    out = folder / "figures.json"
    out.unlink(missing_ok=True)
    command = [python, HERE / script, "--case", case, "--work", folder / "rows.jsonl", "--model", folder / "model"]
    command += ["--batch", one.batch, "--steps", arguments.steps, "--json", out, *one.options]
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    parts, environment = [str(part) for part in command], {**os.environ, **threads}
    done = subprocess.run(parts, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script} --case {case} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(out.read_text(encoding="utf-8"))


def compare(figures: Figures, one: Comparison, arguments: argparse.Namespace) -> None:
    """Both sides in turn, each first in every other round."""
    with tempfile.TemporaryDirectory(prefix="rollout-trl-") as name:
        folder = Path(name)
        make_policy(one.vocabulary).save_pretrained(folder / "model")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one.rows), encoding="utf-8")
        sides = (
            (sys.executable, "training.py", one.case),
            (arguments.python, "trl_side.py", one.theirs or one.case),
        )
        found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for number in range(arguments.rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                found[index].append(measure(*sides[index], one, folder, arguments))
    for name, unit in (("tokens_per_second", "tokens/s"), ("tokens_per_processor_second", "tokens/processor second")):
        ours, theirs = ([each[name] for each in side] for side in found)
        figures.compare(f"{one.what}, {unit}", ours, theirs)
    ours, theirs = ([each["peak_rss_mib"] for each in side] for side in found)
    figures.add(
        f"{one.what}, peak MiB",
        f"{min(ours):,.0f}",
        f"{min(theirs):,.0f}",
        median_ratio(ours, theirs),
        arguments.rounds,
    )


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
