"""What the trainer asks of a model's architecture, found out without its weights: on the meta device in a plan, and by
the same code before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.base.errors import ConfigError

_TOKENS = 4
_LARGEST_LOGIT = 100.0
"""A cap on logits shows in large ones."""


def check_trainable(model: Any) -> None:
    """Raises ConfigError where a language model or reward model cannot be trained here, whatever its weights."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        check_score_head(model)
    else:
        check_output_layer(model)


def check_score_head(model: Any) -> None:
    """Raises ConfigError for a sequence classifier whose score is no linear function of a hidden state."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear score head; choose a decoder model such as Qwen2")


@torch.no_grad()
def check_output_layer(model: Any) -> None:
    """Raises ConfigError unless logits are the output layer's own product with the trunk's last hidden states: the
    trainer computes them so, and some models scale or cap them."""
    layer = model.get_output_embeddings()
    name = type(model).__name__
    if layer is None or getattr(layer, "weight", None) is None:
        raise ConfigError(f"{name} has no output layer of its own, which the trainer needs; choose another model")
    vocabulary, width = layer.weight.shape
    device = torch.device("cpu") if layer.weight.is_meta else layer.weight.device
    hidden = torch.linspace(-1.0, 1.0, _TOKENS * width, device=device).view(1, _TOKENS, width)
    logits = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _TOKENS * vocabulary, device=device)
    product = logits.view(1, _TOKENS, vocabulary)
    seen: list[Tensor] = []

    def multiply(states: Tensor) -> Tensor:
        seen.append(states)
        return product.clone()

    input_ids = torch.ones(1, _TOKENS, dtype=torch.int64, device=device)
    try:
        with (
            _standing_in(_trunk(model), lambda *_, **__: _TrunkOutput(hidden.clone())),
            _standing_in(layer, multiply),
        ):
            found = model(input_ids=input_ids, use_cache=False).logits
        plain = len(seen) == 1 and torch.equal(seen[0].float(), hidden) and torch.equal(found.float(), product)
    except (AttributeError, TypeError, IndexError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name} is built in a way that the trainer does not know ({reason}); choose another"
        ) from error
    if not plain:
        raise ConfigError(
            f"{name} changes its logits after the output layer, which the trainer cannot do; choose another model"
        )


def _trunk(model: Any) -> nn.Module:
    """What the model itself calls for hidden states."""
    decoder = model.get_decoder()
    return model.base_model if decoder is None or decoder is model else decoder


class _TrunkOutput:
    """Hidden states, and None of all else that a trunk may return."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


@contextmanager
def _standing_in(module: nn.Module, forward: Any) -> Iterator[None]:
    """``forward`` instead of the module's own."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
