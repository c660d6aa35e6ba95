"""A LightningStore made safe for threads, whatever store it wraps."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollout_core.store.base import LightningStore
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Unset,
    Worker,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from rollout_core.errors import Conflict

Result = TypeVar("Result")


class LoopLock:
    """A lock for coroutines of any number of threads and event loops, first come, first served.

    A waiting coroutine does not block its loop, so one that holds the lock may wait for things itself. A forked child
    starts with the lock free: what held it is not in the child.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._process = os.getpid()

    async def __aenter__(self) -> None:
        if os.getpid() != self._process:
            self._reset()
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._guard:
                passed_on = turn not in self._queue
                if not passed_on:
                    self._queue.remove(turn)
            if passed_on:
                self._pass_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            while self._queue:
                turn = self._queue.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:  # its loop was closed while it waited
                    continue
                return
            self._held = False


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # cancelled meanwhile: then its waiter passes the lock on
        turn.set_result(None)


class LightningStoreThreaded(LightningStore):
    """Delegates to ``store``, one call at a time, from any thread. Make it before the threads that use it.

    ``wait_for_rollouts`` and ``statistics`` are passed through, so that a waiting caller holds nobody up. A store that
    is safe for threads itself gets all calls as they come: it has its own, finer way to keep them apart. A pickled copy
    wraps a pickled copy of the store, if that allows it.
    """

    def __init__(self, store: LightningStore) -> None:
        self.store = store
        self._lock = nullcontext() if store.capabilities.get("thread_safe") else LoopLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    async def _locked(self, call: Callable[[], Awaitable[Result]]) -> Result:
        async with self._lock:
            return await call()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store, and safe for threads and tasks."""
        return {**self.store.capabilities, "thread_safe": True, "async_safe": True}

    async def statistics(self) -> LightningStoreStatistics:
        """The statistics of the store."""
        return await self.store.statistics()

    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    async def close(self) -> None:
        await self._locked(self.store.close)

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        return await self._locked(lambda: self.store.enqueue_many_rollouts(rollouts))

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        return await self._locked(lambda: self.store.dequeue_many_rollouts(limit=limit, worker_id=worker_id))

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        return await self._locked(
            lambda: self.store.claim_rollouts(claim_id, limit=limit, worker_id=worker_id, repeated=repeated)
        )

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        await self._locked(lambda: self.store.release_rollouts(claimed))

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        return await self._locked(
            lambda: self.store.start_rollout(input, mode, resources_id, config, metadata, worker_id)
        )

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        return await self._locked(lambda: self.store.start_many_attempts(rollout_ids, worker_id=worker_id))

    # Updates

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        return await self._locked(
            lambda: self.store.update_rollout(rollout_id, input, mode, resources_id, status, config, metadata)
        )

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        return await self._locked(lambda: self.store.update_many_attempts(updates, fenced=fenced))

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        return await self._locked(lambda: self.store.add_many_spans(spans))

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        return await self._locked(lambda: self.store.add_otel_span(rollout_id, attempt_id, readable_span, sequence_id))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return await self._locked(lambda: self.store.get_many_span_sequence_ids(rollout_attempt_ids))

    # Queries are locked too: they may run the watchdog. They are passed on as they are, defaults included.

    async def query_rollouts(self, **query: Any) -> PaginatedResult[Rollout]:
        return await self._locked(lambda: self.store.query_rollouts(**query))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self._locked(lambda: self.store.get_rollout_by_id(rollout_id))

    async def query_attempts(self, rollout_id: str, **query: Any) -> PaginatedResult[Attempt]:
        return await self._locked(lambda: self.store.query_attempts(rollout_id, **query))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._locked(lambda: self.store.get_latest_attempt(rollout_id))

    async def query_spans(
        self, rollout_id: str, attempt_id: str | Literal["latest"] | None = None, **query: Any
    ) -> PaginatedResult[Span]:
        return await self._locked(lambda: self.store.query_spans(rollout_id, attempt_id, **query))

    async def query_spans_json(self, rollout_id: str, attempt_id: str | None = None, **query: Any) -> bytes:
        return await self._locked(lambda: self.store.query_spans_json(rollout_id, attempt_id, **query))

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        return await self._locked(lambda: self.store.query_many_spans(rollout_ids, name=name))

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        return await self.store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self._locked(lambda: self.store.add_resources(resources))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return await self._locked(lambda: self.store.update_resources(resources_id, resources))

    async def query_resources(self, **query: Any) -> PaginatedResult[ResourcesUpdate]:
        return await self._locked(lambda: self.store.query_resources(**query))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._locked(lambda: self.store.get_resources_by_id(resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._locked(self.store.get_latest_resources)

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        return await self._locked(lambda: self.store.update_worker(worker_id, heartbeat_stats))

    async def query_workers(self, **query: Any) -> PaginatedResult[Worker]:
        return await self._locked(lambda: self.store.query_workers(**query))

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._locked(lambda: self.store.get_worker_by_id(worker_id))
