"""What all stores check of their arguments, with the same words."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from rollout_core.base.errors import ConfigError, NotFound
from rollout_core.base.ids import canonical_json
from rollout_core.store.codec import decode, encode
from rollout_core.store.resources import NamedResources
from rollout_core.store.types import AttemptUpdate, Rollout, Unset, as_model, build

LARGEST_NUMBER = 2**63 - 1
"""The largest integer that every store can count to and keep."""

_NAMED_RESOURCES = TypeAdapter(NamedResources)
_texts_of = itemgetter("rollout_id", "attempt_id", "span_id", "trace_id", "parent_id", "name")


def check_page(limit: int, offset: int) -> None:
    """Raise ConfigError for a limit or offset that means nothing, or that no store could count to."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not -1 <= limit <= LARGEST_NUMBER:
        raise ConfigError(f"limit is {limit!r:.80}; expected a number of items below 2**63, or -1 for no limit")
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= LARGEST_NUMBER:
        raise ConfigError(f"offset is {offset!r:.80}; expected a number of items to skip, from 0 and below 2**63")


def check_statuses(statuses: Sequence[str] | None, kind: Any) -> None:
    """Raise ConfigError for a status that is not of the Literal ``kind``."""
    for status in statuses or ():
        if status not in get_args(kind):
            raise ConfigError(f"status is {status!r}; expected any of {', '.join(get_args(kind))}")


def check_texts(*texts: Any) -> None:
    """Raise ConfigError for what is not text that every store can keep, and filter by; None is let pass.

    Text holds no NUL, which PostgreSQL refuses, and no lone surrogate, which UTF-8 cannot say.
    """
    for text in texts:
        if isinstance(text, str):
            if "\0" in text:
                raise ConfigError(f"{text!r:.80} holds a NUL character, which not every store can keep; remove it")
            if not text.isascii():
                _check_unicode(text)
        elif text is not None:
            raise ConfigError(f"got {text!r:.80} ({type(text).__name__}); expected text")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{text!r:.80} is not valid Unicode; remove the lone surrogate") from error


def check_ids(*ids: Any) -> None:
    """Raise ConfigError for an id that is empty or fails ``check_texts``; None, which names nothing, is let pass."""
    for given in ids:
        # Spelled out for what nearly every id is: this runs for each record of each call.
        if given is not None and not (given.__class__ is str and given and given.isascii() and "\0" not in given):
            check_texts(given)
            if given == "":
                raise ConfigError("an id is empty; expected a text that is not empty")


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


def check_span(span: Mapping[str, Any]) -> None:
    """Raise ConfigError for the fields of a span whose ids, texts, number or times no store could keep.

    What else it holds is checked when it is encoded.
    """
    if not _has_plain_texts(span):
        check_ids(span["rollout_id"], span["attempt_id"], span["span_id"])
        check_texts(span["trace_id"], span["parent_id"], span["name"])
    number = span["sequence_id"]
    if not 0 <= number <= LARGEST_NUMBER:
        raise ConfigError(f"sequence_id of span {span['span_id']} is {number!r:.80}; expected a number below 2**63")
    for name in ("start_time", "end_time"):
        seconds = span[name]
        if seconds is not None and not (isinstance(seconds, (float, int)) and -math.inf < seconds < math.inf):
            raise ConfigError(
                f"{name} of span {span['span_id']} is {seconds!r:.80}; expected seconds since 1970, or None"
            )


def _has_plain_texts(span: Mapping[str, Any]) -> bool:
    """Whether a span has its ids, and all its texts are ASCII without NUL: one look at all of them together, which
    suffices for nearly all spans."""
    rollout_id, attempt_id, span_id, trace_id, parent_id, name = _texts_of(span)
    try:
        texts = "".join((rollout_id, attempt_id, span_id, trace_id, "" if parent_id is None else parent_id, name))
    except TypeError:
        return False
    return bool(rollout_id and attempt_id and span_id) and texts.isascii() and "\0" not in texts


def sequence_id_after(last: int, rollout_id: str) -> int:
    """The span sequence id that follows ``last``. Raises ConfigError if that was the largest one."""
    if last >= LARGEST_NUMBER:
        raise ConfigError(f"a span of rollout {rollout_id} has the largest sequence_id, 2**63 - 1; none follows it")
    return last + 1


def rollout_changes(rollout_id: str, **fields: Any) -> dict[str, Any]:
    """The new values of a rollout's fields, UNSET ones left out. Raises ConfigError for what a field may not be."""
    check_ids(rollout_id)
    changes = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
    # A config given as a dict becomes one.
    checked = build(Rollout, rollout_id=rollout_id, start_time=0.0, **{"input": None, **changes})
    check_ids(checked.resources_id)
    return {name: getattr(checked, name) for name in changes}


def resources_json(resources: NamedResources) -> str:
    """Check and encode named resources. Raises ConfigError if they are not resources."""
    try:
        checked = _NAMED_RESOURCES.validate_python(resources)
    except ValidationError as error:
        raise ConfigError(f"not valid resources: {error}") from error
    return encode(_NAMED_RESOURCES.dump_python(checked), "resources")


def stats_json(stats: dict[str, Any] | Unset) -> str | None:
    """Encode the statistics of a heartbeat; None if there are none. Raises ConfigError if they are no dict of JSON."""
    if isinstance(stats, Unset):
        return None
    if not isinstance(stats, dict):
        raise ConfigError(f"heartbeat_stats is {stats!r}; expected a dict, or nothing to keep the last")
    return encode(stats, "heartbeat_stats")


def kept_updates(updates: Iterable[AttemptUpdate | Mapping[str, Any]]) -> list[AttemptUpdate]:
    """Updates as a store keeps them, with copies of metadata. Raises ConfigError for a bad id, and for what is no JSON.

    A dict of the fields will do for an update.
    """
    kept: list[AttemptUpdate] = []
    for given in updates:
        update = as_model(AttemptUpdate, given)
        check_ids(update.rollout_id, update.attempt_id)
        if not isinstance(update.worker_id, Unset) and update.worker_id != "":
            check_ids(update.worker_id)
        if not isinstance(update.metadata, Unset):
            metadata = decode(encode(update.metadata, f"metadata of attempt {update.attempt_id}"))
            update = update.model_copy(update={"metadata": metadata})
        kept.append(update)
    return kept
