"""Supervised fine-tuning: next-token cross entropy on the assistant's tokens (arXiv:2203.02155, section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rollout_core.algorithms.data import Example, TokenBatch, collate, positions_at
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import IGNORED_LABEL, selected_logprobs
from rollout_core.config import SFTSettings


class SFT:
    """`Algorithm` over tokenised examples.

    The loss of a step sums over the trained tokens of all its minibatches and divides by their number, so gradient
    accumulation gives the gradient of the whole.
    """

    name = "sft"

    def __init__(
        self,
        model: Any,
        examples: Sequence[Example],
        settings: SFTSettings,
        *,
        pad_token_id: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._examples = examples
        self._settings = settings
        self._pad_token_id = pad_token_id
        self._seed = seed
        self._device = device
        self.num_steps = num_steps(settings, len(examples))

    def minibatches(self, step: int) -> list[TokenBatch]:
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        positions = positions_at(step, num_items=len(self._examples), per_step=size * count, seed=self._seed)
        chosen = [self._examples[position] for position in positions]
        return [
            collate(chosen[start : start + size], pad_token_id=self._pad_token_id)
            for start in range(0, len(chosen), size)
        ]

    def loss(self, batch: TokenBatch, step_batches: Sequence[TokenBatch]) -> MinibatchLoss:
        num_items = sum(other.num_trained for other in step_batches)
        # Only columns in which some row has a target get logits.
        targets_BT = batch.labels[:, 1:]
        columns = (targets_BT != IGNORED_LABEL).any(dim=0).nonzero().squeeze(1)
        targets = targets_BT[:, columns].flatten().to(self._device)
        logits_BKV = self._model(
            input_ids=batch.input_ids.to(self._device), logits_to_keep=columns.to(self._device), use_cache=False
        ).logits
        logits = logits_BKV.flatten(0, 1)
        loss = -selected_logprobs(logits, targets).sum() / num_items
        with torch.no_grad():
            correct = (logits.argmax(-1) == targets).sum()
        return MinibatchLoss(loss, {"mean_token_accuracy": (correct / batch.num_trained, batch.num_trained)})

    def num_tokens(self, batch: TokenBatch) -> int:
        return batch.num_tokens


def num_steps(settings: SFTSettings, num_examples: int) -> int:
    """Optimizer steps of a run: ``budget.max_steps``, else what ``budget.epochs`` takes."""
    if settings.budget.max_steps is not None:
        return settings.budget.max_steps
    per_step = settings.minibatch_size * settings.gradient_accumulation
    return math.ceil(num_examples * settings.budget.epochs / per_step)
