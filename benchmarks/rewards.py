"""Cost of a reward in a process of its own, beside the same in the run's process, and beside a PPO iteration.

Two sizes: those of the PPO example, whose iteration is run here (with its model and rows, by the transformers backend),
and those of a model of practice, with 768 tokens a sample. What the process costs is its start, once a run, and each
scoring's way there and back.

Of a sandbox: what a trivial program takes from the call to its outcome, one at a time, and programs a second with as
many at a time as there are processors, warm; a program's source in Python, the same as a command that starts an
interpreter, and unit tests against a function.

Run: python benchmarks/rewards.py [--quick]
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Figures, own_place, own_server, quick_asked

CODE = "def reward(sample):\n    return float(sample.completion.strip() == sample.extras['answer'])\n"
SIZES = {"128 samples of 24 tokens": (128, 8, 16), "1,024 samples of 768 tokens": (1024, 256, 512)}
ITERATIONS = 4


def measure_scoring(figures: Figures, folder: Path, *, rounds: int) -> float:
    """Rows of starting and of scoring; returns the seconds that a scoring of the example's size costs more."""
    from rollout_core.config.rewards import FunctionReward
    from rollout_core.rewards.loading import load_reward
    from rollout_core.rewards.scoring import RewardInput, score

    (folder / "mine.py").write_text(CODE)
    spec = FunctionReward(callable="mine.py:reward")
    starts = []
    for _ in range(rounds):
        started = time.perf_counter()
        load_reward(spec, base=folder).close()
        starts.append(time.perf_counter() - started)
    figures.add("start of the process, once a run", f"{statistics.median(starts) * 1e3:.0f} ms", rounds=rounds)
    own = load_reward(spec, base=folder)
    ours = load_reward(spec.model_copy(update={"in_process": True}), base=folder)
    more = []
    for name, (count, prompt_tokens, tokens) in SIZES.items():
        drawn = random.Random(0)
        samples = [
            RewardInput(
                prompt="p" * 4 * prompt_tokens,
                completion="c" * 4 * tokens,
                extras={"answer": "1 2 3"},
                num_tokens=tokens,
                id=str(number),
                prompt_token_ids=[drawn.randrange(150_000) for _ in range(prompt_tokens)],
                token_ids=[drawn.randrange(150_000) for _ in range(tokens)],
            )
            for number in range(count)
        ]
        seconds: dict[str, list[float]] = {"own": [], "ours": []}
        for _ in range(rounds):
            for side, reward in (("own", own), ("ours", ours)):
                started = time.perf_counter()
                score(reward, samples)
                seconds[side].append(time.perf_counter() - started)
        more.append(statistics.median(seconds["own"]) - statistics.median(seconds["ours"]))
        figures.compare(f"scoring {name}, ms", *([s * 1e3 for s in seconds[side]] for side in seconds), form="{:.2f}")
    own.close()
    return more[0] + statistics.median(starts) / ITERATIONS


def measure_sandbox(figures: Figures, *, rounds: int) -> None:
    """Rows of what programs that models write cost, of each sandbox that this machine has."""
    from rollout_core.rewards.verifiers.code import grade_tests
    from rollout_core.sandbox import Program, Sandbox

    programs = {"source": Program(source="pass"), "command": Program(argv=["python3", "-I", "-S", "-c", "pass"])}
    for kind in ("namespaces", "bubblewrap"):
        with Sandbox(kind=kind) as sandbox:
            walls = sandbox.walls()
            if not walls.stand:
                figures.add(f"sandbox {kind}", "-", "; ".join(walls.missing()))
                continue
            for name, program in programs.items():
                sandbox.run_many([program] * 10)
                taken = [_seconds(sandbox.run, program) for _ in range(20 * rounds)]
                figures.add(f"{kind}, one {name}", f"{statistics.median(taken) * 1e3:.1f} ms", rounds=len(taken))
                rates = [100 / _seconds(sandbox.run_many, [program] * 100) for _ in range(rounds)]
                figures.add(f"{kind}, {name}s a second", f"{statistics.median(rates):.0f}", rounds=rounds)
            code, tests = "def add(a, b): return a + b", ["assert add(1, 2) == 3"]
            taken = [_seconds(grade_tests, sandbox, code, tests) for _ in range(20 * rounds)]
            figures.add(f"{kind}, unit tests", f"{statistics.median(taken) * 1e3:.1f} ms", rounds=len(taken))


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def measure_iteration(figures: Figures, folder: Path, more: float) -> None:
    """The row of a PPO iteration of the example, and the share of it."""
    from examples.make_tiny import make_model, make_problems
    from flows.train import train_ppo
    from rollout_core.config import TrainPPOConfig, parse_config

    make_model(folder / "model", hidden_size=128, num_layers=4, seed=1)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in make_problems(512, random.Random(3))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document: dict[str, Any] = {
        "num_threads": 2,
        "seed": 7,
        "backend": {"kind": "transformers"},
        "algorithm": {
            "base_model": {"uri": "model"},
            "prompts": {"path": "prompts.jsonl"},
            "iterations": ITERATIONS,
            "prompts_per_iteration": 128,
            "epochs": 2,
            "minibatch_size": 64,
            "sampling": {"temperature": 1.0, "max_tokens": 16},
            "optimizer": {"lr": 1e-4},
            "reward": {"kind": "function", "callable": "mine.py:reward"},
        },
    }
    started = time.perf_counter()
    train_ppo(parse_config(document, TrainPPOConfig, name="benchmark"))
    seconds = (time.perf_counter() - started) / ITERATIONS
    figures.add("an iteration of the PPO example", f"{seconds:.2f} s", rounds=1)
    figures.add("share of it that the process costs", f"{more / seconds:.2%}", rounds=1)


def main() -> None:
    """Print the table."""
    quick = quick_asked(__doc__)
    with own_place() as folder:
        figures = Figures("rewards")
        measure_sandbox(figures, rounds=2 if quick else 10)
        more = measure_scoring(figures, folder, rounds=3 if quick else 15)
        with own_server(folder):
            measure_iteration(figures, folder, more)
        figures.show("`baseline` is the same in the run's own process (in_process = true).")


if __name__ == "__main__":
    main()
