"""Where an object store's files physically are: a local disk, written so that power loss cannot undo an acknowledged
write, or any file system fsspec knows.

A medium knows paths and bytes, nothing of content ids. Reading or sizing what is not there gives None; deleting it is no
error; every write replaces its target at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ulid import ULID

from rollout_core.errors import ConfigError


class Medium(Protocol):
    """Paths are relative, with forward slashes."""

    def read(self, path: str) -> bytes | None: ...
    def read_stream(self, path: str, chunk_bytes: int) -> Iterator[bytes] | None: ...
    def write(self, path: str, data: bytes) -> None: ...
    def write_stream(self, path: str, chunks: Iterable[bytes]) -> int: ...
    def move(self, source: str, target: str) -> None: ...
    def size(self, path: str) -> int | None: ...
    def delete(self, path: str) -> None: ...
    def list(self, path: str) -> Iterator[tuple[str, float]]: ...


class LocalMedium:
    """A folder. Files are synced before they are renamed into place, and the folder entry after."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def read_stream(self, path: str, chunk_bytes: int) -> Iterator[bytes] | None:
        try:
            file = (self._root / path).open("rb", buffering=0)
        except FileNotFoundError:
            return None
        return _chunks(file, chunk_bytes)

    def write(self, path: str, data: bytes) -> None:
        scratch = f"tmp/{ULID()}"
        try:
            self.write_stream(scratch, [data])
            self.move(scratch, path)
        finally:
            self.delete(scratch)

    def write_stream(self, path: str, chunks: Iterable[bytes]) -> int:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        with target.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
                size += len(chunk)
            os.fsync(file.fileno())
        return size

    def move(self, source: str, target: str) -> None:
        destination = self._root / target
        self._make_folder(destination.parent)
        try:
            (self._root / source).rename(destination)
        except FileNotFoundError:
            if (self._root / source).exists():
                raise
            return  # another process was first
        _sync_folder(destination.parent)

    def size(self, path: str) -> int | None:
        try:
            return (self._root / path).stat().st_size
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def list(self, path: str) -> Iterator[tuple[str, float]]:
        for root, _, files in os.walk(self._root / path):
            for name in files:
                file = Path(root) / name
                try:
                    yield file.relative_to(self._root).as_posix(), file.stat().st_mtime
                except FileNotFoundError:
                    continue  # deleted while listing

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and sync the entries of all that is new above it."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            _sync_folder(new.parent)


def _chunks(file: Any, chunk_bytes: int) -> Iterator[bytes]:
    with file:
        while chunk := file.read(chunk_bytes):
            yield chunk


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteMedium:
    """Any fsspec file system. A small object is written in one request, which these services make visible at once; a
    stream is written under ``tmp/`` and copied to its place by the service itself."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import fsspec

        try:
            self._fs, self._root = fsspec.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"object store URL {url!r}: {error}") from error
        # Listings are cached by fsspec; other processes write here too.
        self._fs.use_listings_cache = False

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def read(self, path: str) -> bytes | None:
        try:
            return self._fs.cat_file(self._path(path))
        except FileNotFoundError:
            return None

    def read_stream(self, path: str, chunk_bytes: int) -> Iterator[bytes] | None:
        try:
            file = self._fs.open(self._path(path), "rb", cache_type="readahead")
        except FileNotFoundError:
            return None
        return _chunks(file, chunk_bytes)

    def write(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(path), data)

    def write_stream(self, path: str, chunks: Iterable[bytes]) -> int:
        size = 0
        with self._fs.open(self._path(path), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
        return size

    def move(self, source: str, target: str) -> None:
        try:
            self._fs.cp_file(self._path(source), self._path(target))
        except FileNotFoundError:
            return  # another process was first
        self.delete(source)

    def size(self, path: str) -> int | None:
        try:
            self._fs.invalidate_cache(self._path(path))
            return self._fs.info(self._path(path))["size"]
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        try:
            self._fs.rm_file(self._path(path))
        except FileNotFoundError:
            return

    def list(self, path: str) -> Iterator[tuple[str, float]]:
        self._fs.invalidate_cache()
        root = self._path("")
        for name, info in self._fs.find(self._path(path), detail=True).items():
            written = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated")
            yield name.removeprefix(root), _seconds(written)


def _seconds(moment: Any) -> float:
    from datetime import datetime

    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return moment.timestamp() if isinstance(moment, datetime) else float(moment or 0.0)
