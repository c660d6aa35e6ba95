"""Where an object store's files are: in a local folder (written aside, fsynced, renamed, and the directory fsynced), in
a bucket (S3, GCS) or in this process's memory, through fsspec.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from io import FileIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ulid import ULID

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import lock, sweep
from rollout_core.objects.files import (
    CHUNK_BYTES,
    TOUCH_AFTER_SECONDS,
    FileStat,
    fsync_folder,
    hash_chunks,
    once_whole,
    storage_faults,
    write_all,
)

log = logging.getLogger(__name__)

_SURELY_SYNCED_SECONDS = 600.0
LEFTOVER_AFTER_SECONDS = 3600.0
"""A file in ``tmp/`` that nobody has locked, nor written to for so long, is a killed writer's."""
_swept: set[str] = set()
"""Roots of the stores whose ``tmp/`` this process has swept."""


class LocalFiles:
    """A folder, shared by threads and processes. An acknowledged write survives a power cut."""

    parallel = 4
    cheap_write_bytes = -1
    whole_write_bytes = CHUNK_BYTES
    settle_seconds = 1.0

    def __init__(self, root: str) -> None:
        self.root = root
        # Folders whose own entries, up to the mount point, this process has fsynced.
        self._durable_folders: set[str] = set()

    def where(self, key: str) -> str:
        return self._path(key)

    def stat(self, key: str) -> FileStat | None:
        with storage_faults("look at", self._path(key)):
            try:
                status = os.stat(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return FileStat(status.st_size, status.st_mtime, (status.st_ino, status.st_ctime_ns))

    def holds(
        self, key: str, stat: FileStat, content_id: ContentId, source: Callable[[], Iterable[bytes]] | None
    ) -> bool:
        # Reading is several times as fast as writing with fsync, and done once a process.
        try:
            whole = once_whole(self._path(key), stat.mark, lambda: hash_chunks(self.read_chunks(key)) == content_id)
        except FileNotFoundError:
            return False
        if not whole:
            log.warning("%s did not match its id any more; it is written anew", self._path(key))
        return whole

    def keep(self, key: str, stat: FileStat) -> bool:
        age = time.time() - stat.modified
        try:
            if age > TOUCH_AFTER_SECONDS:
                os.utime(self._path(key))
            if age < _SURELY_SYNCED_SECONDS:
                # Whoever renamed the file into place may not have come to fsync its folder yet.
                self._sync_folder(os.path.dirname(self._path(key)))
        except OSError:
            return False
        return True

    def read(self, key: str) -> bytes:
        with storage_faults("read", self._path(key)), self._open(key) as file:
            return file.readall()

    def read_part(self, key: str, start: int, size: int) -> bytes:
        with storage_faults("read", self._path(key)), self._open(key) as file:
            file.seek(start)
            return file.read(size) or b""

    def read_chunks(self, key: str) -> Iterator[bytes]:
        with storage_faults("read", self._path(key)):
            file = self._open(key)
        with file:
            while True:
                with storage_faults("read", self._path(key)):
                    chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def write(self, key: str, data: bytes) -> None:
        upload = self.upload()
        try:
            upload.write(data)
            upload.commit(key)
        finally:
            upload.abort()

    def upload(self) -> LocalUpload:
        return LocalUpload(self)

    def move(self, source: str, target: str) -> None:
        with storage_faults("move", self._path(source)):
            self._rename(self._path(source), self._path(target))
            with suppress(FileNotFoundError):  # `delete` of another file emptied and removed the folder
                self._sync_folder(os.path.dirname(self._path(source)))

    def delete(self, key: str) -> None:
        with storage_faults("delete", self._path(key)):
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return
            folder = os.path.dirname(self._path(key))
            with suppress(FileNotFoundError):  # removed by who deleted another file of it at the same time
                self._sync_folder(folder)
            with suppress(OSError):
                os.rmdir(folder)  # fails unless empty

    def list(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        try:
            with storage_faults("list", self._path(folder)), os.scandir(self._path(folder)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in found:
            key = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self.list(key)
                continue
            with suppress(FileNotFoundError):  # deleted since the folder was read
                status = entry.stat(follow_symlinks=False)
                yield key, FileStat(status.st_size, status.st_mtime)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _open(self, key: str) -> FileIO:
        try:
            return FileIO(self._path(key))
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(self._path(key)) from error

    def _open_new(self) -> tuple[str, int]:
        path = self._path(f"tmp/{ULID()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            descriptor = os.open(path, flags, 0o666)
        lock(descriptor)
        self._sweep_once()
        return path, descriptor

    def _sweep_once(self) -> None:
        """Remove what killed writers left. Machines may share the folder without sharing locks, so not what is new."""
        if self.root not in _swept:
            _swept.add(self.root)
            sweep(Path(self._path("tmp")), "*", min_age_seconds=LEFTOVER_AFTER_SECONDS)

    def _rename(self, source: str, target: str) -> None:
        """Rename durably, making the folders of ``target``."""
        folder = os.path.dirname(target)
        while True:
            try:
                os.rename(source, target)
                break
            except FileNotFoundError:
                os.stat(source)
                self._make_folder(folder)  # `delete` of another process may remove it again, hence the loop
        self._sync_folder(folder)

    def _make_folder(self, folder: str) -> None:
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
            return
        except FileNotFoundError:
            self._make_folder(os.path.dirname(folder))
            self._make_folder(folder)
            return
        self._durable_folders.discard(folder)

    def _sync_folder(self, folder: str) -> None:
        """Fsync the entries of ``folder``, and once in this process the entries that lead to it."""
        fsync_folder(folder)
        while folder not in self._durable_folders and not os.path.ismount(folder):
            parent = os.path.dirname(folder)
            try:
                fsync_folder(parent)
            except PermissionError:
                if parent.startswith(self.root):
                    raise
                return  # above the root are folders of others, which we did not make
            self._durable_folders.add(folder)
            folder = parent


class LocalUpload:
    """A file in ``tmp/`` until it is renamed."""

    def __init__(self, files: LocalFiles) -> None:
        self._files = files
        with storage_faults("write below", files.root):
            self._path, descriptor = files._open_new()
        self._file = FileIO(descriptor, "w")
        self._open = True

    def write(self, chunk: bytes) -> None:
        with storage_faults("write", self._path):
            write_all(self._file, chunk)

    def commit(self, key: str) -> None:
        with storage_faults("write", self._files.where(key)):
            os.fsync(self._file.fileno())
            self._file.close()
            self._files._rename(self._path, self._files.where(key))
            self._open = False

    def abort(self) -> None:
        if self._open:
            self._open = False
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._path)


READ_BYTES = 8 * 2**20
READ_AHEAD = 4
REMOTE_SETTLE_SECONDS = 15.0
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
        self.settle_seconds = 0.0 if protocol == "memory" else REMOTE_SETTLE_SECONDS
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
            return hash_chunks(self.read_chunks(key)) == content_id
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
