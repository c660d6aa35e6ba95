"""The tables of a Prefect server that has never run: made once for a user of this machine, copied afterwards.

Prefect makes them by a hundred migrations, which take as long as everything else of a server's start, and every folder
has a server of its own. What is kept is a file of a megabyte in the user's folder for caches, named by the versions
that made it. Whoever cannot read or write there starts as Prefect does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

DATABASE = "prefect.db"
"""Prefect's own name of it, in its home."""


def make_tables() -> None:
    """Give the server that this process is about to be its tables, where its home has no database yet.

    A database that a setting puts elsewhere is left to Prefect.
    """
    settings = import_module("prefect.settings")
    database = Path(settings.PREFECT_HOME.value()) / DATABASE
    if settings.PREFECT_API_DATABASE_CONNECTION_URL.value() != f"sqlite+aiosqlite:///{database}" or database.exists():
        return
    kept = kept_tables()
    if kept is not None and _is_whole(kept) and _copy(kept, database):
        return
    interface = import_module("prefect.server.database").provide_database_interface()
    asyncio.run(interface.create_db())
    if kept is not None:
        try:
            _keep(database, kept)
        except (OSError, sqlite3.Error) as error:
            sys.stderr.write(f"the tables of a new Prefect server cannot be kept in {kept}: {error}\n")


def kept_tables() -> Path | None:
    """The file that new servers of these versions begin with; None where the user has no folder for caches."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "rollout" / f"prefect-{version('prefect')}-sqlite-{sqlite3.sqlite_version}.db"


def _is_whole(database: Path) -> bool:
    """Whether the file is there, nobody else could have written it, and SQLite finds nothing wrong with it."""
    try:
        found = database.lstat()
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_uid != os.getuid()
            or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            return False
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro&immutable=1", uri=True)) as opened:
            has_tables = opened.execute("SELECT count(*) FROM alembic_version").fetchall() == [(1,)]
            return has_tables and opened.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    except (OSError, sqlite3.Error):
        return False


def _keep(database: Path, kept: Path) -> None:
    """A copy of what a database holds now, also where its server has not moved it out of its log yet."""
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _put_at(kept) as copy:
        with closing(sqlite3.connect(database)) as made, closing(sqlite3.connect(copy)) as written:
            made.backup(written)
            written.execute("PRAGMA journal_mode = DELETE")  # the whole of it in one file
        copy.chmod(0o600)


def _copy(kept: Path, database: Path) -> bool:
    """Whether it is there now; otherwise nothing is."""
    try:
        for end in ("-wal", "-shm", "-journal"):
            # Of a database that somebody deleted: SQLite would write what it holds into the copy.
            database.with_name(database.name + end).unlink(missing_ok=True)
        with _put_at(database) as copy:
            shutil.copyfile(kept, copy)
    except OSError as error:
        sys.stderr.write(f"the tables of a new Prefect server cannot be copied from {kept}: {error}\n")
        return False
    return True


@contextmanager
def _put_at(place: Path) -> Iterator[Path]:
    """A file next to ``place``, which has that name once the block has written it, whole also after a power cut."""
    made = place.with_name(f"{place.name}.{os.getpid()}.new")
    made.unlink(missing_ok=True)
    try:
        yield made
        with made.open("rb+") as written:
            os.fsync(written.fileno())
        made.replace(place)
    finally:
        made.unlink(missing_ok=True)
