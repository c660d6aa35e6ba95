"""The schema's versions: every database is brought to the present one, or refused in words."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine

from rollout_core.base.errors import ConfigError
from rollout_core.store import SqlLightningStore
from rollout_core.store.sql import by_url, sqlite
from rollout_core.store.sql.database import REVISIONS
from rollout_core.store.sql.postgres_server import connect
from rollout_core.store.sql.tables import metadata
from tests.store.patience import LONG
from tests.support import forked

pytestmark = pytest.mark.asyncio

MIGRATIONS = Path(by_url.__file__).with_name("migrations")
ROOT = Path(__file__).parents[2]


def _differences(connection) -> list:
    return compare_metadata(MigrationContext.configure(connection), metadata)


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request, postgres, tmp_path) -> str:
    """The URL of a database without any tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new.db"
    name = f"empty_{abs(hash(tmp_path))}"
    request.addfinalizer(lambda: postgres.run_sql(f"DROP DATABASE {name} WITH (FORCE)"))
    return postgres.new_database(name)


async def _run(url: str, *statements: str) -> None:
    """Run statements behind the store's back."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(";".join(statements))
        connection.close()
    else:
        with connect(url, LONG) as server:
            for statement in statements:
                server.execute(statement.encode())


async def _downgrade(url: str) -> None:
    """Make a database of the present schema one of the first."""
    await _run(
        url,
        "DROP TABLE counts",
        "DROP TABLE leases",
        "DROP TABLE changes",
        *([] if url.startswith("sqlite") else ["DROP SEQUENCE change_numbers"]),
        "ALTER TABLE spans DROP COLUMN body_id",
        "UPDATE alembic_version SET version_num = '0001'",
    )


async def test_the_revisions_are_alembics():
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(reversed([revision.revision for revision in script.walk_revisions()])) == REVISIONS


async def test_the_migrations_make_the_tables_that_the_code_declares(empty):
    assert by_url.migrate(empty).endswith(f"was created with schema {REVISIONS[-1]}")
    if empty.startswith("sqlite"):
        with create_engine(empty).connect() as connection:
            assert _differences(connection) == []
    else:
        engine = create_engine("postgresql+psycopg://", creator=lambda: connect(empty, LONG), poolclass=NullPool)
        with engine.connect() as connection:
            assert _differences(connection) == []
    assert "has the present schema" in by_url.migrate(empty)


async def test_an_older_schema_is_upgraded_with_all_it_holds(empty, make):
    async with SqlLightningStore.from_url(empty) as store:
        rollout = await make.claimed(store)
        await store.add_span(make.span(rollout))
        await store.enqueue_rollout(2)
    await _downgrade(empty)
    assert by_url.migrate(empty).endswith(f"was brought from schema 0001 to {REVISIONS[-1]}")
    async with SqlLightningStore.from_url(empty) as store:
        counts = await store.statistics()
        assert (counts["total_rollouts"], counts["total_attempts"], counts["total_spans"]) == (2, 1, 1)
        assert (await store.query_rollouts(status_in=["queuing"], limit=1)).total == 1
        assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_opening_a_store_upgrades_it(empty):
    by_url.migrate(empty)
    await _downgrade(empty)
    await SqlLightningStore.from_url(empty).close()
    assert "has the present schema" in by_url.migrate(empty)


async def test_rollouts_are_counted_in_the_present_schema_alone(empty, make):
    assert by_url.count_all(empty, LONG) is None
    async with SqlLightningStore.from_url(empty) as store:
        await make.claimed(store)
        await store.enqueue_rollout(2)
        found = by_url.count_all(empty, LONG)
    assert found is not None and (found.attempts, found.spans) == (1, 0)
    assert {name: count for name, count in found.rollouts.items() if count} == {"preparing": 1, "queuing": 1}
    await _downgrade(empty)
    assert by_url.count_all(empty, LONG) is None
    assert by_url.migrate(empty).endswith(f"was brought from schema 0001 to {REVISIONS[-1]}"), "looking changed nothing"


async def test_a_newer_schema_is_refused_untouched(empty):
    by_url.migrate(empty)
    await _run(empty, "UPDATE alembic_version SET version_num = '0099'")
    for opening in (by_url.migrate, SqlLightningStore.from_url, lambda url: by_url.count_all(url, LONG)):
        with pytest.raises(ConfigError, match=r"revision 0099.*newer version"):
            opening(empty)


async def test_a_database_of_another_program_is_refused_untouched(empty):
    await _run(empty, "CREATE TABLE alembic_version (version_num varchar(32))", "CREATE TABLE theirs (x int)")
    for opening in (by_url.migrate, SqlLightningStore.from_url):
        with pytest.raises(ConfigError, match="another program"):
            opening(empty)


async def test_a_schema_of_its_own_keeps_the_store_apart(postgres, request):
    url = postgres.new_database("shared")
    request.addfinalizer(lambda: postgres.run_sql("DROP DATABASE shared WITH (FORCE)"))
    await _run(url, "CREATE TABLE theirs (x int)", "CREATE SCHEMA ours")
    async with SqlLightningStore.from_url(f"{url}&search_path=ours") as store:
        await store.enqueue_rollout(1)
        assert len(await store.query_rollouts()) == 1
    with pytest.raises(ConfigError, match="does not exist"):
        SqlLightningStore.from_url(f"{url}&search_path=absent")


async def test_processes_may_create_or_upgrade_at_the_same_time(empty):
    for prepare in (None, _downgrade):
        if prepare is not None:
            await prepare(empty)
        program = "import sys; from rollout_core.store.sql.by_url import migrate; print(migrate(sys.argv[1]))"
        children = [
            forked.Process([sys.executable, "-c", program, empty], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for _ in range(4)
        ]
        outputs = [(await asyncio.to_thread(child.communicate, timeout=LONG))[0] for child in children]
        assert [child.returncode for child in children] == [0] * 4
        assert sum("has the present schema" not in output for output in outputs) == 1, outputs


async def test_connections_to_a_new_file_do_not_lock_each_other_out(tmp_path):
    """Without repeating, one of the four is refused in a third of the rounds."""
    for number in range(25):
        path, together = tmp_path / f"{number}.db", threading.Barrier(4)

        def open_it(path: Path = path, together: threading.Barrier = together) -> None:
            together.wait()
            sqlite.connect(path, 30).close()

        await asyncio.gather(*[asyncio.to_thread(open_it) for _ in range(4)])


async def test_a_check_refuses_what_opening_would_and_changes_nothing(empty, tmp_path):
    by_url.check(empty)
    assert list(tmp_path.iterdir()) == []
    await _run(empty, "CREATE TABLE somebody_elses (x INTEGER)")
    with pytest.raises(ConfigError, match="of another program"):
        by_url.check(empty)
