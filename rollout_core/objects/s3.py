"""An object store's files in S3.

Requests about one file are made by botocore's own client, by the thread that needs them: that takes half the time of a
processor that a request through s3fs's event loop takes, and no thread waits for another's. Listings and copies, which
may take many requests, are s3fs's, and so are the storage options.

A process may outlive temporary credentials. Those of a role botocore renews by itself; those of a shared credentials
file somebody else renews, and they are read again when S3 says that they have expired.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ulid import ULID

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.objects.buckets import READ_BYTES, RemoteFiles, log
from rollout_core.objects.files import (
    EXPIRED_CREDENTIALS,
    NO_CREDENTIALS,
    AwaitsCredentials,
    FileStat,
    Upload,
    aws_code,
    storage_faults,
)

BYTES_IN_FLIGHT = 48 * 2**20
"""Of a file's parts; so many connections as that makes are busy at once. One more part is in memory."""
PARTS_OF_ONE_SIZE = 1000
"""S3 takes 10,000 parts, so those after the first thousand are larger: 16 MiB at first reach to 880 GiB."""
CONNECTIONS = 64
"""Kept open for further requests; more threads than that may ask."""
JOINING_SECONDS = 120.0
"""That a service may take to put the parts of a file together; other requests wait s3fs's 15 s for an answer."""
TRIES = 5
"""Of a request whose answer was cut or damaged, or that was throttled beyond the patience of botocore."""
FIRST_PAUSE_SECONDS = 0.1
_PASSING_CODES = {"SlowDown", "XAmzContentSHA256Mismatch", "BadDigest"}
_JOIN = "complete_multipart_upload"
_clients: weakref.WeakKeyDictionary[Any, dict[float, Any]] = weakref.WeakKeyDictionary()
"""Clients of this process, by the file system of s3fs whose options they have, and by the seconds that they wait."""
_renewable: weakref.WeakSet[Any] = weakref.WeakSet()
"""File systems whose credentials came from where somebody, or botocore itself, puts others."""
_FIXED = ("env", "explicit")
"""Ways in which a process gets credentials that cannot change while it runs."""
_making = threading.Lock()


class S3Files(RemoteFiles):
    """A prefix of a bucket of S3."""

    read_bytes = READ_BYTES

    def _opened(self, fs: Any) -> None:
        from botocore.exceptions import FlexibleChecksumError
        from s3fs.core import add_retryable_error

        add_retryable_error(FlexibleChecksumError)  # what arrived is not what was sent

    def stat(self, key: str) -> FileStat | None:
        with storage_faults("look at", self.where(key)):
            try:
                found = self.call_s3("head_object", key)
            except FileNotFoundError:
                return None
            return FileStat(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"].strip('"') or None)

    def read(self, key: str) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.call_s3("get_object", key)["Body"]

    def read_part(self, key: str, start: int, size: int) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.call_s3("get_object", key, Range=f"bytes={start}-{start + size - 1}")["Body"]

    def write(self, key: str, data: bytes) -> None:
        self.require_room(key, len(data))
        with self.writing(key):
            self.call_s3("put_object", key, Body=data)

    def upload(self, key: str | None = None) -> Upload:
        return S3Upload(self, key)

    def checksums(self) -> dict[str, str]:
        """What an upload in parts is begun with: S3 would otherwise compute a checksum of the whole file at its end.
        Nothing where the client's settings ask for no checksums but those that S3 demands."""
        client = _client_of(self.fs, self.fs.read_timeout)
        is_asked = client.meta.config.request_checksum_calculation == "when_supported"
        algorithm = self.fs.s3_additional_kwargs.get("ChecksumAlgorithm", "CRC32")
        return {"ChecksumAlgorithm": algorithm} if is_asked else {}

    def delete(self, key: str) -> None:
        with storage_faults("delete", self.where(key)), suppress(FileNotFoundError):
            self.call_s3("delete_object", key)

    def discard(self, key: str) -> None:
        with suppress(Exception):
            self.call_s3("delete_object", key)

    def drop_uploads(self, begun_before: float, *, dry_run: bool) -> int:
        try:
            with storage_faults("give up old uploads to", self.where("")):
                old = [(key, upload) for key, upload, begun in self._uploads() if begun < begun_before]
                for key, upload in () if dry_run else old:
                    with suppress(FileNotFoundError):  # completed or given up by somebody else
                        self.call_s3("abort_multipart_upload", key, UploadId=upload)
        except (ConfigError, Recoverable) as error:
            # Not everybody may list them, and not every service does.
            log.warning("uploads that nobody completed stay where they are: %s", error)
            return 0
        return len(old)

    def _uploads(self) -> Iterator[tuple[str, str, float]]:
        """Key, id and begin of uploads of temporary files and blobs that are not completed."""
        bucket, _, prefix = self.path("").partition("/")
        place: dict[str, str] = {}
        while True:
            try:
                page = self._call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **place)
            except FileNotFoundError:
                return
            for upload in page.get("Uploads", ()):
                key, begun = upload["Key"][len(prefix) :], upload["Initiated"].timestamp()
                if key.startswith("tmp/"):
                    with suppress(ValueError):  # by both clocks, since some services do not tell when it began
                        begun = max(begun, ULID.from_str(key.removeprefix("tmp/")).timestamp)
                if key.startswith(("tmp/", "cas/")):
                    yield key, upload["UploadId"], begun
            if not page.get("IsTruncated"):
                return
            place = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _asked(self, request: Callable[[Any], Any]) -> Any:
        fs = self.fs
        try:
            return request(fs)
        except Exception as error:
            client = _client_of(fs, fs.read_timeout)
            if not _may_be_renewed(fs, client, error):
                raise
            _renew(fs, client)
        try:
            return request(fs)
        except Exception as error:
            if not _lacks_credentials(error):
                raise
            raise _awaited(error) from error

    def call_s3(self, method: str, key: str, **arguments: Any) -> dict[str, Any]:
        """One call of S3 about a key; its answer, with the ``Body`` read. Raises errors of Python for those of S3, as
        s3fs does."""
        bucket, _, name = self.path(key).partition("/")
        return self._call(method, Bucket=bucket, Key=name, **arguments)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        fs = self.fs  # first, since it says which package is missing
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from s3fs.errors import translate_boto_error
        from s3fs.utils import ParamKwargsHelper

        seconds = JOINING_SECONDS if method == _JOIN else fs.read_timeout
        client = _client_of(fs, seconds)
        is_renewed = False
        given = ParamKwargsHelper(client).filter_dict(method, {**fs.s3_additional_kwargs, **fs.req_kw, **arguments})
        pause = FIRST_PAUSE_SECONDS
        for is_last in (*[False] * (TRIES - 1), True):
            try:
                answer = getattr(client, method)(**given)
                if "Body" in answer:
                    answer["Body"] = answer["Body"].read()
                return answer
            except (BotoCoreError, ClientError, ResponseParserError) as error:
                if not is_last and not is_renewed and _may_be_renewed(fs, client, error):
                    _renew(fs, client)
                    client, is_renewed = _client_of(fs, seconds), True
                    continue
                if is_renewed and _lacks_credentials(error):
                    raise _awaited(error) from error
                if is_last or not _is_passing(error):
                    translated = translate_boto_error(error)
                    raise translated from (None if translated is error else error)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")


