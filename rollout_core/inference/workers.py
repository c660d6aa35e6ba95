"""Names of workers by which others on the same machine can tell that one is gone, without waiting for its silence."""

from __future__ import annotations

import socket

from rollout_core.base.processes import ProcessName


def this_worker() -> str:
    """Name of this process among all workers of a store."""
    return f"{socket.gethostname()}:{ProcessName.of_this_process()}"


def is_gone(worker_id: str | None) -> bool:
    """Whether a worker was a process of this machine that has ended; False where that cannot be known."""
    # A machine's own name may hold colons (an IPv6 address, say).
    process = ProcessName.parse(":".join((worker_id or "").split(":")[-3:]))
    return process is not None and process.has_ended()
