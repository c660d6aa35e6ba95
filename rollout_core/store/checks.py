"""What all stores check of their arguments, with the same words."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import canonical_json
from rollout_core.store.codec import decode, encode
from rollout_core.store.resources import NamedResources
from rollout_core.store.types import AttemptUpdate, Rollout, Unset, build

_NAMED_RESOURCES = TypeAdapter(NamedResources)


def check_page(limit: int, offset: int) -> None:
    """Raise ConfigError for a limit or offset that means nothing."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < -1:
        raise ConfigError(f"limit is {limit!r}; expected a number of items, or -1 for no limit")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise ConfigError(f"offset is {offset!r}; expected a number of items to skip, from 0")


def check_statuses(statuses: Sequence[str] | None, kind: Any) -> None:
    """Raise ConfigError for a status that is not of the Literal ``kind``."""
    for status in statuses or ():
        if status not in get_args(kind):
            raise ConfigError(f"status is {status!r}; expected any of {', '.join(get_args(kind))}")


def check_ids(*ids: Any) -> None:
    """Raise ConfigError for an id that is not text; None, which names nothing, is let pass."""
    for value in ids:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"id {value!r:.80} is not valid Unicode: remove the lone surrogate") from error
        elif value is not None:
            raise ConfigError(f"got the id {value!r:.80} ({type(value).__name__}); expected text")


def check_id_list(ids: Iterable[Any]) -> None:
    """Raise ConfigError for what is not a list of ids."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ConfigError(f"got {ids!r:.80} ({type(ids).__name__}); expected a list of ids")
    check_ids(*ids)


def refuse_missing(wanted: Iterable[str], found: Container[str]) -> None:
    """Raise NotFound if a wanted rollout was not found."""
    missing = [rollout_id for rollout_id in wanted if rollout_id not in found]
    if missing:
        others = f" (and {len(missing) - 1} others asked for)" if len(missing) > 1 else ""
        raise NotFound(f"rollout {missing[0]}{others} does not exist in this store")


def same_json(left: str, right: str) -> bool:
    """Whether two texts are the same value but for the order of keys; 1, 1.0 and true are three values."""
    return left == right or canonical_json(decode(left)) == canonical_json(decode(right))


def rollout_changes(rollout_id: str, **fields: Any) -> dict[str, Any]:
    """The new values of a rollout's fields, UNSET ones left out. Raises ConfigError for what a field may not be."""
    changes = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
    # A config given as a dict becomes one.
    checked = build(Rollout, rollout_id=rollout_id, start_time=0.0, **{"input": None, **changes})
    return {name: getattr(checked, name) for name in changes}


def resources_json(resources: NamedResources) -> str:
    """Check and encode named resources. Raises ConfigError if they are not resources."""
    try:
        checked = _NAMED_RESOURCES.validate_python(resources)
    except ValidationError as error:
        raise ConfigError(f"not valid resources: {error}") from error
    return encode(_NAMED_RESOURCES.dump_python(checked), "resources")


def check_metadata(updates: Iterable[AttemptUpdate]) -> None:
    """Raise ConfigError for metadata that is no JSON."""
    for update in updates:
        if not isinstance(update.metadata, Unset):
            encode(update.metadata, f"metadata of attempt {update.attempt_id}")


def check_ends(ends: Sequence[tuple[Mapping[str, Any], AttemptUpdate]]) -> None:
    """Raise ConfigError for a span that is of another attempt than its update, and for metadata that is no JSON."""
    for span, update in ends:
        if (span["rollout_id"], span["attempt_id"]) != (update.rollout_id, update.attempt_id):
            raise ConfigError(
                f"a span of attempt {span['attempt_id']} of {span['rollout_id']} came with the end of attempt "
                f"{update.attempt_id} of {update.rollout_id}; give each end a span of its own attempt"
            )
    check_metadata(update for _, update in ends)
