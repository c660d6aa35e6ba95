"""Names of workers by which others on the same machine can tell that one is gone, without waiting for its silence."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import psutil
from blake3 import blake3


@functools.cache
def this_machine() -> str:
    """Name of this boot of this machine or container: processes of one name see the same process ids."""
    marks = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        marks.append(boot.read_text().strip())
    if namespace.exists():
        marks.append(os.readlink(namespace))
    return blake3("\n".join(marks).encode()).hexdigest()[:12]


def this_worker() -> str:
    """Name of this process among all workers of a store."""
    started = int(psutil.Process().create_time() * 1000)
    return f"{socket.gethostname()}:{this_machine()}:{os.getpid()}:{started}"


def is_gone(worker_id: str | None) -> bool:
    """Whether a worker was a process of this machine that has ended; False where that cannot be known."""
    parts = (worker_id or "").rsplit(":", 3)
    if len(parts) != 4 or parts[1] != this_machine():
        return False
    try:
        process = psutil.Process(int(parts[2]))
        return process.status() == psutil.STATUS_ZOMBIE or int(process.create_time() * 1000) != int(parts[3])
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, ValueError):
        return False
