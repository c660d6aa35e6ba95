"""What one operation of the SQL store works on: read at once, changed in memory, written back once, set by set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rollout_core.store import lifecycle
from rollout_core.store.operations import Loaded, Work
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.registry import save_workers
from rollout_core.store.sql.rows import (
    RolloutState,
    attempt_model,
    load_with_latest,
    save_attempts,
    save_counters,
    save_rollouts,
)


class UnitOfWork(Work[RolloutState]):
    """A ``Work`` on rows of the database."""

    def __init__(self, tx: Transaction) -> None:
        super().__init__(tx.now)
        self.tx = tx
        self.counters: dict[int, RolloutState] = {}
        """Rollouts, by key, whose last span number was changed."""
        self.earliest_alarm = -math.inf
        """The watchdog does not look at what is changed here before this time."""

    def load(
        self, rollout_ids: Iterable[str], asked: Iterable[tuple[str, str]] = (), *, may_finish: bool = True
    ) -> None:
        """Read these rollouts with their latest attempts, and the older ones that are asked for by rollout and id.

        Where the operation ``may_finish`` rollouts, their older attempts under way are read too. Raises NotFound if a
        rollout is unknown.
        """
        states, latest = load_with_latest(self.tx, rollout_ids)
        self.rollouts = {
            rollout_id: Loaded(state, state.attempt_count, latest.get(rollout_id))
            for rollout_id, state in states.items()
        }
        self._load_older(asked, may_finish=may_finish)

    def add(self, states: Sequence[RolloutState]) -> list[Loaded[RolloutState]]:
        """Take over rollouts that were read under their locks, and read their attempts under way."""
        self.rollouts = {state.rollout_id: Loaded(state, state.attempt_count) for state in states}
        # Read only now: what another process wrote of an attempt just before the lock was free must be seen.
        self._load_attempts([state.rollout_id for state in states if state.attempt_count])
        return list(self.rollouts.values())

    def _load_older(self, asked: Iterable[tuple[str, str]] = (), *, may_finish: bool = True) -> None:
        # First attempts, nearly all, cost nothing.
        retried = [rollout_id for rollout_id, loaded in self.rollouts.items() if loaded.attempt_count > 1]
        if not retried:
            return
        named = [attempt_id for rollout_id, attempt_id in asked if not self._is_latest(rollout_id, attempt_id)]
        if named or may_finish:
            self._load_attempts(retried, named, under_way=may_finish)

    def _load_attempts(self, rollout_ids: Sequence[str], named: Sequence[str] = (), *, under_way: bool = True) -> None:
        """Read attempts that are not loaded yet: those under way, by the database, and those of these ids."""
        if not rollout_ids:
            return
        found = self.tx.rows(
            "SELECT r.rollout_id, {attempt} FROM rollouts r"
            " JOIN attempts a ON a.rollout_key = r.key"
            " WHERE r.rollout_id {in_texts} AND (a.status {in_texts} OR a.attempt_id {in_texts})",
            self.tx.texts(rollout_ids),
            self.tx.texts(sorted(lifecycle.WATCHED) if under_way else []),
            self.tx.texts(named),
        )
        for rollout_id, *columns in found:
            loaded = self.rollouts[rollout_id]
            attempt = attempt_model(rollout_id, columns)
            if attempt.sequence_id != loaded.attempt_count:
                loaded.older[attempt.attempt_id] = attempt
            elif loaded.latest is None:
                loaded.latest = attempt

    def _is_latest(self, rollout_id: str, attempt_id: str) -> bool:
        latest = self.rollouts[rollout_id].latest
        return attempt_id == "latest" or (latest is not None and latest.attempt_id == attempt_id)

    def save(self, new: Mapping[str, int] | None = None) -> None:
        """Write back what was changed; ``new`` are the keys, by rollout, of those that are not loaded because their
        rows are not written so far, but have an attempt."""
        self.tx.finished += self.finished
        for loaded in self.changed.values():
            row = loaded.record
            row.attempt_count = loaded.attempt_count
            if loaded.left_queue:
                row.queue_position = None
            row.watch(loaded.latest)
            if row.due_time is not None:
                row.due_time = max(row.due_time, self.earliest_alarm)
        save_rollouts(self.tx, [loaded.record for loaded in self.changed.values()])
        if self.counters:
            save_counters(self.tx, [row for row in self.counters.values() if row.rollout_id not in self.changed])
        keys = {rollout_id: loaded.record.key for rollout_id, loaded in self.rollouts.items()}
        keys.update(new or {})
        if self.new_attempts or self.withdrawn:
            self._add_and_delete_attempts(keys)
        save_attempts(self.tx, [(keys[attempt.rollout_id], attempt) for attempt in self.changed_attempts.values()])
        if self.workers:
            save_workers(self.tx, self.workers)

    def _add_and_delete_attempts(self, keys: Mapping[str, int]) -> None:
        """Write new attempts, and delete those that are withdrawn."""
        self.tx.counted["attempts"] += len(self.new_attempts) - len(self.withdrawn)
        self.tx.insert(
            "attempts",
            "rollout_key, sequence_id, attempt_id, status, start_time, worker_id",
            [
                (
                    keys[attempt.rollout_id],
                    attempt.sequence_id,
                    attempt.attempt_id,
                    attempt.status,
                    attempt.start_time,
                    attempt.worker_id,
                )
                for attempt in self.new_attempts
            ],
        )
        for attempt in self.withdrawn:
            key = keys[attempt.rollout_id]
            self.tx.run("DELETE FROM attempts WHERE rollout_key = ? AND sequence_id = ?", key, attempt.sequence_id)
