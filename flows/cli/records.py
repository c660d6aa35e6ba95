"""`rollout snapshot` and `rollout lineage`: what the object store holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors

snapshot_app = typer.Typer(no_args_is_help=True, help="Look at train-state snapshots.")

StoragePath = Annotated[
    str | None,
    typer.Option("--storage", help="URL or block:SLUG/NAME of the object store; default: ROLLOUT_STORAGE."),
]
ShortId = Annotated[str, typer.Argument(help="Content id, or its first digits, at least 8.")]


@snapshot_app.command("list")
def snapshot_list(
    storage: StoragePath = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Only this run's.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, newest first.")] = None,
    debug: Debug = False,
) -> None:
    """Print snapshots, newest first, as JSON."""
    with one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.objects.snapshots import SnapshotStore

        with object_store(storage) as objects:
            found = SnapshotStore(objects).list(run_id=run_id, kind=kind, limit=limit)  # pyright: ignore[reportArgumentType]
        typer.echo(json.dumps([item.model_dump(mode="json") for item in found], indent=2))


@snapshot_app.command("show")
def snapshot_show(snapshot_id: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print one snapshot as JSON."""
    with one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.objects.short_ids import complete_snapshot_id
        from rollout_core.objects.snapshots import SnapshotStore

        with object_store(storage) as objects:
            found = SnapshotStore(objects).get(complete_snapshot_id(objects, snapshot_id))
        typer.echo(found.model_dump_json(indent=2))


def lineage(content_id: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print what made a checkpoint or any other result, back to the first inputs, as JSON."""
    with one_line_errors(debug):
        from flows.connections import object_store
        from rollout_core.base.errors import NotFound
        from rollout_core.objects.lineage import trace_lineage
        from rollout_core.objects.short_ids import complete_lineage_id

        with object_store(storage) as objects:
            found = trace_lineage(objects, complete_lineage_id(objects, content_id))
        if not found:
            raise NotFound(f"no stage recorded that it made {content_id}")
        typer.echo(json.dumps([item.model_dump(mode="json") for item in found], indent=2))
