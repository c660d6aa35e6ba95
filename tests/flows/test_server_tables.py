"""The tables of new Prefect servers: made once, then copied, and never in a server's way."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tasks.runtime.server_tables import DATABASE, kept_tables
from tests.support import forked

PROJECT = Path(__file__).resolve().parents[2]
MAKE = """
import os, sqlite3, sys
from tasks.runtime import server_tables
from prefect.server.database.interface import PrefectDBInterface
migrate = PrefectDBInterface.create_db
async def create_db(self):
    print("migrated")
    if sys.argv[1:] == ["--quickly"]:
        made = sqlite3.connect(os.path.join(os.environ["PREFECT_HOME"], server_tables.DATABASE))
        made.execute("CREATE TABLE alembic_version (x)")
        made.execute("INSERT INTO alembic_version VALUES (1)")
        made.commit()
    else:
        await migrate(self)
PrefectDBInterface.create_db = create_db
server_tables.make_tables()
"""


def schema(database: Path) -> list[tuple[str, ...]]:
    """Of a database that opens, and whose tables are whole."""
    with closing(sqlite3.connect(database)) as opened:
        assert opened.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return sorted(opened.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


@pytest.fixture
def kept(tmp_path: Path, prefect_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user's earlier server left for new ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    file = kept_tables()
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_bytes(prefect_database.read_bytes())
    file.chmod(0o600)
    return file


def make(home: Path, *arguments: str, **settings: str) -> str:
    """ "migrated", if that is how a server got the tables in ``home``, and what it says of them; ``--quickly``: by one
    migration instead of Prefect's."""
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "PREFECT_HOME": str(home), "PYTHONPATH": str(PROJECT), **settings}
    done = forked.run([sys.executable, "-c", MAKE, *arguments], env=environment, cwd=home, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + "".join(line for line in done.stderr.splitlines(True) if line.startswith("the tables of "))


def test_a_new_servers_tables_are_made_by_migrations_once_and_are_a_copy_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert make(tmp_path / "first") == "migrated\n"
    kept = kept_tables()
    assert kept is not None and kept.is_relative_to(tmp_path) and kept.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]
    assert make(tmp_path / "second") == ""
    made = schema(tmp_path / "first" / DATABASE)
    assert made == schema(tmp_path / "second" / DATABASE) == schema(kept)
    assert {"flow_run", "task_run", "alembic_version"} <= {name for _, name, _ in made}
    assert [file.name for file in (tmp_path / "second").iterdir()] == [DATABASE]


def test_what_a_deleted_database_left_does_not_come_into_the_copy(tmp_path: Path, kept: Path):
    home = tmp_path / "home"
    home.mkdir()
    left = sqlite3.connect(home / DATABASE)
    left.execute("PRAGMA journal_mode = WAL")
    left.execute("CREATE TABLE old (x)")
    left.commit()
    assert (home / f"{DATABASE}-wal").stat().st_size > 0
    (home / DATABASE).unlink()
    assert make(home) == "" and schema(home / DATABASE) == schema(kept)
    left.close()


def test_a_database_that_is_there_and_one_of_a_setting_are_left_to_prefect(tmp_path: Path, kept: Path):
    home = tmp_path / "home"
    home.mkdir()
    (home / DATABASE).write_bytes(b"whatever it is")
    assert make(home) == "" and (home / DATABASE).read_bytes() == b"whatever it is"
    elsewhere = tmp_path / "elsewhere.db"
    assert make(tmp_path / "other", PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{elsewhere}") == ""
    assert not elsewhere.exists() and list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("fault", ["cut", "writable by others", "a link", "a folder"])
def test_what_may_not_be_what_was_kept_is_not_used(tmp_path: Path, kept: Path, fault: str):
    whole = kept.read_bytes()
    if fault == "cut":
        kept.write_bytes(whole[: len(whole) // 2])
    elif fault == "writable by others":
        kept.chmod(0o666)
    else:
        kept.unlink()
        (tmp_path / "other").mkdir() if fault == "a folder" else (tmp_path / "other").write_bytes(whole)
        kept.symlink_to(tmp_path / "other")
    assert make(tmp_path / "home", "--quickly") == "migrated\n"
    assert kept.is_file() and not kept.is_symlink() and kept.stat().st_mode & 0o777 == 0o600
    assert schema(kept) == schema(tmp_path / "home" / DATABASE)


def test_a_server_starts_without_a_place_to_keep_them_in_and_says_so(tmp_path: Path):
    (tmp_path / "caches").write_bytes(b"a file where a folder should be")
    said = make(tmp_path / "home", "--quickly", XDG_CACHE_HOME=str(tmp_path / "caches"))
    assert said.startswith("migrated\nthe tables of a new Prefect server cannot be kept in ") and "ERROR" not in said
    assert schema(tmp_path / "home" / DATABASE)
