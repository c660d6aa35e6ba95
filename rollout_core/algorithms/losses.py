"""Losses of post-training as pure functions of tensors: nothing here knows of models, data or distribution.

Log-probabilities are in nats. A mask says True where a token is real and trained; whatever a tensor holds elsewhere,
NaN included, changes neither a value nor a gradient, and a mask without any True gives 0 with a zero gradient. B counts
sequences, T tokens, V the vocabulary. Half-precision logits are reduced in float32.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_core.base.errors import ConfigError, RolloutError

IGNORED_LABEL = -100
"""Label of a token that is not trained."""

CHUNK_ELEMENTS = 2**20
"""Logits reduced at a time by `selected_logprobs` on a CPU: temporaries that stay in its cache are twice as fast."""

CHUNK_ELEMENTS_ACCELERATOR = 2**25
"""The same elsewhere: 128 MiB at a time, so that launching kernels costs nothing beside running them."""

MAX_LOG_RATIO = 80.0
"""exp of this is finite in float32; past it, the zero gradient of a clipped token would become 0 * inf = NaN."""


class ShapeError(RolloutError, ValueError):
    """Tensors that belong together differ in shape."""


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
    """Share of tokens whose ratio is clipped at any end, so that they give no gradient through it."""
    clip_fraction_low: Tensor
    """Share of tokens clipped at 1 - clip_low (negative advantage)."""
    clip_fraction_high: Tensor
    """Share of tokens clipped at 1 + clip_high (positive advantage)."""
    clip_fraction_dual: Tensor
    """Share of tokens clipped at dual_clip (negative advantage)."""
    approx_kl: Tensor
    """Mean k3 estimate of KL(old policy || policy)."""
    kl: Tensor
    """Mean k3 estimate of KL(policy || reference); 0 without a reference."""


def selected_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target under its row of logits.

    logits[n, targets[n]] - logsumexp(logits[n]); 0 where targets[n] is -100, and that row is never read.
    logits: [N,V] float; targets: [N] int64. Returns [N], float32 for half-precision logits, else their own dtype.
    Beside the gradient itself, neither pass allocates more than a few chunks of logits. First derivatives only.
    Raises ShapeError if the shapes do not fit.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ShapeError(
            f"selected_logprobs: logits {_shape(logits)} and targets {_shape(targets)}; expected [N,V], [N]"
        )
    return _SelectedLogprobs.apply(logits, targets)  # pyright: ignore[reportReturnType]


class _SelectedLogprobs(torch.autograd.Function):
    """Autograd's own gather and logsumexp would hold three more tensors of the size of the logits in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows = (targets != IGNORED_LABEL).nonzero().squeeze(1)
        selected = torch.zeros_like(targets, dtype=torch.promote_types(logits.dtype, torch.float32))
        maxima, logsums = torch.zeros_like(selected), torch.zeros_like(selected)
        for chunk in _row_chunks(rows, logits):
            part = logits[chunk].to(selected.dtype)
            maxima[chunk] = part.amax(dim=1)
            # Subtracting the maximum before the sum, not after, keeps the last digits when logits are large.
            part -= maxima[chunk, None]
            selected[chunk] = part.gather(1, targets[chunk, None]).squeeze(1)
            logsums[chunk] = part.exp_().sum(dim=1).log()
        ctx.save_for_backward(logits, targets, rows, maxima, logsums)
        return selected - logsums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, targets, rows, maxima, logsums = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for chunk in _row_chunks(rows, logits):
            upstream = grad_output[chunk]
            part = logits[chunk].to(logsums.dtype)
            part.sub_(maxima[chunk, None]).sub_(logsums[chunk, None]).exp_().mul_(-upstream[:, None])
            part[torch.arange(len(chunk), device=part.device), targets[chunk]] += upstream
            grad[chunk] = part.to(grad.dtype)
        return grad, None


