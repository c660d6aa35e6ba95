"""Addresses as people write them: content ids by their first digits, as tables and logs show them, made whole; and
files outside this machine's folders, named by URL (``s3://bucket/key``, ``gs://bucket/key``, ``memory://name/key``).

Credentials and endpoints come from the environment, as the clients of S3 and GCS read them. Where the object store
is of the same kind, its storage options hold for these files too.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.base.settings import refuse_credentials, without_password
from rollout_core.config import ModelSource
from rollout_core.config.rewards import ModelReward
from rollout_core.objects import ObjectStore
from rollout_core.objects.backends import remote_files
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.objects.files import IMPORT_REFS, LINEAGE_REFS, MAKER_REFS, SNAPSHOT_REFS, storage_faults
from rollout_core.objects.trees import TREE_BEGINS

MIN_DIGITS = 8
"""Tables show no fewer."""
_SHORT = re.compile(f"[0-9a-f]{{{MIN_DIGITS},63}}")


def complete_snapshot_id(objects: ObjectStore, digits: str) -> ContentId:
    """The snapshot whose id begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, _names_below(objects, SNAPSHOT_REFS), "snapshot")


def complete_lineage_id(objects: ObjectStore, digits: str) -> ContentId:
    """The id with a record of lineage, or of where it was brought in from, that begins with ``digits``; raises as
    `complete_id` does."""
    known = chain.from_iterable(_names_below(objects, folder) for folder in (MAKER_REFS, LINEAGE_REFS, IMPORT_REFS))
    return complete_id(digits, known, "record of lineage")


def complete_input_id(objects: ObjectStore, digits: str) -> ContentId:
    """The blob, or the code that was brought in, whose id begins with ``digits``; raises as `complete_id` does."""
    known = chain(objects.blobs_beginning(digits), _names_below(objects, IMPORT_REFS)) if len(digits) > 3 else ()
    return complete_id(digits, known, "object")


def complete_object_id(objects: ObjectStore, digits: str) -> ContentId:
    """The blob whose id begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, objects.blobs_beginning(digits), "object")


def complete_folder_id(objects: ObjectStore, digits: str) -> ContentId:
    """The folder, such as a model's, whose id begins with ``digits``; raises as `complete_id` does."""
    found = list(objects.blobs_beginning(digits)) if not is_content_id(digits) else []
    # Reading is expensive, so only where there is a choice.
    folders = [content_id for content_id in found if is_folder(objects, content_id)] if len(found) > 1 else found
    return complete_id(digits, folders, "folder")


def is_folder(objects: ObjectStore, content_id: ContentId) -> bool:
    """Whether a blob is the manifest of a folder. Only the start of a blob that is none is read."""
    if not next(iter(objects.stream(content_id)), b"").startswith(TREE_BEGINS):
        return False
    try:
        objects.manifest(content_id)
    except ConfigError:
        return False
    return True


def copy_object(source: ObjectStore, target: ObjectStore, content_id: ContentId) -> None:
    """Put a blob, and of a folder all its files, into another object store. Raises MissingObject, CorruptObject."""
    if is_folder(source, content_id):
        for file in source.manifest(content_id).files:
            if not target.exists(file.content_id):
                target.put_stream(source.stream(file.content_id))
    target.put_stream(source.stream(content_id))


def is_short_id(text: str) -> bool:
    """Whether ``text`` may be the first digits of a content id, and is not a whole one."""
    return _SHORT.fullmatch(text) is not None


def complete_id(digits: str, known: Iterable[str], what: str) -> ContentId:
    """The one id of ``known`` that begins with ``digits``. A whole id is taken as it is; ``known`` is then not read.

    Raises ConfigError for fewer than 8 digits and where several ids begin with them, NotFound where none does.
    """
    if is_content_id(digits):
        return ContentId(digits)
    if not is_short_id(digits):
        raise ConfigError(
            f"not a content id: {digits!r}; expected 64 lower-case hex digits, or the first of them, "
            f"at least {MIN_DIGITS}"
        )
    found = sorted({name for name in known if name.startswith(digits)})
    if not found:
        raise NotFound(f"no {what} has an id that begins with {digits}")
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} ids begin with {digits}, {found[0]} and {found[1]} among them; give more digits"
        )
    return ContentId(found[0])


def _names_below(objects: ObjectStore, refs: str) -> Iterator[str]:
    """The id after ``refs`` of each ref below it; read when it is asked for. Files of somebody else are left out."""
    for name in objects.ref_names(refs):
        if is_content_id(below := name.split("/")[1]):
            yield below


ConfigT = TypeVar("ConfigT", bound=BaseModel)

_ADDRESSES: dict[type[BaseModel], tuple[str, ...]] = {ModelSource: ("uri", "adapter"), ModelReward: ("model",)}
"""Fields that name a folder, something on the hub, or the content id of a folder in the object store."""


def with_whole_ids(config: ConfigT, base: Path, open_objects: Callable[[], ObjectStore]) -> ConfigT:
    """``config`` with whole content ids of models and adapters; the object store is opened only where some are not.

    A folder of that name at ``base`` comes first. Raises ConfigError naming the keys whose digits no folder's id, or
    more than one, begins with.
    """
    short = {place: text for place, text in _addresses(config, "") if _means_id(text, base)}
    if not short:
        return config
    objects = open_objects()
    whole: dict[str, str] = {}
    problems = []
    for place, digits in short.items():
        try:
            whole[place] = complete_folder_id(objects, digits)
        except NotFound as error:
            problems.append(f"{place}: {error} in the object store {objects.url}, and there is no folder {digits!r}")
        except ConfigError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError("\n".join(problems), problems)
    return _replaced(config, whole, "")


def _means_id(text: str, base: Path) -> bool:
    return is_short_id(text) and not (base / text).exists()


def _addresses(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Addresses of models below a value, each with the dotted key of its field."""
    for name, item in _items(value):
        if isinstance(item, str) and name in _ADDRESSES.get(type(value), ()):
            yield f"{place}{name}", item
        else:
            yield from _addresses(item, f"{place}{name}.")


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        return [(name, getattr(value, name)) for name in type(value).model_fields]
    if isinstance(value, dict):
        return [(str(name), item) for name, item in value.items()]
    return [(str(number), item) for number, item in enumerate(value)] if isinstance(value, tuple | list) else []


def _replaced(value: Any, whole: dict[str, str], place: str) -> Any:
    """A copy of ``value`` with other texts at some places."""
    if place.rstrip(".") in whole:
        return whole[place.rstrip(".")]
    if not any(key.startswith(place) for key in whole):
        return value
    items = {name: _replaced(item, whole, f"{place}{name}.") for name, item in _items(value)}
    if isinstance(value, BaseModel):
        return value.model_copy(update=items)
    return items if isinstance(value, dict) else type(value)(items.values())


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
    return remote_files(scheme, f"/{bucket}" if scheme == "memory" else bucket, options), key.strip("/")


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
