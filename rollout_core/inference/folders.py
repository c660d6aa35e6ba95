"""Where batch inference writes: a folder of this machine or a prefix of a bucket, with files that appear whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from rollout_core.base.errors import ConfigError
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import files_at, is_url, local_path, mark_of
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.objects.files import storage_faults
from rollout_core.objects.trees import hash_file, temp_sibling


class OutputFolder(Protocol):
    """Named files in one place. Methods raise Recoverable for passing faults, ConfigError where access is refused."""

    def where(self, name: str) -> str:
        """Address of a file, for people and as its identity."""
        ...

    def check(self, *names: str) -> None:
        """Raise ConfigError where files of these names cannot be written, as far as that is known without writing."""
        ...

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None where there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, whole or not at all; False, and nothing done, where there is one."""
        ...

    def replace(self, name: str, chunks: Iterable[bytes]) -> str | None:
        """Write a file of any size, which takes the place of what is there once it is whole and durable. Returns its
        `mark`."""
        ...

    def mark(self, name: str) -> str | None:
        """What changes with a file's content; None where there is no file, or nothing to tell by."""
        ...


def output_folder(address: str, base: Path, objects: ObjectStore | None = None) -> OutputFolder:
    """The folder at an address; a relative path starts at ``base``. Nothing is made before the first write."""
    if is_url(address):
        return BucketFolder(*files_at(address, objects))
    return LocalFolder(base / local_path(address))


class LocalFolder:
    """A folder on this machine. A file's mark is the digest of its bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def where(self, name: str) -> str:
        return str(self._path / name)

    def check(self, *names: str) -> None:
        for folder in (self._path / name for name in names if (self._path / name).is_dir()):
            raise ConfigError(f"{folder} is a folder, but a file of that name is to be written; remove it")
        nearest = next(place for place in (self._path, *self._path.parents) if place.exists())
        if not nearest.is_dir():
            raise ConfigError(f"{nearest} is a file; expected a folder, or one that can be made")
        if not os.access(nearest, os.W_OK):
            raise ConfigError(f"no permission to write in {nearest}")

    def read(self, name: str) -> bytes | None:
        with storage_faults("read", self.where(name)):
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                return None

    def create(self, name: str, data: bytes) -> bool:
        with temp_sibling(self._path / name) as file:
            file.write(data)
            return file.publish_if_absent()

    def replace(self, name: str, chunks: Iterable[bytes]) -> str | None:
        hasher = blake3()
        with temp_sibling(self._path / name) as file:
            for chunk in chunks:
                hasher.update(chunk)
                file.write(chunk)
            file.appear()
        return hasher.hexdigest()

    def mark(self, name: str) -> str | None:
        path = self._path / name
        if not path.is_file():
            return None
        return hash_file(path)[1]


class BucketFolder:
    """A prefix of a bucket, where an upload becomes visible when it is complete. A file's mark is its entity tag."""

    def __init__(self, files: RemoteFiles, prefix: str) -> None:
        self._files = files
        self._prefix = prefix

    def where(self, name: str) -> str:
        return self._files.where(self._key(name))

    def check(self, *names: str) -> None:
        if not self._files.has_bucket():
            raise ConfigError(
                f"there is no bucket at {self._files.where('')}, or it cannot be reached; create it first"
            )

    def read(self, name: str) -> bytes | None:
        try:
            return self._files.read(self._key(name))
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        with self._files.writing(self._key(name)):
            try:
                # Refused by S3 where the key exists. Services that do not know the condition overwrite.
                self._files.fs.pipe_file(self._files.path(self._key(name)), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if str(getattr(error, "code", "")) != "412":
                    raise
                return False
        return True

    def replace(self, name: str, chunks: Iterable[bytes]) -> str | None:
        key = self._key(name)
        upload = self._files.temp_upload(key)
        try:
            for chunk in chunks:
                with storage_faults("write", self.where(name)):  # around this alone: rows have faults of their own
                    upload.write(chunk)
            upload.commit(key)
        except BaseException:
            upload.abort()
            raise
        return self.mark(name)

    def mark(self, name: str) -> str | None:
        with storage_faults("look at", self.where(name)):
            try:
                return mark_of(self._files.fs.info(self._files.path(self._key(name))))
            except FileNotFoundError:
                return None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
