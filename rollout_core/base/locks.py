"""One process at a time for one piece of work, on one machine; and who is still using a shared resource.

The locks are the operating system's (``flock``): they die with their holder, also under ``kill -9``, and need no
time-out. ``exclusive`` spares double work; correctness never rests on it (results are content-addressed, attempts are
fenced).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.base.errors import Recoverable


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path``; calls ``on_wait`` once when another process holds it.

    Raises Recoverable when the file cannot be made.
    """
    with _held(path, fcntl.LOCK_EX, on_wait):
        yield


@contextmanager
def shared(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path`` together with others that share it; nobody holds it by `try_exclusive` meanwhile.

    Calls ``on_wait`` and raises as `exclusive`.
    """
    with _held(path, fcntl.LOCK_SH, on_wait):
        yield


def try_exclusive(path: Path) -> int | None:
    """Descriptor that holds the lock file ``path`` until it is closed, here and in those that inherited it; None where
    another holds it. Raises Recoverable when the file cannot be made."""
    descriptor = _open(path)
    if _try(descriptor, fcntl.LOCK_EX):
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def _held(path: Path, kind: int, on_wait: Callable[[], None]) -> Iterator[None]:
    descriptor = _open(path)
    try:
        if not _try(descriptor, kind):
            on_wait()
            fcntl.flock(descriptor, kind)
        yield
    finally:
        # Closing would not do: a process that was forked meanwhile, such as an engine, shares the open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Recoverable(f"lock file {path} cannot be made: {error.strerror}") from error


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise Recoverable(f"file cannot be locked here: {error.strerror}; use a folder on a local disk") from error
    return True
