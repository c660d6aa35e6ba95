"""Operations of the SQL store on what happens to attempts: updates, spans, updates of rollouts, and the watchdog."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from rollout_core.base.errors import Conflict
from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.changes import attempt_entry, rollout_entry
from rollout_core.store.checks import sequence_id_after
from rollout_core.store.encoded_spans import EncodedSpan
from rollout_core.store.operations import Loaded, apply_updates, cancel, expire, note_spans
from rollout_core.store.sql.dialect import NUM_ROLLOUT, Transaction
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    RolloutState,
    UnitOfWork,
    attempt_model,
    config_json,
    load_rollouts,
    rollout_model,
    rows_with_latest,
    save_counters,
    save_workers,
)
from rollout_core.store.types import UNSET, Attempt, AttemptStatus, AttemptUpdate, Rollout, Unset

_SPAN = "rollout_key, attempt_id, span_id, sequence_id, trace_id, parent_id, name, start_time, end_time, body"

_number_of = itemgetter(3)


class _Run(NamedTuple):
    """Spans of one attempt that come one after the other."""

    loaded: Loaded[RolloutState]
    attempt: Attempt
    spans: list[EncodedSpan]


# Updates


def update_attempts(tx: Transaction, updates: Sequence[tuple[AttemptUpdate, bool]]) -> list[Attempt | Conflict]:
    """Apply updates in order, each with whether it is fenced, see ``apply_updates``."""
    unit = UnitOfWork(tx)
    unit.load(
        [update.rollout_id for update, _ in updates], [(update.rollout_id, update.attempt_id) for update, _ in updates]
    )
    results = apply_updates(unit, updates)
    unit.save()
    return results


def end_attempts(tx: Transaction, ends: Sequence[tuple[EncodedSpan, AttemptUpdate]]) -> list[Attempt | Conflict]:
    """Store the last span of each attempt, and apply its update, fenced."""
    alike = _end_alike(tx, ends)
    if alike is not None:
        return alike
    unit = UnitOfWork(tx)
    unit.load([update.rollout_id for _, update in ends], [(update.rollout_id, update.attempt_id) for _, update in ends])
    _store_spans(unit, _by_attempt([span for span, _ in ends]))
    results = apply_updates(unit, [(update, True) for _, update in ends])
    unit.save()
    return results


_state_of = itemgetter(2, 6, 7, 8, 9, 10, 11, *(NUM_ROLLOUT + place for place in (1, 3, 4, 5, 6, 7)))
"""Of a row of `rows_with_latest`, all but ids, times of start and what no rule of the lifecycle looks at."""


def _end_alike(tx: Transaction, ends: Sequence[tuple[EncodedSpan, AttemptUpdate]]) -> list[Attempt | Conflict] | None:
    """`end_attempts` of first attempts that are all in one state and end the same way, as those of a batch run do: what
    the rules make of one of them is written for all. None, and nothing is done, where they are not alike."""
    update = ends[0][1] if ends else None
    if not tx.dialect.writes_alone or update is None or update.status not in lifecycle.ENDED:
        return None
    rows = {row[1]: row for row in rows_with_latest(tx, [update.rollout_id for _, update in ends])}
    alike = len(rows) == len(ends) and len(set(map(_state_of, rows.values()))) == 1
    number = ends[0][0].sequence_id
    alike = alike and all(span.sequence_id == number for span, _ in ends)
    if (
        not alike
        or number is None
        or not all(_is_plain_end(one, update.status, rows[one.rollout_id]) for _, one in ends)
    ):
        return None
    row = rows[update.rollout_id]
    loaded = Loaded(RolloutState(*row[:NUM_ROLLOUT]), 1, attempt_model(row[1], row[NUM_ROLLOUT:]))
    state, attempt, before = loaded.record, loaded.latest, loaded.record.status
    # No span of it came before: that would have been a sign of life.
    if attempt is None or attempt.last_heartbeat_time is not None or attempt.metadata is not None:
        return None
    if state.config_json is not None or before not in lifecycle.RUNNING or attempt.status not in lifecycle.WATCHED:
        return None
    unit = UnitOfWork(tx)
    unit.rollouts = {state.rollout_id: loaded}
    note_spans(unit, [(loaded, attempt)])
    apply_updates(unit, [(update, True)])
    tx.insert("spans", _SPAN, [(rows[span.rollout_id][0], *span[1:]) for span, _ in ends])
    ids = tx.texts(list(rows))
    tx.run(
        "UPDATE rollouts SET status = ?, end_time = ?, last_sequence_id = ?, due_time = NULL"
        " WHERE rollout_id {in_texts}",
        state.status,
        state.end_time,
        max(state.last_sequence_id, number),
        ids,
    )
    tx.run(
        "UPDATE attempts SET status = ?, end_time = ?, last_heartbeat_time = ? WHERE sequence_id = 1"
        " AND rollout_key IN (SELECT key FROM rollouts WHERE rollout_id {in_texts})",
        attempt.status,
        attempt.end_time,
        attempt.last_heartbeat_time,
        ids,
    )
    save_workers(tx, unit.workers)
    tx.finished += rows if unit.finished else ()
    tx.changes += [rollout_entry(name, state.status, False, False) for name in rows]
    tx.changes += [attempt_entry(update.rollout_id, update.attempt_id, attempt.status) for _, update in ends]
    for name, change in (("spans", len(ends)), (state.status, len(ends)), (before, -len(ends))):
        tx.counted[name] += change
    return [_like(attempt, rows[one.rollout_id]) for _, one in ends]


def _is_plain_end(update: AttemptUpdate, status: AttemptStatus | Unset, row: Sequence[Any]) -> bool:
    """Whether an update sets this status of the first attempt, which is the one of the row, and nothing else."""
    return (
        update.attempt_id == row[NUM_ROLLOUT]
        and row[NUM_ROLLOUT + 1] == 1
        and update.status == status
        and update.worker_id is UNSET
        and update.last_heartbeat_time is UNSET
        and update.metadata is UNSET
    )


def _like(attempt: Attempt, row: Sequence[Any]) -> Attempt:
    """The attempt of a row in the state of another one."""
    own = {"rollout_id": row[1], "attempt_id": row[NUM_ROLLOUT], "start_time": row[NUM_ROLLOUT + 2]}
    return trusted(Attempt, {**attempt.__dict__, **own})


def update_rollout(tx: Transaction, rollout_id: str, changes: Mapping[str, Any]) -> Rollout:
    """Set the given fields of a rollout; a status is taken as it is, with end time and queue in line with it."""
    unit = UnitOfWork(tx)
    unit.load([rollout_id])
    [loaded] = unit.rollouts.values()
    state = loaded.record
    if changes:
        unit.before[rollout_id] = state.status
    if changes.keys() & {"mode", "resources_id", "config"}:
        state.mode = changes.get("mode", state.mode)
        state.resources_id = changes.get("resources_id", state.resources_id)
        if "config" in changes:
            state.config_json = config_json(changes["config"])
            unit.note(loaded)
        tx.run(
            "UPDATE rollouts SET mode = ?, resources_id = ?, config = ? WHERE key = ?",
            state.mode,
            state.resources_id,
            state.config_json,
            state.key,
        )
    if "input" in changes:
        tx.run("UPDATE rollout_payloads SET input = ? WHERE key = ?", changes["input"], state.key)
    if "metadata" in changes:
        tx.run("UPDATE rollout_payloads SET metadata = ? WHERE key = ?", changes["metadata"], state.key)
    if "status" in changes:
        unit.set_status(loaded, changes["status"])
    unit.save()
    [row] = tx.rows(ROLLOUTS_WITH_ATTEMPT + " WHERE r.key = ?", state.key)
    return rollout_model(row)


def cancel_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Cancel those that have not finished; all of them as they are then."""
    unit = UnitOfWork(tx)
    unit.load(rollout_ids)
    cancel(unit)
    unit.save()
    rows = tx.rows_of(ROLLOUTS_WITH_ATTEMPT + " WHERE r.rollout_id", rollout_ids)
    found = {rollout.rollout_id: rollout for rollout in map(rollout_model, rows)}
    return [found[rollout_id] for rollout_id in rollout_ids]


