"""LongRoPE for rows of several lengths in one pass (arXiv:2402.13753).

Such models (Phi 3 and 3.5 with 128k positions, say) turn queries and keys by one of two sets of frequencies: the short
factors for what fits ``original_max_position_embeddings``, the long factors for more. transformers chooses by the
largest position of a call, so that a short row's loss would depend on the rows that share its pass. Here each row has
the factors that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.data.packing import Layout

_CHOOSES = "_rollout_long_rope"
"""Attribute of a rotary embedding: its `LongRoPE`."""


class LongRoPE:
    """Takes the place of the forward pass of a model's rotary embedding."""

    def __init__(self, module: Any, limit: int) -> None:
        self._forward = module.forward
        self._limit = limit
        self.is_long: Tensor | None = None
        """[1, N] or [R, 1] bool of the tokens of the call under way; None: all of them have the same factors."""

    @classmethod
    def of(cls, model: nn.Module) -> LongRoPE | None:
        """That of ``model``, from now on; None for a model without LongRoPE. Of several policies around one model all
        have the same."""
        for module in model.modules():
            if getattr(module, "rope_type", None) == "longrope":
                if not hasattr(module, _CHOOSES):
                    config: Any = module.config
                    found = cls(module, config.rope_parameters["original_max_position_embeddings"])
                    setattr(module, _CHOOSES, found)
                    module.forward = found
                return getattr(module, _CHOOSES)
        return None

    def of_rows(self, layout: Layout, device: torch.device) -> Tensor | None:
        """[R] bool: which rows have the long factors; None where all rows are alike."""
        lengths = [prefix + own for prefix, branches in layout.documents for own in branches or (0,)]
        is_long = [length > self._limit for length in lengths]
        return torch.tensor(is_long, device=device) if any(is_long) and not all(is_long) else None

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [.., N, D]."""
        if self.is_long is None:
            return self._forward(x, position_ids)
        is_long = self.is_long[..., None]
        of_long = self._forward(x, position_ids)  # as some position is beyond the limit
        of_short = self._forward(x, position_ids.clamp(max=self._limit - 1))
        cos, sin = (torch.where(is_long, *pair) for pair in zip(of_long, of_short, strict=True))
        return cos, sin

    @contextmanager
    def choosing(self, is_long: Tensor | None) -> Iterator[None]:
        """Inside the block calls of the model are of tokens of which ``is_long`` have the long factors."""
        self.is_long = is_long
        try:
            yield
        finally:
            self.is_long = None
