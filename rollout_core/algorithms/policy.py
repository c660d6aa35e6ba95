"""A language model as a trainer uses it: packed tokens in, log-probabilities of the targets and values out, without the
logits of a whole batch in memory (`output_layer`).

A learner reads few of the last layer's outputs: those that predict its targets, of a reward model one a row. Layers
below need every token, for later ones attend to it. The last one needs keys and values of all, but its feed-forward
part, two thirds of a layer's products, works token by token: for the others it is left out, forwards and backwards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.algorithms.attention import PACKED_ATTENTION, as_in_training, try_packed
from rollout_core.algorithms.long_rope import LongRoPE
from rollout_core.algorithms.masters import lay_out
from rollout_core.algorithms.output_layer import (
    StudentDivergence,
    TeacherOutput,
    target_logprobs,
    weighted_jsd,
    weighted_nll,
)
from rollout_core.algorithms.parallel import shard, whole
from rollout_core.base.determinism import is_portable_here
from rollout_core.base.errors import ConfigError
from rollout_core.config import Distillation, LearnerSettings
from rollout_core.data.packing import Layout, PackedTokens, unpacked_rows, unshared
from rollout_core.models.architecture import check_decoder, logit_transform, refuse_not_causal

_TAUGHT = "_rollout_reads_alone"
"""Attribute of a feed-forward part that has these hooks: with them twice it would select from what it has selected."""
_CAUSAL = "_rollout_is_causal"
"""Attribute of a model that was found so: a second policy of it is of the same layers."""
WORTH_SELECTING = 0.8
"""Above this share of the tokens, taking them out and putting them back costs what it spares."""


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


@dataclass(frozen=True)
class DistillationTarget:
    """What a student is to come close to in one batch, as `weighted_jsd` takes it."""

    teacher: TeacherOutput
    weights: Tensor
    """[M] float."""
    beta: float
    temperature: float


class PackedModel(nn.Module):
    """A transformers model whose trunk runs over `PackedTokens`.

    Models of plain causal attention run packed: no padding, no mask, shared prefixes once, and in the last layer no
    feed-forward part for tokens whose hidden states nobody reads. Others (or all, with ``packed=False``) run over
    padded rows; the results are the same to rounding.
    """

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        super().__init__()
        self.model = model
        check_causal(model)  # as it came: packed attention is causal whatever the model is
        self.packed = packed and can_pack(model)
        # Products of fewer rows are rounded otherwise, and portable results are to stay what they are.
        self._reads_alone = self.packed and not is_portable_here() and lm_head_only_at_targets(model)
        self._long_rope = LongRoPE.of(model)

    def hidden_states(self, batch: PackedTokens, read: Tensor, rows: Tensor) -> Tensor:
        """[M,H] after the last norm, of the packed tokens ``read`` [M] int64 as those of the rows ``rows`` [M] int64; a
        token may be named twice, for several rows that share it."""
        trunk = self.model.base_model
        is_long = None if self._long_rope is None else self._long_rope.of_rows(batch.layout, read.device)
        if not self.packed:
            return self._padded_trunk(trunk, batch, is_long)[rows, batch.position_ids[read]]
        input_ids, position_ids, layout = batch.input_ids, batch.position_ids, batch.layout
        if is_long is not None:  # a prefix is then not the same in all its rows
            index, lengths = unshared(layout)
            starts = torch.tensor([0, *accumulate(lengths)][:-1], device=read.device)
            read = starts[rows] + position_ids[read]
            input_ids, position_ids = input_ids[index], position_ids[index]
            layout = Layout(tuple((length, ()) for length in lengths))
            is_long = is_long.repeat_interleave(torch.tensor(lengths, device=read.device))[None]
        options = {"read_tokens": read_tokens(len(input_ids), read)} if self._reads_alone else {}
        with self._factors(is_long):
            found = trunk(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, layout=layout, **options
            )
        return found.last_hidden_state.squeeze(0)[read]

    def _padded_trunk(self, trunk: Any, batch: PackedTokens, is_long: Tensor | None) -> Tensor:
        """[R, longest, H]"""
        rows = unpacked_rows(batch.layout)
        longest = max(len(row) for row in rows)
        index = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=batch.input_ids.device)
        # Padding at the right is invisible to causal attention, and its outputs are never looked at.
        with self._factors(None if is_long is None else is_long[:, None]):
            return trunk(input_ids=batch.input_ids[index], use_cache=False).last_hidden_state

    def _factors(self, is_long: Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if self._long_rope is None else self._long_rope.choosing(is_long)


class ValueModel(PackedModel):
    """A trunk of its own with a linear head: the value of the state each target is drawn in."""

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        super().__init__(model, packed=packed)
        self.head = zero_head(model)

    def forward(self, batch: PackedTokens) -> Tensor:
        """[M] float32."""
        return scalar_head(self.head, self.hidden_states(batch, batch.predictors, batch.rows))


class Policy(PackedModel):
    """A causal language model over `PackedTokens`, with values from a linear head on its trunk or a `ValueModel`.

    With ``known_ids`` log-probabilities are those of a distribution over so many of the first token ids, from which
    engines draw where a vocabulary is padded.
    """

    def __init__(
        self, model: Any, values: nn.Module | None = None, *, packed: bool = True, known_ids: int | None = None
    ) -> None:
        check_decoder(model)
        transform = logit_transform(model)
        super().__init__(model, packed=packed)
        self.values = values
        self.known_ids = known_ids
        self.transform = transform

    def forward(
        self,
        batch: PackedTokens,
        *,
        nll_weights: Tensor | None = None,
        distill: DistillationTarget | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> PolicyOutput | NLLOutput | StudentDivergence:
        """Log-probabilities of the targets; with ``nll_weights`` [M] instead the loss ``-sum(weights * logprobs)``,
        with ``distill`` the divergence from a teacher."""
        predictors = self.hidden_states(batch, batch.predictors, batch.rows)
        layer = self.model.get_output_embeddings()
        options: Any = {"transform": self.transform}
        if nll_weights is not None:
            loss, is_best = weighted_nll(predictors, layer.weight, layer.bias, batch.targets, nll_weights, **options)
            return NLLOutput(loss, is_best)
        if distill is not None:
            options |= {"beta": distill.beta, "temperature": distill.temperature}
            return weighted_jsd(
                predictors, layer.weight, layer.bias, distill.teacher, batch.targets, distill.weights, **options
            )
        options |= {"temperature": temperature, "entropy": entropy}
        weight, bias = layer.weight, layer.bias
        if self.known_ids is not None:
            weight, bias = weight[: self.known_ids], None if bias is None else bias[: self.known_ids]
        found = target_logprobs(predictors, weight, bias, batch.targets, **options)
        return PolicyOutput(found.logprobs, found.entropy, found.is_best, self._values(batch, predictors))

    def _values(self, batch: PackedTokens, predictors: Tensor) -> Tensor | None:
        if self.values is None:
            return None
        if isinstance(self.values, ValueModel):
            return self.values(batch)
        assert isinstance(self.values, nn.Linear), "a head on the policy's trunk"
        return scalar_head(self.values, predictors)


class TeacherTrunk(PackedModel):
    """A frozen causal language model up to its output layer."""

    def forward(self, batch: PackedTokens) -> Tensor:
        """[M,H] hidden states that predict the targets."""
        return self.hidden_states(batch, batch.predictors, batch.rows)


class Teacher:
    """A frozen model whose distributions a student learns."""

    def __init__(self, model: Any, settings: Distillation, learner: LearnerSettings, device: torch.device) -> None:
        """Takes ``model``, which is on ``device``, laid out as that of ``learner``. Collective."""
        self._transform = logit_transform(model)
        model = model.eval().requires_grad_(False)
        self._trunk = shard(TeacherTrunk(model), learner, device)
        lay_out(model, learner)
        # Outside the trunk's own call its weights are in parts.
        layer = model.get_output_embeddings()
        self._weight, self._bias = whole(layer.weight), None if layer.bias is None else whole(layer.bias)
        self._settings = settings

    @torch.no_grad()
    def target(self, batch: PackedTokens, weights: Tensor) -> DistillationTarget:
        """What it says of the targets of ``batch``, with the [M] ``weights`` of these in the loss. Collective."""
        output = TeacherOutput(self._trunk(batch), self._weight, self._bias, self._transform)
        return DistillationTarget(output, weights, self._settings.beta, self._settings.temperature)


def zero_head(model: Any) -> nn.Linear:
    """A linear head of one output on a model's trunk, zero at first: the first advantages are then plain returns."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(next(model.parameters()).device)


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
        try_packed(model)
    except (ConfigError, TypeError):  # its attention asks for more, or its layers do not hand on what they are given
        model.config._attn_implementation = before
        return False
    return True


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raises ConfigError where a token's hidden state depends on tokens behind it: such a model reads what it is to
    predict, and what rows are padded with. Looks at numbers, so not at weights that are still to be read."""
    if getattr(model, _CAUSAL, False) or any(parameter.is_meta for parameter in model.parameters()):
        return
    check_decoder(model)
    ids = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 2]], device=model.device)
    modes = {module: module.training for module in model.modules()}
    try:
        with as_in_training(model):
            hidden = model.eval().base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for module, mode in modes.items():
            module.training = mode
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    eps = max(torch.finfo(kind).eps for kind in {*kinds, hidden.dtype})
    hidden = hidden.float()
    # Equal rows may be rounded otherwise by kernels. NaN of a model that has diverged training says itself.
    allowed = max(1e-4, 8 * eps) * float(hidden.abs().max())
    if float((hidden[0, :-1] - hidden[1, :-1]).abs().max()) > allowed:
        refuse_not_causal(model, "as their hidden states show")
    setattr(model, _CAUSAL, True)


class _FeedForward:
    """Hooks on a layer's attention, which hears of the tokens, and on the feed-forward part that follows it.

    The tokens come from the attention's own arguments, which transformers hands down from the model's call, and not
    from whoever calls the model: a checkpointed layer is computed again in the backward pass, when another batch may
    be next, and its attention is then given the same arguments.
    """

    def __init__(self, attention: nn.Module, part: nn.Module) -> None:
        self.tokens: Tensor | None = None
        """Between attention and feed-forward part of one call."""
        self._shape: tuple[int, ...] = ()
        self._handles = (
            attention.register_forward_pre_hook(self._hear, with_kwargs=True),
            part.register_forward_pre_hook(self._select),
            part.register_forward_hook(self._put_back),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hear(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        self.tokens = kwargs.get("read_tokens")

    def _select(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.tokens is None:
            return None
        hidden, *others = args
        self._shape = hidden.shape
        return hidden.index_select(1, self.tokens), *others

    def _put_back(self, _: nn.Module, __: Any, output: Any) -> Tensor | None:
        if self.tokens is None:
            return None
        if not isinstance(output, Tensor):
            raise TypeError(f"the feed-forward part of a layer gives a {type(output).__name__}, not a tensor")
        tokens, self.tokens = self.tokens, None
        return output.new_zeros(self._shape).index_copy(1, tokens, output)


def lm_head_only_at_targets(model: Any) -> bool:
    """Have the last layer of ``model``, which runs packed, compute ``read_tokens`` of its call alone; whether it will.

    Models whose last layer is not an attention ``self_attn`` and then a part ``mlp`` that gives one tensor compute
    every token as before.
    """
    layers = getattr(model.base_model, "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    attention, part = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    if attention is None or part is None:
        return False
    if hasattr(part, _TAUGHT):  # by another policy around the same model, such as a reference without its adapters
        return True
    hooks = _FeedForward(attention, part)
    try:
        try_packed(model, read_tokens=torch.tensor([1], device=model.device))
    except (ConfigError, TypeError):
        is_able = False
    else:
        is_able = hooks.tokens is None  # the feed-forward part came after the attention and took them
    if is_able:
        setattr(part, _TAUGHT, True)
    else:
        hooks.remove()
    return is_able


def read_tokens(num_tokens: int, read: Tensor) -> Tensor | None:
    """[K] int64, rising: which of the packed tokens ``read`` [M] names, or None where they are so many that all may be
    computed."""
    if len(read) > WORTH_SELECTING * num_tokens:  # without repetitions they may be fewer, by one a row
        return None
    return torch.unique(read)
