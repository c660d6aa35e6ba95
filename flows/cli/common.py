"""What the commands share: options, errors as lines and exit codes, and a Prefect server to run against."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rollout_core.config import Run

RunT = TypeVar("RunT", bound="Run")

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EVENTS_SECONDS = 5.0
"""Longest wait for the states of task runs to reach the Prefect server when a command ends."""

ConfigPath = Annotated[Path, typer.Option("--config", help="TOML file of the run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything reachable; build and run nothing.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value, such as --set ppo.iterations=3. Repeatable.")
]
Processes = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Processes that train together, instead of parallel.nproc.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns our errors into an exit code and lines on stderr, one for each thing that is wrong."""
    from rollout_core.base.errors import ConfigError, NotFound, RolloutError

    try:
        yield
    except RolloutError as error:
        if debug:
            traceback.print_exc()
        sys.stderr.writelines(f"rollout: {line}\n" for line in str(error).splitlines())
        bad_input = isinstance(error, ConfigError | NotFound)
        raise typer.Exit(EXIT_BAD_INPUT if bad_input else EXIT_FAILED) from None


def look_ahead() -> None:
    """For a dry run, before its configuration is read: the process that inspects models begins to import torch and
    transformers, which takes longer than all the rest."""
    from rollout_core.models.bounded.inspecting import prepare

    prepare()


def parse_overrides(settings: list[str] | None) -> dict[str, Any]:
    from rollout_core.base.errors import ConfigError

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


def load_run(
    path: Path, model: type[RunT], overrides: Mapping[str, Any], options: Mapping[str, str] | None = None
) -> RunT:
    """The configuration of a run, in a process that computes as it asks. ``options`` as of `parse_config`."""
    from rollout_core.config.base import read_toml

    return load_tables(read_toml(path), str(path), model, overrides, options)


def load_tables(
    tables: Mapping[str, Any],
    name: str,
    model: type[RunT],
    overrides: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
) -> RunT:
    """`load_run` of tables that were read from ``name``."""
    from rollout_core.base.determinism import hold_numerics
    from rollout_core.config.base import apply_overrides, parse_config
    from rollout_core.config.cloud import take_cloud

    tables = take_cloud(tables, name)
    # Before anything is validated, which may import torch.
    hold_numerics(apply_overrides(tables, overrides).get("numerics"))
    return _whole_ids(parse_config(tables, model, name=name, overrides=overrides, options=options))


def _whole_ids(config: RunT) -> RunT:
    """``config`` with whole content ids, unless the object store is a block of a server that is not running yet."""
    from rollout_core.objects.addresses import with_whole_ids
    from tasks.runtime.prefect_server import connections

    known = connections()
    return config if known is None else with_whole_ids(config, Path.cwd(), known.open_objects)


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


def run_flow(start: Callable[[], Any], debug: bool, module: str = "tasks.runtime.flow_run") -> Any:
    """Run a flow, which is in ``module``, against the configured Prefect API, or the server of this folder.

    Unless ``debug``, log lines in the terminal show no tracebacks of our own errors, whose messages say what to do.
    """
    from rollout_core.base.stopping import watching
    from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server

    def load() -> None:
        # Not before: Prefect takes the server's address when it is imported.
        importlib.import_module(module)

    with watching(ends_process=True), prefect_server(PREFECT_HOME, meanwhile=load):
        from tasks.runtime.flow_run import without_known_traces

        try:
            with nullcontext() if debug else without_known_traces():
                return start()
        finally:
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogHandler

            # The last lines and states are sent in the background; a server of this folder is gone a moment later.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=EVENTS_SECONDS)
