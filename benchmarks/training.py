"""Speed of the SFT loop against a bare PyTorch loop on the same batches, in one process.

Ours is `train` with the `SFT` algorithm as the stage runs it: collation, the loss over trained tokens only, metrics,
clipping, the optimizer, a row of figures a step. The baseline is what one would write by hand: batches made ahead of
time, logits of every position, cross entropy, clip, fused AdamW. Both start from the same weights and see the same
batches; their losses are compared in every round.

Run: python benchmarks/training.py [--quick]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import Figures, no_collection, quick_asked

BATCH = 8
LENGTH = 256
VOCABULARY = 512


@dataclass(frozen=True)
class Case:
    """One kind of data."""

    name: str
    trained_from: int
    """First trained position of every sequence."""


CASES = (
    Case("every token trained", trained_from=0),
    Case("last 30 % trained", trained_from=int(0.7 * LENGTH)),
)


def make_policy() -> Any:
    """A Qwen2 of 2.9 million parameters with random weights, float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
    ).train()


def make_examples(case: Case, count: int) -> list[Any]:
    """``count`` random sequences of LENGTH tokens."""
    import random

    from rollout_core.algorithms.data import Example

    rng = random.Random(case.name)
    trained = [position >= case.trained_from for position in range(LENGTH)]
    return [Example([rng.randrange(VOCABULARY) for _ in range(LENGTH)], trained) for _ in range(count)]


def settings(steps: int) -> Any:
    """The stage's settings for ``steps`` steps."""
    from rollout_core.config import SFTSettings

    return SFTSettings.model_validate(
        {
            "dataset": {"path": "none"},
            "minibatch_size": BATCH,
            "optimizer": {"lr": 1e-4},
            "budget": {"max_steps": steps},
            "snapshots": {"every_steps": steps},
        }
    )


def run_ours(policy: Any, examples: Sequence[Any], steps: int) -> tuple[float, list[float]]:
    """Seconds and losses of ``steps`` steps of our loop."""
    from rollout_core.algorithms.loop import build_accelerator, build_optimizer, train
    from rollout_core.algorithms.policy import Policy
    from rollout_core.algorithms.sft import SFT
    from rollout_core.algorithms.state import TrainState

    config = settings(steps)
    accelerator = build_accelerator("float32")
    algorithm = SFT(Policy(policy), examples, config, seed=0, device=accelerator.device)
    state = TrainState(policy, build_optimizer(config.optimizer, list(policy.parameters())))
    with no_collection():
        started = time.perf_counter()
        train(algorithm, state, config, accelerator)
        seconds = time.perf_counter() - started
    return seconds, [row["loss"] for row in state.metrics]


def run_bare(policy: Any, examples: Sequence[Any], steps: int) -> tuple[float, list[float]]:
    """Seconds and losses of the loop one would write by hand."""
    import torch
    import torch.nn.functional as F

    from rollout_core.algorithms.data import positions_at

    orders = [positions_at(step, num_items=len(examples), per_step=BATCH, seed=0) for step in range(steps)]
    ids = torch.tensor([example.token_ids for example in examples])
    labels = ids.masked_fill(~torch.tensor([example.trained for example in examples]), -100)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    losses = []
    with no_collection():
        started = time.perf_counter()
        for order in orders:
            logits = policy(input_ids=ids[order], use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[order, 1:].flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.perf_counter() - started
    return seconds, losses


def measure(figures: Figures, case: Case, *, steps: int, rounds: int) -> None:
    """One row. Raises RuntimeError when the sides did not train the same."""
    policy = make_policy()
    examples = make_examples(case, steps * BATCH)
    sides = {"ours": run_ours, "bare": run_bare}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        losses = {}
        for name in order:
            seconds, losses[name] = sides[name](copy.deepcopy(policy), examples, steps)
            if number:  # the first round warms up
                rates[name].append(steps * BATCH * LENGTH / seconds)
        worst = max(abs(mine - other) for mine, other in zip(losses["ours"], losses["bare"], strict=True))
        if worst > 1e-4:
            raise RuntimeError(f"{case.name}: losses differ by up to {worst:.1e}, so the times do not compare")
    figures.compare(f"SFT {BATCH}x{LENGTH}, {case.name}, tokens/s", rates["ours"], rates["bare"])


def main() -> None:
    quick = quick_asked(__doc__)
    figures = Figures("The SFT loop against a bare PyTorch loop, float32")
    for case in CASES:
        measure(figures, case, steps=5 if quick else 20, rounds=2 if quick else 5)
    figures.show()


if __name__ == "__main__":
    main()
