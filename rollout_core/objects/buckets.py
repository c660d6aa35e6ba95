"""An object store's files in a bucket (S3, GCS) or in this process's memory, through fsspec."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ulid import ULID

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.base.settings import upload_part_bytes
from rollout_core.objects.files import (
    TOUCH_AFTER_SECONDS,
    FileStat,
    Upload,
    check_once,
    hash_chunks,
    storage_faults,
)

log = logging.getLogger(__name__)

READ_BYTES = 8 * 2**20
READ_AHEAD = 4
REMOTE_SETTLE_SECONDS = 15.0
WHOLE_WRITE_BYTES = 32 * 2**20
GCS_PART_UNIT_BYTES = 256 * 2**10
WRITE_TRIES = 3
LOGIN_SECONDS = 10.0
LEFT_OVER_SECONDS = 86_400.0
"""So old, a file that has not got its own name belongs to no process any more."""
_let_in: weakref.WeakSet[Any] = weakref.WeakSet()
"""gcsfs file systems whose credentials were looked at."""
_MANY_FOLDERS = 1000
"""More subfolders than that are not listed one by one."""


class RemoteFiles:
    """A prefix of a bucket. One PUT is atomic and durable there, so small files are written in place.

    Larger ones are seen once their last part has come. Those whose name is known only when all bytes have passed go to
    ``tmp/`` and are copied by the server.
    What is written arrives as it was sent: S3 compares each request with a checksum that its client sends, and what GCS
    says that it has is compared here; where that file is to replace another (`temp_upload`), it first has a name of
    its own next to it.
    """

    parallel = 8
    cheap_write_bytes = 64 * 2**10
    whole_write_bytes = WHOLE_WRITE_BYTES
    read_bytes = 6 * 2**20
    """Of a large file in one request; aiohttp has each twice in memory for a moment."""

    def __init__(self, protocol: str, root: str, options: Mapping[str, Any], max_bytes: int | None = None) -> None:
        self.settle_seconds = 0.0 if protocol == "memory" else REMOTE_SETTLE_SECONDS
        self.protocol = protocol
        """``s3``, ``gs`` or ``memory``."""
        self.part_bytes = upload_part_bytes()
        if protocol == "gs":
            self.part_bytes -= self.part_bytes % GCS_PART_UNIT_BYTES
        self._max_bytes = max_bytes
        self._root = root
        self._options = options
        self._fs: Any = None
        self._fs_process: int | None = None

    @property
    def fs(self) -> Any:
        """The fsspec file system; it starts a thread, so it is made at first use and again after a fork."""
        if self._fs_process != os.getpid():
            if self.protocol == "gs":
                # gcsfs otherwise asks an API for the kind of bucket, which stalls the first write where it is blocked.
                os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            import fsspec

            try:
                # Another process may write at any time, so a listing must never be answered from a cache.
                self._fs = fsspec.filesystem(self.protocol, use_listings_cache=False, **self._options)
            except ImportError as error:
                extra = {"s3": "s3", "gs": "gcs"}.get(self.protocol, self.protocol)
                raise ConfigError(
                    f"{self.protocol}:// needs a package: pip install '{DISTRIBUTION}[{extra}]'"
                ) from error
            self._fs_process = os.getpid()
            self._opened(self._fs)
        return self._fs

    def _opened(self, fs: Any) -> None:
        """What is to be done with a file system of this process before its first use."""
        if self.protocol == "gs" and fs not in _let_in:
            self.require_login()

    def require_login(self) -> None:
        """Raises ConfigError at once where Google refuses the credentials, which gcsfs asks again about for half a
        minute, call by call."""
        fs, bucket, headers = self._fs, self._root.partition("/")[0], {}
        if fs.credentials.credentials is None:
            return
        with storage_faults("use", self.where("")):
            fs.credentials.apply(headers)
            request = urllib.request.Request(f"{fs.base}b/{bucket}/o?maxResults=1&fields=kind", headers=headers)
            try:
                urllib.request.urlopen(request, timeout=LOGIN_SECONDS).close()
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.UNAUTHORIZED:
                    raise
            except OSError:
                return  # whoever needs the service says so
        _let_in.add(fs)

    def where(self, key: str) -> str:
        return f"{self.protocol}://{self.path(key).lstrip('/')}"

    def stat(self, key: str) -> FileStat | None:
        with storage_faults("look at", self.where(key)):
            try:
                found = self.fs.info(self.path(key))
            except FileNotFoundError:
                return None
            return _file_stat(found) if found["type"] == "file" else None

    def holds(
        self, key: str, stat: FileStat, content_id: ContentId, source: Callable[[], Iterable[bytes]] | None
    ) -> bool:
        """By the service's MD5 of what it stored, where it gives one. It gives none for files in parts or encrypted by
        a customer's key: those are written again."""
        if self.protocol == "memory":
            return hash_chunks(self.read_chunks(key)) == content_id
        if source is None or stat.mark is None:
            return False
        return check_once(self.where(key), stat.mark, lambda: _md5(source()) == stat.mark)

    def keep(self, key: str, stat: FileStat) -> bool:
        if time.time() - stat.modified < TOUCH_AFTER_SECONDS:
            return True
        temporary = f"tmp/{ULID()}"
        with storage_faults("touch", self.where(key)):
            try:
                # S3 refuses to copy an object onto itself.
                self.fs.cp_file(self.path(key), self.path(temporary))
                self.fs.cp_file(self.path(temporary), self.path(key))
            except FileNotFoundError:
                return False
            finally:
                self.discard(temporary)
        return True

    def read(self, key: str) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.fs.cat_file(self.path(key))

    def read_part(self, key: str, start: int, size: int) -> bytes:
        with storage_faults("read", self.where(key)):
            return self.fs.cat_file(self.path(key), start=start, end=start + size)

    def read_chunks(self, key: str) -> Iterator[bytes]:
        stat = self.stat(key)
        if stat is None:
            raise FileNotFoundError(self.where(key))

        def fetch(start: int) -> bytes:
            return self.read_part(key, start, self.read_bytes)

        starts = iter(range(0, stat.size, self.read_bytes))
        if stat.size <= self.read_bytes:
            yield from map(fetch, starts)
            return
        pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="object-read")
        try:
            ahead = deque(pool.submit(fetch, start) for start in islice(starts, READ_AHEAD))
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(pool.submit(fetch, start) for start in islice(starts, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def write(self, key: str, data: bytes) -> None:
        self.require_room(key, len(data))
        for is_last in (*[False] * (WRITE_TRIES - 1), True):
            with self.writing(key):
                answer = self.fs.pipe_file(self.path(key), data)
            if self.protocol != "gs":
                return
            try:
                return self.require_arrived(key, crc32c(data), answer if isinstance(answer, Mapping) else None)
            except Recoverable:
                if is_last:
                    raise

    def upload(self, key: str | None = None) -> Upload:
        if self.protocol == "gs" and key is not None:
            return StreamedUpload(self, key, passing=False)
        return StreamedUpload(self, f"tmp/{ULID()}")  # in memory a part of a file is seen

    def temp_upload(self, key: str) -> Upload:
        """An upload to ``key`` that leaves what is there until the new file was found to be what was sent."""
        if self.protocol != "gs" or self.stat(key) is None:
            return self.upload(key)
        folder, _, name = key.rpartition("/")
        self._sweep(folder, f".{name}.")
        return StreamedUpload(self, f"{folder}/.{name}.{ULID()}.tmp", shown=key)

    def _sweep(self, folder: str, prefix: str) -> None:
        """Remove old files of `temp_upload`: a process was killed before it had given one its own name. What else is
        called much like them is somebody's."""
        ours = re.compile(re.escape(f"{self.path(folder)}/{prefix}") + r"[0-9A-HJKMNP-TV-Z]{26}\.tmp")
        with suppress(ConfigError, Recoverable), storage_faults("list", self.where(folder)):
            for path, info in self.fs.find(self.path(folder), prefix=prefix, detail=True).items():
                if ours.fullmatch(path) and time.time() - _file_stat(info).modified > LEFT_OVER_SECONDS:
                    self.discard(path[len(self.path("")) :])

    def drop_uploads(self, begun_before: float, *, dry_run: bool) -> int:
        return 0  # GCS gives up uploads after a week by itself, and lists none

    def require_room(self, key: str, size: int) -> None:
        """Raises ConfigError for a file that is larger than the settings allow."""
        if self._max_bytes is not None and size > self._max_bytes:
            raise ConfigError(
                f"{self.where(key)} would have more than {self._max_bytes:,} bytes (ROLLOUT_MAX_BLOB_BYTES, or "
                "max_snapshot_part_bytes of a [cloud] table); raise it, or store smaller files: a model's weights as "
                'save_pretrained(folder, max_shard_size="4GB") writes them'
            )

    def require_arrived(
        self, key: str, checksum: str, info: Mapping[str, Any] | None = None, *, shown: str | None = None
    ) -> None:
        """Raises Recoverable, which names the file that is ``shown`` or ``key``, where what GCS says that it holds is
        not what was sent."""
        shown = shown or key
        with self.writing(shown):
            held = (info or self.fs.info(self.path(key))).get("crc32c")
        if held not in (None, checksum):
            raise Recoverable(
                f"{self.where(shown)} did not arrive as it was sent: its checksum is {held}, not {checksum}"
            )

    def take(self, path: Path, key: str) -> bool:
        return False

    def move(self, source: str, target: str) -> None:
        with storage_faults("move", self.where(source)):
            self._asked(lambda fs: fs.cp_file(self.path(source), self.path(target)))
            self.discard(source)

    def delete(self, key: str) -> None:
        with storage_faults("delete", self.where(key)), suppress(FileNotFoundError):
            self.fs.rm_file(self.path(key))

    def list(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        # fsspec returns a listing as a whole; one for each subfolder stays small where there are millions of blobs.
        with storage_faults("list", self.where(folder)):
            try:
                entries = self._asked(lambda fs: fs.ls(self.path(folder), detail=True))
            except FileNotFoundError:
                return
        subfolders = [entry["name"] for entry in entries if entry["type"] == "directory"]
        if len(subfolders) > _MANY_FOLDERS:  # as below an id each, which together take fewer requests than folders
            entries, subfolders = [], [self.path(folder)]
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="object-list") as pool:
            listings = pool.map(self._find, subfolders)
            for entry in [*(e for e in entries if e["type"] == "file"), *chain.from_iterable(listings)]:
                with storage_faults("list", self.where(folder)):  # a checksum that arrived damaged
                    stat = _file_stat(entry)
                yield entry["name"][len(self.path("")) :], stat

    def _find(self, path: str) -> list[dict[str, Any]]:
        with storage_faults("list", path):
            return list(self._asked(lambda fs: fs.find(path, detail=True)).values())

    def _asked(self, request: Callable[[Any], Any]) -> Any:
        """What a request by fsspec's file system comes to."""
        return request(self.fs)

    def path(self, key: str) -> str:
        """What fsspec calls ``key``."""
        return f"{self._root}/{key}"

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """`storage_faults` of a write, where "not found" means the bucket, or what was there of the file so far."""
        with storage_faults("write", self.where(key)):
            try:
                yield
            except FileNotFoundError as error:
                if not self.has_bucket():
                    text = f"no bucket at {self.where('')}: create it, or correct the storage URL"
                    raise ConfigError(text) from error
                raise Recoverable(
                    f"{self.where(key)} was not written: its upload was given up, or what was uploaded was removed, "
                    "before it was complete; try again"
                ) from error

    def has_bucket(self) -> bool:
        """Whether there is anything of the name that files are to be in."""
        with storage_faults("look at", self.where("")):
            name = self._root.partition("/")[0]
            return self.protocol == "memory" or bool(self._asked(lambda fs: fs.exists(name)))

    def discard(self, key: str) -> None:
        """Delete a temporary file; what cannot be deleted now is left to garbage collection."""
        with suppress(Exception):
            self.fs.rm_file(self.path(key))


class StreamedUpload:
    """A file that fsspec writes, to GCS by a resumable upload: a part is on its way while the next one is gathered.
    Where ``key`` is only ``passing``, the server copies the whole file from there to the key that it is to have, which
    faults name if it is ``shown``."""

    def __init__(self, files: RemoteFiles, key: str, *, passing: bool = True, shown: str | None = None) -> None:
        self._files = files
        self._key = key
        self._shown = shown or key
        self._passing = passing
        with files.writing(self._shown):
            self._file = files.fs.open(files.path(self._key), "wb", block_size=files.part_bytes)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="object-upload")
        self._sending: Future[None] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._checksum = 0
        self._size = 0
        self._open = True

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._files.require_room(self._shown, self._size)
        if self._files.protocol == "gs":
            self._checksum = _crc32c_extend(self._checksum, chunk)
        self._held.append(chunk)
        self._held_bytes += len(chunk)
        if self._held_bytes >= self._files.part_bytes:
            self._send()

    def _send(self) -> None:
        if self._sending is not None:
            self._sending.result()
        self._sending = self._pool.submit(self._put, self._held)
        self._held, self._held_bytes = [], 0

    def _put(self, chunks: list[bytes]) -> None:
        chunks.reverse()
        with self._files.writing(self._shown):
            while chunks:
                self._file.write(chunks.pop())  # which copies it, so that it need not be kept as well

    def commit(self, key: str) -> None:
        self._send()
        self._pool.submit(self._close).result()
        if self._files.protocol == "gs":
            self._files.require_arrived(self._key, _crc32c_text(self._checksum), shown=self._shown)
        if self._passing:
            with self._files.writing(key):
                self._files.fs.cp_file(self._files.path(self._key), self._files.path(key))
            self._files.discard(self._key)
        self._open = False
        self._pool.shutdown()

    def _close(self) -> None:
        assert self._sending is not None, "asked for after the last part"
        self._sending.result()
        with self._files.writing(self._shown):
            self._file.close()

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        self._pool.shutdown(cancel_futures=True)
        if not self._file.closed:
            with suppress(Exception):
                self._file.discard()
            # fsspec's finaliser would otherwise close the file, and closing it completes the upload.
            with suppress(AttributeError):
                self._file.closed = True
        if self._passing:
            self._files.discard(self._key)


def crc32c(data: bytes) -> str:
    """The checksum that GCS tells of a file, as it writes it."""
    return _crc32c_text(_crc32c_extend(0, data))


def _crc32c_extend(checksum: int, data: bytes) -> int:
    import google_crc32c  # with GCS's client, an extra

    return google_crc32c.extend(checksum, data)


def _crc32c_text(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _file_stat(info: Mapping[str, Any]) -> FileStat:
    when = next((info[name] for name in ("LastModified", "updated", "mtime", "created") if info.get(name)), 0.0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    modified = when.timestamp() if isinstance(when, datetime) else float(when)
    return FileStat(int(info["size"]), modified, _tag(info))


def _tag(info: Mapping[str, Any]) -> str | None:
    """The entity tag of a file, or its MD5, in hex digits, which the tag is for most files."""
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    return info["ETag"].strip('"') if info.get("ETag") else None


def _md5(chunks: Iterable[bytes]) -> str:
    hasher = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()
