"""The tool that queries an SQLite file.

Queries run in processes of their own, as they can be made to take all memory; those of many episodes share a few. Each
call opens the file anew, so that nothing of a call stays but what it has written into an episode's own copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.base.locks import scratch_folder
from rollout_core.base.processes import Limits
from rollout_core.config.tools import SqlTool
from rollout_core.environments.schemas import function_schema
from rollout_core.environments.tools.results import Output, ToolError
from rollout_core.rewards.verifiers.sql import MAX_VALUE_BYTES, read_only_database

MAX_PROCESSES = 4
GRACE_SECONDS = 5.0
"""For a query that does not hear that its time is up, such as one within a single large function."""
IMPORT_SECONDS = 120.0
"""For a new process to import what it needs, which a busy machine takes long for."""
PROGRESS_STEPS = 10_000
_FORBIDDEN = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
}


class SqlProcesses:
    """What runs the queries of one tool, for all episodes."""

    def __init__(self, spec: SqlTool) -> None:
        limits = Limits(
            seconds=spec.seconds + GRACE_SECONDS,
            memory_bytes=spec.memory_mb * 2**20,
            processes=4,
            address_space=True,
        )
        self._spec = spec
        self._children = [
            Child(f"{__name__}:handle", limits, prepare=_imported, prepare_seconds=IMPORT_SECONDS)
            for _ in range(MAX_PROCESSES)
        ]
        self._free: queue.LifoQueue[Child] = queue.LifoQueue()  # so that those that run are used first
        for child in reversed(self._children):
            self._free.put(child)

    def query(self, database: Path, query: str) -> dict[str, Any]:
        """Run it. Raises ToolError for what is wrong with it, Recoverable for what the machine did."""
        spec = self._spec
        child = self._free.get()
        request = {
            "database": str(database),
            "query": query,
            "writes": spec.access == "copy",
            "seconds": spec.seconds,
            "rows": spec.max_rows,
            "characters": spec.output_characters,
            "disk_bytes": spec.disk_mb * 2**20,
        }
        try:
            _begun(child, spec.name)
            return child.call(request)
        except Ended as error:
            raise ToolError(f"the query {error}; ask for less") from None
        finally:
            self._free.put(child)

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.close()


class Sql:
    """Queries on an SQLite file, or on a copy of the episode's own."""

    def __init__(self, spec: SqlTool, database: Path, processes: SqlProcesses) -> None:
        self.name = spec.name
        self.output_characters = spec.output_characters
        self._spec = spec
        self._database = database
        self._processes = processes
        self._stack = ExitStack()
        self._lock = asyncio.Lock()
        self._copy: Path | None = None
        base = function_schema(Sql.run)
        rights = "It may change the database." if spec.access == "copy" else "It may only read."
        self.schema: Mapping[str, Any] = base.schema(
            spec.name, f"{base.description} {rights} At most {spec.max_rows:,} rows are returned."
        )

    async def run(self, query: str) -> Output:
        """Run one SQL statement on an SQLite database and return its rows, as JSON. Tables are listed by SELECT name,
        sql FROM sqlite_schema.

        Args:
            query: The statement.
        """
        async with self._lock:  # one writer at a time, in the order of the calls
            if self._spec.access == "copy" and self._copy is None:
                self._copy = await asyncio.to_thread(self._copied)
            found = await asyncio.to_thread(self._processes.query, self._copy or self._database, query)
        if "error" in found:
            raise ToolError(found["error"])
        return Output(found["text"], 0, "")

    def _copied(self) -> Path:
        copy = self._stack.enter_context(scratch_folder("sql")) / "database"
        shutil.copyfile(self._database, copy)
        return copy

    async def call(self, arguments: Mapping[str, Any]) -> Output:
        return await self.run(**function_schema(Sql.run).checked(arguments))

    async def close(self) -> None:
        if self._copy is not None:
            self._copy = None
            await asyncio.to_thread(self._stack.close)


def _begun(child: Child, name: str) -> None:
    """Start it where it does not run. Raises Recoverable where it does not start, which no query is to blame for."""
    try:
        child.start()
    except Ended as error:
        raise Recoverable(f"tool {name}: the process that queries did not start: it {error}") from None


def _imported(ask: Callable[[Any], Any]) -> None:
    """Have a new process import what it needs, before a call's time begins."""
    ask({})


def handle(request: Mapping[str, Any], report: Callable[[int], None]) -> dict[str, Any]:
    """In a process of its own: the rows of a query as text, or what is wrong with it."""
    if not request:
        return {}
    deadline = time.monotonic() + request["seconds"]
    try:
        opened = _writable if request["writes"] else read_only_database
        with opened(Path(request["database"])) as connection:
            if request["writes"]:
                size = connection.execute("pragma page_size").fetchone()[0]
                connection.execute(f"pragma max_page_count = {max(1, request['disk_bytes'] // size)}")
                connection.set_authorizer(_allowed)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, PROGRESS_STEPS)
            return {"text": _run(connection, request)}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        if time.monotonic() > deadline:
            return {"error": f"the query took longer than {request['seconds']:g} s, and was ended"}
        return {"error": f"the query fails: {error or type(error).__name__}"}


@contextlib.contextmanager
def _writable(database: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(database, timeout=5.0, isolation_level=None)) as connection:
        connection.execute("pragma temp_store = memory")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.text_factory = lambda text: text.decode(errors="backslashreplace")
        yield connection


def _allowed(action: int, first: str | None, second: str | None, *_: Any) -> int:
    is_loading = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() == "load_extension"
    return sqlite3.SQLITE_DENY if action in _FORBIDDEN or is_loading else sqlite3.SQLITE_OK


def _run(connection: sqlite3.Connection, request: Mapping[str, Any]) -> str:
    cursor = connection.execute(request["query"])
    if cursor.description is None:
        return "done" if cursor.rowcount < 0 else f"done: {cursor.rowcount:,} rows changed"
    columns = [name for name, *_ in cursor.description]
    lines, size = [json.dumps(columns, ensure_ascii=False)], 0
    for row in cursor:
        if len(lines) > request["rows"]:
            lines.append(f"(more than {request['rows']:,} rows; these are the first)")
            break
        if size > request["characters"]:
            lines.append(f"(more rows than fit; these are the first {len(lines) - 1:,})")
            break
        lines.append(json.dumps([_shown(value) for value in row], ensure_ascii=False))
        size += len(lines[-1])
    else:
        lines.append(f"({len(lines) - 1:,} rows)")
    return "\n".join(line.encode("utf-8", "backslashreplace").decode() for line in lines)


def _shown(value: Any) -> Any:
    return f"x'{value[:100].hex()}'" if isinstance(value, bytes) else value


def check_database(name: str, path: Path) -> list[str]:
    """What is wrong with the database of a tool, a line each."""
    if not path.is_file():
        return [f"tool {name}: database {path} does not exist; give the path of an SQLite file"]
    try:
        with read_only_database(path) as connection:
            connection.execute("select count(*) from sqlite_schema").fetchone()
    except ConfigError as error:
        return [f"tool {name}: {error}"]
    except sqlite3.Error as error:
        return [f"tool {name}: {path} is no SQLite database: {error}"]
    return []
