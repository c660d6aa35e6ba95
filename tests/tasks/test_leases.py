"""The keeper of a stage's lease, where its database gives other answers than a lease or none."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import hash_bytes
from rollout_core.store import SqlLightningStore
from tasks.runtime import connections, stage_leases as leases
from tests.store.patience import LONG, wait_until

KEY = hash_bytes(b"key")
AWAY = Recoverable("the server is away")
WILL_NOT_PASS = [
    pytest.param(ConfigError("the server refuses the store"), id="refused"),
    # As from the lookup of a block, while Prefect's server is away.
    pytest.param(ConnectionError("all connection attempts failed"), id="no-address"),
]


class Database:
    """One that is shared by machines, and fails as a test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.failures: list[Exception] = []
        self._open = connections.open_store

    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[SqlLightningStore]:
        if self.error is not None:
            self.failures.append(self.error)
            raise self.error
        async with self._open() as store:
            yield store


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    database = Database()
    monkeypatch.setattr(connections, "open_store", database.open_store)
    monkeypatch.setattr(connections, "machines_meet", lambda: True)
    monkeypatch.setattr(leases, "AWAY_SECONDS", LONG)
    return database


@contextmanager
def begun_without(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a stage that began without its lease, because the database did not answer."""
    database.error = AWAY
    monkeypatch.setattr(leases, "AWAY_SECONDS", 0.0)
    with leases.alone(KEY, "stage"):
        monkeypatch.setattr(leases, "AWAY_SECONDS", LONG)
        wait_until(lambda: AWAY in database.failures)
        yield


@pytest.mark.parametrize("error", WILL_NOT_PASS)
def test_a_stage_does_not_begin_where_the_lease_cannot_be_asked_for(database: Database, error: Exception):
    database.error = error
    with pytest.raises(type(error)) as raised, leases.alone(KEY, "stage"):
        pytest.fail("it began", pytrace=False)
    assert raised.value is error


@pytest.mark.parametrize("error", WILL_NOT_PASS)
def test_a_stage_that_began_without_its_lease_has_it_once_the_database_gives_it_whatever_it_said_before(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    with caplog.at_level(logging.INFO), begun_without(database, monkeypatch):
        database.error = error
        wait_until(lambda: error in database.failures)
        database.error = None
        wait_until(lambda: "the database answers again to stage stage" in caplog.text)
    assert f"the database does not answer ({AWAY})" in caplog.text
