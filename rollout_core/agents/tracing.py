"""Tracers: what an agent does, seen as spans, from the moment a runner enters an attempt until it leaves it.

The attempt that is traced is a value of OpenTelemetry's context. So it follows calls, tasks and threads that carry
their context along, and attempts in other threads and tasks of the process never meet.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from rollout_core.agents.attributes import flat
from rollout_core.agents.delivery import SpanDelivery
from rollout_core.base.errors import ConfigError
from rollout_core.store import LightningStore, Span, SpanCoreFields, StatusCode, TraceStatus
from rollout_core.store.checks import check_ids

_KEY = otel_context.create_key("rollout-trace")


class Trace:
    """What a tracer has seen of one attempt, or, without a store, of a block of code."""

    def __init__(self, tracer: Tracer, delivery: SpanDelivery | None, ids: tuple[str, str] | None) -> None:
        self.tracer = tracer
        self.rollout_id, self.attempt_id = ids or ("rollout-dummy", "attempt-dummy")
        self.spans: list[Span] = []
        """Those that have ended, as they ended. Without a store they are numbered from 1 in that order; with one the
        store numbers what it keeps, see ``get_last_trace``."""
        self.is_open = True
        self._delivery = delivery

    def add(self, span: Span) -> bool:
        """Take a span that has ended, from any thread; False if the trace is over."""
        if not self.is_open:
            return False
        span.rollout_id, span.attempt_id = self.rollout_id, self.attempt_id
        if self._delivery is None:
            span.sequence_id = len(self.spans) + 1
            self.spans.append(span)
            return True
        if not self._delivery.add(span):
            return False
        self.spans.append(span)
        return True


def active_trace(context: Context | None = None) -> Trace | None:
    """The trace that this code runs in; None outside."""
    found: Any = otel_context.get_value(_KEY, context)
    return found if found is not None and found.is_open else None


def active_tracer() -> Tracer | None:
    """The tracer whose ``trace_context`` this code runs in; None outside."""
    trace = active_trace()
    return None if trace is None else trace.tracer


class SpanRecordingContext:
    """An operation under way, whose span can be written to."""

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes; nested ones are flattened."""
        raise NotImplementedError

    def record_exception(self, error: BaseException) -> None:
        """Note an exception, and that the operation failed by it."""
        raise NotImplementedError

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set how it ended."""
        raise NotImplementedError

    def get_recorded_span(self) -> SpanCoreFields:
        """The span, after the operation has ended. Raises RuntimeError before."""
        raise NotImplementedError


class Tracer:
    """Traces attempts. ``init`` prepares the process and ``init_worker`` a worker of it; ``teardown*`` undo that.

    One tracer object may serve workers in several threads; each attempt has a trace of its own.
    """

    delivery_patience_seconds = 120.0
    """How long spans wait for a store that is away."""

    def __init__(self) -> None:
        self._store: LightningStore | None = None
        self._worker_id: int | None = None
        self._last: list[Span] = []

    def imports(self) -> Sequence[str]:
        """Modules, slow to import, that runner processes share: one process imports them and is then forked for each
        runner. They must start no threads and open no connections."""
        return ()

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare this process."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo ``init``."""

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Prepare a worker, whose attempts are in this store."""
        self._worker_id = worker_id
        self._store = store

    def teardown_worker(self, worker_id: int) -> None:
        """Undo ``init_worker``."""
        self._worker_id = None

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Trace]:
        """Trace what runs inside. With ids, every span is in the store when the block ends, and is counted as the
        attempt's; without, spans are only collected. The block's own errors are raised, and so is what keeps the store
        from taking the spans.

        Raises ConfigError if one id comes without the other, or ids without a store.
        """
        trace = self._new_trace(rollout_id, attempt_id)
        token = otel_context.attach(otel_context.set_value(_KEY, trace))
        try:
            yield trace
        finally:
            with contextlib.suppress(ValueError):  # left in another context than it was entered in, as by a generator
                otel_context.detach(token)
            await self._end(trace)

    def _new_trace(self, rollout_id: str | None, attempt_id: str | None) -> Trace:
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(f"got rollout_id={rollout_id!r} and attempt_id={attempt_id!r}; give both or neither")
        if rollout_id is None or attempt_id is None:
            return Trace(self, None, None)
        check_ids(rollout_id, attempt_id)
        if self._store is None:
            raise ConfigError("a trace with ids needs a store; call init_worker(worker_id, store) first")
        delivery = SpanDelivery(self._store, rollout_id, attempt_id, patience_seconds=self.delivery_patience_seconds)
        return Trace(self, delivery, (rollout_id, attempt_id))

    async def _end(self, trace: Trace) -> None:
        trace.is_open = False  # first, so that a span which ends meanwhile is refused, not forgotten
        self._close_open_spans(trace)
        self._last = trace.spans
        if trace._delivery is not None:
            await trace._delivery.close()

    def _close_open_spans(self, trace: Trace) -> None:
        """The trace ends; nothing is to be kept of spans that have not."""

    def get_last_trace(self) -> list[Span]:
        """The spans so far of the trace that this code runs in, else those of the trace that ended last. Those that are
        not yet in the store have the sequence id 0."""
        trace = active_trace()
        return list(self._last if trace is None or trace.tracer is not self else trace.spans)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Add a span of one moment to the active trace. Raises RuntimeError if there is none."""
        raise NotImplementedError(f"{type(self).__name__} creates no spans")

    @contextmanager
    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> Iterator[SpanRecordingContext]:
        """A span around the block. An error of the block is recorded and raised."""
        raise NotImplementedError(f"{type(self).__name__} has no operations")
        yield

    def get_langchain_handler(self) -> Any:
        """A callback handler for LangChain; None unless this tracer has one of its own."""
        return None

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Iterator[Tracer]:
        """``init`` and ``init_worker`` for the block, to try a tracer without a runner."""
        self.init()
        try:
            self.init_worker(0, store)
            try:
                yield self
            finally:
                self.teardown_worker(0)
        finally:
            self.teardown()


