"""A thread that runs an event loop, for work that other event loops wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """A thread that runs an event loop, from the first use on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.loop = asyncio.new_event_loop()

    def start(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self.loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
        return self.loop

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there, from another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.start()))

    def stop(self) -> None:
        """End the loop and the thread, if they run."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
