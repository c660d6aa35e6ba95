"""`rollout env`: environments tried by hand, before a model acts in them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import EXIT_FAILED, Debug, Overrides, one_line_errors, parse_overrides
from flows.cli.results import visible
from rollout_core.base.errors import ConfigError
from rollout_core.base.locks import scratch_folder
from rollout_core.config.base import EnvironmentRows, JsonlDataset, Settings, parse_config, read_toml
from rollout_core.config.environments import AnyEnvironment, EnvironmentConfig
from rollout_core.data.dataset_sources import read_dataset
from rollout_core.data.datasets import TaskRow
from rollout_core.environments.checking import Transcript, act, check_environment
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.conversation import check_turns
from rollout_core.environments.episodes import Episode
from rollout_core.environments.hosts import Hosts, Offer, look_at, rows_of
from rollout_core.environments.tools.toolbox import ToolResources, check_tools
from rollout_core.environments.using import all_schemas, tools_of_episode
from rollout_core.models.bounded.tokenizing import Chat, render
from rollout_core.models.pretrained import load_tokenizer

NUM_ROWS = 3
_CALL = re.compile(r"^!(\w+)\s*(\{.*\})?\s*$", re.DOTALL)

EnvironmentPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="path/to/env.py:Env, package.module:Env, or a TOML file with a table environment of any kind.",
    ),
]
RowsPath = Annotated[
    str | None,
    typer.Option(
        "--rows",
        help="File of rows with which episodes begin, in any form. Default: those that the environment makes.",
    ),
]


def env_check(
    path: EnvironmentPath,
    rows: RowsPath = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Model folder whose chat template is to show the tools.")
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Play three rows with a scripted model; print what differs, leaks, fails or is slow, and the tools. Exit code 1:
    an episode failed, or was another one when it was played again or next to others."""
    with one_line_errors(debug):
        settings, code, offer = _loaded(path, overrides)
        chosen = _rows(rows, NUM_ROWS, code, settings)
        with _tools(code, settings) as (resources, folder):
            schemas = all_schemas(offer, resources)
            checked = asyncio.run(check_environment(code, settings, offer, chosen, resources, folder))
        for number, transcript in enumerate(checked.episodes, start=1):
            typer.echo(f"row {number}:")
            for line in transcript.lines:
                typer.echo("  " + visible(line))
        _show_tools(schemas, model, settings)
        for remark in checked.remarks:
            typer.echo(f"remark: {remark}")
        for fault in checked.faults:
            typer.echo(f"fault: {visible(fault)}")
        if checked.faults:
            raise typer.Exit(EXIT_FAILED)
        typer.echo(f"{len(chosen)} rows: the same episode alone, again, in another process and next to others")


def env_play(
    path: EnvironmentPath,
    rows: RowsPath = None,
    row: Annotated[int, typer.Option("--row", min=1, help="Number of the row.")] = 1,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Play an episode in the terminal, with yourself as the model. A line is an answer, and ``!name {"argument": 1}``
    calls a tool."""
    with one_line_errors(debug):
        settings, code, offer = _loaded(path, overrides)
        chosen = _rows(rows, row, code, settings)
        if len(chosen) < row:
            raise ConfigError(f"--row {row}: {rows or path} has {len(chosen)} rows")
        with _tools(code, settings) as (resources, folder):
            all_schemas(offer, resources)
            asyncio.run(_play(code, settings, offer, chosen[-1], resources, folder))


def _loaded(path: str, overrides: list[str] | None) -> tuple[EnvironmentConfig, EnvironmentCode, Offer]:
    if path.endswith(".toml"):
        table, name = read_toml(path).get("environment"), path
        if not isinstance(table, dict):
            raise ConfigError(f"{path} has no table environment; expected one, such as that of a run in an environment")
    else:
        table, name = {"path": path}, "--set"
    given = {f"environment.{key}": value for key, value in parse_overrides(overrides).items()}
    settings = parse_config({"environment": table}, _Given, name=name, overrides=given).environment
    code = EnvironmentCode.of(settings, Path.cwd())
    return settings, code, look_at(code, settings)


class _Given(Settings):
    """An environment by itself."""

    environment: AnyEnvironment


@contextmanager
def _tools(code: EnvironmentCode, settings: EnvironmentConfig) -> Iterator[tuple[ToolResources, Path]]:
    """What the tools of the settings share, and a folder for their files, until the block ends."""
    check_tools(settings.tools)
    with scratch_folder("episodes") as folder:
        resources = ToolResources(settings.tools, index_folder=folder, served=code.served, plugins=code.tool_plugins)
        try:
            yield resources, folder
        finally:
            resources.close()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _rows(path: str | None, count: int, code: EnvironmentCode, settings: EnvironmentConfig) -> list[dict[str, Any]]:
    """The first ones of a file, or of those that the environment makes."""
    if path is None:
        return rows_of(code, settings, EnvironmentRows(kind="environment", size=count))[:count]
    stream = read_dataset(JsonlDataset(path=path), TaskRow, base=Path.cwd(), objects=None)
    found = [row.task for row in islice(stream, count)]
    if not found:
        raise ConfigError(f"--rows {path} has no rows; expected at least one")
    return found


def _show_tools(tools: list[dict[str, Any]], model: Path | None, settings: EnvironmentConfig) -> None:
    if model is None:
        for tool in tools:
            typer.echo(f"tool: {json.dumps(tool['function'])}")
        return
    tokenizer = load_tokenizer(model)
    remark = check_turns(tokenizer, tools, settings.tool_role)
    [text] = render(tokenizer, [Chat([{"role": "user", "content": "..."}], True, tools)])
    typer.echo(f"prompt, by the chat template of {model}:\n{text if isinstance(text, str) else text.reason}")
    if remark:
        typer.echo(f"remark: {remark}")


async def _play(
    code: EnvironmentCode,
    settings: EnvironmentConfig,
    offer: Offer,
    row: dict[str, Any],
    resources: ToolResources,
    folder: Path,
) -> None:
    hosts, shown, episode = Hosts(code, settings), 0, Episode("by hand", row)
    transcript = Transcript()

    def show() -> None:
        nonlocal shown
        for line in transcript.lines[shown:]:
            typer.echo(visible(line))
        shown = len(transcript.lines)

    def answer(turn: int, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        show()
        while True:
            said = typer.prompt("you", prompt_suffix="> ")
            called = _CALL.match(said)
            if called is None or _is_object(called[2] or "{}"):
                break
            typer.echo('expected !name, or !name {"argument": 1} with arguments in JSON')
        if called is None:
            return {"role": "assistant", "content": said}
        function = {"name": called[1], "arguments": called[2] or "{}"}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{turn}", "function": function}]}

    try:
        async with (
            hosts.place(episode.rollout_id) as place,
            tools_of_episode(offer, place, resources, row, folder) as tools,
        ):
            typer.echo(f"tools: {', '.join(tools.names) or 'none'}")
            await act(place, tools, episode, answer, settings, offer, transcript)
        show()
    finally:
        await hosts.close()
