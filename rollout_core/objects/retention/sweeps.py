"""What a garbage collection is about to delete, announced to those who put the same bytes at that moment.

No storage deletes a file on the condition that nobody has touched it since. So a collection announces what it will
delete, waits for a while, and looks at each file's age right before it deletes it. Who puts a blob that was there
already touches it and then reads the announcements: of a blob that is on one of them it makes sure, after the same
while, that it is still there, and otherwise writes it anew. Either the collection sees the touch, or the writer sees
that the blob is gone. The while is longer than a file system or a service takes between a look and a deletion.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from ulid import ULID

from rollout_core.base.ids import ContentId
from rollout_core.objects.files import SWEEPS, Files

_ID_BYTES = 32
_LEFT_OVER_SECONDS = 86400.0
"""An announcement this old is a killed collection's."""


@contextmanager
def announced(files: Files, content_ids: Collection[ContentId]) -> Iterator[None]:
    """Within the block these blobs may be deleted, each right after its age was looked at."""
    if not content_ids:
        yield
        return
    for key, stat in files.list(SWEEPS):
        if stat.modified < time.time() - _LEFT_OVER_SECONDS:
            files.delete(key)
    key = f"{SWEEPS}/{ULID()}"
    files.write(key, b"".join(map(bytes.fromhex, content_ids)))
    try:
        time.sleep(files.settle_seconds)
        yield
    finally:
        files.delete(key)


def is_swept_away(files: Files, key: str, content_id: ContentId) -> bool:
    """Whether a blob that the caller has just touched is gone all the same; waits where that is not decided yet."""
    wait_for_sweep(files, [content_id])
    return files.stat(key) is None


def wait_for_sweep(files: Files, content_ids: Collection[ContentId]) -> None:
    """Where one of these blobs is about to be deleted, wait until that is done, or spared. For who has named them just
    now: whoever deletes looks at names last of all."""
    sweeps = [sweep for sweep, _ in files.list(SWEEPS)]
    if any(_names(files, sweep, content_id) for sweep in sweeps for content_id in content_ids):
        time.sleep(files.settle_seconds)


def _names(files: Files, sweep: str, content_id: ContentId) -> bool:
    with suppress(FileNotFoundError):  # it has ended
        data = files.read(sweep)
        place = data.find(wanted := bytes.fromhex(content_id))
        while place >= 0:
            if place % _ID_BYTES == 0:
                return True
            place = data.find(wanted, place + 1)
    return False
