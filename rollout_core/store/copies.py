"""Copies of records at the border of a store in memory, so that nothing a caller does to its objects reaches it.

What comes in is taken through JSON, which checks and copies it at once and leaves exactly what a database would keep.
What goes out is copied field by field. These run for every record of every call, so they skip pydantic's own copying.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.store.codec import decode, encode
from rollout_core.store.spans import Span
from rollout_core.store.types import Attempt, AttemptedRollout, Rollout, RolloutConfig, Worker

Model = TypeVar("Model", bound=BaseModel)

_set = object.__setattr__


def json_copy(value: Any) -> Any:
    """A copy of a JSON value."""
    kind = type(value)
    if kind is dict:
        return {key: json_copy(entry) for key, entry in value.items()}
    if kind is list:
        return [entry if type(entry) not in (dict, list) else json_copy(entry) for entry in value]
    return value


def with_fields(model: type[Model], source: BaseModel, fields: dict[str, Any]) -> Model:
    """A ``model`` with these fields, which are not checked, and the further fields of ``source``."""
    made = object.__new__(model)
    _set(made, "__dict__", fields)
    _set(made, "__pydantic_fields_set__", set(fields))
    _set(made, "__pydantic_extra__", source.__pydantic_extra__ and json_copy(source.__pydantic_extra__))
    _set(made, "__pydantic_private__", None)
    return made


def changed(record: Model, **changes: Any) -> Model:
    """A copy of a record with other values of some fields."""
    return with_fields(type(record), record, {**record.__dict__, **changes})


def shown_rollout(rollout: Rollout, attempt: Attempt | None) -> Rollout:
    """A rollout as callers get it: an AttemptedRollout exactly if ``attempt`` is given."""
    fields = rollout.__dict__.copy()
    fields["input"] = json_copy(rollout.input)
    fields["metadata"] = json_copy(rollout.metadata)
    fields["config"] = changed(rollout.config, retry_condition=list(rollout.config.retry_condition))
    if attempt is None:
        return with_fields(Rollout, rollout, fields)
    fields["attempt"] = shown_attempt(attempt)
    return with_fields(AttemptedRollout, rollout, fields)


def shown_attempt(attempt: Attempt) -> Attempt:
    """An attempt as callers get it."""
    return changed(attempt, metadata=json_copy(attempt.metadata))


def shown_worker(worker: Worker) -> Worker:
    """A worker as callers get it."""
    return changed(worker, heartbeat_stats=json_copy(worker.heartbeat_stats))


def shown_span(span: Span) -> Span:
    """A span as callers get it. Values within its attributes, and its events and links, are shared with the store."""
    fields = span.__dict__.copy()
    fields["attributes"] = span.attributes.copy()
    return with_fields(Span, span, fields)


def kept_config(config: RolloutConfig | None) -> RolloutConfig:
    """A config as the store keeps it."""
    if config is None:
        return _DEFAULT_CONFIG
    return changed(config, retry_condition=list(config.retry_condition))


_DEFAULT_CONFIG = RolloutConfig()


def kept_json(value: Any, what: str) -> Any:
    """A JSON value as the store keeps it. Raises ConfigError, which names it by ``what``, if it is no JSON."""
    return decode(encode(value, what))


def kept_span(span: Span) -> Span:
    """A span as the store keeps it. Raises ConfigError if JSON cannot hold it."""
    text = encode(_plain(span), f"span {span.name}")
    fields = decode(text)
    for name in _NULLABLE:
        fields.setdefault(name, None)
    return Span.model_validate(fields)


_NULLABLE = ("parent_id", "start_time", "end_time", "context", "parent")


def _plain(value: Any) -> Any:
    """A part of a span as plain values. Missing fields are left out: the encoder is quicker without nulls."""
    if isinstance(value, BaseModel):
        fields: Mapping[str, Any] = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        return {name: _plain_field(name, field) for name, field in fields.items() if field is not None}
    return value


def _plain_field(name: str, field: Any) -> Any:
    if isinstance(field, BaseModel):
        return _plain(field)
    if name in ("events", "links"):
        return [_plain(entry) for entry in field]
    return field
