"""An object store under another that takes what is written: to see what a run would do, and change nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rollout_core.base.ids import ContentId
from rollout_core.objects.backends import LocalFiles
from rollout_core.objects.files import CHUNK_BYTES, Files, FileStat
from rollout_core.objects.object_store import ObjectStore

KEPT_BYTES = 128 * 2**20
"""Of blobs from memory: so much of the first is kept, on disk, and so much of the last, in memory."""
HEAD_BYTES = 2**20
"""Of a large file, so much of its beginning is kept, where a safetensors file says which tensors it has."""


def overlaid(objects: ObjectStore, folder: Path, *, kept_bytes: int = KEPT_BYTES) -> ObjectStore:
    """A store that begins with what ``objects`` has; whatever is written or deleted there, ``objects`` stays as it is.

    What is written lies in ``folder``. Of large files the sizes and `HEAD_BYTES` alone are kept: they are there, but
    what reads on raises MissingObject. So it is with blobs between the first and the last ``kept_bytes``, as of an
    input of any size that is cut into shards, which have no beginning either.
    """
    files = OverlaidFiles(objects.files, LocalFiles(str(folder)), kept_bytes)
    return ObjectStore(objects.url, files, objects.storage_options)


class OverlaidFiles:
    """See `overlaid`."""

    cheap_write_bytes = -1
    whole_write_bytes = CHUNK_BYTES

    def __init__(self, under: Files, own: LocalFiles, kept_bytes: int) -> None:
        self.parallel = under.parallel
        self.settle_seconds = under.settle_seconds
        self._under = under
        self._own = own
        self._noted: dict[str, FileStat] = {}
        """Files that are not kept, or in memory."""
        self._heads: dict[str, str] = {}
        """By file that is not kept, its own file with the beginning."""
        self._kept_bytes = kept_bytes
        self._first_bytes = 0
        self._last: dict[str, bytes] = {}
        """The blobs written last, which an index of all others is among."""
        self._last_bytes = 0
        self._lock = threading.Lock()
        self._gone: set[str] = set()
        """Files of the store that were deleted here."""

    def where(self, key: str) -> str:
        return self._under.where(key)

    def stat(self, key: str) -> FileStat | None:
        if key in self._gone:
            return None
        return self._noted.get(key) or self._own.stat(key) or self._under.stat(key)

    def holds(
        self, key: str, stat: FileStat, content_id: ContentId, source: Callable[[], Iterable[bytes]] | None
    ) -> bool:
        return True  # a real put looks; here nothing depends on it

    def keep(self, key: str, stat: FileStat) -> bool:
        return True

    def read(self, key: str) -> bytes:
        data = self._last.get(key)
        return self._holder(key).read(key) if data is None else data

    def read_part(self, key: str, start: int, size: int) -> bytes:
        data = self._last.get(key)
        return self._holder(key).read_part(key, start, size) if data is None else data[start : start + size]

    def read_chunks(self, key: str) -> Iterator[bytes]:
        data = self._last.get(key)
        if data is not None:
            return iter([data])
        return self._beginning(key) if key in self._heads else self._holder(key).read_chunks(key)

    def _beginning(self, key: str) -> Iterator[bytes]:
        head = self._own.read(self._heads[key])
        yield head[:-1]
        yield head[-1:]  # a stream gives a chunk once it has the next one
        raise FileNotFoundError(key)

    def write(self, key: str, data: bytes) -> None:
        if key.startswith("cas/") and not self._is_among_first(len(data)):
            self._keep_as_last(key, data)
            return
        self._gone.discard(key)
        self._own.write(key, data)

    def upload(self, key: str | None = None) -> _Noted:
        return _Noted(self._note_beginning)

    def take(self, path: Path, key: str) -> bool:
        return False

    def move(self, source: str, target: str) -> None:
        self.write(target, self.read(source))
        self.delete(source)

    def delete(self, key: str) -> None:
        self._own.delete(key)
        self._noted.pop(key, None)
        self._heads.pop(key, None)
        with self._lock:
            self._last_bytes -= len(self._last.pop(key, b""))
        self._gone.add(key)

    def drop_uploads(self, begun_before: float, *, dry_run: bool) -> int:
        return 0

    def list(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        found = dict(self._under.list(folder)) | dict(self._own.list(folder))
        found |= {key: stat for key, stat in self._noted.items() if key.startswith(f"{folder}/")}
        return ((key, stat) for key, stat in found.items() if key not in self._gone)

    def _is_among_first(self, size: int) -> bool:
        with self._lock:
            if self._first_bytes + size > self._kept_bytes:
                self._first_bytes = self._kept_bytes  # what comes later is not among the first, however small
                return False
            self._first_bytes += size
            return True

    def _keep_as_last(self, key: str, data: bytes) -> None:
        with self._lock:
            self._last_bytes += len(data) - len(self._last.pop(key, b""))
            self._last[key] = data
            while self._last_bytes > self._kept_bytes and len(self._last) > 1:
                self._last_bytes -= len(self._last.pop(next(iter(self._last))))
        self._note(key, len(data))

    def _note(self, key: str, size: int) -> None:
        self._gone.discard(key)
        self._noted[key] = FileStat(size, time.time())

    def _note_beginning(self, key: str, size: int, head: bytes) -> None:
        kept = f"heads/{len(self._heads)}-{len(self._noted)}"
        self._own.write(kept, head)
        self._note(key, size)
        self._heads[key] = kept

    def _holder(self, key: str) -> Files:
        if key in self._gone or key in self._noted:
            raise FileNotFoundError(key)
        return self._own if self._own.stat(key) is not None else self._under


class _Noted:
    """An upload of which the size and the beginning are kept."""

    def __init__(self, note: Callable[[str, int, bytes], None]) -> None:
        self._note = note
        self._size, self._head = 0, b""

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._head += chunk[: HEAD_BYTES - len(self._head)]

    def commit(self, key: str) -> None:
        self._note(key, self._size, self._head)

    def abort(self) -> None:
        self._size, self._head = 0, b""
