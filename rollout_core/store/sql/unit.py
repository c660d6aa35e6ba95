"""The rollouts and attempts that one operation works on: read at once, changed in memory, written back once."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_core.base.errors import NotFound
from rollout_core.store.lifecycle import WATCHED
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import (
    RolloutState,
    find_attempt,
    load_with_latest,
    save_attempts,
    save_counters,
    save_rollouts,
)
from rollout_core.store.sql.superseded import end_attempt, find_superseded
from rollout_core.store.types import Attempt


class UnitOfWork:
    """Raises NotFound when made if one of the rollouts is unknown. What is changed is to be noted, and saved."""

    def __init__(self, tx: Transaction, rollout_ids: Iterable[str]) -> None:
        self.tx = tx
        self.states, self._latest = load_with_latest(tx, rollout_ids)
        self._older: dict[str, dict[str, Attempt]] = {}
        self._has_superseded = False
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._rollouts: dict[int, RolloutState] = {}
        self._counters: dict[int, RolloutState] = {}

    def latest(self, rollout_id: str) -> Attempt:
        """The rollout's latest attempt. Raises NotFound if it has none yet."""
        attempt = self._latest.get(rollout_id)
        if attempt is None:
            raise NotFound(f"rollout {rollout_id} has no attempts yet; dequeue or start it first")
        return attempt

    def attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Any attempt of a rollout; nearly always it is the latest. Raises NotFound if there is none of this id."""
        latest = self._latest.get(rollout_id)
        if latest is not None and latest.attempt_id == attempt_id:
            return latest
        older = self._older.setdefault(rollout_id, {})
        if attempt_id not in older:
            older[attempt_id] = find_attempt(self.tx, self.states[rollout_id], attempt_id)
        return older[attempt_id]

    def is_latest(self, attempt: Attempt) -> bool:
        """Whether this is its rollout's latest attempt."""
        return self._latest.get(attempt.rollout_id) is attempt

    def end_superseded(self, rollout_id: str) -> None:
        """End the rollout's older attempts that are under way."""
        if self.states[rollout_id].attempt_count < 2:
            return
        if not self._has_superseded:
            # Of all rollouts at once. What this operation has changed already is not read again.
            for attempt in find_superseded(self.tx, self.states.values()):
                self._older.setdefault(attempt.rollout_id, {}).setdefault(attempt.attempt_id, attempt)
            self._has_superseded = True
        for attempt in self._older.get(rollout_id, {}).values():
            if attempt.status in WATCHED:
                end_attempt(self.tx, attempt)
                self.note_attempt(attempt)

    def note_attempt(self, attempt: Attempt) -> None:
        """This attempt was changed."""
        self._attempts[self.states[attempt.rollout_id].key, attempt.sequence_id] = attempt

    def note_rollout(self, state: RolloutState) -> None:
        """This rollout was changed."""
        self._rollouts[state.key] = state

    def note_counter(self, state: RolloutState) -> None:
        """Of this rollout the number of its last span was changed."""
        self._counters[state.key] = state

    def save(self) -> None:
        """Write back what was changed."""
        save_attempts(self.tx, [(key, attempt) for (key, _), attempt in self._attempts.items()])
        save_rollouts(self.tx, list(self._rollouts.values()))
        save_counters(self.tx, [state for key, state in self._counters.items() if key not in self._rollouts])