def _row_chunks(rows: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    return rows.split(max(1, elements // logits.shape[1])) if len(rows) else ()


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of every label, given the tokens before it.

    out[b, t] = log softmax(logits[b, t])[labels[b, t + 1]]; 0 where that label is -100.
    logits: [B,T,V] float, as the model gives them; labels: [B,T] int64, -100 = not wanted. Returns [B,T-1].
    No denominator. Raises ShapeError if the shapes do not fit.
    """
    return _next_token_logprobs("token_logprobs", logits, labels)[:, :-1]


def sft_loss(logits: Tensor, labels: Tensor, *, num_items: int | float | Tensor | None = None) -> Tensor:
    """Negative log-likelihood of the trained tokens.

    -sum over trained t of log p(labels[b, t] | tokens before t) / num_items; next-token cross entropy, as in
    arXiv:2203.02155, section 3.5.
    logits: [B,T,V] float, as the model gives them; labels: [B,T] int64, -100 = not trained. The shift is made here.
    Denominator: ``num_items``, which for gradient accumulation is the number of trained tokens of the whole window
    (labels after the first position of a row); default: that number of this batch.
    Raises ShapeError if the shapes do not fit, ConfigError if ``num_items`` is not positive though tokens are trained.
    """
    logprobs = _next_token_logprobs("sft_loss", logits, labels)
    num_trained = int((labels[:, 1:] != IGNORED_LABEL).sum())
    if num_trained == 0:
        return -logprobs.sum()
    if num_items is not None and num_items <= 0:
        raise ConfigError(f"sft_loss: num_items is {num_items}, but {num_trained} tokens are trained")
    return -logprobs.sum() / (num_trained if num_items is None else num_items)


def _next_token_logprobs(caller: str, logits: Tensor, labels: Tensor) -> Tensor:
    """[B,T]; the last column is 0. Labels are shifted instead of logits, which spares a copy of the logits."""
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ShapeError(f"{caller}: logits {_shape(logits)} and labels {_shape(labels)}; expected [B,T,V] and [B,T]")
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return selected_logprobs(logits.flatten(0, 1), next_labels.flatten()).view(labels.shape)


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Mean loss of a reward model over B pairs; 0 for none.

    -log sigmoid(chosen - rejected - margin); arXiv:2203.02155, eq. 1; margin: arXiv:2307.09288, eq. 2.
    chosen, rejected: [B] float32 scores; margin: [B], by how much the chosen one is better, or None for 0.
    Denominator: B. Raises ShapeError if the shapes differ.
    """
    _require_same_shape("bradley_terry_loss", 1, chosen=chosen, rejected=rejected, margin=margin)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return _mean(-F.logsigmoid(difference))


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean DPO loss over B pairs; 0 for none.

    With h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected) and s = label_smoothing:
    -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h); arXiv:2305.18290, eq. 7.
    The smoothing, for preferences flipped with probability s, is Mitchell's conservative DPO (2023).
    All inputs: [B] float32, response log-probability summed over tokens (nats).
    Denominator: B. Raises ShapeError if the shapes differ.
    """
    margin = beta * _log_ratio_margin("dpo_loss", policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return _mean(-(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin))


def ipo_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> Tensor:
    """Mean IPO loss over B pairs; 0 for none.

    (h - 1 / (2 beta))^2 with h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected); arXiv:2310.12036,
    eq. 17, whose tau is beta here.
    All inputs: [B] float32, response log-probability averaged over its own tokens (nats). That is a deviation from the
    paper, which sums; with sums the target 1 / (2 beta) would not fit responses of different lengths.
    Denominator: B. Raises ShapeError if the shapes differ.
    """
    margin = _log_ratio_margin("ipo_loss", policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return _mean((margin - 1 / (2 * beta)) ** 2)


def _log_ratio_margin(
    caller: str, policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    _require_same_shape(
        caller,
        1,
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)


def kto_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Mean KTO loss over C desirable and R undesirable completions; 0 for none.

    With z = max(kl, 0), which carries no gradient:
    desirable: desirable_weight (1 - sigmoid(beta (policy_chosen - ref_chosen - z)));
    undesirable: undesirable_weight (1 - sigmoid(beta (z - (policy_rejected - ref_rejected))));
    arXiv:2402.01306, section 4.1, L_KTO.
    policy_chosen, ref_chosen: [C]; policy_rejected, ref_rejected: [R]; float32, summed log-probabilities (nats); either
    may be empty. kl: scalar, mean log-ratio of mismatched prompt and completion pairs.
    Denominator: C + R. Raises ShapeError if the shapes do not fit.
    """
    _require_same_shape("kto_loss", 1, policy_chosen=policy_chosen, ref_chosen=ref_chosen)
    _require_same_shape("kto_loss", 1, policy_rejected=policy_rejected, ref_rejected=ref_rejected)
    baseline = torch.as_tensor(kl, dtype=policy_chosen.dtype, device=policy_chosen.device).detach().clamp(min=0)
    if baseline.numel() != 1:
        raise ShapeError(f"kto_loss: kl is {_shape(baseline)}, expected a scalar")
    desirable = desirable_weight * torch.sigmoid(-beta * (policy_chosen - ref_chosen - baseline))
    undesirable = undesirable_weight * torch.sigmoid(-beta * (baseline - (policy_rejected - ref_rejected)))
    return _mean(torch.cat([desirable, undesirable]))


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate loss of PPO.

    max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip)) with ratio = exp(logprobs - old_logprobs); arXiv:1707.06347,
    eq. 7, negated. With ``dual_clip`` c, where A < 0: the lesser of that and -A c; arXiv:1912.09729, dual-clip PPO,
    negated.
    logprobs, old_logprobs, advantages: [B,T] float32; mask: [B,T] bool, True = real token.
    Denominator: number of real tokens of the batch. Raises ShapeError if the shapes differ, ConfigError for a
    ``dual_clip`` within the clip range.
    """
    _require_same_shape(
        "ppo_policy_loss", 2, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask
    )
    mask, (logprobs, old_logprobs, advantages) = _drop_masked(mask, logprobs, old_logprobs, advantages)
    token = _clipped_surrogate(logprobs, old_logprobs, advantages, clip, clip, dual_clip)
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
    _require_same_shape("ppo_value_loss", 2, values=values, old_values=old_values, returns=returns, mask=mask)
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
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo",
    max_completion_length: int | None = None,
) -> GroupPolicyLoss:
    """Clipped surrogate loss of GRPO and its kin, with an optional KL penalty to a reference policy.

    Per token: max(-A ratio, -A clamp(ratio, 1 - clip_low, 1 + clip_high)) + beta k3(logprobs, ref_logprobs), with
    ratio = exp(logprobs - old_logprobs); arXiv:2402.03300, eq. 3 and 4, negated; clip_high above clip_low:
    arXiv:2503.14476, eq. 10. The KL is not weighted by the ratio. With ``dual_clip`` c, where A < 0: the lesser of the
    surrogate and -A c; arXiv:1912.09729, dual-clip PPO, negated.
    logprobs, old_logprobs, ref_logprobs: [B,T] float32; advantages: [B] or [B,T] float32; mask: [B,T] bool, True = real
    completion token.
    Denominator, by loss_type:
    ``grpo``: each sequence's own number of tokens, then B (eq. 3; a sequence without tokens counts as 0);
    ``dr_grpo``: B * max_completion_length, whatever T is padded to (arXiv:2503.20783, section 3.2);
    ``dapo`` and ``bnpo``: number of real tokens of the batch (arXiv:2503.14476, eq. 12). They differ only when a batch
    is split for gradient accumulation: with dapo the caller weighs each part by its share of the tokens.
    Raises ShapeError if the shapes differ, ConfigError where a needed argument is missing or ``dual_clip`` is within
    the clip range.
    """
    _require_same_shape(
        "grpo_loss", 2, logprobs=logprobs, old_logprobs=old_logprobs, mask=mask, ref_logprobs=ref_logprobs
    )
    if advantages.dim() == 1 and len(advantages) == len(logprobs):
        advantages = advantages[:, None].expand_as(logprobs)
    _require_same_shape("grpo_loss", 2, logprobs=logprobs, advantages=advantages)
    if beta != 0 and ref_logprobs is None:
        raise ConfigError(f"grpo_loss: beta is {beta}, which needs ref_logprobs")

    mask, (logprobs, old_logprobs, advantages) = _drop_masked(mask, logprobs, old_logprobs, advantages)
    token = _clipped_surrogate(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip)
    kl_BT = torch.zeros_like(token.loss)
    if ref_logprobs is not None:
        kl_BT = kl_estimate(logprobs, ref_logprobs.masked_fill(~mask, 0.0))
    return GroupPolicyLoss(
        loss=_group_reduce(token.loss + beta * kl_BT, mask, loss_type, max_completion_length),
        clip_fraction=_masked_mean(token.low | token.high | token.dual, mask),
        clip_fraction_low=_masked_mean(token.low, mask),
        clip_fraction_high=_masked_mean(token.high, mask),
        clip_fraction_dual=_masked_mean(token.dual, mask),
        approx_kl=_masked_mean(kl_estimate(old_logprobs, logprobs), mask).detach(),
        kl=_masked_mean(kl_BT, mask).detach(),
    )


def _group_reduce(loss_BT: Tensor, mask: Tensor, loss_type: str, max_completion_length: int | None) -> Tensor:
    if loss_type == "grpo":
        return _mean(loss_BT.sum(1) / mask.sum(1).clamp(min=1))
    if loss_type in ("bnpo", "dapo"):
        return _masked_mean(loss_BT, mask)
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            raise ConfigError(
                f"grpo_loss: dr_grpo divides by max_completion_length, a positive number; got {max_completion_length}"
            )
        return _mean(loss_BT.sum(1) / max_completion_length)
    raise ConfigError(f"grpo_loss: loss_type is {loss_type!r}; expected grpo, bnpo, dr_grpo or dapo")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimate of KL(policy || reference) from tokens sampled by the policy, one per token.

    With log r = ref_logprobs - logprobs: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r; Schulman,
    "Approximating KL divergence" (2020); k3 is arXiv:2402.03300, eq. 4.
    k1 and k3 are unbiased, k2 and k3 never negative.
    logprobs, ref_logprobs: one shape, float32, nats. Returns that shape; no denominator.
    Raises ShapeError if the shapes differ, ConfigError for another kind.
    """
    _require_same_shape("kl_estimate", None, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = ref_logprobs - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * log_r**2
    if kind == "k3":
        return torch.expm1(log_r.clamp(max=MAX_LOG_RATIO)) - log_r
    raise ConfigError(f"kl_estimate: kind is {kind!r}; expected k1, k2 or k3")


class _TokenSurrogate(NamedTuple):
    """Loss of each token, and where it is clipped: at 1 - clip_low, at 1 + clip_high, at dual_clip. All [B,T]."""

    loss: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def _clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> _TokenSurrogate:
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    if dual_clip is None:
        return _TokenSurrogate(loss, low, high, torch.zeros_like(low))
    if dual_clip <= 1 + clip_high:
        raise ConfigError(f"dual_clip is {dual_clip}, within the clip range; expected more than {1 + clip_high}")
    dual = (ratio > dual_clip) & (advantages < 0)
    return _TokenSurrogate(torch.where(dual, -advantages * dual_clip, loss), low, high, dual)


def _drop_masked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask as booleans, and the tensors with 0 where it is False: 0 * NaN would be NaN, in gradients too."""
    mask = mask.bool()
    return mask, tuple(tensor.masked_fill(~mask, 0.0) for tensor in tensors)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)


def _require_same_shape(caller: str, dimensions: int | None, **tensors: Tensor | None) -> None:
    """Raises ShapeError unless the tensors that are given have one shape, of ``dimensions`` axes where that is set."""
    shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or dimensions not in (None, len(first)):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        expected = "one shape" if dimensions is None else f"one shape of {dimensions} axes"
        raise ShapeError(f"{caller}: {listed}; expected {expected}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
