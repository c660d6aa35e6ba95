"""A folder as a manifest: sorted relative paths, sizes and content ids; the one tar stream that stands for it; and
local folders and files as the object store takes them in and gives them back.

Two folders that share files share blobs. Modes, times and empty folders are not kept: a tree is what its files say.
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, BinaryIO, Literal, NamedTuple

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from ulid import ULID
from xxhash import xxh3_128

from rollout_core.base.errors import ConfigError, Conflict, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import held, sweep
from rollout_core.base.watching import current_amount
from rollout_core.objects.files import (
    CHUNK_BYTES,
    WORTH_THREADS_BYTES,
    ContentHasher,
    Flushing,
    fsync_folder,
    hash_chunks,
    large_hasher,
    storage_faults,
    write_all,
)


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

    def below(self, folder: str) -> TreeManifest:
        """What one of its folders holds, by itself."""
        prefix = f"{folder}/"
        inside = (file for file in self.files if file.path.startswith(prefix))
        return TreeManifest(
            files=tuple(file.model_copy(update={"path": file.path.removeprefix(prefix)}) for file in inside)
        )


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


WRITE_BYTES = 2**20
HASH_BYTES = 2**19
"""Read at once where a file is only hashed: what stays in a core's cache until it is."""
HASH_TOGETHER_BYTES = 2**21
"""The same where several threads share what was read."""


def files_of(folder: Path) -> dict[str, Path]:
    """Relative path to real path of every file below ``folder``, sorted by relative path.

    Links to files inside the folder count as those files. Raises ConfigError for what a tree cannot hold: links that
    leave the folder, links to folders, sockets and devices, and names that are not UTF-8.
    """
    if not folder.is_dir():
        raise ConfigError(f"not a folder: {folder}; expected the folder to store")
    root = folder.resolve()
    with reading(folder):
        found = {_utf8(path.relative_to(root).as_posix()): _regular_file(path, root) for path in walk(root)}
    return dict(sorted(found.items()))


def walk(folder: Path) -> Iterator[Path]:
    """Files of a folder and of those in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(folder / entry.name)
            else:
                yield folder / entry.name


def _regular_file(path: Path, root: Path) -> Path:
    try:
        real = path.resolve()
    except RuntimeError as error:
        raise ConfigError(f"link {path} leads to itself; put the file in its place") from error
    if not real.is_relative_to(root):
        raise ConfigError(f"link {path} leads out of the folder, to {real}; put a copy of the file in its place")
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        raise ConfigError(f"cannot store {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"cannot store {path}: not a regular file; a tree holds regular files only")
    return real


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"file name {path!r} is not UTF-8; rename the file") from error
    return path


def read_file(path: Path) -> Iterator[bytes]:
    """Bytes of a local file in chunks, reported to whoever watches. Raises ConfigError if it cannot be read."""
    amount = current_amount()
    with reading(path), open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            amount.add(len(chunk))
            yield chunk


def expected(paths: Iterable[Path], *, passes: int = 1) -> list[Path]:
    """The same, reported to whoever watches as files that will be read so many times."""
    found = list(paths)
    current_amount().expect(passes * sum(path.stat().st_size for path in found if path.is_file()))
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failure to read the caller's file into a ConfigError that names it."""
    try:
        yield
    except RolloutError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


class HashedFile(NamedTuple):
    """What a reading of a local file gave."""

    size: int
    """In bytes."""
    content_id: ContentId
    check: bytes
    """XXH3 of 128 bits, which tells at a tenth of BLAKE3's cost that a file was written to meanwhile; not stored."""


Checks = Mapping[ContentId, bytes]
NO_CHECKS: Checks = MappingProxyType({})


def hash_file(path: Path) -> HashedFile:
    """Read a local file once."""
    check, amount, size = xxh3_128(), current_amount(), 0
    with reading(path), open(path, "rb", buffering=0) as file:
        is_large = os.fstat(file.fileno()).st_size >= WORTH_THREADS_BYTES
        hasher = large_hasher() if is_large else blake3()
        held = memoryview(bytearray(HASH_TOGETHER_BYTES if is_large else HASH_BYTES))
        while count := file.readinto(held):
            hasher.update(held[:count])
            check.update(held[:count])
            size += count
            amount.add(count)
    return HashedFile(size, ContentId(hasher.hexdigest()), check.digest())


class Identified(NamedTuple):
    """What one and the same reading of a folder's files gave."""

    id: ContentId
    """Hash of its tar."""
    manifest: TreeManifest
    checks: Checks


