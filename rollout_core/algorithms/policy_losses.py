"""Policy-gradient losses as pure functions of tensors; the conventions are those of `losses`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollout_core.algorithms.losses import mean_of, require_same_shape
from rollout_core.base.errors import ConfigError

MAX_LOG_RATIO = 80.0
"""exp of this is finite in float32; past it, the zero gradient of a clipped token would become 0 * inf = NaN."""


SurrogateName = Literal["grpo", "gspo", "cispo", "reinforce"]
TokenLoss = Callable[..., Tensor]
"""What each token adds to a policy's loss, [B,T], by ``(logprobs, old_logprobs, ref_logprobs, advantages, mask)``, all
[B,T] and 0 outside the mask; ``ref_logprobs`` may be None."""


class PolicyLoss(NamedTuple):
    """Result of `ppo_policy_loss`; all scalars, the figures without gradient."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens whose ratio is clipped, so that they give no gradient."""
    clip_fraction_dual: Tensor
    """Of those, tokens of a negative advantage whose ratio is above ``dual_clip``."""
    approx_kl: Tensor
    """Mean k3 estimate of KL(old policy || policy)."""


class ValueLoss(NamedTuple):
    """Result of `ppo_value_loss`; all scalars, the figure without gradient."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens where the clipped error is the larger one."""


class GroupPolicyLoss(NamedTuple):
    """Result of `grpo_loss`; all scalars, the figures without gradient."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens whose ratio is clipped at any end, so that they give no gradient through it; with cispo, whose
    weight is."""
    clip_fraction_low: Tensor
    """Share of tokens clipped at 1 - clip_low (negative advantage; with cispo any)."""
    clip_fraction_high: Tensor
    """Share of tokens clipped at 1 + clip_high (positive advantage; with cispo any)."""
    clip_fraction_dual: Tensor
    """Share of tokens clipped at dual_clip (negative advantage)."""
    approx_kl: Tensor
    """Mean k3 estimate of KL(old policy || policy)."""
    kl: Tensor
    """Mean k3 estimate of KL(policy || reference); 0 without a reference."""


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    loss: TokenLoss | None = None,
) -> PolicyLoss:
    """Clipped surrogate loss of PPO, or another ``loss`` in its place, which alone reads ``ref_logprobs``.

    max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip)) with ratio = exp(logprobs - old_logprobs); arXiv:1707.06347,
    eq. 7, negated. With ``dual_clip`` c, where A < 0: the lesser of that and -A c; arXiv:1912.09729, dual-clip PPO,
    negated.
    logprobs, old_logprobs, advantages: [B,T] float32; mask: [B,T] bool, True = real token.
    Denominator: number of real tokens of the batch. Raises ShapeError if the shapes differ, ConfigError for a
    ``dual_clip`` within the clip range.
    """
    require_same_shape(
        "ppo_policy_loss", 2, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask
    )
    mask, (logprobs, old_logprobs, advantages) = _drop_masked(mask, logprobs, old_logprobs, advantages)
    if loss is None:
        token = _clipped_surrogate(logprobs, old_logprobs, advantages, clip, clip, dual_clip)
    else:
        token = _own_surrogate(loss, logprobs, old_logprobs, ref_logprobs, advantages, mask)
    return PolicyLoss(
        loss=_masked_mean(token.loss, mask),
        clip_fraction=_masked_mean(token.low | token.high | token.dual, mask),
        clip_fraction_dual=_masked_mean(token.dual, mask),
        approx_kl=_masked_mean(kl_estimate(old_logprobs, logprobs), mask).detach(),
    )


