"""Python's search for reference cycles, while many samples are held: every object of a shard would be walked through
again and again, which took half of the time of a scripted run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0
_was_enabled = True


@contextmanager
def collected_at_end() -> Iterator[None]:
    """Search for cycles once, when the block ends, instead of within it; blocks of several threads may overlap."""
    global _users, _was_enabled
    with _lock:
        if not _users:
            _was_enabled = gc.isenabled()
            gc.disable()
            # What was there before, modules above all, is not looked at by the searches to come.
            gc.freeze()
        _users += 1
    try:
        yield
    finally:
        gc.collect()
        with _lock:
            _users -= 1
            if not _users:
                gc.unfreeze()
                if _was_enabled:
                    gc.enable()
