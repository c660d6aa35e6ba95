"""Hashing beside input and output, and the files that this process has read and found whole: they are not read again
for that until they change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from blake3 import blake3

from rollout_core.base.ids import ContentId

_WORTH_A_THREAD_BYTES = 2**20


class ContentHasher:
    """Content id of bytes that pass by in chunks.

    Large chunks are hashed by a thread while the caller does something else with them, so that copying costs little
    more than writing. Use as a context manager: the thread ends with it.
    """

    def __init__(self) -> None:
        self._blake3 = blake3()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> ContentHasher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    @contextmanager
    def hashing(self, chunk: bytes) -> Iterator[None]:
        """Hash ``chunk`` while the block runs."""
        if len(chunk) < _WORTH_A_THREAD_BYTES:
            self._blake3.update(chunk)
            yield
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="object-hash")
        update = self._pool.submit(self._blake3.update, chunk)
        try:
            yield
        finally:
            update.result()

    @property
    def content_id(self) -> ContentId:
        """Of all chunks so far."""
        return ContentId(self._blake3.hexdigest())


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
