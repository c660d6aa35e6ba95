"""The output layer with its loss, forward and backward: ours beside torch's own, plain and in chunks.

Each way is a process of its own, so that its peak memory is its own; they take turns, and the table has medians over
rounds. Processor time, which other programs on the machine change less than seconds on the wall.

Run: python benchmarks/vocabulary.py [--tokens 1024] [--hidden 896] [--vocabulary 151936] [--rounds 3] [--repeats 3]
     [--threads 2] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

WAYS = {
    "ours: summed loss (SFT)": "weighted_nll",
    "ours: log-probabilities (RL, preferences)": "target_logprobs",
    "torch: logits and cross_entropy": "logits",
    "torch: linear_cross_entropy, chunks of 64 tokens": "chunks_of_64",
    "torch: linear_cross_entropy, chunks as it chooses": "own_chunks",
}


def build(name: str) -> Callable[[Any, Any, Any], Any]:
    """The loss of hidden states [M,H], the layer's weight [V,H] and targets [M]: a scalar."""
    import torch
    import torch.nn.functional as F
    from torch.nn import LinearCrossEntropyOptions

    from rollout_core.algorithms.output_layer import target_logprobs, weighted_nll

    if name == "weighted_nll":
        return lambda h, w, t: weighted_nll(h, w, None, t, torch.ones(len(t)))[0]
    if name == "target_logprobs":
        return lambda h, w, t: -target_logprobs(h, w, None, t).logprobs.sum()
    if name == "logits":
        return lambda h, w, t: F.cross_entropy((h @ w.T).float(), t, reduction="sum")
    chosen = {"batch_chunk_size": 64, "chunking_method": None} if name == "chunks_of_64" else {}
    options = LinearCrossEntropyOptions(**chosen)
    return lambda h, w, t: F.linear_cross_entropy(h, w, t, reduction="sum", options=options)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Processor and wall milliseconds of a pass and its gradients, MiB above what the inputs take, and the loss."""
    import torch

    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, arguments.dtype)
    hidden, weight = (
        torch.randn(rows, arguments.hidden, generator=generator).mul_(0.05).to(dtype).requires_grad_()
        for rows in (arguments.tokens, arguments.vocabulary)
    )
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator)
    compute = build(name)
    before, processor, wall, loss = _peak_mib(), [], [], 0.0
    for _ in range(arguments.repeats):
        hidden.grad = weight.grad = None
        started, begun = time.perf_counter(), time.process_time()
        value = compute(hidden, weight, targets)
        value.backward()
        processor.append(1000 * (time.process_time() - begun))
        wall.append(1000 * (time.perf_counter() - started))
        loss = float(value.detach()) / arguments.tokens
    assert hidden.grad is not None and weight.grad is not None
    return {
        "processor": statistics.median(processor),
        "wall": statistics.median(wall),
        "memory": _peak_mib() - before,
        "loss": loss,
        "gradient": float(hidden.grad.float().norm()),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments)), flush=True)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, name in WAYS.items():
            done = subprocess.run(
                [sys.executable, *sys.argv, "--way", name], capture_output=True, text=True, check=True
            )
            found[way].append(json.loads(done.stdout))
    print("| way | processor ms | wall ms | MiB | loss | gradient |\n|---|---:|---:|---:|---:|---:|")
    for way, rounds in found.items():
        median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        print(
            f"| {way} | {median['processor']:,.0f} | {median['wall']:,.0f} | {median['memory']:,.0f} | "
            f"{median['loss']:.6f} | {median['gradient']:.6f} |"
        )


if __name__ == "__main__":
    main()
