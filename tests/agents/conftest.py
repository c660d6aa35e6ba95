"""Stores and upstreams that the tests of agents share."""

from __future__ import annotations

import pytest

from rollout_core.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer, SqlLightningStore
from tests.agents.scripted_upstream import ScriptedUpstream


@pytest.fixture(params=["memory", "sqlite", "http"])
async def store(request, tmp_path):
    if request.param == "memory":
        async with InMemoryLightningStore() as store:
            yield store
        return
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path / 'store.db'}") as store:
        if request.param == "sqlite":
            yield store
            return
        server = LightningStoreServer(store)
        await server.start()
        async with LightningStoreClient(server.endpoint) as client:
            yield client
        await server.close()


@pytest.fixture
async def memory():
    async with InMemoryLightningStore() as store:
        yield store


@pytest.fixture
async def upstream():
    running = ScriptedUpstream()
    await running.start()
    yield running
    await running.stop()
