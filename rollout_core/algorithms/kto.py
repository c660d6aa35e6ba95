"""Kahneman-Tversky optimization from single labelled answers (KTO, arXiv:2402.01306).

The log-ratio of policy to reference is raised on desirable answers and lowered on undesirable ones, both against an
estimate of KL(policy || reference): the mean log-ratio of answers under prompts they do not belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_core.algorithms.budget import num_steps
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import kto_loss
from rollout_core.algorithms.parallel import all_reduce_sum, split_across_ranks
from rollout_core.algorithms.policy import Policy
from rollout_core.config import KTOSettings
from rollout_core.data.examples import positions_at
from rollout_core.data.item_table import Mapped
from rollout_core.data.packing import Document, PackedTokens, pack_branches
from rollout_core.data.preference_data import UnpairedPreference


@dataclass(frozen=True)
class UnpairedBatch:
    """B labelled answers, and as many mismatched ones."""

    tokens: PackedTokens
    mismatched: PackedTokens
    """The same prompts with answers to others."""
    ref_logps: Tensor
    """[B] float32: summed log-probability of each answer under the reference, nats."""
    ref_mismatched: Tensor
    """[B] float32: the same of the mismatched ones."""
    desirable: Tensor
    """[B] bool."""


def unpaired_documents(items: Sequence[UnpairedPreference]) -> Sequence[Document]:
    """A document a row: its prompt with its own answer and a mismatched one.

    The mismatched answer is that of the next row, going around the end, whose prompt is another. It is fixed for the
    data set instead of drawn anew in each batch, so that the reference needs to see it once only.
    """
    others = _other_prompts(items)

    def document(row: int) -> Document:
        return Document(items[row].prompt, (items[row].completion, items[int(others[row])].completion))

    return Mapped(range(len(items)), document)


def _other_prompts(items: Sequence[UnpairedPreference]) -> np.ndarray:
    """[N] int64: for each row the next, going around the end, with another prompt; itself where there is none."""
    others = np.arange(len(items))
    following = None
    for row in range(2 * len(items) - 1, -1, -1):  # twice around: the rows at the end look past it
        row %= len(items)
        prompt = items[row].prompt
        if following is not None:
            next_row, next_prompt = following
            if next_prompt != prompt:
                others[row] = next_row
            elif others[next_row] != next_row:
                others[row] = others[next_row]
        following = row, prompt
    return others


class KTO:
    """`Algorithm` over labelled answers. Loss and KL of a step are means over all its rows."""

    name = "kto"

    def __init__(
        self,
        policy: Policy,
        items: Sequence[UnpairedPreference],
        ref_logps: Tensor,
        settings: KTOSettings,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        """ref_logps: [2N] float32, own and mismatched answer of each of the N rows."""
        self._policy = policy
        self._items = items
        self._documents = unpaired_documents(items)
        self._ref_logps = ref_logps.view(-1, 2)
        self._settings = settings
        self._seed = seed
        self._device = device
        self._kl: tuple[Sequence[UnpairedBatch], Tensor] | None = None
        self.num_items = len(items)
        self.num_steps = num_steps(
            settings,
            self.num_items,
            seed=seed,
            item_tokens=lambda item: len(items[item].prompt) + len(items[item].completion),
        )

    def minibatches(self, step: int) -> list[UnpairedBatch]:
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        positions = positions_at(step, num_items=len(self._documents), per_step=size * count, seed=self._seed)
        return [self.minibatch(positions[start : start + size]) for start in range(0, len(positions), size)]

    def minibatch(self, positions: Sequence[int]) -> UnpairedBatch:
        """The rows at ``positions``."""
        documents = [self._documents[position] for position in positions]
        index = torch.tensor(positions)
        own, mismatched = (
            pack_branches([Document(document.prefix, (document.branches[which],)) for document in documents])
            for which in (0, 1)
        )
        ref_logps, ref_mismatched = self._ref_logps[index].T
        desirable = torch.tensor([self._items[position].desirable for position in positions])
        return UnpairedBatch(own, mismatched, ref_logps, ref_mismatched, desirable)

    def loss(self, batch: UnpairedBatch, step_batches: Sequence[UnpairedBatch]) -> MinibatchLoss:
        settings, kl = self._settings, self._step_kl(step_batches)
        tokens, good = batch.tokens.to(self._device), batch.desirable.to(self._device)
        logps = tokens.row_sums(self._policy(tokens).logprobs)
        ref_logps = batch.ref_logps.to(logps)
        with torch.autocast(self._device.type, enabled=False):
            loss = kto_loss(
                logps[good],
                logps[~good],
                ref_logps[good],
                ref_logps[~good],
                kl,
                beta=settings.beta,
                desirable_weight=settings.desirable_weight,
                undesirable_weight=settings.undesirable_weight,
            )
        rewards, logps = settings.beta * (logps.detach() - ref_logps), logps.detach()
        desirable = sum(int(other.desirable.sum()) for other in step_batches)
        rows = sum(len(other.desirable) for other in step_batches)
        undesirable = rows - desirable
        count = int(batch.desirable.sum())
        margin = rewards[good].sum() / max(desirable, 1) - rewards[~good].sum() / max(undesirable, 1)
        return MinibatchLoss(
            # The loss is a mean over this minibatch; the step's denominator is its rows over all minibatches.
            len(batch.desirable) / rows * loss,
            {
                "rewards/chosen": (rewards[good].sum() / max(count, 1), count),
                "rewards/rejected": (rewards[~good].sum() / max(len(good) - count, 1), len(good) - count),
                # Its parts add up to the step's margin, while figures are averaged over minibatches.
                "rewards/margins": (margin * len(step_batches), 1.0),
                "logps/chosen": (logps[good].sum() / max(count, 1), count),
                "logps/rejected": (logps[~good].sum() / max(len(good) - count, 1), len(good) - count),
                "kl": (kl, 1.0),
                "count/desirable": (desirable, 1.0),
                "count/undesirable": (undesirable, 1.0),
            },
        )

    @torch.no_grad()
    def _step_kl(self, step_batches: Sequence[UnpairedBatch]) -> Tensor:
        """Scalar, not below 0: mean log-ratio over the mismatched answers of the whole step. Collective."""
        if self._kl is None or self._kl[0] is not step_batches:
            ratios = []
            for batch, counts in split_across_ranks(step_batches):
                tokens = batch.mismatched.to(self._device)
                logps = tokens.row_sums(self._policy(tokens).logprobs)
                found = logps - batch.ref_mismatched.to(logps)
                ratios.append(found if counts else found[:0])
            own = torch.cat(ratios)
            rows = sum(len(batch.desirable) for batch in step_batches)
            self._kl = step_batches, (all_reduce_sum(own.sum()) / rows).clamp(min=0)
        return self._kl[1]

    def num_tokens(self, batch: UnpairedBatch) -> int:
        return batch.tokens.num_tokens

    def sequences(self, batch: UnpairedBatch) -> list[list[int]]:
        return [*batch.tokens.sequences(), *batch.mismatched.sequences()]
