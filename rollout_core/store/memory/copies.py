"""Copies of records at the border of a store in memory, so that nothing a caller does to its objects reaches it.

What comes in is taken through JSON, which checks and copies it at once and leaves exactly what a database would keep.
What goes out is copied field by field. These run for every record of every call, so they skip pydantic's own copying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout_core.base.trusted import SET_EXTRA, SET_FIELDS_SET, trusted
from rollout_core.store.checks import check_span
from rollout_core.store.codec import decode, encode, json_copy
from rollout_core.store.operations import Loaded, copy_attempt
from rollout_core.store.span_fields import SpanFields
from rollout_core.store.spans import Event, Link, OtelResource, Span, SpanContext, StatusCode, TraceStatus
from rollout_core.store.types import Attempt, AttemptedRollout, PaginatedResult, Rollout, RolloutConfig, Worker

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")


def with_fields(model: type[Model], source: BaseModel, fields: dict[str, Any]) -> Model:
    """A ``model`` with these fields, which are not checked, and the further fields of ``source``.

    Both share the set of fields that were set, which only grows.
    """
    extra = source.__pydantic_extra__
    further = json_copy(extra) if extra else extra if extra is None else {}
    return trusted(model, fields, source.__pydantic_fields_set__, further)


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
    fields["attempt"] = copy_attempt(attempt)
    shown = with_fields(AttemptedRollout, rollout, fields)
    SET_FIELDS_SET(shown, {*rollout.__pydantic_fields_set__, "attempt"})
    return shown


def shown_attempted(loaded: Loaded[Rollout]) -> AttemptedRollout:
    """A rollout that has an attempt, as callers get it."""
    shown = shown_rollout(loaded.record, loaded.latest)
    assert isinstance(shown, AttemptedRollout)
    return shown


def shown_page(page: PaginatedResult[Item], shown: Callable[[Item], Item]) -> PaginatedResult[Item]:
    """A page as callers get it, its items by ``shown``."""
    page.items = [shown(item) for item in page.items]
    return page


def shown_worker(worker: Worker) -> Worker:
    """A worker as callers get it."""
    return changed(worker, heartbeat_stats=json_copy(worker.heartbeat_stats))


def shown_spans(spans: Sequence[Span]) -> list[Span]:
    """Spans as callers get them. What is within their attributes and their parts is shared with the store."""
    shown: list[Span] = []
    for span in spans:  # pages of hundreds of spans are the largest answers there are
        fields = span.__dict__.copy()
        fields["attributes"] = fields["attributes"].copy()
        fields["events"] = fields["events"].copy()
        fields["links"] = fields["links"].copy()
        extra = span.__pydantic_extra__
        shown.append(trusted(Span, fields, span.__pydantic_fields_set__, json_copy(extra) if extra else {}))
    return shown


def kept_config(config: RolloutConfig | None) -> RolloutConfig:
    """A config as the store keeps it."""
    if config is None:
        return _DEFAULT_CONFIG
    return changed(config, retry_condition=list(config.retry_condition))


_DEFAULT_CONFIG = RolloutConfig()


def kept_json(value: Any, what: str) -> Any:
    """A JSON value as the store keeps it. Raises ConfigError, which names it by ``what``, if it is no JSON."""
    return decode(encode(value, what))


def kept_span(span: SpanFields) -> Span:
    """A span as the store keeps it. Raises ConfigError as ``check_span``, and if JSON cannot hold it."""
    check_span(span)
    # Only what may hold anything goes through JSON; and no missing values, for the encoder is quicker without nulls.
    fields = dict(span)
    loose = {"name": span["name"], "attributes": span["attributes"]}
    if len(span) > _NUM_FIELDS:
        loose["extra"] = {name: fields.pop(name) for name in span if name not in Span.model_fields}
    status, resource = span["status"], span["resource"]
    if len(status) > _NUM_STATUS_FIELDS:
        loose["status"] = status
    else:
        fields["status"] = _status(status["status_code"], status["description"])
    if resource["attributes"] or len(resource) > _NUM_RESOURCE_FIELDS:
        loose["resource"] = resource
    else:
        fields["resource"] = _empty_resource(resource["schema_url"])
    for name in ("context", "parent"):
        context = span[name]
        if context is not None and len(context) > _NUM_CONTEXT_FIELDS:
            loose[name] = context
        elif context is not None:
            fields[name] = with_fields(SpanContext, _CONTEXT, {**context, "trace_state": {**context["trace_state"]}})
    for name in ("events", "links"):
        if span[name]:
            loose[name] = span[name]
        else:
            fields[name] = _EMPTY
    kept = decode(encode(loose, f"span {span['name']}"))
    fields["attributes"] = kept["attributes"]
    for name in loose.keys() & _PARTS.keys():
        fields[name] = _PARTS[name](kept[name])
    made = with_fields(Span, _SPAN, fields)
    SET_EXTRA(made, kept.get("extra", {}))
    return made


_NUM_FIELDS, _NUM_STATUS_FIELDS, _NUM_CONTEXT_FIELDS, _NUM_RESOURCE_FIELDS = [
    len(model.model_fields) for model in (Span, TraceStatus, SpanContext, OtelResource)
]
# Models with all of their fields and no others, for ``with_fields``.
_SPAN = Span.from_attributes(attributes={})
_CONTEXT = SpanContext(trace_id="", span_id="", is_remote=False, trace_state={})

# Parts that nearly all spans have in common are kept once: each object less is less for Python's collector to visit.
_EMPTY: list[Any] = []


@lru_cache(maxsize=1024)
def _status(status_code: StatusCode, description: str | None) -> TraceStatus:
    return TraceStatus(status_code=status_code, description=description)


@lru_cache(maxsize=1024)
def _empty_resource(schema_url: str) -> OtelResource:
    return OtelResource(attributes={}, schema_url=schema_url)


_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "status": TraceStatus.model_validate,
    "context": SpanContext.model_validate,
    "parent": SpanContext.model_validate,
    "resource": OtelResource.model_validate,
    "events": lambda parts: [Event.model_validate(part) for part in parts],
    "links": lambda parts: [Link.model_validate(part) for part in parts],
}
