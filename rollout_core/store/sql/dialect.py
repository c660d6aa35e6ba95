"""What differs between databases in the statements of the SQL store, and the transaction they run in.

Statements are written once: positional ``?`` parameters, and these marks for what each database says its own way:

    {in_texts}     membership in a list of texts, which is one parameter
    {lock}         lock the rows of ``r`` until the transaction ends, always in the same order
    {lock_free}    lock those rows of ``r`` that nobody else has locked, and leave the others out
    {infinity}     a number beyond all others
    {last_span}    a number that every span written from now on has a higher key than
    {clock}        the database's own time, in seconds since the epoch, at the moment it is read

Further marks stand for lists of columns, see ``COLUMNS``. INSERT and UPDATE of rows are built by each database's
connection from the names of the table and its columns. No text of a caller ever becomes part of a statement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, Protocol

import orjson

from rollout_core.base.errors import ConfigError
from rollout_core.store.changes import Entry

ROLLOUT = (
    "r.key, r.rollout_id, r.status, r.mode, r.resources_id, r.start_time, r.end_time, r.config, r.attempt_count,"
    " r.last_sequence_id, r.queue_position, r.due_time"
)
PAYLOAD = "p.input, p.metadata"
ATTEMPT = (
    "a.attempt_id, a.sequence_id, a.start_time, a.end_time, a.status, a.worker_id, a.last_heartbeat_time, a.metadata"
)
SPAN = "s.attempt_id, s.span_id, s.sequence_id, s.trace_id, s.parent_id, s.name, s.start_time, s.end_time, s.body"
COLUMNS = {
    "rollout": ROLLOUT,
    "payload": PAYLOAD,
    "attempt": ATTEMPT,
    "span": SPAN,
    "resources": "resources_id, create_time, update_time, version, resources",
    "worker": (
        "worker_id, status, heartbeat_stats, last_heartbeat_time, last_dequeue_time, last_busy_time, last_idle_time,"
        " current_rollout_id, current_attempt_id"
    ),
}
"""The columns that statements read, by the mark that stands for them, such as ``{rollout}``."""
NUM_ROLLOUT = len(ROLLOUT.split(","))
BODY = len(SPAN.split(",")) - 1
"""Place of a span's body in its row."""


class Connection(Protocol):
    """A connection as the operations of the store use it; statements have their marks filled in."""

    writer: int
    """A number of this connection, from a small range."""

    def fetch(self, sql: str, parameters: Sequence[Any], /) -> list[tuple[Any, ...]]:
        """Run one statement; all of its rows."""
        ...

    def insert(self, table: str, columns: str, rows: Sequence[Sequence[Any]], conflict: str, /) -> int:
        """See ``Transaction.insert``."""
        ...

    def update(self, table: str, columns: str, keys: str, rows: Sequence[Sequence[Any]], /) -> None:
        """See ``Transaction.update``."""
        ...


class Dialect(NamedTuple):
    """One database's way to say the marks above, and to test for a substring (``{column}``, one parameter)."""

    name: str
    in_texts: str
    lock: str
    lock_free: str
    infinity: str
    last_span: str
    clock: str
    transaction_id: str
    """The number of a writing transaction; 0 where they commit in the order in which they begin."""
    next_change: str
    """The number of the next row of ``changes``."""
    settled: str
    """Of ``changes``: rows before which no other can appear any more."""
    contains: str
    numbers: dict[str, str]
    """By the name of a counter: the statement for its next ``?`` numbers, which nobody else gets; with
    ``writes_alone`` the one for its last number."""
    no_limit: int | None
    """The parameter of LIMIT that means none."""
    array: Callable[[Sequence[str]], Any]
    """The parameter for ``{in_texts}`` from a list."""
    writes_alone: bool = False
    """Whether a writing transaction has the whole database to itself."""
    numbered_parameters: bool = False
    """Whether ``?`` is written ``$1``, ``$2`` and so on."""

    def statement(self, sql: str) -> str:
        """``sql`` with its marks filled in."""
        return _statement(self.name, sql)


def _json_array(values: Sequence[str]) -> str:
    return orjson.dumps(values).decode()


SQLITE = Dialect(
    name="sqlite",
    in_texts="IN (SELECT value FROM json_each(?))",
    lock="",
    lock_free="",
    infinity="9e999",
    last_span="SELECT COALESCE(MAX(key), 0) FROM spans",
    clock="((julianday('now') - 2440587.5) * 86400.0)",
    transaction_id="0",
    next_change="(SELECT COALESCE(MAX(number), 0) + 1 FROM changes WHERE transaction_id = 0)",
    settled="transaction_id = 0",
    contains="instr({column}, ?) > 0",
    numbers={
        "rollout": "SELECT COALESCE(MAX(key), 0) FROM rollouts",
        "queue": "SELECT COALESCE(MAX(queue_position), 0) FROM rollouts WHERE queue_position IS NOT NULL",
        "resources": "SELECT COALESCE(MAX(change_number), 0) FROM resources",
    },
    no_limit=-1,
    array=_json_array,
    writes_alone=True,
)
POSTGRES = Dialect(
    name="postgresql",
    in_texts="= ANY (?::text[])",
    lock="ORDER BY r.key FOR UPDATE OF r",
    lock_free="FOR UPDATE OF r SKIP LOCKED",
    infinity="'infinity'::float8",
    last_span="SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM spans_key_seq",
    clock="extract(epoch FROM clock_timestamp())::float8",
    transaction_id="pg_current_xact_id()::text::bigint",
    next_change="nextval('change_numbers')",
    settled="transaction_id < pg_snapshot_xmin(pg_current_snapshot())::text::bigint",
    contains="strpos({column}, ?) > 0",
    # Sequences, because two processes that read MAX(key) at the same time would take the same number.
    numbers={
        "rollout": "SELECT nextval('rollouts_key_seq') FROM generate_series(1, ?::bigint)",
        "queue": "SELECT nextval('queue_positions') FROM generate_series(1, ?::bigint)",
        "resources": "SELECT nextval('resources_changes') FROM generate_series(1, ?::bigint)",
    },
    no_limit=None,
    array=list,
    numbered_parameters=True,
)
_DIALECTS = {dialect.name: dialect for dialect in (SQLITE, POSTGRES)}


