"""The first digits of content ids in a configuration, made whole once, before anything is planned.

Tables and logs show the first digits of an id; whoever types them means that model. From here on only the whole id is
known, so that the plan, the run and its cache keys speak of the same object whatever the object store gets meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.config import ModelSource
from rollout_core.config.rewards import ModelReward
from rollout_core.objects import ObjectStore
from rollout_core.objects.short_ids import complete_folder_id, is_short_id

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
