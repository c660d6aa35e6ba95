"""What differs between databases in the statements of the SQL store, and the transaction they run in.

Statements are written once: positional ``?`` parameters, and these marks for what each database says its own way:

    {texts}        a list parameter as rows of text, for ``IN ({texts})`` and joins
    {lock}         lock the rows of ``r`` until the transaction ends
    {infinity}     a number beyond all others
    {lock_free}    lock those rows of ``r`` that nobody else has locked, and leave the others out

Further marks stand for lists of columns, see ``sql_columns``. No text of a caller ever becomes part of a statement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import orjson

from rollout_core.errors import ConfigError
from rollout_core.store.sql_columns import BY_MARK


class Cursor(Protocol):
    """The part of a DB-API cursor that is used here."""

    @property
    def rowcount(self) -> int: ...

    def fetchall(self) -> list[tuple[Any, ...]]: ...


class Connection(Protocol):
    """The part of a DB-API connection that is used here."""

    def execute(self, sql: str, parameters: Sequence[Any], /) -> Cursor: ...

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> Cursor: ...


class Dialect(NamedTuple):
    """One database's way to say the marks above, and to test for a substring (``{column}``, one parameter)."""

    name: str
    texts: str
    lock: str
    lock_free: str
    contains: str
    infinity: str
    no_limit: int | None
    """The parameter of LIMIT that means none."""
    max_rows: int = 1
    """Most rows that one INSERT takes. The interpreter's lock is let go and fought for once a statement."""

    def statement(self, sql: str) -> str:
        """``sql`` with its marks filled in."""
        return _statement(self, sql)

    def array(self, values: Sequence[str]) -> Any:
        """The parameter for ``{texts}``. One parameter whatever the length, so no limit on variables is met."""
        if isinstance(values, str):
            raise ConfigError(f"got the text {values!r:.80}; expected a list of texts")
        try:
            return orjson.dumps(list(values)).decode()
        except TypeError as error:
            raise ConfigError(f"expected a list of texts: {error}") from error


SQLITE = Dialect(
    name="sqlite",
    texts="SELECT value FROM json_each(?)",
    lock="",  # a writing transaction has the whole file to itself
    lock_free="",
    contains="instr({column}, ?) > 0",
    infinity="9e999",
    no_limit=-1,
    max_rows=64,
)


@lru_cache(1024)
def _statement(dialect: Dialect, sql: str) -> str:
    for mark in ("texts", "lock", "lock_free", "infinity"):
        sql = sql.replace(f"{{{mark}}}", getattr(dialect, mark))
    for mark, columns in BY_MARK.items():
        sql = sql.replace(f"{{{mark}}}", columns)
    return sql


@lru_cache(1024)
def _many_rows(sql: str, num_rows: int) -> str | None:
    """An INSERT of one row as one of many; None for other statements."""
    match = re.fullmatch(r"(INSERT .* VALUES )(\([^)]*\))(.*)", sql)
    return match and f"{match[1]}{', '.join([match[2]] * num_rows)}{match[3]}"


class Transaction:
    """A transaction under way, as the operations of the store see it."""

    __slots__ = ("_connection", "dialect", "finished", "now")

    def __init__(self, connection: Connection, dialect: Dialect, now: float) -> None:
        self._connection = connection
        self.dialect = dialect
        self.now = now
        """The time of this transaction, in seconds since the epoch."""
        self.finished: list[str] = []
        """Rollouts that reach a terminal status if this transaction commits; their waiters are woken then."""

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement; all of its rows."""
        return self._connection.execute(_statement(self.dialect, sql), parameters).fetchall()

    def row(self, sql: str, *parameters: Any) -> tuple[Any, ...] | None:
        """Run one statement; its first row."""
        return next(iter(self.rows(sql, *parameters)), None)

    def number(self, sql: str, *parameters: Any) -> int:
        """Run one statement that yields one number."""
        return self.rows(sql, *parameters)[0][0]

    def run(self, sql: str, *parameters: Any) -> None:
        """Run one statement that yields nothing."""
        self._connection.execute(_statement(self.dialect, sql), parameters)

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run one statement for each row of parameters, prepared once. How many rows it changed in all."""
        statement, changed, start = _statement(self.dialect, sql), 0, 0
        chunk = self.dialect.max_rows
        # Chunks of 64, 16, 4 rows, so that there are few statements to prepare; what is left goes row by row.
        while chunk > 1:
            while len(rows) - start >= chunk and (insert := _many_rows(statement, chunk)):
                part = rows[start : start + chunk]
                changed += self._connection.execute(insert, [value for row in part for value in row]).rowcount
                start += chunk
            chunk //= 4
        if start < len(rows):
            changed += self._connection.executemany(statement, rows[start:]).rowcount
        return changed

    def texts(self, values: Sequence[str]) -> Any:
        """The parameter for a ``{texts}`` mark."""
        return self.dialect.array(values)
