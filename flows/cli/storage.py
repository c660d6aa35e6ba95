"""`rollout storage`: what the object store holds, whether it is whole, and what goes; `rollout store`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import EXIT_FAILED, Debug, Overrides, one_line_errors, parse_overrides

if TYPE_CHECKING:
    from rollout_core.base.ids import ContentId
    from rollout_core.objects import ObjectStore
    from rollout_core.objects.verification import Damage, Verification

storage_app = typer.Typer(no_args_is_help=True, help="Look after the object store.")
store_app = typer.Typer(no_args_is_help=True, help="Run the store of rollouts, attempts and spans.")

LOG_SECONDS = 30.0
SHOWN_HOLDERS = 4
BRIDGE_WAIT_SECONDS = 300.0
"""After a start of a machine others, with queue and store, start as well."""

StoragePath = Annotated[
    str | None,
    typer.Option(
        "--storage",
        "--storage-path",
        "--object-path",
        help="URL, path or block:SLUG/NAME of the object store; default: ROLLOUT_STORAGE.",
    ),
]
ShortId = Annotated[str, typer.Argument(help="Content id, or its first digits, at least 8.")]
DatabaseURL = Annotated[
    str, typer.Option("--database", help="sqlite:///path/to/file.db, or postgresql://user@host/name.")
]


@storage_app.command("verify")
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
    """Read everything that is stored and name what is damaged or missing, and who needs it.

    Exit code 0: all is whole, or whole again and nothing lost; 1: there is damage. Safe beside running flows.
    """
    with one_line_errors(debug):
        from rollout_core.base.processes import size_text
        from rollout_core.objects.verification import verify_store
        from tasks.runtime.prefect_server import object_store

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


@storage_app.command("gc")
def storage_gc(
    storage: StoragePath = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="TOML file of what to keep; default: the keys' own defaults.")
    ] = None,
    overrides: Overrides = None,
    now: Annotated[
        bool, typer.Option("--now", help="Delete without a grace period; refused while runs are under way.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Give up old training states, results and promoted models, and delete what nothing needs any more.

    Safe beside running flows: what they have used or made stays. The database of the settings is asked what it names.
    Exit code 1: nothing could be deleted, because something is damaged.
    """
    with one_line_errors(debug):
        from rollout_core.base.errors import ConfigError
        from rollout_core.config.base import parse_config, read_toml
        from rollout_core.config.retention import Retention
        from rollout_core.housekeeping.cleaning import clean

        tables, changed = {} if rules is None else read_toml(rules), parse_overrides(overrides)
        if now and "grace_hours" in changed:
            raise ConfigError("--now is --set grace_hours=0; give one of them")
        changed |= {"grace_hours": 0.0} if now else {}
        chosen = parse_config(tables, Retention, name="rules" if rules is None else str(rules), overrides=changed)
        with _storage_and_names(storage, chosen.completion_days) as (objects, named):
            cleaned = clean(objects, chosen, named_elsewhere=named, dry_run=dry_run)
        typer.echo(cleaned.model_dump_json(indent=2) if as_json else "\n".join(cleaned.lines))
        if cleaned.garbage.unreadable:
            raise typer.Exit(EXIT_FAILED)


@storage_app.command("du")
def storage_du(
    storage: StoragePath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Print what uses how much: of all that each purpose needs, and of what it alone needs. Changes nothing."""
    with one_line_errors(debug):
        from rollout_core.base.processes import size_text
        from rollout_core.config.retention import Retention
        from rollout_core.housekeeping.usage import measure

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
    from rollout_core.housekeeping.cleaning import named_by_database
    from tasks.runtime.prefect_server import object_store, storage_and_database

    with storage_and_database() as known:
        named = asyncio.run(named_by_database(known.database_url(), completion_days=completion_days))
        if storage is None:
            yield known.open_objects(), named
            return
        with object_store(storage) as objects:
            yield objects, named


def _listed(found: Verification) -> bool:
    for damage in found.damage:
        typer.echo(_line(damage, found))
    if found.unchecked:
        typer.echo(f"{_unchecked(len(found.unchecked))}; --repair adds it")
    return not found.damage


def _repaired(objects: ObjectStore, found: Verification) -> bool:
    from rollout_core.objects.verification import add_checks, repair_store

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
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from rollout_core.base.processes import size_text

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


@store_app.command("bridge")
def store_bridge(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with a table [cloud.sqs] or [cloud.pubsub].")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            help="URL of an SQS queue, or projects/PROJECT/subscriptions/NAME of Pub/Sub; default: ROLLOUT_QUEUE.",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", help="The store's database; default: ROLLOUT_DATABASE.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="URL of `rollout store serve` instead of a database.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the server's key.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds that queue and store may be away at the start.")
    ] = BRIDGE_WAIT_SECONDS,
    debug: Debug = False,
) -> None:
    """Make each message of a cloud's queue a rollout of the store, until SIGTERM or Ctrl-C.

    Messages are acknowledged once their rollout is stored. Any number of bridges may run on one queue.
    """
    with one_line_errors(debug):
        from rollout_core.base.errors import ConfigError
        from rollout_core.base.queue_settings import queue_settings
        from rollout_core.config.base import read_toml
        from rollout_core.config.cloud import take_cloud
        from rollout_core.store.bridge.running import bridge_forever

        if config is not None:
            take_cloud(read_toml(config), str(config))
        if server is not None and database is not None:
            raise ConfigError("--server and --database each say which store is fed; give one of them")
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise ConfigError(f"the environment variable {api_key_env} is not set; put the server's key there")
        tally = bridge_forever(queue_settings(queue), server or database, key, typer.echo, wait)
        typer.echo(f"bridge ended: {tally}")


@store_app.command("copy")
def store_copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Database URL of the store; nothing of it is changed.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Database URL of an empty database.")],
    debug: Debug = False,
) -> None:
    """Copy a whole store into another database, such as from SQLite to PostgreSQL.

    It has rollouts, attempts, spans, resources and workers. Everything that uses either database has to end first.
    Every row is read back and compared; a copy that was killed goes on where it was when it is started again.
    """
    with one_line_errors(debug):
        from rollout_core.store.sql.copying import copy_store

        shown = time.monotonic()
        total = 0

        def show(table: str, rows: int) -> None:
            nonlocal shown, total
            total += rows
            if time.monotonic() >= shown + LOG_SECONDS:
                shown = time.monotonic()
                sys.stderr.write(f"{total:,} rows written, now of {table}\n")

        copied = copy_store(source, target, show)
        for name, rows in copied.rows.items():
            typer.echo(f"{name:17} {rows:>12,}")
        typer.echo(f"both have the same rows; {copied.written:,} were written now")
        if copied.under_way:
            sys.stderr.write(
                f"rollout: {copied.under_way} rollouts are preparing or running; where their runners are still at "
                "work, what those store from now on is in the first database alone: end them, and copy into an empty "
                "one\n"
            )


@store_app.command("migrate")
def store_migrate(database: DatabaseURL, debug: Debug = False) -> None:
    """Bring a store's database to the schema of this version."""
    with one_line_errors(debug):
        from rollout_core.store.sql.by_url import migrate

        typer.echo(migrate(database))
