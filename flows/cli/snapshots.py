"""`rollout snapshot`: training states, looked at, labelled, taken out, brought in, and dropped."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import Debug, one_line_errors
from flows.cli.storage import ShortId, StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.objects.addresses import complete_snapshot_id
from rollout_core.objects.snapshots import PROGRESS_REFS, SnapshotStore
from rollout_core.objects.trees import temp_sibling
from tasks.runtime.prefect_server import object_store

RunId = Annotated[str | None, typer.Option("--run-id", help="Only snapshots of this run.")]
Kind = Annotated[str | None, typer.Option("--kind", help="train_state, buffer, process or episodic_memory.")]


def snapshot_list(
    storage: StoragePath = None,
    run_id: RunId = None,
    kind: Kind = None,
    label: Annotated[str | None, typer.Option("--label", help="Only those whose label contains this.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many, newest first.")] = None,
    debug: Debug = False,
) -> None:
    """Print snapshots, newest first, as JSON."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            found = SnapshotStore(objects).list(run_id=run_id, kind=kind, label_contains=label, limit=limit)  # pyright: ignore[reportArgumentType]
        typer.echo(json.dumps([item.model_dump(mode="json") for item in found], indent=2))


def snapshot_show(snapshot_id: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print one snapshot as JSON."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            found = SnapshotStore(objects).get(complete_snapshot_id(objects, snapshot_id))
        typer.echo(found.model_dump_json(indent=2))


def snapshot_save(
    folder: Annotated[Path, typer.Argument(help="Folder to save.")],
    run_id: Annotated[str, typer.Option("--run-id", help="Run id.")],
    step: Annotated[int, typer.Option("--step", min=0, help="Optimizer steps taken so far.")] = 0,
    kind: Annotated[str, typer.Option("--kind", help="train_state, buffer, process or episodic_memory.")] = "process",
    algorithm: Annotated[str, typer.Option("--algorithm", help="Algorithm that can resume from it.")] = "none",
    label: Annotated[
        str | None, typer.Option("--label", help="A label; housekeeping keeps labelled snapshots.")
    ] = None,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Save a folder as a snapshot and print its record as JSON."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            saved = SnapshotStore(objects).save(
                folder,
                kind=kind,  # pyright: ignore[reportArgumentType]
                run_id=run_id,
                step=step,
                algorithm=algorithm,
                label=label,
            )
        typer.echo(saved.model_dump_json(indent=2))


def snapshot_restore(
    snapshot_id: ShortId,
    folder: Annotated[
        Path | None, typer.Argument(help="A new folder; it appears whole and verified, or not at all.")
    ] = None,
    fork: Annotated[
        str | None, typer.Option("--fork", help="Name of another run that is to begin with it, in place of a folder.")
    ] = None,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Write a snapshot's files to a folder. A training state's model/ is a Hugging Face model folder.

    With --fork RUN another run has it as its own: `--resume latest` of a run of that name begins with a training state,
    and `environment.start_memory` with a memory.
    """
    with one_line_errors(debug):
        if (folder is None) == (fork is None):
            raise ConfigError("give a folder to write to, or --fork RUN")
        with object_store(storage) as objects:
            snapshots, found = SnapshotStore(objects), complete_snapshot_id(objects, snapshot_id)
            snapshots.get(found)  # of one that was given up: a look has no run compute it again
            if folder is None:
                assert fork is not None
                typer.echo(snapshots.fork(found, fork).model_dump_json(indent=2))
                return
            restored = snapshots.restore(found, folder)
        typer.echo(f"{folder}: step {restored.step} of {restored.algorithm}, {restored.size_bytes:,} bytes")


def snapshot_export(
    snapshot_id: ShortId,
    file: Annotated[Path, typer.Argument(help="The tar file to write, whose blake3 is the snapshot's id.")],
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Write a snapshot as a tar file, which appears verified and whole."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            chunks = SnapshotStore(objects).export(complete_snapshot_id(objects, snapshot_id))
            with temp_sibling(file) as written:
                for chunk in chunks:
                    written.write(chunk)
                written.appear()
        typer.echo(str(file))


def snapshot_label(
    snapshot_id: ShortId,
    label: Annotated[str, typer.Argument(help="The label; an empty one removes it.")],
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Label a snapshot, which keeps it from housekeeping and from prune."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            snapshots = SnapshotStore(objects)
            found = snapshots.get(complete_snapshot_id(objects, snapshot_id))
            if label and not found.model_copy(update={"label": label}).is_kept_by_label:
                raise ConfigError(f"label {label!r} is one that runs give, which keeps nothing; choose another")
            changed = snapshots.set_label(found.id, label or None)
        typer.echo(changed.model_dump_json(indent=2))


def snapshot_compare(first: ShortId, second: ShortId, storage: StoragePath = None, debug: Debug = False) -> None:
    """Print in what two snapshots differ, as JSON: their records, and their files by name."""
    with one_line_errors(debug):
        with object_store(storage) as objects:
            compared = SnapshotStore(objects).compare(
                *(complete_snapshot_id(objects, name) for name in (first, second))
            )
        typer.echo(compared.model_dump_json(indent=2))


def snapshot_prune(
    run_id: Annotated[str, typer.Option("--run-id", help="Run whose snapshots are pruned.")],
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, help="Keep this many of the newest.")] = 3,
    keep_labelled: Annotated[
        bool,
        typer.Option(
            "--keep-labelled/--drop-labelled", "--keep-labeled/--drop-labeled", help="Whether labelled ones stay."
        ),
    ] = True,
    max_age: Annotated[
        float | None, typer.Option("--max-age", min=0, help="Keep those younger than this many days.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; change nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records of the pruned snapshots, as JSON.")
    ] = False,
    storage: StoragePath = None,
    debug: Debug = False,
) -> None:
    """Drop the old snapshots of one run. Their bytes go with `rollout storage gc`.

    A result that names a dropped snapshot is computed again by the run that needs it.
    """
    with one_line_errors(debug):
        with object_store(storage) as objects:
            dropped = SnapshotStore(objects).prune(
                run_id,
                keep_last=keep_last,
                keep_labelled=keep_labelled,
                max_age=None if max_age is None else timedelta(days=max_age),
                keep={snapshot_id for _, snapshot_id in objects.list_refs(PROGRESS_REFS)},
                dry_run=dry_run,
            )
        if as_json:
            typer.echo(json.dumps([item.model_dump(mode="json") for item in dropped], indent=2))
        else:
            typer.echo(f"{'would prune' if dry_run else 'pruned'} {len(dropped)} snapshots")
