"""Trees in a folder of this machine, the cache: read-only, shared by its processes, verified by whoever uses them, and
removed where others need the room and nobody holds them."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from ulid import ULID

from rollout_core.base.errors import Conflict, Recoverable
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.locks import exclusive, try_exclusive
from rollout_core.base.settings import cache_bytes
from rollout_core.objects.trees import TreeManifest, appearing_folder, hash_file, walk

_known_whole: set[tuple[str, tuple[tuple[int, int, int], ...]]] = set()
"""Folders this process has read and found whole, with inode, size and time of change of their files."""


def tree_lock(cache: Path, content_id: ContentId) -> Path:
    """Held by who changes ``cache/<hex>``."""
    return cache / f".{content_id}.lock"


def forget_local_tree(content_id: ContentId, cache: Path) -> None:
    """Remove the folder that `ObjectStore.local_tree` made, if it is there. It goes at once, so nobody finds half of
    it; files that are open stay readable."""
    with exclusive(tree_lock(cache, content_id)):
        doomed = cache / f".{ULID()}.tmp"  # where this process is killed, `local_tree` removes it
        with suppress(FileNotFoundError):
            (cache / content_id).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


HELD = 8
"""So many local trees, those it asked for last, are a process's to read."""
_held: dict[Path, int] = {}
"""Files whose shared lock this process holds, in the order of use, with their descriptors."""
_held_lock = threading.Lock()


def hold_local_tree(content_id: ContentId, cache: Path) -> None:
    """Have `evict_local_trees` of any process leave this tree alone until this one has asked for `HELD` others or ends.

    Does nothing where the cache cannot be written to.
    """
    path = _use_file(cache, content_id)
    with suppress(OSError), _held_lock:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = _held.pop(path, None)
        if descriptor is not None and not _is_at(path, descriptor):
            os.close(descriptor)
            descriptor = None
        while descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)  # it may be another user's
            with suppress(OSError):  # where a file system has no such locks, nothing is evicted either
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _is_at(path, descriptor):  # evicted in the meantime
                os.close(descriptor)
                descriptor = None
        _held[path] = descriptor
        with suppress(PermissionError):
            os.utime(descriptor)
        while len(_held) > HELD:
            os.close(_held.pop(next(iter(_held))))


def evict_local_trees(cache: Path, limit_bytes: int) -> int:
    """Remove the trees that were asked for least recently, until the others have ``limit_bytes`` or all are in use;
    how many bytes that freed."""
    sizes = {path: _size(path) for path in cache.iterdir() if is_content_id(path.name)} if cache.is_dir() else {}
    excess, freed = sum(sizes.values()) - limit_bytes, 0
    for folder in sorted(sizes, key=lambda path: _last_use(cache, path)):
        if freed >= excess:
            break
        use = _use_file(cache, ContentId(folder.name))
        descriptor = try_exclusive(use)
        if descriptor is None:
            continue
        try:
            if _is_at(use, descriptor):
                forget_local_tree(ContentId(folder.name), cache)
                use.unlink()
                freed += sizes[folder]
        finally:
            os.close(descriptor)
    return freed


def keep_local_tree(content_id: ContentId, manifest: TreeManifest, written: Path, cache: Path) -> None:
    """Have `ObjectStore.local_tree` find a tree that was just put, instead of fetching it: links to the files that were
    put, or copies where the cache is on another file system. Who uses them compares them with the manifest.

    Does nothing where there is one, or no room: it would be fetched.
    """
    folder = cache / content_id
    with suppress(OSError, Conflict, Recoverable), exclusive(tree_lock(cache, content_id)):
        if folder.exists():
            return
        evict_local_trees(cache, cache_bytes() - manifest.size_bytes)
        with appearing_folder(folder) as temporary:
            for file in manifest.files:
                target = temporary / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(written / file.path, target)
                except OSError:
                    shutil.copyfile(written / file.path, target)
            make_read_only(temporary, manifest)


def _use_file(cache: Path, content_id: ContentId) -> Path:
    return cache.absolute() / f".{content_id}.use"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _size(folder: Path) -> int:
    with suppress(FileNotFoundError):  # removed meanwhile
        return sum(path.stat().st_size for path in walk(folder))
    return 0


def _last_use(cache: Path, folder: Path) -> float:
    for path in (_use_file(cache, ContentId(folder.name)), folder):
        with suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0


def damaged_file(folder: Path, manifest: TreeManifest) -> Path | None:
    """The first file that is missing or is not what the manifest says; None where all are whole.

    Files are read once a process, and again only after a change.
    """
    try:
        stats = [(folder / file.path).stat() for file in manifest.files]
    except OSError:
        return folder
    known = str(folder), tuple((stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in stats)
    if known in _known_whole:
        return None
    for file in manifest.files:
        found = hash_file(folder / file.path)
        if (found.size, found.content_id) != (file.size, file.content_id):
            return folder / file.path
    _known_whole.add(known)
    return None


def make_read_only(folder: Path, manifest: TreeManifest) -> None:
    """Take away the right to write the manifest's files by accident."""
    for file in manifest.files:
        (folder / file.path).chmod(0o444)
