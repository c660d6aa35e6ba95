"""The output layer of a language model with what is computed from its logits: log-probabilities, likelihoods and
divergences, without the logits of a whole batch in memory.

The output layer makes [tokens, vocabulary] logits, often the largest tensor of a training step. Here they exist a chunk
of tokens at a time: `target_logprobs` keeps them only where they are small and recomputes them in the backward pass
otherwise; `weighted_nll` and `weighted_jsd`, whose gradients are known as soon as the loss is, never need them twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rollout_core.algorithms.attention import product_dtype
from rollout_core.base.errors import ConfigError
from rollout_core.models.architecture import LogitTransform

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk on a CPU: 32 MiB in float32."""
CHUNK_ELEMENTS_ACCELERATOR = 2**27
KEPT_ELEMENTS = 2**25
"""Logits up to so many are kept for the backward pass: 128 MiB in float32."""
PLAIN = LogitTransform()


class TargetLogprobs(NamedTuple):
    """What the model says of M targets; all [M] float32."""

    logprobs: Tensor
    """log softmax(logits / temperature)[target], nats."""
    entropy: Tensor
    """Of the whole distribution, nats; zeros unless asked for."""
    is_best: Tensor
    """bool: no token has a higher logit. Carries no gradient."""


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: LogitTransform = PLAIN,
    temperature: float = 1.0,
    entropy: bool = False,
) -> TargetLogprobs:
    """Log-probabilities of ``targets`` under ``softmax(transform(hidden @ weight.T + bias) / temperature)``.

    hidden: [M,H]; weight: [V,H]; bias: [V]; targets: [M] int64. Logits are made in the dtype of autocast, where that is
    on, else in that of ``hidden``, and summed in float32 (float64 for float64). First derivatives only.
    """
    # Within a function of autograd gradients are always off, and a parameter wants one wherever it is used.
    differs = torch.is_grad_enabled()
    return TargetLogprobs(
        *_TargetLogprobs.apply(hidden, weight, bias, targets, transform, temperature, entropy, differs)  # pyright: ignore[reportGeneralTypeIssues]
    )


class TokenDivergence(NamedTuple):
    """What two models say of the same M targets; all [M] float32, nats."""

    logprobs: Tensor
    """Of the targets under the first model."""
    ref_logprobs: Tensor
    """The same under the second."""
    kl: Tensor
    """KL(first || second) of the distributions that the targets stand for: sum over V of p (log p - log q)."""


@torch.no_grad()
def token_divergence(
    hidden: Tensor,
    ref_hidden: Tensor,
    layer: nn.Linear,
    ref_layer: nn.Linear,
    targets: Tensor,
    *,
    transforms: tuple[LogitTransform, LogitTransform] = (PLAIN, PLAIN),
    temperature: float,
) -> TokenDivergence:
    """Both models' softmax(logits / temperature), a chunk of tokens at a time.

    hidden: [M,H] and ref_hidden: [M,H']; the layers' weights: [V,H] and [V,H']; targets: [M] int64; ``transforms`` of
    both. Raises ConfigError where the two have outputs for different numbers of tokens.
    """
    if len(layer.weight) != len(ref_layer.weight):
        raise ConfigError(
            f"it has outputs for {len(layer.weight)} tokens, and the model that it is compared with for "
            f"{len(ref_layer.weight)}, so their distributions are of different things"
        )
    count = len(targets)
    found = TokenDivergence(*(hidden.new_zeros(count, dtype=torch.float32) for _ in range(3)))
    # Half as many tokens at a time: there are logits of two models.
    for chunk in _chunks(count, 2 * len(layer.weight), hidden.device):
        logs, ref_logs = (
            (_logits(states[chunk], head.weight, head.bias, transform) / temperature).log_softmax(dim=1)
            for states, head, transform in zip((hidden, ref_hidden), (layer, ref_layer), transforms, strict=True)
        )
        found.logprobs[chunk] = logs.gather(1, targets[chunk, None]).squeeze(1)
        found.ref_logprobs[chunk] = ref_logs.gather(1, targets[chunk, None]).squeeze(1)
        found.kl[chunk] = (logs.exp() * (logs - ref_logs)).sum(dim=1).clamp(min=0)
    return found


