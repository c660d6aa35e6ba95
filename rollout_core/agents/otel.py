"""Tracing by OpenTelemetry: whatever instruments itself with it, is seen.

The SDK's provider is the process's; ours is added to the one that a program has set, or set if there is none. A span
belongs to the trace whose context it was started in, wherever it ends.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span as SdkSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from rollout_core.agents.attributes import flat
from rollout_core.agents.tracing import SpanRecordingContext, Trace, Tracer, active_trace, exception_attributes
from rollout_core.base.errors import ConfigError, in_words
from rollout_core.store import Span, SpanCoreFields, StatusCode, TraceStatus

logger = logging.getLogger(__name__)

INSTRUMENTORS = {
    "openai": "opentelemetry.instrumentation.openai:OpenAIInstrumentor",
    "threading": "opentelemetry.instrumentation.threading:ThreadingInstrumentor",
}
"""By name, what makes a library trace itself. ``threading`` carries an agent's context into threads that it starts."""
_TOUCHED: Mapping[str, Sequence[str]] = {
    "openai": [
        "opentelemetry.instrumentation.openai.v1",
        "openai.resources.beta.assistants",
        "openai.resources.beta.realtime",
        "openai.resources.beta.threads.messages",
        "openai.resources.chat.completions.completions",
        "openai.resources.embeddings",
        "openai.resources.images",
        "openai.resources.responses.responses",
    ],
    "threading": [],
}
"""By the same names, what an instrumentor imports when it begins: 600 modules of openai, which take seconds."""

_HOST = socket.gethostname()
_lock = threading.Lock()
_instrumented: set[str] = set()
"""Instrumentors that have begun. They stay: that of ``openai`` (0.62) cannot take its wrappers off again, and another
layer of them would record every call twice and streams in duplicate. Spans outside of traces are let be anyway."""


class LightningSpanProcessor(SpanProcessor):
    """Hands spans to the trace whose context they were started in. Spans outside of any are let be."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Trace, str]] = {}
        """By span id, the traces and names of spans that have not ended. Threads change it by single operations."""

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        trace = active_trace(parent_context) or self._trace_of_parent(parent_context) or active_trace()
        if trace is not None and isinstance(trace.tracer, OtelTracer):
            self._open[span.get_span_context().span_id] = (trace, span.name)

    def _trace_of_parent(self, context: Context | None) -> Trace | None:
        """For instrumentations that keep parents themselves, and pass contexts with nothing but such a one."""
        found = self._open.get(otel.get_current_span(context).get_span_context().span_id)
        return None if found is None else found[0]

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        found = self._open.pop(context.span_id, None) if context is not None else None
        if found is None:
            return
        trace, _ = found
        if span.dropped_attributes:
            logger.error(
                "Span %r of rollout %s lost %d attributes to the limits of the program's TracerProvider; raise them",
                span.name,
                trace.rollout_id,
                span.dropped_attributes,
            )
        try:
            made = Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id, 0)
            made.resource.attributes.setdefault("host.name", _HOST)
            taken = trace.add(made)
        except Exception as error:  # noqa: BLE001 - the agent must not fail by its trace
            logger.error("Span %r of rollout %s is lost: %s", span.name, trace.rollout_id, in_words(error))
            return
        if not taken:
            _warn_left_out(span.name, trace)

    def forget(self, trace: Trace) -> None:
        """The trace has ended: spans of it that have not are left out, with a warning."""
        for span_id, (owner, name) in list(self._open.items()):
            if owner is trace and self._open.pop(span_id, None) is not None:
                _warn_left_out(name, trace)


def _warn_left_out(name: str, trace: Trace) -> None:
    logger.warning(
        "Span %r had not ended when attempt %s of rollout %s did, and is left out; let the agent wait for its threads",
        name,
        trace.attempt_id,
        trace.rollout_id,
    )


_processor = LightningSpanProcessor()
_LIMITS = SpanLimits(
    max_span_attributes=1_000_000,
    max_events=1_000_000,
    max_links=1_000_000,
    max_event_attributes=1_000_000,
    max_link_attributes=1_000_000,
    max_attribute_length=SpanLimits.UNSET,
    max_span_attribute_length=SpanLimits.UNSET,
)
"""The defaults, 128 each, drop the oldest attributes without a word: of a reward of many dimensions the primary one.
Lengths would be those of ``OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT``, where messages become half a JSON text."""
_provider: TracerProvider | None = None


class _Provider(TracerProvider):
    """Of our own, where the program has none: ``OTEL_SDK_DISABLED``, by which users end the telemetry of libraries,
    does not end it, for its spans go to the store alone."""

    def __init__(self) -> None:
        super().__init__(sampler=ALWAYS_ON, resource=Resource.create({}), span_limits=_LIMITS)
        self._disabled = False


def tracer_provider() -> TracerProvider:
    """The process's provider, with our processor. Once made it stays, as OpenTelemetry's rules are."""
    global _provider
    with _lock:
        if _provider is None:
            found = otel.get_tracer_provider()
            if isinstance(found, TracerProvider):
                _provider = found
                _warn_of_limits(found)
            else:
                _provider = _Provider()
                otel.set_tracer_provider(_provider)
            _provider.add_span_processor(_processor)
        return _provider


def _warn_of_limits(provider: TracerProvider) -> None:
    """Say what will be missing of spans that another's provider makes."""
    if isinstance(provider.get_tracer(__name__), otel.NoOpTracer):
        logger.warning(
            "The program's TracerProvider makes no spans, as OTEL_SDK_DISABLED was true when it was made: calls and "
            "emitted rewards of agents will be missing. Unset the variable, or make no TracerProvider of your own"
        )
    limits = provider._span_limits
    lengths = (limits.max_span_attribute_length, limits.max_attribute_length)
    length = min((length for length in lengths if length is not None), default=None)
    if length is not None:
        logger.warning(
            "The program's TracerProvider cuts attributes of spans to %d characters, by its span_limits or "
            "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT or OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT: longer messages will be no "
            "JSON. Unset it",
            length,
        )


