"""OpenTelemetry's own protocol for traces, OTLP/HTTP: protobuf or JSON, packed by gzip or not.

A span belongs to the rollout and attempt that its resource names, or that it names itself, which wins. The store
numbers the spans that bring no sequence id. What cannot be filed is counted as rejected in the reply, as the protocol
says; only a request that cannot be read, or a store that cannot write, is an error.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from starlette.responses import Response
from starlette.types import Receive, Scope

from rollout_core.base.errors import ConfigError, NotFound, Recoverable
from rollout_core.store.checks import check_ids
from rollout_core.store.contract import LightningStore
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.http import wire
from rollout_core.store.http.large_bodies import Lane, check_weight
from rollout_core.store.http.requests import read_unpacked
from rollout_core.store.http.span_bodies import (
    Body,
    Context,
    EventOf,
    LinkOf,
    Resource,
    Status as SpanStatus,
    with_bodies,
)
from rollout_core.store.semconv import LightningResourceAttributes as Keys
from rollout_core.store.spans import StatusCode, TraceState, otel_name, otel_value
from rollout_core.store.types import AttemptedRollout
from rollout_core.web.http_errors import TooLarge, WrongMediaType, status_of
from rollout_core.web.listening import BodyLimits, Gone

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
_STATUS_CODES: tuple[StatusCode, ...] = ("UNSET", "OK", "ERROR")
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_ROLLOUT_ID, _ATTEMPT_ID, _SEQUENCE_ID = Keys.ROLLOUT_ID.value, Keys.ATTEMPT_ID.value, Keys.SPAN_SEQUENCE_ID.value
_HEX_FIELDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_MAX_DEPTH = 100
_LOOP_BYTES = 4 << 10
"""Most bytes of a request that is read on the event loop: to convert spans takes much longer than to send them."""
MAX_SPANS = 20_000
"""Most spans of one request."""
MAX_REPEATED_BYTES = 64 << 20
"""Most bytes of resources and scopes, each counted once for each of its spans."""


async def receive_traces(
    store: LightningStore, scope: Scope, receive: Receive, limits: BodyLimits, lane: Lane
) -> Response:
    """Store what one export request brings, and answer it."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    media_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    packed = "gzip" in headers.get(b"content-encoding", "") or "gzip" in headers.get(b"accept-encoding", "")
    try:
        if media_type not in (PROTOBUF, wire.JSON):
            raise WrongMediaType(f"content-type is {media_type!r:.100}; expected {PROTOBUF} or {wire.JSON}")
        data = await read_unpacked(scope, receive, limits, lane)
        if len(data) <= _LOOP_BYTES:
            rejected = await store_spans(store, read_spans(data, media_type))
        elif store.capabilities.get("thread_safe"):
            rejected = await lane.run(_read_and_store(store, data, media_type))
        else:
            rejected = await store_spans(store, await lane.call(read_spans, data, media_type))
    except Gone:
        return Response(status_code=400)
    except Exception as error:  # noqa: BLE001 - every error becomes a reply
        return _refusal(error, media_type)
    answer = ExportTraceServiceResponse()
    if rejected.count:
        answer.partial_success.rejected_spans = rejected.count
        answer.partial_success.error_message = "; ".join(rejected.reasons)
    return _reply(answer, media_type, 200, packed)


async def _read_and_store(store: LightningStore, data: bytes, media_type: str) -> Rejected:
    return await store_spans(store, read_spans(data, media_type))


