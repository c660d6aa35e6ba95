"""`rollout plugins`: which there are, whether they are right, and a first one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.common import AsJson, Debug, PluginPaths, one_line_errors, plugins_at
from flows.cli.results import print_table
from rollout_core import __version__
from rollout_core.algorithms import plugin_tracker
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.config.built_in import BuiltIn, built_in
from rollout_core.config.tools import PluginTools
from rollout_core.data import plugin_rows
from rollout_core.environments import plugin_cases
from rollout_core.environments.tools import plugin_tools
from rollout_core.plugins import secret_plugins
from rollout_core.plugins.cases import TEST_CASES, TEST_SECONDS, Case, read_cases
from rollout_core.plugins.discovery import Listed, list_plugins
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import PluginCode, read_plugin
from rollout_core.plugins.manifest import KINDS
from rollout_core.plugins.scaffold import usage, write_plugin
from rollout_core.rewards import plugin_rewards

BUILT_IN = "built in"

PluginFolder = Annotated[Path, typer.Argument(metavar="PATH", help="The plugin's folder.")]


@dataclass(frozen=True)
class _Kind:
    """How plugins of a kind are started and tested."""

    start: Callable[[PluginCode, dict[str, Any]], None]
    """Start one with a configuration, and end it."""
    case: type[Case]
    failed_cases: Callable[[PluginCode, Sequence[tuple[int, Any]], Callable[[str], None]], list[str]]


def _starts_by(adapter: str) -> Callable[[PluginCode, dict[str, Any]], None]:
    def start(code: PluginCode, config: dict[str, Any]) -> None:
        process = PluginProcess(code, config, adapter=adapter, on_line=_say)
        try:
            process.start()
        finally:
            process.close()

    return start


def _starts_tools(code: PluginCode, config: dict[str, Any]) -> None:
    spec = PluginTools(kind="plugin", name=code.name, config=config)
    processes = plugin_tools.PluginToolProcesses(spec, code, _say)
    try:
        processes.described()
    finally:
        processes.close()


def _say(line: str) -> None:
    typer.echo(line, err=True)


_KINDS = {
    "reward-model": _Kind(_starts_by(plugin_rewards.ADAPTER), plugin_rewards.RewardCase, plugin_rewards.failed_cases),
    "data-source": _Kind(_starts_by(plugin_rows.ADAPTER), plugin_rows.RowsCase, plugin_rows.failed_cases),
    "tool-harness": _Kind(_starts_tools, plugin_tools.ToolsCase, plugin_tools.failed_cases),
    "tracker": _Kind(plugin_tracker.start, plugin_tracker.TrackerCase, plugin_tracker.failed_cases),
    "secret-source": _Kind(secret_plugins.start, secret_plugins.SecretCase, secret_plugins.failed_cases),
    "env-harness": _Kind(plugin_cases.start, plugin_cases.EpisodeCase, plugin_cases.failed_cases),
}


def plugins_list(plugin: PluginPaths = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Print the plugins that are found here, and where each is. One that another of its name is taken in place of says
    so, and so does one that is wrong. What is built in of the same kinds follows."""
    with one_line_errors(debug), plugins_at(plugin):
        found = list_plugins(Path.cwd())
        if as_json:
            built = [_built_in_document(one) for one in built_in()]
            typer.echo(json.dumps([*(_document(one) for one in found), *built], indent=2))
            return
        table = Table(box=None, pad_edge=False)
        for column in ("name", "version", "kind", "mode", "found in", "folder", "remark"):
            table.add_column(column, no_wrap=True)
        for one in found:
            said = _document(one)
            cells = [str(said[key] or "") for key in ("name", "version", "kind", "mode", "found_in", "folder")]
            table.add_row(*cells, escape(_remark(one)))
        for own in built_in():
            table.add_row(own.name, __version__, own.kind, "", BUILT_IN, "", escape(own.meaning))
        print_table(table)
        if not found:
            typer.echo(f"no plugin is here; `rollout plugins new {next(iter(KINDS))} NAME` begins one")


def _remark(one: Listed) -> str:
    if one.shadowed_by is not None:
        return f"not taken: {one.shadowed_by.folder} is before it"
    return one.problem or ""


def _document(one: Listed) -> dict[str, Any]:
    manifest = None if one.code is None else one.code.manifest
    return {
        "name": one.candidate.name,
        "version": manifest and manifest.version,
        "kind": manifest and manifest.kind,
        "mode": manifest and manifest.mode.replace("_", "-"),
        "id": one.code and one.code.id,
        "found_in": one.candidate.origin,
        "folder": str(one.candidate.folder),
        "shadowed_by": one.shadowed_by and str(one.shadowed_by.folder),
        "problem": one.problem,
    }


