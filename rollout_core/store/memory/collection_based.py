"""The LightningStore over any ``LightningCollections``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollout_core.base.loops import Bell, Waiters
from rollout_core.store.changes import PAGE_CHANGES, ChangeKind, ChangeLog, ChangePage, Place, Watch, check_kinds
from rollout_core.store.checks import (
    check_id_list,
    check_ids,
    check_texts,
    kept_updates,
    resources_json,
    stats_json,
)
from rollout_core.store.codec import decode
from rollout_core.store.contract import AttemptEnd, LightningStore
from rollout_core.store.encoded_spans import EncodedSpan, encode_ends, encode_span
from rollout_core.store.lifecycle import RUNNING, is_watched, lost_status
from rollout_core.store.memory.collection import LightningCollections, filter_of, sort_of, span_sort
from rollout_core.store.memory.work import (
    CollectionWork,
    kept_config,
    kept_json,
    known_and_finished,
    latest_attempts,
    number_spans,
    shown_attempted,
    shown_page,
    shown_rollout,
    shown_worker,
)
from rollout_core.store.operations import (
    Loaded,
    Taker,
    apply_updates,
    begin_attempts,
    copy_attempt,
    expire,
    new_rollouts,
    note_empty_dequeue,
    note_spans,
    withdraw,
)
from rollout_core.store.queries import AttemptsQuery, ResourcesQuery, RolloutsQuery, SpansQuery, WorkersQuery
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.stored_spans import copy_stored
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
    Unset,
    Worker,
    as_model,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from rollout_core.base.errors import Conflict

T_collections = TypeVar("T_collections", bound=LightningCollections)
Result = TypeVar("Result")

WATCHDOG_BATCH = 1_000
"""Most overdue attempts that one run of the watchdog handles; the next call handles the others."""
POLL_SECONDS = 0.5
"""How often a waiting call runs the watchdog, and looks for what others who share the collections have finished."""


class CollectionBasedLightningStore(LightningStore, Generic[T_collections]):
    """A LightningStore over ``collections``, which decide what it can do.

    ``scan_debounce_seconds`` is the least time between two runs of the watchdog (0: it always runs), ``clock`` the
    source of time, in seconds since the epoch. A subclass may override ``get_lost_rollouts``, ``on_rollout_update`` and
    ``on_spans_added``; they are called within an atomic block and must not open another.
    """

    def __init__(
        self,
        collections: T_collections,
        *,
        scan_debounce_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.collections = collections
        self._clock = clock
        self._scan_debounce_seconds = scan_debounce_seconds
        self._last_scan: float | None = None
        self._opened = clock()
        self._waiters = Waiters()
        self._bell = Bell()
        self._news = Bell()
        self._changes = ChangeLog()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """None that are known: they depend on the collections."""
        return LightningStoreCapabilities(thread_safe=False, async_safe=False, zero_copy=False, otlp_traces=False)

    async def statistics(self) -> LightningStoreStatistics:
        """Counts of everything stored."""
        async with self.collections.atomic() as collections:
            return {
                "name": type(self).__name__,
                "uptime": self._clock() - self._opened,
                "total_rollouts": await collections.rollouts.size(),
                "total_attempts": await collections.attempts.size(),
                "total_spans": await collections.spans.size(),
                "total_resources": await collections.resources.size(),
                "total_workers": await collections.workers.size(),
            }

    # What a subclass may do better

    async def get_running_rollouts(self, collections: T_collections) -> list[AttemptedRollout]:
        """Rollouts that somebody works on, with their latest attempts."""
        running = (await collections.rollouts.query({"status": {"within": sorted(RUNNING)}})).items
        attempts = await latest_attempts(collections, [rollout.rollout_id for rollout in running])
        found = [shown_rollout(rollout, attempts.get(rollout.rollout_id)) for rollout in running]
        return [rollout for rollout in found if isinstance(rollout, AttemptedRollout)]

    async def get_lost_rollouts(self, collections: T_collections, now: float, limit: int) -> list[str]:
        """Up to ``limit`` rollouts whose latest attempt may be lost by ``now``; all that are, but for the limit."""
        return [
            rollout.rollout_id
            for rollout in await self.get_running_rollouts(collections)
            if is_watched(rollout.status, rollout.attempt)
            and lost_status(rollout.config, rollout.attempt.start_time, rollout.attempt.last_heartbeat_time, now)
        ][:limit]

    async def on_rollout_update(self, rollout: Rollout) -> None:
        """Called with each rollout that was made, or whose status, config or latest attempt has changed."""

    async def on_spans_added(self, collections: T_collections, spans: Sequence[Span]) -> None:
        """Called with spans that were stored."""

    async def check_spans_kept(self, rollout_ids: Sequence[str]) -> None:
        """Called before spans of these rollouts are read."""

    # Atomic operations

    async def _do(self, operation: Callable[[CollectionWork], Awaitable[Result]], *, watched: bool = True) -> Result:
        """Run an operation and save what it changed. A ``watched`` one comes after the watchdog, if that is due."""
        if watched:
            await self._watch()
        async with self.collections.atomic() as collections:
            work = CollectionWork(collections, self._clock())
            result = await operation(work)
            await self._save(work)
            if work.new_spans:
                await self.on_spans_added(collections, work.new_spans)
        self._wake(work)
        return result

    async def _save(self, work: CollectionWork) -> None:
        await work.save(self._tell)
        if entries := work.entries():
            self._changes.add(entries, work.now)

    def _wake(self, work: CollectionWork) -> None:
        if work.finished:
            self._waiters.wake(work.finished)
        if work.num_queued:
            self._bell.ring(work.num_queued)
        if work.moved or work.before or work.changed_resources:
            self._news.ring_all()

    async def _tell(self, loaded: Loaded[Rollout]) -> None:
        # A copy for nobody would cost each call a tenth of its time.
        if type(self).on_rollout_update is not CollectionBasedLightningStore.on_rollout_update:
            await self.on_rollout_update(shown_rollout(loaded.record, loaded.latest))

    async def _watch(self) -> None:
        now = self._clock()
        # A clock that was set back must not put the watchdog to sleep.
        if self._last_scan is not None and 0 <= now - self._last_scan < self._scan_debounce_seconds:
            return
        async with self.collections.atomic() as collections:
            lost = await self.get_lost_rollouts(collections, now, WATCHDOG_BATCH)
            if len(lost) < WATCHDOG_BATCH:
                self._last_scan = now
            if not lost:
                return
            work = CollectionWork(collections, now)
            # In the order of insertion: those that are queued again keep the order they were first queued in.
            found = await collections.rollouts.query({"rollout_id": {"within": lost}})
            await work.load([rollout.rollout_id for rollout in found.items])
            expire(work)
            await self._save(work)
        self._wake(work)

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        requests = new_rollouts(rollouts)
        found = await self._do(lambda work: work.enqueue(requests, "queuing"))
        return [shown_rollout(loaded.record, loaded.latest) for loaded in found]

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        check_ids(worker_id)
        if limit <= 0:
            return []

        async def claim(work: CollectionWork) -> list[AttemptedRollout]:
            waiting = await work.dequeue(limit)
            begin_attempts(work, waiting, [Taker(worker_id)] * len(waiting), dequeued=True)
            if worker_id is not None and not waiting:
                note_empty_dequeue(work, worker_id)
            return [shown_attempted(loaded) for loaded in waiting]

        return await self._do(claim)

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        claims = [as_model(AttemptedRollout, rollout) for rollout in claimed]
        check_id_list([rollout.rollout_id for rollout in claims])

        async def release(work: CollectionWork) -> None:
            await work.load([rollout.rollout_id for rollout in claims])
            released = withdraw(work, [(rollout, None) for rollout in claims])
            work.requeued = [loaded.record.rollout_id for loaded in released]

        await self._do(release)

    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        check_ids(worker_id)
        requests = new_rollouts(rollouts)

        async def start(work: CollectionWork) -> list[AttemptedRollout | None]:
            found = await work.enqueue(requests, "preparing")
            first = {loaded.record.rollout_id: loaded for loaded in found if loaded.latest is None}
            begin_attempts(work, list(first.values()), [Taker(worker_id)] * len(first))
            # Each is given away once, to the request that comes first.
            begun = [first.pop(loaded.record.rollout_id, None) for loaded in found]
            return [None if loaded is None else shown_attempted(loaded) for loaded in begun]

        return await self._do(start)

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        check_id_list(rollout_ids)
        check_ids(worker_id)

        async def start(work: CollectionWork) -> list[AttemptedRollout]:
            found = await work.load(rollout_ids)
            begin_attempts(work, found, [Taker(worker_id)] * len(found))
            return [shown_attempted(work.rollouts[rollout_id]) for rollout_id in rollout_ids]

        return await self._do(start)

    # Updates

    async def change_rollout(self, rollout_id: str, changes: dict[str, Any]) -> Rollout:
        for name in changes.keys() & {"input", "metadata"}:
            changes[name] = kept_json(changes[name], name)

        async def update(work: CollectionWork) -> Rollout:
            [loaded] = await work.load([rollout_id])
            for name, value in changes.items():
                if name == "config":
                    loaded.record.config = kept_config(value)
                elif name != "status":
                    setattr(loaded.record, name, value)
            if changes:
                work.before[rollout_id] = loaded.record.status
            if "status" in changes:
                work.set_status(loaded, changes["status"])
            if changes:
                work.note(loaded)
            return shown_rollout(loaded.record, loaded.latest)

        return await self._do(update)

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        check_id_list(rollout_ids)
        return await self._do(lambda work: work.cancel(rollout_ids))

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        kept = kept_updates(updates)  # also those which turn out to be refused

        async def update(work: CollectionWork) -> list[Attempt | Conflict]:
            await work.load([update.rollout_id for update in kept], [(one.rollout_id, one.attempt_id) for one in kept])
            return apply_updates(work, [(update, fenced) for update in kept])

        return await self._do(update)

    async def end_attempts(self, ends: Sequence[AttemptEnd]) -> Sequence[Attempt | Conflict]:
        spans, updates = encode_ends(ends)

        async def end(work: CollectionWork) -> list[Attempt | Conflict]:
            await self._add_spans(work, spans)
            return apply_updates(work, [(update, True) for update in updates])

        return await self._do(end)

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        models = [as_model(Span, span) for span in spans]
        is_new = await self.add_encoded_spans([encode_span(span) for span in models])
        return [span for span, new in zip(models, is_new, strict=True) if new]

    async def add_encoded_spans(self, spans: Sequence[EncodedSpan]) -> Sequence[bool]:
        return (await self._do(lambda work: self._add_spans(work, spans), watched=False))[0]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        encoded = encode_span(span)._replace(sequence_id=sequence_id)
        [is_new], [stored] = await self._do(lambda work: self._add_spans(work, [encoded]), watched=False)
        span.sequence_id = stored
        return span if is_new else None

    async def _add_spans(self, work: CollectionWork, encoded: Sequence[EncodedSpan]) -> tuple[list[bool], list[int]]:
        """Store spans; for each, whether it was new, and its number."""
        owners = dict.fromkeys(span[:2] for span in encoded)
        await work.load([rollout_id for rollout_id, _ in owners], owners)
        spans = await work.numbered(encoded)
        is_new = await work.store_spans(spans)
        new = [(work.rollouts[span.rollout_id], span.attempt_id) for span in work.new_spans]
        note_spans(work, [(loaded, loaded.attempt(attempt_id)) for loaded, attempt_id in new])
        return is_new, [span.sequence_id for span in spans]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        check_ids(*[given_id for pair in rollout_attempt_ids for given_id in pair])
        rollout_ids = [rollout_id for rollout_id, _ in rollout_attempt_ids]
        async with self.collections.atomic() as collections:
            return await number_spans(collections, rollout_ids)

    # Queries

    async def find_rollouts(self, query: RolloutsQuery) -> PaginatedResult[Rollout]:
        filter = filter_of(
            query.filter_logic,
            status={"within": query.status_in},
            rollout_id={"within": query.rollout_id_in, "contains": query.rollout_id_contains},
        )
        await self._watch()
        async with self.collections.atomic() as collections:
            page = await collections.rollouts.query(filter, sort_of(query), query.limit, query.offset)
            attempts = await latest_attempts(collections, [rollout.rollout_id for rollout in page.items])
            return shown_page(page, lambda rollout: shown_rollout(rollout, attempts.get(rollout.rollout_id)))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        check_ids(rollout_id)
        await self._watch()
        async with self.collections.atomic() as collections:
            found = await collections.rollouts.items_of([rollout_id])
            attempts = await latest_attempts(collections, [rollout_id])
            return shown_rollout(found[0], attempts.get(rollout_id)) if found else None

    async def find_attempts(self, query: AttemptsQuery) -> PaginatedResult[Attempt]:
        filter = {"rollout_id": {"exact": query.rollout_id}}
        page = await self._read(lambda found: found.attempts.query(filter, sort_of(query), query.limit, query.offset))
        return shown_page(page, copy_attempt)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        check_ids(rollout_id)
        await self._watch()
        async with self.collections.atomic() as collections:
            found = await latest_attempts(collections, [rollout_id])
        return copy_attempt(found[rollout_id]) if rollout_id in found else None

    async def find_spans(self, query: SpansQuery) -> PaginatedResult[Span]:
        await self._watch()
        async with self.collections.atomic() as collections:
            await self.check_spans_kept([query.rollout_id])
            scope: dict[str, Any] = {"rollout_id": {"exact": query.rollout_id}}
            attempt_id = query.attempt_id
            if attempt_id == "latest":
                latest = (await latest_attempts(collections, [query.rollout_id])).get(query.rollout_id)
                attempt_id = "" if latest is None else latest.attempt_id
            if attempt_id is not None:
                scope["attempt_id"] = {"exact": attempt_id}
            fields = {name: {"exact": text, "contains": query.parts[name]} for name, text in query.exact.items()}
            page = await collections.spans.query(
                {**filter_of(query.filter_logic, **fields), "_must": scope},
                span_sort(query.sort_by, query.sort_order),
                query.limit,
                query.offset,
            )
        return shown_page(page, copy_stored)

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        check_id_list(rollout_ids)
        check_texts(name)
        await self._watch()
        spans: list[Span] = []
        async with self.collections.atomic() as collections:
            await self.check_spans_kept(rollout_ids)
            latest = await latest_attempts(collections, rollout_ids)
            for rollout_id in dict.fromkeys(rollout_ids):
                if rollout_id in latest:
                    filter = filter_of(
                        "and",
                        rollout_id={"exact": rollout_id},
                        attempt_id={"exact": latest[rollout_id].attempt_id},
                        name={"exact": name},
                    )
                    spans += (await collections.spans.query(filter, span_sort("sequence_id", "asc"))).items
        return [copy_stored(span) for span in spans]

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for one rollout, see ``wait_for_rollouts``; None if it is not finished in time."""
        finished = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return finished[0] if finished else None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        check_id_list(rollout_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._waiters.waiting(rollout_ids) as waiter:
            waited, finished = await self._read(partial(known_and_finished, rollout_ids=rollout_ids))
            while open_ids := waited - finished.keys():
                left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                news = await waiter.next_finished(open_ids, min(left, POLL_SECONDS))
                # Without news it looks at all: others may share the collections, and if every worker has died there
                # is nobody else to run the watchdog.
                finished |= (await self._read(partial(known_and_finished, rollout_ids=list(news or open_ids))))[1]
        return [finished[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in finished]

    async def wait_for_work(self, timeout: float) -> bool:
        look = partial(self._read, lambda collections: collections.rollout_queue.size())
        return await self._bell.wait(look, timeout, POLL_SECONDS, POLL_SECONDS)

    async def wait_for_changes(
        self,
        after: str | None = None,
        *,
        kinds: Sequence[ChangeKind] | None = None,
        limit: int = PAGE_CHANGES,
        timeout: float = 0.0,
    ) -> ChangePage:
        """Wait as the contract says, for changes by this object; others who share the collections have their own."""
        check_kinds(kinds)

        async def look(place: Place) -> ChangePage:
            await self._watch()
            return self._changes.page(place, kinds, limit)

        watch = Watch(self._changes.now() if after is None else Place.of(after), look)
        return await watch.wait(self._news, timeout, POLL_SECONDS, POLL_SECONDS)

    async def _read(self, operation: Callable[[T_collections], Awaitable[Result]]) -> Result:
        """Run an operation that changes nothing, after the watchdog, if that is due."""
        await self._watch()
        async with self.collections.atomic() as collections:
            return await operation(collections)

    # Resources

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        check_ids(resources_id)
        kept = decode(resources_json(resources))
        update = await self._do(lambda work: work.put_resources(resources_id, kept))
        return update.model_copy(deep=True)

    async def find_resources(self, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
        filter = filter_of("and", resources_id={"exact": query.resources_id, "contains": query.resources_id_contains})
        async with self.collections.atomic() as collections:
            page = await collections.resources.query(filter, sort_of(query), query.limit, query.offset)
        return shown_page(page, lambda update: update.model_copy(deep=True))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        latest = await self._do(CollectionWork.latest_resources, watched=False)
        return None if latest is None else latest.model_copy(deep=True)

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        check_ids(worker_id)
        text = stats_json(heartbeat_stats)
        stats = None if text is None else decode(text)
        return shown_worker(await self._do(lambda work: work.put_heartbeat(worker_id, stats)))

    async def find_workers(self, query: WorkersQuery) -> PaginatedResult[Worker]:
        filter = filter_of(
            query.filter_logic, status={"within": query.status_in}, worker_id={"contains": query.worker_id_contains}
        )
        order = sort_of(query)
        page = await self._read(lambda found: found.workers.query(filter, order, query.limit, query.offset))
        return shown_page(page, shown_worker)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        check_ids(worker_id)
        workers = await self._read(lambda found: found.workers.items_of([worker_id]))
        return shown_worker(workers[0]) if workers else None
