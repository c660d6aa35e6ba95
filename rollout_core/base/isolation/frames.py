"""Values as JSON in frames: eight bytes of length, then the text. Never pickle: what comes back is not trusted."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
MAX_BYTES = 2**32
"""Of a frame; more is no frame but something else that was written into the pipe."""


class BadFrame(ValueError):
    """Bytes that are no frame."""


def encode(value: Any) -> bytes:
    """A frame. Floats and integers cross exactly, and so do strings that are not valid Unicode."""
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    return LENGTH.pack(len(text)) + text


def size_of(head: bytes) -> int:
    """Bytes that follow the first eight. Raises BadFrame."""
    (size,) = LENGTH.unpack(head)
    if size > MAX_BYTES:
        raise BadFrame(f"a frame of {size} bytes; expected at most {MAX_BYTES}")
    return size


def decode(text: bytes) -> Any:
    """The value of a frame without its length. Raises BadFrame."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame("a frame that is no JSON") from error


def read(file: BinaryIO) -> Any:
    """The next value; None where the file ends. Raises BadFrame."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = size_of(head)
    text = file.read(size)
    return decode(text) if len(text) == size else None
