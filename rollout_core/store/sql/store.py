"""The LightningStore in a SQL database: durable, shared by processes, and as quick with millions of rows as with none.

What is acknowledged is on disk. Values are checked and encoded here; the operations themselves are in the
modules beside this one, and run on a SQLite file or a PostgreSQL server through ``database``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.objects.store import ObjectStore
from rollout_core.store.base import LightningStore
from rollout_core.store.checks import (
    check_ends,
    check_id_list,
    check_ids,
    check_statuses,
    check_texts,
    check_updates,
    resources_json,
    rollout_changes,
)
from rollout_core.store.codec import encode
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.span_bodies import SpanBodies, SpanModel, StoredSpan, if_here
from rollout_core.store.span_fields import SpanFields, span_fields
from rollout_core.store.spans import Span
from rollout_core.store.sql import queries, queue as sql_queue, spans as sql_spans
from rollout_core.store.sql.attempts import end_attempts, find_lost_attempts, update_attempts, update_rollout
from rollout_core.store.sql.by_url import open_database
from rollout_core.store.sql.dialect import SEQUENCE_ID, Transaction
from rollout_core.store.sql.group_commit import Hooks
from rollout_core.store.sql.resources import add_resources, update_resources
from rollout_core.store.sql.rows import span_columns, span_json, span_model
from rollout_core.store.sql.workers import record_heartbeat
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
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
    enqueue_request,
)
from rollout_core.store.waiting import Waiters

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Result = TypeVar("Result")

WATCHDOG_BATCH = 1_000
"""Most overdue attempts that one run of the watchdog handles; the next call goes on with the others."""
SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""How often a waiting call looks for changes by other processes; less and less often while there are none."""


