"""A folder as a manifest: sorted relative paths, sizes and content ids; and the one tar stream that stands for it.

Two folders that share files share blobs. Modes, times and empty folders are not kept: a tree is what its files say.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollout_core.base.ids import ContentId


def _safe_path(path: str) -> str:
    if not path or "\x00" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"unsafe path {path!r}; expected a relative path without '..', '.' or empty parts")
    return path


class TreeFile(BaseModel):
    """One file of a tree. ``path`` is relative, with forward slashes; ``size`` is in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, AfterValidator(_safe_path)]
    size: Annotated[int, Field(ge=0)]
    content_id: ContentId


def _canonical(files: tuple[TreeFile, ...]) -> tuple[TreeFile, ...]:
    for before, after in pairwise(files):
        if before.path >= after.path:
            raise ValueError(f"path {after.path!r} follows {before.path!r}; expected sorted paths, each once")
    names = {file.path for file in files}
    for name in names:
        for folder in parent_folders(name):
            if folder in names:
                raise ValueError(f"path {folder!r} is both a file and a folder")
    return files


class TreeManifest(BaseModel):
    """What a folder holds. Its canonical JSON is the blob whose id stands for the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tree/1"] = "tree/1"
    files: Annotated[tuple[TreeFile, ...], AfterValidator(_canonical)]

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(file.size for file in self.files)


TREE_BEGINS = b'{"files":['
"""How the canonical JSON of every manifest begins."""


def parent_folders(path: str) -> Iterator[str]:
    """Folders that lead to ``path``, outermost first: ``a`` and ``a/b`` for ``a/b/c``."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        yield "/".join(parts[:depth])


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
