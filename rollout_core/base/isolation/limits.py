"""What code in a process of its own may take."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_core.base.devices import machine_memory


@dataclass(frozen=True)
class Limits:
    """For all processes that the code makes, together."""

    seconds: float = 300.0
    """Of one call, or of one step where the handler tells how far it is."""
    memory_bytes: int | None = None
    """Resident; None: three quarters of the machine's (or container's) memory."""
    processes: int = 64
    """At the same time, its own among them; threads do not count."""
    output_bytes: int = 16 * 2**20
    """Written to standard output and error in one call."""
    address_space: bool = False
    """Hold the code's own process to ``memory_bytes`` of address space too, so that a large allocation fails at once.
    Not for code that uses torch or a GPU, which reserve far more than they use."""


def allowed_memory(limits: Limits) -> int:
    """Bytes that code under these limits may use."""
    if limits.memory_bytes is not None:
        return limits.memory_bytes
    return machine_memory()[1] * 3 // 4


def gibibytes(num_bytes: int) -> str:
    """As messages show it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
