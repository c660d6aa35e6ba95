"""Gradient checkpointing (arXiv:1604.06174): only the input of a layer is kept, and the rest made anew when needed.

transformers' own switch works in training mode only, while most learners here switch dropout off by evaluation mode.
So the layers that transformers marks for it are wrapped here, whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rollout_core.base.errors import ConfigError


def checkpoint_layers(model: nn.Module, *others: nn.Module) -> None:
    """Trade time for memory in every layer of ``model``, and of modules beside it; gradients stay as they are.

    Raises ConfigError for a model without layers that transformers marks for this.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    own, *more = (
        [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
        for root in (model, *others)
    )
    if not own:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be checkpointed; set gradient_checkpointing = false"
        )
    for layer in chain(own, *more):
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