class _OtelRecording(SpanRecordingContext):
    """An operation that is a span of OpenTelemetry."""

    def __init__(self, span: SdkSpan) -> None:
        self._span = span

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(flat(attributes))

    def record_exception(self, error: BaseException) -> None:
        self._span.add_event("exception", exception_attributes(error))
        self.record_status("ERROR", f"{type(error).__name__}: {error}")

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self._span.set_status(otel.StatusCode[status_code], description)

    def get_recorded_span(self) -> SpanCoreFields:
        if self._span.end_time is None:
            raise RuntimeError(f"the operation {self._span.name!r} has not ended; ask after its block")
        return _core_fields(self._span)


def _core_fields(span: ReadableSpan) -> SpanCoreFields:
    whole = Span.from_opentelemetry(span, "", "", 0)
    return SpanCoreFields(
        name=whole.name,
        status=whole.status,
        attributes=whole.attributes,
        start_time=whole.start_time,
        end_time=whole.end_time,
    )


class OtelTracer(Tracer):
    """Stores every span that the agent's process ends inside an attempt.

    ``instrument`` names what is to trace itself: of INSTRUMENTORS, or ``module:class`` of any OpenTelemetry
    instrumentor. By default those of INSTRUMENTORS whose packages are installed.
    """

    def __init__(self, *, instrument: Sequence[str] | None = None) -> None:
        super().__init__()
        self._asked = instrument

    def imports(self) -> Sequence[str]:
        asked = INSTRUMENTORS if self._asked is None else [name for name in self._asked if name in INSTRUMENTORS]
        modules = [__name__]
        for name in asked:
            modules += [INSTRUMENTORS[name].partition(":")[0], *_TOUCHED[name]]
        return modules

    def init(self, *args: Any, **kwargs: Any) -> None:
        tracer_provider()
        for name in INSTRUMENTORS if self._asked is None else self._asked:
            _begin_instrumentation(INSTRUMENTORS.get(name, name), is_required=self._asked is not None)

    def _close_open_spans(self, trace: Trace) -> None:
        _processor.forget(trace)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        now = time.time_ns() if timestamp is None else int(timestamp * 1e9)
        span = self._start(name, attributes, now)
        if status is None:
            span.set_status(otel.StatusCode.OK)
        elif status.status_code != "UNSET":
            span.set_status(otel.StatusCode[status.status_code], status.description)
        span.end(now)
        return _core_fields(span)

    @contextmanager
    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> Iterator[SpanRecordingContext]:
        span = self._start(name, attributes)
        recording = _OtelRecording(span)
        with otel.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield recording
            except BaseException as error:
                recording.record_exception(error)
                raise
            finally:
                if span.status.status_code is otel.StatusCode.UNSET:
                    span.set_status(otel.StatusCode.OK)
                span.end()

    def _start(self, name: str, attributes: Mapping[str, Any] | None, time_ns: int | None = None) -> SdkSpan:
        trace = active_trace()
        if trace is None or trace.tracer is not self:
            raise RuntimeError(f"span {name!r}: no trace of this tracer is active here; enter its trace_context first")
        span = (
            tracer_provider()
            .get_tracer("rollout_core.agents")
            .start_span(name, attributes=flat(attributes or {}), start_time=time_ns)
        )
        if not isinstance(span, SdkSpan):
            raise ConfigError(
                "the program's TracerProvider makes no spans: let it use the sampler ALWAYS_ON, and unset "
                "OTEL_SDK_DISABLED"
            )
        return span


