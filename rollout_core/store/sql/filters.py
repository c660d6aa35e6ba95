"""Conditions and orders of the SQL store's queries. What a caller gives is only ever a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.types import FilterLogic, SortOrder

# Where a value is missing, a time counts as infinitely late, a text as "" and a number as 0.
ROLLOUT_SORT = {
    "rollout_id": "r.rollout_id",
    "status": "r.status",
    "mode": "COALESCE(r.mode, '')",
    "resources_id": "COALESCE(r.resources_id, '')",
    "start_time": "r.start_time",
    "end_time": "COALESCE(r.end_time, {infinity})",
}
ATTEMPT_SORT = {
    "rollout_id": "a.rollout_key",
    "attempt_id": "a.attempt_id",
    "sequence_id": "a.sequence_id",
    "status": "a.status",
    "worker_id": "COALESCE(a.worker_id, '')",
    "start_time": "a.start_time",
    "end_time": "COALESCE(a.end_time, {infinity})",
    "last_heartbeat_time": "COALESCE(a.last_heartbeat_time, {infinity})",
}
SPAN_SORT = {
    "rollout_id": "s.rollout_key",
    "attempt_id": "s.attempt_id",
    "sequence_id": "s.sequence_id",
    "trace_id": "s.trace_id",
    "span_id": "s.span_id",
    "parent_id": "COALESCE(s.parent_id, '')",
    "name": "s.name",
    "start_time": "COALESCE(s.start_time, {infinity})",
    "end_time": "COALESCE(s.end_time, {infinity})",
}
RESOURCES_SORT = {name: name for name in ("resources_id", "create_time", "update_time", "version")}
WORKER_SORT = {
    "worker_id": "worker_id",
    "status": "status",
    "last_heartbeat_time": "COALESCE(last_heartbeat_time, {infinity})",
    "last_dequeue_time": "COALESCE(last_dequeue_time, {infinity})",
    "last_busy_time": "COALESCE(last_busy_time, {infinity})",
    "last_idle_time": "COALESCE(last_idle_time, {infinity})",
    "current_rollout_id": "COALESCE(current_rollout_id, '')",
    "current_attempt_id": "COALESCE(current_attempt_id, '')",
}


class Filter:
    """Conditions on the rows of one table: some always hold, the others are joined by ``logic``."""

    def __init__(self, tx: Transaction, logic: FilterLogic = "and") -> None:
        if logic not in ("and", "or"):
            raise ConfigError(f"filter_logic is {logic!r}; expected 'and' or 'or'")
        self._tx = tx
        self._logic = f" {logic.upper()} "
        self._always: list[str] = []
        self._always_parameters: list[Any] = []
        self._joined: list[str] = []
        self._joined_parameters: list[Any] = []

    def always(self, condition: str, *parameters: Any) -> Filter:
        """Require ``condition`` whatever the logic."""
        self._always.append(condition)
        self._always_parameters.extend(parameters)
        return self

    def equals(self, column: str, value: str | None) -> Filter:
        """Match one value; None: no condition."""
        return self._join(f"{column} = ?", value)

    def within(self, column: str, values: Sequence[str] | None) -> Filter:
        """Match any of these values; None: no condition; an empty list: no row."""
        if values is None:
            return self
        if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
            return self.equals(column, values[0])  # lets an index give the order as well
        return self._join(f"{column} {{in_texts}}", self._tx.texts(values))

    def contains(self, column: str, part: str | None) -> Filter:
        """Match values with this substring, case and all; None: no condition."""
        return self._join(self._tx.dialect.contains.format(column=column), part)

    def _join(self, condition: str, parameter: Any) -> Filter:
        if parameter is not None:
            self._joined.append(condition)
            self._joined_parameters.append(parameter)
        return self

    @property
    def where(self) -> str:
        """The WHERE clause, or nothing."""
        conditions = [*self._always, *([f"({self._logic.join(self._joined)})"] if self._joined else [])]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    @property
    def parameters(self) -> list[Any]:
        """The parameters of ``where``."""
        return [*self._always_parameters, *self._joined_parameters]


def order_by(columns: Mapping[str, str], sort_by: str | None, sort_order: SortOrder, *ties: str) -> str:
    """The ORDER BY clause for a field, ties broken by ``ties``; without a field, by ``ties`` alone."""
    if sort_order not in ("asc", "desc"):
        raise ConfigError(f"sort_order is {sort_order!r}; expected 'asc' or 'desc'")
    if sort_by is None:
        return f" ORDER BY {', '.join(ties)}"
    if sort_by not in columns:
        raise ConfigError(f"cannot sort by {sort_by!r}; expected one of {', '.join(columns)}")
    return f" ORDER BY {columns[sort_by]} {sort_order.upper()}, {', '.join(ties)}"
