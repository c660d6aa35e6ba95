"""A language model as a trainer uses it: packed tokens in, log-probabilities of the targets and values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.algorithms.attention import PACKED_ATTENTION
from rollout_core.algorithms.heads import scalar_head, target_logprobs, weighted_nll
from rollout_core.base.errors import ConfigError
from rollout_core.data.packing import Document, PackedTokens, pack, unpacked_rows
from rollout_core.models.architecture import check_output_layer


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