def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.2
) -> ValueLoss:
    """Clipped value loss of PPO.

    0.5 max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2); arXiv:2005.12729, section 3.
    values, old_values, returns: [B,T] float32; mask: [B,T] bool, True = real token.
    Denominator: number of real tokens of the batch. Raises ShapeError if the shapes differ.
    """
    require_same_shape("ppo_value_loss", 2, values=values, old_values=old_values, returns=returns, mask=mask)
    mask, (values, old_values, returns) = _drop_masked(mask, values, old_values, returns)
    plain_BT = (values - returns) ** 2
    clipped_BT = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    loss = 0.5 * _masked_mean(torch.maximum(plain_BT, clipped_BT), mask)
    return ValueLoss(loss, clip_fraction=_masked_mean(clipped_BT > plain_BT, mask))


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    loss: SurrogateName | TokenLoss = "grpo",
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo",
    max_completion_length: int | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> GroupPolicyLoss:
    """Surrogate loss of GRPO and its kin, with an optional KL penalty to a reference policy and entropy bonus.

    Per token: surrogate + beta k3(logprobs, ref_logprobs) - entropy_coef entropy; arXiv:2402.03300, eq. 3 and 4,
    negated. The surrogate is what ``loss`` names, as `surrogate_of` says, or is. The KL is not weighted by the ratio.
    logprobs, old_logprobs, ref_logprobs, entropy: [B,T] float32, nats; advantages: [B] or [B,T] float32; mask: [B,T]
    bool, True = real completion token.
    Denominator, by loss_type:
    ``grpo``: each sequence's own number of tokens, then B (eq. 3; a sequence without tokens counts as 0);
    ``dr_grpo``: B * max_completion_length, whatever T is padded to (arXiv:2503.20783, section 3.2);
    ``dapo`` and ``bnpo``: number of real tokens of the batch (arXiv:2503.14476, eq. 12). They differ only when a batch
    is split for gradient accumulation: with dapo the caller weighs each part by its share of the tokens.
    Raises ShapeError if the shapes differ, ConfigError where an argument is missing or ``dual_clip`` does not fit.
    """
    require_same_shape(
        "grpo_loss", 2, logprobs=logprobs, old_logprobs=old_logprobs, mask=mask, ref_logprobs=ref_logprobs,
        entropy=entropy,
    )  # fmt: skip
    if advantages.dim() == 1 and len(advantages) == len(logprobs):
        advantages = advantages[:, None].expand_as(logprobs)
    require_same_shape("grpo_loss", 2, logprobs=logprobs, advantages=advantages)
    if (beta != 0 and ref_logprobs is None) or (entropy_coef != 0 and entropy is None):
        missing = f"beta is {beta}, which needs ref_logprobs" if entropy_coef == 0 else "entropy_coef needs entropy"
        raise ConfigError(f"grpo_loss: {missing}")

    mask, (logprobs, old_logprobs, advantages) = _drop_masked(mask, logprobs, old_logprobs, advantages)
    if callable(loss):
        token = _own_surrogate(loss, logprobs, old_logprobs, ref_logprobs, advantages, mask)
    else:
        token = surrogate_of(loss, logprobs, old_logprobs, advantages, mask, (clip_low, clip_high), dual_clip)
    kl_BT, bonus_BT = torch.zeros_like(token.loss), 0.0
    if ref_logprobs is not None:
        kl_BT = kl_estimate(logprobs, ref_logprobs.masked_fill(~mask, 0.0))
    if entropy is not None:
        bonus_BT = entropy_coef * entropy.masked_fill(~mask, 0.0)
    return GroupPolicyLoss(
        loss=_group_reduce(token.loss + beta * kl_BT - bonus_BT, mask, loss_type, max_completion_length),
        clip_fraction=_masked_mean(token.low | token.high | token.dual, mask),
        clip_fraction_low=_masked_mean(token.low, mask),
        clip_fraction_high=_masked_mean(token.high, mask),
        clip_fraction_dual=_masked_mean(token.dual, mask),
        approx_kl=_masked_mean(kl_estimate(old_logprobs, logprobs), mask).detach(),
        kl=_masked_mean(kl_BT, mask).detach(),
    )