def read_spans(data: bytes, media_type: str) -> list[EncodedSpan]:
    """The spans of an export request. Raises ConfigError if it is none, and TooLarge."""
    request = parse_request(data, media_type)
    num_spans = num_bytes = 0
    for of_resource in request.resource_spans:
        in_resource = sum(len(of_scope.spans) for of_scope in of_resource.scope_spans)
        in_scopes = sum(len(of_scope.spans) * of_scope.scope.ByteSize() for of_scope in of_resource.scope_spans)
        num_spans += in_resource
        num_bytes += in_resource * of_resource.resource.ByteSize() + in_scopes
    if num_spans > MAX_SPANS:
        raise TooLarge(f"the request has {num_spans} spans; send at most {MAX_SPANS} in a request")
    if num_bytes > MAX_REPEATED_BYTES:
        raise TooLarge(
            f"resources and scopes are stored with each of their spans, here {num_bytes} bytes in all; send fewer "
            f"spans in a request, or smaller resources, for at most {MAX_REPEATED_BYTES} bytes"
        )
    return _spans_of(request)


def parse_request(data: bytes, media_type: str) -> ExportTraceServiceRequest:
    """The message in ``data``. Raises ConfigError if it is none, and TooLarge."""
    try:
        if media_type == PROTOBUF:
            check_messages(ExportTraceServiceRequest.DESCRIPTOR, data)
            return ExportTraceServiceRequest.FromString(data)
        check_weight(data)
        content = json.loads(data or b"{}")
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, expected an object")
        _ids_as_base64(content)
        return json_format.ParseDict(
            content, ExportTraceServiceRequest(), ignore_unknown_fields=True, max_recursion_depth=_MAX_DEPTH
        )
    except TooLarge:
        raise
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"the body is not an OTLP export request for traces: {error}") from error


def _ids_as_base64(content: Any, depth: int = 0) -> None:
    """OTLP writes ids as hex, where protobuf's JSON form has base64."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(content, dict):
        for name, value in content.items():
            if name in _HEX_FIELDS and isinstance(value, str):
                try:
                    content[name] = base64.b64encode(binascii.unhexlify(value)).decode()
                except binascii.Error as error:
                    raise ValueError(f"{name} is {value!r:.80}; expected hex digits") from error
            else:
                _ids_as_base64(value, depth + 1)
    elif isinstance(content, list):
        for value in content:
            _ids_as_base64(value, depth + 1)


@dataclass
class Rejected:
    """Spans that were not stored, and why."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, count: int, reason: str) -> None:
        """Count spans that were not stored for one reason."""
        self.count += count
        # The reply is for people; a few reasons are enough.
        if count and len(self.reasons) < 5:
            self.reasons.append(f"{count} spans: {reason}")


async def store_spans(store: LightningStore, given: Sequence[EncodedSpan]) -> Rejected:
    """Number and store all spans of a request that name a rollout and an attempt."""
    rejected = Rejected()
    spans = [span for span in given if span.rollout_id and span.attempt_id]
    num_nameless = len(given) - len(spans)
    if num_nameless:
        rejected.add(num_nameless, f"neither resource nor span names {_ROLLOUT_ID} and an attempt")
        logger.warning("dropped %d spans of an OTLP request that name no rollout and attempt", num_nameless)
    try:
        await _add(store, spans)
    except (NotFound, ConfigError):
        # One that cannot be filed must not take the others with it.
        await _add_apart(store, await _known(store, spans, rejected), rejected)
    return rejected


async def _known(store: LightningStore, spans: Sequence[EncodedSpan], rejected: Rejected) -> list[EncodedSpan]:
    """The spans that have ids, of rollouts and attempts that exist; the others are rejected."""
    unknown: Counter[str] = Counter()
    sound: list[EncodedSpan] = []
    for span in spans:
        try:
            check_ids(*span[:3])
            sound.append(span)
        except ConfigError as error:
            unknown[str(error)] += 1
    attempts = await _attempts(store, {span[:2] for span in sound})
    known: list[EncodedSpan] = []
    for span in sound:
        rollout_id, attempt_id = span[:2]
        if rollout_id not in attempts:
            unknown[f"rollout {rollout_id} does not exist in this store"] += 1
        elif attempt_id not in attempts[rollout_id]:
            unknown[f"rollout {rollout_id} has no attempt {attempt_id}"] += 1
        else:
            known.append(span)
    for reason, count in unknown.items():
        rejected.add(count, reason)
    return known


