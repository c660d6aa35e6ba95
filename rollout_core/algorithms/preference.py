"""Direct preference optimization (DPO, arXiv:2305.18290) and identity preference optimization (IPO, arXiv:2310.12036).

Both raise the log-ratio of policy to reference on the chosen answer of a pair above that on the rejected one. DPO sums
log-ratios over tokens; IPO averages each over its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_core.algorithms.budget import num_steps
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import dpo_loss, ipo_loss
from rollout_core.algorithms.policy import Policy
from rollout_core.config import DPOSettings, IPOSettings
from rollout_core.data.examples import positions_at
from rollout_core.data.item_table import Mapped
from rollout_core.data.packing import Document, PackedTokens, num_branch_tokens, pack_branches
from rollout_core.data.preference_data import Pair


@dataclass(frozen=True)
class PairBatch:
    """P pairs; the rows of ``tokens`` are chosen and rejected answer of one pair after the other."""

    tokens: PackedTokens
    ref_logps: Tensor
    """[P,2] float32: summed log-probability of each answer under the reference, nats."""


def pair_documents(pairs: Sequence[Pair]) -> Sequence[Document]:
    """A document a pair: the prompt with both answers."""
    return Mapped(pairs, lambda pair: Document(pair.prompt, (pair.chosen, pair.rejected)))


class DPO:
    """`Algorithm` over tokenised pairs. The loss of a step is the mean over all its pairs."""

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[Pair],
        ref_logps: Tensor,
        settings: DPOSettings | IPOSettings,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        """ref_logps: [2N] float32, chosen and rejected answer of each of the N pairs."""
        self.name = settings.kind
        self._policy = policy
        self._documents = pair_documents(pairs)
        self._ref_logps = ref_logps.view(-1, 2)
        self._settings = settings
        self._seed = seed
        self._device = device
        self.num_items = len(pairs)
        self.num_steps = num_steps(
            settings, self.num_items, seed=seed, item_tokens=lambda item: num_branch_tokens(self._documents[item])
        )

    def minibatches(self, step: int) -> list[PairBatch]:
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        positions = positions_at(step, num_items=len(self._documents), per_step=size * count, seed=self._seed)
        return [self.minibatch(positions[start : start + size]) for start in range(0, len(positions), size)]

    def minibatch(self, positions: Sequence[int]) -> PairBatch:
        """The pairs at ``positions``."""
        return PairBatch(
            pack_branches([self._documents[position] for position in positions]),
            self._ref_logps[torch.tensor(positions)],
        )

    def loss(self, batch: PairBatch, step_batches: Sequence[PairBatch]) -> MinibatchLoss:
        settings, tokens = self._settings, batch.tokens.to(self._device)
        logps = tokens.row_sums(self._policy(tokens).logprobs).view(-1, 2)
        ref_logps = batch.ref_logps.to(logps)
        with torch.autocast(self._device.type, enabled=False):
            if settings.kind == "dpo":
                policy, ref = logps, ref_logps
                loss = dpo_loss(*policy.T, *ref.T, beta=settings.beta, label_smoothing=settings.label_smoothing)
            else:
                lengths = tokens.row_counts().view(-1, 2)
                policy, ref = logps / lengths, ref_logps / lengths
                loss = ipo_loss(*policy.T, *ref.T, beta=settings.beta)
        pairs = len(logps)
        chosen, rejected = (settings.beta * (policy - ref)).detach().T
        figures = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": logps[:, 0],
            "logps/rejected": logps[:, 1],
        }
        # The loss is a mean over this minibatch; the step's denominator is its number of pairs over all minibatches.
        share = pairs / sum(len(other.ref_logps) for other in step_batches)
        return MinibatchLoss(share * loss, {name: (values.mean(), pairs) for name, values in figures.items()})

    def num_tokens(self, batch: PairBatch) -> int:
        return batch.tokens.num_tokens

    def sequences(self, batch: PairBatch) -> list[list[int]]:
        return batch.tokens.sequences()
