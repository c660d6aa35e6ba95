"""Learning from preferences against a reference policy: DPO, IPO and KTO, and the reference's log-probabilities.

DPO (direct preference optimization, arXiv:2305.18290) and IPO (identity preference optimization, arXiv:2310.12036)
raise the log-ratio of policy to reference on the chosen answer of a pair above that on the rejected one. DPO sums
log-ratios over tokens; IPO averages each over its own. ORPO (arXiv:2403.07691) and SimPO (arXiv:2405.14734)
compare mean log-probabilities of the policy alone.

KTO (Kahneman-Tversky optimization, arXiv:2402.01306) needs no pairs: the log-ratio is raised on desirable answers and
lowered on undesirable ones, both against an estimate of KL(policy || reference): the mean log-ratio of answers under
prompts they do not belong to.

Log-probabilities under a reference are computed once and kept in the object store. The key names the reference model,
the precision and the very tokens, so that epochs, runs and algorithms share what any of them computed. Documents are
taken in chunks, and each chunk is kept as soon as it is done: a run that is killed here resumes here. How a chunk is
batched follows from its tokens alone, so its bits do not depend on whose run it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rollout_core.algorithms.context import OwnLossFunction
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import dpo_loss, ipo_loss, kto_loss, mean_of, orpo_loss, simpo_loss
from rollout_core.algorithms.parallel import all_ranks, all_reduce_sum, is_first, split_across_ranks
from rollout_core.algorithms.policy import Policy
from rollout_core.algorithms.supervised import DatasetAlgorithm, share_of_step
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, content_id
from rollout_core.config import KTOSettings, PreferenceSettings
from rollout_core.data.packing import Document, PackedTokens, num_branch_tokens, pack_branches
from rollout_core.data.preference_data import Pair, UnpairedPreference
from rollout_core.data.tokenized import Mapped
from rollout_core.objects import ObjectStore

CHUNK_DOCUMENTS = 512
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class PairBatch:
    """P pairs; the rows of ``tokens`` are chosen and rejected answer of one pair after the other."""

    tokens: PackedTokens
    ref_logps: Tensor
    """[P,2] float32: summed log-probability of each answer under the reference, nats."""


def pair_documents(pairs: Sequence[Pair]) -> Sequence[Document]:
    """A document a pair: the prompt with both answers."""
    return Mapped(pairs, lambda pair: Document(pair.prompt, (pair.chosen, pair.rejected)))


class DPO(DatasetAlgorithm[PairBatch]):
    """`Algorithm` over tokenised pairs. The loss of a step is the mean over all its pairs."""

    takes_means: ClassVar[bool] = False
    """Whether log-probabilities of answers are means over their tokens; else sums."""

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[Pair],
        ref_logps: Tensor,
        settings: PreferenceSettings,
        *,
        seed: int,
        device: torch.device,
        own_loss: OwnLossFunction | None = None,
    ) -> None:
        """ref_logps: [2N] float32, chosen and rejected answer of each of the N pairs; zeros where the loss has no
        reference. own_loss: replaces the algorithm's, as of `UpdateContext`."""
        self._own_loss = own_loss
        self.name = settings.family
        self._documents = pair_documents(pairs)
        self._ref_logps = ref_logps.view(-1, 2)
        super().__init__(policy, pairs, settings, seed=seed, device=device)

    def item_tokens(self, position: int) -> int:
        return num_branch_tokens(self._documents[position])

    def minibatch(self, positions: Sequence[int]) -> PairBatch:
        return PairBatch(
            pack_branches([self._documents[position] for position in positions]),
            self._ref_logps[torch.tensor(positions)],
        )

    def loss(self, batch: PairBatch, step_batches: Sequence[PairBatch]) -> MinibatchLoss:
        settings, tokens = self._settings, batch.tokens.to(self._device)
        logps = tokens.row_sums(self._model(tokens).logprobs).view(-1, 2)
        ref_logps = batch.ref_logps.to(logps)
        with torch.autocast(self._device.type, enabled=False):
            lengths = tokens.row_counts().view(-1, 2)
            policy, ref = (logps / lengths, ref_logps / lengths) if self.takes_means else (logps, ref_logps)
            if self._own_loss is None:
                loss, more = self.pair_loss(policy, ref)
            else:
                columns = (*policy.T, *ref.T)[: len(settings.loss_arguments)]
                loss, more = mean_of(self._own_loss(*columns)), {}
        chosen, rejected = (settings.beta * (policy - ref)).detach().T
        figures = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": logps[:, 0],
            "logps/rejected": logps[:, 1],
            **{name: value[None] for name, value in more.items()},
        }
        step_pairs = sum(len(other.ref_logps) for other in step_batches)
        return share_of_step(loss, figures, items=len(logps), step_items=step_pairs)

    def pair_loss(self, policy: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of P pairs by the log-probabilities of chosen and rejected answers, both [P,2], and its figures."""
        options = {"beta": self._settings.beta, "label_smoothing": self._settings.label_smoothing}
        return dpo_loss(*policy.T, *ref.T, **options), {}

    def tokens_of(self, batch: PairBatch) -> PackedTokens:
        return batch.tokens


class IPO(DPO):
    """The same with IPO's loss, of mean log-probabilities."""

    takes_means = True

    def pair_loss(self, policy: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return ipo_loss(*policy.T, *ref.T, beta=self._settings.beta), {}


class ORPO(DPO):
    """The same with ORPO's loss, of the policy's mean log-probabilities alone."""

    takes_means = True

    def pair_loss(self, policy: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = orpo_loss(*policy.T, beta=self._settings.beta)
        return found.loss, {"nll_loss": found.nll, "log_odds_ratio": found.log_odds_ratio}


class SimPO(DPO):
    """The same with SimPO's loss, of the policy's mean log-probabilities alone."""

    takes_means = True

    def pair_loss(self, policy: Tensor, ref: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return simpo_loss(*policy.T, beta=self._settings.beta, gamma=self._settings.gamma), {}


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
    data set instead of drawn again in each batch, so that the reference needs to see it once only.
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


class KTO(DatasetAlgorithm[UnpairedBatch]):
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
        own_loss: OwnLossFunction | None = None,
    ) -> None:
        """ref_logps: [2N] float32, own and mismatched answer of each of the N rows. own_loss: replaces the algorithm's,
        as of `UpdateContext`."""
        self._own_loss = own_loss
        self._documents = unpaired_documents(items)
        self._ref_logps = ref_logps.view(-1, 2)
        self._kl: tuple[Sequence[UnpairedBatch], Tensor] | None = None
        super().__init__(policy, items, settings, seed=seed, device=device)

    def item_tokens(self, position: int) -> int:
        return len(self._items[position].prompt) + len(self._items[position].completion)

    def minibatch(self, positions: Sequence[int]) -> UnpairedBatch:
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
        logps = tokens.row_sums(self._model(tokens).logprobs)
        ref_logps = batch.ref_logps.to(logps)
        with torch.autocast(self._device.type, enabled=False):
            if self._own_loss is None:
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
            else:
                loss = mean_of(self._own_loss(logps, ref_logps, good, kl))
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
                logps = tokens.row_sums(self._model(tokens).logprobs)
                found = logps - batch.ref_mismatched.to(logps)
                ratios.append(found if counts else found[:0])
            own = torch.cat(ratios)
            rows = sum(len(batch.desirable) for batch in step_batches)
            self._kl = step_batches, (all_reduce_sum(own.sum()) / rows).clamp(min=0)
        return self._kl[1]

    def tokens_of(self, batch: UnpairedBatch) -> PackedTokens:
        return batch.tokens

    def sequences(self, batch: UnpairedBatch) -> list[list[int]]:
        # The mismatched answers make the KL of the step's loss, so what is not finite may come from them.
        return [*batch.tokens.sequences(), *batch.mismatched.sequences()]


def reference_logprobs(
    objects: ObjectStore,
    reference: ContentId,
    documents: Sequence[Document],
    load: Callable[[], nn.Module],
    *,
    precision: str,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> Tensor:
    """[R] float32: summed log-probability (nats) of every branch after its prefix, in order.

    ``load`` gives the policy with content id ``reference``; it is called only where something is not in the store yet.
    Collective. Raises Fatal where a log-probability is not finite.
    """
    policy: nn.Module | None = None
    found: list[float] = []
    for start in range(0, len(documents), CHUNK_DOCUMENTS):
        chunk = documents[start : start + CHUNK_DOCUMENTS]
        tokens = [[document.prefix, *document.branches] for document in chunk]
        ref = f"reference-logprobs/{content_id('reference-logprobs/2', [reference, precision, tokens])}"
        values = _kept(objects, ref)
        if not all_ranks(values is not None, device):
            policy = policy or load()
            with torch.no_grad(), autocast():
                values = _computed(policy, list(_batches(chunk)), device)
            if not all(map(math.isfinite, values)):
                raise Fatal(f"reference model {reference.short} gives log-probabilities that are not finite")
            if is_first():
                objects.set_ref(ref, objects.put_json(values))
        assert values is not None, "kept everywhere, or computed"
        found += values
    return torch.tensor(found, dtype=torch.float32)


def _kept(objects: ObjectStore, ref: str) -> list[float] | None:
    kept = objects.cached_bytes(ref)
    return None if kept is None else json.loads(kept)


def _computed(policy: nn.Module, batches: Sequence[Sequence[Document]], device: torch.device) -> list[float]:
    """Of all batches in order; each is computed by one rank."""
    parts = [torch.zeros(sum(len(document.branches) for document in batch), device=device) for batch in batches]
    for number, counts in split_across_ranks(range(len(batches))):
        sums = _sums(policy, batches[number], device)
        if counts:
            parts[number] = sums
    return all_reduce_sum(torch.cat(parts)).tolist()


def _sums(policy: nn.Module, documents: Sequence[Document], device: torch.device) -> Tensor:
    batch = pack_branches(documents).to(device)
    return batch.row_sums(policy(batch).logprobs).float()


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Neighbours of up to BATCH_TOKENS together, at least one document each."""
    batch: list[Document] = []
    tokens = 0
    for document in documents:
        size = len(document.prefix) + sum(map(len, document.branches))
        if batch and tokens + size > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(document)
        tokens += size
    if batch:
        yield batch
