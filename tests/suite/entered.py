"""Files of the project that a piece of work enters: those whose functions it calls."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from tests.structure import PACKAGES, PROJECT

_PLACES = tuple(f"{PROJECT / package}/" for package in PACKAGES)


class EnteredFiles:
    """Notes calls in this thread and in those that start while it is open; Python tells of no others."""

    def __init__(self) -> None:
        self._noting = False
        self._codes: set[CodeType] = set()

    def __enter__(self) -> EnteredFiles:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] - which ends it

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._noting and event == "call":
            self._codes.add(frame.f_code)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """For the block alone. Let the work be done once before: what is set up once is not part of it."""
        self._codes = set()
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def files(self) -> list[str]:
        """Of the last such block, as paths within the project. Bodies of modules and classes, which imports run, are no
        calls."""
        called = (code for code in self._codes if code.co_flags & inspect.CO_NEWLOCALS)
        files = {code.co_filename for code in called if code.co_filename.startswith(_PLACES)}
        return sorted(file.removeprefix(f"{PROJECT}/") for file in files)
