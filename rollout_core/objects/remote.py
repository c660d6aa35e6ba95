"""Files of an object store in a bucket (S3, GCS) or in this process's memory, through fsspec."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, islice
from typing import Any

from ulid import ULID

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.objects.files import TOUCH_AFTER_SECONDS, FileStat, storage_faults
from rollout_core.objects.hashing import have_id, once_whole

READ_BYTES = 8 * 2**20
READ_AHEAD = 4
UPLOAD_PART_BYTES = 32 * 2**20  # S3 takes 10,000 parts, so a file may have 320 GB; GCS wants a multiple of 256 KiB


class RemoteFiles:
    """A prefix of a bucket. One PUT is atomic and durable there, so small files are written in place.

    Larger ones go to ``tmp/`` and are copied by the server, since their name is known only when all bytes have passed.
    Uploads in parts that a killed process left behind are invisible; a lifecycle rule of the bucket should drop them.
    """

    parallel = 8
    cheap_write_bytes = 64 * 2**10
    whole_write_bytes = UPLOAD_PART_BYTES

    def __init__(self, protocol: str, root: str, options: Mapping[str, Any]) -> None:
        self.protocol = protocol
        """``s3``, ``gs`` or ``memory``."""
        self._root = root
        self._options = options
        self._fs: Any = None
        self._fs_process: int | None = None

    @property
    def fs(self) -> Any:
        """The fsspec file system; it starts a thread, so it is made at first use and again after a fork."""
        if self._fs_process != os.getpid():
            if self.protocol == "gs":
                # gcsfs otherwise asks an API for the kind of bucket, which stalls the first write where it is blocked.
                os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            import fsspec

            try:
                # Another process may write at any time, so a listing must never be answered from a cache.
                self._fs = fsspec.filesystem(self.protocol, use_listings_cache=False, **self._options)
            except ImportError as error:
                extra = {"s3": "s3", "gs": "gcs"}.get(self.protocol, self.protocol)
                raise ConfigError(
                    f"{self.protocol}:// needs a package: pip install '{DISTRIBUTION}[{extra}]'"
                ) from error
            self._fs_process = os.getpid()
        return self._fs

    def where(self, key: str) -> str:
        return f"{self.protocol}://{self.path(key).lstrip('/')}"

    def stat(self, key: str) -> FileStat | None:
        with storage_faults("look at", self.where(key)):
            try:
                found = self.fs.info(self.path(key))
            except FileNotFoundError:
                return None
            return _file_stat(found) if found["type"] == "file" else None

    def holds(
        self, key: str, stat: FileStat, content_id: ContentId, source: Callable[[], Iterable[bytes]] | None
    ) -> bool:
        """By the service's MD5 of what it stored, where it gives one. It gives none for files in parts or encrypted by
        a customer's key: those are written again."""
        if self.protocol == "memory":
            return have_id(self.read_chunks(key), content_id)
        if source is None or stat.mark is None:
            return False
        return once_whole(self.where(key), stat.mark, lambda: _md5(source()) == stat.mark)

    def keep(self, key: str, stat: FileStat) -> bool:
        if time.time() - stat.modified < TOUCH_AFTER_SECONDS:
            return True
        temporary = f"tmp/{ULID()}"
        with storage_faults("touch", self.where(key)):
            try:
                # S3 refuses to copy an object onto itself.
                self.fs.cp_file(self.path(key), self.path(temporary))
                self.fs.cp_file(self.path(temporary), self.path(key))
            except FileNotFoundError:
                return False
            finally:
                self.discard(temporary)
        return True

    def read(self, key: str) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.fs.cat_file(self.path(key))

    def read_part(self, key: str, start: int, size: int) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.fs.cat_file(self.path(key), start=start, end=start + size)

    def read_chunks(self, key: str) -> Iterator[bytes]:
        stat = self.stat(key)
        if stat is None:
            raise FileNotFoundError(self.where(key))

        def fetch(start: int) -> bytes:
            with storage_faults("read", self.where(key)):
                return self.fs.cat_file(self.path(key), start=start, end=min(start + READ_BYTES, stat.size))

        starts = iter(range(0, stat.size, READ_BYTES))
        if stat.size <= READ_BYTES:
            yield from map(fetch, starts)
            return
        pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="object-read")
        try:
            ahead = deque(pool.submit(fetch, start) for start in islice(starts, READ_AHEAD))
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(pool.submit(fetch, start) for start in islice(starts, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def write(self, key: str, data: bytes) -> None:
        with self.writing(key):
            self.fs.pipe_file(self.path(key), data)

    def upload(self) -> RemoteUpload:
        return RemoteUpload(self)

    def move(self, source: str, target: str) -> None:
        with storage_faults("move", self.where(source)):
            self.fs.cp_file(self.path(source), self.path(target))
            self.discard(source)

    def delete(self, key: str) -> None:
        with storage_faults("delete", self.where(key)), suppress(FileNotFoundError):
            self.fs.rm_file(self.path(key))

    def list(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        # fsspec returns a listing as a whole; one for each subfolder stays small where there are millions of blobs.
        with storage_faults("list", self.where(folder)):
            try:
                entries = self.fs.ls(self.path(folder), detail=True)
            except FileNotFoundError:
                return
        subfolders = [entry["name"] for entry in entries if entry["type"] == "directory"]
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="object-list") as pool:
            listings = pool.map(self._find, subfolders)
            for entry in [*(e for e in entries if e["type"] == "file"), *chain.from_iterable(listings)]:
                yield entry["name"][len(self.path("")) :], _file_stat(entry)

    def _find(self, path: str) -> list[dict[str, Any]]:
        with storage_faults("list", path):
            return list(self.fs.find(path, detail=True).values())

    def path(self, key: str) -> str:
        """What fsspec calls ``key``."""
        return f"{self._root}/{key}"

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """`storage_faults` of a write, where "not found" can only mean the bucket."""
        with storage_faults("write", self.where(key)):
            try:
                yield
            except FileNotFoundError as error:
                raise ConfigError(f"no bucket at {self.where('')}: create it, or correct the storage URL") from error

    def discard(self, key: str) -> None:
        """Delete a temporary file; what cannot be deleted now is left to garbage collection."""
        with suppress(Exception):
            self.fs.rm_file(self.path(key))


class RemoteUpload:
    """Parts of a file at ``tmp/``, which the server copies to its key."""

    def __init__(self, files: RemoteFiles) -> None:
        self._files = files
        self._key = f"tmp/{ULID()}"
        with files.writing(self._key):
            self._file = files.fs.open(files.path(self._key), "wb", block_size=UPLOAD_PART_BYTES)
        self._open = True

    def write(self, chunk: bytes) -> None:
        with self._files.writing(self._key):
            self._file.write(chunk)

    def commit(self, key: str) -> None:
        with self._files.writing(key):
            self._file.close()
            self._files.fs.cp_file(self._files.path(self._key), self._files.path(key))
        self._files.discard(self._key)
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        if not self._file.closed:
            with suppress(Exception):
                self._file.discard()
            # fsspec's finaliser would otherwise close the file, and closing it completes the upload.
            with suppress(AttributeError):
                self._file.closed = True
        self._files.discard(self._key)


def _file_stat(info: Mapping[str, Any]) -> FileStat:
    when = next((info[name] for name in ("LastModified", "updated", "mtime", "created") if info.get(name)), 0.0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    modified = when.timestamp() if isinstance(when, datetime) else float(when)
    return FileStat(int(info["size"]), modified, _tag(info))


def _tag(info: Mapping[str, Any]) -> str | None:
    """The entity tag of a file, or its MD5, in hex digits, which the tag is for most files."""
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    return info["ETag"].strip('"') if info.get("ETag") else None


def _md5(chunks: Iterable[bytes]) -> str:
    hasher = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()
