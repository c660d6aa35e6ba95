"""Spans: what happened during an attempt, in OpenTelemetry's terms.

The models mirror OpenTelemetry's, with ids as hex text and times in seconds, and keep unknown fields. Attribute values
are JSON: strings, numbers, booleans and lists of them. OpenTelemetry itself is imported only to convert its objects.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_core.base.errors import ConfigError
from rollout_core.store.codec import encode
from rollout_core.store.semconv import AGL_VIRTUAL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

AttributeValue = Any
"""A JSON value: text, number, boolean or a list of these. Not narrower, because long lists are slow to validate."""
Attributes = dict[str, AttributeValue]
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]

# Attributes may hold NaN until they are stored; written as such, and not as null, it is found (see ``codec``).
_KEEP_UNKNOWN = ConfigDict(extra="allow", ser_json_inf_nan="constants")
_NANOSECONDS_FROM = 1e12
"""A time beyond this is in nanoseconds: as seconds it would be 30,000 years away."""


class SpanContext(BaseModel):
    """Identity of a span across systems."""

    model_config = _KEEP_UNKNOWN

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: TraceState

    @classmethod
    def from_opentelemetry(cls, src: Any) -> SpanContext:
        """Convert an ``opentelemetry.trace.SpanContext``."""
        return cls(
            trace_id=f"{src.trace_id:032x}",
            span_id=f"{src.span_id:016x}",
            is_remote=src.is_remote,
            trace_state=dict(src.trace_state) if src.trace_state else {},
        )


class TraceStatus(BaseModel):
    """How the traced operation ended."""

    model_config = _KEEP_UNKNOWN

    status_code: StatusCode
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: Any) -> TraceStatus:
        """Convert an ``opentelemetry.trace.Status``."""
        return cls(status_code=src.status_code.name, description=src.description)


class Event(BaseModel):
    """A moment within a span."""

    model_config = _KEEP_UNKNOWN

    name: str
    attributes: Attributes
    timestamp: float | None = None

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Event:
        """Convert an ``opentelemetry.sdk.trace.Event``."""
        return cls(name=src.name, attributes=otel_attributes(src.attributes), timestamp=_seconds(src.timestamp))


class Link(BaseModel):
    """A pointer to another span."""

    model_config = _KEEP_UNKNOWN

    context: SpanContext
    attributes: Attributes | None = None

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Link:
        """Convert an ``opentelemetry.trace.Link``."""
        return cls(
            context=SpanContext.from_opentelemetry(src.context),
            attributes=otel_attributes(src.attributes) if src.attributes else None,
        )


class OtelResource(BaseModel):
    """What produced a span: OpenTelemetry's resource, not to be confused with the store's resources."""

    model_config = _KEEP_UNKNOWN

    attributes: Attributes
    schema_url: str

    @classmethod
    def from_opentelemetry(cls, src: Any) -> OtelResource:
        """Convert an ``opentelemetry.sdk.resources.Resource``."""
        return cls(attributes=otel_attributes(src.attributes), schema_url=src.schema_url or "")


class SpanCoreFields(BaseModel):
    """The part of a span that its maker knows before the store gives it ids."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None
    end_time: float | None


class Span(BaseModel):
    """One traced operation of an attempt. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants", allow_inf_nan=False)

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(ge=0, lt=2**63)
    """Order within the rollout, given out by the store; several spans may share one."""

    trace_id: str
    """32 hex digits. A rollout may have several traces."""
    span_id: str
    """16 hex digits."""
    parent_id: str | None

    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    start_time: float | None
    """Seconds since the epoch, by the clock of the machine that ran the operation."""
    end_time: float | None

    context: SpanContext | None
    parent: SpanContext | None
    resource: OtelResource

    @classmethod
    def from_opentelemetry(cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """Convert a span of the OpenTelemetry SDK.

        Times become seconds. Further public fields of ``src`` are kept where JSON can hold them.
        """
        context = src.get_span_context()
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{context.trace_id if context else 0:032x}",
            span_id=f"{context.span_id if context else 0:016x}",
            parent_id=f"{src.parent.span_id:016x}" if src.parent else None,
            name=otel_name(src.name),
            status=TraceStatus.from_opentelemetry(src.status),
            attributes=otel_attributes(src.attributes),
            events=[Event.from_opentelemetry(event) for event in src.events],
            links=[Link.from_opentelemetry(link) for link in src.links],
            start_time=_seconds(src.start_time),
            end_time=_seconds(src.end_time),
            context=SpanContext.from_opentelemetry(context) if context else None,
            parent=SpanContext.from_opentelemetry(src.parent) if src.parent else None,
            resource=OtelResource.from_opentelemetry(src.resource),
            **_further_fields(src),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """A span made by hand. Trace and span id are random unless given; the status is OK."""
        trace_id = trace_id or secrets.token_hex(16)
        span_id = span_id or secrets.token_hex(8)
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or AGL_VIRTUAL,
            status=status or TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=start_time,
            end_time=end_time,
            context=_local_context(trace_id, span_id),
            parent=_local_context(trace_id, parent_id) if parent_id else None,
            resource=resource or OtelResource(attributes={}, schema_url=""),
        )

    @classmethod
    def from_core_fields(cls, core: SpanCoreFields, *, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """A span of what its maker recorded and the ids that the store gave."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time,
            end_time=core.end_time,
            status=core.status,
        )


def _local_context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _seconds(timestamp: float | None) -> float | None:
    if not timestamp:
        return None
    return timestamp / 1e9 if timestamp > _NANOSECONDS_FROM else timestamp


def otel_name(name: str) -> str:
    """A span's name without what a store would refuse; a traced program must not lose a span over it."""
    return _unicode(name).replace("\0", "\ufffd")


def _unicode(text: str) -> str:
    return text if text.isascii() else text.encode(errors="replace").decode()


def otel_attributes(attributes: Mapping[str, Any] | None) -> Attributes:
    """OpenTelemetry's attributes as JSON, whatever they hold."""
    return {str(key): otel_value(value) for key, value in (attributes or {}).items()}


def otel_value(value: Any) -> AttributeValue:
    """``value`` as JSON. A traced program must not lose a span over one odd value, so none is refused here.

    NaN and infinities become their names, and bytes base64, as in OTLP's JSON form; other objects become their ``str``.
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return otel_attributes(value)
    if isinstance(value, Sequence):
        return [otel_value(entry) for entry in value]
    return str(value)


_CONVERTED = {"kind", "instrumentation_scope", *Span.model_fields}
"""Fields of an SDK span that are taken over above, and names that ours have."""


def _further_fields(src: Any) -> dict[str, Any]:
    further: dict[str, Any] = {"kind": src.kind.name}
    scope = src.instrumentation_scope
    if scope is not None:
        further["instrumentation_scope"] = {"name": scope.name, "version": scope.version}
    for name, value in vars(src).items():
        # The SDK keeps its own state (locks, limits, processors) in names with an underscore.
        if not name.startswith("_") and name not in _CONVERTED:
            try:
                encode(value, name)
            except ConfigError:
                continue
            further[name] = value
    return further
