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

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollout_core.base.errors import Conflict
from rollout_core.store.changes import PAGE_CHANGES, Change, ChangeKind, ChangePage
from rollout_core.store.checks import check_id_list, refuse_missing, rollout_changes
from rollout_core.store.encoded_spans import EncodedSpan, encode_ends
from rollout_core.store.lifecycle import FINISHED
from rollout_core.store.operations import answer_of_fence
from rollout_core.store.queries import Queries
from rollout_core.store.resources import ClaimedTask, NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    AttemptUpdate,
    EnqueueRolloutRequest,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Unset,
    Worker,
    arguments_of,
    as_model,
    build,
    enqueue_request,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from opentelemetry.sdk.trace import ReadableSpan


WATCH_SECONDS = 10.0
"""How long a watch waits for changes in one call."""

AttemptEnd = tuple[Span | EncodedSpan, AttemptUpdate]
"""The last span of an attempt, and how the attempt ends."""


class LightningStore(Queries):
    """Rollouts, their attempts and spans, the queue, versioned resources and workers.

    A store of your own overrides what it can do. Of a batch form and its single form one will do: each is made of the
    other by default, though a batch of single forms is not atomic. What a store leaves out raises NotImplementedError.
    """

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

    async def close(self) -> None:
        """Release what the store holds. Everything acknowledged stays stored. Harmless when repeated."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Store rollouts in ``queuing`` at the tail of the queue, and return them in the order of requests.

        Without ``rollout_id`` a request gets a fresh id that starts with ``ro-``. With one, enqueueing is idempotent:
        if the rollout exists it is returned as it is now, and neither queued again nor changed. ``resources_id``
        defaults to the latest snapshot; an unknown one is accepted. Config and metadata are copied; metadata defaults
        to ``{}``.

        Raises Conflict if a known ``rollout_id`` comes with another input, ConfigError if a value is not JSON (NaN and
        infinities included). Then nothing is queued.
        """
        self._needs("enqueue_rollout", "enqueue_many_rollouts")
        requests = [as_model(EnqueueRolloutRequest, request) for request in rollouts]
        return [await self.enqueue_rollout(**arguments_of(self.enqueue_rollout, request)) for request in requests]

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
        self._needs("enqueue_many_rollouts", "enqueue_rollout")
        request = enqueue_request(input, mode, resources_id, config, metadata, rollout_id)
        return (await self.enqueue_many_rollouts([request]))[0]

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Claim up to ``limit`` queued rollouts, first in, first out, each with a fresh attempt in ``preparing``.

        Does not wait: returns an empty list if nothing is queued or ``limit`` is not positive. A worker that is named
        becomes busy with the last of them, or idle if there was none.
        """
        self._needs("dequeue_rollout", "dequeue_many_rollouts")
        worker = {} if worker_id is None else {"worker_id": worker_id}
        claimed: list[AttemptedRollout] = []
        while len(claimed) < limit and (rollout := await self.dequeue_rollout(**worker)) is not None:
            claimed.append(rollout)
        return claimed

    async def claim_rollouts(
        self, claim_id: str, *, limit: int = 1, worker_id: str | None = None, repeated: bool = False
    ) -> Sequence[AttemptedRollout]:
        """``dequeue_many_rollouts`` for callers that may lose the answer and ask again, such as HTTP clients.

        ``repeated`` says that this ``claim_id`` was sent before. If that call did claim rollouts, those that are still
        in ``preparing`` under it are returned, and no more are claimed. A store whose data end with its process need
        not remember claims: the server in front of it remembers the last ones.
        """
        return await self.dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    async def claim_task(
        self, claim_id: str, *, worker_id: str | None = None, repeated: bool = False
    ) -> ClaimedTask | None:
        """``claim_rollouts`` of one, with the resources it names, or the latest ones; None if nothing is queued."""
        if not (claimed := await self.claim_rollouts(claim_id, worker_id=worker_id, repeated=repeated)):
            return None
        name = claimed[0].resources_id
        try:
            get = self.get_latest_resources() if name is None else self.get_resources_by_id(name)
            return ClaimedTask(claimed[0], await get)
        except Exception:  # noqa: BLE001 - the claim must not be lost with them; who asks again sees why
            return ClaimedTask(claimed[0], None)
        except BaseException:  # cancelled: nobody will have it
            await asyncio.shield(self.release_rollouts(claimed))
            raise

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Give back claims that nobody took up, such as those of a cancelled dequeue.

        A rollout that has moved on since is left alone. The attempts of the others are taken back as if they had not
        been, and the rollouts put at the head of the queue; by default they are queued again at the tail.

        Raises NotFound, and releases none, if a rollout is unknown.
        """
        claims = [as_model(AttemptedRollout, rollout) for rollout in claimed]
        check_id_list([rollout.rollout_id for rollout in claims])
        found = {claim.rollout_id: await self.get_rollout_by_id(claim.rollout_id) for claim in claims}
        refuse_missing(found, {rollout_id for rollout_id, rollout in found.items() if rollout is not None})
        for claim in claims:
            if found[claim.rollout_id] == claim:
                await self.update_rollout(claim.rollout_id, status="requeuing")

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Claim the oldest queued rollout, or None. See ``dequeue_many_rollouts``."""
        self._needs("dequeue_many_rollouts", "dequeue_rollout")
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

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
        self._needs("start_many_rollouts", "start_rollout")
        request = enqueue_request(input, mode, resources_id, config, metadata)
        [rollout] = await self.start_many_rollouts([request], worker_id=worker_id)
        assert rollout is not None, "its id is new"
        return rollout

    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        """Start the first attempt of each of these rollouts, in ``preparing``, for the worker; unknown ones are stored,
        and never are in the queue.

        None stands in the place of a rollout that has had an attempt, be it of this call or of one at the same time;
        that attempt continues. Raises as ``enqueue_many_rollouts``. By default those with given ids are queued for a
        moment.
        """
        self._needs("start_rollout", "start_many_rollouts")
        started: list[AttemptedRollout | None] = []
        for given in rollouts:
            request = as_model(EnqueueRolloutRequest, given)
            if request.rollout_id is None:
                started.append(
                    await self.start_rollout(**arguments_of(self.start_rollout, request), worker_id=worker_id)
                )
            else:
                rollout = await self.enqueue_rollout(**arguments_of(self.enqueue_rollout, request))
                had_attempt = isinstance(rollout, AttemptedRollout)
                started.append(None if had_attempt else await self.start_attempt(rollout.rollout_id, worker_id))
        return started

    async def start_first_attempts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[Attempt | None]:
        """``start_many_rollouts`` for callers that know the rollouts themselves: their attempts alone."""
        started = await self.start_many_rollouts(rollouts, worker_id=worker_id)
        return [None if rollout is None else rollout.attempt for rollout in started]

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Start a new attempt of each of these rollouts, in any status, and return them in the order of ids.

        The new attempt supersedes earlier ones and is not bound by ``max_attempts``. A queued rollout leaves the queue.
        An id given twice gets one attempt. Raises NotFound, and starts none, if a rollout is unknown.
        """
        self._needs("start_attempt", "start_many_attempts")
        started = {
            rollout_id: await self.start_attempt(rollout_id, worker_id) for rollout_id in dict.fromkeys(rollout_ids)
        }
        return [started[rollout_id] for rollout_id in rollout_ids]

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start a new attempt of one rollout, see ``start_many_attempts``."""
        self._needs("start_many_attempts", "start_attempt")
        return (await self.start_many_attempts([rollout_id], worker_id=worker_id))[0]

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
        """Replace the given fields of a rollout and return it. Metadata is replaced, not merged.

        A terminal ``status`` sets ``end_time`` and wakes waiters. ``queuing`` and ``requeuing`` put the rollout at the
        tail of the queue unless it is queued already, also one that was finished; any other status takes it out.

        Raises NotFound for an unknown rollout, ConfigError for a value that is not allowed (``status=None`` and
        ``config=None`` among them).
        """
        changes = rollout_changes(
            rollout_id,
            input=input,
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=metadata,
        )
        return await self.change_rollout(rollout_id, changes)

    async def change_rollout(self, rollout_id: str, changes: dict[str, Any]) -> Rollout:
        """What ``update_rollout`` asks for: the new values of some fields, which are checked."""
        raise self._lacks("update_rollout")

    async def cancel_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        """Cancel those of these rollouts that have not finished, and return each as it is then, in the order of ids.

        A finished rollout keeps its status. The attempt under way of a cancelled one ends as ``failed`` at the same
        moment, so what its worker reports later in a fenced update is refused, also after the rollout was queued again.

        Raises NotFound, and cancels none, if a rollout is unknown. By default a status is looked at just before it is
        changed, not at the same moment, and attempts are left as they are.
        """
        self._needs("update_rollout", "cancel_rollouts")
        found = {rollout.rollout_id: rollout for rollout in await self.query_rollouts(rollout_id_in=rollout_ids)}
        refuse_missing(rollout_ids, found)
        for rollout_id, rollout in found.items():
            if rollout.status not in FINISHED:
                found[rollout_id] = await self.update_rollout(rollout_id, status="cancelled")
        return [found[rollout_id] for rollout_id in rollout_ids]

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

        Raises NotFound, and applies none, if a rollout or attempt is unknown. By default a lease is looked at just
        before the update, not at the same moment.
        """
        self._needs("update_attempt", "update_many_attempts")
        results: list[Attempt | Conflict] = []
        for given in updates:
            update = as_model(AttemptUpdate, given)
            held = await self.get_rollout_by_id(update.rollout_id) if fenced else None
            if isinstance(held, AttemptedRollout):
                answer = answer_of_fence(update, held.attempt, held.status)
                if answer is not None:
                    results.append(answer)
                    continue
            changes = {name: value for name, value in update.__dict__.items() if not isinstance(value, Unset)}
            results.append(await self.update_attempt(**changes))
        return results

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
        """Update one attempt, see ``update_many_attempts``; a refused fenced update raises the Conflict. The worker id
        ``""`` takes the attempt from its worker, whose status is unknown from then on."""
        self._needs("update_many_attempts", "update_attempt")
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

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans and return those that were new, in order; a duplicate is left out.

        Two spans are the same if rollout, attempt and span id agree. Each new span is a heartbeat of its attempt: one
        in ``preparing`` or ``unresponsive`` runs again (not an older attempt of a finished rollout), and so does its
        rollout if it is the latest attempt and the rollout is not finished. An explicit ``sequence_id`` raises the
        rollout's counter to at least that value.

        Raises NotFound if a rollout or attempt is unknown, ConfigError if a value is not JSON. Then none is stored.
        """
        self._needs("add_span", "add_many_spans")
        added = [await self.add_span(as_model(Span, span)) for span in spans]
        return [span for span in added if span is not None]

    async def add_encoded_spans(self, spans: Sequence[EncodedSpan]) -> Sequence[bool]:
        """``add_many_spans`` of spans that were checked and encoded; for each, whether it was new.

        A span whose ``sequence_id`` is None gets the next one of its rollout. A store that keeps spans encoded, and
        a server that only passes them on, have no need of models here.
        """
        fields = [span.fields() for span in spans]
        if unnumbered := [span for span in fields if span["sequence_id"] is None]:
            pairs = [(span["rollout_id"], span["attempt_id"]) for span in unnumbered]
            for span, number in zip(unnumbered, await self.get_many_span_sequence_ids(pairs), strict=True):
                span["sequence_id"] = number
        added = await self.add_many_spans([Span.model_validate(span) for span in fields])
        # Those that were added are in order, so both lists can be walked together.
        left = [(span.rollout_id, span.attempt_id, span.span_id) for span in reversed(added)]
        is_new: list[bool] = []
        for span in spans:
            is_new.append(bool(left) and left[-1] == span[:3])
            if is_new[-1]:
                left.pop()
        return is_new

    async def end_attempts(self, ends: Sequence[AttemptEnd]) -> Sequence[Attempt | Conflict]:
        """Store a last span of each attempt, see ``add_encoded_spans``, and apply its update, fenced, see
        ``update_many_attempts``, whose results these are.

        A span with the ``sequence_id`` 0 or None gets the next one of its rollout. The span of an attempt whose update
        is refused is stored all the same. Spans and updates are two operations where a store has no better: then an
        update may raise when the spans are stored.

        Raises ConfigError where a span is of another attempt than its update.
        """
        spans, updates = encode_ends(ends)  # both are checked before a span is stored
        await self.add_encoded_spans(spans)
        return await self.update_many_attempts(updates, fenced=True)

    async def add_span(self, span: Span) -> Span | None:
        """Store one span, see ``add_many_spans``; None if it is a duplicate."""
        self._needs("add_many_spans", "add_span")
        added = await self.add_many_spans([span])
        return added[0] if added else None

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert and store a span of the OpenTelemetry SDK; without a ``sequence_id`` it gets the next one."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """The next sequence id for each (rollout, attempt) pair, in the order of pairs.

        There is one counter for each rollout, so the numbers of an attempt strictly increase. The attempt need not
        exist yet. Raises NotFound for an unknown rollout, ConfigError if a span has the largest number there is.
        """
        self._needs("get_next_span_sequence_id", "get_many_span_sequence_ids")
        return [await self.get_next_span_sequence_id(*pair) for pair in rollout_attempt_ids]

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """The next sequence id of one rollout, see ``get_many_span_sequence_ids``."""
        self._needs("get_many_span_sequence_ids", "get_next_span_sequence_id")
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    # Waiting

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until all of these rollouts are finished or ``timeout`` seconds have passed; those that are finished.

        A timeout of 0 or less looks once; None waits as long as it takes. Unknown ids are not waited for.
        """
        raise self._lacks("wait_for_rollouts")

    async def wait_for_work(self, timeout: float) -> bool:
        """Wait until a rollout is queued, or for up to ``timeout`` seconds; whether one may be, though others may claim
        it first. No more are woken than there is work for. A store that cannot notify waits all the time."""
        await asyncio.sleep(timeout)
        return False

    async def wait_for_changes(
        self,
        after: str | None = None,
        *,
        kinds: Sequence[ChangeKind] | None = None,
        limit: int = PAGE_CHANGES,
        timeout: float = 0.0,
    ) -> ChangePage:
        """Changes of these kinds (None: of all) that were committed after the position ``after`` (None: now), oldest
        first, about ``limit`` at most; where there are none, wait for some for up to ``timeout`` seconds.

        A page leads to the next one by its position. Heartbeats and spans are no changes, unless a status follows from
        them. What a store shares with other processes, such as a database, shows their changes too.

        Raises ConfigError for a position or kind that is none, and NotFound where some changes after ``after`` are not
        kept any more: a store keeps at least those of its last 20,000 writes.
        """
        raise self._lacks("wait_for_changes")

    async def watch(
        self, kinds: Sequence[ChangeKind] | None = None, *, after: str | None = None
    ) -> AsyncIterator[Change]:
        """Changes of these kinds as they are committed, without end: those after the position ``after``, such as the id
        of the last one seen, or those from the moment at which the first is asked for.

        Nothing waits for who is slow: changes are read when they are asked for. Raises as `wait_for_changes`, so also
        NotFound where it has fallen behind all that the store keeps.
        """
        position = after if after is not None else (await self.wait_for_changes()).position
        while True:
            page = await self.wait_for_changes(position, kinds=kinds, timeout=WATCH_SECONDS)
            for change in page.items:
                yield change
            position = page.position

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Store a snapshot under a fresh id that starts with ``rs-``. It is the latest now."""
        return await self.update_resources(f"rs-{secrets.token_hex(6)}", resources)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Replace a snapshot, raising its version, or create it with version 1. It is the latest now."""
        raise self._lacks("update_resources")

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The snapshot that was added or updated last; None if there is none."""
        raise self._lacks("get_latest_resources")

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        """Record a heartbeat of a worker, with new statistics if given; an unknown worker is created.

        Status and assignment are not touched: they follow from dequeues and attempts.
        """
        raise self._lacks("update_worker")

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """One worker; None if it is unknown."""
        raise self._lacks("get_worker_by_id")

    # What a store leaves out

    def _needs(self, other: str, asked: str) -> None:
        """Raise NotImplementedError unless this store defines ``other``, of which ``asked`` is made."""
        if getattr(type(self), other) is getattr(LightningStore, other):
            raise self._lacks(asked, other)
