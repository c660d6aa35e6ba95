"""Traces of runs by OpenTelemetry: a flow run, its stages, their batches.

They are sent by OTLP/HTTP where ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` says so; the
SDK's other variables (headers, sampler, attributes of the resource, ``OTEL_SDK_DISABLED``) count too. Otherwise nothing
of OpenTelemetry is imported. No work waits for a collector or fails by it: spans wait in a bounded queue that a thread
sends, and while the collector does not answer they are dropped.

All tries of a flow run are one trace, whose id is that of the flow run. Other processes go on with it by the W3C's
``traceparent`` (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rollout_core import DISTRIBUTION
from rollout_core.base import logs
from rollout_core.base.settings import without_passwords

log = logging.getLogger(__name__)

TRACEPARENT = "TRACEPARENT"
"""Environment variable that carries a trace into a process."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_SECONDS = 5.0
"""For the last spans of a run."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
"""Without a try, after one that failed; doubled from one to the next."""
_MOST_OF_A_TEXT = 500

# Not OpenTelemetry's own context: an agent's spans would become children of a stage, and have other ids by that.
_current: ContextVar[str | None] = ContextVar("rollout_traceparent", default=None)
_trace_id: ContextVar[int | None] = ContextVar("rollout_trace_id", default=None)
_lock = threading.Lock()
_provider: Any = None
_exporter: Any = None
_told: set[str] = set()


def is_on() -> bool:
    """Whether the environment asks for traces, and they can be had; why not is logged once."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        _tell(f"traces are not sent: the OTLP protocol is set to {protocol!r}, and only 'http/protobuf' is spoken here")
        return False
    if not _is_installed():
        _tell(f"traces are not sent, though {ENDPOINTS[1]} is set: install {DISTRIBUTION}[otlp]")
        return False
    return True


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _tell(line: str) -> None:
    if line not in _told:
        _told.add(line)
        log.warning("%s", line)


class Span:
    """A piece of work under way; without traces it does nothing."""

    def __init__(self, inner: Any = None, traceparent: str | None = None) -> None:
        self._inner = inner
        self.traceparent = traceparent
        """By which others become part of it; None without traces."""

    def set(self, **attributes: Any) -> None:
        """Attributes, under ``rollout.`` and their names; those that are None are left out."""
        if self._inner is not None:
            self._inner.set_attributes(_named(attributes))

    def fail(self, why: str) -> None:
        """It has failed."""
        if self._inner is not None:
            from opentelemetry.trace import Status, StatusCode

            self._inner.set_status(Status(StatusCode.ERROR, without_passwords(why)[:_MOST_OF_A_TEXT]))

    def end(self) -> None:
        """It is over; a second time changes nothing."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.end()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """What begins inside the block is part of it. An error that leaves the block ends it as failed."""
        token = _current.set(self.traceparent)
        try:
            yield
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            self.end()
            raise
        finally:
            _current.reset(token)


def start_span(name: str, **attributes: Any) -> Span:
    """Begin a span of the current one."""
    return _start(name, _current.get(), attributes) if is_on() else Span()


def add_span(name: str, seconds: float, parent: str | None, **attributes: Any) -> None:
    """A span of ``parent`` that ends now, after ``seconds``."""
    if is_on():
        _start(name, parent, attributes, started=time.time_ns() - int(seconds * 1e9)).end()


@contextmanager
def trace_of_run(name: str, run_id: str, **attributes: Any) -> Iterator[Span]:
    """A try of the flow run ``run_id`` (a UUID), with what happens inside the block.

    Tries before and after it are in the same trace. Where this process was started as part of another trace, it links
    to that.
    """
    if not is_on():
        yield Span()
        return
    token = _trace_id.set(int(run_id.replace("-", ""), 16))
    try:
        span = _start(name, None, attributes, linked=os.environ.get(TRACEPARENT))
    finally:
        _trace_id.reset(token)
    with span.as_current():
        yield span
    span.end()


def current_traceparent() -> str | None:
    """The current span, to be handed to another process or thread; None without traces."""
    return _current.get()


@contextmanager
def part_of(traceparent: str | None) -> Iterator[None]:
    """What begins inside the block is part of a span of another process or thread."""
    token = _current.set(traceparent)
    try:
        yield
    finally:
        _current.reset(token)


def environment() -> dict[str, str]:
    """What a process that is started as part of the current span gets."""
    current = _current.get()
    return {} if current is None else {TRACEPARENT: current}


def flush(seconds: float = FLUSH_SECONDS) -> bool:
    """Send what waits, for at most ``seconds``; not while the collector does not answer. Whether nothing is left."""
    provider, exporter = _provider, _exporter
    if provider is None:
        return True
    if exporter.is_away:
        return False
    # The SDK's own call has no limit of time.
    thread = threading.Thread(target=provider.force_flush, name="rollout-traces", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive() and not exporter.is_away


def _log_ids() -> dict[str, str]:
    """Of the current span, or of one that a program of OpenTelemetry's has begun here, such as an agent."""
    current = _current.get()
    if current is not None:
        _, trace, span, _ = current.split("-")
        return {"trace_id": trace, "span_id": span}
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return {}
    context = opentelemetry.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