def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    *,
    transform: LogitTransform = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Loss ``-sum(weights * log p(targets))`` and [M] bool, whether each target has the highest logit.

    Shapes as in `target_logprobs`; weights: [M] float, without gradient.
    """
    return _WeightedNLL.apply(hidden, weight, bias, targets, weights, transform)  # pyright: ignore[reportReturnType]


class TeacherOutput(NamedTuple):
    """What a teacher's distributions at M places are made from."""

    hidden: Tensor
    """[M,H']."""
    weight: Tensor
    """[V',H'], of its output layer."""
    bias: Tensor | None = None
    """[V']."""
    transform: LogitTransform = PLAIN


class StudentDivergence(NamedTuple):
    """How far a student is from its teacher at M places; without gradient but for the loss."""

    loss: Tensor
    """Scalar: the weighted sum of the divergences."""
    divergence: Tensor
    """[M] float32, nats."""
    logprobs: Tensor
    """[M] float32: of the targets, under the student."""
    is_best: Tensor
    """[M] bool: no token has a higher logit of the student."""


def weighted_jsd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: TeacherOutput,
    targets: Tensor,
    weights: Tensor,
    *,
    transform: LogitTransform = PLAIN,
    beta: float,
    temperature: float = 1.0,
) -> StudentDivergence:
    """Generalized Jensen-Shannon divergence of a student from its teacher, summed with ``weights``.

    With teacher p, student q and mixture m = beta p + (1 - beta) q, all softmax(logits / temperature):
    D_beta(p || q) = beta KL(p || m) + (1 - beta) KL(q || m); GKD, arXiv:2306.13649, section 2, with its limits at the
    ends as TRL has them: beta = 0 is the forward KL(p || q), beta = 1 the reverse KL(q || p). The gradient reaches the
    student alone: of its logits it is q (g - sum q g) / temperature with g = (1 - beta) (log q - log m).
    hidden: [M,H]; weight: [V,H]; bias: [V]; targets: [M] int64, for the figures; weights: [M] float, without gradient.
    Logits are made and summed as in `target_logprobs`. Where the two have outputs for different numbers of tokens,
    those that only one has, padding that no tokenizer gives, do not count. No denominator but ``weights``.
    """
    return StudentDivergence(
        *_WeightedJSD.apply(hidden, weight, bias, *teacher, targets, weights, transform, beta, temperature)  # pyright: ignore[reportGeneralTypeIssues]
    )


