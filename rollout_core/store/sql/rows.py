"""Between rows of the database and the models of the contract.

``RolloutState`` is a row of ``rollouts`` that an operation reads, changes in memory by the rules of ``lifecycle`` and
writes back once. ``UnitOfWork`` holds all that an operation works on: read at once, written back once, set by set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.checks import refuse_missing
from rollout_core.store.codec import decode, encode
from rollout_core.store.operations import Loaded, Work, WorkerChange
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.sql.dialect import NUM_ROLLOUT, Transaction
from rollout_core.store.types import Attempt, AttemptedRollout, Rollout, RolloutConfig, RolloutStatus, Worker

ROLLOUTS_WITH_ATTEMPT = (
    "SELECT {rollout}, {payload}, {attempt} FROM rollouts r"
    " JOIN rollout_payloads p ON p.key = r.key"
    " LEFT JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
)
"""All there is to know of rollouts, as ``rollout_model`` reads it; a WHERE follows."""


@dataclass(slots=True)
class RolloutState:
    """A row of ``rollouts``, in the order of ``dialect.ROLLOUT``."""

    key: int
    rollout_id: str
    status: RolloutStatus
    mode: str | None
    resources_id: str | None
    start_time: float
    end_time: float | None
    config_json: str | None
    attempt_count: int
    last_sequence_id: int
    queue_position: int | None
    due_time: float | None
    stored_status: RolloutStatus = field(init=False)
    """The status in the database."""

    def __post_init__(self) -> None:
        self.stored_status = self.status

    @property
    def config(self) -> RolloutConfig:
        """The retry and timeout policy, parsed anew at each call unless it is all defaults; to be read only."""
        return RolloutConfig.model_validate_json(self.config_json) if self.config_json else _DEFAULT_CONFIG

    def watch(self, attempt: Attempt | None) -> None:
        """Set the watchdog's alarm for the latest attempt, or none if there is nothing under way."""
        if attempt is None or self.status not in lifecycle.RUNNING or attempt.status not in lifecycle.WATCHED:
            self.due_time = None
        elif self.config_json is None:
            self.due_time = None  # the default config has no limits; spares parsing on the hot path
        else:
            self.due_time = lifecycle.due_time(self.config, attempt.start_time, attempt.last_heartbeat_time)


def config_json(config: RolloutConfig | None) -> str | None:
    """The config as it is stored; NULL for all defaults."""
    if config is None or config == _DEFAULT_CONFIG:
        return None
    return config.model_dump_json()


_DEFAULT_CONFIG = RolloutConfig()


def _default_config() -> RolloutConfig:
    return trusted(RolloutConfig, {**_DEFAULT_CONFIG.__dict__, "retry_condition": []})


def load_rollouts(tx: Transaction, rollout_ids: Iterable[str]) -> dict[str, RolloutState]:
    """The rows of these rollouts, to be changed. Raises NotFound if one is unknown."""
    wanted = list(dict.fromkeys(rollout_ids))
    found = tx.rows_of("SELECT {rollout} FROM rollouts r WHERE r.rollout_id", wanted, "{lock}")
    states = {row[1]: RolloutState(*row) for row in found}
    refuse_missing(wanted, states)
    return states


def load_attempts(tx: Transaction, states: Iterable[RolloutState]) -> dict[tuple[int, int], Attempt]:
    """The latest attempts of these rollouts, by rollout key and attempt number."""
    attempts: dict[tuple[int, int], Attempt] = {}
    ids = {state.key: state.rollout_id for state in states if state.attempt_count}
    if ids:
        found = tx.rows(
            "SELECT r.key, {attempt} FROM rollouts r"
            " JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
            " WHERE r.rollout_id {in_texts}",
            tx.texts(list(ids.values())),
        )
        for key, *columns in found:
            attempts[key, columns[1]] = attempt_model(ids[key], columns)
    return attempts


