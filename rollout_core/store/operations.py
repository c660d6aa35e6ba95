"""What calls do to rollouts, attempts and workers: the operations of every store, without any I/O.

A store loads what a call names into a ``Work``, has a function of this module change it by the rules of ``lifecycle``,
and saves what the ``Work`` holds as changed, all within one transaction. An operation that raises has saved nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rollout_core.base.errors import Conflict, NotFound
from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.changes import Entry, attempt_entry, rollout_entry
from rollout_core.store.checks import check_ids, same_json
from rollout_core.store.codec import encode, json_copy
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    AttemptUpdate,
    EnqueueRolloutRequest,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Unset,
    Worker,
    WorkerStatus,
    as_model,
)


class Record(Protocol):
    """A rollout as a store keeps it, a model or a row: what operations read and change of it."""

    rollout_id: str
    status: RolloutStatus
    end_time: float | None

    @property
    def config(self) -> RolloutConfig: ...


RecordT = TypeVar("RecordT", bound=Record)


@dataclass(slots=True, eq=False)
class Loaded(Generic[RecordT]):
    """A rollout that an operation may change, with its attempts."""

    record: RecordT
    attempt_count: int = 0
    """Attempts so far."""
    latest: Attempt | None = None
    """The last of them; None too if it is not under way and the operation has no need of it."""
    older: dict[str, Attempt] = field(default_factory=dict)
    """By id: those under way where the operation may end them, and those that it names."""
    left_queue: bool = False
    """Whether it lost its place in the queue; if it waits again, it is at the tail."""

    def attempt(self, attempt_id: str) -> Attempt:
        """One attempt. Raises NotFound if the rollout has none of this id."""
        if self.latest is not None and self.latest.attempt_id == attempt_id:
            return self.latest
        if attempt_id not in self.older:
            raise NotFound(f"rollout {self.record.rollout_id} has no attempt {attempt_id}")
        return self.older[attempt_id]


@dataclass(slots=True)
class WorkerChange:
    """What an operation makes of a worker, see ``change_worker``."""

    status: WorkerStatus = "idle"
    rollout_id: str | None = None
    """What it works on now."""
    attempt_id: str | None = None
    was_busy: bool = False
    """It took up an attempt."""
    was_freed: bool = False
    """It ended or lost an attempt, or asked for work and there was none."""
    dequeued: bool = False

    @property
    def found_nothing(self) -> bool:
        """Whether all that the worker did was to ask in vain. One that was idle already is so since before."""
        return self.dequeued and not self.was_busy


class Work(Generic[RecordT]):
    """What one operation has loaded, and what it has changed of it."""

    def __init__(self, now: float) -> None:
        self.now = now
        """The time of the operation, in seconds since the epoch."""
        self.rollouts: dict[str, Loaded[RecordT]] = {}
        self.changed: dict[str, Loaded[RecordT]] = {}
        """Rollouts whose status, end time, configuration or alarm has changed."""
        self.changed_attempts: dict[tuple[str, int], Attempt] = {}
        """Attempts that were stored before, by rollout and number."""
        self.new_attempts: list[Attempt] = []
        self.withdrawn: list[Attempt] = []
        """Attempts that are to be as if they had never been."""
        self.workers: dict[str, WorkerChange] = {}
        self.before: dict[str, RolloutStatus | None] = {}
        """Rollouts that those who watch hear of: their statuses before; None: that of a new one."""
        self.moved: dict[tuple[str, str], AttemptStatus | None] = {}
        """Attempts that they hear of, by rollout and id, and their new statuses; None: they were taken back."""
        self.finished: list[str] = []
        """Rollouts that reached a terminal status; those who wait for them are to be woken."""

    def note(self, loaded: Loaded[RecordT]) -> None:
        """This rollout was changed."""
        self.changed[loaded.record.rollout_id] = loaded

    def entries(self) -> list[Entry]:
        """What those who watch are to hear of this operation."""
        entries: list[Entry] = []
        queued = lifecycle.QUEUED
        for rollout_id, before in self.before.items():
            status = self.rollouts[rollout_id].record.status
            entries.append(rollout_entry(rollout_id, status, before in queued, status in queued))
        for (rollout_id, attempt_id), status in self.moved.items():
            entries.append(attempt_entry(rollout_id, attempt_id, status))
        return entries

    def note_attempt(self, attempt: Attempt) -> None:
        """This attempt was changed."""
        self.changed_attempts[attempt.rollout_id, attempt.sequence_id] = attempt

    def set_status(self, loaded: Loaded[RecordT], status: RolloutStatus) -> None:
        """Change a rollout's status, its end time and its place in the queue with it."""
        record = loaded.record
        if status in lifecycle.FINISHED and record.status not in lifecycle.FINISHED:
            self.finished.append(record.rollout_id)
            self.end_superseded(loaded)
        if record.status in lifecycle.QUEUED:
            loaded.left_queue |= status not in lifecycle.QUEUED
        elif status in lifecycle.QUEUED:
            self.changed.pop(record.rollout_id, None)  # rollouts join the queue in the order of ``changed``
        record.end_time = lifecycle.rollout_end_time(status, record.end_time, self.now)
        self.before.setdefault(record.rollout_id, record.status)
        record.status = status
        self.changed[record.rollout_id] = loaded

    def set_attempt_status(self, loaded: Loaded[RecordT], attempt: Attempt, status: AttemptStatus) -> None:
        """Change an attempt's status, and the rollout's with it if this is the latest attempt."""
        _set(attempt, status=status, end_time=lifecycle.attempt_end_time(status, attempt.end_time, self.now))
        self.moved[attempt.rollout_id, attempt.attempt_id] = status
        self.note_attempt(attempt)
        if attempt is loaded.latest:
            record = loaded.record
            after = lifecycle.rollout_status_after(record.status, status, attempt.sequence_id, record.config)
            if after != record.status:
                self.set_status(loaded, after)
            self.changed[record.rollout_id] = loaded

    def end_superseded(self, loaded: Loaded[RecordT]) -> None:
        """End the rollout's older attempts that are under way."""
        for attempt in loaded.older.values():
            if attempt.status in lifecycle.WATCHED:
                attempt.end_time = lifecycle.attempt_end_time(lifecycle.SUPERSEDED, attempt.end_time, self.now)
                attempt.status = lifecycle.SUPERSEDED
                self.moved[attempt.rollout_id, attempt.attempt_id] = attempt.status
                self.note_attempt(attempt)

    def follow(self, attempt: Attempt) -> None:
        """Bring the worker of this attempt, if it has one, into line with it."""
        if not attempt.worker_id:
            return
        change = self.worker(attempt.worker_id)
        change.status = lifecycle.WORKER_AFTER_ATTEMPT[attempt.status]
        if change.status == "busy":
            change.was_busy = True
            change.rollout_id, change.attempt_id = attempt.rollout_id, attempt.attempt_id
        else:
            self.free(change)

    def worker(self, worker_id: str) -> WorkerChange:
        """The change of a worker."""
        change = self.workers.get(worker_id)
        if change is None:
            change = self.workers[worker_id] = WorkerChange()
        return change

    @staticmethod
    def free(change: WorkerChange) -> None:
        """The worker works on nothing."""
        change.was_freed = True
        change.rollout_id = change.attempt_id = None


