"""Reads of the SQL store, page by page.

A query is put together from the fixed pieces below; what a caller gives is only ever a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from rollout_core.base.errors import NotFound
from rollout_core.store.checks import LARGEST_NUMBER
from rollout_core.store.lifecycle import FINISHED
from rollout_core.store.queries import (
    AttemptsQuery,
    Query,
    ResourcesQuery,
    RolloutsBrowse,
    RolloutsQuery,
    SpansQuery,
    WorkersQuery,
    sortable_fields,
)
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    attempt_model,
    resources_model,
    rollout_model,
    worker_model,
)
from rollout_core.store.types import (
    Attempt,
    BrowsedPage,
    FilterLogic,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    RolloutStatus,
    Worker,
)

Model = TypeVar("Model")


def _sort(model: type[BaseModel], table: str, **others: str) -> dict[str, str]:
    """By field, what rows are sorted by; ``others`` are not their field's own column. Where a value is missing, a time
    counts as infinitely late, a text as "" and a number as 0."""
    sort: dict[str, str] = {}
    for name, missing in sortable_fields(model).items():
        column = f"{table}{name}"
        instead = "{infinity}" if missing == math.inf else f"{missing!r}"
        sort[name] = others.get(name, column if missing is None else f"COALESCE({column}, {instead})")
    return sort


ROLLOUT_SORT = _sort(Rollout, "r.")
ATTEMPT_SORT = _sort(Attempt, "a.", rollout_id="a.rollout_key")
SPAN_SORT = _sort(Span, "s.", rollout_id="s.rollout_key")
SPAN_TIES = (SPAN_SORT["start_time"], SPAN_SORT["end_time"], "s.key")
RESOURCES_SORT = _sort(ResourcesUpdate, "")
WORKER_SORT = _sort(Worker, "")


class Filter:
    """Conditions on the rows of one table: some always hold, the others are joined by ``logic``."""

    def __init__(self, tx: Transaction, logic: FilterLogic = "and") -> None:
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


def order_by(columns: Mapping[str, str], query: Query, *ties: str) -> str:
    """The ORDER BY clause of a query that was checked, ties broken by ``ties``; without a field, by ``ties`` alone."""
    if query.sort_by is None:
        return f" ORDER BY {', '.join(ties)}"
    return f" ORDER BY {columns[query.sort_by]} {query.sort_order.upper()}, {', '.join(ties)}"


SELECT, COUNT = "SELECT ", "SELECT COUNT(*)"  # apart, because linters take a SELECT in an f-string for an injection
SPANS_OF_LATEST_ATTEMPT = (
    "SELECT r.rollout_id, {span} FROM rollouts r"
    " JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
    " JOIN spans s ON s.rollout_key = r.key AND s.attempt_id = a.attempt_id"
)


def _page(
    tx: Transaction,
    query: Query,
    select: str,
    source: str,
    filter: Filter,
    order: str,
    model: Callable[[tuple[Any, ...]], Model],
    *,
    key: str | None = None,
    count: Callable[[], int] | None = None,
) -> PaginatedResult[Model]:
    """One page of ``select``, whose filtered table is ``source``.

    With the name of its ``key``, only the keys of ``source`` are sorted, and rows are read for the page alone.
    ``count`` yields the total where that is known without counting.
    """
    limit, offset = query.limit, query.offset
    where, parameters = filter.where, filter.parameters
    if limit == -1 and offset == 0:
        items = [model(row) for row in tx.rows(f"{select}{where}{order}", *parameters)]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=len(items))
    rows: list[tuple[Any, ...]] = []
    if limit != 0:
        # One more than wanted: often that shows that there are no more, which spares the count.
        part = f"{where}{order} LIMIT ? OFFSET ?"
        if key is not None:
            part = f" WHERE {key} IN ({SELECT}{key}{source}{part}){order}"
        most = tx.dialect.no_limit if limit == -1 else min(limit + 1, LARGEST_NUMBER)
        rows = tx.rows(f"{select}{part}", *parameters, most, offset)
    is_last = limit == -1 or len(rows) <= limit
    if limit != 0 and is_last and (rows or not offset):
        total = offset + len(rows)
    else:
        total = tx.number(f"{COUNT}{source}{where}", *parameters) if count is None else count()
        rows = rows if limit == -1 else rows[:limit]
    return PaginatedResult(items=[model(row) for row in rows], limit=limit, offset=offset, total=total)


def find_rollouts(tx: Transaction, query: RolloutsQuery) -> PaginatedResult[Rollout]:
    """See ``LightningStore.query_rollouts``."""
    filter = (
        Filter(tx, query.filter_logic)
        .within("r.status", query.status_in)
        .within("r.rollout_id", query.rollout_id_in)
        .contains("r.rollout_id", query.rollout_id_contains)
    )
    by_status_alone = query.rollout_id_in is None and query.rollout_id_contains is None
    return _page(
        tx,
        query,
        ROLLOUTS_WITH_ATTEMPT,
        " FROM rollouts r",
        filter,
        order_by(ROLLOUT_SORT, query, "r.key"),
        rollout_model,
        key="r.key",
        count=(lambda: _count_rollouts(tx, query.status_in)) if by_status_alone else None,
    )


def browse_rollouts(tx: Transaction, query: RolloutsBrowse) -> BrowsedPage[Rollout]:
    """See ``LightningStore.browse_rollouts``."""
    before, status_in, text, limit, within = query
    filter = Filter(tx)
    if before is not None:
        after = tx.row("SELECT key FROM rollouts WHERE rollout_id = ?", before)
        if after is None:
            raise NotFound(f"there is no rollout {before!r} to go on after")
        filter.always("r.key < ?", after[0])
    # Of one status an index has all, in order; those of several are looked for.
    if status_in is not None and len(status_in) == 1:
        filter.always("r.status = ?", status_in[0])
        status_in = None
    lowest = None
    if text is not None or status_in is not None:
        keys = f"{SELECT}r.key, r.rollout_id FROM rollouts r{filter.where} ORDER BY r.key DESC LIMIT 2 OFFSET ?"
        last = tx.rows(keys, *filter.parameters, within - 1)
        if len(last) == 2:  # there are others behind the last one that is looked at
            lowest = last[0]
            filter.always("r.key >= ?", lowest[0])
    if status_in is not None:
        filter.within("r.status", status_in)
    if text is not None:
        has_part = tx.dialect.contains
        part = f"({has_part.format(column='r.rollout_id')} OR {has_part.format(column='p.input')})"
        filter.always(part, text, text)
    # One more than wanted shows whether there are more.
    page = f"{ROLLOUTS_WITH_ATTEMPT}{filter.where} ORDER BY r.key DESC LIMIT ?"
    rows = tx.rows(page, *filter.parameters, min(limit + 1, LARGEST_NUMBER))
    items = [rollout_model(row) for row in rows[:limit]]
    if len(rows) > limit:
        return BrowsedPage(items=items, next=items[-1].rollout_id)
    return BrowsedPage(items=items, next=None if lowest is None else lowest[1])


def find_rollout(tx: Transaction, rollout_id: str) -> Rollout | None:
    """One rollout, with its latest attempt if it has one."""
    row = tx.row(ROLLOUTS_WITH_ATTEMPT + " WHERE r.rollout_id = ?", rollout_id)
    return None if row is None else rollout_model(row)


def find_finished(tx: Transaction, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Those of these rollouts that are in a terminal status."""
    found = tx.rows(
        ROLLOUTS_WITH_ATTEMPT + " WHERE r.rollout_id {in_texts} AND r.status {in_texts}",
        tx.texts(rollout_ids),
        tx.texts(sorted(FINISHED)),
    )
    return [rollout_model(row) for row in found]


