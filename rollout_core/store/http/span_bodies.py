"""Spans in the bodies of requests, read as ``EncodedSpan``s.

A batch is read from JSON into structs, and its bodies are written from those, in a third of the time that pydantic
takes. The structs hold what our client and OpenTelemetry's exporters send. What they do not hold (other fields, values
of another type that pydantic would convert, values nested deeply) goes through pydantic, which also says what is wrong
with it. Both are made from the models of ``spans``, so there is one place that says what a span has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from itertools import starmap
from operator import attrgetter, or_
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct
from pydantic import BaseModel, GetPydanticSchema
from typing_extensions import TypedDict

from rollout_core.store.checks import LARGEST_NUMBER
from rollout_core.store.encoded_spans import COLUMNS, EncodedSpan
from rollout_core.store.spans import Attributes, Event, Link, OtelResource, Span, SpanContext, TraceStatus


def _with_parts(annotation: Any, part: Any) -> Any:
    """The type of a field, with ``part`` of each model within."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return part(annotation)
    inner = tuple(_with_parts(each, part) for each in get_args(annotation))
    if get_origin(annotation) in (UnionType, Union):
        return reduce(or_, inner)
    return list[inner] if get_origin(annotation) is list else annotation


# By pydantic


@cache
def _typed_dict(model: type[BaseModel]) -> Any:
    """A TypedDict with the fields, defaults and rules of ``model`` and of the models in it."""
    fields = {
        name: Annotated[_with_parts(field.annotation, _typed_dict), field] for name, field in model.model_fields.items()
    }
    made: Any = TypedDict(f"{model.__name__}Fields", fields)  # pyright: ignore[reportArgumentType] - no literal
    made.__pydantic_config__ = model.model_config
    return made


SpanFields = Annotated[
    dict[str, Any], GetPydanticSchema(lambda source, handler: handler.generate_schema(_typed_dict(Span)))
]
"""A span in a request, read as a dict of its fields, unknown ones included, with dicts for its parts. It obeys the
rules of ``Span``, but attributes and unknown fields may still hold what JSON has no words for, such as NaN. To read
models takes three times as long."""


# By structs

_Id = Annotated[str, Meta(min_length=1)]
_Scalar = str | int | float | bool | None
# Written out, because a recursive type would let values be nested deeper than they can be read back.
_Value1 = _Scalar | list[_Scalar] | dict[str, _Scalar]
_Value2 = _Scalar | list[_Value1] | dict[str, _Value1]
_Value3 = _Scalar | list[_Value2] | dict[str, _Value2]
_Values = dict[str, _Scalar | list[_Value3] | dict[str, _Value3]]
_STRICTER = {
    **dict.fromkeys(("rollout_id", "attempt_id", "span_id"), _Id),
    "sequence_id": Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)],
}
"""Of a span's fields, for what stores need besides the type."""


def _struct_type(annotation: Any) -> Any:
    if annotation == Attributes:
        return _Values
    return _Values | None if annotation == Attributes | None else _with_parts(annotation, _struct)


@cache
def _struct(model: type[BaseModel]) -> type[Struct]:
    """A struct with the fields and defaults of ``model`` and of the models in it, and no others."""
    return defstruct(
        f"{model.__name__}Struct",
        [
            (name, _struct_type(field.annotation), *([] if field.is_required() else [field.default]))
            for name, field in model.model_fields.items()
        ],
        forbid_unknown_fields=True,
        gc=False,
    )


_FIELDS = {name: _struct_type(field.annotation) for name, field in Span.model_fields.items()}
_Body = defstruct(
    "BodyStruct",
    [
        *((name, kind) for name, kind in _FIELDS.items() if name not in COLUMNS),
        # Those of OpenTelemetry's spans have these as well.
        ("kind", str | UnsetType, UNSET),
        ("instrumentation_scope", _Values | UnsetType, UNSET),
    ],
    forbid_unknown_fields=True,
    gc=False,
)
_Span = defstruct(
    "SpanStruct",
    [(name, _STRICTER.get(name, _FIELDS[name])) for name in COLUMNS],
    bases=(_Body,),
    kw_only=True,
    forbid_unknown_fields=True,
    gc=False,
)
_Request = defstruct("SpansStruct", [("spans", list[_Span])], forbid_unknown_fields=True)

# The structs for what writes bodies itself, which takes less time with them than with dicts.
Body: Any = _Body
Status, Context, EventOf, LinkOf, Resource = [
    cast(Any, _struct(model)) for model in (TraceStatus, SpanContext, Event, Link, OtelResource)
]

_columns_of = attrgetter(*COLUMNS)
_body_of = attrgetter(*_Body.__struct_fields__)
_encoder = msgspec.json.Encoder()
_decode: Callable[[bytes], Any] = msgspec.json.Decoder(_Request).decode
_new = tuple.__new__


def read_encoded(data: bytes) -> list[EncodedSpan] | None:
    """The spans of a request's body, ``{"spans": [...]}``; None if it has to be read by pydantic."""
    if b"\\" in data and b"\\u0000" in data:  # the first, a single byte, is found in a tenth of the time
        return None  # no store keeps it in a column; which it is in is looked up there
    try:
        spans = _decode(data).spans
        return with_bodies(map(_columns_of, spans), list(starmap(_Body, map(_body_of, spans))))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def with_bodies(columns: Iterable[tuple[Any, ...]], bodies: Sequence[Any]) -> list[EncodedSpan]:
    """Spans of their columns, in order, and their bodies, which are structs."""
    texts = _encoder.encode_lines(bodies).decode().split("\n")  # within JSON there is none
    texts.pop()  # what follows the last one
    return [_new(EncodedSpan, (*row, text)) for row, text in zip(columns, texts, strict=True)]
