"""Losses of post-training as pure functions of tensors: nothing here knows of models, data or distribution.

Log-probabilities are in nats. A mask says True where a token is real and trained; whatever a tensor holds elsewhere,
NaN included, changes neither a value nor a gradient, and a mask without any True gives 0 with a zero gradient. B counts
sequences, T tokens, V the vocabulary. Half-precision logits are reduced in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
"""The same elsewhere: 128 MiB at a time, so that launching kernels costs nothing against running them."""


class ShapeError(RolloutError, ValueError):
    """Tensors that belong together differ in shape."""


def selected_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target under its row of logits.

    logits[n, targets[n]] - logsumexp(logits[n]); 0 where targets[n] is -100, and that row is never read.
    logits: [N,V] float; targets: [N] int64. Returns [N], float32 for half-precision logits, else their own dtype.
    Besides the gradient itself, neither pass allocates more than a few chunks of logits. First derivatives only.
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
    require_same_shape("bradley_terry_loss", 1, chosen=chosen, rejected=rejected, margin=margin)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return mean_of(-F.logsigmoid(difference))


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
    return mean_of(-(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin))


class OddsRatioLoss(NamedTuple):
    """Result of `orpo_loss`; all scalars, the figures without gradient."""

    loss: Tensor
    nll: Tensor
    """Mean negative log-likelihood of the chosen answers, nats per token."""
    log_odds_ratio: Tensor
    """Mean of the log of the odds ratio of chosen to rejected answer."""


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> OddsRatioLoss:
    """Mean ORPO loss over B pairs; 0 for none.

    -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)) with log odds(x) = x - log(1 - exp(x));
    arXiv:2403.07691, eq. 3 to 7, whose lambda is beta here.
    chosen, rejected: [B] float32, response log-probability averaged over its own tokens (nats, below 0).
    Denominator: B. Raises ShapeError if the shapes differ.
    """
    require_same_shape("orpo_loss", 1, chosen=chosen, rejected=rejected)
    # Of a certain answer the odds are infinite; float32 has no number between 1 and 1 - 6e-8.
    chosen_odds, rejected_odds = (x - torch.log(-torch.expm1(x.clamp(max=-1e-7))) for x in (chosen, rejected))
    log_odds_ratio = chosen_odds - rejected_odds
    loss = mean_of(-chosen - beta * F.logsigmoid(log_odds_ratio))
    return OddsRatioLoss(loss, mean_of(-chosen).detach(), mean_of(log_odds_ratio).detach())


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float = 0.0) -> Tensor:
    """Mean SimPO loss over B pairs; 0 for none.

    -log sigmoid(beta (chosen - rejected) - gamma); arXiv:2405.14734, eq. 6.
    chosen, rejected: [B] float32, response log-probability averaged over its own tokens (nats).
    Denominator: B. Raises ShapeError if the shapes differ.
    """
    require_same_shape("simpo_loss", 1, chosen=chosen, rejected=rejected)
    return mean_of(-F.logsigmoid(beta * (chosen - rejected) - gamma))


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
    return mean_of((margin - 1 / (2 * beta)) ** 2)


def _log_ratio_margin(
    caller: str, policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    require_same_shape(
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
    require_same_shape("kto_loss", 1, policy_chosen=policy_chosen, ref_chosen=ref_chosen)
    require_same_shape("kto_loss", 1, policy_rejected=policy_rejected, ref_rejected=ref_rejected)
    baseline = torch.as_tensor(kl, dtype=policy_chosen.dtype, device=policy_chosen.device).detach().clamp(min=0)
    if baseline.numel() != 1:
        raise ShapeError(f"kto_loss: kl is {_shape(baseline)}, expected a scalar")
    desirable = desirable_weight * torch.sigmoid(-beta * (policy_chosen - ref_chosen - baseline))
    undesirable = undesirable_weight * torch.sigmoid(-beta * (baseline - (policy_rejected - ref_rejected)))
    return mean_of(torch.cat([desirable, undesirable]))


def mean_of(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)


def require_same_shape(caller: str, dimensions: int | None, **tensors: Tensor | None) -> None:
    """Raises ShapeError unless the tensors that are given have one shape, of ``dimensions`` axes where that is set."""
    shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or dimensions not in (None, len(first)):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        expected = "one shape" if dimensions is None else f"one shape of {dimensions} axes"
        raise ShapeError(f"{caller}: {listed}; expected {expected}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