def is_work_queued(tx: Transaction) -> bool:
    """Whether a rollout waits to be claimed."""
    return tx.row("SELECT 1 FROM rollouts WHERE queue_position IS NOT NULL LIMIT 1") is not None


def known_ids(tx: Transaction, rollout_ids: Sequence[str]) -> set[str]:
    """Those of these ids that are rollouts of this store."""
    found = tx.rows("SELECT rollout_id FROM rollouts WHERE rollout_id {in_texts}", tx.texts(rollout_ids))
    return {rollout_id for (rollout_id,) in found}


def any_due(tx: Transaction) -> bool:
    """Whether the watchdog has something to look at."""
    # Ordered, because PostgreSQL would else read the whole table in the hope of meeting one soon.
    sql = "SELECT 1 FROM rollouts WHERE due_time IS NOT NULL AND due_time < ? ORDER BY due_time LIMIT 1"
    return bool(tx.rows(sql, tx.now))


def find_attempts(tx: Transaction, query: AttemptsQuery) -> PaginatedResult[Attempt]:
    """See ``LightningStore.query_attempts``."""
    filter = Filter(tx).always("a.rollout_key = (SELECT key FROM rollouts WHERE rollout_id = ?)", query.rollout_id)
    return _page(
        tx,
        query,
        "SELECT {attempt} FROM attempts a",
        " FROM attempts a",
        filter,
        order_by(ATTEMPT_SORT, query, "a.sequence_id"),
        lambda row: attempt_model(query.rollout_id, row),
    )


def find_latest_attempt(tx: Transaction, rollout_id: str) -> Attempt | None:
    """The attempt with the highest number, if there is one."""
    row = tx.row(
        "SELECT {attempt} FROM rollouts r JOIN attempts a"
        " ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count WHERE r.rollout_id = ?",
        rollout_id,
    )
    return None if row is None else attempt_model(rollout_id, row)


