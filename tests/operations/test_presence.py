"""Workers that vanish, as those of other machines see it by the leases of a common database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deployments import presence
from deployments.presence import Presence
from rollout_core.base.errors import Recoverable
from rollout_core.store import SqlLightningStore
from tests.store.patience import wait_until


@pytest.fixture
def database(tmp_path, monkeypatch) -> Iterator[str]:
    url = f"sqlite:///{tmp_path / 'rollouts.db'}"
    monkeypatch.setenv("ROLLOUT_DATABASE", url)
    for name, seconds in {"LEASE_SECONDS": 600.0, "BEAT_SECONDS": 0.05, "SETTLE_SECONDS": 0.4}.items():
        monkeypatch.setattr(presence, name, seconds)
    yield url


def lease_of(database: str, worker: str, *, seconds: float) -> None:
    """As a worker has taken it that is no more."""

    async def take() -> None:
        async with SqlLightningStore.from_url(database) as store:
            await store.leases.take(f"worker/gpu/{worker}", worker, seconds=seconds)

    asyncio.run(take())


def test_a_worker_whose_lease_has_run_out_is_gone_and_no_other(database):
    lease_of(database, "vanished", seconds=0.01)
    lease_of(database, "busy", seconds=600)
    here, other = Presence("gpu", "here"), Presence("gpu", "other")
    namesake = Presence("gpu", "busy")
    asked = {"vanished", "busy", "other", "here", "without-a-lease"}
    try:
        wait_until(lambda: here.is_held and other.is_held)
        wait_until(lambda: here.gone(asked))
        assert here.gone(asked) == {"vanished"}
        assert not namesake.is_held, "another one is called so"
        other.end()
        wait_until(lambda: here.gone(asked) == {"vanished", "other"})
        lease_of(database, "vanished", seconds=600)
        wait_until(lambda: here.gone(asked) == {"other"})
    finally:
        here.end()
        other.end()
        namesake.end()


def test_after_an_outage_of_the_database_others_have_time_to_come_back(database, monkeypatch):
    """All leases run out while it is away."""
    lease_of(database, "back", seconds=0.01)
    is_away, beats = False, 0

    class Watched(Presence):
        async def _beat(self, book):
            nonlocal beats
            beats += 1
            if is_away:
                raise Recoverable("no route to host")
            return await super()._beat(book)

    monkeypatch.setattr(presence, "SETTLE_SECONDS", 1e9)
    here = Watched("gpu", "here")
    try:
        here.gone({"back"})
        wait_until(lambda: "back" in here._gone_since)
        monkeypatch.setattr(presence, "ANSWER_SECONDS", -1e9)
        monkeypatch.setattr(presence, "SETTLE_SECONDS", 0.0)
        assert here.gone({"back"}) == set(), "what was seen before a database that hangs counts for nothing"
        monkeypatch.setattr(presence, "ANSWER_SECONDS", 8.0)
        monkeypatch.setattr(presence, "SETTLE_SECONDS", 1e9)
        is_away = True
        wait_until(lambda: not here._gone_since)
        lease_of(database, "back", seconds=600)
        is_away, seen = False, beats
        wait_until(lambda: beats > seen + 2)
        assert not here._gone_since
    finally:
        here.end()
