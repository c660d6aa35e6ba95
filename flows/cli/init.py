"""`rollout init`, a first configuration from what a folder holds; and the same for commands that are given none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import DataPath, Debug, ModelAddress, one_line_errors
from rollout_core.base.errors import ConfigError
from rollout_core.plans.first_config import KINDS, Ingredients, choose, companions, config_text
from rollout_core.plans.surroundings import ModelFolder, RowFile, Surroundings, look_around, model_folder, row_file

KIND_NAMES = "sft, rm, dpo, ipo, kto, ppo, grpo, batch, agent or nightly"


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def init(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{KIND_NAMES}.", autocompletion=_kinds)],
    model: ModelAddress = None,
    data: DataPath = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where to look, and to write.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a first configuration, with comments, of the models and rows that are in this folder."""
    with one_line_errors(debug):
        if kind not in KINDS:
            raise ConfigError(f"no kind of run is named {kind!r}; expected one of {KIND_NAMES}")
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        choice = choose(kind, look_around(folder), _model(model, folder), _rows(data, folder))
        of, name = choice.ingredients, f"{kind}.toml"
        files = {name: config_text(kind, of), **companions(kind, of)}
        _write(folder, files, force)
        for path in files:
            typer.echo(
                f"wrote {folder / path}" + (f": model {of.model.path}, rows {of.rows.path}" if path == name else "")
            )
        for what in choice.missing:
            typer.echo(f"not found here: {what}")
        for hint in choice.hints:
            typer.echo(f"note: {hint}")
        typer.echo(f"next: rollout {KINDS[kind].command} --config {name} --dry-run")


def _write(folder: Path, files: dict[str, str], force: bool) -> None:
    """All or none of them; a companion that is there already stays as it is."""
    config = next(iter(files))
    if (folder / config).exists() and not force:
        raise ConfigError(f"{folder / config} is there already; --force writes over it")
    for path in [path for path in files if path != config and (folder / path).exists() and not force]:
        typer.echo(f"kept {folder / path}, which was there")
        del files[path]
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _model(address: str | None, folder: Path) -> ModelFolder | None:
    return None if address is None else model_folder(folder / address, address)


def _rows(path: str | None, folder: Path) -> RowFile | None:
    return None if path is None else row_file(folder / path, path)


def tables_without_file(kind: str, model: str | None, data: str | None, reward: str | None) -> dict[str, Any]:
    """The configuration of a command without a file: that of `rollout init` with these. Raises ConfigError where one
    that it needs is missing."""
    missing = [option for option, value in (("--model", model), ("--data", data)) if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: required where there is no --config; `rollout init {kind}` writes a file"
        )
    here = Path.cwd()
    choice = choose(kind, Surroundings((), ()), _model(model, here), _rows(data, here))
    of = choice.ingredients
    for hint in choice.hints:
        typer.echo(f"note: {hint}", err=True)
    if of.reward is not None and reward is None and "answer" not in of.rows.keys:
        raise ConfigError(
            f"--reward: required, as the rows of {data} have no answer to compare with; give path/to/file.py:function"
        )
    return tomllib.loads(config_text(kind, Ingredients(of.model, of.rows, of.prompts, of.held_out, reward)))