def change_worker(worker: Worker, change: WorkerChange, now: float) -> None:
    """Apply the change to a worker as it is stored."""
    if change.was_busy:
        worker.last_busy_time = now
    if change.was_freed and not (change.found_nothing and worker.status == "idle"):
        worker.last_idle_time = now
    if change.dequeued:
        worker.last_dequeue_time = now
    _set(worker, status=change.status, current_rollout_id=change.rollout_id, current_attempt_id=change.attempt_id)


def _set(record: Attempt | Worker, **fields: Any) -> None:
    """Set fields of a record to values of ours, in a third of the time that pydantic takes to look at each."""
    vars(record).update(fields)


# The queue


class NewRollout(NamedTuple):
    """A request, checked and encoded."""

    rollout_id: str
    given_id: bool
    input_json: str
    metadata_json: str
    mode: RolloutMode | None
    resources_id: str | None
    config: RolloutConfig | None


class Taker(NamedTuple):
    """Who gets an attempt."""

    worker_id: str | None
    attempt_id: str | None = None
    """None: a fresh id."""


def new_rollouts(requests: Iterable[EnqueueRolloutRequest]) -> list[NewRollout]:
    """Check and encode requests, before anything is done.

    A dict of the fields will do for a request. Raises ConfigError for a bad id, and for an input or metadata that are
    no JSON.
    """
    encoded: list[NewRollout] = []
    metadata, metadata_json = None, "{}"
    for given in requests:
        request = as_model(EnqueueRolloutRequest, given)
        check_ids(request.rollout_id, request.resources_id)
        if request.metadata is not metadata:  # neighbours may share one dict
            metadata, metadata_json = request.metadata, encode(request.metadata or {}, "metadata")
        new = NewRollout(
            request.rollout_id or f"ro-{secrets.token_hex(10)}",
            request.rollout_id is not None,
            encode(request.input, "input"),
            metadata_json,
            request.mode,
            request.resources_id,
            request.config,
        )
        encoded.append(new)
    return encoded


