"""Supervised fine-tuning with a loss of one's own, in the pipeline's loop: resumable, with snapshots and figures.

    python examples/make_tiny.py
    python examples/library/own_loss.py data/example/model data/example/sft.jsonl data/own-loss

Kill it and run it again: it resumes from its last snapshot and ends in the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout_core.algorithms import (
    SFT,
    MinibatchLoss,
    Policy,
    TrainState,
    UpdateContext,
    build_accelerator,
    build_optimizer,
    train_to_end,
)
from rollout_core.base.determinism import seed_everything
from rollout_core.base.ids import content_id
from rollout_core.config import BudgetConfig, JsonlDataset, OptimizerConfig, SFTSettings, SnapshotPolicy, identity
from rollout_core.data import Example, PackedTokens, SftRow, import_dataset, read_dataset, sft_form, training_items
from rollout_core.models import load_causal_lm
from rollout_core.objects import Checkpoint, ObjectStore


def dft_loss(logprobs: Tensor, num_tokens: int) -> Tensor:
    """Dynamic fine-tuning: -sum over t of sg(p_t) log p_t / num_tokens, sg() without gradient; arXiv:2508.05629.

    Each token is weighted by its own probability, so that implausible tokens do not dominate the gradient.
    logprobs: [M] float32, of the trained tokens, nats.
    """
    return -(logprobs.detach().exp() * logprobs).sum() / num_tokens


class DFT(SFT):
    """`SFT` with that loss: its minibatches, packing and token counts stay."""

    name = "dft"

    def __init__(
        self, policy: Policy, examples: Sequence[Example], settings: SFTSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(policy, examples, settings, seed=seed, device=device)
        self.policy = policy
        self.device = device

    def loss(self, batch: PackedTokens, step_batches: Sequence[PackedTokens]) -> MinibatchLoss:
        # One optimizer step may have several minibatches, whose losses are added up: so all divide by one number.
        num_tokens = sum(other.num_targets for other in step_batches)
        output = self.policy(batch.to(self.device))
        accuracy = output.is_best.float().mean()
        return MinibatchLoss(
            dft_loss(output.logprobs, num_tokens), {"mean_token_accuracy": (accuracy, batch.num_targets)}
        )


def fine_tune(model: Path, rows: Path, folder: Path, settings: SFTSettings, *, seed: int = 1) -> Checkpoint:
    """Train the model of a Hugging Face folder on ``rows``; everything is kept under ``folder``."""
    objects = ObjectStore.from_url(f"file://{(folder / 'objects').absolute()}")
    model_id = objects.put_tree(model)
    dataset = import_dataset(objects, read_dataset(JsonlDataset(path=str(rows)), SftRow, base=Path.cwd())).data
    context = UpdateContext(
        objects=objects,
        cache=folder / "cache",
        # Of all that decides the result: a run with the same key resumes where the last one was interrupted.
        key=content_id("dft/1", [model_id, dataset, identity(settings), seed]),
        run_id="own-loss",
        seed=seed,
        on_step=lambda row: print(f"step {row['step']:3}  loss {row['loss']:.4f}"),
    )
    examples, _ = training_items(objects, context.cache, dataset, model, sft_form(settings))
    seed_everything(seed, num_threads=1)
    accelerator = build_accelerator(settings.precision)
    trained = load_causal_lm(model).to(accelerator.device).train()
    optimizer = build_optimizer(settings.optimizer, list(trained.parameters()))
    return train_to_end(
        DFT(Policy(trained), examples, settings, seed=seed, device=accelerator.device),
        TrainState(trained, optimizer, seed=seed),
        settings,
        accelerator,
        context,
        tokenizer_from=model,
    )


if __name__ == "__main__":
    model, rows, folder = map(Path, sys.argv[1:])
    settings = SFTSettings(
        dataset=JsonlDataset(path=str(rows)),
        optimizer=OptimizerConfig(lr=1e-3),
        minibatch_size=32,
        budget=BudgetConfig(max_steps=40),
        snapshots=SnapshotPolicy(every_steps=5),
    )
    checkpoint = fine_tune(model, rows, folder, settings)
    print(f"model {checkpoint.model}")
