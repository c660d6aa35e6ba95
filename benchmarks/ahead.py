"""GRPO with samples drawn ahead of training against drawing and training in turns: wall time and held-out reward.

Each run is `rollout nightly` on the example's model and task: supervised fine-tuning, which both sides of a seed
share, then iterations of GRPO, then evaluation. Engine and learner have a thread each, so that side by side they keep
two cores busy. Time is that of an iteration after the first: from the end of one update to the end of the next. The
other side draws and trains in turns, once with a thread each and once with all threads for whoever is at work.

Run: python benchmarks/ahead.py [--quick] [--seeds 5] [--iterations 6] [--prompts 192]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from harness import PROJECT, Figures, own_place

GROUP = 8


@dataclass(frozen=True)
class Side:
    """How a run divides the machine."""

    what: str
    depth: int
    threads: int


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    seconds: float
    """Of an iteration, median."""
    before: float
    after: float
    """Held-out reward after SFT and at the end."""


AHEAD = Side("drawn one iteration ahead", 1, 1)
IN_TURNS = Side("in turns, a thread each", 0, 1)
ALL_THREADS = Side("in turns, all threads", 0, os.cpu_count() or 2)


def run(side: Side, seed: int, asked: argparse.Namespace) -> Outcome:
    """The outcome of the night of one side; raises CalledProcessError where it fails."""
    name = f"ahead-{side.depth}-{side.threads}-{seed}"
    changes = {
        "run.name": f'"{name}"',
        "seed": seed,
        "num_threads": side.threads,
        "numerics": '"native"',
        "backend.num_threads": side.threads,
        "sft.budget.max_steps": asked.sft_steps,
    }
    table = (PROJECT / "examples" / "nightly-tiny.toml").read_text(encoding="utf-8")
    start, rest = table.split("[ppo]")
    end = rest[rest.index("[evaluation.prompts]") :]
    grpo = f"""[grpo]
iterations = {asked.iterations}
prompts_per_iteration = {asked.prompts}
samples_per_prompt = {GROUP}
minibatch_size = 128
gradient_accumulation = 1
loss_type = "dapo"
async_depth = {side.depth}
prompts = {{ path = "data/example/prompts.jsonl" }}
sampling = {{ temperature = 1.0, max_tokens = 16 }}
optimizer = {{ lr = 1e-4 }}
snapshots = {{ every_steps = 100 }}

"""
    Path(f"{name}.toml").write_text(start + grpo + end, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("rollout")), "nightly", "--config", f"{name}.toml"]
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side.what}, seed {seed}, ended with {done.returncode}: {done.stderr[-2000:]}")
    return outcome_of(name)


def outcome_of(name: str) -> Outcome:
    """What the record of the run says."""
    from rollout_core.objects import ObjectStore
    from rollout_core.runs.records import RunRecords

    records = RunRecords(ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"]))
    head, detail = records.detail(records.find(name))
    ends = [call.ended for call in detail.calls if call.stage == "grpo_update"]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    return Outcome(statistics.median(seconds), head.held_out[0].reward, head.held_out[-1].reward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few prompts, to see that it runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=192, help=f"an iteration, {GROUP} completions each")
    parser.add_argument("--sft-steps", type=int, default=60)
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds, asked.iterations, asked.prompts, asked.sft_steps = 1, 3, 8, 5
    figures = Figures("Samples drawn ahead of training (ours) against in turns (baseline)")
    with own_place():
        subprocess.run([sys.executable, PROJECT / "examples" / "make_tiny.py"], check=True, capture_output=True)
        found = {
            side: [run(side, seed, asked) for seed in range(1, 1 + (1 if side is ALL_THREADS else asked.seeds))]
            for side in (AHEAD, IN_TURNS, ALL_THREADS)
        }
    ahead = found[AHEAD]
    for side in (IN_TURNS, ALL_THREADS):
        other = found[side]
        seconds = [[one.seconds for one in each] for each in (ahead[: len(other)], other)]
        figures.compare(f"an iteration, s, against {side.what}", *seconds, form="{:.1f}")
    for what in ("before", "after"):
        rewards = [[getattr(one, what) for one in each] for each in (ahead, found[IN_TURNS])]
        ours, other = (f"{statistics.mean(each):.3f} ± {statistics.pstdev(each):.3f}" for each in rewards)
        figures.add(f"held-out reward {what} GRPO, mean ± deviation over seeds", ours, other, rounds=asked.seeds)
    figures.show("The smaller the ratio of seconds, the more time is saved.")


if __name__ == "__main__":
    main()
