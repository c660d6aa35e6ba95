"""What the commands share: options, errors as lines and exit codes, and what checks have found."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from rollout_core.base.logs import say
from rollout_core.base.processes import in_environment
from rollout_core.base.settings import HOT_RELOAD, PLUGINS, plugin_paths

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

ConfigPath = Annotated[Path, typer.Option("--config", help="TOML file of the run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything reachable; build and run nothing.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value, such as --set ppo.iterations=3. Repeatable.")
]
Locked = Annotated[
    Path | None,
    typer.Option("--locked", help="File of a plan (rollout plan --lock): refuse to run what differs from it."),
]
Processes = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Processes that train together, instead of parallel.nproc.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
ModelAddress = Annotated[
    str | None, typer.Option("--model", help="Folder, hub id or content id of the model, instead of the file's.")
]
DataPath = Annotated[str | None, typer.Option("--data", help="File of the rows, in any form, instead of the file's.")]
PluginPaths = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Folder of a plugin, or of several, taken before those of other places. Repeatable."),
]
HotReload = Annotated[
    bool,
    typer.Option(
        "--hot-reload",
        help="For development: plugins whose files are edited meanwhile are reloaded. No other run uses the scores.",
    ),
]
RewardCallable = Annotated[
    str | None, typer.Option("--reward", help="path/to/file.py:function of the reward, instead of the file's.")
]


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns our errors into an exit code and lines on stderr, one for each thing that is wrong."""
    try:
        yield
    except RolloutError as error:
        if debug:
            sys.stderr.write(traceback.format_exc())
        for line in str(error).splitlines():
            say(line, logging.ERROR)
        bad_input = isinstance(error, ConfigError | NotFound)
        raise typer.Exit(EXIT_BAD_INPUT if bad_input else EXIT_FAILED) from None


@contextmanager
def plugins_at(paths: list[str] | None, *, hot_reload: bool = False) -> Iterator[None]:
    """Inside the block plugins are looked for in ``paths`` before other folders, also by processes that are started.
    With ``hot_reload`` their files may be edited meanwhile."""
    given = [str(Path(path).absolute()) for path in paths or ()]
    reloads = {HOT_RELOAD: uuid4().hex} if hot_reload else {}
    with in_environment({PLUGINS: os.pathsep.join([*given, *plugin_paths()]), **reloads}):
        yield


def held_to(locked: Path | None, *, dry_run: bool) -> dict[str, Any]:
    """What ``--locked`` changes of a configuration. Raises ConfigError for a dry run, which does not look that far."""
    if locked is None:
        return {}
    if dry_run:
        raise ConfigError(
            f"--dry-run makes checks alone; to compare, use `rollout plan --config FILE --locked {locked}`"
        )
    return {"run.locked": str(locked)}


def parse_overrides(settings: list[str] | None) -> dict[str, Any]:
    overrides = {}
    for setting in settings or ():
        key, separator, text = setting.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(f"--set {setting!r}: expected KEY=VALUE, such as ppo.iterations=3")
        try:
            overrides[key] = json.loads(text)
        except ValueError:
            overrides[key] = text
    return overrides


def print_plan(facts: Mapping[str, Any]) -> None:
    """What a dry run found."""
    print_facts("dry-run", facts)


def print_facts(what: str, facts: Mapping[str, Any]) -> None:
    """What was found by the checks of ``what``: one line, then the tables among the facts."""
    # What was not checked needs room: it comes last.
    pairs = dict(sorted(facts.items(), key=lambda fact: fact[0] == "not checked"))
    tables = {name: pairs.pop(name) for name in list(pairs) if isinstance(pairs[name], Mapping)}
    typer.echo(f"{what} OK: " + " ".join(f"{name.replace(' ', '_')}={value}" for name, value in pairs.items()))
    for title, figures in tables.items():
        typer.echo(f"{title}:")
        width = max(map(len, figures), default=0)
        for name, value in figures.items():
            typer.echo(f"  {name:{width}}  {value}")
