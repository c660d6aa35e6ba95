"""Frozen linear layers with weights in four bits, under adapters that are trained (QLoRA, arXiv:2305.14314).

NF4: each block of 64 weights is scaled to [-1, 1] and rounded to the nearest of 16 quantiles of a normal distribution;
the scales are themselves stored in 8 bits, in blocks of 256 (section 3). What is computed with, and what a checkpoint
holds with the adapters merged, are the weights that these stand for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_core.base.errors import ConfigError
from rollout_core.config.optimizers import EIGHT_BITS


class NF4Linear(nn.Module):
    """A linear layer in four bits. In states of its module it has float32 weights, on the host."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._quantization = _functions()
        weight = layer.weight.detach()
        options = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True}
        self.packed, self._state = self._quantization.quantize_4bit(weight.contiguous(), **options)
        self.bias = layer.bias
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> Tensor:
        """[out, in] float32: what the stored weights stand for."""
        return self._quantization.dequantize_4bit(self.packed, self._state)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype of autocast where that is on."""
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        product = _Product.apply(hidden, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.cpu()


class _Product(torch.autograd.Function):
    """hidden @ weight.T; keeps the four bits for the backward pass, not the weights they stand for."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(hidden, layer.weight.to(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [gradient] = gradients
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


def _functions() -> Any:
    try:
        import bitsandbytes.functional as functions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"lora.quantization needs bitsandbytes; install the extra {EIGHT_BITS}") from error
    return functions