def _is_passing(error: Exception) -> bool:
    """Whether the same request may do better at once. What had no answer, or one with 5xx, botocore has tried again."""
    from botocore.exceptions import (
        ClientError,
        ConnectionClosedError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
        ReadTimeoutError,
    )
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        return error.response.get("Error", {}).get("Code") in _PASSING_CODES
    if isinstance(error, (ConnectionClosedError, ReadTimeoutError)):
        return False
    return isinstance(error, (HTTPClientError, IncompleteReadError, FlexibleChecksumError, ResponseParserError))


def _client_of(fs: Any, read_timeout: float) -> Any:
    """botocore's client with the options of a file system of s3fs; they may say how long to wait."""
    client = _clients.get(fs, {}).get(read_timeout)
    if client is None:
        with _making:
            made = _clients.setdefault(fs, {})
            client = made.get(read_timeout)
            if client is None:
                client = made[read_timeout] = _make_client(fs, read_timeout)
    return client


def _lacks_credentials(error: Exception) -> bool:
    """Whether those of the request have expired, or there were none where they are read from."""
    return aws_code(error) in EXPIRED_CREDENTIALS or type(error).__name__ in NO_CREDENTIALS


def _may_be_renewed(fs: Any, client: Any, error: Exception) -> bool:
    """Whether a request lacks credentials that may be there by now. The storage options and the environment of a
    process stay as they are; a file may be read at the moment in which somebody writes it, and be empty then."""
    if fs not in _renewable or not _lacks_credentials(error):
        return False
    # An answer to HEAD says only 400, without a reason.
    return aws_code(error) != "400" or client._request_signer._credentials.token is not None


def _renew(fs: Any, client: Any) -> None:
    """Have the credentials read again, unless another thread has done so since ``client`` was made."""
    with _making:
        if client not in _clients.get(fs, {}).values():
            return
        _clients.pop(fs, None)
    log.warning("the temporary credentials for S3 have expired, and are read again from where they come")
    fs.connect(refresh=True)


def _awaited(error: Exception) -> AwaitsCredentials:
    reason = aws_code(error) or type(error).__name__
    return AwaitsCredentials(f"the temporary credentials have expired ({reason})")


