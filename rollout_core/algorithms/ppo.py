"""Proximal policy optimization on whole completions (arXiv:1707.06347; for language models arXiv:1909.08593).

An action is a token, a state its prefix. The reward of token t is -kl_coef * (log pi_old - log pi_ref); the last token
also gets the score of the completion. Values come from a linear head on the policy's trunk, advantages from GAE. Old
log-probabilities are the engine's own: they belong to the distribution the tokens were drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_core.algorithms.advantages import gae, masked_whiten
from rollout_core.algorithms.data import epoch_order
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import ppo_policy_loss, ppo_value_loss
from rollout_core.algorithms.packing import pack_completions
from rollout_core.algorithms.policy import Policy
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
    """N trajectories; tensors are right-padded to C, the longest completion."""

    prompts: tuple[Sequence[int], ...]
    completions: tuple[Sequence[int], ...]
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
        width = int(mask.sum(1).max())
        return PolicyBatch(
            tuple(self.prompts[row] for row in index),
            tuple(self.completions[row] for row in index),
            mask[:, :width],
            self.old_logprobs[chosen, :width],
            self.scores[chosen],
        )

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


def build_batch(trajectories: Sequence[Trajectory], *, missing_eos_penalty: float) -> PolicyBatch:
    """Trajectories as tensors."""
    lengths = torch.tensor([len(item.token_ids) for item in trajectories])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    old_logprobs = torch.zeros(mask.shape)
    for row, item in enumerate(trajectories):
        old_logprobs[row, : len(item.token_ids)] = torch.tensor(item.logprobs, dtype=torch.float32)
    return PolicyBatch(
        tuple(item.prompt_token_ids for item in trajectories),
        tuple(item.token_ids for item in trajectories),
        mask,
        old_logprobs,
        torch.tensor([item.score - missing_eos_penalty * item.truncated for item in trajectories]).float(),
    )


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
class CompletionOutput:
    """What one forward pass says of a batch's completion tokens; all [N,C] float32, 0 where no token stands."""

    logprobs: Tensor
    values: Tensor | None
    entropy: Tensor


def completion_forward(
    policy: Policy, batch: PolicyBatch, *, temperature: float, device: torch.device
) -> CompletionOutput:
    """Log-probabilities and entropies (after temperature, nats) and state values of every completion token."""
    tokens = pack_completions(batch.prompts, batch.completions).to(device)
    found = policy(tokens, temperature=temperature, entropy=True)
    values = None if found.values is None else tokens.padded(found.values)
    return CompletionOutput(tokens.padded(found.logprobs), values, tokens.padded(found.entropy))


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
    policy: Policy,
    reference: Policy,
    batch: PolicyBatch,
    settings: PPOSettings,
    *,
    kl_coef: float,
    device: torch.device,
) -> Credit:
    """Score, penalise and discount: from completions and scores to advantages and returns. No gradient."""
    temperature = settings.sampling.temperature
    ref_logprobs, policy_logprobs, old_values, entropy = (torch.zeros(batch.mask.shape) for _ in range(4))
    with torch.no_grad():
        for start in range(0, len(batch.mask), settings.minibatch_size):
            rows = list(range(start, min(start + settings.minibatch_size, len(batch.mask))))
            part = batch.rows(rows)
            own = completion_forward(policy, part, temperature=temperature, device=device)
            other = completion_forward(reference, part, temperature=temperature, device=device)
            span = slice(start, start + len(rows)), slice(0, part.mask.shape[1])
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
        policy: Policy,
        batch: PolicyBatch,
        credit: Credit,
        settings: PPOSettings,
        *,
        first_step: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._policy = policy
        self._batch = batch
        self._credit = credit
        self._settings = settings
        self._first_step = first_step
        self._seed = seed
        self._device = device
        self._steps_per_epoch = steps_per_epoch(settings, len(batch.mask))
        self.num_steps = first_step + settings.epochs * self._steps_per_epoch

    def minibatches(self, step: int) -> list[PPOMinibatch]:
        epoch, offset = divmod(step - self._first_step, self._steps_per_epoch)
        order = epoch_order(len(self._batch.mask), seed=self._seed, epoch=self._first_step + epoch)
        size, count = self._settings.minibatch_size, self._settings.gradient_accumulation
        chosen = order[offset * size * count : (offset + 1) * size * count]
        return [self._minibatch(chosen[start : start + size]) for start in range(0, len(chosen), size)]

    def _minibatch(self, rows: list[int]) -> PPOMinibatch:
        part = self._batch.rows(rows)
        width = part.mask.shape[1]
        credit = self._credit
        return PPOMinibatch(
            part, credit.advantages[rows, :width], credit.returns[rows, :width], credit.old_values[rows, :width]
        )

    def loss(self, batch: PPOMinibatch, step_batches: Sequence[PPOMinibatch]) -> MinibatchLoss:
        settings, part = self._settings, batch.batch
        output = completion_forward(self._policy, part, temperature=settings.sampling.temperature, device=self._device)
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