logs.add_ids(_log_ids)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"rollout.{name}": value for name, value in attributes.items() if value is not None}
    return {name: value[:_MOST_OF_A_TEXT] if isinstance(value, str) else value for name, value in named.items()}


def _start(
    name: str,
    parent: str | None,
    attributes: Mapping[str, Any],
    *,
    started: int | None = None,
    linked: str | None = None,
) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def within(traceparent: str | None) -> Any:
        return propagator.extract({} if traceparent is None else {"traceparent": traceparent}, Context())

    outer = get_current_span(within(linked)).get_span_context()
    inner = (
        _provider_of_process()
        .get_tracer("rollout")
        .start_span(
            name,
            context=within(parent),
            attributes=_named(attributes),
            links=[Link(outer)] if outer.is_valid else [],
            start_time=started,
        )
    )
    carrier: dict[str, str] = {}
    propagator.inject(carrier, set_span_in_context(inner, Context()))
    return Span(inner, carrier.get("traceparent"))


def _provider_of_process() -> Any:
    """A provider of our own: the process's is its program's, or an agent's."""
    global _provider, _exporter
    with _lock:
        if _provider is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

            class Ids(RandomIdGenerator):
                def generate_trace_id(self) -> int:
                    return _trace_id.get() or super().generate_trace_id()

            class Exporter(SpanExporter, _Breaker):
                def export(self, spans: Sequence[Any]) -> Any:
                    sent = self.send(spans)
                    return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

            # It says what is wrong at the level of errors, with every batch.
            for module in ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.exporter.http.transport"):
                logging.getLogger(module).setLevel(logging.CRITICAL)
            named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "rollout"}
            resource = Resource.create({**named, "host.name": os.uname().nodename, "process.pid": os.getpid()})
            # Not at the end of the process: that would wait for a collector that is away.
            _provider = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
            _exporter = Exporter(OTLPSpanExporter())
            _provider.add_span_processor(BatchSpanProcessor(_exporter))
        return _provider


class _Breaker:
    """Sends spans, and after a failure drops them for a while without a try."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._pause = 0.0
        self._next_try = 0.0
        self._dropped = 0

    @property
    def is_away(self) -> bool:
        """Whether the last try failed."""
        return self._pause > 0

    def send(self, spans: Sequence[Any]) -> bool:
        if time.monotonic() >= self._next_try and self._inner.export(spans).name == "SUCCESS":
            if self._pause:
                log.info("the OTLP collector answers again; %d spans were dropped", self._dropped)
                self._pause, self._dropped = 0.0, 0
            return True
        self._dropped += len(spans)
        if time.monotonic() >= self._next_try:
            if not self._pause:
                log.warning("the OTLP collector takes no spans; they are dropped until it does, and the run continues")
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
            self._next_try = time.monotonic() + self._pause
        return False

    def shutdown(self) -> None:
        self._inner.shutdown()
