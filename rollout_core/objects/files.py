"""What the object store asks of the place that holds its bytes, and what a fault of that place means to the user;
hashing during input and output; and what a ref's file says.

A *key* is a slash-separated path below the store's root, such as ``cas/ab/cd/abcd...``.

A ref's file has the content id that its name stands for; its second line binds the id to the name, so that a ref that
was damaged, cut, edited or put in another's place is noticed when it is read. Earlier versions wrote the id alone. Such
a ref counts while what it names is there; so does one that was cut to its first line, which still says what it said.
"""

from __future__ import annotations

import binascii
import errno
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from rollout_core.base.errors import ConfigError, Recoverable, RetryHint, RolloutError
from rollout_core.base.ids import ContentId, content_id, is_content_id
from rollout_core.base.machine import usable_cores
from rollout_core.base.settings import without_passwords

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
    settle_seconds: float
    """No change takes longer to be seen by others; see `sweeps`."""

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

    def upload(self, key: str | None = None) -> Upload:
        """Begin a file too large for memory. Who knows the ``key`` to commit it as says so, which may save a copy."""
        ...

    def take(self, path: Path, key: str) -> bool:
        """Have a local file at ``key`` without a copy, durably and as new as one that is written now. It keeps its name
        ``path``, and nobody may write to it any more. False, and nothing stored, where that cannot be."""
        ...

    def move(self, source: str, target: str) -> None:
        """Raises FileNotFoundError."""
        ...

    def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    def drop_uploads(self, begun_before: float, *, dry_run: bool) -> int:
        """Give up what was begun by `upload` before then, in seconds since the epoch, never ended, and is no file that
        `list` shows; how many there were."""
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
NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
}
EXPIRED_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "400"}
_WRONG_CREDENTIALS = {
    *EXPIRED_CREDENTIALS,
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
"""Codes of AWS. 400 without a word is what S3 answers to HEAD with an expired token."""
_RENEWAL = RetryHint(30.0, 300.0)
"""Whoever renews credentials may be some minutes late."""
_ELSEWHERE = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException", "301"}
_WRONG_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_CLIENT_PACKAGES = {"botocore", "aiobotocore", "s3fs", "gcsfs", "google", "aiohttp", "requests"}


class AwaitsCredentials(PermissionError):
    """Temporary credentials have expired, and whoever renews them has not done so yet."""


@contextmanager
def storage_faults(action: str, where: str) -> Iterator[None]:
    """Turn errors of the storage into ours, the original chained; FileNotFoundError is left to the caller.

    No permission, no credentials or a place that cannot hold a store: ConfigError. Everything else (full, throttled,
    lost connection, credentials that are being renewed): Recoverable.
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
    if isinstance(error, AwaitsCredentials):
        return Recoverable(f"{message}; they are read again from where they come: renew them there", _RENEWAL)
    refusal = _advice_of(error)
    if refusal:
        return ConfigError(f"{message}; {refusal}")
    if type(error).__name__ in NO_CREDENTIALS or status == "401":
        return ConfigError(f"{message}; expected valid credentials in the environment or in the storage options")
    # gcsfs gives 403 in the message only.
    refused = (
        isinstance(error, PermissionError) or number in _REFUSED or status == "403" or text.startswith("Forbidden")
    )
    if refused:
        return ConfigError(f"{message}; expected a place this process may read and write")
    if isinstance(error, FileExistsError) or number in _IN_THE_WAY:
        return ConfigError(f"{message}; expected nothing else in its place: choose another storage URL or name")
    if isinstance(error, ValueError) and not isinstance(error, _GARBLED):
        return ConfigError(f"{message}; expected a storage URL and storage options that the service understands")
    if number in _FULL:
        return Recoverable(f"{message}; free some space, then run again", RetryHint(30.0, 600.0))
    return Recoverable(f"{message}; a passing fault, try again", RetryHint(1.0, 60.0))


def aws_code(error: Exception) -> str:
    """AWS's reason for refusing a request, such as ``ExpiredToken``; empty where it gave none."""
    # s3fs raises an error of Python's from the client's.
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _advice_of(error: Exception) -> str | None:
    """What to do about AWS's reason for refusing a request, where trying again would not help."""
    code = aws_code(error)
    if code in _WRONG_CREDENTIALS:
        shown = "" if code == "400" else f" ({code})"
        return f"the credentials are wrong or have expired{shown}: renew them in the environment or the storage options"
    if code in _ELSEWHERE:
        return f"the bucket is in another region ({code}): set AWS_DEFAULT_REGION to the bucket's"
    if code in _WRONG_CLOCK:
        return f"this machine's clock is wrong ({code}): keep it by NTP"
    return None


_GARBLED = (json.JSONDecodeError, UnicodeDecodeError, binascii.Error)
"""Of an answer that was cut or damaged on its way."""
_WORTH_A_THREAD_BYTES = 2**20
WORTH_THREADS_BYTES = 16 * 2**20
"""Of a file; what starting them costs is then a percent of hashing it."""


def large_hasher() -> blake3:
    """BLAKE3 that shares chunks of a MiB and more among the cores that this process may use, up to eight. The threads
    are this hasher's own: those that all hashers of a process can share are not there after a fork, where hashing would
    then never end."""
    cores = usable_cores()
    return blake3(max_threads=min(8, cores))


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


def check_once(where: str, mark: Hashable, check: Callable[[], bool]) -> bool:
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


def hash_chunks(chunks: Iterable[bytes]) -> ContentId:
    """The content id of these bytes."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return ContentId(hasher.hexdigest())


FLUSH_BYTES = 32 * 2**20


class Flushing:
    """Has a file brought to the disk while it is being written, so that the fsync at its end is a short one.

    Use as a context manager around all writes, within the file's own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unflushed = 0
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def __enter__(self) -> Flushing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()  # before the descriptor may become another file's

    def wrote(self, num_bytes: int) -> None:
        """Count bytes that were handed to the system. Raises OSError where earlier ones could not be written."""
        self._unflushed += num_bytes
        if self._unflushed < FLUSH_BYTES or (self._running is not None and not self._running.done()):
            return
        self.check()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="object-flush")
        self._unflushed = 0
        self._running = self._pool.submit(os.fdatasync, self._descriptor)

    def check(self) -> None:
        """Raises OSError where something could not be written: the system tells that once, and not to a later fsync."""
        if self._running is not None:
            self._running.result()