async def _attempts(store: LightningStore, wanted: Collection[tuple[str, str]]) -> dict[str, set[str]]:
    """The ids of attempts by rollout, of those rollouts that exist; all that are wanted are there if they exist."""
    found = await store.query_rollouts(rollout_id_in=list({rollout_id for rollout_id, _ in wanted}))
    attempts: dict[str, set[str]] = {}
    for rollout in found:
        # The latest attempt is nearly always the one.
        attempts[rollout.rollout_id] = {rollout.attempt.attempt_id} if isinstance(rollout, AttemptedRollout) else set()
    for rollout_id in {name for name, attempt_id in wanted if attempt_id not in attempts.get(name, {attempt_id})}:
        attempts[rollout_id] = {attempt.attempt_id for attempt in await store.query_attempts(rollout_id)}
    return attempts


async def _add_apart(store: LightningStore, spans: Sequence[EncodedSpan], rejected: Rejected) -> None:
    """Store the spans of each attempt by themselves."""
    groups: dict[tuple[str, str], list[EncodedSpan]] = {}
    for span in spans:
        groups.setdefault(span[:2], []).append(span)
    for group in groups.values():
        try:
            await _add(store, group)
        except (NotFound, ConfigError) as error:
            rejected.add(len(group), str(error))


async def _add(store: LightningStore, spans: Sequence[EncodedSpan]) -> None:
    check_ids(*[text for span in spans for text in span[:3]])
    if spans:
        await store.add_encoded_spans(spans)


def _spans_of(request: ExportTraceServiceRequest) -> list[EncodedSpan]:
    """The spans of a request, in order; those without a sequence id have None."""
    columns: list[tuple[Any, ...]] = []
    bodies: list[Any] = []
    for of_resource in request.resource_spans:
        resource = Resource(_attributes(of_resource.resource.attributes), of_resource.schema_url)
        for of_scope in of_resource.scope_spans:
            scope = {"name": of_scope.scope.name, "version": of_scope.scope.version or None}
            for source in of_scope.spans:
                body = _body(source, resource, scope)
                columns.append(_columns(source, body))
                bodies.append(body)
    return with_bodies(columns, bodies)


def _body(source: ProtoSpan, resource: Any, scope: dict[str, Any]) -> Any:
    """All of a span but its columns, as a struct."""
    status, kind = source.status, source.kind
    code = status.code
    return Body(
        SpanStatus(_STATUS_CODES[code] if 0 <= code < 3 else "UNSET", status.message or None),
        _attributes(source.attributes),
        [EventOf(event.name, _attributes(event.attributes), _seconds(event.time_unix_nano)) for event in source.events],
        [
            LinkOf(_context(link.trace_id, link.span_id, link.trace_state), _attributes(link.attributes) or None)
            for link in source.links
        ],
        _context(source.trace_id, source.span_id, source.trace_state),
        _context(source.trace_id, source.parent_span_id, "") if source.parent_span_id else None,
        resource,
        _KINDS[kind] if 0 <= kind < len(_KINDS) else "UNSPECIFIED",
        scope,
    )


