"""The layers of a model, as transformers marks them: learning rates by depth, and layers that are computed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rollout_core.base.errors import ConfigError
from rollout_core.config import OptimizerConfig

RATE_SCALE = "rate_scale"
"""Key of a group of parameters: its learning rate over that of the schedule."""
_CHECKPOINTED = "_rollout_checkpointed"
"""Attribute of a layer's forward that computes twice."""


@dataclass(frozen=True)
class LayerRate:
    """The learning rate of a layer over that of the schedule."""

    name: str
    """Of the layer, for people."""
    scale: float


def layer_rates(config: OptimizerConfig, model: nn.Module, *others: nn.Module) -> dict[nn.Parameter, LayerRate] | None:
    """Rates by depth, of every parameter of ``model`` and of trained modules outside it; None without ``layer_decay``.

    rate(d) = lr * layer_decay ** (L + 1 - d) for a model of L layers: d is 0 for the embeddings, 1 to L for the layers,
    L + 1 for what comes after them. Discriminative fine-tuning, arXiv:1801.06146, section 3.1 (whose factor is
    1 / 2.6), with the depths of ELECTRA (arXiv:2003.10555, appendix B). An output layer tied to the embeddings is
    these, and a module without layers, such as a value head, comes after them.
    Raises ConfigError for a model without layers that transformers marks.
    """
    if config.layer_decay is None:
        return None
    if not _layers(model):
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be distinguished; leave out optimizer.layer_decay"
        )
    rates: dict[nn.Parameter, LayerRate] = {}
    for module in (model, *others):
        rates |= _rates_by_depth(module, config.layer_decay)
    return rates


def _rates_by_depth(module: nn.Module, decay: float) -> dict[nn.Parameter, LayerRate]:
    layers = _layers(module)
    depths = {parameter: depth for depth, layer in enumerate(layers, start=1) for parameter in layer.parameters()}
    last, is_before = len(layers) + 1, bool(layers)
    rates = {}
    for parameter in module.parameters():  # in the order they are computed with
        is_before = is_before and parameter not in depths
        depth = depths.get(parameter, 0 if is_before else last)
        name = "embeddings" if not depth else "output" if depth == last else f"layer {depth}"
        rates[parameter] = LayerRate(name, decay ** (last - depth))
    return rates


def _layers(module: nn.Module) -> list[GradientCheckpointingLayer]:
    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def checkpoint_layers(model: nn.Module, *others: nn.Module) -> None:
    """Trade time for memory in every layer of ``model``, and of modules outside it (arXiv:1604.06174): only a layer's
    input is kept, the rest is computed again in the backward pass. Gradients stay as they are.

    transformers' own switch works in training mode only, while most learners here switch dropout off by evaluation
    mode. So the layers that transformers marks for it are wrapped here, whatever the mode.
    Layers that are wrapped stay as they are. Raises ConfigError for a model without layers that transformers marks for
    this.
    """
    own, *more = (_layers(root) for root in (model, *others))
    if not own:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be checkpointed; set gradient_checkpointing = false"
        )
    for layer in chain(own, *more):
        if not hasattr(layer.forward, _CHECKPOINTED):
            layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    setattr(run, _CHECKPOINTED, True)
    return run
