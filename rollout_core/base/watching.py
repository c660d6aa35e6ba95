"""Large inputs that are read, hashed, downloaded or filed tell whoever watches how far that has come.

The one who waits for a result opens `watched`; what reads files far below asks for the `current_amount`, and tells
nobody where nobody watches. Threads that are to tell, too, run in a copy of the context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

STEP_BYTES = 1 << 20
"""Between two calls of whoever watches."""


class Amount:
    """Bytes that were read, of those that are expected; counted from any thread. What turns out to need no reading is
    never added, so an end may come early."""

    def __init__(self, show: Callable[[int, int], None] = lambda done, total: None) -> None:
        """``show`` gets what is done and what is expected, one call at a time."""
        self._show = show
        self._lock = threading.Lock()
        self._done = self._total = self._shown = 0

    def expect(self, num_bytes: int) -> None:
        """So many more are to come."""
        with self._lock:
            self._total += num_bytes

    def add(self, num_bytes: int) -> None:
        """So many more are read."""
        with self._lock:
            self._done += num_bytes
            if self._done - self._shown >= STEP_BYTES:
                self._shown = self._done
                self._show(self._done, max(self._done, self._total))


_NOBODY = Amount()
_current: ContextVar[Amount] = ContextVar("rollout_amount", default=_NOBODY)


@contextmanager
def watched(show: Callable[[int, int], None]) -> Iterator[None]:
    """Inside the block ``show`` gets bytes done and expected, at most once a MiB."""
    token = _current.set(Amount(show))
    try:
        yield
    finally:
        _current.reset(token)


def current_amount() -> Amount:
    """What is being watched."""
    return _current.get()


def watched_downloads() -> Any:
    """What ``snapshot_download`` takes as ``tqdm_class``. Of its bars that of the bytes that are written counts."""
    from tqdm import tqdm

    amount = current_amount()  # the files are fetched by threads

    class Download(tqdm):  # pyright: ignore[reportMissingTypeArgument] - it has none when it runs
        """Draws nothing. The total grows with each file that is begun."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = str(options.get("desc", "")).startswith("Reconstructing")
            self._told = 0
            # The hub's own arguments, such as the name of a bar, are none of tqdm's.
            super().__init__(*args[:1], total=options.get("total"), disable=True)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                total = int(self.total or 0)
                amount.expect(max(0, total - self._told))
                self._told = max(self._told, total)
                amount.add(int(n))
            return None

    return Download