def surrogate_of(
    loss: SurrogateName,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> TokenSurrogate:
    """What each token adds to a policy-gradient loss, and where its ratio is clipped; all [B,T], 0 outside the mask.

    With ratio r = exp(logprobs - old_logprobs), clip = (low, high), sg = without gradient, A = advantages:
    ``grpo``: max(-A r, -A clamp(r, 1 - low, 1 + high)), arXiv:2402.03300, eq. 3; high above low: arXiv:2503.14476,
    eq. 10. With ``dual_clip`` c, where A < 0: the lesser of that and -A c, arXiv:1912.09729.
    ``gspo``: the same with one ratio for all tokens of a sequence, s = exp(mean over its tokens of log r),
    arXiv:2507.18071, eq. 5 to 7; as s_t = sg(s) exp(logprobs - sg(logprobs)), its token-level form, which has the same
    value and gradient and allows an advantage for each token.
    ``cispo``: -sg(clamp(r, 1 - low, 1 + high)) A logprobs: the weight is clipped, so every token keeps its gradient;
    arXiv:2506.13585, eq. 4 and 5.
    ``reinforce``: -A logprobs, without a ratio, as RLOO has it for samples of the policy itself; arXiv:2402.14740.
    No denominator. Raises ConfigError for an unknown name, or a ``dual_clip`` within the clip range or without one.
    """
    low, high = clip
    if loss in ("cispo", "reinforce") and dual_clip is not None:
        raise ConfigError(f"dual_clip bounds a clipped surrogate, which {loss} has not; leave it out")
    if loss == "grpo":
        return _clipped_surrogate(logprobs, old_logprobs, advantages, low, high, dual_clip)
    if loss == "gspo":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        mean_log_ratio = (logprobs - old_logprobs).sum(1, keepdim=True) / lengths
        # A log-ratio of sg(mean) + (logprobs - sg(logprobs)): the sequence's value, the token's gradient.
        moved = mean_log_ratio.detach() + (logprobs - logprobs.detach())
        return _clipped_surrogate(moved, torch.zeros_like(moved), advantages, low, high, dual_clip)
    none = torch.zeros_like(mask)
    if loss == "reinforce":
        return TokenSurrogate(-advantages * logprobs, none, none, none)
    if loss == "cispo":
        ratio = torch.exp((logprobs - old_logprobs).detach().clamp(max=MAX_LOG_RATIO))
        weights = ratio.clamp(1 - low, 1 + high)
        return TokenSurrogate(-weights * advantages * logprobs, ratio < 1 - low, ratio > 1 + high, none)
    raise ConfigError(f"grpo_loss: loss is {loss!r}; expected grpo, gspo, cispo or reinforce")


def _group_reduce(loss_BT: Tensor, mask: Tensor, loss_type: str, max_completion_length: int | None) -> Tensor:
    if loss_type == "grpo":
        return mean_of(loss_BT.sum(1) / mask.sum(1).clamp(min=1))
    if loss_type in ("bnpo", "dapo"):
        return _masked_mean(loss_BT, mask)
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            raise ConfigError(
                f"grpo_loss: dr_grpo divides by max_completion_length, a positive number; got {max_completion_length}"
            )
        return mean_of(loss_BT.sum(1) / max_completion_length)
    raise ConfigError(f"grpo_loss: loss_type is {loss_type!r}; expected grpo, bnpo, dr_grpo or dapo")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimate of KL(policy || reference) from tokens sampled by the policy, one per token.

    With log r = ref_logprobs - logprobs: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r; Schulman,
    "Approximating KL divergence" (2020); k3 is arXiv:2402.03300, eq. 4.
    k1 and k3 are unbiased, k2 and k3 never negative.
    logprobs, ref_logprobs: one shape, float32, nats. Returns that shape; no denominator.
    Raises ShapeError if the shapes differ, ConfigError for another kind.
    """
    require_same_shape("kl_estimate", None, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = ref_logprobs - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * log_r**2
    if kind == "k3":
        return torch.expm1(log_r.clamp(max=MAX_LOG_RATIO)) - log_r
    raise ConfigError(f"kl_estimate: kind is {kind!r}; expected k1, k2 or k3")


class TokenSurrogate(NamedTuple):
    """Loss of each token, and where it is clipped: at 1 - clip_low, at 1 + clip_high, at dual_clip. All [B,T]."""

    loss: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def _own_surrogate(
    loss: TokenLoss,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> TokenSurrogate:
    """Nothing of it counts as clipped."""
    held_to = None if ref_logprobs is None else ref_logprobs.masked_fill(~mask, 0.0)
    found = loss(logprobs, old_logprobs, held_to, advantages, mask)
    none = torch.zeros_like(mask)
    return TokenSurrogate(found.masked_fill(~mask, 0.0), none, none, none)


def _clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenSurrogate:
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    if dual_clip is None:
        return TokenSurrogate(loss, low, high, torch.zeros_like(low))
    if dual_clip <= 1 + clip_high:
        raise ConfigError(f"dual_clip is {dual_clip}, within the clip range; expected more than {1 + clip_high}")
    dual = (ratio > dual_clip) & (advantages < 0)
    return TokenSurrogate(torch.where(dual, -advantages * dual_clip, loss), low, high, dual)


def _drop_masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask as booleans, and the tensors with 0 where it is False: 0 * NaN would be NaN, in gradients too."""
    mask = mask.bool()
    return mask, tuple(tensor.masked_fill(~mask, 0.0) for tensor in tensors)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)
