"""Files that this process has read and found whole: they are not read again for that until they change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from blake3 import blake3

from rollout_core.base.ids import ContentId

_MOST = 100_000
_found_whole: set[tuple[str, Hashable]] = set()


def once_whole(where: str, mark: Hashable, check: Callable[[], bool]) -> bool:
    """Whether ``check`` says so, or has said so of the file at ``where`` while it was as ``mark`` says."""
    if (where, mark) in _found_whole:
        return True
    if not check():
        return False
    if len(_found_whole) >= _MOST:
        _found_whole.clear()
    _found_whole.add((where, mark))
    return True


def hashed(chunks: Iterable[bytes], hasher: blake3) -> Iterator[bytes]:
    """The chunks, each after it went into ``hasher``."""
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk


def have_id(chunks: Iterable[bytes], content_id: ContentId) -> bool:
    """Whether the content id of these bytes is ``content_id``."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest() == content_id
