"""Freed memory stays with the process while it trains on a CPU.

Every step frees and takes the same tens of megabytes. glibc gives what lies at the top of its heap back to the kernel
each time, and the next step then waits for the kernel to map and clear the pages again: 4 to 6 % of a small model's
step.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_FROM_HEAP = 2**25
"""Bytes; glibc takes no more. Larger tensors come from and go to the kernel by themselves."""
KEPT_BYTES = 2**28
"""Of free memory at the top of the heap."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to KEPT_BYTES that are free; whether there was one to be told."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    # Naming one threshold stops glibc from adapting the other, so both are named.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
