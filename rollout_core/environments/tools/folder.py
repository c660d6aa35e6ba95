"""The folder of an episode, as tools use it: by names that a model gave, which never lead out of it.

Nothing follows a symbolic link, and files that tools write are regular ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rollout_core.environments.tools.results import ToolError

MOST_NAME = 255
"""Bytes of a part of a name, as file systems take it."""
MOST_PATH = 1_000
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """A file or folder as it was found."""

    is_folder: bool
    size: int
    changed_ns: int
    inode: int
    is_executable: bool


def parts_of(path: str) -> list[str]:
    """The names that ``path`` is made of, below the folder; none for the folder itself. Raises ToolError for what leads
    out of it or is no name."""
    if path.startswith("/"):
        raise ToolError(f"{path[:80]!r} is an absolute path; give one relative to the working folder")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{path[:80]!r} leads out of the working folder; leave out '..'")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise ToolError(f"{ascii(path)[:80]} is no name of a file; use valid characters") from None
    if "\0" in path or max(sizes, default=0) > MOST_NAME or sum(sizes) > MOST_PATH:
        raise ToolError(f"{path[:80]!r} is no name of a file; give one that is shorter and holds no null character")
    return parts


class EpisodeFolder:
    """One folder. ``lock`` is held by calls that read or change it, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = asyncio.Lock()

    def read(self, path: str, most: int) -> bytes:
        """A file's content. Raises ToolError where it is none, or larger than ``most``."""
        with self._parent(path) as (parent, name), _faults(path):
            with _opened(path, name, os.O_RDONLY, parent) as file:
                size = os.fstat(file.fileno()).st_size
                if size > most:
                    raise ToolError(f"{path} has {size:,} bytes; at most {most:,} can be read")
                return file.read(most)

    def write(self, path: str, content: bytes, *, is_executable: bool = False, changed_ns: int | None = None) -> None:
        """Write a file, and the folders above it. ``changed_ns``: when it was changed; None: now. Raises ToolError
        where that cannot be."""
        with self._parent(path, make=True) as (parent, name), _faults(path):
            # Another file than the one before, as that may be open elsewhere.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            mode = 0o755 if is_executable else 0o644
            with _opened(path, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, parent, mode) as file:
                file.write(content)
                file.flush()
                if changed_ns is not None:
                    os.utime(file.fileno(), ns=(changed_ns, changed_ns))

    def make_folder(self, path: str) -> None:
        """Make a folder, and those above it, where they are not there."""
        with self._entered(path, parts_of(path), make=True):
            pass

    def remove(self, path: str) -> None:
        """Remove a file, or a folder that is empty; nothing where neither is there."""
        with contextlib.suppress(ToolError), self._parent(path) as (parent, name):
            try:
                os.unlink(name, dir_fd=parent)
            except FileNotFoundError:
                return
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=parent)

    def entries(self) -> dict[str, Entry]:
        """All files and folders, by their paths."""
        return dict(_entries(str(self.path), ""))

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that ``path`` is in, and its name there."""
        parts = parts_of(path)
        if not parts:
            raise ToolError(f"{path!r} is the working folder itself; give the name of a file in it")
        with self._entered(path, parts[:-1], make=make) as descriptor:
            yield descriptor, parts[-1]

    @contextlib.contextmanager
    def _entered(self, path: str, parts: Sequence[str], *, make: bool) -> Iterator[int]:
        """A descriptor of the folder that ``parts`` lead to. A folder that a link has replaced is not entered."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                with _faults(path):
                    if make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, dir_fd=descriptor)
                    below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _opened(path: str, name: str, flags: int, parent: int, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A regular file. Raises ToolError where it is something else, such as a pipe, which would be waited for."""
    descriptor = os.open(name, flags | os.O_NONBLOCK | _NO_LINK, mode, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ToolError(f"{path} is no file")
    with open(descriptor, "wb" if flags & os.O_WRONLY else "rb") as file:
        yield file  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def _faults(path: str) -> Iterator[None]:
    """Raise as ToolError what the model can do something about; another fault is the machine's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ToolError(f"{path} does not exist") from None
        if error.errno == errno.EISDIR:
            raise ToolError(f"{path} is a folder") from None
        if error.errno in (errno.ELOOP, errno.EEXIST, errno.ENXIO):
            raise ToolError(f"{path} is no plain file or folder") from None
        if error.errno == errno.ENAMETOOLONG:
            raise ToolError(f"{path} is too long a name") from None
        raise


def _entries(folder: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    for entry in os.scandir(folder):
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = prefix + entry.name
        if stat.S_ISDIR(found.st_mode):
            yield path, Entry(True, 0, 0, 0, True)
            yield from _entries(entry.path, f"{path}/")
        elif stat.S_ISREG(found.st_mode):
            yield path, Entry(False, found.st_size, found.st_mtime_ns, found.st_ino, bool(found.st_mode & 0o100))
