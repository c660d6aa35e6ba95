"""Spans as plain dicts of their fields, in which a store writes them, and a server passes them on.

To check a request's spans as dicts and store those takes a third of the time that it takes by way of models.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, GetPydanticSchema
from typing_extensions import TypedDict

from rollout_core.store.spans import Span


@cache
def _typed_dict(model: type[BaseModel]) -> Any:
    """A TypedDict with the fields, defaults and rules of ``model`` and of the models in it."""
    fields = {name: Annotated[_without_models(field.annotation), field] for name, field in model.model_fields.items()}
    made: Any = TypedDict(f"{model.__name__}Fields", fields)  # pyright: ignore[reportArgumentType] - no literal
    made.__pydantic_config__ = model.model_config
    return made


def _without_models(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _typed_dict(annotation)
    inner = tuple(map(_without_models, get_args(annotation)))
    if get_origin(annotation) in (UnionType, Union):
        return reduce(or_, inner)
    return list[inner] if get_origin(annotation) is list else annotation


SpanFields = Annotated[
    dict[str, Any], GetPydanticSchema(lambda source, handler: handler.generate_schema(_typed_dict(Span)))
]
"""A span as a dict of its fields, unknown ones included, with dicts for the models in it. Checked by pydantic it obeys
the rules of ``Span``; but attributes and unknown fields may still hold what JSON has no words for, such as NaN."""


def span_fields(span: Span) -> dict[str, Any]:
    """A span as ``SpanFields``. All but the outermost dict is the span's own: to be read, not changed."""
    fields = {**_fields(span)}
    for name in ("status", "context", "parent", "resource"):
        if fields[name] is not None:  # pydantic takes long to say that None is no model
            fields[name] = _fields(fields[name])
    for name in ("events", "links"):
        if fields[name]:
            fields[name] = list(map(_all_fields, fields[name]))
    return fields


def span_ids(count: int) -> list[tuple[str, str]]:
    """Fresh ids of as many traces, each with that of a span, drawn at once: a draw is a call of the system."""
    drawn = secrets.token_hex(24 * count)
    return [(drawn[start : start + 32], drawn[start + 32 : start + 48]) for start in range(0, len(drawn), 48)]


def plain_span_fields(
    ids: tuple[str, str], *, rollout_id: str, attempt_id: str, name: str, attributes: dict[str, Any]
) -> dict[str, Any]:
    """The fields of `Span.from_attributes` with number 1 and ids of trace and span, without the cost of its checks:
    attributes are to be JSON."""
    trace_id, span_id = ids
    return {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": 1,
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": None,
        "name": name,
        "status": {"status_code": "OK", "description": None},
        "attributes": attributes,
        "events": [],
        "links": [],
        "start_time": None,
        "end_time": None,
        "context": {"trace_id": trace_id, "span_id": span_id, "is_remote": False, "trace_state": {}},
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }


def _fields(part: Any) -> Any:
    """The fields of a model; anything else, such as a missing context, as it is."""
    if not isinstance(part, BaseModel):
        return part
    extra = part.__pydantic_extra__
    return {**part.__dict__, **extra} if extra else part.__dict__


def _all_fields(part: Any) -> Any:
    """``_fields``, of the models within as well."""
    fields = _fields(part)
    return {name: _all_fields(value) for name, value in fields.items()} if isinstance(part, BaseModel) else fields


def num_nulls(fields: Mapping[str, Any]) -> int:
    """How many fields of a span and of its parts are None, those among its attributes left out.

    For ``codec.encode``, which has to look more closely at a text that holds other nulls than these.
    """
    count = list(fields.values()).count(None)
    for part in (fields["status"], *(fields["events"] or ()), *(fields["links"] or ())):
        if type(part) is dict:
            count += list(part.values()).count(None)
    return count
