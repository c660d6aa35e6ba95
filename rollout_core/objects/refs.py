"""What a ref's file says: the content id that its name stands for, and a check of both.

The second line binds the id to the name, so that a ref that was damaged, cut, edited or put in another's place is
noticed when it is read.
"""

from __future__ import annotations

import re

from rollout_core.errors import ConfigError
from rollout_core.ids import ContentId, content_id

# Hidden files, such as those that a file manager leaves behind, are nobody's ref.
_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_NAME = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


def is_ref_name(name: str) -> bool:
    """Whether a ref can have this name."""
    return _NAME.fullmatch(name) is not None


def ref_key(name: str) -> str:
    """Where a ref lies below the store's root. Raises ConfigError for what is no name of a ref."""
    if not is_ref_name(name):
        raise ConfigError(
            f"not a ref name: {name!r}; expected segments of letters, digits, '.', '_' and '-', joined by '/', none of "
            "which begins with a dot"
        )
    return f"refs/{name}"


def encode_ref(name: str, named: ContentId) -> bytes:
    """The content of the file of ref ``name``."""
    return f"{named}\n{_check(name, named)}\n".encode()


def decode_ref(name: str, data: bytes) -> ContentId | None:
    """What the file of ref ``name`` says; None where it is not as `encode_ref` wrote it."""
    try:
        named = ContentId(data[:64].decode())
    except ValueError:
        return None
    return named if data == encode_ref(name, named) else None


def _check(name: str, named: ContentId) -> ContentId:
    return content_id("ref/1", [name, named])