_MARKS = ("in_texts", "lock", "lock_free", "infinity", "last_span", "clock", "transaction_id", "next_change", "settled")


@lru_cache(1024)
def _statement(name: str, sql: str) -> str:
    dialect = _DIALECTS[name]
    for mark in _MARKS:
        sql = sql.replace(f"{{{mark}}}", getattr(dialect, mark))
    for mark, columns in COLUMNS.items():
        sql = sql.replace(f"{{{mark}}}", columns)
    if dialect.numbered_parameters:
        first, *others = sql.split("?")
        sql = first + "".join(f"${number}{part}" for number, part in zip(count(1), others))
    return sql


class Transaction:
    """A transaction under way, as the operations of the store see it."""

    __slots__ = ("_connection", "changes", "counted", "dialect", "finished", "now", "num_queued")

    def __init__(self, connection: Connection, dialect: Dialect, now: float) -> None:
        self._connection = connection
        self.dialect = dialect
        self.now = now
        """The time of this transaction, in seconds since the epoch."""
        self.num_queued = 0
        """How many rollouts wait now that did not before."""
        self.finished: list[str] = []
        """Rollouts that reach a terminal status if this transaction commits; their waiters are woken then."""
        self.changes: list[Entry] = []
        """What those who watch the store are to hear of it; written once for the whole transaction."""
        self.counted: defaultdict[str, int] = defaultdict(int)
        """Changes of the counts in ``counts``, which are written once for the whole transaction."""

    @property
    def writer(self) -> int:
        """A number of this connection, from a small range."""
        return self._connection.writer

    def take_over(self, part: Transaction) -> None:
        """What a part of this transaction has finished and counted is this transaction's now."""
        self.finished += part.finished
        self.num_queued += part.num_queued
        self.changes += part.changes
        for name, change in part.counted.items():
            self.counted[name] += change

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement; all of its rows."""
        return self._connection.fetch(_statement(self.dialect.name, sql), parameters)

    def rows_of(self, sql: str, texts: Sequence[str], end: str = "") -> list[tuple[Any, ...]]:
        """The rows of a statement that ends with a column which is to be one of these texts, and then with ``end``."""
        if len(texts) == 1:  # as nearly always: a third of the time of a list
            return self.rows(f"{sql} = ? {end}", texts[0])
        return self.rows(f"{sql} {{in_texts}} {end}", self.texts(texts))

    def row(self, sql: str, *parameters: Any) -> tuple[Any, ...] | None:
        """Run one statement; its first row."""
        return next(iter(self.rows(sql, *parameters)), None)

    def number(self, sql: str, *parameters: Any) -> int:
        """Run one statement that yields one number."""
        return self.rows(sql, *parameters)[0][0]

    def run(self, sql: str, *parameters: Any) -> None:
        """Run one statement that yields nothing."""
        self._connection.fetch(_statement(self.dialect.name, sql), parameters)

    def insert(self, table: str, columns: str, rows: Sequence[Sequence[Any]], conflict: str = "") -> int:
        """Insert rows of values for ``columns`` (names, separated by ``", "``), in order; how many were written.

        ``conflict`` is the clause ``ON CONFLICT ...``, if there is one. With ``DO UPDATE``, no two rows may have the
        same key.
        """
        return self._connection.insert(table, columns, rows, conflict) if rows else 0

    def update(self, table: str, columns: str, keys: str, rows: Sequence[Sequence[Any]]) -> None:
        """Set ``columns`` where ``keys`` are equal: each row has the values of the columns, then those of the keys.

        No two rows may have the same keys and other values.
        """
        if rows:
            self._connection.update(table, columns, keys, rows)

    def next_numbers(self, counter: str, how_many: int) -> list[int]:
        """The next numbers of a counter of this database, ascending; see ``Dialect.numbers``."""
        if not how_many:
            return []
        if self.dialect.writes_alone:
            last = self.number(self.dialect.numbers[counter])
            return list(range(last + 1, last + 1 + how_many))
        return [number for (number,) in self.rows(self.dialect.numbers[counter], how_many)]

    def texts(self, values: Sequence[str]) -> Any:
        """The parameter for an ``{in_texts}`` mark. One parameter whatever the length: no limit on variables is met."""
        if isinstance(values, str):
            raise ConfigError(f"got the text {values!r:.80}; expected a list of texts")
        try:
            return self.dialect.array(list(values))
        except TypeError as error:
            raise ConfigError(f"expected a list of texts: {error}") from error
