"""GRPO with samples drawn ahead of training against drawing and training in turns: wall time and held-out reward.

Each run is `rollout nightly` on the example's model and task: supervised fine-tuning, which both sides of a seed
share, then iterations of GRPO, then evaluation. Engine and learner have a thread each. Time is that of an iteration
after the first: from the end of one update to the end of the next.

Both sides compute the importance correction, which is on by default where older weights draw and takes a pass without
gradient over the completions of all optimizer steps but an iteration's first. With the first seed the side in turns
also does without it, as it does by default.

Pinned apart, the engine's processes have one core and whoever learns has another, as an engine and a learner have with
a GPU each. The first seed also runs on cores that both share, where the side in turns draws and trains once with a
thread each and once with all threads for whoever is at work.

Run: python benchmarks/ahead.py [--quick] [--seeds 5] [--iterations 5] [--prompts 192] [--accumulation 1] [--only-apart]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from harness import PROJECT, Figures, own_place

GROUP = 8


@dataclass(frozen=True)
class Side:
    """How a run divides the machine."""

    what: str
    depth: int
    threads: int
    is_pinned: bool = False
    is_corrected: bool = True

    @property
    def name(self) -> str:
        """Of its runs."""
        changes = "-pinned" * self.is_pinned + "-plain" * (not self.is_corrected)
        return f"ahead-{self.depth}-{self.threads}{changes}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    seconds: float
    """Of an iteration, median."""
    before: float
    after: float
    """Held-out reward after SFT and at the end."""


APART = Side("ahead, pinned apart", 1, 1, is_pinned=True)
APART_IN_TURNS = Side("in turns, pinned apart", 0, 1, is_pinned=True)
APART_PLAIN = Side("in turns, pinned apart, no correction", 0, 1, is_pinned=True, is_corrected=False)
AHEAD = Side("ahead", 1, 1)
IN_TURNS = Side("in turns, a thread each", 0, 1)
ALL_THREADS = Side("in turns, all threads", 0, os.cpu_count() or 2)
PINNING_SECONDS = 0.2
"""From one look for new processes to the next."""


@contextmanager
def pinned_apart(process: int, *, learns_beside: bool) -> Iterator[None]:
    """Inside the block vLLM's processes below ``process`` have one core, and whoever learns another: a process of its
    own beside the flow's, which then stays with the engine that it feeds, or the flow's process itself."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"pinning apart takes two cores; this process may use {cores} only")
    ended, engines = threading.Event(), set[int]()

    def pin() -> None:
        while not ended.wait(PINNING_SECONDS):
            with suppress(psutil.NoSuchProcess):
                top = psutil.Process(process)
                for each in (top, *top.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                        engines.update({each.pid} if is_engine(each) else ())
                        of_learner = is_learner(each) if learns_beside else each.pid not in engines
                        core = cores[1] if of_learner else cores[0]
                        for thread in each.threads():
                            os.sched_setaffinity(thread.id, {core})

    watching = threading.Thread(target=pin, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    if not engines:
        raise SystemExit("no process of vLLM was found, so nothing was pinned apart")


def is_engine(process: psutil.Process) -> bool:
    """Whether a process is vLLM's, or was started by one that is."""
    return any("VLLM::" in " ".join(each.cmdline()) for each in (process, *process.parents()))


def is_learner(process: psutil.Process) -> bool:
    """Whether a process computes updates, or was started by one that does."""
    return any("rollout_core.launch.rank" in each.cmdline() for each in (process, *process.parents()))


def run(side: Side, seed: int, asked: argparse.Namespace) -> Outcome:
    """The outcome of the night of one side; raises SystemExit where it fails."""
    name = f"{side.name}-{seed}"
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
gradient_accumulation = {asked.accumulation}
loss_type = "dapo"
async_depth = {side.depth}
{"correction = {}" if side.is_corrected else ""}
prompts = {{ path = "data/example/prompts.jsonl" }}
sampling = {{ temperature = 1.0, max_tokens = 16 }}
optimizer = {{ lr = 3e-5 }}
snapshots = {{ every_steps = 100 }}

"""
    Path(f"{name}.toml").write_text(start + grpo + end, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("rollout")), "nightly", "--config", f"{name}.toml"]
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        with pinned_apart(process.pid, learns_beside=side.depth > 0) if side.is_pinned else nullcontext():
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(f"{side.what}, seed {seed}, ended with {process.returncode}: {errors[-2000:]}")
    return outcome_of(name)


def outcome_of(name: str) -> Outcome:
    """What the record of the run says."""
    from rollout_core.objects import ObjectStore
    from rollout_core.runs.run_records import RunRecords

    records = RunRecords(ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"]))
    head, detail = records.detail(records.find(name))
    ends = [call.ended for call in detail.calls if call.stage == "grpo_update"]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    return Outcome(statistics.median(seconds), head.held_out[-2].reward, head.held_out[-1].reward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few prompts, to see that it runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=192, help=f"an iteration, {GROUP} completions each")
    parser.add_argument("--accumulation", type=int, default=1, help="minibatches of 128 completions in a step")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--only-apart", action="store_true", help="nothing on cores that both sides share")
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds, asked.iterations, asked.prompts, asked.sft_steps = 1, 3, 8, 5
    figures = Figures("Samples drawn ahead of training (ours) against in turns (baseline)")
    pairs = [(APART, APART_IN_TURNS), (APART, APART_PLAIN)]
    pairs += [(AHEAD, IN_TURNS), (AHEAD, ALL_THREADS)] * (not asked.only_apart)
    sides = list(dict.fromkeys(side for pair in pairs for side in pair))
    found: dict[Side, list[Outcome]] = {side: [] for side in sides}
    with own_place():
        subprocess.run([sys.executable, PROJECT / "examples" / "make_tiny.py"], check=True, capture_output=True)
        for seed in range(1, 1 + asked.seeds):
            for side in sides if seed == 1 else sides[:2]:
                found[side].append(run(side, seed, asked))
    for ours, other in pairs:
        seconds = [[one.seconds for one in found[side][: len(found[other])]] for side in (ours, other)]
        figures.compare(f"an iteration, s: {ours.what} against {other.what}", *seconds, form="{:.1f}")
    for what in ("before", "after"):
        rewards = [[getattr(one, what) for one in found[side]] for side in (APART, APART_IN_TURNS)]
        ours, other = (f"{statistics.mean(each):.3f} ± {statistics.pstdev(each):.3f}" for each in rewards)
        figures.add(f"held-out reward {what} GRPO, mean ± deviation over seeds", ours, other, rounds=asked.seeds)
    figures.show("The smaller the ratio of seconds, the more time is saved.")


if __name__ == "__main__":
    main()