def find_spans(
    tx: Transaction, query: SpansQuery, model: Callable[[str, Sequence[Any]], Model]
) -> PaginatedResult[Model]:
    """See ``LightningStore.query_spans``. ``model`` makes an item of the rollout's id and a row."""
    rollout_id, attempt_id = query.rollout_id, query.attempt_id
    filter = Filter(tx, query.filter_logic)
    filter.always("s.rollout_key = (SELECT key FROM rollouts WHERE rollout_id = ?)", rollout_id)
    if attempt_id == "latest":
        latest = find_latest_attempt(tx, rollout_id)
        filter.always("s.attempt_id = ?", "" if latest is None else latest.attempt_id)
    elif attempt_id is not None:
        filter.always("s.attempt_id = ?", attempt_id)
    parts = query.parts
    for field, text in query.exact.items():
        filter.equals(f"s.{field}", text).contains(f"s.{field}", parts[field])
    # Spans that share a sequence id are ordered by their times.
    ties = SPAN_TIES if query.sort_by == "sequence_id" else ("s.key",)
    return _page(
        tx,
        query,
        "SELECT {span} FROM spans s",
        " FROM spans s",
        filter,
        order_by(SPAN_SORT, query, *ties),
        lambda row: model(rollout_id, row),
    )


def find_many_spans(
    tx: Transaction, rollout_ids: Sequence[str], name: str | None, *, model: Callable[[str, Sequence[Any]], Model]
) -> list[Model]:
    """Spans of the latest attempt of each of these rollouts: by rollout as asked for, then in order."""
    filter = Filter(tx).within("r.rollout_id", rollout_ids).equals("s.name", name)
    order = f" ORDER BY s.sequence_id, {', '.join(SPAN_TIES)}"
    found = tx.rows(f"{SPANS_OF_LATEST_ATTEMPT}{filter.where}{order}", *filter.parameters)
    place = {rollout_id: index for index, rollout_id in enumerate(dict.fromkeys(rollout_ids))}
    found.sort(key=lambda row: place[row[0]])
    return [model(row[0], row[1:]) for row in found]


def find_resources(tx: Transaction, query: ResourcesQuery) -> PaginatedResult[ResourcesUpdate]:
    """See ``LightningStore.query_resources``."""
    filter = Filter(tx).equals("resources_id", query.resources_id)
    filter.contains("resources_id", query.resources_id_contains)
    order = order_by(RESOURCES_SORT, query, "key")
    return _page(tx, query, "SELECT {resources} FROM resources", " FROM resources", filter, order, resources_model)


def find_latest_resources(tx: Transaction) -> ResourcesUpdate | None:
    """The snapshot that was added or updated last."""
    row = tx.row("SELECT {resources} FROM resources ORDER BY change_number DESC LIMIT 1")
    return None if row is None else resources_model(row)


def find_workers(tx: Transaction, query: WorkersQuery) -> PaginatedResult[Worker]:
    """See ``LightningStore.query_workers``."""
    filter = Filter(tx, query.filter_logic).within("status", query.status_in)
    filter.contains("worker_id", query.worker_id_contains)
    order = order_by(WORKER_SORT, query, "key")
    return _page(tx, query, "SELECT {worker} FROM workers", " FROM workers", filter, order, worker_model)


def find_worker(tx: Transaction, worker_id: str) -> Worker | None:
    """One worker, if it is known."""
    row = tx.row("SELECT {worker} FROM workers WHERE worker_id = ?", worker_id)
    return None if row is None else worker_model(row)


def count_all(tx: Transaction) -> LightningStoreStatistics:
    """How many rows of each kind there are."""
    return LightningStoreStatistics(
        total_rollouts=_count_rollouts(tx),
        total_attempts=_sum_counts(tx, ["attempts"]),
        total_spans=_sum_counts(tx, ["spans"]),
        total_resources=tx.number("SELECT COUNT(*) FROM resources"),
        total_workers=tx.number("SELECT COUNT(*) FROM workers"),
    )


# Counts that are kept, because to count a million rows anew for each page takes longer than the page


def _count_rollouts(tx: Transaction, statuses: Iterable[str] | None = None) -> int:
    """How many rollouts have one of these statuses; None: any."""
    return _sum_counts(tx, get_args(RolloutStatus) if statuses is None else statuses)


def _sum_counts(tx: Transaction, names: Iterable[str]) -> int:
    return tx.number(
        "SELECT CAST(COALESCE(SUM(count), 0) AS BIGINT) FROM counts WHERE name {in_texts}", tx.texts(list(names))
    )


_SPANS_READ = 20_000


def find_span_bodies(tx: Transaction, after: int, since: float, names: Sequence[str]) -> tuple[list[str], int | None]:
    """Bodies of spans of these names with a key after ``after``, of rollouts that have not ended or ended ``since``
    that time; and the key to go on from, None at the end."""
    rows = tx.rows(
        "SELECT s.key, s.body FROM spans s JOIN rollouts r ON r.key = s.rollout_key"
        " WHERE s.key > ? AND s.name {in_texts} AND (r.end_time IS NULL OR r.end_time >= ?) ORDER BY s.key LIMIT ?",
        after,
        tx.texts(list(names)),
        since,
        _SPANS_READ,
    )
    return [body for _, body in rows], rows[-1][0] if len(rows) == _SPANS_READ else None