def load_with_latest(tx: Transaction, rollout_ids: Iterable[str]) -> tuple[dict[str, RolloutState], dict[str, Attempt]]:
    """The rows of these rollouts, to be changed, and the latest attempts of those that have one, both by rollout.

    Raises NotFound if a rollout is unknown.
    """
    wanted = list(dict.fromkeys(rollout_ids))
    if not tx.dialect.writes_alone:
        # The attempts are read only when the rollouts are locked: an attempt read along with a rollout that another
        # process held would be as it was before that process was done.
        states = load_rollouts(tx, wanted)
        found = load_attempts(tx, states.values())
        return states, {attempt.rollout_id: attempt for attempt in found.values()}
    states, latest = {}, {}
    for row in rows_with_latest(tx, wanted):
        state = RolloutState(*row[:NUM_ROLLOUT])
        states[state.rollout_id] = state
        if row[NUM_ROLLOUT] is not None:
            latest[state.rollout_id] = attempt_model(state.rollout_id, row[NUM_ROLLOUT:])
    refuse_missing(wanted, states)
    return states, latest


def rows_with_latest(tx: Transaction, rollout_ids: Sequence[str]) -> list[tuple[Any, ...]]:
    """Rows of those of these rollouts that are known, each with its latest attempt, all NULL if there is none."""
    return tx.rows_of(
        "SELECT {rollout}, {attempt} FROM rollouts r"
        " LEFT JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
        " WHERE r.rollout_id",
        rollout_ids,
    )


def save_rollouts(tx: Transaction, states: Sequence[RolloutState]) -> None:
    """Write back what may change in the course of a rollout. A rollout that now waits gets a place at the tail."""
    for state in states:
        if state.status not in lifecycle.QUEUED:
            state.queue_position = None
        if state.status != state.stored_status:
            tx.counted[state.stored_status] -= 1
            tx.counted[state.status] += 1
            state.stored_status = state.status
    joining = [state for state in states if state.status in lifecycle.QUEUED and state.queue_position is None]
    for state, position in zip(joining, tx.next_numbers("queue", len(joining)), strict=True):
        state.queue_position = position
    tx.num_queued += len(joining)
    tx.update(
        "rollouts",
        "status, end_time, attempt_count, last_sequence_id, queue_position, due_time",
        "key",
        [
            (
                state.status,
                state.end_time,
                state.attempt_count,
                state.last_sequence_id,
                state.queue_position,
                state.due_time,
                state.key,
            )
            for state in states
        ],
    )


def save_counters(tx: Transaction, states: Iterable[RolloutState]) -> None:
    """Write back the number of the last span alone."""
    tx.update("rollouts", "last_sequence_id", "key", [(state.last_sequence_id, state.key) for state in states])


def save_attempts(tx: Transaction, attempts: Iterable[tuple[int, Attempt]]) -> None:
    """Write back changed attempts, given with the keys of their rollouts."""
    tx.update(
        "attempts",
        "status, end_time, worker_id, last_heartbeat_time, metadata",
        "rollout_key, sequence_id",
        [
            (
                attempt.status,
                attempt.end_time,
                attempt.worker_id,
                attempt.last_heartbeat_time,
                None if attempt.metadata is None else encode(attempt.metadata, "metadata"),
                key,
                attempt.sequence_id,
            )
            for key, attempt in attempts
        ],
    )


def rollout_model(row: Sequence[Any]) -> Rollout:
    """The model of a row of rollout, payload and (all NULL if there is none) latest attempt."""
    state = RolloutState(*row[:NUM_ROLLOUT])
    input_json, metadata_json, *attempt_columns = row[NUM_ROLLOUT:]
    attempt = attempt_model(state.rollout_id, attempt_columns) if attempt_columns[0] else None
    return rollout_of(state, input_json, metadata_json, attempt)


def rollout_of(
    state: RolloutState, input_json: str, metadata_json: str | None, attempt: Attempt | None = None
) -> Rollout:
    """The model of a rollout; an AttemptedRollout exactly if ``attempt`` is given."""
    fields: dict[str, Any] = {
        "rollout_id": state.rollout_id,
        "input": decode(input_json),
        "start_time": state.start_time,
        "end_time": state.end_time,
        "mode": state.mode,
        "resources_id": state.resources_id,
        "status": state.status,
        "config": _default_config() if state.config_json is None else state.config,
        "metadata": None if metadata_json is None else {} if metadata_json == "{}" else decode(metadata_json),
    }
    return trusted(Rollout, fields) if attempt is None else trusted(AttemptedRollout, {**fields, "attempt": attempt})


