"""What estimates need to know of a model."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ModelSize:
    """What the estimate needs of a model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""

    @property
    def weight_bytes(self) -> int:
        """In float32, in which every model is trained."""
        return self.num_parameters * FLOAT32_BYTES
