"""The one tar stream that stands for a set of files, so that its hash can stand for a folder.

GNU format without compression. Entries are sorted by path, each folder before its files; times, owners and owner names
are zero or empty; modes are 0644 for files and 0755 for folders. Nothing of the machine or the moment enters.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator

from rollout_core.objects.trees import parent_folders


def tar_stream(sizes: Iterable[tuple[str, int]], read: Callable[[str], Iterable[bytes]]) -> Iterator[bytes]:
    """The tar of files given as (relative path, size in bytes), whose bytes come from ``read(path)``.

    Raises ValueError when a file does not have the size that was said.
    """
    by_path = dict(sizes)
    folders = {folder for path in by_path for folder in parent_folders(path)}
    written = 0
    for path in sorted([*by_path, *folders]):
        header = _header(path, by_path.get(path))
        yield header
        written += len(header)
        if path in by_path:
            yield from _exactly(read(path), path, by_path[path])
            padding = bytes(-by_path[path] % tarfile.BLOCKSIZE)
            yield padding
            written += by_path[path] + len(padding)
    end = bytes(2 * tarfile.BLOCKSIZE)
    yield end + bytes(-(written + len(end)) % tarfile.RECORDSIZE)


def _header(path: str, size: int | None) -> bytes:
    """Header of a file, or of a folder when ``size`` is None."""
    entry = tarfile.TarInfo(path)  # owner, group and time are 0, names empty
    entry.mode = 0o755 if size is None else 0o644
    entry.type = tarfile.DIRTYPE if size is None else tarfile.REGTYPE
    entry.size = size or 0
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def _exactly(chunks: Iterable[bytes], path: str, size: int) -> Iterator[bytes]:
    left = size
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left:
        raise ValueError(f"{path} is not {size} bytes long, as it was when its folder was read")