def fsync_folder(path: str | Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Hidden files, such as those that a file manager leaves behind, are nobody's ref.
_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_NAME = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


@dataclass(frozen=True)
class RefContent:
    """What the file of a ref says."""

    named: ContentId
    is_checked: bool
    """Whether it has the line that binds the id to the name; refs of earlier versions have none."""


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


REF_READINGS = 5


def decode_ref(name: str, data: bytes) -> RefContent | None:
    """What the file of ref ``name`` says; None where neither `encode_ref` nor an earlier version wrote it so."""
    digits = data[:64].decode(errors="replace")
    if not is_content_id(digits):
        return None
    named = ContentId(digits)
    is_checked = data == encode_ref(name, named)
    return RefContent(named, is_checked) if is_checked or data[64:] in (b"", b"\n") else None


def settled_ref(name: str, read: Callable[[], bytes]) -> tuple[RefContent | None, bytes]:
    """What the file of ref ``name`` says, as `decode_ref`, and its bytes.

    It is read again where it says nothing, for the fault may have been on the way here. What is wrong twice in the same
    way, or `REF_READINGS` times, is wrong there.
    """
    damaged: set[bytes] = set()
    while True:
        data = read()
        content = decode_ref(name, data)
        if content is not None or data in damaged or len(damaged) + 1 == REF_READINGS:
            return content, data
        damaged.add(data)


def _check(name: str, named: ContentId) -> ContentId:
    return content_id("ref/1", [name, named])


RESULT_REFS = "results"
SNAPSHOT_REFS = "snapshots"
MAKER_REFS = "makers"
"""Below it, under an id and the key of the call of a stage that made it, stands the record of its lineage."""
LINEAGE_REFS = "lineage"
"""Below it, under an id, stands the record of its last maker, as versions before `MAKER_REFS` wrote it."""
EXPIRED_REFS = "expired"
"""Below it stand refs that housekeeping took away, while a run is under way that may have read them before."""
PRUNED_REFS = "let-go"
"""Below it, under its id, stands a snapshot whose bytes housekeeping gave up, or a state that was never stored, as
`snapshots.PrunedSnapshot`."""
SWEEPS = "sweeps"
"""Where collections of garbage announce what they are about to delete; see `sweeps`."""
GIVEN_UP_REFS = "given-up"
"""Below it, under its id, stands the manifest of a state or a model that its run gave up, until its files are deleted;
see `retention.pruning`. It keeps nothing."""
PROMOTION_REFS = "promotions"
CHOSEN_REFS = "chosen-models"
"""Below it, under its id, stands a model that somebody named as the start of a run."""
IMPORT_REFS = "imports"
"""Below it, under its id, stands where content was brought in from, as `imports.Source`."""
RUN_RECORD_REFS = "run-records"
"""Below it stands the record of each flow run."""
LINEAGE_FOLDERS = (f"{MAKER_REFS}/", f"{LINEAGE_REFS}/")
SELF_NAMED_REFS = (RESULT_REFS, SNAPSHOT_REFS, MAKER_REFS, LINEAGE_REFS)
RECORD_BYTES = 2**20
"""Records are rarely larger."""


def own_refs(document: Any) -> set[str]:
    """Names of the refs under which a stored document says it belongs; none where it is no such record."""
    match document:
        case {"metadata": {"storage_key": str(key)}, "result": _}:
            return {f"{RESULT_REFS}/{key}"}
        case {"id": str(snapshot), "run_id": str(run), "files": files, "algorithm": _} if is_content_id(files):
            return {f"{SNAPSHOT_REFS}/{snapshot}/{run}"}
        case {"stage": str(), "key": str(key), "outputs": [*outputs]}:
            made = [output for output in outputs if is_content_id(output)]
            return {
                *(f"{MAKER_REFS}/{output}/{key}" for output in made),
                *(f"{LINEAGE_REFS}/{output}" for output in made),
            }
    return set()


def parsed(data: bytes) -> Any:
    """The JSON of a blob; None where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None
