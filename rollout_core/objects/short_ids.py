"""Content ids as people type them: the first digits of one, as tables and logs show it, made whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import ContentId, is_content_id
from rollout_core.config import ModelSource
from rollout_core.config.rewards import ModelReward
from rollout_core.objects import ObjectStore
from rollout_core.objects.refs import LINEAGE_REFS, SNAPSHOT_REFS
from rollout_core.objects.trees import TREE_BEGINS

MIN_DIGITS = 8
"""Tables show no fewer."""
_SHORT = re.compile(f"[0-9a-f]{{{MIN_DIGITS},63}}")


def complete_snapshot_id(objects: ObjectStore, digits: str) -> ContentId:
    """The snapshot whose id begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, _names_below(objects, SNAPSHOT_REFS), "snapshot")


def complete_lineage_id(objects: ObjectStore, digits: str) -> ContentId:
    """The id with a record of lineage that begins with ``digits``; raises as `complete_id` does."""
    return complete_id(digits, _names_below(objects, LINEAGE_REFS), "record of lineage")


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
