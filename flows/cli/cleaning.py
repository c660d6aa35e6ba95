"""`rollout storage gc` and `du`: what uses how much of the object store, and what goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import EXIT_FAILED, Debug, Overrides, one_line_errors, parse_overrides
from flows.cli.storage import StoragePath
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import size_text
from rollout_core.config.base import parse_config, read_toml
from rollout_core.config.retention import Retention
from rollout_core.inference.ledger import named_by_database
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.rounds import clean
from rollout_core.objects.retention.usage import measure
from rollout_core.promotion.history import histories
from tasks.runtime.prefect_server import object_store, storage_and_database


def storage_gc(
    storage: StoragePath = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="TOML file of what to keep; default: the keys' own defaults.")
    ] = None,
    overrides: Overrides = None,
    now: Annotated[
        bool, typer.Option("--now", help="Delete without a grace period; refused while runs are under way.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Give up old training states, results and promoted models, and delete what nothing needs any more.

    Safe while flows run: what they have used or made stays, as does what the settings' database names.
    Exit code 1: nothing could be deleted, because something is damaged.
    """
    with one_line_errors(debug):
        tables, changed = {} if rules is None else read_toml(rules), parse_overrides(overrides)
        if now and "grace_hours" in changed:
            raise ConfigError("--now is --set grace_hours=0; give one of them")
        changed |= {"grace_hours": 0.0} if now else {}
        chosen = parse_config(tables, Retention, name="rules" if rules is None else str(rules), overrides=changed)
        with _storage_and_names(storage, chosen.completion_days) as (objects, named):
            cleaned = clean(objects, chosen, histories=histories(objects), named_elsewhere=named, dry_run=dry_run)
        typer.echo(cleaned.model_dump_json(indent=2) if as_json else "\n".join(cleaned.lines))
        if cleaned.garbage.unreadable:
            raise typer.Exit(EXIT_FAILED)


def storage_du(
    storage: StoragePath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Print what uses how much: of all that each purpose needs, and of what it alone needs. Changes nothing."""
    with one_line_errors(debug):
        with _storage_and_names(storage, Retention().completion_days) as (objects, named):
            found = measure(objects, named_elsewhere=named)
        if as_json:
            typer.echo(found.model_dump_json(indent=2))
            return
        typer.echo(f"{'':44} {'names':>6} {'needs':>10} {'alone':>10}")
        for use in found.uses:
            typer.echo(
                f"{use.what:44.44} {use.names:6,} {size_text(use.total_bytes):>10} {size_text(use.own_bytes):>10}"
            )
        typer.echo(f"{'needed by several of these':62} {size_text(found.shared_bytes):>10}")
        unneeded = (
            f"needed by none ({found.unneeded_blobs:,} blobs; `rollout storage gc` deletes them once they are old)"
        )
        typer.echo(f"{unneeded:62} {size_text(found.unneeded_bytes):>10}")
        typer.echo(f"{'temporary and damaged files':62} {size_text(found.leftover_bytes):>10}")
        typer.echo(f"{f'{found.blobs:,} blobs of {found.url}':62} {size_text(found.total_bytes):>10}")


@contextmanager
def _storage_and_names(
    storage: str | None, completion_days: float
) -> Iterator[tuple[ObjectStore, frozenset[ContentId]]]:
    """The object store, and what the database of the settings names in it."""
    with storage_and_database() as known:
        named = asyncio.run(named_by_database(known.database_url(), completion_days=completion_days))
        if storage is None:
            yield known.open_objects(), named
            return
        with object_store(storage) as objects:
            yield objects, named
