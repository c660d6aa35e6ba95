"""A language model as a trainer uses it: packed tokens in, log-probabilities of the targets and values out, without the
logits of a whole batch in memory.

The output layer of a language model makes [tokens, vocabulary] logits, often the largest tensor of a training step.
Here they exist a chunk of tokens at a time: `target_logprobs` keeps them only where they are small and recomputes them
in the backward pass otherwise; `weighted_nll`, whose gradient is known as soon as the loss is, never needs them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rollout_core.algorithms.attention import PACKED_ATTENTION, product_dtype
from rollout_core.base.errors import ConfigError
from rollout_core.data.packing import Document, PackedTokens, pack, unpacked_rows
from rollout_core.models.architecture import check_output_layer

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk on a CPU: 32 MiB in float32."""
CHUNK_ELEMENTS_ACCELERATOR = 2**27
KEPT_ELEMENTS = 2**25
"""Logits up to so many are kept for the backward pass: 128 MiB in float32."""


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
    temperature: float = 1.0,
    entropy: bool = False,
) -> TargetLogprobs:
    """Log-probabilities of ``targets`` under ``softmax((hidden @ weight.T + bias) / temperature)``.

    hidden: [M,H]; weight: [V,H]; bias: [V]; targets: [M] int64. Logits are made in the dtype of autocast, where that is
    on, else in that of ``hidden``, and summed in float32 (float64 for float64). First derivatives only.
    """
    return TargetLogprobs(*_TargetLogprobs.apply(hidden, weight, bias, targets, temperature, entropy))  # pyright: ignore[reportGeneralTypeIssues]


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
    hidden: Tensor, ref_hidden: Tensor, layer: nn.Linear, ref_layer: nn.Linear, targets: Tensor, *, temperature: float
) -> TokenDivergence:
    """Both models' softmax(logits / temperature), a chunk of tokens at a time.

    hidden: [M,H] and ref_hidden: [M,H']; the layers' weights: [V,H] and [V,H']; targets: [M] int64. Raises ConfigError
    where the two have outputs for different numbers of tokens.
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
            (_logits(states[chunk], head.weight, head.bias) / temperature).log_softmax(dim=1)
            for states, head in ((hidden, layer), (ref_hidden, ref_layer))
        )
        found.logprobs[chunk] = logs.gather(1, targets[chunk, None]).squeeze(1)
        found.ref_logprobs[chunk] = ref_logs.gather(1, targets[chunk, None]).squeeze(1)
        found.kl[chunk] = (logs.exp() * (logs - ref_logs)).sum(dim=1).clamp(min=0)
    return found


def weighted_nll(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss ``-sum(weights * log p(targets))`` and [M] bool, whether each target has the highest logit.

    Shapes as in `target_logprobs`; weights: [M] float, without gradient.
    """
    return _WeightedNLL.apply(hidden, weight, bias, targets, weights)  # pyright: ignore[reportReturnType]


