"""The object store itself: blobs by content, refs by name, trees of blobs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ulid import ULID

from rollout_core.base.errors import (
    ConfigError,
    CorruptObject,
    CorruptRef,
    MissingObject,
    NotFound,
    Recoverable,
)
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.base.locks import exclusive, sweep
from rollout_core.base.settings import cache_bytes, max_blob_bytes, refuse_credentials, without_password
from rollout_core.objects.backends import LocalFiles, remote_files
from rollout_core.objects.files import (
    SNAPSHOT_REFS,
    SWEEPS,
    TOUCH_AFTER_SECONDS,
    ContentHasher,
    Files,
    FileStat,
    RefContent,
    encode_ref,
    hash_chunks,
    is_ref_name,
    ref_key,
    settled_ref,
    storage_faults,
)
from rollout_core.objects.local_trees import damaged_file, evict_local_trees, hold_local_tree, make_read_only, tree_lock
from rollout_core.objects.retention.sweeps import is_swept_away, wait_for_sweep
from rollout_core.objects.trees import (
    NO_CHECKS,
    NOTHING_GIVEN,
    Checks,
    FileMark,
    TreeFile,
    TreeManifest,
    appearing_folder,
    changed_meanwhile,
    expected,
    file_mark,
    files_of,
    hash_file,
    read_again,
    read_file,
    temp_sibling,
    write_new_file,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")


class ObjectStore:
    """Blobs named by the blake3 digest of their bytes, trees of them, and refs that name them.

    A put is durable when it returns, writes nothing when the blob is there whole, and is never half visible. A read is
    verified: a blob whose bytes do not match its id is moved aside to ``corrupt/`` and CorruptObject is raised, so that
    the stage that made it makes it again. Raises Recoverable for passing faults of the storage (full, throttled, lost
    connection) and ConfigError where access is refused.

    Cheap to build, safe for threads, picklable (settings only; ``memory://`` is another store in another process).
    Layout below the URL: ``cas/<ab>/<cd>/<hex>``, ``refs/<name>``, ``tmp/<ulid>``, ``corrupt/<hex>-<ulid>``.
    """

    def __init__(self, url: str, files: Files, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        """Normalised: a local folder is absolute, so that it means the same in another process."""
        self.files = files
        """Where the bytes are; for this package's own use."""
        self.storage_options = dict(storage_options)
        """What another process needs to build this store, in addition to the URL. May hold secrets."""

    @classmethod
    def from_url(cls, url: str, *, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
        """The store at ``url``: ``file:///folder``, ``file://./folder``, a plain path, ``memory://name``,
        ``s3://bucket/prefix`` or ``gs://bucket/prefix``. Nothing is created before the first write.

        ``storage_options`` go to s3fs or gcsfs (endpoint, key, secret, token). Raises ConfigError for anything else.
        """
        shown = without_password(refuse_credentials(url))
        scheme, separator, rest = url.partition("://")
        if not separator:
            if re.match(r"\w+:", url):
                raise ConfigError(
                    f"storage URL {shown!r} has one slash or none after the colon; expected file://, memory://, s3:// "
                    "or gs://, or a path (./ before it if its name has a colon)"
                )
            scheme, rest = "file", os.path.abspath(os.path.expanduser(url)) if url else ""
        if scheme == "file":
            if storage_options:
                raise ConfigError(f"storage URL {shown!r} takes no storage options; got {sorted(storage_options)}")
            if not rest.startswith(("/", "./", "../")):
                raise ConfigError(
                    f"storage URL {shown!r} names no folder; expected file:///absolute or file://./relative"
                )
            root = os.path.abspath(rest)
            if root == "/":
                raise ConfigError(f"storage URL {shown!r} is the root folder; expected a folder of its own")
            return cls(f"file://{root}", LocalFiles(root), {})
        if scheme not in ("memory", "s3", "gs"):
            raise ConfigError(f"storage URL {shown!r} is unknown; expected a path, file://, memory://, s3:// or gs://")
        root = rest.rstrip("/")
        if any(part in ("", ".", "..") for part in root.split("/")):
            raise ConfigError(f"storage URL {shown!r} is malformed; expected {scheme}://name or {scheme}://name/prefix")
        options = dict(storage_options or {})
        path = f"/{root}" if scheme == "memory" else root
        return cls(f"{scheme}://{root}", remote_files(scheme, path, options, max_bytes=max_blob_bytes()), options)

    def __reduce__(self):
        return _rebuild, (self.url, self.storage_options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    # Blobs

    def put_bytes(self, data: bytes) -> ContentId:
        """Store ``data``."""
        content_id = hash_bytes(data)
        cheap = len(data) <= self.files.cheap_write_bytes
        if cheap or not self._already_has(content_id, len(data), lambda: [data]):
            self.files.write(blob_key(content_id), data)
        return content_id

    def put_stream(self, chunks: Iterable[bytes]) -> ContentId:
        """Store what ``chunks`` yields, hashed on the way, in constant memory."""
        head: list[bytes] = []
        head_bytes = 0
        rest = iter(chunks)
        for chunk in rest:
            head.append(chunk)
            head_bytes += len(chunk)
            if head_bytes > self.files.whole_write_bytes:
                return self._upload(_chain(head, rest))
        return self.put_bytes(b"".join(head))

    def put_file(self, path: Path) -> ContentId:
        """Store the bytes of a file. It is read twice: to learn its id, and if the blob is missing, to copy it."""
        hashed = hash_file(path)
        self._put_file_as(path, hashed.size, hashed.content_id, hashed.check)
        return hashed.content_id

    def put_json(self, value: Any) -> ContentId:
        """Store the canonical JSON of ``value``."""
        return self.put_bytes(canonical_json(value))

    def get_bytes(self, content_id: ContentId) -> bytes:
        """The blob's bytes, verified. Raises MissingObject or CorruptObject."""
        content_id = ContentId(content_id)
        try:
            data = self.files.read(blob_key(content_id))
        except FileNotFoundError as error:
            raise self._missing(content_id) from error
        if (found := hash_bytes(data)) != content_id:
            raise self._quarantine(content_id, found)
        return data

    def get_json(self, content_id: ContentId) -> Any:
        """The value stored by `put_json`. Raises MissingObject or CorruptObject, ConfigError if the blob is no JSON."""
        data = self.get_bytes(content_id)
        try:
            return json.loads(data)
        except ValueError as error:
            raise ConfigError(f"blob {content_id} in {self.url} is not JSON: {error}") from error

    def stream(self, content_id: ContentId) -> Iterator[bytes]:
        """The blob's bytes in chunks, verified: on a mismatch CorruptObject is raised instead of the last chunk."""
        content_id = ContentId(content_id)
        held: bytes | None = None
        with ContentHasher() as hasher:
            try:
                for chunk in self.files.read_chunks(blob_key(content_id)):
                    with hasher.hashing(chunk):
                        if held is not None:
                            yield held
                    held = chunk
            except FileNotFoundError as error:
                raise self._missing(content_id) from error
            if hasher.content_id != content_id:
                raise self._quarantine(content_id, hasher.content_id)
        if held is not None:
            yield held

    def get_file(self, content_id: ContentId, path: Path) -> None:
        """Write the blob to ``path``, where it appears verified and whole. Raises MissingObject or CorruptObject."""
        with temp_sibling(path) as file:
            for chunk in self.stream(content_id):
                file.write(chunk)
            file.appear()

    def exists(self, content_id: ContentId) -> bool:
        """Whether the blob is there; its bytes are not read."""
        return self.files.stat(blob_key(ContentId(content_id))) is not None

    def size(self, content_id: ContentId) -> int:
        """Size of the blob in bytes. Raises MissingObject."""
        stat = self.files.stat(blob_key(ContentId(content_id)))
        if stat is None:
            raise self._missing(content_id)
        return stat.size

    def delete(self, content_id: ContentId) -> None:
        """Remove the blob, if it is there."""
        self.files.delete(blob_key(ContentId(content_id)))

    def blobs(self) -> Iterator[tuple[ContentId, FileStat]]:
        """Ids of all blobs, with size and age."""
        for key, stat in self.files.list("cas"):
            with suppress(ConfigError):  # a file of somebody else
                yield ContentId(key.rpartition("/")[2]), stat

    def blobs_beginning(self, digits: str) -> Iterator[ContentId]:
        """Ids of the blobs that begin with ``digits``, at least 4 of them."""
        for key, _ in self.files.list(f"cas/{digits[:2]}/{digits[2:4]}"):
            with suppress(ConfigError):  # a file of somebody else
                content_id = ContentId(key.rpartition("/")[2])
                if content_id.startswith(digits):
                    yield content_id

    # Trees

    def put_tree(self, folder: Path) -> ContentId:
        """Store a folder and return the id of its manifest. Blobs that are there already are not written again.

        Raises ConfigError for what a tree cannot hold; see `trees.files_of`.
        """
        return self.put_paths(files_of(folder))

    def put_paths(self, paths: Mapping[str, Path]) -> ContentId:
        """Store files under their names as one folder, wherever they lie and whatever links lead there."""
        hashes = self.in_parallel(hash_file, expected(paths.values(), passes=2))  # hashed, then stored
        named = zip(paths, hashes, strict=True)
        files = tuple(TreeFile(path=path, size=found.size, content_id=found.content_id) for path, found in named)
        checks = {found.content_id: found.check for found in hashes}
        self.in_parallel(
            lambda file: self._put_file_as(paths[file.path], file.size, file.content_id, checks[file.content_id]),
            {file.content_id: file for file in files}.values(),
        )
        return self.put_json(TreeManifest(files=files))

    def put_files(
        self,
        manifest: TreeManifest,
        paths: Mapping[str, Path],
        checks: Checks = NO_CHECKS,
        given: Mapping[str, FileMark] = NOTHING_GIVEN,
    ) -> ContentId:
        """Store the files of ``manifest`` that are missing, read from ``paths``, then the manifest itself. What is
        there already counts as written now, so that nobody who gave up the same files deletes it (`retention.pruning`).

        ``checks``: of the reading that made the manifest. ``given``: files to which nobody writes any more, as they
        were before that reading; a folder on the same file system has them without a copy, as `Files.take` says.
        Raises Conflict when a file is no longer what that reading found.
        """

        def put(file: TreeFile) -> None:
            check, mark = checks.get(file.content_id), given.get(file.path)
            self._put_file_as(paths[file.path], file.size, file.content_id, check, touch=True, mark=mark)

        self.in_parallel(put, {file.content_id: file for file in manifest.files}.values())
        data = canonical_json(manifest)
        tree = hash_bytes(data)
        if not self._already_has(tree, len(data), lambda: [data], touch=True):
            self.files.write(blob_key(tree), data)
        return tree

    def manifest(self, content_id: ContentId) -> TreeManifest:
        """What `put_tree` stored. Raises MissingObject, CorruptObject, or ConfigError if the blob is no manifest."""
        try:
            return TreeManifest.model_validate_json(self.get_bytes(content_id))
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"blob {content_id} in {self.url} is not a tree manifest: {problem['msg']}") from error

    def get_tree(self, content_id: ContentId, folder: Path) -> None:
        """Write the tree to ``folder``, which appears whole and verified, or not at all.

        ``folder`` must not exist, or be empty. Raises Conflict if it is neither, MissingObject or CorruptObject.
        """
        manifest = self.manifest(content_id)
        with appearing_folder(folder) as temporary:
            self.get_files(manifest, temporary)

    def get_files(self, manifest: TreeManifest, folder: Path) -> None:
        """Write the files of ``manifest`` into ``folder``, each verified. Raises MissingObject or CorruptObject."""
        with storage_faults("write", str(folder)):
            for parent in {(folder / file.path).parent for file in manifest.files}:
                parent.mkdir(parents=True, exist_ok=True)
        self.in_parallel(lambda file: write_new_file(folder / file.path, self.stream(file.content_id)), manifest.files)

    def tree_is_present(self, content_id: ContentId) -> bool:
        """Whether the manifest and all its files are there with the right sizes. The files are not read."""
        try:
            files = self.manifest(content_id).files
        except (MissingObject, CorruptObject):
            return False
        return self._absent(files) is None

    def wait_for_sweep(self, tree: ContentId) -> None:
        """Where files of a stored tree are about to be deleted, wait until that is done, or spared. For who has named
        the tree just now: whoever deletes looks at names last of all."""
        if not any(True for _ in self.files.list(SWEEPS)):  # as nearly always
            return
        with suppress(NotFound, CorruptObject, ConfigError):
            wait_for_sweep(self.files, [file.content_id for file in self.manifest(tree).files])

    def check_present(self, content_id: ContentId) -> None:
        """Raise MissingObject or CorruptObject, as `get_tree`, where `tree_is_present` is False."""
        absent = self._absent(self.manifest(content_id).files)
        if absent is not None:
            raise self._missing(absent)

    def _absent(self, files: Iterable[TreeFile]) -> ContentId | None:
        """The first of these that is not there, or has another size."""
        files = list(files)
        stats = self.in_parallel(lambda file: self.files.stat(blob_key(file.content_id)), files)
        found = zip(files, stats, strict=True)
        return next((file.content_id for file, stat in found if stat is None or stat.size != file.size), None)

    def local_tree(self, content_id: ContentId, cache: Path) -> Path:
        """A folder with the tree's files at ``cache/<hex>``, fetched unless it is there already; verified either way.

        Processes of one machine share it; its files are read-only. A damaged one is named in a warning, and the folder
        fetched again. What nobody uses makes room, see `evict_local_trees`.
        """
        folder = cache / ContentId(content_id)
        manifest = self.manifest(content_id)
        hold_local_tree(content_id, cache)
        if damaged_file(folder, manifest):
            with storage_faults("use", str(cache)), exclusive(tree_lock(cache, content_id)):
                damaged = damaged_file(folder, manifest)
                if damaged:
                    if damaged != folder:
                        log.warning("%s is damaged; %s is fetched again", damaged, folder)
                    shutil.rmtree(folder, ignore_errors=True)
                    sweep(cache, ".*.tmp")
                    evict_local_trees(cache, cache_bytes() - manifest.size_bytes)
                    self.get_tree(content_id, folder)
                    make_read_only(folder, manifest)
        return folder

    # Refs

    def set_ref(self, name: str, content_id: ContentId) -> None:
        """Make ``name`` stand for the blob from now on, atomically.

        ``name`` is segments of letters, digits, dots, dashes and underscores, joined by slashes; none begins with a
        dot. A name cannot also be the folder of other names. Raises ConfigError.
        """
        self.files.write(ref_key(name), encode_ref(name, ContentId(content_id)))

    def get_ref(self, name: str) -> ContentId | None:
        """What ``name`` stands for, if anything. Raises CorruptRef where its file is not what `set_ref` wrote."""
        content = self.read_ref(name)
        return None if content is None else content.named

    def read_ref(self, name: str) -> RefContent | None:
        """`get_ref`, with whether the file has a check. One without counts while what it names is there."""
        try:
            content, data = settled_ref(name, partial(self.files.read, ref_key(name)))
        except FileNotFoundError:
            return None
        if content is None or not (content.is_checked or self._can_be_named(content.named)):
            raise CorruptRef(
                f"ref {name} at {self.files.where(ref_key(name))} is damaged, or was put there by something else: "
                f"{data[:80]!r}; `rollout storage verify --repair` restores it or moves it aside"
            )
        return content

    def _can_be_named(self, content_id: ContentId) -> bool:
        """Whether this is a blob or a snapshot that is there."""
        return self.exists(content_id) or bool(self.ref_names(f"{SNAPSHOT_REFS}/{content_id}"))

    def cached_ref(self, name: str) -> ContentId | None:
        """`get_ref` for what can be made again: a damaged ref is as good as none, with a warning."""
        try:
            return self.get_ref(name)
        except CorruptRef as error:
            log.warning("%s; it will be recomputed", error)
            return None

    def cached_bytes(self, name: str) -> bytes | None:
        """The blob that ``name`` stands for, for what can be made again: None where ref or blob cannot be read."""
        named = self.cached_ref(name)
        if named is None:
            return None
        try:
            return self.get_bytes(named)
        except (NotFound, CorruptObject) as error:
            log.warning("ref %s cannot be followed: %s; it will be recomputed", name, error)
            return None

    def delete_ref(self, name: str) -> None:
        """Forget ``name``, if it is there."""
        self.files.delete(ref_key(name))

    def set_ref_aside(self, name: str) -> None:
        """Forget ``name``, but keep its file below ``corrupt/`` until garbage is collected."""
        with suppress(FileNotFoundError):
            self.files.move(ref_key(name), f"corrupt/ref-{name.replace('/', '-')}-{ULID()}")

    def ref_names(self, prefix: str) -> list[str]:
        """Names below ``prefix + "/"``, sorted; the empty prefix means all. Files of somebody else are left out."""
        folder = ref_key(prefix) if prefix else "refs"
        names = (key.removeprefix("refs/") for key, _ in self.files.list(folder) if key != folder)
        return sorted(filter(is_ref_name, names))

    def list_refs(self, prefix: str) -> Iterator[tuple[str, ContentId]]:
        """`ref_names` with what they stand for. Damaged refs are left out, each with a warning."""
        names = self.ref_names(prefix)
        for name, named in zip(names, self.in_parallel(self._listed_ref, names), strict=True):
            if named is not None:  # deleted in the meantime, or damaged
                yield name, named

    def _listed_ref(self, name: str) -> ContentId | None:
        try:
            return self.get_ref(name)
        except CorruptRef as error:
            log.warning("%s", error)
            return None

    # Inside

    def in_parallel(self, function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        """``function`` of each item, in order, several at once. The first error is raised, and nothing more started."""
        items = list(items)
        if len(items) < 2:
            return [function(item) for item in items]
        pool = ThreadPoolExecutor(min(self.files.parallel, len(items)), thread_name_prefix="objects")
        try:
            return [future.result() for future in [pool.submit(copy_context().run, function, item) for item in items]]
        finally:
            pool.shutdown(cancel_futures=True)

    def _already_has(
        self,
        content_id: ContentId,
        size: int,
        source: Callable[[], Iterable[bytes]] | None = None,
        *,
        touch: bool = False,
    ) -> bool:
        """Whether a put can be skipped, since what is there is whole: what was put must be readable.

        The blob then counts as fresh, so that garbage collection spares it; with ``touch`` as of this moment.
        """
        key = blob_key(content_id)
        stat = self.files.stat(key)
        if stat is None or stat.size != size or not self.files.holds(key, stat, content_id, source):
            return False
        if not self.files.keep(key, stat):
            return False
        if touch:
            return self.files.keep(key, replace(stat, modified=0.0)) and not is_swept_away(self.files, key, content_id)
        return time.time() - stat.modified < TOUCH_AFTER_SECONDS or not is_swept_away(self.files, key, content_id)

    def _put_file_as(
        self,
        path: Path,
        size: int,
        content_id: ContentId,
        check: bytes | None = None,
        *,
        touch: bool = False,
        mark: FileMark | None = None,
    ) -> None:
        """``mark``: of a file that was given, before it was hashed."""
        if self._already_has(content_id, size, lambda: read_file(path), touch=touch):
            return
        if mark is not None and size > self.files.whole_write_bytes:
            if file_mark(path) != mark:
                raise changed_meanwhile(path)
            if self.files.take(path, blob_key(content_id)):
                return
        key, again = blob_key(content_id), read_again(path, content_id, check)
        if size <= self.files.whole_write_bytes:
            return self.files.write(key, b"".join(again))
        upload = self.files.upload(key)
        try:
            for chunk in again:
                upload.write(chunk)
            upload.commit(key)
        finally:
            upload.abort()

    def _upload(self, chunks: Iterable[bytes]) -> ContentId:
        size, upload = 0, self.files.upload()
        try:
            with ContentHasher() as hasher:
                for chunk in chunks:
                    with hasher.hashing(chunk):
                        upload.write(chunk)
                    size += len(chunk)
            if not self._already_has(hasher.content_id, size):
                upload.commit(blob_key(hasher.content_id))
        finally:
            upload.abort()
        return hasher.content_id

    def _missing(self, content_id: ContentId) -> MissingObject:
        where = self.files.where(blob_key(content_id))
        return MissingObject(content_id, f"no blob {content_id} at {where}; run the stage that made it again")

    def _quarantine(self, content_id: ContentId, found: ContentId) -> CorruptObject | Recoverable:
        """The error for bytes that did not match; sets the blob aside when a second look finds the same wrong bytes.

        Between the first look and this one the blob may have been made anew, or the fault was on the way here.
        """
        key = blob_key(content_id)
        try:
            if hash_chunks(self.files.read_chunks(key)) != found:
                return Recoverable(f"blob {content_id} at {self.files.where(key)} was read wrongly once; read it again")
            aside = f"corrupt/{content_id}-{ULID()}"
            self.files.move(key, aside)
        except FileNotFoundError:
            return CorruptObject(content_id, f"blob {content_id} in {self.url} was corrupt and has been set aside")
        return CorruptObject(
            content_id,
            f"blob {content_id} at {self.files.where(key)} does not match its id; it was moved to "
            f"{self.files.where(aside)}: run the stage that made it again, and check the disk",
        )


def _rebuild(url: str, storage_options: Mapping[str, Any]) -> ObjectStore:
    return ObjectStore.from_url(url, storage_options=storage_options)


def blob_key(content_id: ContentId) -> str:
    """Where a blob lies below the store's root."""
    return f"cas/{content_id[:2]}/{content_id[2:4]}/{content_id}"


def _chain(head: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    while head:
        yield head.pop(0)
    yield from rest
