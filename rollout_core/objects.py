"""Content-addressed bytes, streams and folders over a local folder, memory, or any fsspec URL.

Layout, the same everywhere: blobs at ``cas/<ab>/<cd>/<hex>``, mutable names at ``refs/<name>`` (a file that holds one
content id), unfinished writes under ``tmp/``, blobs whose bytes no longer match their id under ``corrupt/``. A put has
happened when it returns: on a local disk the bytes and the folder entry are synced first. Nothing is ever half visible.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError
from ulid import ULID

from rollout_core.errors import ConfigError, CorruptObject, MissingObject, Recoverable, RetryHint, RolloutError
from rollout_core.ids import ContentId, canonical_json
from rollout_core.media import LocalMedium, Medium, RemoteMedium

CHUNK_BYTES = 1 << 20
_REF_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


class TreeFile(BaseModel):
    """One file of a tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative, with forward slashes."""
    size: int
    """Bytes."""
    content_id: ContentId


class TreeManifest(BaseModel):
    """The files of a folder, sorted by path. A folder's content id is that of its manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[TreeFile, ...]


class ObjectStore:
    """Blobs by content id, trees of blobs, and refs. Cheap to build, safe to share between threads."""

    def __init__(self, url: str, medium: Medium, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._medium = medium
        self._storage_options = dict(storage_options or {})

    @classmethod
    def from_url(cls, url: str, *, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
        """The store at ``url``: a folder, ``file:///abs``, ``file://./rel``, ``memory://name``, ``s3://...``, ``gs://...``.

        Nothing is created before the first write. Raises ConfigError for a URL that names no file system.
        """
        if not url or url.isspace():
            raise ConfigError("the object store's URL is empty; give a folder or a URL such as s3://bucket/prefix")
        if "://" not in url or url.startswith("file://"):
            return cls(url, LocalMedium(Path(url.removeprefix("file://"))), storage_options)
        return cls(url, RemoteMedium(url, dict(storage_options or {})), storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.url, self._storage_options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    # Blobs

    def put_bytes(self, data: bytes) -> ContentId:
        """Store ``data``; storing what is there already costs a look."""
        content_id = ContentId(blake3(data).hexdigest())
        with self._errors("writing", content_id):
            if self._medium.size(_blob_path(content_id)) != len(data):
                self._medium.write(_blob_path(content_id), data)
        return content_id

    def put_stream(self, chunks: Iterable[bytes]) -> ContentId:
        """Store the joined ``chunks``, hashed while they stream, in constant memory."""
        hasher = blake3()

        def hashed() -> Iterator[bytes]:
            for chunk in chunks:
                hasher.update(chunk)
                yield chunk

        scratch = f"tmp/{ULID()}"
        with self._errors("writing", None):
            try:
                size = self._medium.write_stream(scratch, hashed())
                content_id = ContentId(hasher.hexdigest())
                if self._medium.size(_blob_path(content_id)) != size:
                    self._medium.move(scratch, _blob_path(content_id))
            finally:
                self._medium.delete(scratch)
        return content_id

    def put_file(self, path: Path) -> ContentId:
        """Store the content of a file. A file that is stored already is read once and not written."""
        content_id, size = _hash_file(path)
        if self._size(content_id) == size:
            return content_id
        with path.open("rb") as file:
            return self.put_stream(iter(lambda: file.read(CHUNK_BYTES), b""))

    def put_json(self, value: Any) -> ContentId:
        """Store the canonical JSON of ``value``."""
        return self.put_bytes(canonical_json(value))

    def get_bytes(self, content_id: ContentId) -> bytes:
        """Content of a blob, verified. Raises MissingObject, or CorruptObject after setting the blob aside."""
        with self._errors("reading", content_id):
            data = self._medium.read(_blob_path(content_id))
        if data is None:
            raise self._missing(content_id)
        if blake3(data).hexdigest() != content_id:
            raise self._set_aside(content_id)
        return data

    def get_json(self, content_id: ContentId) -> Any:
        """Parsed JSON of a blob."""
        return orjson.loads(self.get_bytes(content_id))

    def stream(self, content_id: ContentId) -> Iterator[bytes]:
        """Chunks of a blob; the last one only comes after all bytes were verified."""
        hasher = blake3()
        held: bytes | None = None
        with self._errors("reading", content_id):
            chunks = self._medium.read_stream(_blob_path(content_id), CHUNK_BYTES)
            if chunks is None:
                raise self._missing(content_id)
            for chunk in chunks:
                hasher.update(chunk)
                if held is not None:
                    yield held
                held = chunk
        if hasher.hexdigest() != content_id:
            raise self._set_aside(content_id)
        if held is not None:
            yield held

    def get_file(self, content_id: ContentId, path: Path) -> None:
        """Write a blob to ``path``, which appears whole and verified or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{ULID()}.tmp")
        try:
            with scratch.open("wb") as file:
                file.writelines(self.stream(content_id))
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def exists(self, content_id: ContentId) -> bool:
        """Whether the blob is there. Its content is not read."""
        return self._size(content_id) is not None

    def size(self, content_id: ContentId) -> int:
        """Size of a blob in bytes. Raises MissingObject."""
        size = self._size(content_id)
        if size is None:
            raise self._missing(content_id)
        return size

    def delete(self, content_id: ContentId) -> None:
        """Remove a blob; one that is not there is no error."""
        with self._errors("deleting", content_id):
            self._medium.delete(_blob_path(content_id))

    def list_blobs(self) -> Iterator[tuple[ContentId, float]]:
        """Content ids of all blobs, each with the time it was written (seconds since the epoch)."""
        with self._errors("listing", None):
            for path, written_at in self._medium.list("cas"):
                yield ContentId(PurePosixPath(path).name), written_at

    # Trees

    def put_tree(self, folder: Path) -> ContentId:
        """Store a folder's regular files and its manifest. Links are refused: they could lead out of the folder.

        Raises ConfigError for a folder that is not there or holds anything but files and folders.
        """
        files = [
            TreeFile(path=relative, size=path.stat().st_size, content_id=self.put_file(path))
            for relative, path in _walk(folder)
        ]
        return self.put_json(TreeManifest(files=tuple(files)).model_dump(mode="json"))

    def manifest(self, content_id: ContentId) -> TreeManifest:
        """The manifest of a tree. Raises ConfigError when the blob is none, or names a path outside of the tree."""
        try:
            manifest = TreeManifest.model_validate(orjson.loads(self.get_bytes(content_id)))
        except (ValidationError, orjson.JSONDecodeError) as error:
            raise ConfigError(f"object {content_id} is not a folder's manifest") from error
        _check_paths(content_id, [file.path for file in manifest.files])
        return manifest

    def get_tree(self, content_id: ContentId, folder: Path) -> None:
        """Write a tree to the new folder ``folder``, which appears whole and verified or not at all."""
        manifest = self.manifest(content_id)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for file in manifest.files:
                self.get_file(file.content_id, scratch / file.path)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def tree_is_present(self, content_id: ContentId) -> bool:
        """Whether the manifest and every file are there with the right sizes; the files' content is not read."""
        try:
            manifest = self.manifest(content_id)
        except (MissingObject, CorruptObject, ConfigError):
            return False
        return all(self._size(file.content_id) == file.size for file in manifest.files)

    def local_tree(self, content_id: ContentId, cache: Path) -> Path:
        """A local copy of a tree under ``cache``, made when it is not there. Several processes may ask at once."""
        folder = cache / content_id
        if not folder.is_dir():
            try:
                self.get_tree(content_id, folder)
            except RolloutError:
                raise
            except OSError:
                if not folder.is_dir():
                    raise
                # Another process renamed its copy into place first.
        return folder

    # Refs

    def set_ref(self, name: str, content_id: ContentId) -> None:
        """Point ``name`` (segments of letters, digits, ``._-``, joined by slashes) at ``content_id``, atomically."""
        with self._errors("writing ref", name):
            self._medium.write(_ref_path(name), content_id.encode())

    def get_ref(self, name: str) -> ContentId | None:
        """What ``name`` points at."""
        with self._errors("reading ref", name):
            data = self._medium.read(_ref_path(name))
        return ContentId(data.decode("ascii", "replace").strip()) if data is not None else None

    def delete_ref(self, name: str) -> None:
        """Forget ``name``; one that is not there is no error."""
        with self._errors("deleting ref", name):
            self._medium.delete(_ref_path(name))

    def list_refs(self, prefix: str) -> Iterator[tuple[str, ContentId]]:
        """Names under ``prefix/`` with what they point at, sorted; an empty prefix lists all."""
        path = _ref_path(prefix) if prefix else "refs"
        with self._errors("listing refs", prefix):
            names = sorted(found.removeprefix("refs/") for found, _ in self._medium.list(path))
        for name in names:
            content_id = self.get_ref(name)
            if content_id is not None:
                yield name, content_id

    def sweep_scratch(self, older_than: float) -> int:
        """Delete unfinished writes and set-aside blobs last written before ``older_than`` (seconds since the epoch)."""
        swept = 0
        for place in ("tmp", "corrupt"):
            for path, written_at in list(self._medium.list(place)):
                if written_at < older_than:
                    self._medium.delete(path)
                    swept += 1
        return swept

    def _size(self, content_id: ContentId) -> int | None:
        with self._errors("looking for", content_id):
            return self._medium.size(_blob_path(content_id))

    def _missing(self, content_id: ContentId) -> MissingObject:
        return MissingObject(
            content_id, f"object {content_id} is not in {self.url}; run the stage that made it again to bring it back"
        )

    def _set_aside(self, content_id: ContentId) -> CorruptObject:
        aside = f"corrupt/{content_id}-{ULID()}"
        with self._errors("setting aside", content_id):
            self._medium.move(_blob_path(content_id), aside)
        return CorruptObject(
            content_id,
            f"object {content_id} in {self.url} is corrupt: its bytes do not match its id. It was moved to {aside}; "
            "run again to compute it anew",
        )

    @contextmanager
    def _errors(self, action: str, what: str | None) -> Iterator[None]:
        try:
            yield
        except RolloutError:
            raise
        except PermissionError as error:
            raise ConfigError(f"no permission for {action} {what or 'an object'} in {self.url}: {error}") from error
        except (OSError, TimeoutError) as error:
            raise Recoverable(
                f"{action} {what or 'an object'} in {self.url} failed: {error}", RetryHint(1.0, 30.0)
            ) from error


def _rebuild(url: str, storage_options: dict[str, Any]) -> ObjectStore:
    return ObjectStore.from_url(url, storage_options=storage_options)


def _blob_path(content_id: ContentId) -> str:
    return f"cas/{content_id[:2]}/{content_id[2:4]}/{ContentId(content_id)}"


def _ref_path(name: str) -> str:
    if not _REF_NAME.fullmatch(name) or any(set(part) == {"."} for part in name.split("/")):
        raise ConfigError(f"bad ref name {name!r}; expected segments of letters, digits, '.', '_' and '-', joined by '/'")
    return f"refs/{name}"


def _hash_file(path: Path) -> tuple[ContentId, int]:
    hasher = blake3()
    size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise ConfigError(f"file {path} cannot be read: {error.strerror}") from error
    return ContentId(hasher.hexdigest()), size


def _walk(folder: Path) -> list[tuple[str, Path]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    found = []
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root) / name
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ConfigError(f"{path} is a link or no regular file; only files and folders can be stored")
        found += [((Path(root) / name).relative_to(folder).as_posix(), Path(root) / name) for name in files]
    return sorted(found)


def _check_paths(content_id: ContentId, paths: list[str]) -> None:
    for path in paths:
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise ConfigError(f"tree {content_id} names the path {path!r}, which leads out of its folder; refused")
    if len(set(paths)) != len(paths):
        raise ConfigError(f"tree {content_id} names a path twice; refused")

