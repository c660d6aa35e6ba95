"""Rows of plugins, of kind ``data-source``: what a call asks them, and what of their answers counts.

A call's payload is ``{"start": n, "count": m}``; its result ``{"rows": [...], "end": bool}``, at most ``m`` objects
from the row at position ``n`` on, and whether there is none after them. Rows are asked for in their order, each once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from pydantic import Field

from rollout_core.base.errors import ConfigError, Fatal, shown
from rollout_core.config.base import PluginDataset
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import PluginCode

log = logging.getLogger(__name__)

ADAPTER = f"{__name__}:adapt"
Row = dict[str, Any]
MOST_ROWS = 1_000_000
"""Of a source whose rows nobody has bounded: it may be an endless one."""
REMINDER_SECONDS = 10.0
"""Between lines that say that such a source is still read."""


class RowsCase(Case):
    """A case of a source of rows."""

    max_rows: int | None = Field(default=None, ge=1)
    """As of the configuration; of an endless source."""
    rows: tuple[Row, ...]
    """All that it gives."""


def plugin_rows(source: PluginDataset, code: PluginCode, on_line: Callable[[str], None] = log.info) -> Iterator[Row]:
    """Rows of a plugin, which is started for them, and ended with them. Raises ConfigError where it cannot be started,
    for a call that fails, as no data set begins that lacks rows, and for more than `MOST_ROWS` without ``max_rows``."""
    plugin = PluginProcess(code, source.config, adapter=ADAPTER, on_line=on_line)
    num_rows, is_at_end, said = 0, False, time.monotonic()
    try:
        while not is_at_end:
            left = code.manifest.limits.batch_size
            if source.max_rows is not None:
                left = min(left, source.max_rows - num_rows)
            try:
                answer = plugin.call({"start": num_rows, "count": left}, lambda result: _problem(result, left))  # noqa: B023
            except Fatal as error:
                raise ConfigError(f"{error}, asked for rows from {num_rows + 1} on") from error
            yield from answer["rows"]
            num_rows += len(answer["rows"])
            is_at_end = answer["end"] or num_rows == source.max_rows
            if is_at_end or source.max_rows is not None:
                continue
            if num_rows >= MOST_ROWS:
                raise ConfigError(
                    f"plugin {source.name}: got {num_rows:,} rows and no end; expected max_rows in its table, which an "
                    "endless source needs, and one of so many rows"
                )
            if time.monotonic() - said > REMINDER_SECONDS:
                said = time.monotonic()
                log.warning(
                    "plugin %s: %s rows and no end yet; max_rows in its table ends an endless source",
                    source.name,
                    f"{num_rows:,}",
                )
    finally:
        plugin.close()


def _problem(result: Any, count: int) -> str | None:
    rows = result.get("rows") if isinstance(result, dict) else None
    end = result.get("end") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not isinstance(end, bool):
        return f"answered with {shown(result)}; expected rows, a list, and end, true or false"
    if len(rows) > count:
        return f"answered with {len(rows)} rows; expected at most {count}, as it was asked for"
    if not rows and not end:
        return "answered with no rows, and that more follow; expected a row, or end"
    wrong = [row for row in rows if not isinstance(row, dict)]
    return f"answered with the row {shown(wrong[0])}; expected an object" if wrong else None


def failed_cases(code: PluginCode, cases: Sequence[tuple[int, RowsCase]], on_line: Callable[[str], None]) -> list[str]:
    """Put test cases to a plugin, which is started for each; what is wrong, a line for each."""
    failures: list[str] = []
    for number, case in cases:
        source = PluginDataset(kind="plugin", name=code.name, config=case.config, max_rows=case.max_rows)
        try:
            got: Any = list(plugin_rows(source, code, on_line))
        except ConfigError as error:
            got = error
        if got != list(case.rows):
            failures.append(f"{TEST_CASES}:{number}: got {got}; expected {list(case.rows)}")
    return failures


def adapt(name: str, made: Any) -> Callable[[Any], Any]:
    """In a Python plugin's process: its factory made the rows, or a function that does."""
    if not callable(made) and not isinstance(made, Iterable):
        raise ConfigError(
            f"plugin {name}: its factory returned {shown(made)}; expected rows, or a function without arguments that "
            "returns them"
        )

    def rows() -> Iterator[Any]:  # asks for them at the first call, which is about what fails in it
        found: Any = made() if callable(made) else made
        yield from found

    left, given, ahead = rows(), 0, list[Any]()

    def answer(payload: Any) -> Any:
        nonlocal given, ahead
        if payload["start"] != given:
            raise Fatal(f"was started again after {payload['start']} rows, and begins with the first")
        found = [*ahead, *islice(left, payload["count"] - len(ahead))]
        ahead = list(islice(left, 1))
        given += len(found)
        return {"rows": found, "end": not ahead}

    return answer