def _built_in_document(one: BuiltIn) -> dict[str, Any]:
    known = {"name": one.name, "version": __version__, "kind": one.kind, "found_in": BUILT_IN, "meaning": one.meaning}
    return known | dict.fromkeys(("mode", "id", "folder", "shadowed_by", "problem"))


def plugins_show(
    name: Annotated[str, typer.Argument(help="The plugin's name.")],
    plugin: PluginPaths = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print what a plugin's manifest says. Its content id and its configuration's schema are there, too."""
    with one_line_errors(debug), plugins_at(plugin):
        found = [one for one in list_plugins(Path.cwd()) if one.candidate.name == name]
        if not found:
            raise ConfigError(f"no plugin is named {name!r}; `rollout plugins list` prints those that are here")
        first, code = found[0], found[0].code
        if code is None:
            raise ConfigError(first.problem or "")
        said = {**_document(first), "manifest": code.manifest.model_dump(mode="json"), "config_schema": _schema(code)}
        if as_json:
            typer.echo(json.dumps(said, indent=2))
            return
        for key in ("name", "version", "kind", "mode", "id", "found_in", "folder"):
            typer.echo(f"{key.replace('_', ' '):9} {said[key]}")
        limits = code.manifest.limits.model_dump()
        typer.echo("limits    " + ", ".join(f"{key} {value}" for key, value in limits.items()))
        typer.echo(f"network   {'the machine has' if code.manifest.has_network else 'none'}")
        typer.echo(f"config    {json.dumps(said['config_schema'])}")
        for other in found[1:]:
            typer.echo(f"taken in place of {other.candidate.folder} ({other.candidate.origin})")


def _schema(code: PluginCode) -> Any:
    path = code.manifest.config_schema_path
    return None if path is None else json.loads(code.files[path])


def plugins_check(
    path: PluginFolder,
    config: Annotated[
        str | None, typer.Option("--config", help="Its configuration, as JSON, such as '{\"limit\": 4}'.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check a plugin's manifest and files, start it, and end it.

    Without --config it is started with that of its first test case, if it has one.
    """
    with one_line_errors(debug):
        code = read_plugin(path)
        began = time.monotonic()
        _KINDS[code.manifest.kind].start(code, _config(code, config))
        about = f"{code.manifest.kind}, {len(code.files)} files, id {code.id}"
        seconds = time.monotonic() - began
        typer.echo(f"plugin {code.manifest.title} is right: {about}, started and ended in {seconds:.1f} s")


def _config(code: PluginCode, text: str | None) -> dict[str, Any]:
    if text is None:
        return next(read_cases(code, _KINDS[code.manifest.kind].case))[1].config if TEST_CASES in code.files else {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--config: got what is no JSON ({error}); expected an object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--config: got {text}; expected an object")
    return value


def plugins_test(path: PluginFolder, debug: Debug = False) -> None:
    """Put a plugin's own test cases to it. They are the lines of its test-cases.jsonl, and may take a minute."""
    with one_line_errors(debug):
        code = read_plugin(path)
        began = time.monotonic()
        kind = _KINDS[code.manifest.kind]
        cases = list(read_cases(code, kind.case))
        failures = kind.failed_cases(code, cases, _say)
        seconds = time.monotonic() - began
        for failure in failures:
            typer.echo(failure)
        if failures:
            raise Fatal(f"plugin {code.manifest.title}: {len(failures)} of {len(cases)} test cases failed")
        if seconds > TEST_SECONDS:
            took = f"{seconds:.0f} s; expected at most {TEST_SECONDS:g} s"
            raise Fatal(f"plugin {code.manifest.title}: its test cases took {took}")
        typer.echo(f"plugin {code.manifest.title}: {len(cases)} test cases passed in {seconds:.1f} s")


def plugins_new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{' or '.join(KINDS)}.")],
    name: Annotated[str, typer.Argument(help="The plugin's name.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where plugins lie; it gets one of its own.")] = Path(
        "plugins"
    ),
    mode: Annotated[str, typer.Option("--mode", help="in-process or sidecar.")] = "in-process",
    debug: Debug = False,
) -> None:
    """Write a first plugin, with test cases that pass."""
    with one_line_errors(debug):
        code = write_plugin(kind, name, folder / name, mode)
        for path in code.files:
            typer.echo(f"wrote {code.folder / path}")
        typer.echo(f"next: rollout plugins test {code.folder}")
        typer.echo(f"in a configuration: {usage(code.manifest)}")
