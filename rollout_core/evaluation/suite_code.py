"""A suite that is a Python file, in the process that runs it. Imports little, to start quickly.

The file has ``suite``, a table of a suite's keys or a function that returns one. It may have ``rows``, a function whose
items are the questions, ``examples``, a function of answered ones, and ``score``, a reward function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, RolloutError, in_words, shown
from rollout_core.base.ids import canonical_json
from rollout_core.rewards.user_code import UserCode, importable, load_module

FUNCTIONS = ("rows", "examples", "score")
"""That a file may have in addition to ``suite``."""


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """The table of a suite with the names of the functions that its file has; or the rows of one of them."""
    code = UserCode.from_document(request["code"])
    name = code.callable.rpartition(":")[2]
    with importable(code, alone=request["alone"]):
        module = load_module(code)
        value = getattr(module, name, None)
        if value is None:
            raise ConfigError(f"{code.callable.rpartition(':')[0]} has no {name}; expected a table or a function")
        try:
            made = value() if callable(value) else value
            if name != "suite":
                return _rows(made)
            found = [each for each in FUNCTIONS if inspect.isroutine(getattr(module, each, None))]
            return {"suite": _table(made), "functions": found}
        except RolloutError:
            raise
        except Exception as error:
            raise Fatal(f"{name} of {code.callable.rpartition(':')[0]} failed: {in_words(error)}") from error


def _table(made: Any) -> Any:
    made = made.model_dump(mode="json", exclude_unset=True) if hasattr(made, "model_dump") else made
    if not isinstance(made, Mapping):
        raise ConfigError(f"suite is {shown(made)}; expected a table of a suite's keys")
    canonical_json(made)  # raises ConfigError for what is not JSON
    return dict(made)


def _rows(made: Any) -> list[Any]:
    if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
        raise ConfigError(f"it returned {shown(made)}; expected rows, an object of JSON each")
    rows = []
    for number, row in enumerate(made, start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} is {shown(row)}; expected an object such as {{'question': ...}}")
        canonical_json(row)
        rows.append(dict(row))
    if not rows:
        raise ConfigError("it returned no rows")
    return rows