def _make_client(fs: Any, read_timeout: float) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    keys = {"aws_access_key_id": fs.key, "aws_secret_access_key": fs.secret, "aws_session_token": fs.token}
    named = {**keys, "endpoint_url": fs.endpoint_url, "use_ssl": fs.use_ssl, **fs.client_kwargs}
    waits = {"connect_timeout": fs.connect_timeout, "read_timeout": read_timeout}
    config = {"max_pool_connections": CONNECTIONS, **waits, **fs.config_kwargs}
    if fs.anon:
        named = {name: value for name, value in named.items() if name not in keys}
        config["signature_version"] = UNSIGNED
    given = {name: value for name, value in named.items() if value is not None}
    client = Session(**fs.kwargs).create_client("s3", config=Config(**config), **given)
    found = client._request_signer._credentials
    if found is not None and found.method not in _FIXED:
        _renewable.add(fs)
    return client


class S3Upload:
    """Parts of a file, several on their way at once. Where its key is not known yet, it is at ``tmp/``, and the server
    copies it."""

    def __init__(self, files: S3Files, key: str | None) -> None:
        self._files = files
        self._key = key or f"tmp/{ULID()}"
        with files.writing(self._key):
            # The server's copy has a checksum of the whole file in any case.
            checksums = {} if key is None else files.checksums()
            begun = files.call_s3("create_multipart_upload", self._key, **checksums)
        self._id: str | None = begun["UploadId"]
        self._algorithm: str | None = begun.get("ChecksumAlgorithm")
        """Of the parts' checksums, where the service compares them once more when it puts the parts together."""
        self._in_flight = max(1, BYTES_IN_FLIGHT // files.part_bytes)
        self._pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="object-upload")
        self._pool.submit(_client_of, files.fs, JOINING_SECONDS)  # takes a while, once in a process
        self._held = bytearray()
        """The part that is being filled, as long as it is to become; or nothing yet."""
        self._filled = 0
        self._spare: list[bytearray] = []
        """Of parts that were sent. What is freed and asked for again by the size of a part, a process keeps twice."""
        self._sent_bytes = 0
        self._parts: list[Future[dict[str, str]]] = []
        self._open = True

    def write(self, chunk: bytes) -> None:
        self._files.require_room(self._key, self._sent_bytes + self._filled + len(chunk))
        rest = memoryview(chunk)
        while rest:
            if not self._held:
                self._held = self._next_part()
            taken = min(len(rest), len(self._held) - self._filled)
            self._held[self._filled : self._filled + taken] = rest[:taken]
            self._filled += taken
            rest = rest[taken:]
            if self._filled == len(self._held):
                self._send()

    def _next_part(self) -> bytearray:
        if len(self._parts) > self._in_flight:
            self._parts[-self._in_flight - 1].result()  # no more in memory than may be on their way, and this one
        size = self._files.part_bytes * (1 + len(self._parts) // PARTS_OF_ONE_SIZE)
        spare = self._spare.pop() if self._spare else bytearray()
        return spare if len(spare) == size else bytearray(size)

    def _send(self) -> None:
        data, self._held = self._held, bytearray()
        del data[self._filled :]
        self._sent_bytes += self._filled
        self._filled = 0
        self._parts.append(self._pool.submit(self._put, len(self._parts) + 1, data))

    def _put(self, number: int, data: bytearray) -> dict[str, str]:
        part: dict[str, Any] = {"UploadId": self._id, "PartNumber": number, "Body": data}
        if self._algorithm is not None:
            part["ChecksumAlgorithm"] = self._algorithm
        with self._files.writing(self._key):
            answer = self._files.call_s3("upload_part", self._key, **part)
        self._spare.append(data)
        return {name: answer[name] for name in ("ETag", f"Checksum{self._algorithm}") if name in answer}

    def commit(self, key: str) -> None:
        if self._filled or not self._parts:
            self._send()
        parts = [{"PartNumber": number, **part.result()} for number, part in enumerate(self._parts, 1)]
        before = self._files.stat(key) if key == self._key else None
        with self._files.writing(self._key):
            try:
                self._files.call_s3(_JOIN, self._key, UploadId=self._id, MultipartUpload={"Parts": parts})
            except FileNotFoundError:
                # Done before, where the answer was lost and the client asked again.
                found = self._files.stat(self._key)
                if found is None or found.size != self._sent_bytes or found == before:
                    raise
        self._id = None
        if key != self._key:
            with self._files.writing(key):
                self._files.fs.cp_file(self._files.path(self._key), self._files.path(key))
        self._end()

    def abort(self) -> None:
        if self._open:
            self._end()

    def _end(self) -> None:
        self._open = False
        self._pool.shutdown(cancel_futures=True)
        if self._id is not None:
            with suppress(Exception):  # garbage collection gives up what could not be given up now
                self._files.call_s3("abort_multipart_upload", self._key, UploadId=self._id)
            self._id = None
        if self._key.startswith("tmp/"):
            self._files.discard(self._key)
