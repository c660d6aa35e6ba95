"""What autocast leaves to code that multiplies by itself.

With float32 weights, much of what passes through a model under autocast is float32: norms and rotary embeddings give
it whatever they get. So the dtype of a tensor does not say in which dtype a product of it belongs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype for matrix products of ``tensor``: that of autocast where it is on, else its own, as torch has it."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def scalar_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[M,H] to [M] in the dtype of the head's weight, under autocast too: bfloat16 has two to three digits, and a
    score or value is the result itself."""
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(head.weight.dtype)).squeeze(-1)