def generalized_jsd(teacher: Tensor, student: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """[M] divergences of `weighted_jsd`, and [M,V] their gradients by the student's scaled logits.

    teacher, student: [M,V] float32, log-probabilities.
    """
    p, q = teacher.exp(), student.exp()
    if beta == 0:
        return (p * (teacher - student)).sum(dim=1), q - p
    if beta == 1:
        slope = student - teacher
        divergence = (q * slope).sum(dim=1)
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        slope = (1 - beta) * (student - mixture)
        divergence = beta * (p * (teacher - mixture)).sum(dim=1) + (q * slope).sum(dim=1)
    return divergence, q * (slope - (q * slope).sum(dim=1, keepdim=True))


def _chunks(count: int, vocabulary: int, device: torch.device) -> list[slice]:
    elements = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    size = max(1, elements // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    product = F.linear(hidden, weight, bias)
    product = product.to(torch.promote_types(product.dtype, torch.float32))
    return product if transform == PLAIN else transform(product)


def _slope(transform: LogitTransform, logits: Tensor) -> Tensor | float | None:
    """By what gradients of ``logits`` are multiplied to be those of the product; None: they are."""
    return None if transform == PLAIN else transform.slope(logits)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        temperature: float,
        want_entropy: bool,
        want_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.hidden_dtype = hidden.dtype
        hidden, cast, cast_bias = _cast(product_dtype(hidden), hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            count, vocabulary = len(targets), len(weight)
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            logprobs, entropy, logsums = (hidden.new_zeros(count, dtype=dtype) for _ in range(3))
            is_best = torch.zeros_like(targets, dtype=torch.bool)
            keep = want_gradient and any(ctx.needs_input_grad) and count * vocabulary <= KEPT_ELEMENTS
            keep = keep and transform.cap is None  # its slope follows from the logits, not from probabilities
            kept = hidden.new_empty(count, vocabulary, dtype=dtype) if keep else None
            for chunk in _chunks(count, vocabulary, hidden.device):
                part = _logits(hidden[chunk], cast, cast_bias, transform)
                if temperature != 1.0:
                    part /= temperature
                maxima = part.amax(dim=1, keepdim=True)
                # Subtracting the maximum before the sum, not after, keeps the last digits when logits are large.
                part -= maxima
                chosen = part.gather(1, targets[chunk, None]).squeeze(1)
                weights = part.exp()
                sums = weights.sum(dim=1)
                log_sums = sums.log()
                logprobs[chunk] = chosen - log_sums
                is_best[chunk] = chosen == 0
                if want_entropy:
                    entropy[chunk] = log_sums - (weights * part).sum(dim=1) / sums
                if kept is not None:
                    torch.div(weights, sums[:, None], out=kept[chunk])
                else:
                    logsums[chunk] = log_sums + maxima.squeeze(1)
        ctx.transform, ctx.temperature = transform, temperature
        ctx.save_for_backward(hidden, weight, bias, targets, logsums, entropy, kept)
        ctx.mark_non_differentiable(is_best)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward pass
        return logprobs, entropy, is_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        hidden, weight, bias, targets, logsums, entropy, kept = ctx.saved_tensors
        cast, cast_bias = _cast(hidden.dtype, weight, bias)
        grads = _HeadGrads(hidden, weight, bias, ctx.hidden_dtype, ctx.needs_input_grad[:3])
        for chunk in _chunks(len(targets), len(weight), hidden.device):
            if kept is not None:
                probabilities, slope = kept[chunk], _slope(ctx.transform, kept[chunk])
            else:
                logits = _logits(hidden[chunk], cast, cast_bias, ctx.transform)
                slope = _slope(ctx.transform, logits)
                probabilities = (logits / ctx.temperature).sub_(logsums[chunk, None]).exp_()
            if grad_logprobs is None:
                grad = torch.zeros_like(probabilities)
            else:
                grad = probabilities * -grad_logprobs[chunk, None]
                grad[torch.arange(len(grad), device=grad.device), targets[chunk]] += grad_logprobs[chunk]
            if grad_entropy is not None:
                # d entropy / d logit = -p (log p + entropy)
                surprise = torch.xlogy(probabilities, probabilities) + probabilities * entropy[chunk, None]
                grad -= surprise.mul_(grad_entropy[chunk, None])
            if ctx.temperature != 1.0:
                grad /= ctx.temperature
            grads.add(chunk, grad if slope is None else grad * slope, cast)
        return grads.hidden, grads.weight, grads.bias, *(None,) * 5


class _WeightedNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        hidden_dtype, needs = hidden.dtype, ctx.needs_input_grad[:3]
        hidden, cast, cast_bias = _cast(product_dtype(hidden), hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _HeadGrads(hidden, weight, bias, hidden_dtype, needs) if any(needs) else None
            logprobs = hidden.new_zeros(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
            is_best = torch.zeros_like(targets, dtype=torch.bool)
            for chunk in _chunks(len(targets), len(weight), hidden.device):
                part = _logits(hidden[chunk], cast, cast_bias, transform)
                slope = _slope(transform, part)
                part -= part.amax(dim=1, keepdim=True)
                chosen = part.gather(1, targets[chunk, None]).squeeze(1)
                sums = part.exp_().sum(dim=1)
                logprobs[chunk] = chosen - sums.log()
                is_best[chunk] = chosen == 0
                if grads is not None:
                    part.mul_((weights[chunk] / sums)[:, None])
                    part[torch.arange(len(part), device=part.device), targets[chunk]] -= weights[chunk]
                    grads.add(chunk, part if slope is None else part.mul_(slope), cast)
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.mark_non_differentiable(is_best)
        return -(weights * logprobs).sum(), is_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
        grads = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *grads, None, None, None


class _WeightedJSD(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        teacher_transform: LogitTransform,
        targets: Tensor,
        weights: Tensor,
        transform: LogitTransform,
        beta: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden_dtype, product, needs = hidden.dtype, product_dtype(hidden), ctx.needs_input_grad[:3]
        hidden, cast, cast_bias = _cast(product, hidden, weight, bias)
        of_teacher, teacher_cast, teacher_bias = _cast(product, teacher_hidden, teacher_weight, teacher_bias)
        size = min(len(weight), len(teacher_weight))
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _HeadGrads(hidden, weight, bias, hidden_dtype, needs) if any(needs) else None
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            divergence, logprobs = (hidden.new_zeros(len(targets), dtype=dtype) for _ in range(2))
            is_best = torch.zeros_like(targets, dtype=torch.bool)
            # Fewer tokens at a time: there are logits of two models, their mixture, and a gradient.
            for chunk in _chunks(len(targets), 4 * max(len(weight), len(teacher_weight)), hidden.device):
                student = _logits(hidden[chunk], cast, cast_bias, transform)[:, :size]
                other = _logits(of_teacher[chunk], teacher_cast, teacher_bias, teacher_transform)[:, :size]
                slope = _slope(transform, student)
                student, other = ((part / temperature).log_softmax(dim=1) for part in (student, other))
                chosen = student.gather(1, targets[chunk, None]).squeeze(1)
                logprobs[chunk], is_best[chunk] = chosen, chosen == student.amax(dim=1)
                divergence[chunk], grad = generalized_jsd(other, student, beta)
                if grads is not None:
                    grad *= weights[chunk, None] / temperature
                    if slope is not None:
                        grad *= slope
                    grads.add(chunk, F.pad(grad, (0, len(weight) - size)), cast)
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.mark_non_differentiable(divergence, logprobs, is_best)
        return (weights * divergence).sum(), divergence, logprobs, is_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        grads = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *grads, *(None,) * 9


class _HeadGrads:
    """Gradients of the output layer's inputs, gathered chunk by chunk; ``hidden`` as it was multiplied.

    ``needs``: which of hidden, weight and bias want one. A frozen weight, as with adapters, does not, and its product
    is a third of the layer's.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, hidden_dtype: torch.dtype, needs: Sequence[bool]
    ) -> None:
        wants_hidden, wants_weight, wants_bias = needs
        self._inputs = hidden
        self.hidden = torch.empty_like(hidden, dtype=hidden_dtype) if wants_hidden else None
        self.weight = torch.zeros_like(weight) if wants_weight else None
        self.bias = torch.zeros_like(bias) if bias is not None and wants_bias else None

    def add(self, chunk: slice, grad_logits: Tensor, cast: Tensor) -> None:
        """Account for the gradient [c,V] of the logits of ``chunk``; ``cast`` is the weight as it was multiplied."""
        if self.bias is not None:
            self.bias += grad_logits.sum(dim=0).to(self.bias.dtype)
        grad = grad_logits.to(cast.dtype)
        if self.hidden is not None:
            self.hidden[chunk] = grad @ cast
        if self.weight is None:
            return
        if self.weight.dtype == cast.dtype:
            self.weight.addmm_(grad.T, self._inputs[chunk])
        else:
            self.weight += grad.T @ self._inputs[chunk]
