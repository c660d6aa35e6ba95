"""One process at a time for one piece of work, on one machine.

The lock is the operating system's (``flock``): it dies with its holder, also under ``kill -9``, and needs no time-out.
It spares double work; correctness never rests on it (results are content-addressed, attempts are fenced).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.errors import Recoverable


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path``; calls ``on_wait`` once when another process holds it.

    Raises Recoverable when the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Recoverable(f"lock file {path} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Closing would not do: a process that was forked meanwhile, such as an engine, shares the open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
