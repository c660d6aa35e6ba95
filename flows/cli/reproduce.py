"""`rollout reproduce`: a result made again elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import EXIT_FAILED, Debug, one_line_errors
from flows.cli.starting import run_flow
from flows.cli.storage import StoragePath
from rollout_core.base.determinism import hold_numerics
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.objects import ObjectStore
from rollout_core.objects.addresses import complete_lineage_id
from rollout_core.objects.lineage import trace_lineage
from tasks.runtime.prefect_server import object_store


def reproduce(
    content_id: Annotated[
        str, typer.Argument(metavar="ID", help="Content id of a checkpoint or any other result of a stage.")
    ],
    into: Annotated[
        Path | None, typer.Option("--into", help="Folder for an object store, database and cache of its own.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check that everything needed is there; run nothing.")] = False,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Make a result again elsewhere, from the records of its lineage, and say at which stage its ids first differ.

    Exit code 0: all ids are the same; 1: some stage made others.
    """
    with one_line_errors(debug):
        if into is None and not check:
            raise ConfigError("give --into FOLDER, where it is made again, or --check")
        with object_store(storage) as objects:
            found = complete_lineage_id(objects, content_id)
            asked = {item.arithmetic.get("numerics", "native") for item in trace_lineage(objects, found)}
            hold_numerics("portable" if asked == {"portable"} else None)  # before anything imports torch
            url = objects.url
        if check:
            _check_reproduction(url, found)
        else:
            assert into is not None, "checked"
            _reproduce(url, found, into.resolve(), debug)


def _check_reproduction(url: str, content: ContentId) -> None:
    from flows.reproduce import plan_reproduction  # with Prefect

    plan = plan_reproduction(ObjectStore.from_url(url), content)
    typer.echo(f"{len(plan.steps)} stages, {len(plan.first_inputs)} inputs, {plan.numerics} numerics")
    for step in plan.steps:
        typer.echo(f"  {step.title}")
    for note in plan.notes:
        typer.echo(f"may make other ids: {note}")
    for problem in plan.problems:
        typer.echo(f"cannot be made again: {problem}")
    if plan.problems:
        raise typer.Exit(EXIT_FAILED)


def _reproduce(url: str, content: ContentId, folder: Path, debug: bool) -> None:
    # Read when a stage asks for them, so that nothing of the settings' own is written to.
    os.environ["ROLLOUT_STORAGE"] = f"file://{folder / 'objects'}"
    os.environ["ROLLOUT_DATABASE"] = f"sqlite:///{folder / 'rollout.db'}"
    os.environ["ROLLOUT_CACHE"] = str(folder / "cache")
    folder.mkdir(parents=True, exist_ok=True)
    numerics = os.environ.get("ROLLOUT_NUMERICS", "native")
    done = run_flow("flows.reproduce:reproduce", debug, content, url, numerics)
    for title in done["same"]:
        typer.echo(f"same ids: {title}")
    if done["difference"] is None:
        typer.echo(f"{content} was made again, byte for byte")
        return
    differing = done["difference"]
    typer.echo(f"first difference: {differing['stage']}")
    for there, here in zip(differing["there"], differing["here"], strict=True):
        typer.echo(f"  {there} there, {here} here{'' if there != here else ' (the same)'}")
    typer.echo("`rollout reproduce ID --check` says what is not here as it was there")
    raise typer.Exit(EXIT_FAILED)
