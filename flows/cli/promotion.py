"""`rollout promotions`, `promote` and `rollback`: which model is the latest, which were, and going back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

import typer

from flows.cli.common import Debug, one_line_errors
from rollout_core.base.errors import NotFound
from rollout_core.config import PromotionConfig, parse_config
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.unstored import find_model
from rollout_core.promotion.history import (
    Change,
    Entry,
    change_latest,
    history_of,
    resources_with_history,
    roll_back,
    served_model,
    this_user,
)
from rollout_core.runs.decisions import note_decision
from rollout_core.store import LightningStore, SqlLightningStore
from tasks.runtime.prefect_server import storage_and_database

ServedResource = Annotated[
    str, typer.Option("--resource", help="Resource whose latest model is meant, where the model is latest.")
]
Reason = Annotated[str, typer.Option("--reason", help="For the history.")]
ResourceName = Annotated[str, typer.Argument(metavar="RESOURCE", help="Name of the model among the resources.")]


def promotions(
    resource: Annotated[
        str | None, typer.Argument(metavar="RESOURCE", help="Name of a resource; default: all that have a history.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print whole entries, with their evidence, as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Print the history of the latest model: when, who and why, newest first. A star marks what is served now."""
    with one_line_errors(debug):

        async def look(objects: ObjectStore, store: LightningStore) -> dict[str, tuple[str | None, list[Entry]]]:
            names = resources_with_history(objects) if resource is None else [resource]
            return {name: (await served_model(store, objects, name), history_of(objects, name)[::-1]) for name in names}

        found = _connected(look)
        if as_json:
            entries = [entry.model_dump(mode="json") for _, entries in found.values() for entry in entries]
            typer.echo(json.dumps(entries, indent=2))
            return
        for name, (served, entries) in found.items():
            count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
            typer.echo(f"{name}: {f'model {served}' if served else 'no model'} is served, {count}")
            for line in _lines(entries, served):
                typer.echo(line)
        if not found:
            typer.echo("nothing was promoted yet")


def _lines(entries: Sequence[Entry], served: str | None) -> list[str]:
    """Two for each entry."""
    in_force = next((entry for entry in entries if entry.model == served), None)
    lines = []
    for entry in entries:
        mark = "*" if entry is in_force else " "
        instead = "" if entry.previous is None else f" instead of {entry.previous.short}"
        lines += [
            f"{mark} {entry.at:%Y-%m-%d %H:%M:%S} UTC  {entry.action:8}  {entry.model.short}{instead}  {entry.by}",
            f"    {entry.reason}",
        ]
    return lines


def promote(
    model: Annotated[str, typer.Argument(metavar="ID", help="Content id of a model, or its first digits, at least 8.")],
    resource: Annotated[str, typer.Option("--resource", help="Name of the model among the resources.")] = "policy",
    reason: Reason = "by hand",
    debug: Debug = False,
) -> None:
    """Make a model the latest, without asking for evidence."""
    with one_line_errors(debug):
        parse_config({"resource": resource}, PromotionConfig, name="--resource")

        async def change(objects: ObjectStore, store: LightningStore) -> tuple[str, Entry | None]:
            found = find_model(objects, model)
            wanted = Change("promote", resource, found, this_user("rollout promote"), reason)
            entry = await change_latest(store, objects, wanted)
            note_decision(objects, found, f"promoted by {wanted.by}: {reason}", promoted=True)
            return found, entry

        found, entry = _connected(change)
        typer.echo(f"{resource}: model {found}" + (" is the latest already" if entry is None else _instead(entry)))


def rollback(
    resource: ResourceName,
    to: Annotated[
        str | None, typer.Option("--to", help="A model of the history, by id or first digits; default: the one before.")
    ] = None,
    reason: Reason = "",
    debug: Debug = False,
) -> None:
    """Serve again the model that was the latest before."""
    with one_line_errors(debug):

        async def change(objects: ObjectStore, store: LightningStore) -> Entry:
            return await roll_back(store, objects, resource, to=to, by=this_user("rollout rollback"), reason=reason)

        entry = _connected(change)
        typer.echo(f"{resource}: model {entry.model}{_instead(entry)}")


def served_id(resource: str) -> str:
    """The model that the latest resources serve under this name. Raises NotFound where they serve none."""

    async def look(objects: ObjectStore, store: LightningStore) -> str | None:
        return await served_model(store, objects, resource)

    found = _connected(look)
    if found is None:
        raise NotFound(f"{resource!r} serves no model of ours; `rollout promotions` lists what does")
    return found


def _instead(entry: Entry) -> str:
    return f" instead of {entry.previous}" if entry.previous else " is the latest"


def _connected(work: Callable[[ObjectStore, LightningStore], Coroutine[Any, Any, Any]]) -> Any:
    """What ``work`` returns, given the object store and the database of the settings."""
    with storage_and_database() as known:
        known.try_database()
        objects = known.open_objects()

        async def run() -> Any:
            async with SqlLightningStore.from_url(known.database_url()) as store:
                return await work(objects, store)

        return asyncio.run(run())
