"""Rows of ``changes``: what each transaction has changed, written with it and read by those who watch the store."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from rollout_core.base.errors import Recoverable
from rollout_core.store.changes import KEPT_GROUPS, ChangeKind, ChangePage, Group, Place, gone, grouped, page_of
from rollout_core.store.sql.dialect import Transaction

_PRUNED_EVERY = 1_000
"""Of rows, how many are added until the oldest are dropped."""
_PART_GROUPS = 50
"""Rows that are read at once."""
_DROP = "DELETE FROM changes WHERE number < ?"
_DROP_ALONE = "DELETE FROM changes WHERE transaction_id = 0 AND number < ?"
_SETTLED = "SELECT transaction_id, number, time, entries FROM changes WHERE {settled} "


def add_changes(tx: Transaction) -> None:
    """Write what the transaction has changed, as its last statements."""
    for part in grouped(tx.changes):
        number = tx.number(
            "INSERT INTO changes (transaction_id, number, time, entries)"
            " VALUES ({transaction_id}, {next_change}, ?, ?) RETURNING number",
            tx.now,
            orjson.dumps(part).decode(),
        )
        if number % _PRUNED_EVERY == 0:
            oldest = number - KEPT_GROUPS
            tx.run(_DROP_ALONE if tx.dialect.writes_alone else _DROP, oldest)


def last_place(tx: Transaction) -> Place:
    """The place of the last change that nothing can come before any more. Raises Recoverable where an open transaction
    of the server is older than all that are kept."""
    last = _groups(tx, "ORDER BY transaction_id DESC, number DESC LIMIT 1")
    if not last:
        raise Recoverable(
            "no change can be seen: a transaction of the database's server has been open since before all that are "
            "kept; end it"
        )
    return last[0].end


def find_changes(tx: Transaction, after: Place, kinds: Sequence[ChangeKind] | None, limit: int) -> ChangePage:
    """See `page_of`. Raises NotFound where some of them are not kept any more."""
    first = after[:2]
    groups = _groups(
        tx,
        "AND (transaction_id, number) >= (?, ?) ORDER BY transaction_id, number LIMIT ?",
        *first,
        _PART_GROUPS,
    )
    if not groups or not groups[0].has(after):
        raise gone(after)
    return page_of(groups, after, kinds, limit)


def _groups(tx: Transaction, rest: str, *parameters: int) -> list[Group]:
    rows = tx.rows(_SETTLED + rest, *parameters)
    return [Group(transaction, number, time, orjson.loads(entries)) for transaction, number, time, entries in rows]
