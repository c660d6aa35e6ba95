"""An object store's files in a local folder: written aside, fsynced, renamed, and the directory fsynced; and which kind
of files another place has."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from ulid import ULID

from rollout_core.base.ids import ContentId
from rollout_core.base.locks import lock, sweep
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.objects.files import (
    CHUNK_BYTES,
    TOUCH_AFTER_SECONDS,
    FileStat,
    check_once,
    fsync_folder,
    hash_chunks,
    storage_faults,
    write_all,
)
from rollout_core.objects.s3 import S3Files

log = logging.getLogger(__name__)

_SURELY_SYNCED_SECONDS = 600.0
LEFTOVER_AFTER_SECONDS = 3600.0
"""A file in ``tmp/`` that nobody has locked, nor written to for so long, is a killed writer's."""
_swept: set[str] = set()
"""Roots of the stores whose ``tmp/`` this process has swept."""


def remote_files(protocol: str, root: str, options: Mapping[str, Any], *, max_bytes: int | None = None) -> RemoteFiles:
    """Files of up to ``max_bytes`` each below ``root``, a bucket with or without a prefix, of ``s3``, ``gs`` or
    ``memory``."""
    return (S3Files if protocol == "s3" else RemoteFiles)(protocol, root, options, max_bytes)


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
            whole = check_once(self._path(key), stat.mark, lambda: hash_chunks(self.read_chunks(key)) == content_id)
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

    def upload(self, key: str | None = None) -> LocalUpload:
        return LocalUpload(self)

    def take(self, path: Path, key: str) -> bool:
        link = self._path(f"tmp/{ULID()}")
        with storage_faults("write", self._path(key)):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return False  # of a symbolic link the permissions below would be those of what it leads to
            self._make_folder(os.path.dirname(link))
            try:
                os.utime(path)  # or another process would take the link for what a killed writer left
                os.link(path, link)
            except OSError:  # on another file system, or one that has no links
                return False
            try:
                folder, file = os.stat(os.path.dirname(link)), os.stat(link)
                if folder.st_mode & stat.S_ISGID and folder.st_gid != file.st_gid:
                    return False  # a copy is the group's
                os.chmod(link, folder.st_mode & 0o444)  # who made the file may have kept it to the owner
                descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.utime(link)
                self._rename(link, self._path(key))
            finally:
                with suppress(OSError):  # also where it is left, as one that was taken twice has both names then
                    os.unlink(link)
        return True

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

    def drop_uploads(self, begun_before: float, *, dry_run: bool) -> int:
        return 0  # they are files in `tmp/`

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
