"""Proximal policy optimization on whole completions (arXiv:1707.06347; for language models arXiv:1909.08593).

An action is a token, a state its prefix. The reward of token t is -kl_coef * (log pi_old - log pi_ref); the last token
also gets the score of the completion. Values come from a linear head on the policy's trunk, advantages from GAE. Old
log-probabilities are the engine's own: they belong to the distribution the tokens were drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.algorithms.advantages import gae, masked_whiten
from rollout_core.algorithms.data import epoch_order
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import ppo_policy_loss, ppo_value_loss
from rollout_core.config import AdaptiveKL, PPOSettings
from rollout_core.errors import Fatal

VALUE_HEAD = "value_head"


@dataclass(frozen=True)
class Trajectory:
    """A prompt, what the engine made of it, and its score."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each generated token under the distribution it was drawn from, nats."""
    score: float
    truncated: bool
    """Cut at the length limit instead of ended by the policy."""


@dataclass(frozen=True)
class PolicyBatch:
    """Trajectories as tensors: N sequences of T tokens, of which the last up to C are the completion."""

    input_ids: Tensor
    """[N,T] int64, right-padded."""
    first: Tensor
    """[N] int64: position of the first completion token."""
    actions: Tensor
    """[N,C] int64: completion tokens, right-padded."""
    mask: Tensor
    """[N,C] bool, True = real completion token."""
    old_logprobs: Tensor
    """[N,C] float32."""
    scores: Tensor
    """[N] float32: what the policy is rewarded for the whole completion."""

    def rows(self, index: Sequence[int]) -> PolicyBatch:
        """The given trajectories, without the padding they do not need."""
        chosen = torch.as_tensor(index)
        mask = self.mask[chosen]
        width = max(1, int(mask.sum(1).max()))
        length = int((self.first[chosen] + mask.sum(1)).max())
        return PolicyBatch(
            self.input_ids[chosen, :length],
            self.first[chosen],
            self.actions[chosen, :width],
            mask[:, :width],
            self.old_logprobs[chosen, :width],
            self.scores[chosen],
        )

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return int((self.first + self.mask.sum(1)).sum())


def build_batch(trajectories: Sequence[Trajectory], *, pad_token_id: int, missing_eos_penalty: float) -> PolicyBatch:
    """Pad trajectories into tensors."""
    longest = max(len(item.prompt_token_ids) + len(item.token_ids) for item in trajectories)
    width = max(len(item.token_ids) for item in trajectories)
    input_ids = torch.full((len(trajectories), longest), pad_token_id, dtype=torch.int64)
    actions = torch.full((len(trajectories), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(trajectories), width), dtype=torch.bool)
    old_logprobs = torch.zeros((len(trajectories), width))
    for row, item in enumerate(trajectories):
        whole = torch.tensor([*item.prompt_token_ids, *item.token_ids])
        count = len(item.token_ids)
        input_ids[row, : len(whole)] = whole
        actions[row, :count] = whole[len(item.prompt_token_ids) :]
        mask[row, :count] = True
        old_logprobs[row, :count] = torch.tensor(item.logprobs, dtype=torch.float32)
    scores = torch.tensor([item.score - missing_eos_penalty * item.truncated for item in trajectories])
    first = torch.tensor([len(item.prompt_token_ids) for item in trajectories])
    return PolicyBatch(input_ids, first, actions, mask, old_logprobs, scores.float())


