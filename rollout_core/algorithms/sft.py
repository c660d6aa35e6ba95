"""Supervised fine-tuning: next-token cross entropy on the assistant's tokens (arXiv:2203.02155, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_core.algorithms.budget import num_steps
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.policy import Policy
from rollout_core.config import SFTSettings
from rollout_core.data.examples import Example, positions_at
from rollout_core.data.packing import Document, PackedTokens, pack


class SFT:
    """`Algorithm` over tokenised examples.

    The loss of a step sums over the trained tokens of all its minibatches and divides by their number, so gradient
    accumulation gives the gradient of the whole.
    """

    name = "sft"

    def __init__(
        self, policy: Policy, examples: Sequence[Example], settings: SFTSettings, *, seed: int, device: torch.device
    ) -> None:
        self._policy = policy
        self._examples = examples
        self._settings = settings
        self._seed = seed
        self._device = device
        self.num_items = len(examples)
        self.num_steps = num_steps(
            settings, self.num_items, seed=seed, item_tokens=lambda item: len(examples[item].token_ids)
        )

    def minibatches(self, step: int) -> list[PackedTokens]:
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        positions = positions_at(step, num_items=len(self._examples), per_step=size * count, seed=self._seed)
        return [self.minibatch(positions[start : start + size]) for start in range(0, len(positions), size)]

    def minibatch(self, positions: Sequence[int]) -> PackedTokens:
        """The examples at ``positions``."""
        examples = [self._examples[position] for position in positions]
        return pack([Document(example.token_ids, trained=example.trained) for example in examples])

    def loss(self, batch: PackedTokens, step_batches: Sequence[PackedTokens]) -> MinibatchLoss:
        num_items = sum(other.num_targets for other in step_batches)
        weights = torch.full((batch.num_targets,), 1.0 / num_items, device=self._device)
        found = self._policy(batch.to(self._device), nll_weights=weights)
        accuracy = found.is_best.float().mean()
        return MinibatchLoss(found.loss, {"mean_token_accuracy": (accuracy, batch.num_targets)})

    def num_tokens(self, batch: PackedTokens) -> int:
        return batch.num_tokens

    def sequences(self, batch: PackedTokens) -> list[list[int]]:
        return batch.sequences()
