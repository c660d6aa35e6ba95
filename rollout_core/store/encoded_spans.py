"""Spans as every store takes and keeps them: columns, and a body of JSON text.

``Span`` is the model that users see. It becomes an ``EncodedSpan`` once, where it enters a store or is read from a
request; a store writes that, a server passes it on, and ``stored_spans`` makes a ``Span`` of it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from rollout_core.base.errors import ConfigError
from rollout_core.store.checks import check_span, kept_updates
from rollout_core.store.codec import decode, encode, model_fields
from rollout_core.store.spans import Span
from rollout_core.store.types import AttemptUpdate, as_model


class EncodedSpan(NamedTuple):
    """A span that was checked: the columns of its row, and all other fields as the text of a JSON object."""

    rollout_id: str
    attempt_id: str
    span_id: str
    sequence_id: int | None
    """None: the store gives it the next number of its rollout."""
    trace_id: str
    parent_id: str | None
    name: str
    start_time: float | None
    end_time: float | None
    body: str

    def fields(self) -> dict[str, Any]:
        """The fields of the span, with dicts for its parts."""
        return {**dict(zip(COLUMNS, self, strict=False)), **decode(self.body)}


COLUMNS = EncodedSpan._fields[:-1]
_columns_of = itemgetter(*COLUMNS)
_new = tuple.__new__  # the class itself takes three times as long to call


def encode_span(span: Span | Mapping[str, Any]) -> EncodedSpan:
    """A span, or the dict of its fields, in which parts may be dicts. Raises ConfigError as ``check_span``, and if JSON
    cannot hold it."""
    body = fields_of(span) if isinstance(span, Span) else dict(span)
    check_span(body)
    columns = _columns_of(body)
    for name in COLUMNS:
        del body[name]
    text = encode(body, f"span {columns[6]}", model_fields, num_nulls(body))
    return _new(EncodedSpan, (*columns, text))


def encode_ends(
    ends: Sequence[tuple[Span | EncodedSpan, AttemptUpdate]],
) -> tuple[list[EncodedSpan], list[AttemptUpdate]]:
    """Last spans of attempts, and how these end. A span without a number, or with 0, is to get the next.

    Raises ConfigError for a span of another attempt than its update, and as ``encode_span`` and ``kept_updates``.
    """
    updates = kept_updates(update for _, update in ends)
    spans: list[EncodedSpan] = []
    for (given, _), update in zip(ends, updates, strict=True):
        span = given if isinstance(given, EncodedSpan) else as_model(Span, given)
        if span.rollout_id != update.rollout_id or span.attempt_id != update.attempt_id:
            raise ConfigError(
                f"a span of attempt {span.attempt_id} of {span.rollout_id} came with the end of attempt "
                f"{update.attempt_id} of {update.rollout_id}; give each end a span of its own attempt"
            )
        encoded = span if isinstance(span, EncodedSpan) else encode_span(span)
        spans.append(encoded if encoded.sequence_id else encoded._replace(sequence_id=None))
    return spans, updates


def fields_of(span: Span) -> dict[str, Any]:
    """A dict of a span's fields, unknown ones included, with dicts for its parts: quicker to encode than models. All
    but the outermost dict is the span's own: to be read, not changed."""
    fields = {**_fields(span)}
    for name in ("status", "context", "parent", "resource"):
        if fields[name] is not None:  # pydantic takes long to say that None is no model
            fields[name] = _fields(fields[name])
    for name in ("events", "links"):
        if fields[name]:
            fields[name] = list(map(_fields, fields[name]))
    return fields


def _fields(part: Any) -> Any:
    """The fields of a model; anything else as it is."""
    if not isinstance(part, BaseModel):
        return part
    extra = part.__pydantic_extra__
    return {**part.__dict__, **extra} if extra else part.__dict__


def num_nulls(fields: Mapping[str, Any]) -> int:
    """How many fields of a span and of its parts are None, those among its attributes left out.

    For ``codec.encode``, which has to look more closely at a text that holds other nulls than these.
    """
    count = list(fields.values()).count(None)
    for part in (fields["status"], *(fields["events"] or ()), *(fields["links"] or ())):
        if type(part) is dict:
            count += list(part.values()).count(None)
    return count


def span_json(rollout_id: str, columns: Sequence[Any]) -> bytes:
    """The JSON of a span of this rollout and what else an ``EncodedSpan`` has."""
    *others, body = columns
    return with_body(dict(zip(COLUMNS, (rollout_id, *others), strict=True)), body)


def with_body(columns: Mapping[str, Any], body: str) -> bytes:
    """The JSON of a span with these columns, by name, and this body."""
    return b"%b,%b" % (orjson.dumps(columns)[:-1], body.encode()[1:])


# Spans that are alike but for their ids and attributes


def span_ids(count: int) -> list[tuple[str, str]]:
    """Fresh ids of as many traces, each with that of a span, drawn at once: a draw is a call of the system."""
    drawn = secrets.token_hex(24 * count)
    return [(drawn[start : start + 32], drawn[start + 32 : start + 48]) for start in range(0, len(drawn), 48)]


_PLAIN = (
    encode_span(Span.from_attributes(rollout_id="r", attempt_id="a", trace_id="TRACE", span_id="SPAN", attributes={}))
    .body.replace('"attributes":{},"events"', '"attributes":%s,"events"')
    .replace("TRACE", "%s")
    .replace("SPAN", "%s")
)


def encode_plain(ids: tuple[str, str], *, rollout_id: str, attempt_id: str, name: str, attributes: str) -> EncodedSpan:
    """`Span.from_attributes` of the number 1 as it is stored, in a tenth of the time; ``attributes`` are the text of a
    JSON object."""
    trace_id, span_id = ids
    body = _PLAIN % (attributes, trace_id, span_id)
    return _new(EncodedSpan, (rollout_id, attempt_id, span_id, 1, trace_id, None, name, None, None, body))
