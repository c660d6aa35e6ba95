"""Whether processes of a test live."""

from __future__ import annotations

import psutil


def lives(process: int | psutil.Process) -> bool:
    """Whether it does anything: one that was killed may wait for its parent to look."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
