"""Spans as stores give them out: models whose body is read from JSON when somebody first looks into it.

To read the bodies of a page and to make models of their parts takes twice as long as the rest of the query, and many
readers look only for some of the spans, by name, time or number, which are columns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from rollout_core.base.trusted import SET_EXTRA, SET_FIELDS, SET_FIELDS_SET, SET_PRIVATE, trusted
from rollout_core.store.codec import decode, encode_stored
from rollout_core.store.encoded_spans import with_body
from rollout_core.store.spans import Event, Link, OtelResource, Span, SpanContext, TraceStatus
from rollout_core.store.types import PaginatedResult

PartT = TypeVar("PartT", bound=BaseModel)

_NUM_FIELDS: dict[type[BaseModel], int] = {
    model: len(model.model_fields) for model in (Event, OtelResource, SpanContext, TraceStatus)
}
"""The parts of a span are stored with all of their fields, so that their number tells whether there are others."""


def span_model(rollout_id: str, columns: Sequence[Any]) -> Span:
    """The model of a span of this rollout and what else an ``EncodedSpan`` has, which is not checked again."""
    attempt_id, span_id, sequence_id, trace_id, parent_id, name, start_time, end_time, body = columns
    made = _new(_UnreadSpan)
    SET_FIELDS(
        made,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": sequence_id,
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_id": parent_id,
            "name": name,
            "start_time": start_time,
            "end_time": end_time,
        },
    )
    SET_PRIVATE(made, body)
    return made


def unread_body(span: Span) -> str | None:
    """The text of a span's body that nobody has looked into so far."""
    return _body_of(span) if type(span) is _UnreadSpan else None


def copy_stored(span: Span) -> Span:
    """A copy of a span that shares nothing with it, at no cost where its body is not read."""
    body = unread_body(span)
    if body is None:
        return span.model_copy(deep=True)
    made = _new(_UnreadSpan)
    SET_FIELDS(made, _fields_of(span).copy())
    SET_PRIVATE(made, body)
    return made


def stored_json(span: Span) -> bytes:
    """The JSON of a span that a store gave out, which is joined of its parts where nobody has looked into it."""
    body = unread_body(span)
    return encode_stored(span) if body is None else with_body(_fields_of(span), body)


def page_json(page: PaginatedResult[Any], spans: Iterable[bytes]) -> bytes:
    """The JSON of a page whose spans are ``spans``."""
    tail = f'"limit":{page.limit},"offset":{page.offset},"total":{page.total}'.encode()
    return b'{"items":[%b],%b}' % (b",".join(spans), tail)


class _UnreadSpan(Span):
    """A span that holds its columns as fields, and its body as text in the slot for private attributes.

    When anything else of it is asked for, it reads the body and is a plain ``Span`` from then on. All that Python and
    pydantic ask of a model comes by one of these ways.
    """

    model_config = ConfigDict(defer_build=True)

    # ``type(span)`` makes plain spans, in each of the ways in which a class makes models.

    def __new__(cls, *args: Any, **fields: Any) -> Span:  # type: ignore[misc] - no instance of this class, on purpose
        return Span(*args, **fields)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Span)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Any:
        return Span.model_construct(_fields_set, **values)

    def __getattr__(self, name: str) -> Any:
        return getattr(_read(self), name)

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportGeneralTypeIssues] - not the one of ``type``
        return vars(_read(self))

    # What looks at the class before it looks at the fields.

    def __eq__(self, other: object) -> bool:
        return _read(self) == other

    def __repr_name__(self) -> str:
        return _read(self).__repr_name__()

    def __copy__(self) -> Span:
        return _read(self).__copy__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Span:
        return _read(self).__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        return _read(self).__getstate__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return _read(self).__reduce_ex__(protocol)

    def __delattr__(self, name: str) -> None:
        delattr(_read(self), name)


def _read(span: Span) -> Span:
    """This span, which is a plain one from now on."""
    with _reading:
        if type(span) is _UnreadSpan:
            fields = _fields_of(span)
            parts = decode(_body_of(span))
            take = parts.pop
            fields |= {
                "status": _part(TraceStatus, take("status")),
                "attributes": take("attributes"),
                "events": [_part(Event, event) for event in take("events")],
                "links": [Link.model_validate(link) for link in take("links")],
                "context": _part(SpanContext, take("context")),
                "parent": _part(SpanContext, take("parent")),
                "resource": _part(OtelResource, take("resource")),
            }
            SET_FIELDS(span, {name: fields[name] for name in _FIELD_NAMES})
            SET_FIELDS_SET(span, _ALL_FIELDS)
            SET_EXTRA(span, parts)
            SET_PRIVATE(span, None)
            object.__setattr__(span, "__class__", Span)
    return span


def _part(model: type[PartT], fields: dict[str, Any] | None) -> Any:
    """A model of these fields, which were stored by way of that model; None if there are none."""
    if fields is None:
        return None
    if len(fields) == _NUM_FIELDS[model]:
        return trusted(model, fields, None, {})
    return model.model_validate(fields)  # it has unknown fields as well


_new = object.__new__
_fields_of, _body_of = [vars(BaseModel)[slot].__get__ for slot in ("__dict__", "__pydantic_private__")]
_FIELD_NAMES = tuple(Span.model_fields)
_ALL_FIELDS = set(_FIELD_NAMES)
_reading = threading.Lock()
"""Two threads that look into one span read it once: what one of them then sets stays."""


def _forget_reading() -> None:
    global _reading
    _reading = threading.Lock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forget_reading)
