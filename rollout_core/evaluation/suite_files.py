"""Suites by name or file: built-in ones, TOML and Python; and the rows that a function of a Python file makes.

A user's code runs in a process of its own, within limits. What it makes counts in ids: the table's keys, the content of
its rows, and the source of its scorer, as of any reward.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, near
from rollout_core.base.isolation.child import Child, Ended
from rollout_core.base.processes import Limits
from rollout_core.config.base import parse_config, read_toml
from rollout_core.config.evaluation import FunctionRows
from rollout_core.config.lm_eval import LmEvalSuite, suite_class
from rollout_core.data.datasets import RowT, parse_documents
from rollout_core.evaluation.suite_code import handle
from rollout_core.rewards.loading import IS_ISOLATED
from rollout_core.rewards.user_code import read_code

log = logging.getLogger(__name__)

LIMITS = Limits(seconds=300.0)
"""Of a call of a suite's own code."""
NAME = re.compile(r"[a-z0-9_-]+")
"""Of a built-in suite; what has a dot or a slash is a file."""
_PACKAGE = "rollout_core.evaluation"
_FOLDER = "builtin"


def builtin_names() -> list[str]:
    """Names of the suites that are built in."""
    folder = files(_PACKAGE) / _FOLDER
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_suite(name: str, *, rows: str | None = None, base: Path | None = None) -> dict[str, Any]:
    """The table of a built-in suite, or of a TOML or Python file; with ``rows`` those of a file in place of its own,
    from which its examples come, too.

    Relative paths start at ``base``. Raises ConfigError with a line for each thing that is wrong with it.
    """
    if NAME.fullmatch(name):
        table = _builtin(name)
    elif name.endswith(".py"):
        table = _python(name, base or Path())
    else:
        table = read_toml((base or Path()) / name)
    if rows is not None and suite_class(table) is LmEvalSuite:
        raise ConfigError(f"--rows of suite {name}: tasks of lm_eval have rows of their own; change the task's file")
    if rows is not None:
        table = {**table, "rows": {"path": rows}}
        prompt = table.get("prompt")
        if isinstance(prompt, Mapping) and isinstance(prompt.get("few_shot"), Mapping):
            table["prompt"] = {**prompt, "few_shot": {**prompt["few_shot"], "rows": {"path": rows}}}
    parse_config(table, suite_class(table), name=name)
    return table


def _builtin(name: str) -> dict[str, Any]:
    if name not in builtin_names():
        raise ConfigError(f"suite {name!r}: there is no such suite and no such file; {near(name, builtin_names())}")
    return read_toml(str(files(_PACKAGE) / _FOLDER / f"{name}.toml"))


def _python(name: str, base: Path) -> dict[str, Any]:
    found = _run(f"{name}:suite", base)
    table: dict[str, Any] = found["suite"]
    made = {each: {"kind": "function", "callable": f"{name}:{each}"} for each in found["functions"]}
    if "rows" in made:
        table.setdefault("rows", made["rows"])
    if "score" in made:
        table.setdefault("scorer", made["score"])
    few_shot = table.get("prompt", {}).get("few_shot") if isinstance(table.get("prompt"), Mapping) else None
    if "examples" in made and isinstance(few_shot, dict):
        few_shot.setdefault("rows", made["examples"])
    return table


def function_rows(source: FunctionRows, model: type[RowT], base: Path | None = None) -> list[RowT]:
    """Rows that a user's function makes. Raises ConfigError where it fails, or makes no such rows."""
    made: Sequence[dict[str, Any]] = _run(source.callable, base or Path())
    documents = ((f"{source.callable}, row ", number, row) for number, row in enumerate(made, start=1))
    return [row for _, _, row in parse_documents(documents, model)]


def _run(name: str, base: Path, on_line: Callable[[str], None] = log.info) -> Any:
    code = read_code(name, base, what="suite")
    request = {"code": code.document(), "alone": IS_ISOLATED}
    try:
        if not IS_ISOLATED:
            return handle(request, lambda place: None)
        with Child(f"{_PACKAGE}.suite_code:handle", LIMITS, on_line=lambda line: on_line(f"suite: {line}")) as child:
            return child.call(request)
    except Ended as error:
        raise ConfigError(f"{name} cannot be run: it {error}") from error
    except (ConfigError, Fatal) as error:
        text = str(error)
        raise ConfigError(text if name.rpartition(":")[0] in text else f"{name}: {text}") from error