# The watchdog


def find_lost_attempts(tx: Transaction, limit: int) -> int:
    """Mark attempts that are overdue, at most ``limit``. How many it looked at.

    Only rollouts whose alarm has gone off are read. An alarm that heartbeats have outrun is set again.
    """
    found = tx.rows(
        "SELECT {rollout} FROM rollouts r WHERE r.due_time IS NOT NULL AND r.due_time < ?"
        " ORDER BY r.due_time LIMIT ? {lock_free}",
        tx.now,
        limit,
    )
    unit = UnitOfWork(tx)
    # By key: those that are queued again keep the order they were first queued in.
    unit.add(sorted((RolloutState(*row) for row in found), key=lambda state: state.key))
    expire(unit)
    # Rounding can put the sum before now and the difference within the limit; without this it would spin.
    unit.earliest_alarm = math.nextafter(tx.now, math.inf)
    unit.save()
    return len(found)


# Spans


def number_spans(tx: Transaction, rollout_ids: Sequence[str]) -> list[int]:
    """The next span sequence id for each request, in the order of requests. One counter a rollout."""
    states = load_rollouts(tx, rollout_ids)
    numbers: list[int] = []
    for rollout_id in rollout_ids:
        state = states[rollout_id]
        state.last_sequence_id = sequence_id_after(state.last_sequence_id, rollout_id)
        numbers.append(state.last_sequence_id)
    save_counters(tx, states.values())
    return numbers