def _chunks(count: int, vocabulary: int, device: torch.device) -> list[slice]:
    elements = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    size = max(1, elements // vocabulary)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.hidden_dtype = hidden.dtype
        hidden, cast, cast_bias = _cast(product_dtype(hidden), hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            count, vocabulary = len(targets), len(weight)
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            logprobs, entropy, logsums = (hidden.new_zeros(count, dtype=dtype) for _ in range(3))
            is_best = torch.zeros_like(targets, dtype=torch.bool)
            keep = any(ctx.needs_input_grad) and count * vocabulary <= KEPT_ELEMENTS
            kept = hidden.new_empty(count, vocabulary, dtype=dtype) if keep else None
            for chunk in _chunks(count, vocabulary, hidden.device):
                part = _logits(hidden[chunk], cast, cast_bias)
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
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, bias, targets, logsums, entropy, kept)
        ctx.mark_non_differentiable(is_best)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward pass
        return logprobs, entropy, is_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, logsums, entropy, kept = ctx.saved_tensors
        cast, cast_bias = _cast(hidden.dtype, weight, bias)
        grads = _HeadGrads(hidden, weight, bias, ctx.hidden_dtype)
        for chunk in _chunks(len(targets), len(weight), hidden.device):
            if kept is not None:
                probabilities = kept[chunk]
            else:
                logits = _logits(hidden[chunk], cast, cast_bias) / ctx.temperature
                probabilities = logits.sub_(logsums[chunk, None]).exp_()
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
            grads.add(chunk, grad, cast)
        return grads.hidden, grads.weight, grads.bias, None, None, None


class _WeightedNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_dtype = hidden.dtype
        hidden, cast, cast_bias = _cast(product_dtype(hidden), hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _HeadGrads(hidden, weight, bias, hidden_dtype) if any(ctx.needs_input_grad) else None
            logprobs = hidden.new_zeros(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
            is_best = torch.zeros_like(targets, dtype=torch.bool)
            for chunk in _chunks(len(targets), len(weight), hidden.device):
                part = _logits(hidden[chunk], cast, cast_bias)
                part -= part.amax(dim=1, keepdim=True)
                chosen = part.gather(1, targets[chunk, None]).squeeze(1)
                sums = part.exp_().sum(dim=1)
                logprobs[chunk] = chosen - sums.log()
                is_best[chunk] = chosen == 0
                if grads is not None:
                    part.mul_((weights[chunk] / sums)[:, None])
                    part[torch.arange(len(part), device=part.device), targets[chunk]] -= weights[chunk]
                    grads.add(chunk, part, cast)
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.mark_non_differentiable(is_best)
        return -(weights * logprobs).sum(), is_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
        grads = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *grads, None, None


class _HeadGrads:
    """Gradients of the output layer's inputs, gathered chunk by chunk; ``hidden`` as it was multiplied."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, hidden_dtype: torch.dtype) -> None:
        self._inputs = hidden
        self.hidden = torch.empty_like(hidden, dtype=hidden_dtype)
        self.weight = torch.zeros_like(weight)
        self.bias = None if bias is None else torch.zeros_like(bias)

    def add(self, chunk: slice, grad_logits: Tensor, cast: Tensor) -> None:
        """Account for the gradient [c,V] of the logits of ``chunk``; ``cast`` is the weight as it was multiplied."""
        if self.bias is not None:
            self.bias += grad_logits.sum(dim=0).to(self.bias.dtype)
        grad = grad_logits.to(cast.dtype)
        self.hidden[chunk] = grad @ cast
        if self.weight.dtype == cast.dtype:
            self.weight.addmm_(grad.T, self._inputs[chunk])
        else:
            self.weight += grad.T @ self._inputs[chunk]


def scalar_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[M,H] to [M] in the dtype of the head's weight, under autocast too: bfloat16 has two to three digits, and a
    score or value is the result itself."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(head.weight.dtype)).squeeze(-1)


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward pass says of the M targets of its batch."""

    logprobs: Tensor
    """[M] float32, nats."""
    entropy: Tensor
    """[M] float32, nats; zeros unless asked for."""
    is_best: Tensor
    """[M] bool, True = no token has a higher logit."""
    values: Tensor | None = None
    """[M] float32: the value head's estimate for the state each target is drawn in."""


@dataclass(frozen=True)
class NLLOutput:
    """Weighted negative log-likelihood of a batch."""

    loss: Tensor
    """Scalar."""
    is_best: Tensor
    """[M] bool, True = no token has a higher logit."""


class PackedModel(nn.Module):
    """A transformers model whose trunk runs over `PackedTokens`.

    Models of plain causal attention run packed: no padding, no mask, shared prefixes once. Others (or all, with
    ``packed=False``) run over padded rows; the results are the same to rounding.
    """

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        super().__init__()
        self.model = model
        self.packed = packed and can_pack(model)

    def trunk(self, batch: PackedTokens) -> Tensor:
        """[N,H] hidden states after the last norm, of every packed token."""
        trunk = self.model.base_model
        if not self.packed:
            return self._padded_trunk(trunk, batch)
        return trunk(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            layout=batch.layout,
        ).last_hidden_state.squeeze(0)

    def _padded_trunk(self, trunk: Any, batch: PackedTokens) -> Tensor:
        rows = unpacked_rows(batch.layout)
        longest = max(len(row) for row in rows)
        device = batch.input_ids.device
        index = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=device)
        # Padding at the right is invisible to causal attention, and its outputs are never looked at.
        hidden = trunk(input_ids=batch.input_ids[index], use_cache=False).last_hidden_state
        row_of = torch.zeros(len(batch.input_ids), dtype=torch.int64)
        for number in reversed(range(len(rows))):
            row_of[rows[number]] = number
        return hidden[row_of.to(device), batch.position_ids]


class ValueModel(PackedModel):
    """A trunk of its own with a linear head: the value of the state each target is drawn in."""

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        super().__init__(model, packed=packed)
        self.head = zero_head(model)

    def forward(self, batch: PackedTokens) -> Tensor:
        """[M] float32."""
        return scalar_head(self.head, self.trunk(batch)[batch.predictors])


class Policy(PackedModel):
    """A causal language model over `PackedTokens`, with values from a linear head on its trunk or a `ValueModel`."""

    def __init__(self, model: Any, values: nn.Module | None = None, *, packed: bool = True) -> None:
        super().__init__(model, packed=packed)
        self.values = values
        check_output_layer(model)

    def forward(
        self,
        batch: PackedTokens,
        *,
        nll_weights: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> PolicyOutput | NLLOutput:
        """Log-probabilities of the targets; with ``nll_weights`` [M] instead the loss ``-sum(weights * logprobs)``."""
        hidden = self.trunk(batch)
        predictors = hidden[batch.predictors]
        layer = self.model.get_output_embeddings()
        if nll_weights is not None:
            loss, is_best = weighted_nll(predictors, layer.weight, layer.bias, batch.targets, nll_weights)
            return NLLOutput(loss, is_best)
        found = target_logprobs(
            predictors, layer.weight, layer.bias, batch.targets, temperature=temperature, entropy=entropy
        )
        return PolicyOutput(found.logprobs, found.entropy, found.is_best, self._values(batch, predictors))

    def _values(self, batch: PackedTokens, predictors: Tensor) -> Tensor | None:
        if self.values is None:
            return None
        if isinstance(self.values, ValueModel):
            return self.values(batch)
        assert isinstance(self.values, nn.Linear), "a head on the policy's trunk"
        return scalar_head(self.values, predictors)


def zero_head(model: Any) -> nn.Linear:
    """A linear head of one output on a model's trunk, zero at first: the first advantages are then plain returns."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def can_pack(model: Any) -> bool:
    """Whether the model's attention can respect document boundaries; if so, it does from now on."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds <= {"full_attention", "sliding_attention"} and not getattr(config, "attn_logit_softcapping", None)
    # What torch's own attention cannot do (sinks, say), the packed one cannot either; and a state that goes from token
    # to token would go from document to document.
    is_able = all(getattr(model, name, False) for name in ("_supports_attention_backend", "_supports_sdpa"))
    if not plain or not is_able or getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
        return False
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED_ATTENTION
    try:
        _try_packed(model)
    except (ConfigError, TypeError):  # its attention asks for more, or its layers do not hand on what they are given
        model.config._attn_implementation = before
        return False
    return True


@torch.no_grad()
def _try_packed(model: Any) -> None:
    batch = pack([Document([1, 2]), Document([1])]).to(model.device)
    model.base_model(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, layout=batch.layout
    )
