"""Signs of life of a runner: what its machine is at, every few seconds, in the store's record of the worker."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any, Literal

import psutil

from rollout_core.base.errors import in_words
from rollout_core.base.loops import LoopThread
from rollout_core.base.machine import usable_gpus
from rollout_core.store import LightningStore

logger = logging.getLogger(__name__)

LaunchMode = Literal["asyncio", "thread"]


def snapshot(*, include_gpu: bool = False) -> dict[str, Any]:
    """What this machine is at, as JSON. Sizes are bytes, shares percent."""
    memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "cpu": {"percent": psutil.cpu_percent(), "count": psutil.cpu_count()},
        "memory": {"percent": memory.percent, "total": memory.total, "available": memory.available},
        "disk": {"percent": disk.percent, "total": disk.total, "free": disk.free},
        "network": {"sent": network.bytes_sent, "received": network.bytes_recv} if network is not None else {},
    }
    if include_gpu:
        gpus = [(gpu.name, gpu.free_bytes, gpu.memory_bytes) for gpu in usable_gpus()]
        found["gpu"] = [{"name": name, "free": free, "total": total} for name, free, total in gpus]
    return found


class Heartbeats:
    """``store.update_worker`` at once and then every ``interval_seconds`` (0 or less: never), while the block runs.

    Mode ``thread`` beats on, whatever blocks the runner's event loop; for a store that is not safe for threads it falls
    back to ``asyncio``. Of beats that fail one after another only the first is a warning: a store may be away for a
    night.
    """

    def __init__(
        self, store: LightningStore, worker_id: str, interval_seconds: float, mode: LaunchMode, *, include_gpu: bool
    ) -> None:
        self._store, self._worker_id, self._interval_seconds = store, worker_id, interval_seconds
        self._include_gpu = include_gpu
        in_thread = mode == "thread" and store.capabilities.get("thread_safe")
        self._thread = LoopThread("rollout-heartbeats") if in_thread else None
        self._beats: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        if self._interval_seconds > 0:
            self._beats = asyncio.ensure_future(self._beat() if self._thread is None else self._beat_in(self._thread))

    async def __aexit__(self, *error: object) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait({self._beats})
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)

    async def _beat_in(self, thread: LoopThread) -> None:
        await thread.run(self._beat())  # made here, as a block that ends at once never comes so far

    async def _beat(self) -> None:
        failed = False
        while True:
            try:
                stats = await asyncio.to_thread(snapshot, include_gpu=self._include_gpu)
                await self._store.update_worker(self._worker_id, stats)
                failed = False
            except Exception as error:  # noqa: BLE001 - the work is worth more than the sign of it
                level = logging.DEBUG if failed else logging.WARNING
                logger.log(level, "Worker %s could not send its heartbeat: %s", self._worker_id, in_words(error))
                failed = True
            await asyncio.sleep(self._interval_seconds)
