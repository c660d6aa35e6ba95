"""What this machine computes with: asked of torch, never left to a fallback that would hide a broken driver."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def machine_memory() -> tuple[int, int]:
    """Bytes of the machine's memory, as far as its control group lets us: available now, and in total."""
    import psutil  # not needed by commands that only read a configuration, and slow to load

    machine = psutil.virtual_memory()
    limits = [machine.total]
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(machine.available, *limits), min(limits)