class KLController:
    """Adaptive KL coefficient: ``coef *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon`` (arXiv:1909.08593, 2.2)."""

    def __init__(self, config: AdaptiveKL, coef: float | None = None) -> None:
        self._config = config
        self.coef = config.init_coef if coef is None else coef

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """React to the mean KL (nats per sequence) of ``num_sequences`` fresh sequences."""
        if self._config.adaptive:
            error = min(max(mean_kl / self._config.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * num_sequences / self._config.horizon


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward pass says of a batch's completion tokens; all [N,C] float32."""

    logprobs: Tensor
    values: Tensor | None
    entropy: Tensor


def policy_forward(
    model: Any, value_head: nn.Module | None, batch: PolicyBatch, *, temperature: float, device: torch.device
) -> PolicyOutput:
    """Log-probabilities and entropies (after temperature, nats) and state values of every completion token.

    The token at position p is predicted from position p - 1, and so is the value of the state it is drawn in.
    Entries where ``batch.mask`` is False are meaningless.
    """
    batch_size, width = batch.actions.shape
    before_NC = (batch.first[:, None] - 1 + torch.arange(width)).clamp(max=batch.input_ids.shape[1] - 1)
    columns = torch.unique(before_NC)
    output = model(
        input_ids=batch.input_ids.to(device),
        logits_to_keep=columns.to(device),
        output_hidden_states=value_head is not None,
        use_cache=False,
    )
    rows = torch.arange(batch_size, device=device)[:, None]
    kept_NC = torch.searchsorted(columns, before_NC).to(device)
    logits_NCV = output.logits[rows, kept_NC].float() / temperature
    logprobs_NCV = torch.log_softmax(logits_NCV, dim=-1)
    logprobs = logprobs_NCV.gather(-1, batch.actions.to(device)[..., None]).squeeze(-1)
    entropy = -(logprobs_NCV.exp() * logprobs_NCV).sum(-1)
    values = None
    if value_head is not None:
        trunk_NCH = output.hidden_states[-1][rows, before_NC.to(device)]
        values = value_head(trunk_NCH.float()).squeeze(-1)
    return PolicyOutput(logprobs, values, entropy)


@dataclass(frozen=True)
class Credit:
    """What an update learns from, fixed before its first step; all [N,C] float32."""

    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    figures: dict[str, float]
    """Means over the batch by the usual names."""
    mean_kl: float
    """KL to the reference, nats per sequence."""


def assign_credit(
    model: Any,
    value_head: nn.Module,
    reference: Any,
    batch: PolicyBatch,
    settings: PPOSettings,
    *,
    kl_coef: float,
    device: torch.device,
) -> Credit:
    """Score, penalise and discount: from completions and scores to advantages and returns. No gradient."""
    temperature = settings.sampling.temperature
    ref_logprobs, policy_logprobs, old_values, entropy = (torch.zeros(batch.actions.shape) for _ in range(4))
    with torch.no_grad():
        for start in range(0, len(batch.actions), settings.minibatch_size):
            rows = list(range(start, min(start + settings.minibatch_size, len(batch.actions))))
            part = batch.rows(rows)
            own = policy_forward(model, value_head, part, temperature=temperature, device=device)
            other = policy_forward(reference, None, part, temperature=temperature, device=device)
            span = slice(start, start + len(rows)), slice(0, part.actions.shape[1])
            ref_logprobs[span], policy_logprobs[span] = other.logprobs.cpu(), own.logprobs.cpu()
            old_values[span], entropy[span] = own.values.cpu(), own.entropy.cpu()  # pyright: ignore[reportOptionalMemberAccess]
    mask = batch.mask
    log_ratio = (batch.old_logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    rewards = -kl_coef * log_ratio
    last = mask.sum(1).clamp(min=1) - 1
    rewards[torch.arange(len(rewards)), last] += batch.scores
    old_values = old_values.masked_fill(~mask, 0.0)
    advantages, returns = gae(rewards, old_values, mask, gamma=settings.gamma, lam=settings.lam)
    if settings.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    lengths = mask.sum(1).float()
    drift = (policy_logprobs - batch.old_logprobs).abs().masked_fill(~mask, 0.0)
    mean_kl = float(log_ratio.sum(1).mean())
    if not math.isfinite(mean_kl):
        raise Fatal(f"KL to the reference policy is {mean_kl}; engine or reference logprobs are not finite")
    figures = {
        "reward": float(batch.scores.mean()),
        "reward_std": float(batch.scores.std()) if len(batch.scores) > 1 else 0.0,
        "objective/kl": mean_kl,
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": float((-kl_coef * log_ratio).sum(1).mean()),
        "entropy": float((entropy * mask).sum() / mask.sum()),
        "completions/mean_length": float(lengths.mean()),
        "sampling/logprob_difference_mean": float(drift.sum() / mask.sum()),
        "sampling/logprob_difference_max": float(drift.max()),
    }
    return Credit(advantages, returns, old_values, figures, mean_kl)


@dataclass(frozen=True)
class PPOMinibatch:
    """Rows of one minibatch with their credit."""

    batch: PolicyBatch
    advantages: Tensor
    returns: Tensor
    old_values: Tensor


class PPO:
    """`Algorithm` of one update: ``epochs`` passes over one iteration's trajectories."""

    name = "ppo"

    def __init__(
        self,
        model: Any,
        value_head: nn.Module,
        batch: PolicyBatch,
        credit: Credit,
        settings: PPOSettings,
        *,
        first_step: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._value_head = value_head
        self._batch = batch
        self._credit = credit
        self._settings = settings
        self._first_step = first_step
        self._seed = seed
        self._device = device
        self._steps_per_epoch = steps_per_epoch(settings, len(batch.actions))
        self.num_steps = first_step + settings.epochs * self._steps_per_epoch

    def minibatches(self, step: int) -> list[PPOMinibatch]:
        epoch, offset = divmod(step - self._first_step, self._steps_per_epoch)
        order = epoch_order(len(self._batch.actions), seed=self._seed, epoch=self._first_step + epoch)
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        chosen = order[offset * size * count : (offset + 1) * size * count]
        return [self._minibatch(chosen[start : start + size]) for start in range(0, len(chosen), size)]

    def _minibatch(self, rows: list[int]) -> PPOMinibatch:
        part = self._batch.rows(rows)
        width = part.actions.shape[1]
        credit = self._credit
        return PPOMinibatch(
            part, credit.advantages[rows, :width], credit.returns[rows, :width], credit.old_values[rows, :width]
        )

    def loss(self, batch: PPOMinibatch, step_batches: Sequence[PPOMinibatch]) -> MinibatchLoss:
        settings, part = self._settings, batch.batch
        output = policy_forward(
            self._model, self._value_head, part, temperature=settings.sampling.temperature, device=self._device
        )
        assert output.values is not None
        mask = part.mask.to(self._device)
        policy = ppo_policy_loss(
            output.logprobs,
            part.old_logprobs.to(self._device),
            batch.advantages.to(self._device),
            mask,
            clip=settings.clip,
        )
        value = ppo_value_loss(
            output.values,
            batch.old_values.to(self._device),
            batch.returns.to(self._device),
            mask,
            clip=settings.value_clip,
        )
        tokens = int(part.mask.sum())
        entropy = (output.entropy * mask).sum() / tokens
        # The losses are means over this minibatch; the step's denominator is its number of tokens over all minibatches.
        share = tokens / sum(int(other.batch.mask.sum()) for other in step_batches)
        total = policy.loss + settings.value_coef * value.loss - settings.entropy_coef * entropy
        return MinibatchLoss(
            share * total,
            {
                "policy_loss": (policy.loss, tokens),
                "value_loss": (value.loss, tokens),
                "clip_ratio/policy": (policy.clip_fraction, tokens),
                "clip_ratio/value": (value.clip_fraction, tokens),
                "approx_kl": (policy.approx_kl, tokens),
            },
        )

    def num_tokens(self, batch: PPOMinibatch) -> int:
        return batch.batch.num_tokens


def steps_per_epoch(settings: PPOSettings, num_trajectories: int) -> int:
    """Optimizer steps of one pass over an iteration's trajectories."""
    return math.ceil(num_trajectories / (settings.minibatch_size * settings.gradient_accumulation))


def steps_per_iteration(settings: PPOSettings) -> int:
    """Optimizer steps of one iteration."""
    trajectories = settings.prompts_per_iteration * settings.samples_per_prompt
    return settings.epochs * steps_per_epoch(settings, trajectories)
