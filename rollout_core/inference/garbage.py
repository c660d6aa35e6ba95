"""Python's search for reference cycles, while many samples are held: every object of a shard would be walked through
again and again, which took half of the time of a scripted run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKS_A_SEARCH = 8
"""A search walks through all that other threads' blocks hold, too: after each block it took a tenth of the time."""
_lock = threading.Lock()
_users = 0
_ended = 0
_was_enabled = True


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Search for cycles when every eighth such block ends, and seldom within them: those of several threads overlap.

    When none is left, Python searches when it sees fit, as before.
    """
    global _users, _ended, _was_enabled
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
        with _lock:
            _ended += 1
            is_due = _ended % BLOCKS_A_SEARCH == 0
        if is_due:
            gc.collect()
        with _lock:
            _users -= 1
            if not _users:
                gc.unfreeze()
                if _was_enabled:
                    gc.enable()
