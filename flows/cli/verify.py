"""`rollout storage verify`: whether what is stored is whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from flows.cli.common import EXIT_FAILED, Debug, one_line_errors
from flows.cli.storage import StoragePath
from rollout_core.base.processes import size_text
from rollout_core.objects import ObjectStore
from rollout_core.objects.verification import Damage, Verification, add_checks, repair_store, verify_store
from tasks.runtime.prefect_server import object_store

LOG_SECONDS = 30.0
SHOWN_HOLDERS = 4


def storage_verify(
    storage: StoragePath = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Restore refs from the records that name themselves; move aside what is damaged, and the cached "
            "results that need it, so that the next run makes them again.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Read everything that is stored; print what is damaged or missing, and which records need it.

    Exit code 0: everything is intact, or repaired without loss; 1: there is damage. Safe while flows run.
    """
    with one_line_errors(debug):
        with object_store(storage) as objects:
            started = time.monotonic()
            with _progress() as on_progress:
                found = verify_store(objects, on_progress)
            seconds = time.monotonic() - started
            is_whole = _repaired(objects, found) if repair else _listed(found)
        if not found.num_blobs + found.num_refs:
            typer.echo(f"nothing is stored at {objects.url}")
            return
        typer.echo(
            f"{found.num_blobs:,} blobs ({size_text(found.num_bytes)}) and {found.num_refs:,} refs of {objects.url} "
            f"read in {seconds:.1f} s: " + (f"{len(found.damage)} damaged or missing" if found.damage else "all whole")
        )
        if not is_whole:
            raise typer.Exit(EXIT_FAILED)


def _listed(found: Verification) -> bool:
    for damage in found.damage:
        typer.echo(_line(damage, found))
    if found.unchecked:
        typer.echo(f"{_unchecked(len(found.unchecked))}; --repair adds it")
    return not found.damage


def _repaired(objects: ObjectStore, found: Verification) -> bool:
    is_whole = True
    for damage, outcome in repair_store(objects, found):
        typer.echo(f"{_line(damage, found)}: {outcome.text}")
        is_whole = is_whole and not outcome.is_lost
    if num_written := add_checks(objects, found.unchecked):
        typer.echo(f"{_unchecked(num_written)}: added")
    return is_whole


def _unchecked(num_refs: int) -> str:
    return f"{num_refs:,} refs without a check (written by an earlier version)"


def _line(damage: Damage, found: Verification) -> str:
    if damage.kind.endswith("ref"):
        return f"{damage.kind} {damage.name} at {damage.place}"
    holders = [_described(name, found) for name in damage.holders[:SHOWN_HOLDERS]]
    if len(damage.holders) > SHOWN_HOLDERS:
        holders.append(f"{len(damage.holders) - SHOWN_HOLDERS} more")
    return f"{damage.kind} {damage.name} at {damage.place}, needed by {', '.join(holders) or 'no ref'}"


def _described(ref: str, found: Verification) -> str:
    stage = found.stages.get(ref)
    return ref if stage is None else f"{ref} ({stage})"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar in a terminal; elsewhere a line now and then, on stderr."""
    console = Console(stderr=True)
    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, next_line = bar.add_task("", total=None), time.monotonic() + LOG_SECONDS

        def show(done: int, total: int) -> None:
            nonlocal next_line
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() > next_line:
                next_line = time.monotonic() + LOG_SECONDS
                sys.stderr.write(f"{size_text(done)} of {size_text(total)} read\n")

        yield show
