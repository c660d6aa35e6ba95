"""The contract of a LightningStore: what algorithms and runners may rely on, whatever keeps the data.

Every coroutine is atomic: it happens as a whole or not at all, also among concurrent callers. Batch forms are the
primary ones; the single forms wrap them. A batch that names one thing several times does what the single forms would,
one after the other: each result is what its own item left. Unknown ids raise NotFound (a ValueError), values that
cannot be stored ConfigError (a ValueError), passing trouble of the storage Recoverable; a call that raised has changed
nothing, unless it says by UnknownOutcome, a Recoverable, that it cannot know.

An id, of whatever it is, is text that is not empty, holds no NUL and is valid Unicode; the last two hold for names of
spans and for filters too. Anything else is a ConfigError, also where it is only asked for.

An attempt is a lease: the worker that got it may complete the rollout until the watchdog or another worker ends the
lease. An attempt in preparing or running that loses its lease to a newer one ends as failed; so does one that a late
span has revived, when the rollout finishes. The watchdog is not a thread. It runs before most calls, at most once per
debounce interval, and marks attempts that took too long or fell silent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollout_core.base.errors import Conflict
from rollout_core.store.checks import check_ends, check_id_list
from rollout_core.store.codec import encode_stored
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.span_fields import SpanFields
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    AttemptUpdate,
    EnqueueRolloutRequest,
    FilterLogic,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    Unset,
    Worker,
    WorkerStatus,
    build,
    enqueue_request,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from opentelemetry.sdk.trace import ReadableSpan


class LightningStore(ABC):
    """Rollouts, their attempts and spans, the queue, versioned resources and workers."""

    # About the store

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """What this store can do; none unless a store says so."""
        return LightningStoreCapabilities(async_safe=False, thread_safe=False, zero_copy=False, otlp_traces=False)

    async def statistics(self) -> LightningStoreStatistics:
        """Name and counts of this store; not for hot paths."""
        return LightningStoreStatistics(name=type(self).__name__)

    def otlp_traces_endpoint(self) -> str:
        """URL of the OTLP/HTTP endpoint for traces; NotImplementedError unless ``otlp_traces`` is a capability."""
        raise NotImplementedError(f"{type(self).__name__} has no OTLP endpoint; serve it over HTTP to get one")

    async def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release what the store holds. Everything acknowledged stays stored. Harmless when repeated."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # The queue

    @abstractmethod
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Store rollouts in ``queuing`` at the tail of the queue, and return them in the order of requests.

        Without ``rollout_id`` a request gets a fresh id that starts with ``ro-``. With one, enqueueing is idempotent:
        if the rollout exists it is returned as it is now, and neither queued again nor changed. ``resources_id``
        defaults to the latest snapshot; an unknown one is accepted. Config and metadata are copied; metadata defaults
        to ``{}``.

        Raises Conflict if a known ``rollout_id`` comes with another input, ConfigError if a value is not JSON (NaN and
        infinities included). Then nothing is queued.
        """

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Queue one rollout, see ``enqueue_many_rollouts``."""
        request = enqueue_request(input, mode, resources_id, config, metadata, rollout_id)
        return (await self.enqueue_many_rollouts([request]))[0]

    @abstractmethod
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Claim up to ``limit`` queued rollouts, first in, first out, each with a fresh attempt in ``preparing``.

        Does not wait: returns an empty list if nothing is queued or ``limit`` is not positive. A worker that is named
        becomes busy with the last of them, or idle if there was none.
        """

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        """``dequeue_many_rollouts`` for callers that may lose the answer and ask again, such as HTTP clients.

        ``repeated`` says that this ``claim_id`` was sent before. If that call did claim rollouts, those that are still
        in ``preparing`` under it are returned, and no more are claimed. A store whose data end with its process need
        not remember claims: the server in front of it remembers for as long.
        """
        return await self.dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Give back claims that nobody took up, such as those of a cancelled dequeue.

        A rollout that has moved on since is left alone. A store may take the attempt back as if it had not been, and
        put the rollout at the head of the queue; by default the rollout is queued again at the tail.
        """
        check_id_list([rollout.rollout_id for rollout in claimed])
        for rollout in claimed:
            latest = await self.get_rollout_by_id(rollout.rollout_id)
            if isinstance(latest, AttemptedRollout) and latest == rollout:
                await self.update_rollout(rollout.rollout_id, status="requeuing")

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Claim the oldest queued rollout, or None. See ``dequeue_many_rollouts``."""
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    @abstractmethod
    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """Store a rollout that is worked on at once: in ``preparing``, with attempt 1, never queued."""

    @abstractmethod
    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        """Start the first attempt of each of these rollouts, in ``preparing``, for the worker; unknown ones are stored,
        and never are in the queue.

        None stands in the place of a rollout that has had an attempt, be it of this call or of one at the same time;
        that attempt goes on. Raises as ``enqueue_many_rollouts``.
        """

    @abstractmethod
    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Start a new attempt of each of these rollouts, in any status, and return them in the order of ids.

        The new attempt supersedes earlier ones and is not bound by ``max_attempts``. A queued rollout leaves the queue.
        An id given twice gets one attempt. Raises NotFound, and starts none, if a rollout is unknown.
        """

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start a new attempt of one rollout, see ``start_many_attempts``."""
        return (await self.start_many_attempts([rollout_id], worker_id=worker_id))[0]

    # Updates

    @abstractmethod
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
        """Replace the given fields of a rollout and return it. Metadata is replaced, not merged.

        A terminal ``status`` sets ``end_time`` and wakes waiters. ``queuing`` and ``requeuing`` put the rollout at the
        tail of the queue unless it is queued already, also one that was finished; any other status takes it out.

        Raises NotFound for an unknown rollout, ConfigError for a value that is not allowed (``status=None`` and
        ``config=None`` among them).
        """

    @abstractmethod
    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        """Apply updates in order, and return each attempt as its update has left it, in the order of updates.

        ``succeeded`` and ``failed`` set the attempt's ``end_time``. Only the latest attempt of a rollout moves the
        rollout, by the rules of ``lifecycle``: success finishes it; failure, timeout and unresponsiveness queue it
        again if its config says so, and otherwise fail it. The worker of the attempt becomes idle, unknown or busy with
        it.

        With ``fenced`` an update counts only while the attempt's lease stands. It is refused when a newer attempt has
        started, when the attempt has already ended or timed out, and when the rollout was finished by other means. A
        refused update changes nothing and yields a Conflict (returned, not raised) in its place; the other updates are
        applied. Repeating the terminal status that an attempt already has is no conflict and changes nothing.

        Raises NotFound, and applies none, if a rollout or attempt is unknown.
        """

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
        *,
        fenced: bool = False,
    ) -> Attempt:
        """Update one attempt, see ``update_many_attempts``; a refused fenced update raises the Conflict."""
        update = build(
            AttemptUpdate,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=metadata,
        )
        [outcome] = await self.update_many_attempts([update], fenced=fenced)
        if isinstance(outcome, Conflict):
            raise outcome
        return outcome

    # Spans

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans and return those that were new, in order; a duplicate is left out.

        Two spans are the same if rollout, attempt and span id agree. Each new span is a heartbeat of its attempt: one
        in ``preparing`` or ``unresponsive`` runs again (not an older attempt of a finished rollout), and so does its
        rollout if it is the latest attempt and the rollout is not finished. An explicit ``sequence_id`` raises the
        rollout's counter to at least that value.

        Raises NotFound if a rollout or attempt is unknown, ConfigError if a value is not JSON. Then none is stored.
        """

    async def add_span_fields(self, spans: Sequence[SpanFields]) -> Sequence[bool]:
        """``add_many_spans`` of spans that are plain dicts and were checked, for a server that only passes them on.

        For each span, whether it was new. A store that keeps spans as JSON has no need of models here.
        """
        added = await self.add_many_spans([Span.model_validate(span) for span in spans])
        # Those that were added are in order, so both lists can be walked together.
        left = [(span.rollout_id, span.attempt_id, span.span_id) for span in reversed(added)]
        is_new: list[bool] = []
        for span in spans:
            is_new.append(bool(left) and left[-1] == (span["rollout_id"], span["attempt_id"], span["span_id"]))
            if is_new[-1]:
                left.pop()
        return is_new

    async def add_encoded_spans(self, spans: Sequence[EncodedSpan]) -> Sequence[bool]:
        """``add_span_fields`` of spans whose bodies are JSON already, for a server that only passes them on."""
        return await self.add_span_fields([span.fields() for span in spans])

    async def end_attempts(self, ends: Sequence[tuple[SpanFields, AttemptUpdate]]) -> Sequence[Attempt | Conflict]:
        """Store a last span of each attempt, see ``add_span_fields``, and apply its update, fenced, see
        ``update_many_attempts``, whose results these are.

        The span of an attempt whose update is refused is stored all the same. Spans and updates are two operations
        where a store has no better: then an update may raise when the spans are stored.

        Raises ConfigError where a span is of another attempt than its update.
        """
        check_ends(ends)
        await self.add_span_fields([span for span, _ in ends])
        return await self.update_many_attempts([update for _, update in ends], fenced=True)

    async def add_span(self, span: Span) -> Span | None:
        """Store one span, see ``add_many_spans``; None if it is a duplicate."""
        added = await self.add_many_spans([span])
        return added[0] if added else None

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert and store a span of the OpenTelemetry SDK; without a ``sequence_id`` it gets the next one."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id))

    @abstractmethod
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """The next sequence id for each (rollout, attempt) pair, in the order of pairs.

        There is one counter for each rollout, so the numbers of an attempt strictly increase. The attempt need not
        exist yet. Raises NotFound for an unknown rollout, ConfigError if a span has the largest number there is.
        """

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """The next sequence id of one rollout, see ``get_many_span_sequence_ids``."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    # Queries. A filter that is None does not filter, an empty list matches nothing. ``limit`` -1 is no limit; 0 gives
    # no items but the total. Without ``sort_by`` the order is that of insertion. Missing values sort lowest, missing
    # times last. An unknown field or a meaningless limit raises ConfigError.

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        """Rollouts that match; an AttemptedRollout exactly if an attempt exists.

        ``status`` and ``rollout_ids`` are older names of ``status_in`` and ``rollout_id_in``, which win if both are
        given.
        """

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """One rollout, with its latest attempt if it has one; None if it is unknown."""

    @abstractmethod
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Attempts of a rollout, oldest first; none if it is unknown."""

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The attempt with the highest ``sequence_id``; None if there is none."""

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt or of all; none if the rollout is unknown.

        ``filter_logic`` joins the filters, never the rollout and attempt. Spans that share a ``sequence_id`` are
        ordered by start and end time. A store that evicts spans raises RuntimeError for a rollout whose spans are gone.
        """

    async def query_spans_json(self, rollout_id: str, attempt_id: str | None = None, **query: Any) -> bytes:
        """The page of ``query_spans`` as JSON, for a server that only passes it on.

        A store that keeps spans as JSON has it much quicker than by making them models.
        """
        return encode_stored(await self.query_spans(rollout_id, attempt_id, **query))

    @abstractmethod
    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        """Spans of the latest attempt of each of these rollouts: by rollout as asked for, then by ``sequence_id``.

        Unknown rollouts and those without attempts yield none. One query, also for thousands of rollouts.
        """

    @abstractmethod
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until all of these rollouts are finished or ``timeout`` seconds have passed; those that are finished.

        A timeout of 0 or less looks once; None waits as long as it takes. Unknown ids are not waited for.
        """

    # Resources

    @abstractmethod
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Store a snapshot under a fresh id that starts with ``rs-``. It is the latest now."""

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Replace a snapshot, raising its version, or create it with version 1. It is the latest now."""

    @abstractmethod
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Snapshots that match."""

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """One snapshot; None if it is unknown."""

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The snapshot that was added or updated last; None if there is none."""

    # Workers

    @abstractmethod
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        """Record a heartbeat of a worker, with new statistics if given; an unknown worker is created.

        Status and assignment are not touched: they follow from dequeues and attempts.
        """

    @abstractmethod
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Workers that match."""

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """One worker; None if it is unknown."""
