"""Between rows of the database and the models of the contract.

``RolloutState`` is a row of ``rollouts`` that an operation reads, changes in memory by the rules of ``lifecycle`` and
writes back once, together with all others of its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from rollout_core.base.trusted import trusted
from rollout_core.store import lifecycle
from rollout_core.store.checks import check_span, refuse_missing
from rollout_core.store.codec import decode, encode, model_fields
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.span_fields import num_nulls
from rollout_core.store.spans import Event, Link, OtelResource, Span, SpanContext, TraceStatus
from rollout_core.store.sql.dialect import BODY, NUM_ROLLOUT, SPAN, Transaction
from rollout_core.store.types import Attempt, AttemptedRollout, Rollout, RolloutConfig, RolloutStatus, Worker

PartT = TypeVar("PartT", bound=BaseModel)

ROLLOUTS_WITH_ATTEMPT = (
    "SELECT {rollout}, {payload}, {attempt} FROM rollouts r"
    " JOIN rollout_payloads p ON p.key = r.key"
    " LEFT JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
)
"""All there is to know of rollouts, as ``rollout_model`` reads it; a WHERE follows."""
_SPAN_COLUMNS = [column.removeprefix("s.") for column in SPAN.split(", ")[:BODY]]
"""The fields of a span that have columns of their own, the rollout's id left out."""
_columns_of = itemgetter(*_SPAN_COLUMNS)
_NUM_FIELDS: dict[type[BaseModel], int] = {
    model: len(model.model_fields) for model in (Event, OtelResource, SpanContext, TraceStatus)
}
"""The parts of a span are stored with all of their fields, so that their number tells whether there are others."""


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
    if len(wanted) == 1:
        found = tx.rows("SELECT {rollout} FROM rollouts r WHERE r.rollout_id = ? {lock}", wanted[0])
    else:
        found = tx.rows("SELECT {rollout} FROM rollouts r WHERE r.rollout_id {in_texts} {lock}", tx.texts(wanted))
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
    return tx.rows(
        "SELECT {rollout}, {attempt} FROM rollouts r"
        " LEFT JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
        " WHERE r.rollout_id {in_texts}",
        tx.texts(rollout_ids),
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
        "metadata": None if metadata_json is None else decode(metadata_json),
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


def span_columns(span: Mapping[str, Any]) -> tuple[Any, ...]:
    """A span, given as its ``SpanFields``, in the order of ``dialect.SPAN``.

    Raises ConfigError as ``check_span``, and if JSON cannot hold it.
    """
    check_span(span)
    body = dict(span)
    for name in ("rollout_id", *_SPAN_COLUMNS):
        del body[name]
    return (*_columns_of(span), encode(body, f"span {span['name']}", model_fields, num_nulls(body)))


def span_model(rollout_id: str, columns: Sequence[Any]) -> Span:
    """The model of a row in the order of ``dialect.SPAN``, its body included. What was stored is not checked again."""
    attempt_id, span_id, sequence_id, trace_id, parent_id, name, start_time, end_time, body = columns
    parts = decode(body)
    fields = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": sequence_id,
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": parent_id,
        "name": name,
        "status": _part(TraceStatus, parts.pop("status")),
        "attributes": parts.pop("attributes"),
        "events": [_part(Event, event) for event in parts.pop("events")],
        "links": [Link.model_validate(link) for link in parts.pop("links")],
        "start_time": start_time,
        "end_time": end_time,
        "context": _part(SpanContext, parts.pop("context")),
        "parent": _part(SpanContext, parts.pop("parent")),
        "resource": _part(OtelResource, parts.pop("resource")),
    }
    return trusted(Span, fields, None, parts)


def _part(model: type[PartT], fields: dict[str, Any] | None) -> Any:
    """A model of these fields, which were stored by way of that model; None if there are none."""
    if fields is None:
        return None
    if len(fields) == _NUM_FIELDS[model]:
        return trusted(model, fields, None, {})
    return model.model_validate(fields)  # it has unknown fields as well


def span_json(rollout_id: str, columns: Sequence[Any]) -> bytes:
    """What ``encode_stored`` makes of ``span_model`` (in another order), without the model."""
    *fields, body = columns
    head = orjson.dumps({"rollout_id": rollout_id, **dict(zip(_SPAN_COLUMNS, fields, strict=True))})
    return b"%b,%b" % (head[:-1], body.encode()[1:])


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