class AgentOpsTracer(OtelTracer):
    """An OtelTracer whose instrumentation is that of the package ``agentops``, of all libraries that it knows.

    Every trace has a session span around it. Spans go to the store alone: agentops gets our provider and starts no
    exporter, so it needs no key and sends nothing, also after ``agentops.init()`` in the agent. Use it in a process
    without other OtelTracers, whose instrumentation of ``openai`` would record every call twice.

    The arguments are accepted for programs written for agentlightning; ``instrument_managed=False`` leaves libraries as
    they are. Raises ConfigError in ``init`` where agentops is missing.
    """

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        super().__init__(instrument=["threading"])
        self._instruments = instrument_managed

    def init(self, *args: Any, **kwargs: Any) -> None:
        core = _agentops("sdk.core").tracer
        super().init()
        with _lock:
            if core.initialized and core.provider is not _provider:
                raise ConfigError(
                    "agentops.init() was called before the tracer began; leave it out, or call it in the agent"
                )
            # What its own `initialize` does, but for the provider with an exporter to agentops.ai.
            core.provider, core._initialized = _provider, True
            if self._instruments:
                _agentops("instrumentation").instrument_all()

    @asynccontextmanager
    async def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> AsyncIterator[Trace]:
        attributes = _agentops("sdk.attributes")
        kind = _agentops("semconv").SpanKind.SESSION
        async with super().trace_context(name, rollout_id=rollout_id, attempt_id=attempt_id) as trace:
            fields = attributes.get_span_attributes(name or "session", kind, **attributes.get_trace_attributes())
            with self.operation_context(f"{name or 'session'}.{kind}", fields):
                yield trace

    def get_langchain_handler(self, tags: Sequence[str] | None = None) -> Any:
        """agentops' handler. Raises ConfigError without langchain-core."""
        handlers = _agentops("integration.callbacks.langchain", "langchain-core")
        return handlers.LangchainCallbackHandler(tags=list(tags or ()), auto_session=False)


def _agentops(module: str, package: str = "agentops") -> Any:
    try:
        return importlib.import_module(f"agentops.{module}")
    except ImportError as error:
        raise ConfigError(
            f"AgentOpsTracer needs the package {package}: {error}. Install rollout-post-training[agentops], in an "
            "environment of its own where its older packaging, psutil and wrapt are in the way; OtelTracer traces the "
            "openai client without it"
        ) from error


def _begin_instrumentation(place: str, *, is_required: bool) -> None:
    with _lock:
        if place in _instrumented:
            return
        instrumentor = _instrumentor(place, is_required=is_required)
        if instrumentor is None:
            return
        assert _provider is not None, "made before"
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(tracer_provider=_provider)
            logging.getLogger("opentelemetry.attributes").addFilter(_is_no_omission)
        _instrumented.add(place)


def _is_no_omission(record: logging.LogRecord) -> bool:
    """Frameworks say by a value of its own what they leave out of a call of openai; OpenTelemetry would warn of each
    one in each call."""
    return "'openai.Omit'" not in record.getMessage()


def _instrumentor(place: str, *, is_required: bool) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        if is_required:
            raise ConfigError(
                f"cannot instrument by {place!r}: {error}; install the package, and give module:class or one of "
                f"{', '.join(INSTRUMENTORS)}"
            ) from error
        return None
