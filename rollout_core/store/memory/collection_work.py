"""One operation on collections: it loads what it needs, changes it in memory by the rules, and saves it all at once.

Until it saves, nothing has happened; so an operation that raises before has changed nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollout_core.base.errors import NotFound
from rollout_core.store import lifecycle
from rollout_core.store.checks import refuse_missing
from rollout_core.store.copies import changed
from rollout_core.store.memory.collection import LightningCollections
from rollout_core.store.types import Attempt, AttemptStatus, Rollout, RolloutStatus, Worker


@dataclass(slots=True, eq=False)
class RolloutState:
    """A rollout and its attempts, copied to be changed."""

    rollout: Rollout
    latest: Attempt | None
    status_before: RolloutStatus | None = None
    older: dict[str, Attempt] = field(default_factory=dict)
    """By id: all that are under way, and others that were asked for."""

    @property
    def attempt_count(self) -> int:
        """Attempts so far."""
        return self.latest.sequence_id if self.latest else 0


class Work:
    """One operation at one moment."""

    def __init__(self, collections: LightningCollections, now: float) -> None:
        self.collections = collections
        self.now = now
        self.finished: list[str] = []
        """Rollouts that reached a terminal status."""
        self._rollouts: dict[str, RolloutState] = {}
        self._attempts: dict[str, Attempt] = {}
        self._new_attempts: dict[str, Attempt] = {}
        self._workers: dict[str, Worker] = {}
        self._noted: dict[str, Attempt] = {}

    # Loading

    async def load(self, rollout_ids: Iterable[str]) -> dict[str, RolloutState]:
        """These rollouts with their latest attempts, to be changed. Raises NotFound if one is unknown."""
        wanted = list(dict.fromkeys(rollout_ids))
        rollouts = (await self.collections.rollouts.query({"rollout_id": {"within": wanted}})).items
        found = {rollout.rollout_id: rollout for rollout in rollouts}
        refuse_missing(wanted, found)
        if not wanted:
            return {}
        attempts = (await self.collections.attempts.query({"rollout_id": {"within": wanted}})).items
        latest = _latest(attempts)
        states: dict[str, RolloutState] = {}
        for rollout_id in wanted:
            attempt = latest.get(rollout_id)
            states[rollout_id] = RolloutState(
                changed(found[rollout_id]), None if attempt is None else changed(attempt), found[rollout_id].status
            )
        if len(attempts) > len(latest):
            for attempt in attempts:
                if attempt.status in lifecycle.WATCHED and attempt is not latest[attempt.rollout_id]:
                    states[attempt.rollout_id].older[attempt.attempt_id] = changed(attempt)
        return states

    async def require(self, rollout_ids: Sequence[str]) -> None:
        """Raise NotFound if one of these rollouts is unknown."""
        found = await self.collections.rollouts.query({"rollout_id": {"within": rollout_ids}})
        refuse_missing(rollout_ids, {rollout.rollout_id for rollout in found.items})

    async def attempt(self, state: RolloutState, attempt_id: str) -> Attempt:
        """One attempt of a rollout, to be changed. Raises NotFound if the rollout has none of this id."""
        if state.latest is not None and attempt_id == state.latest.attempt_id:
            return state.latest
        if attempt_id not in state.older:
            found = await self.collections.attempts.get(
                {"rollout_id": {"exact": state.rollout.rollout_id}, "attempt_id": {"exact": attempt_id}}
            )
            if found is None:
                raise NotFound(f"rollout {state.rollout.rollout_id} has no attempt {attempt_id}")
            state.older[attempt_id] = changed(found)
        return state.older[attempt_id]

    # Changing

    def touch(self, state: RolloutState) -> None:
        """The rollout, or its latest attempt, has changed in a way that others depend on."""
        self._rollouts[state.rollout.rollout_id] = state

    def touch_attempt(self, attempt: Attempt) -> None:
        """The attempt has changed."""
        self._attempts[attempt.attempt_id] = attempt

    def set_status(self, state: RolloutState, status: RolloutStatus) -> None:
        """Change a rollout's status, and its end time with it; its place in the queue follows when it is saved."""
        rollout = state.rollout
        if status in lifecycle.FINISHED and rollout.status not in lifecycle.FINISHED:
            self.finished.append(rollout.rollout_id)
            self._end_superseded(state)
        rollout.end_time = lifecycle.rollout_end_time(status, rollout.end_time, self.now)
        rollout.status = status
        self.touch(state)

    def set_attempt_status(self, state: RolloutState, attempt: Attempt, status: AttemptStatus) -> None:
        """Change an attempt's status, and the rollout's with it if this is the latest attempt."""
        attempt.end_time = lifecycle.attempt_end_time(status, attempt.end_time, self.now)
        attempt.status = status
        self.touch_attempt(attempt)
        if attempt is state.latest:
            rollout = state.rollout
            after = lifecycle.rollout_status_after(rollout.status, status, attempt.sequence_id, rollout.config)
            if after != rollout.status:
                self.set_status(state, after)

    def begin_attempt(self, state: RolloutState, attempt: Attempt) -> None:
        """Supersede the rollout's attempts by a new one, in preparing."""
        if state.latest is not None:
            state.older[state.latest.attempt_id] = state.latest
            self._end_superseded(state)
        state.latest = attempt
        self._new_attempts[attempt.attempt_id] = attempt
        self.set_status(state, "preparing")

    def _end_superseded(self, state: RolloutState) -> None:
        for attempt in state.older.values():
            if attempt.status in lifecycle.WATCHED:
                attempt.end_time = lifecycle.attempt_end_time(lifecycle.SUPERSEDED, attempt.end_time, self.now)
                attempt.status = lifecycle.SUPERSEDED
                self.touch_attempt(attempt)

    async def worker(self, worker_id: str) -> Worker:
        """A worker, to be changed; a new one if it is unknown."""
        if worker_id not in self._workers:
            found = await self.collections.workers.get({"worker_id": {"exact": worker_id}})
            self._workers[worker_id] = Worker(worker_id=worker_id) if found is None else changed(found)
        return self._workers[worker_id]

    def note_worker(self, attempt: Attempt | None) -> None:
        """Bring the worker of an attempt into line with it when all is saved; the last attempt of a worker counts.

        The attempt is not to be changed any more.
        """
        if attempt is not None and attempt.worker_id:
            self._noted[attempt.worker_id] = attempt

    # Saving

    async def save(self, on_rollout_update: Callable[[RolloutState], Awaitable[None]]) -> None:
        """Write back what was changed and bring the queue into line. Tells of each rollout that was touched."""
        states = list(self._rollouts.values())
        if states:
            await self.collections.rollouts.upsert([state.rollout for state in states])
            await self._requeue(states)
        if self._new_attempts:
            await self.collections.attempts.insert(list(self._new_attempts.values()))
        old_attempts = [attempt for key, attempt in self._attempts.items() if key not in self._new_attempts]
        if old_attempts:
            await self.collections.attempts.update(old_attempts)
        for worker_id, attempt in self._noted.items():
            _follow(await self.worker(worker_id), attempt, self.now)
        if self._workers:
            await self.collections.workers.upsert(list(self._workers.values()))
        for state in states:
            await on_rollout_update(state)

    async def _requeue(self, states: Sequence[RolloutState]) -> None:
        leaving: list[str] = []
        joining: list[str] = []
        for state in states:
            waits, waited = state.rollout.status in lifecycle.QUEUED, state.status_before in lifecycle.QUEUED
            if waits and not waited:
                joining.append(state.rollout.rollout_id)
            elif waited and not waits:
                leaving.append(state.rollout.rollout_id)
        if leaving:
            await self.collections.rollout_queue.remove(leaving)
        if joining:
            await self.collections.rollout_queue.enqueue(joining)


def _follow(worker: Worker, attempt: Attempt, now: float) -> None:
    worker.status = lifecycle.WORKER_AFTER_ATTEMPT[attempt.status]
    if worker.status == "busy":
        worker.last_busy_time = now
        worker.current_rollout_id, worker.current_attempt_id = attempt.rollout_id, attempt.attempt_id
    else:
        worker.last_idle_time = now
        worker.current_rollout_id, worker.current_attempt_id = None, None


async def latest_attempts(collections: LightningCollections, rollout_ids: Sequence[str]) -> dict[str, Attempt]:
    """The latest attempts of those of these rollouts that have one."""
    return _latest((await collections.attempts.query({"rollout_id": {"within": rollout_ids}})).items)


def _latest(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    latest: dict[str, Attempt] = {}
    for attempt in attempts:
        other = latest.get(attempt.rollout_id)
        if other is None or attempt.sequence_id > other.sequence_id:
            latest[attempt.rollout_id] = attempt
    return latest
