"""What the object store asks of the place that holds its bytes, and what a fault of that place means to the user.

A *key* is a slash-separated path below the store's root, such as ``cas/ab/cd/abcd...``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

from rollout_core.base.errors import ConfigError, Recoverable, RetryHint, RolloutError
from rollout_core.base.ids import ContentId
from rollout_core.base.secrets import without_passwords

CHUNK_BYTES = 4 * 2**20
"""How much is read or written at once."""
TOUCH_AFTER_SECONDS = 6 * 3600.0
"""A file put again is touched only if it is older; garbage collection allows for that."""


@dataclass(frozen=True)
class FileStat:
    """Size in bytes, and when the file was last written or touched, in seconds since the epoch."""

    size: int
    modified: float
    mark: Hashable = None
    """Differs when the file has changed; of a local file inode and time of change, of one in a bucket its entity tag.
    None in listings, and where the service has none."""


class Upload(Protocol):
    """A file being written out of sight."""

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``."""
        ...

    def commit(self, key: str) -> None:
        """Make the file visible as ``key``, whole and durable, replacing what was there."""
        ...

    def abort(self) -> None:
        """Throw away what was written. Never raises; does nothing after a commit."""
        ...


class Files(Protocol):
    """Files by key. Every method may raise Recoverable or ConfigError, as `storage_faults` decides."""

    parallel: int
    """How many operations are worth running at once."""
    cheap_write_bytes: int
    """A file up to this size is written in the time it takes to ask whether it is there."""
    whole_write_bytes: int
    """A file up to this size is best written from memory, by `write`; a larger one by `upload`."""

    def where(self, key: str) -> str:
        """Address of ``key`` for messages."""
        ...

    def stat(self, key: str) -> FileStat | None:
        """None when there is no such file."""
        ...

    def holds(
        self, key: str, stat: FileStat, content_id: ContentId, source: Callable[[], Iterable[bytes]] | None
    ) -> bool:
        """Whether the file found as ``stat`` has the bytes of ``content_id``; False also where telling would cost as
        much as writing them. ``source`` gives them once more, where that is possible."""
        ...

    def keep(self, key: str, stat: FileStat) -> bool:
        """Make sure that a file found as ``stat`` is durable, and touch it if it is older than `TOUCH_AFTER_SECONDS`.

        False when that is impossible.
        """
        ...

    def read(self, key: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def read_part(self, key: str, start: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``start``, which lies within the file. Raises FileNotFoundError."""
        ...

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Raises FileNotFoundError before the first chunk."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Store ``data`` at ``key`` atomically and durably."""
        ...

    def upload(self) -> Upload:
        """Begin a file too large for memory."""
        ...

    def move(self, source: str, target: str) -> None:
        """Raises FileNotFoundError."""
        ...

    def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    def list(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        """Every file below ``folder``, at any depth."""
        ...


def write_all(file: FileIO, chunk: bytes) -> None:
    """Write all of ``chunk``: an unbuffered file may take part of it, such as when the disk is nearly full."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError"}
_CLIENT_PACKAGES = {"botocore", "aiobotocore", "s3fs", "gcsfs", "google", "aiohttp", "requests"}


@contextmanager
def storage_faults(action: str, where: str) -> Iterator[None]:
    """Turn errors of the storage into ours, the original chained; FileNotFoundError is left to the caller.

    No permission, no credentials or a place that cannot hold a store: ConfigError. Everything else (full, throttled,
    lost connection): Recoverable.
    """
    try:
        yield
    except (RolloutError, FileNotFoundError):
        raise
    except (OSError, ValueError) as error:
        raise _fault(error, f"cannot {action} {where}") from _cause(error)
    except Exception as error:
        # Cloud clients have hierarchies of their own; what is not theirs is a bug of ours and must show as one.
        if type(error).__module__.split(".")[0] not in _CLIENT_PACKAGES:
            raise
        raise _fault(error, f"cannot {action} {where}") from _cause(error)


def _cause(error: Exception) -> Exception | None:
    """The error to be chained, whose text is logged with ours: none that shows an endpoint's password."""
    return error if without_passwords(str(error)) == str(error) else None


def _fault(error: Exception, what: str) -> RolloutError:
    number = getattr(error, "errno", None)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    message = f"{what}: {' '.join(without_passwords(text).split())}"
    status = str(getattr(error, "code", ""))
    if type(error).__name__ in _NO_CREDENTIALS or status == "401":
        return ConfigError(f"{message}; expected credentials in the environment or in the storage options")
    # gcsfs gives 403 in the message only.
    refused = (
        isinstance(error, PermissionError) or number in _REFUSED or status == "403" or text.startswith("Forbidden")
    )
    if refused:
        return ConfigError(f"{message}; expected a place this process may read and write")
    if isinstance(error, FileExistsError) or number in _IN_THE_WAY:
        return ConfigError(f"{message}; expected nothing else in its place: choose another storage URL or name")
    if isinstance(error, ValueError):
        return ConfigError(f"{message}; expected a storage URL and storage options that the service understands")
    if number in _FULL:
        return Recoverable(f"{message}; free some space, then run again", RetryHint(30.0, 600.0))
    return Recoverable(f"{message}; a passing fault, try again", RetryHint(1.0, 60.0))
