"""Where a server handles what is large, so that its event loop goes on answering everybody else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_core.store.loops import LoopThread

Result = TypeVar("Result")

LOOP_BYTES = 128 << 10
"""Most bytes of JSON that are read at once: the interpreter's lock is held for as long."""
LOOP_RECORDS = 500
"""Most records of a request or a reply that are handled on the server's event loop."""


class Lane:
    """One thread, with an event loop of its own, that all large requests of a server share.

    They take turns at each ``await``. The interpreter changes threads every few milliseconds, so that the server's own
    loop waits no longer than that, provided that no single call into C takes long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there; cancelled with its caller."""
        return await self._started().run(work)

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function there."""

        async def call() -> Result:
            return function(*arguments)

        return await self.run(call())

    def _started(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("store-large-requests")
                weakref.finalize(self, self._thread.stop)
            return self._thread
