"""The LightningStore in a SQL database: durable, shared by processes, and as quick with millions of rows as with none.

What is acknowledged is on disk. Values are checked and encoded here; ``queue``, ``attempts`` and ``queries`` hold what
runs in the database, a SQLite file or a PostgreSQL server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_core.base.errors import Conflict, Recoverable
from rollout_core.base.ids import ContentId, named_ids
from rollout_core.base.loops import Bell, Waiters
from rollout_core.store.changes import PAGE_CHANGES, ChangeKind, ChangePage, Place, Watch, check_kinds
from rollout_core.store.checks import (
    check_id_list,
    check_ids,
    check_texts,
    kept_updates,
    resources_json,
    stats_json,
)
from rollout_core.store.codec import encode
from rollout_core.store.contract import AttemptEnd, LightningStore
from rollout_core.store.encoded_spans import EncodedSpan, encode_ends, encode_span, span_json
from rollout_core.store.operations import new_rollouts
from rollout_core.store.queries import (
    AttemptsQuery,
    ResourcesQuery,
    RolloutsBrowse,
    RolloutsQuery,
    SpansQuery,
    WorkersQuery,
)
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.sql import attempts, sql_queries as queries, sql_queue as queue
from rollout_core.store.sql.by_url import open_database
from rollout_core.store.sql.change_rows import find_changes, last_place
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.group_commit import Hooks
from rollout_core.store.sql.row_leases import LeaseBook
from rollout_core.store.stored_spans import page_json, span_model
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    BrowsedPage,
    EnqueueRolloutRequest,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    Unset,
    Worker,
    as_model,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Result = TypeVar("Result")

WATCHDOG_BATCH = 1_000
"""Most overdue attempts that one run of the watchdog handles; the next call handles the others."""
SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""How often a waiting call looks for changes by other processes; less and less often while there are none."""
WATCH_SECONDS = 2.0
"""How long a read waits for the watchdog, which has to wait for others who write."""
LOOK_SECONDS = 30.0
"""How long a waiting call relies on news: some may have been lost, with a connection or with the database's machine."""


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = {
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
        self._bell = Bell()
        self._news = Bell()
        hooks = Hooks(clock, self._scan, self._waiters.wake, self._bell.ring, self._news.ring_all)
        self._database = open_database(url, hooks, busy_timeout_seconds=busy_timeout_seconds)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        scan_debounce_seconds: float = 10.0,
        busy_timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> SqlLightningStore:
        """Open the store at ``sqlite:///path/to/file.db`` (``sqlite:////...`` is absolute) or
        ``postgresql://user:password@host/database``, creating its tables, or bringing them to the present, if need be.

        The file is created too, the PostgreSQL database must exist; ``?search_path=NAME`` names a schema of it.

        ``scan_debounce_seconds`` is the least time between two runs of the watchdog (0: it always runs),
        ``busy_timeout_seconds`` how long to wait for another process to finish writing, and ``clock`` the source of
        time, in seconds since the epoch.

        Raises ConfigError for another kind of URL, and for a database that is not a store, is damaged, cannot be
        written or was written by a newer version; Recoverable for a server that cannot be reached.
        """
        return cls(
            url,
            scan_debounce_seconds=scan_debounce_seconds,
            busy_timeout_seconds=busy_timeout_seconds,
            clock=clock,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._settings), (self.url,)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Safe for tasks and threads; all copies see the one database."""
        return LightningStoreCapabilities(thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=False)

    @property
    def leases(self) -> LeaseBook:
        """Of work that several machines could do."""
        return LeaseBook(self._database)

    async def statistics(self) -> LightningStoreStatistics:
        """Counts of everything stored."""
        counts = await self._read(queries.count_all)
        return {"name": type(self).__name__, "uptime": self._clock() - self._opened, **counts}

    async def close(self) -> None:
        """Finish pending writes and close the database. Later calls raise Fatal."""
        await asyncio.get_running_loop().run_in_executor(None, self._database.close)

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        return await self._database.write_batch(queue.enqueue, new_rollouts(rollouts))

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        return await self._claim(limit, worker_id)

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        if repeated:
            found = await self._write(lambda tx: queue.find_claimed(tx, claim_id, limit))
            if found:
                return found
            claim_id = queue.repeat_of(claim_id)
            if await self._read(lambda tx: queue.has_claimed(tx, claim_id, limit)):
                return await self._claim(limit, worker_id)
        return await self._claim(limit, worker_id, claim_id)

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        claims = [as_model(AttemptedRollout, rollout) for rollout in claimed]
        check_id_list([rollout.rollout_id for rollout in claims])
        await self._write(lambda tx: queue.release(tx, claims))

    async def _claim(self, limit: int, worker_id: str | None, claim_id: str | None = None) -> list[AttemptedRollout]:
        check_ids(worker_id)
        if limit <= 0:
            return []
        demand = queue.Demand(limit, worker_id, claim_id)
        [claims] = await self._database.write_batch(queue.claim, [demand], undo=queue.unclaim)
        return [claim.rollout for claim in claims]

    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        return [started and started.rollout() for started in await self._start_new(rollouts, worker_id)]

    async def start_first_attempts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[Attempt | None]:
        return [started and started.attempt for started in await self._start_new(rollouts, worker_id)]

    async def _start_new(
        self, rollouts: Sequence[EnqueueRolloutRequest], worker_id: str | None
    ) -> Sequence[queue.Started | None]:
        check_ids(worker_id)
        requests = [(request, worker_id) for request in new_rollouts(rollouts)]
        return await self._database.write_batch(queue.start_new, requests)

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        check_id_list(rollout_ids)
        check_ids(worker_id)
        return await self._write(lambda tx: queue.start(tx, rollout_ids, worker_id))

    # Updates

    async def change_rollout(self, rollout_id: str, changes: dict[str, Any]) -> Rollout:
        for name in changes.keys() & {"input", "metadata"}:
            if name == "input" or changes[name] is not None:
                changes[name] = encode(changes[name], name)
        return await self._write(lambda tx: attempts.update_rollout(tx, rollout_id, changes))

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        check_id_list(rollout_ids)
        return await self._write(lambda tx: attempts.cancel_rollouts(tx, rollout_ids))

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        kept = [(update, fenced) for update in kept_updates(updates)]
        return await self._database.write_batch(attempts.update_attempts, kept)

    async def end_attempts(self, ends: Sequence[AttemptEnd]) -> Sequence[Attempt | Conflict]:
        spans, updates = encode_ends(ends)
        return await self._database.write_batch(attempts.end_attempts, list(zip(spans, updates, strict=True)))

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        models = [as_model(Span, span) for span in spans]
        is_new = await self.add_encoded_spans([encode_span(span) for span in models])
        return [span for span, new in zip(models, is_new, strict=True) if new]

    async def add_encoded_spans(self, spans: Sequence[EncodedSpan]) -> Sequence[bool]:
        return await self._database.write_batch(attempts.add_spans, spans, watched=False)

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        encoded = encode_span(span)

        def add(tx: Transaction) -> bool:
            if sequence_id is None:
                span.sequence_id = attempts.number_spans(tx, [rollout_id])[0]
            return attempts.add_spans(tx, [encoded._replace(sequence_id=span.sequence_id)])[0]

        return span if await self._database.write(add, watched=False) else None

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        check_ids(*[given_id for pair in rollout_attempt_ids for given_id in pair])
        rollout_ids = [rollout_id for rollout_id, _ in rollout_attempt_ids]
        return await self._database.write_batch(attempts.number_spans, rollout_ids, watched=False)

    # Queries

    async def find_rollouts(self, query: RolloutsQuery) -> PaginatedResult[Rollout]:
        return await self._watched_read(lambda tx: queries.find_rollouts(tx, query))

    async def find_browsed(self, query: RolloutsBrowse) -> BrowsedPage[Rollout]:
        return await self._watched_read(lambda tx: queries.browse_rollouts(tx, query))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        check_ids(rollout_id)
        return await self._watched_read(lambda tx: queries.find_rollout(tx, rollout_id))

    async def find_attempts(self, query: AttemptsQuery) -> PaginatedResult[Attempt]:
        return await self._watched_read(lambda tx: queries.find_attempts(tx, query))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        check_ids(rollout_id)
        return await self._watched_read(lambda tx: queries.find_latest_attempt(tx, rollout_id))

    async def find_spans(self, query: SpansQuery) -> PaginatedResult[Span]:
        return await self._span_page(query, span_model)

    async def query_spans_json(self, rollout_id: str, attempt_id: str | None = None, **query: Any) -> bytes:
        page = await self._span_page(SpansQuery(rollout_id, attempt_id, **query).checked(), span_json)
        return page_json(page, page.items)

    async def _span_page(
        self, query: SpansQuery, model: Callable[[str, Sequence[Any]], Result]
    ) -> PaginatedResult[Result]:
        """A page of spans, each made by ``model`` of the rollout's id and a row."""
        return await self._watched_read(lambda tx: queries.find_spans(tx, query, model))

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        check_id_list(rollout_ids)
        check_texts(name)
        return await self._watched_read(lambda tx: queries.find_many_spans(tx, rollout_ids, name, model=span_model))

    async def ids_in_spans(self, names: Sequence[str], *, since: float) -> set[ContentId]:
        """Content ids in the spans of these names, of rollouts that have not ended or have ended ``since`` that time,
        in seconds since the epoch: what has to stay where the spans lead to it."""
        found: set[ContentId] = set()
        after: int | None = 0
        while after is not None:
            page = partial(queries.find_span_bodies, after=after, since=since, names=names)
            bodies, after = await self._read(page)
            found.update(*(named_ids([body.encode()]) for body in bodies))
        return found

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        check_id_list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._waiters.waiting(rollout_ids) as waiter:
            version = await self._database.foreign_version()
            finished = {rollout.rollout_id: rollout for rollout in await self._finished(rollout_ids)}
            waited = await self._read(lambda tx: queries.known_ids(tx, rollout_ids))
            poll_seconds, looked = SHORTEST_POLL_SECONDS, time.monotonic()
            while open_ids := waited - finished.keys():
                left = LONGEST_POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                news = await waiter.next_finished(open_ids, min(left, poll_seconds))
                seen, version = version, await self._database.foreign_version()
                if version != seen or time.monotonic() - looked >= LOOK_SECONDS:
                    news, looked = open_ids, time.monotonic()
                is_new = version != seen
                poll_seconds = SHORTEST_POLL_SECONDS if is_new else min(poll_seconds * 1.5, LONGEST_POLL_SECONDS)
                if news:
                    finished.update({rollout.rollout_id: rollout for rollout in await self._finished(list(news))})
                else:
                    # If every worker has died there is nobody else to run it, and this call would wait for ever.
                    await self._watch()
        return [finished[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in finished]

    async def wait_for_work(self, timeout: float) -> bool:
        look = partial(self._watched_read, queries.is_work_queued)
        return await self._bell.wait(look, timeout, SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS)

    async def wait_for_changes(
        self,
        after: str | None = None,
        *,
        kinds: Sequence[ChangeKind] | None = None,
        limit: int = PAGE_CHANGES,
        timeout: float = 0.0,
    ) -> ChangePage:
        check_kinds(kinds)
        place = Place.of(after) if after is not None else await self._read(last_place)
        watch = Watch(place, lambda place: self._watched_read(lambda tx: find_changes(tx, place, kinds, limit)))
        return await watch.wait(self._news, timeout, SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS)

    async def _finished(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        return await self._watched_read(lambda tx: queries.find_finished(tx, rollout_ids))

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        text = resources_json(resources)
        return await self._write(lambda tx: queue.add_resources(tx, text))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        check_ids(resources_id)
        text = resources_json(resources)
        return await self._write(lambda tx: queue.update_resources(tx, resources_id, text))

    async def find_resources(self, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
        return await self._read(lambda tx: queries.find_resources(tx, query))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read(queries.find_latest_resources)

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        check_ids(worker_id)
        stats = stats_json(heartbeat_stats)
        return await self._write(lambda tx: queue.record_heartbeat(tx, worker_id, stats))

    async def find_workers(self, query: WorkersQuery) -> PaginatedResult[Worker]:
        return await self._watched_read(lambda tx: queries.find_workers(tx, query))

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
        num_seen = attempts.find_lost_attempts(tx, WATCHDOG_BATCH)
        if num_seen < WATCHDOG_BATCH:
            self._last_scan = tx.now
        return num_seen > 0

    async def _watch(self) -> None:
        """Run the watchdog if its time has come and a cheap look says that there is something to do.

        Where it cannot write now, as on a full disk, the caller reads what the last run has left.
        """
        if not self._scan_is_due(self._clock()):
            return
        if await self._read(queries.any_due):
            with contextlib.suppress(Recoverable, TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    return await self._write(lambda tx: None)
        self._last_scan = self._clock()  # after it has waited, or the next read would do so, too

    async def _watched_read(self, operation: Callable[[Transaction], Result]) -> Result:
        await self._watch()
        return await self._read(operation)

    async def _read(self, operation: Callable[[Transaction], Result]) -> Result:
        return await self._database.read(operation)

    async def _write(self, operation: Callable[[Transaction], Result]) -> Result:
        return await self._database.write(operation, watched=True)
