"""Files outside this machine's folders, named by URL: ``s3://bucket/key``, ``gs://bucket/key``, ``memory://name/key``.

Credentials and endpoints come from the environment, as the clients of S3 and GCS read them. Where the object store is
of the same kind, its storage options hold for these files too.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.secrets import refuse_credentials, without_password
from rollout_core.objects import ObjectStore
from rollout_core.objects.files import storage_faults
from rollout_core.objects.remote import RemoteFiles

SCHEMES = ("s3", "gs", "memory")


@dataclass(frozen=True)
class UrlFile:
    """One file at a URL."""

    url: str
    key: str
    size: int
    mark: str | None
    """Changes with the content; None where the service gives nothing of that kind."""


def is_url(address: str) -> bool:
    """Whether ``address`` is a URL, and not a path or ``file://``. Raises ConfigError for a kind that is unknown."""
    scheme, separator, _ = address.partition("://")
    if not separator or scheme == "file":
        return False
    refuse_credentials(address)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"URL {without_password(address)!r} is unknown; expected a path, file://, s3://, gs:// or memory://"
        )
    return True


def local_path(address: str) -> str:
    """The path of an address that is no URL: ``file:///absolute`` and ``file://./relative`` without their scheme."""
    path = address.removeprefix("file://")
    if path != address and not path.startswith(("/", "./", "../")):
        raise ConfigError(f"URL {address!r} names no file; expected file:///absolute or file://./relative")
    return path


def files_at(url: str, objects: ObjectStore | None) -> tuple[RemoteFiles, str]:
    """The bucket of a URL, and the key in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket or not key.strip("/"):
        raise ConfigError(f"URL {url!r} names no place in a bucket; expected {scheme}://bucket/key")
    same = objects is not None and objects.url.startswith(f"{scheme}://")
    options: Mapping[str, Any] = objects.storage_options if same and objects is not None else {}
    return RemoteFiles(scheme, f"/{bucket}" if scheme == "memory" else bucket, options), key.strip("/")


def bucket_exists(files: RemoteFiles) -> bool:
    """Whether there is anything of that name that files can be in."""
    with storage_faults("look at", files.where("")):
        return files.protocol == "memory" or bool(files.fs.exists(files.path("").rstrip("/")))


def matching_urls(files: RemoteFiles, pattern: str) -> list[UrlFile]:
    """The file of that key, or those that match a pattern with ``*`` or ``?``, sorted by key; possibly none."""
    with storage_faults("list", files.where(pattern)):
        found: Mapping[str, Mapping[str, Any]]
        if glob.has_magic(pattern.replace("[", "")):
            found = files.fs.glob(files.path(pattern.replace("[", "[[]")), detail=True)
        else:
            try:
                found = {files.path(pattern): files.fs.info(files.path(pattern))}
            except FileNotFoundError:
                found = {}
    start = len(files.path(""))
    return [
        UrlFile(files.where(path[start:]), path[start:], int(info["size"]), mark_of(info))
        for path, info in sorted(found.items())
        if info["type"] == "file"
    ]


def mark_of(info: Mapping[str, Any]) -> str | None:
    """What changes with a file's content: its entity tag or checksum, with its size. None where there is neither."""
    tag = next((info[name] for name in ("ETag", "etag", "md5Hash", "crc32c") if info.get(name)), None)
    return None if tag is None else f"{str(tag).strip(chr(34))}/{info['size']}"