class _PlainRecording(SpanRecordingContext):
    """An operation of a DummyTracer."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._fields = _core_fields(name, attributes, None, None)
        self._fields.end_time = None

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._fields.attributes.update(flat(attributes))

    def record_exception(self, error: BaseException) -> None:
        self.record_attributes(exception_attributes(error))
        self.record_status("ERROR", str(error))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self._fields.status = TraceStatus(status_code=status_code, description=description)

    def end(self) -> None:
        """The operation has ended."""
        self._fields.end_time = time.time()

    def get_recorded_span(self) -> SpanCoreFields:
        if self._fields.end_time is None:
            raise RuntimeError(f"the operation {self._fields.name!r} has not ended; ask after its block")
        return self._fields


class DummyTracer(Tracer):
    """Makes spans that nobody stores, for emitters that only build them. Traces nothing."""

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        return _core_fields(name, attributes, timestamp, status)

    @contextmanager
    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> Iterator[SpanRecordingContext]:
        recording = _PlainRecording(name, attributes or {})
        try:
            yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        finally:
            recording.end()


def _core_fields(
    name: str, attributes: Mapping[str, Any] | None, timestamp: float | None, status: TraceStatus | None
) -> SpanCoreFields:
    now = time.time() if timestamp is None else timestamp
    return SpanCoreFields(
        name=name,
        status=status or TraceStatus(status_code="OK"),
        attributes=flat(attributes or {}),
        start_time=now,
        end_time=now,
    )


def exception_attributes(error: BaseException) -> dict[str, Any]:
    """An exception in OpenTelemetry's terms."""
    kind = type(error)
    return {
        "exception.type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
        "exception.escaped": True,
    }
