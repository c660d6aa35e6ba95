"""What portable numerics cost, and that they hold on CPUs that this machine is not.

Cost: the same steps of a tiny Qwen2 (3.2 million parameters) and the same generation by vLLM, native and portable,
each side in a process of its own, in turn, so that both meet the same load; medians over rounds, the ratio is the
median of the rounds' own. Proof: the tiny updates that tests pin, under qemu's user emulation of other CPUs (minutes
each).

Run: python benchmarks/portable.py [--quick] [--cpu EPYC --cpu Haswell]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import PROJECT, Figures

from rollout_core.base.determinism import NUMERICS, hold_numerics

CHILD = PROJECT / "tests" / "algorithms" / "portable_child.py"
CASES = ("sft", "engine")
UNITS = {"sft": "ms a step", "engine": "tokens/s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument(
        "--cpu", action="append", default=[], help="also run the pinned updates on this CPU of qemu-user"
    )
    parser.add_argument("--case", choices=CASES, help="one side alone, in this process; prints a number")
    asked = parser.parse_args()
    if asked.case:
        hold_numerics()
        sys.stdout.write(f"{measure(asked.case)}\n")
        return
    compare(rounds=1 if asked.quick else 3)
    for cpu in ["this machine", *asked.cpu] if asked.cpu else []:
        show(cpu)


def compare(rounds: int) -> None:
    figures = Figures("Portable numerics (ours) against native ones (baseline)")
    for case in CASES:
        pairs = [(alone(case, "portable"), alone(case, "native")) for _ in range(rounds)]
        figures.compare(f"{case}, {UNITS[case]}", *zip(*pairs, strict=True), form="{:,.1f}")
    figures.show()


def alone(case: str, numerics: str) -> float:
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, env=_environment(numerics), capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _environment(numerics: str) -> dict[str, str]:
    return {**os.environ, NUMERICS: numerics, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def measure(case: str) -> float:
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        return {"sft": seconds_a_step, "engine": tokens_a_second}[case](Path(folder))


def seconds_a_step(folder: Path) -> float:
    """Milliseconds of a step on 8 documents of 256 tokens, two threads; the first ones warm up."""
    import torch
    from training import make_policy, sft_rows

    torch.set_num_threads(2)
    model = make_policy()
    rows = torch.tensor([row["input_ids"] for row in sft_rows(8, (256, 256))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[4:])


def tokens_a_second(folder: Path) -> float:
    """Of 256 requests of 40 tokens each, one thread, the better of three goes."""
    from examples.make_tiny import make_model
    from rollout_core.base.ids import hash_bytes
    from rollout_core.config import SamplingParams, VLLMBackend
    from rollout_core.inference.backend import ModelRef, Request
    from rollout_core.inference.vllm_backend import VLLMEngine

    make_model(folder / "model")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(n), [(7 * n + 3 * i) % 250 + 2 for i in range(10)], params, seed=n) for n in range(256)]
    engine = VLLMEngine(VLLMBackend(max_model_len=64, num_threads=1), ModelRef(hash_bytes(b"model"), folder / "model"))
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        made = engine.generate(requests)
        rates.append(sum(len(completion.token_ids) for completion in made) / (time.perf_counter() - started))
    engine.close()
    return max(rates)


def show(cpu: str) -> None:
    """The content ids of the pinned updates on a CPU of qemu-user, or on this one."""
    emulator = [] if cpu == "this machine" else [_emulator(), "-cpu", cpu]
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as folder:
        command = [*emulator, sys.executable, str(CHILD), folder, "sft", "ppo"]
        done = subprocess.run(command, env=_environment("portable"), capture_output=True, text=True, check=True)
    sys.stdout.write(f"{cpu}: {json.loads(done.stdout.splitlines()[-1])}\n")


def _emulator() -> str:
    found = shutil.which("qemu-x86_64")
    if found is None:
        raise SystemExit("qemu-x86_64 is not installed; on Debian: apt-get install qemu-user")
    return found


if __name__ == "__main__":
    main()
