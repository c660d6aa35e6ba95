"""What this machine computes with: asked of torch, never left to a fallback that would hide a broken driver."""

from __future__ import annotations

from functools import cache


@cache
def probe_device() -> str:
    """``cuda`` or ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_gpus() -> int:
    """GPUs that processes of this machine can share out among themselves."""
    import torch

    return torch.cuda.device_count()


def mixed_precision(asked: str) -> str:
    """``float32`` or ``bfloat16``: what a precision of ``auto`` means here, else ``asked`` itself."""
    import torch

    if asked != "auto":
        return asked
    return "bfloat16" if probe_device() == "cuda" and torch.cuda.is_bf16_supported() else "float32"