def _columns(source: ProtoSpan, body: Any) -> tuple[Any, ...]:
    """All of an ``EncodedSpan`` but its body."""
    own, shared = body.attributes, body.resource.attributes
    return (
        _text(own.get(_ROLLOUT_ID, shared.get(_ROLLOUT_ID))),
        _text(own.get(_ATTEMPT_ID, shared.get(_ATTEMPT_ID))),
        body.context.span_id,
        _sequence_id(own.get(_SEQUENCE_ID, shared.get(_SEQUENCE_ID))),
        body.context.trace_id,
        None if body.parent is None else body.parent.span_id,
        otel_name(source.name),
        _seconds(source.start_time_unix_nano),
        _seconds(source.end_time_unix_nano),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _sequence_id(value: Any) -> int | None:
    """A sequence id as the instrumentation wrote it, number or text; None if it is neither."""
    if value is None:
        return None  # most spans bring none, and an exception takes longer than all else here
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 2**63 else None


def _context(trace_id: bytes, span_id: bytes, trace_state: str) -> Any:
    return Context(trace_id.hex(), span_id.hex(), False, _trace_state(trace_state) if trace_state else {})


def _trace_state(header: str) -> TraceState:
    """The members of a W3C tracestate header."""
    members = (member.partition("=") for member in header.split(","))
    return {key.strip(): value.strip() for key, separator, value in members if separator}


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    """A value as JSON, by the rules of ``otel_value``."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    held = getattr(value, kind)
    if kind == "array_value":
        return [_value(entry) for entry in held.values]
    if kind == "kvlist_value":
        return _attributes(held.values)
    # Texts of protobuf are valid Unicode. Of the others some are no JSON.
    return otel_value(held) if kind in ("double_value", "bytes_value") else held


def _refusal(error: Exception, media_type: str) -> Response:
    """An error as OTLP has it: a ``Status`` in the encoding of the request; 503 asks for another try."""
    status = status_of(error)
    if status >= 500:
        logger.error("an OTLP request failed: %s", error, exc_info=error if status == 500 else None)
    # Exporters give up on what is final, and 422 is no status of the protocol.
    status = 400 if status in (404, 409, 410, 422) else status
    message = "the server failed; its log says why" if status == 500 else str(error)
    reply = _reply(Status(message=message), media_type, status, packed=False)
    if isinstance(error, Recoverable):
        reply.headers["retry-after"] = str(max(1, round(error.hint.delay_seconds)))
    return reply


def _reply(message: Message, media_type: str, status: int, packed: bool) -> Response:
    if media_type == wire.JSON:
        data = json_format.MessageToJson(message, indent=None).encode()
    else:
        data, media_type = message.SerializeToString(), PROTOBUF
    headers = {}
    if packed and data:
        data, headers = gzip.compress(data, 1), {"content-encoding": "gzip"}
    return Response(data, status, headers, media_type=media_type)


# The size of protobuf messages

UNCOUNTED_BYTES = 1 << 20
"""A body of so many bytes is read in some 40 ms whatever it holds, and need not be counted."""
MAX_MESSAGES = 500_000
"""Most messages (spans, attributes, values and so on) of one body."""
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def check_messages(kind: Descriptor, data: bytes) -> None:
    """Raise TooLarge for a body of this kind with more than ``MAX_MESSAGES`` messages, DecodeError for one that cannot
    be read."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    num_messages = 1
    waiting = [(kind, 0, len(data))]
    while waiting:
        kind, place, end = waiting.pop()
        parts = _parts(kind)
        while place < end:
            tag, place = _number(data, place)
            wire_type = tag & 7
            if wire_type == _LENGTH:
                length, place = _number(data, place)
                if place + length > end:
                    raise DecodeError("a part is longer than the whole")
                if tag >> 3 in parts:
                    num_messages += 1
                    if num_messages > MAX_MESSAGES:
                        raise TooLarge(f"the body has more than {MAX_MESSAGES} messages; send fewer spans in a request")
                    waiting.append((parts[tag >> 3], place, place + length))
                place += length
            elif wire_type == _VARINT:
                _, place = _number(data, place)
            elif wire_type in (_FIXED_64, _FIXED_32):
                place += 8 if wire_type == _FIXED_64 else 4
            else:
                raise DecodeError(f"wire type {wire_type} is not known")


@cache
def _parts(kind: Descriptor) -> dict[int, Descriptor]:
    """The fields of a message that are messages, by number."""
    return {number: field.message_type for number, field in kind.fields_by_number.items() if field.message_type}


def _number(data: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise DecodeError("a number is cut off")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