def unknown_rollouts(requests: Iterable[NewRollout], known_inputs: Mapping[str, str]) -> list[NewRollout]:
    """The first request of each rollout that is not stored yet, ``known_inputs`` being the JSON of those that are.

    Raises Conflict for an id that comes with two inputs.
    """
    fresh: dict[str, NewRollout] = {}
    for request in requests:
        stored = known_inputs.get(request.rollout_id)
        if stored is None:
            stored = fresh.setdefault(request.rollout_id, request).input_json
        if stored is not request.input_json and not same_json(request.input_json, stored):
            raise Conflict(
                f"rollout {request.rollout_id} exists with another input; one id stands for one input, use a new id"
            )
    return list(fresh.values())


def begin_attempts(
    work: Work[RecordT], rollouts: Sequence[Loaded[RecordT]], takers: Sequence[Taker], *, dequeued: bool = False
) -> list[Attempt]:
    """Give each rollout its next attempt, in preparing; earlier ones that are under way end.

    The worker becomes busy with the last one that it gets.
    """
    numbers = [(loaded.record.rollout_id, loaded.attempt_count + 1) for loaded in rollouts]
    attempts = new_attempts(work, numbers, takers, dequeued=dequeued)
    for loaded, attempt in zip(rollouts, attempts, strict=True):
        before = loaded.latest
        if before is not None:
            loaded.older[before.attempt_id] = before
        work.end_superseded(loaded)
        loaded.latest = attempt
        loaded.attempt_count += 1
        work.set_status(loaded, "preparing")
    return attempts


def new_attempts(
    work: Work[Any], numbers: Sequence[tuple[str, int]], takers: Sequence[Taker], *, dequeued: bool = False
) -> list[Attempt]:
    """Attempts in preparing of these rollouts and numbers; of rollouts that are new, all there is to begin them."""
    drawn = secrets.token_hex(6 * len(numbers))  # at once: a draw is a call of the system
    attempts = [
        trusted(
            Attempt,
            {
                "rollout_id": rollout_id,
                "attempt_id": taker.attempt_id or f"at-{drawn[12 * place : 12 * place + 12]}",
                "sequence_id": number,
                "start_time": work.now,
                "end_time": None,
                "status": "preparing",
                "worker_id": taker.worker_id,
                "last_heartbeat_time": None,
                "metadata": None,
            },
        )
        for place, ((rollout_id, number), taker) in enumerate(zip(numbers, takers, strict=True))
    ]
    work.new_attempts += attempts
    work.moved.update({(attempt.rollout_id, attempt.attempt_id): attempt.status for attempt in attempts})
    for worker_id, attempt in {attempt.worker_id: attempt for attempt in attempts if attempt.worker_id}.items():
        work.follow(attempt)
        work.worker(worker_id).dequeued |= dequeued
    return attempts


def note_empty_dequeue(work: Work[Any], worker_id: str) -> None:
    """This worker asked for work and there was none: it is idle, from now unless it was before."""
    change = work.worker(worker_id)
    change.status = "idle"
    change.dequeued = True
    work.free(change)


def withdraw(
    work: Work[RecordT], claims: Iterable[tuple[AttemptedRollout, RolloutStatus | None]]
) -> list[Loaded[RecordT]]:
    """Take claims back as if they had not been made; those rollouts that were, whose place in the queue is up to the
    store.

    Each comes with the rollout's status before it; None where that is not known. One that somebody has touched since
    is left alone. An older attempt that the claim has ended stays ended.
    """
    undone: list[Loaded[RecordT]] = []
    for claimed, status in claims:
        loaded = work.rollouts[claimed.rollout_id]
        attempt = loaded.latest
        if attempt is None or attempt != claimed.attempt or loaded.record.status != "preparing":
            continue
        work.withdrawn.append(attempt)
        work.moved[attempt.rollout_id, attempt.attempt_id] = None
        loaded.latest = None  # the one before is not loaded
        loaded.attempt_count -= 1
        work.set_status(loaded, status or ("queuing" if attempt.sequence_id == 1 else "requeuing"))
        if attempt.worker_id:
            change = work.worker(attempt.worker_id)
            change.status = "idle"
            work.free(change)
        undone.append(loaded)
    return undone


# Updates


def cancel(work: Work[RecordT]) -> None:
    """Cancel the loaded rollouts that have not finished, and end their attempts: the leases end for good."""
    for loaded in work.rollouts.values():
        if loaded.record.status in lifecycle.FINISHED:
            continue
        work.set_status(loaded, "cancelled")
        attempt = loaded.latest
        if attempt is not None and attempt.status not in lifecycle.ENDED and attempt.status != "timeout":
            end_time = lifecycle.attempt_end_time(lifecycle.SUPERSEDED, attempt.end_time, work.now)
            _set(attempt, status=lifecycle.SUPERSEDED, end_time=end_time)
            work.moved[attempt.rollout_id, attempt.attempt_id] = lifecycle.SUPERSEDED
            work.note_attempt(attempt)
            work.follow(attempt)


