"""Whether a query gives the rows of another one on an SQLite file that nothing may change."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, shown
from rollout_core.config.verifiers import SqlReward
from rollout_core.rewards.verifiers.extraction import code_or_all

MAX_ROWS = 100_000
"""Of a query's answer; more is another answer than any row's."""
MAX_VALUE_BYTES = 10_000_000
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

Row = tuple[Any, ...]


class _TooMany(Exception):
    """A query that gives more rows than any row's."""


def sql_reward(spec: SqlReward, completion: str, extras: Mapping[str, Any]) -> float:
    """1 where the answer's query gives the same rows, else 0, also where it is no query. Raises ConfigError where the
    row's own cannot be run."""
    with read_only_database(Path(spec.database)) as connection:
        wanted, ordered = _wanted(spec, connection, extras[spec.answer_key])
        query = code_or_all(completion, spec.extract, "sql")
        try:
            found = _rows(connection, query or "")
        except (sqlite3.Error, sqlite3.Warning, _TooMany, ValueError, OverflowError):
            return 0.0
    if spec.ordered is not None:
        ordered = spec.ordered
    return float(found == wanted if ordered else Counter(found) == Counter(wanted))


@contextlib.contextmanager
def read_only_database(database: Path) -> Iterator[sqlite3.Connection]:
    """The file, from which queries may read and nothing else: no other file, no pragma, no extension. Raises
    ConfigError where rows of it stand in another file."""
    log = database.with_name(f"{database.name}-wal")
    if log.exists() and log.stat().st_size:
        raise ConfigError(
            f"database {database} has rows in {log.name} that are not in it yet; run `pragma wal_checkpoint(truncate)` "
            "on it, or close what writes to it"
        )
    try:
        # immutable: neither a lock nor a journal is made in its folder.
        connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ConfigError(f"database {database} cannot be opened: {error}") from None
    with contextlib.closing(connection):
        connection.execute("pragma temp_store = memory")  # or a large sort would fill the disk
        connection.execute("select * from json_each('[]')")  # so that its table is known before writing is forbidden
        connection.execute("select * from json_tree('[]')")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        yield connection


def _wanted(spec: SqlReward, connection: sqlite3.Connection, answer: Any) -> tuple[list[Row], bool]:
    """The rows that are right, and whether their order counts."""
    if isinstance(answer, str):
        try:
            return _rows(connection, answer), _is_ordered(answer)
        except _TooMany:
            raise ConfigError(f"the row's {spec.answer_key!r} gives more than {MAX_ROWS:,} rows") from None
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise ConfigError(f"the row's {spec.answer_key!r}, {shown(answer)}, fails: {error}") from None
    if not isinstance(answer, Sequence) or not all(isinstance(row, list | tuple) for row in answer):
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected a query, or a list of rows")
    rows = [_comparable(row) for row in answer]
    if any(isinstance(value, list | dict) for row in rows for value in row):
        raise ConfigError(f"the row's {spec.answer_key!r} is {shown(answer)}; expected rows of plain values")
    return rows, False


def _rows(connection: sqlite3.Connection, query: str) -> list[Row]:
    found: list[Row] = []
    for row in connection.execute(query):
        found.append(_comparable(row))
        if len(found) > MAX_ROWS:
            raise _TooMany
    return found


def _comparable(row: Sequence[Any]) -> Row:
    """Floats to nine digits, as the order of a sum decides the last ones; 2.0 equals 2."""
    return tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row)


def _is_ordered(query: str) -> bool:
    """Whether it ends in an ORDER BY that is in no parentheses."""
    bare = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL)
    while (outer := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = outer
    return bool(re.search(r"\border\s+by\b", bare, re.IGNORECASE))
