"""How tests wait: for the event itself, however long a machine takes that is busy with other things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG = 300.0
"""Seconds in which what must come has come. Only a test that fails waits them out."""
FOREVER = 3600.0
"""Seconds that no test lasts: for what must not be waited for, or must not end by itself."""


async def until(holds: Callable[[], object], seconds: float = LONG) -> None:
    """Wait until it holds, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to that within {seconds:g} s"
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], object], seconds: float = LONG) -> None:
    """Wait until it holds, in this thread."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to that within {seconds:g} s"
        time.sleep(0.01)