def identify(paths: dict[str, Path]) -> Identified:
    """Read the files of a folder once."""
    sizes = {path: real.stat().st_size for path, real in paths.items()}
    content_ids: dict[str, ContentId] = {}
    checks: dict[ContentId, bytes] = {}

    def read(path: str) -> Iterator[bytes]:
        check = xxh3_128()
        with ContentHasher() as hasher:
            for chunk in read_file(paths[path]):
                with hasher.hashing(chunk):
                    check.update(chunk)
                    yield chunk
            content_ids[path] = hasher.content_id
        checks[hasher.content_id] = check.digest()

    try:
        snapshot_id = hash_chunks(tar_stream(sizes.items(), read))
    except ValueError as error:
        raise Conflict(f"{error}; save the snapshot again when nobody writes to it") from error
    files = tuple(TreeFile(path=path, size=sizes[path], content_id=content_ids[path]) for path in paths)
    return Identified(snapshot_id, TreeManifest(files=files), checks)


def read_again(path: Path, content_id: ContentId, check: bytes | None) -> Iterator[bytes]:
    """`read_file` of a file that was hashed before. Raises Conflict at its end where it is no longer what it was then,
    by the ``check`` of that reading, or without one by its id."""
    hasher = xxh3_128() if check else blake3()
    for chunk in read_file(path):
        hasher.update(chunk)
        yield chunk
    if hasher.digest() != (check or bytes.fromhex(content_id)):
        raise changed_meanwhile(path)


def changed_meanwhile(path: Path) -> Conflict:
    """The error for a file that is no longer what was read of it."""
    return Conflict(f"{path} changed while it was being stored; store it again when nobody writes to it")


class FileMark(NamedTuple):
    """What tells without reading a file whether somebody wrote to it. Links to it change none of it."""

    inode: int
    size: int
    modified_ns: int


NOTHING_GIVEN: Mapping[str, FileMark] = MappingProxyType({})


def file_mark(path: Path) -> FileMark:
    """Of a file as it is."""
    found = path.stat()
    return FileMark(found.st_ino, found.st_size, found.st_mtime_ns)


def write_new_file(path: Path, chunks: Iterator[bytes]) -> None:
    """Write ``chunks`` to a file that must not exist, and fsync it."""
    with storage_faults("write", str(path)):
        file = FileIO(path, "x")
    with file, Flushing(file.fileno()) as flushing:
        for chunk in chunks:
            with storage_faults("write", str(path)):
                write_all(file, chunk)
                flushing.wrote(len(chunk))
        with storage_faults("write", str(path)):
            flushing.check()
            os.fsync(file.fileno())


class TempSibling:
    """A file under a temporary name next to ``path``, which it takes when it is whole and on disk."""

    def __init__(self, file: BinaryIO, flushing: Flushing, temporary: Path, path: Path) -> None:
        self._file = file
        self._flushing = flushing
        self._temporary = temporary
        self._path = path

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``."""
        with self._faults():
            self._file.write(chunk)
            self._flushing.wrote(len(chunk))

    def appear(self) -> None:
        """Take the name, and the place of what has it."""
        with self._faults():
            self._sync()
            self._temporary.replace(self._path)

    def publish_if_absent(self) -> bool:
        """Take the name; False, and nothing done, where something has it."""
        with self._faults():
            self._sync()
            try:
                os.link(self._temporary, self._path)
            except FileExistsError:
                return False
        return True

    def _faults(self) -> AbstractContextManager[None]:
        return storage_faults("write", str(self._path))

    def _sync(self) -> None:
        self._file.flush()
        self._flushing.check()
        os.fsync(self._file.fileno())


@contextmanager
def temp_sibling(path: Path) -> Iterator[TempSibling]:
    """A file to write that becomes ``path`` within the block, or is gone after it.

    Its folder is made where it is missing, and is durable when the block has ended; what killed processes left next to
    ``path`` is removed. Faults of the file are raised as such; those of the block's own, as of what it reads, are left
    alone.
    """

    def make() -> Path:
        temporary = path.with_name(f".{path.name}.{ULID()}.tmp")
        with storage_faults("write", str(path)):
            temporary.touch()
        return temporary

    with storage_faults("write", str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, f".{glob.escape(path.name)}.*.tmp")
    with held(make) as temporary:
        try:
            with storage_faults("write", str(path)):
                file = temporary.open("wb", buffering=WRITE_BYTES)
            try:
                with Flushing(file.fileno()) as flushing:
                    yield TempSibling(file, flushing, temporary, path)
            finally:
                # What is still buffered belongs to a file that is given up: one that appeared has been flushed.
                with suppress(OSError):
                    file.close()
        finally:
            temporary.unlink(missing_ok=True)
    with storage_faults("write", str(path)):
        fsync_folder(path.parent)


@contextmanager
def appearing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder next to ``folder`` that takes its name when the block ends well.

    Raises Conflict if ``folder`` exists and is not empty.
    """

    def make() -> Path:
        temporary = folder.with_name(f".{folder.name}.{ULID()}.tmp")
        with storage_faults("write", str(folder)):
            temporary.mkdir(parents=True)
        return temporary

    with storage_faults("write", str(folder)):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Conflict(f"{folder} exists and is not empty; expected a new folder")
    sweep(folder.parent, f".{glob.escape(folder.name)}.*.tmp")
    with held(make) as temporary:
        try:
            yield temporary
            with storage_faults("write", str(folder)):
                os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
