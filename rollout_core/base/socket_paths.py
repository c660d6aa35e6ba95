"""Sockets of the file system in folders of any length.

Nothing is imported here that another interpreter may lack (`rollout_core.base.isolation`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """What to bind or connect in place of a path, inside the block: an address has room for 107 bytes (``sun_path``),
    which a long ``TMPDIR`` takes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
