"""Reads of the SQL store, page by page.

A query is put together from the fixed pieces below and those of ``sql_filters``; what a caller gives is only ever a
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollout_core.store.checks import LARGEST_NUMBER, check_page
from rollout_core.store.lifecycle import FINISHED
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.sql.counts import count, count_rollouts
from rollout_core.store.sql.dialect import Transaction
from rollout_core.store.sql.filters import (
    ATTEMPT_SORT,
    RESOURCES_SORT,
    ROLLOUT_SORT,
    SPAN_SORT,
    WORKER_SORT,
    Filter,
    order_by,
)
from rollout_core.store.sql.rows import (
    ROLLOUTS_WITH_ATTEMPT,
    attempt_model,
    resources_model,
    rollout_model,
    worker_model,
)
from rollout_core.store.types import (
    Attempt,
    FilterLogic,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    SortOrder,
    Worker,
)

Model = TypeVar("Model")

SELECT, COUNT = "SELECT ", "SELECT COUNT(*)"  # apart, because linters take a SELECT in an f-string for an injection
SPANS_OF_LATEST_ATTEMPT = (
    "SELECT r.rollout_id, {span} FROM rollouts r"
    " JOIN attempts a ON a.rollout_key = r.key AND a.sequence_id = r.attempt_count"
    " JOIN spans s ON s.rollout_key = r.key AND s.attempt_id = a.attempt_id"
)


def _page(
    tx: Transaction,
    select: str,
    source: str,
    filter: Filter,
    order: str,
    limit: int,
    offset: int,
    model: Callable[[tuple[Any, ...]], Model],
    *,
    key: str | None = None,
    count: Callable[[], int] | None = None,
) -> PaginatedResult[Model]:
    """One page of ``select``, whose filtered table is ``source``.

    With the name of its ``key``, only the keys of ``source`` are sorted, and rows are read for the page alone.
    ``count`` yields the total where that is known without counting.
    """
    check_page(limit, offset)
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


def find_rollouts(
    tx: Transaction,
    *,
    status_in: Sequence[str] | None,
    rollout_id_in: Sequence[str] | None,
    rollout_id_contains: str | None,
    filter_logic: FilterLogic,
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
) -> PaginatedResult[Rollout]:
    """See ``LightningStore.query_rollouts``."""
    filter = (
        Filter(tx, filter_logic)
        .within("r.status", status_in)
        .within("r.rollout_id", rollout_id_in)
        .contains("r.rollout_id", rollout_id_contains)
    )
    order = order_by(ROLLOUT_SORT, sort_by, sort_order, "r.key")
    by_status_alone = rollout_id_in is None and rollout_id_contains is None
    return _page(
        tx,
        ROLLOUTS_WITH_ATTEMPT,
        " FROM rollouts r",
        filter,
        order,
        limit,
        offset,
        rollout_model,
        key="r.key",
        count=(lambda: count_rollouts(tx, status_in)) if by_status_alone else None,
    )


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


def known_ids(tx: Transaction, rollout_ids: Sequence[str]) -> set[str]:
    """Those of these ids that are rollouts of this store."""
    found = tx.rows("SELECT rollout_id FROM rollouts WHERE rollout_id {in_texts}", tx.texts(rollout_ids))
    return {rollout_id for (rollout_id,) in found}


def any_due(tx: Transaction) -> bool:
    """Whether the watchdog has something to look at."""
    # Ordered, because PostgreSQL would else read the whole table in the hope of meeting one soon.
    sql = "SELECT 1 FROM rollouts WHERE due_time IS NOT NULL AND due_time < ? ORDER BY due_time LIMIT 1"
    return bool(tx.rows(sql, tx.now))


def find_attempts(
    tx: Transaction, rollout_id: str, *, sort_by: str | None, sort_order: SortOrder, limit: int, offset: int
) -> PaginatedResult[Attempt]:
    """See ``LightningStore.query_attempts``."""
    filter = Filter(tx).always("a.rollout_key = (SELECT key FROM rollouts WHERE rollout_id = ?)", rollout_id)
    return _page(
        tx,
        "SELECT {attempt} FROM attempts a",
        " FROM attempts a",
        filter,
        order_by(ATTEMPT_SORT, sort_by, sort_order, "a.sequence_id"),
        limit,
        offset,
        lambda row: attempt_model(rollout_id, row),
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
    tx: Transaction,
    rollout_id: str,
    attempt_id: str | None,
    *,
    exact: Mapping[str, str | None],
    parts: Mapping[str, str | None],
    filter_logic: FilterLogic,
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
    model: Callable[[str, Sequence[Any]], Model],
) -> PaginatedResult[Model]:
    """See ``LightningStore.query_spans``. ``exact`` and ``parts`` are the filters by field.

    ``model`` makes an item of the rollout's id and a row.
    """
    filter = Filter(tx, filter_logic)
    filter.always("s.rollout_key = (SELECT key FROM rollouts WHERE rollout_id = ?)", rollout_id)
    if attempt_id == "latest":
        latest = find_latest_attempt(tx, rollout_id)
        filter.always("s.attempt_id = ?", "" if latest is None else latest.attempt_id)
    elif attempt_id is not None:
        filter.always("s.attempt_id = ?", attempt_id)
    for field in ("trace_id", "span_id", "parent_id", "name"):
        filter.equals(f"s.{field}", exact.get(field)).contains(f"s.{field}", parts.get(field))
    # Spans that share a sequence id are ordered by their times.
    ties = (SPAN_SORT["start_time"], SPAN_SORT["end_time"], "s.key") if sort_by == "sequence_id" else ("s.key",)
    return _page(
        tx,
        "SELECT {span} FROM spans s",
        " FROM spans s",
        filter,
        order_by(SPAN_SORT, sort_by, sort_order, *ties),
        limit,
        offset,
        lambda row: model(rollout_id, row),
    )


def find_many_spans(
    tx: Transaction, rollout_ids: Sequence[str], name: str | None, *, model: Callable[[str, Sequence[Any]], Model]
) -> list[Model]:
    """Spans of the latest attempt of each of these rollouts: by rollout as asked for, then in order."""
    filter = Filter(tx).within("r.rollout_id", rollout_ids).equals("s.name", name)
    order = order_by(SPAN_SORT, "sequence_id", "asc", SPAN_SORT["start_time"], SPAN_SORT["end_time"], "s.key")
    found = tx.rows(f"{SPANS_OF_LATEST_ATTEMPT}{filter.where}{order}", *filter.parameters)
    place = {rollout_id: index for index, rollout_id in enumerate(dict.fromkeys(rollout_ids))}
    found.sort(key=lambda row: place[row[0]])
    return [model(row[0], row[1:]) for row in found]


def find_resources(
    tx: Transaction,
    *,
    resources_id: str | None,
    resources_id_contains: str | None,
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
) -> PaginatedResult[ResourcesUpdate]:
    """See ``LightningStore.query_resources``."""
    filter = Filter(tx).equals("resources_id", resources_id).contains("resources_id", resources_id_contains)
    return _page(
        tx,
        "SELECT {resources} FROM resources",
        " FROM resources",
        filter,
        order_by(RESOURCES_SORT, sort_by, sort_order, "key"),
        limit,
        offset,
        resources_model,
    )


def find_latest_resources(tx: Transaction) -> ResourcesUpdate | None:
    """The snapshot that was added or updated last."""
    row = tx.row("SELECT {resources} FROM resources ORDER BY change_number DESC LIMIT 1")
    return None if row is None else resources_model(row)


def find_workers(
    tx: Transaction,
    *,
    status_in: Sequence[str] | None,
    worker_id_contains: str | None,
    filter_logic: FilterLogic,
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
) -> PaginatedResult[Worker]:
    """See ``LightningStore.query_workers``."""
    filter = Filter(tx, filter_logic).within("status", status_in).contains("worker_id", worker_id_contains)
    return _page(
        tx,
        "SELECT {worker} FROM workers",
        " FROM workers",
        filter,
        order_by(WORKER_SORT, sort_by, sort_order, "key"),
        limit,
        offset,
        worker_model,
    )


def find_worker(tx: Transaction, worker_id: str) -> Worker | None:
    """One worker, if it is known."""
    row = tx.row("SELECT {worker} FROM workers WHERE worker_id = ?", worker_id)
    return None if row is None else worker_model(row)


def count_all(tx: Transaction) -> LightningStoreStatistics:
    """How many rows of each kind there are."""
    return LightningStoreStatistics(
        total_rollouts=count_rollouts(tx),
        total_attempts=count(tx, "attempts"),
        total_spans=count(tx, "spans"),
        total_resources=tx.number("SELECT COUNT(*) FROM resources"),
        total_workers=tx.number("SELECT COUNT(*) FROM workers"),
    )
