"""Supervised fine-tuning: next-token cross entropy on the assistant's tokens (arXiv:2203.02155, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_core.algorithms.dataset_algorithm import DatasetAlgorithm
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.policy import Policy
from rollout_core.config import SFTSettings
from rollout_core.data.examples import Example
from rollout_core.data.packing import Document, PackedTokens, pack


class SFT(DatasetAlgorithm[PackedTokens]):
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
        super().__init__(
            settings,
            len(examples),
            seed=seed,
            device=device,
            item_tokens=lambda item: len(examples[item].token_ids),
        )

    def minibatch(self, positions: Sequence[int]) -> PackedTokens:
        examples = [self._examples[position] for position in positions]
        return pack([Document(example.token_ids, trained=example.trained) for example in examples])

    def loss(self, batch: PackedTokens, step_batches: Sequence[PackedTokens]) -> MinibatchLoss:
        num_targets = sum(other.num_targets for other in step_batches)
        weights = torch.full((batch.num_targets,), 1.0 / num_targets, device=self._device)
        found = self._policy(batch.to(self._device), nll_weights=weights)
        accuracy = found.is_best.float().mean()
        return MinibatchLoss(found.loss, {"mean_token_accuracy": (accuracy, batch.num_targets)})

    def tokens_of(self, batch: PackedTokens) -> PackedTokens:
        return batch
