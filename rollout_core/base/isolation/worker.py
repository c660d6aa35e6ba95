"""The process that runs the code: calls the handler with each request, and answers with its value or its error. Both
come as JSON in frames, eight bytes of length and then the text; never pickle, as what comes back is not trusted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

FRAME_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**32
"""Of a frame; more is no frame but something else that was written into the pipe."""


class BadFrame(ValueError):
    """Bytes that are no frame."""


def encode_frame(value: Any) -> bytes:
    """A frame. Floats and integers cross exactly, and so do strings that are not valid Unicode."""
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    return FRAME_LENGTH.pack(len(text)) + text


def frame_size(head: bytes) -> int:
    """Bytes that follow the first eight. Raises BadFrame."""
    (size,) = FRAME_LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes; expected at most {MAX_FRAME_BYTES}")
    return size


def decode_frame(text: bytes) -> Any:
    """The value of a frame without its length. Raises BadFrame."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame("a frame that is no JSON") from error


def read_frame(file: BinaryIO) -> Any:
    """The next value; None where the file ends. Raises BadFrame."""
    head = file.read(FRAME_LENGTH.size)
    if len(head) < FRAME_LENGTH.size:
        return None
    size = frame_size(head)
    text = file.read(size)
    return decode_frame(text) if len(text) == size else None


_PLACE = struct.Struct("<q")
NO_PLACE, STARTING = -1, -2
"""Before the handler's first step; before the handler is called."""
PROGRESS_BYTES = mmap.PAGESIZE


class Progress:
    """A number in memory that the caller sees: how far the handler is, also after a sudden end."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, PROGRESS_BYTES)
        os.close(descriptor)

    @property
    def place(self) -> int:
        """From 0 on a step's; below that `NO_PLACE` or `STARTING`."""
        return _PLACE.unpack_from(self._memory)[0]

    @place.setter
    def place(self, value: int) -> None:
        _PLACE.pack_into(self._memory, 0, value)

    def close(self) -> None:
        """The number is gone."""
        self._memory.close()


Handler = Callable[[Any, Callable[[int], None]], Any]
"""Called with a request and a function to call with the index of each step before it; returns what JSON can hold."""


def serve(handler: str, requests: int, answers: int, progress: int) -> None:
    """Answer requests until there are none."""
    own = os.getpid()
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)
    place = Progress(progress)

    def report(step: int) -> None:
        place.place = step

    with os.fdopen(requests, "rb") as incoming, os.fdopen(answers, "wb") as outgoing:
        call: Handler | None = None
        while (frame := read_frame(incoming)) is not None:
            try:
                call = call or _find(handler)
                report(NO_PLACE)
                answer = encode_frame({"value": call(frame["request"], report)})
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to judge
                answer = encode_frame({"error": _described(error)})
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            if os.getpid() != own:
                os._exit(0)  # a copy that the code forked and let run on; the first one answers
            outgoing.write(answer)
            outgoing.flush()


def _find(handler: str) -> Handler:
    module, _, name = handler.partition(":")
    return getattr(importlib.import_module(module), name)


def _described(error: BaseException) -> dict[str, Any]:
    from rollout_core.base.errors import error_message

    with contextlib.suppress(BaseException):
        traceback.print_exception(error)
    return error_message(error)