class SqlLightningStore(LightningStore):
    """A LightningStore in a SQLite file or a PostgreSQL database; made by ``from_url``.

    It may be used from any number of tasks, threads, event loops and processes at once. A forked or unpickled copy
    opens the database for itself.
    """

    def __init__(
        self,
        url: str,
        *,
        scan_debounce_seconds: float = 10.0,
        busy_timeout_seconds: float = 30.0,
        objects: ObjectStore | None = None,
        offload_bytes: int = 65_536,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = {
            "objects": objects,
            "offload_bytes": offload_bytes,
            "scan_debounce_seconds": scan_debounce_seconds,
            "busy_timeout_seconds": busy_timeout_seconds,
            "clock": clock,
        }
        self.url = url
        self._clock = clock
        self._scan_debounce_seconds = scan_debounce_seconds
        self._last_scan: float | None = None
        self._opened = clock()
        self._waiters = Waiters()
        self._bodies = SpanBodies(objects, offload_bytes)
        hooks = Hooks(clock, self._scan, self._waiters.wake)
        self._database = open_database(url, hooks, busy_timeout_seconds=busy_timeout_seconds)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        scan_debounce_seconds: float = 10.0,
        busy_timeout_seconds: float = 30.0,
        objects: ObjectStore | None = None,
        offload_bytes: int = 65_536,
        clock: Callable[[], float] = time.time,
    ) -> SqlLightningStore:
        """Open the store at ``sqlite:///path/to/file.db`` (``sqlite:////...`` is absolute) or
        ``postgresql://user:password@host/database``, creating its tables, or bringing them to the present, if need be.

        The file is created too, the PostgreSQL database must exist; ``?search_path=NAME`` names a schema of it.

        ``scan_debounce_seconds`` is the least time between two runs of the watchdog (0: it always runs),
        ``busy_timeout_seconds`` how long to wait for another process to finish writing, and ``clock`` the source of
        time, in seconds since the epoch. With ``objects``, spans whose JSON has more than ``offload_bytes`` characters
        keep it there; a store that reads them must be opened with the same one.

        Raises ConfigError for another kind of URL, and for a database that is not a store, is damaged, cannot be
        written or was written by a newer version; Recoverable for a server that cannot be reached.
        """
        return cls(
            url,
            scan_debounce_seconds=scan_debounce_seconds,
            busy_timeout_seconds=busy_timeout_seconds,
            objects=objects,
            offload_bytes=offload_bytes,
            clock=clock,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._settings), (self.url,)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Safe for tasks and threads; all copies see the one database."""
        return LightningStoreCapabilities(thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=False)

    async def statistics(self) -> LightningStoreStatistics:
        """Counts of everything stored."""
        counts = await self._read(queries.count_all)
        return {"name": type(self).__name__, "uptime": self._clock() - self._opened, **counts}

    async def close(self) -> None:
        """Finish pending writes and close the database. Later calls raise Fatal."""
        await asyncio.get_running_loop().run_in_executor(None, self._database.close)

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        requests = [sql_queue.new_rollout(request) for request in rollouts]
        return await self._database.write_batch(sql_queue.enqueue, requests)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        return await self._claim(limit, worker_id)

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        if repeated:
            found = await self._write(lambda tx: sql_queue.find_claimed(tx, claim_id, limit))
            if found:
                return found
        return await self._claim(limit, worker_id, claim_id)

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        check_id_list([rollout.rollout_id for rollout in claimed])
        await self._write(lambda tx: sql_queue.release(tx, claimed))

    async def _claim(self, limit: int, worker_id: str | None, claim_id: str | None = None) -> list[AttemptedRollout]:
        check_ids(worker_id)
        if limit <= 0:
            return []
        demand = sql_queue.Demand(limit, worker_id, claim_id)
        [claims] = await self._database.write_batch(sql_queue.claim, [demand], undo=sql_queue.unclaim)
        return [claim.rollout for claim in claims]

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        check_ids(worker_id)
        request = sql_queue.new_rollout(enqueue_request(input, mode, resources_id, config, metadata))
        [rollout] = await self._database.write_batch(sql_queue.start_new, [(request, worker_id)])
        assert rollout is not None, "its id is new"
        return rollout

    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        check_ids(worker_id)
        requests = [(sql_queue.new_rollout(request), worker_id) for request in rollouts]
        return await self._database.write_batch(sql_queue.start_new, requests)

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        check_id_list(rollout_ids)
        check_ids(worker_id)
        return await self._write(lambda tx: sql_queue.start(tx, rollout_ids, worker_id))

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
        changes = rollout_changes(
            rollout_id,
            input=input,
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=metadata,
        )
        for name in changes.keys() & {"input", "metadata"}:
            if name == "input" or changes[name] is not None:
                changes[name] = encode(changes[name], name)
        return await self._write(lambda tx: update_rollout(tx, rollout_id, changes))

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        check_updates(updates)
        return await self._database.write_batch(update_attempts, [(update, fenced) for update in updates])

    async def end_attempts(self, ends: Sequence[tuple[SpanFields, AttemptUpdate]]) -> Sequence[Attempt | Conflict]:
        check_ends(ends)
        rows = await self._bodies.offload([StoredSpan(span["rollout_id"], span_columns(span)) for span, _ in ends])
        return await self._database.write_batch(
            end_attempts, [(row, update) for row, (_, update) in zip(rows, ends, strict=True)]
        )

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        is_new = await self.add_span_fields([span_fields(span) for span in spans])
        return [span for span, new in zip(spans, is_new, strict=True) if new]

    async def add_span_fields(self, spans: Sequence[SpanFields]) -> Sequence[bool]:
        rows = await self._bodies.offload([StoredSpan(span["rollout_id"], span_columns(span)) for span in spans])
        return await self._database.write_batch(sql_spans.add_spans, rows, watched=False)

    async def add_encoded_spans(self, spans: Sequence[EncodedSpan]) -> Sequence[bool]:
        rows = await self._bodies.offload([StoredSpan(span.rollout_id, (*span[1:], None)) for span in spans])
        return await self._database.write_batch(sql_spans.add_spans, rows, watched=False)

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        [stored] = await self._bodies.offload([StoredSpan(rollout_id, span_columns(span_fields(span)))])

        def add(tx: Transaction) -> bool:
            if sequence_id is None:
                span.sequence_id = sql_spans.number_spans(tx, [rollout_id])[0]
            columns = (*stored.columns[:SEQUENCE_ID], span.sequence_id, *stored.columns[SEQUENCE_ID + 1 :])
            return sql_spans.add_spans(tx, [StoredSpan(rollout_id, columns)])[0]

        return span if await self._database.write(add, watched=False) else None

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        check_ids(*[given_id for pair in rollout_attempt_ids for given_id in pair])
        rollout_ids = [rollout_id for rollout_id, _ in rollout_attempt_ids]
        return await self._database.write_batch(sql_spans.number_spans, rollout_ids, watched=False)

    # Queries

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
        check_texts(rollout_id_contains)
        statuses = status if status_in is None else status_in
        check_statuses(statuses, RolloutStatus)
        ids = rollout_ids if rollout_id_in is None else rollout_id_in
        if ids is not None:
            check_id_list(ids)
        return await self._watched_read(
            partial(
                queries.find_rollouts,
                status_in=statuses,
                rollout_id_in=ids,
                rollout_id_contains=rollout_id_contains,
                filter_logic=filter_logic,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        check_ids(rollout_id)
        return await self._watched_read(lambda tx: queries.find_rollout(tx, rollout_id))

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        check_ids(rollout_id)
        return await self._watched_read(
            lambda tx: queries.find_attempts(
                tx, rollout_id, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset
            )
        )

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        check_ids(rollout_id)
        return await self._watched_read(lambda tx: queries.find_latest_attempt(tx, rollout_id))

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
        query = _span_query(
            trace_id=trace_id,
            trace_id_contains=trace_id_contains,
            span_id=span_id,
            span_id_contains=span_id_contains,
            parent_id=parent_id,
            parent_id_contains=parent_id_contains,
            name=name,
            name_contains=name_contains,
            filter_logic=filter_logic,
            limit=limit,
            offset=offset,
            sort_by=sort_by,
            sort_order=sort_order,
        )
        return await self._span_page(rollout_id, attempt_id, query, span_model)

    async def query_spans_json(self, rollout_id: str, attempt_id: str | None = None, **query: Any) -> bytes:
        page = await self._span_page(rollout_id, attempt_id, _span_query(**query), span_json)
        tail = f'"limit":{page.limit},"offset":{page.offset},"total":{page.total}'.encode()
        return b'{"items":[%b],%b}' % (b",".join(page.items), tail)

    async def _span_page(
        self, rollout_id: str, attempt_id: str | None, query: dict[str, Any], model: SpanModel[Result]
    ) -> PaginatedResult[Result]:
        """A page of spans, each made by ``model`` of the rollout's id and a row."""
        check_ids(rollout_id, attempt_id, query["exact"].get("span_id"))
        check_texts(*query["exact"].values(), *query["parts"].values())
        here = if_here(model)
        page = await self._watched_read(lambda tx: queries.find_spans(tx, rollout_id, attempt_id, model=here, **query))
        items = await self._bodies.fetch(page.items, model)
        return PaginatedResult(items=items, limit=page.limit, offset=page.offset, total=page.total)

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        check_id_list(rollout_ids)
        check_texts(name)
        here = if_here(span_model)
        found = await self._watched_read(lambda tx: queries.find_many_spans(tx, rollout_ids, name, model=here))
        return await self._bodies.fetch(found, span_model)

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        check_id_list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._waiters.waiting(rollout_ids) as waiter:
            version = await self._database.foreign_version()
            finished = {rollout.rollout_id: rollout for rollout in await self._finished(rollout_ids)}
            waited = await self._read(lambda tx: queries.known_ids(tx, rollout_ids))
            poll_seconds = SHORTEST_POLL_SECONDS
            while waited - finished.keys():
                left = LONGEST_POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                news = await waiter.next_finished(min(left, poll_seconds))
                seen, version = version, await self._database.foreign_version()
                if version != seen:
                    news = waited - finished.keys()
                    poll_seconds = SHORTEST_POLL_SECONDS
                else:
                    poll_seconds = min(poll_seconds * 1.5, LONGEST_POLL_SECONDS)
                if news:
                    finished.update({rollout.rollout_id: rollout for rollout in await self._finished(list(news))})
                else:
                    # If every worker has died there is nobody else to run it, and this call would wait for ever.
                    await self._watch()
        return [finished[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in finished]

    async def _finished(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        return await self._watched_read(lambda tx: queries.find_finished(tx, rollout_ids))

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        text = resources_json(resources)
        return await self._write(lambda tx: add_resources(tx, text))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        check_ids(resources_id)
        text = resources_json(resources)
        return await self._write(lambda tx: update_resources(tx, resources_id, text))

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
        check_ids(resources_id)
        check_texts(resources_id_contains)
        return await self._read(
            partial(
                queries.find_resources,
                resources_id=resources_id,
                resources_id_contains=resources_id_contains,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        found = await self.query_resources(resources_id=resources_id)
        return found[0] if found else None

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read(queries.find_latest_resources)

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        check_ids(worker_id)
        stats_json = None
        if not isinstance(heartbeat_stats, Unset):
            if not isinstance(heartbeat_stats, dict):
                raise ConfigError(
                    f"heartbeat_stats is {heartbeat_stats!r}; expected a dict, or nothing to keep the last"
                )
            stats_json = encode(heartbeat_stats, "heartbeat_stats")
        return await self._write(lambda tx: record_heartbeat(tx, worker_id, stats_json))

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
        check_statuses(status_in, WorkerStatus)
        check_texts(worker_id_contains)
        return await self._watched_read(
            partial(
                queries.find_workers,
                status_in=status_in,
                worker_id_contains=worker_id_contains,
                filter_logic=filter_logic,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        check_ids(worker_id)
        return await self._watched_read(lambda tx: queries.find_worker(tx, worker_id))

    # The watchdog

    def _scan_is_due(self, now: float) -> bool:
        # A clock that was set back must not put the watchdog to sleep.
        return self._last_scan is None or not 0 <= now - self._last_scan < self._scan_debounce_seconds

    def _scan(self, tx: Transaction) -> bool:
        """Run the watchdog if its time has come; whether there was anything to do."""
        if not self._scan_is_due(tx.now):
            return False
        num_seen = find_lost_attempts(tx, WATCHDOG_BATCH)
        if num_seen < WATCHDOG_BATCH:
            self._last_scan = tx.now
        return num_seen > 0

    async def _watch(self) -> None:
        """Run the watchdog if its time has come and a cheap look says that there is something to do."""
        now = self._clock()
        if not self._scan_is_due(now):
            return
        if await self._read(queries.any_due):
            await self._write(lambda tx: None)
        else:
            self._last_scan = now

    async def _watched_read(self, operation: Callable[[Transaction], Result]) -> Result:
        await self._watch()
        return await self._read(operation)

    async def _read(self, operation: Callable[[Transaction], Result]) -> Result:
        return await self._database.read(operation)

    async def _write(self, operation: Callable[[Transaction], Result]) -> Result:
        return await self._database.write(operation, watched=True)


def _span_query(
    *,
    filter_logic: FilterLogic = "and",
    limit: int = -1,
    offset: int = 0,
    sort_by: str | None = "sequence_id",
    sort_order: SortOrder = "asc",
    **filters: str | None,
) -> dict[str, Any]:
    """A query of spans as ``queries.find_spans`` takes it: filters for equality and for parts by field."""
    parts = {name.removesuffix("_contains"): text for name, text in filters.items() if name.endswith("_contains")}
    return {
        "exact": {name: text for name, text in filters.items() if not name.endswith("_contains")},
        "parts": parts,
        "filter_logic": filter_logic,
        "limit": limit,
        "offset": offset,
        "sort_by": sort_by,
        "sort_order": sort_order,
    }
