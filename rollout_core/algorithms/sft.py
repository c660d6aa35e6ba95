"""What learners from a data set share (which items a step trains on, how many steps there are), and the plainest of
them: supervised fine-tuning, next-token cross entropy on the assistant's tokens (arXiv:2203.02155, section 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.policy import Policy
from rollout_core.config import DatasetSettings, SFTSettings
from rollout_core.data.examples import Example, epoch_order, positions_at
from rollout_core.data.packing import Document, PackedTokens, pack

BatchT = TypeVar("BatchT")


class DatasetAlgorithm(Generic[BatchT]):
    """The part of `Algorithm` that follows from the items alone; a subclass makes minibatches and gives their loss."""

    name: str

    def __init__(
        self,
        settings: DatasetSettings,
        num_items: int,
        *,
        seed: int,
        device: torch.device,
        item_tokens: Callable[[int], int],
    ) -> None:
        """item_tokens: computed tokens of the item at a position, by which ``budget.max_tokens`` counts."""
        self._minibatch_size = settings.minibatch_size
        self._items_per_step = settings.minibatch_size * settings.gradient_accumulation
        self._seed = seed
        self._device = device
        self.num_items = num_items
        self.num_steps = num_steps(settings, num_items, seed=seed, item_tokens=item_tokens)

    def minibatches(self, step: int) -> list[BatchT]:
        positions = positions_at(step, num_items=self.num_items, per_step=self._items_per_step, seed=self._seed)
        size = self._minibatch_size
        return [self.minibatch(positions[start : start + size]) for start in range(0, len(positions), size)]

    def minibatch(self, positions: Sequence[int]) -> BatchT:
        """The items at ``positions``."""
        raise NotImplementedError

    def loss(self, batch: BatchT, step_batches: Sequence[BatchT]) -> MinibatchLoss:
        """As in `Algorithm`."""
        raise NotImplementedError

    def tokens_of(self, batch: BatchT) -> PackedTokens:
        """What is computed for a minibatch."""
        raise NotImplementedError

    def num_tokens(self, batch: BatchT) -> int:
        return self.tokens_of(batch).num_tokens

    def sequences(self, batch: BatchT) -> list[list[int]]:
        return self.tokens_of(batch).sequences()


def share_of_step(mean_loss: Tensor, figures: Mapping[str, Any], *, items: int, step_items: int) -> MinibatchLoss:
    """The part of a step's loss that a minibatch of ``items`` adds, where the step's is a mean over ``step_items``.

    ``figures``: by name, a value for each item of the minibatch.
    """
    means = {name: (values.mean(), float(items)) for name, values in figures.items()}
    return MinibatchLoss(items / step_items * mean_loss, means)


def num_steps(settings: DatasetSettings, num_items: int, *, seed: int, item_tokens: Callable[[int], int]) -> int:
    """Optimizer steps of a run over ``num_items`` items: as many as the first limit of ``settings.budget`` allows.

    ``item_tokens`` gives the tokens that are computed for an item. A schedule can span the whole run, for tokens count
    in the order of training, which follows from ``seed``. Wall time cannot be known beforehand and is left to `train`.
    """
    budget, per_step = settings.budget, settings.minibatch_size * settings.gradient_accumulation
    limits = []
    if budget.max_steps is not None:
        limits.append(budget.max_steps)
    if budget.max_tokens is not None:
        limits.append(_steps_of_tokens(budget.max_tokens, num_items, per_step, seed, item_tokens))
    if budget.epochs is not None or not limits:
        limits.append(math.ceil(num_items * (budget.epochs or 1) / per_step))
    return min(limits)


def _steps_of_tokens(
    max_tokens: int, num_items: int, per_step: int, seed: int, item_tokens: Callable[[int], int]
) -> int:
    """The step that reaches ``max_tokens`` is the last one."""
    whole_epoch = sum(map(item_tokens, range(num_items)))
    epochs = (max_tokens - 1) // whole_epoch
    tokens = epochs * whole_epoch
    order = epoch_order(num_items, seed=seed, epoch=epochs)
    for number in count(1):
        tokens += item_tokens(order[number - 1])
        if tokens >= max_tokens:
            return math.ceil((epochs * num_items + number) / per_step)
    raise AssertionError("an epoch has the tokens that are left")


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
