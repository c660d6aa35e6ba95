"""How often Python looks for cyclic garbage in processes that are rollout's own."""

from __future__ import annotations

import atexit
import gc
import sys

THRESHOLDS = (10_000, 10, 10)
"""Python's own are (700, 10, 10)."""


def collect_seldom() -> None:
    """Look less often, and not at the process's end. For programs that import Prefect, torch, transformers or vLLM.

    Imports make hundreds of thousands of objects, which Python looks at again and again while there are more of them,
    and all of them once more when it ends: measured, a third of the processor time of a program that imports the
    nightly flow, and a seventh of one that also imports torch and transformers. A program of a user keeps the settings
    that it has: only a process that rollout starts calls this.
    """
    gc.set_threshold(*THRESHOLDS)
    atexit.register(_end_without_collecting)


def _end_without_collecting() -> None:
    # Triton, which torch imports, prints the name of each object of its own that the interpreter's end leaves alone.
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()