def add_spans(tx: Transaction, spans: Sequence[EncodedSpan]) -> list[bool]:
    """Store spans, those without a number under the next ones of their rollouts; for each, whether it was new.

    Raises NotFound, and stores none, if a rollout or attempt is unknown.
    """
    grouped = _by_attempt(spans)
    asked = dict.fromkeys(owner for owner, _ in grouped)
    unit = UnitOfWork(tx)
    unit.load([rollout_id for rollout_id, _ in asked], asked, may_finish=False)
    is_new = _store_spans(unit, grouped)
    unit.save()
    return is_new


def _by_attempt(spans: Sequence[EncodedSpan]) -> list[tuple[tuple[str, str], list[EncodedSpan]]]:
    """Spans in order, in lists for as long as they are of one attempt, each with the ids of its rollout and attempt."""
    return [(owner, list(run)) for owner, run in groupby(spans, itemgetter(0, 1))]


def _store_spans(unit: UnitOfWork, grouped: Sequence[tuple[tuple[str, str], list[EncodedSpan]]]) -> list[bool]:
    """Store spans, and change in ``unit`` what follows from them; for each, whether it was new."""
    runs: list[_Run] = []
    for (rollout_id, attempt_id), spans in grouped:
        loaded = unit.rollouts[rollout_id]
        attempt = loaded.attempt(attempt_id)
        if None in map(_number_of, spans):
            spans = list(_numbered(loaded.record, spans))
            unit.counters[loaded.record.key] = loaded.record
        runs.append(_Run(loaded, attempt, spans))
    # Only now, so that those that bring numbers of their own do not put off the others.
    for run in runs:
        state, number = run.loaded.record, max(map(_number_of, run.spans))
        if number > state.last_sequence_id:
            state.last_sequence_id = number
            unit.counters[state.key] = state
    is_new = _insert(unit.tx, runs)
    unit.tx.counted["spans"] += sum(is_new)
    left = iter(is_new)
    note_spans(unit, [(run.loaded, run.attempt) for run in runs if any([next(left) for _ in run.spans])])
    return is_new


def _numbered(state: RolloutState, spans: Sequence[EncodedSpan]) -> Iterator[EncodedSpan]:
    """Spans of one rollout, with its next numbers where they bring none."""
    for span in spans:
        if span.sequence_id is None:
            state.last_sequence_id = sequence_id_after(state.last_sequence_id, span.rollout_id)
            span = EncodedSpan(*span[:3], state.last_sequence_id, *span[4:])
        yield span


def _insert(tx: Transaction, runs: Sequence[_Run]) -> list[bool]:
    # The database says which are new: to look for all of them first would cost every batch what few need.
    last_key = tx.number("{last_span}")
    rows = [(run.loaded.record.key, *span[1:]) for run in runs for span in run.spans]
    inserted = tx.insert(
        "spans",
        _SPAN,
        rows,
        "ON CONFLICT DO NOTHING",
    )
    if inserted == len(rows):
        return [True] * len(rows)
    # Some were there before, or come twice in this batch: the first one of each new key is the one that was stored.
    # The rollouts are locked, so all their spans beyond that key are from here.
    stored = set(tx.rows("SELECT rollout_key, attempt_id, span_id FROM spans WHERE key > ?", last_key))
    is_new: list[bool] = []
    for row in rows:
        is_new.append(row[:3] in stored)
        stored.discard(row[:3])
    return is_new