def attempt_model(rollout_id: str, columns: Sequence[Any]) -> Attempt:
    """The model of a row in the order of ``dialect.ATTEMPT``."""
    attempt_id, sequence_id, start_time, end_time, status, worker_id, last_heartbeat_time, metadata = columns
    return trusted(
        Attempt,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": sequence_id,
            "start_time": start_time,
            "end_time": end_time,
            "status": status,
            "worker_id": worker_id,
            "last_heartbeat_time": last_heartbeat_time,
            "metadata": None if metadata is None else decode(metadata),
        },
    )


def resources_model(columns: Sequence[Any]) -> ResourcesUpdate:
    """The model of a row in the order of ``dialect.RESOURCES``."""
    resources_id, create_time, update_time, version, resources = columns
    return ResourcesUpdate(
        resources_id=resources_id,
        create_time=create_time,
        update_time=update_time,
        version=version,
        resources=decode(resources),
    )


def worker_model(columns: Sequence[Any]) -> Worker:
    """The model of a row in the order of ``dialect.WORKER``."""
    fields = dict(zip(Worker.model_fields, columns, strict=True))
    if fields["heartbeat_stats"] is not None:
        fields["heartbeat_stats"] = decode(fields["heartbeat_stats"])
    return Worker(**fields)


# What an operation works on


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
        self.tx.changes += self.entries()
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
        if self.new_attempts or self.withdrawn:
            self._add_and_delete_attempts(new or {})
        save_attempts(self.tx, [(self._key_of(attempt), attempt) for attempt in self.changed_attempts.values()])
        if self.workers:
            save_workers(self.tx, self.workers)

    def _key_of(self, attempt: Attempt) -> int:
        return self.rollouts[attempt.rollout_id].record.key

    def _add_and_delete_attempts(self, new: Mapping[str, int]) -> None:
        """Write new attempts, and delete those that are withdrawn; ``new`` as for `save`."""
        self.tx.counted["attempts"] += len(self.new_attempts) - len(self.withdrawn)
        self.tx.insert(
            "attempts",
            "rollout_key, sequence_id, attempt_id, status, start_time, worker_id",
            [
                (
                    new.get(attempt.rollout_id) or self._key_of(attempt),
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
            self.tx.run(
                "DELETE FROM attempts WHERE rollout_key = ? AND sequence_id = ?",
                self._key_of(attempt),
                attempt.sequence_id,
            )


def save_workers(tx: Transaction, changes: Mapping[str, WorkerChange]) -> None:
    """Apply changes to workers, as ``change_worker`` does.

    In SQL, because a worker's row is not read before: two processes may meet a worker for the first time at once.
    """
    tx.insert(
        "workers",
        "worker_id, status, last_busy_time, last_idle_time, last_dequeue_time, current_rollout_id, current_attempt_id",
        [
            (
                worker_id,
                change.status,
                tx.now if change.was_busy else None,
                tx.now if change.was_freed else None,
                tx.now if change.dequeued else None,
                change.rollout_id,
                change.attempt_id,
            )
            for worker_id, change in sorted(changes.items())  # sorted, so that writers cannot deadlock
        ],
        "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status,"
        " last_busy_time = COALESCE(excluded.last_busy_time, workers.last_busy_time),"
        # Of a change, these are the marks of ``found_nothing``.
        " last_idle_time = CASE WHEN workers.status = 'idle' AND excluded.last_busy_time IS NULL"
        " AND excluded.last_dequeue_time IS NOT NULL THEN workers.last_idle_time"
        " ELSE COALESCE(excluded.last_idle_time, workers.last_idle_time) END,"
        " last_dequeue_time = COALESCE(excluded.last_dequeue_time, workers.last_dequeue_time),"
        " current_rollout_id = excluded.current_rollout_id, current_attempt_id = excluded.current_attempt_id",
    )
