"""What is locked while it is in use: one piece of work on one machine, a resource that several share, and files and
folders that end with the process that made them.

The locks are the operating system's (``flock``): they die with their holder, also under ``kill -9``, hold between
containers that share a folder, and need neither a time-out nor process ids, which come back. ``exclusive`` spares
double work; correctness never rests on it (results are content-addressed, attempts are fenced). Of scratch folders, who
comes later removes what nobody has locked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_core.base.errors import Recoverable
from rollout_core.base.stopping import on_abandoned, raise_if_stopping

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
"""Between two looks at a lock that another holds: a thread that waits in ``flock`` itself cannot be interrupted."""


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path``; calls ``on_wait`` once when another process holds it.

    Raises Recoverable when the file cannot be made, and Stopped where the work that waits is to stop. The lock is let
    go of before the end of the block where the block's work was left behind (`stopping.Interruption`).
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
            while not _try(descriptor, kind):
                raise_if_stopping(f"waiting for {path.name}")
                time.sleep(_POLL_SECONDS)
        with on_abandoned(lambda: fcntl.flock(descriptor, fcntl.LOCK_UN)):
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


SCRATCH_PREFIX = "rollout-scratch-"
SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "shared-memory"
"""File in a scratch folder: names of segments of shared memory that go with it, a line each."""
_SEGMENT_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_swept: set[str] = set()
"""Folders in which this process has looked for what others left."""


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new folder in the system's place for temporary files, gone when the block ends.

    What a killed process left there is removed by the next one that is started.
    """
    sweep_scratch()
    with held(lambda: Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{purpose}-"))) as folder:
        try:
            yield folder
        finally:
            _remove_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)


def note_shared_memory(folder: Path, name: str) -> None:
    """Have the segment of this name removed with the scratch folder. Several processes may note theirs at a time."""
    with (folder / _SEGMENTS).open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")


def noted_shared_memory(folder: Path) -> list[str]:
    """Names of the segments that are removed with a scratch folder."""
    try:
        names = (folder / _SEGMENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [name for name in names if _SEGMENT_NAME.fullmatch(name)]


def _remove_segments(folder: Path) -> None:
    for name in noted_shared_memory(folder):
        with suppress(OSError):
            (SHARED_MEMORY / name).unlink()


def sweep_scratch() -> None:
    """Remove the scratch folders of dead processes, once a process."""
    folder = tempfile.gettempdir()
    if folder not in _swept:
        _swept.add(folder)
        removed = sweep(Path(folder), f"{SCRATCH_PREFIX}*")
        if removed:
            log.info("removed from %s what killed processes left: %s", folder, ", ".join(removed))


@contextmanager
def held(make: Callable[[], Path]) -> Iterator[Path]:
    """A file or folder that ``make`` makes under a new name; `sweep` leaves it alone while the block runs."""
    path, descriptor = make(), None
    while (descriptor := _locked(path)) is None:
        path = make()  # a sweep was quicker
    try:
        yield path
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of ``path``; None where it is gone, or about to be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    lock(descriptor)
    try:
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None


def lock(descriptor: int) -> None:
    """Have `sweep` leave this open file or folder alone while the descriptor, or one inherited from it, is open."""
    # Where a file system has no such locks, a sweep removes nothing either.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def sweep(folder: Path, pattern: str, *, min_age_seconds: float = 0.0) -> list[str]:
    """Remove this user's files and folders of matching names that nobody has locked; returns the names.

    Those changed within ``min_age_seconds`` stay.
    """
    changed_before = time.time() - min_age_seconds
    return sorted(path.name for path in folder.glob(pattern) if _removed(path, changed_before))


def _removed(path: Path, changed_before: float) -> bool:
    try:
        # Without waiting for a pipe's other end, and not what a link of somebody else leads to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mtime > changed_before:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            _remove_segments(path)
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
