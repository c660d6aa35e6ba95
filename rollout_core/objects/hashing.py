"""Hashing beside input and output."""

from __future__ import annotations

from collections.abc import Iterator
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