def apply_updates(work: Work[Any], updates: Iterable[tuple[AttemptUpdate, bool]]) -> list[Attempt | Conflict]:
    """Apply updates in order, each with whether it is fenced; copies of the attempts as they leave them.

    A refused one yields a Conflict in its place; the others are applied all the same. Raises NotFound for a rollout
    without attempts, and for an attempt that does not exist.
    """
    results: list[Attempt | Conflict] = []
    for update, fenced in updates:
        loaded = work.rollouts[update.rollout_id]
        newest = loaded.latest
        if newest is None:
            raise NotFound(f"rollout {update.rollout_id} has no attempts yet; dequeue or start it first")
        attempt = newest if update.attempt_id == "latest" else loaded.attempt(update.attempt_id)
        answer = answer_of_fence(update, newest, loaded.record.status) if fenced else None
        if answer is not None:
            results.append(answer)
            continue
        _apply(work, update, loaded, attempt)
        results.append(copy_attempt(attempt))  # as it is now: a later update may change it further
    return results


def answer_of_fence(update: AttemptUpdate, newest: Attempt, rollout: RolloutStatus) -> Attempt | Conflict | None:
    """What a fenced update yields that is not applied; None if the lease stands and it is.

    ``newest`` is the rollout's latest attempt.
    """
    attempt_id = newest.attempt_id if update.attempt_id == "latest" else update.attempt_id
    if attempt_id == newest.attempt_id and newest.status in lifecycle.ENDED and newest.status == update.status:
        return copy_attempt(newest)  # the caller repeats what it could not know had arrived
    reason = lifecycle.fence(attempt_id, newest.attempt_id, newest.status, rollout)
    return None if reason is None else Conflict(f"rollout {update.rollout_id}: {reason}; nothing was changed")


def _apply(work: Work[RecordT], update: AttemptUpdate, loaded: Loaded[RecordT], attempt: Attempt) -> None:
    given_status, given_worker = update.status, update.worker_id
    if not isinstance(given_worker, Unset):
        if given_worker == "" and attempt.worker_id:
            change = work.worker(attempt.worker_id)
            change.status = "unknown"
            work.free(change)
        attempt.worker_id = given_worker
    if not isinstance(update.last_heartbeat_time, Unset):
        attempt.last_heartbeat_time = update.last_heartbeat_time
    if not isinstance(update.metadata, Unset):
        attempt.metadata = json_copy(update.metadata)
    if not isinstance(given_status, Unset):
        work.set_attempt_status(loaded, attempt, given_status)
    else:
        work.note_attempt(attempt)
        if attempt is loaded.latest:
            work.note(loaded)  # a heartbeat moves its alarm
    if not (isinstance(given_status, Unset) and isinstance(given_worker, Unset)):
        work.follow(attempt)


def copy_attempt(attempt: Attempt) -> Attempt:
    """An attempt that callers may do with as they like."""
    fields = {**attempt.__dict__}
    if fields["metadata"] is not None:
        fields["metadata"] = json_copy(fields["metadata"])
    return trusted(Attempt, fields, attempt.__pydantic_fields_set__, attempt.__pydantic_extra__)


def expire(work: Work[Any]) -> None:
    """The watchdog: mark the latest attempts of all these rollouts that are lost by now.

    Rollouts that heartbeats have saved count as changed too: their alarms are later now.
    """
    for loaded in work.rollouts.values():
        work.note(loaded)
        record, attempt = loaded.record, loaded.latest
        if attempt is None or not lifecycle.is_watched(record.status, attempt):
            continue
        status = lifecycle.lost_status(record.config, attempt.start_time, attempt.last_heartbeat_time, work.now)
        if status is not None:
            work.set_attempt_status(loaded, attempt, status)
            work.follow(attempt)


# Spans


def note_spans(work: Work[RecordT], owners: Iterable[tuple[Loaded[RecordT], Attempt]]) -> None:
    """Spans of these attempts have arrived that were not stored before: a sign of life of each."""
    for loaded, attempt in {id(owner[1]): owner for owner in owners}.values():
        status = loaded.record.status
        is_latest = attempt is loaded.latest
        attempt.last_heartbeat_time = work.now
        work.note_attempt(attempt)
        after = lifecycle.attempt_after_span(attempt.status, status, is_latest=is_latest)
        if after != attempt.status:
            attempt.status = after
            work.moved[attempt.rollout_id, attempt.attempt_id] = after
            if is_latest:
                work.note(loaded)
        # After the end of its attempt a rollout keeps its place in the queue: nobody else would claim it.
        if is_latest and after in lifecycle.WATCHED and status in lifecycle.ROLLOUT_AFTER_SPAN:
            work.set_status(loaded, lifecycle.ROLLOUT_AFTER_SPAN[status])
