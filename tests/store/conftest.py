"""Stores for the contract suite: every test that takes ``store`` or ``make_store`` runs once for each of ``STORES``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_core.store import (
    AttemptedRollout,
    CollectionBasedLightningStore,
    InMemoryLightningCollections,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    RolloutConfig,
    Span,
    SqlLightningStore,
)
from rollout_core.store.forwarding_store import ForwardingLightningStore
from tests.store.postgres import PostgresServer


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Place:
    """Where a test's stores live. What a store needs beside itself, such as a server, is entered into ``needs``."""

    folder: Path
    clock: Clock
    needs: AsyncExitStack = field(default_factory=AsyncExitStack)


async def open_sqlite(place: Place, **settings: Any) -> LightningStore:
    return SqlLightningStore.from_url(f"sqlite:///{place.folder}/store.db", clock=place.clock, **settings)


async def open_memory(place: Place, **settings: Any) -> LightningStore:
    return InMemoryLightningStore(clock=place.clock, **settings)


async def open_threaded(place: Place, **settings: Any) -> LightningStore:
    collections = InMemoryLightningCollections()
    return LightningStoreThreaded(CollectionBasedLightningStore(collections, clock=place.clock, **settings))


POSTGRES = PostgresServer()
"""The server of this session; it starts when a test first needs it."""


async def open_postgres(place: Place, **settings: Any) -> LightningStore:
    # Not in a thread: the server would end with it.
    url = POSTGRES.database_of(place.folder)
    return SqlLightningStore.from_url(url, clock=place.clock, **settings)


class Switch(ForwardingLightningStore):
    """The store that the present test has opened last, so that one server serves them all."""

    def __init__(self) -> None:
        self.store: LightningStore | None = None

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return LightningStoreCapabilities(thread_safe=True, async_safe=True)

    def backend(self) -> LightningStore:
        assert self.store is not None
        return self.store


class FailingStore(Switch):
    """A store all of whose calls raise the same error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def backend(self) -> LightningStore:
        raise self.error

    async def close(self) -> None:
        pass


SWITCH = Switch()
SERVER = LightningStoreServer(SWITCH)


SERVER_LOGGERS = ("uvicorn.error", "rollout_core.store.http.app", "rollout_core.store.http.otlp")
"""Of servers that run in the tests' own process; clients there have others."""


@pytest.fixture(autouse=True)
def _no_errors_of_servers(server_logs, tmp_path):
    """What servers in this process log as an error fails the test, as it does in a process of their own."""
    log = server_logs.watch(tmp_path / "servers-in-process.log")

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            with log.open("a") as file:
                file.write(f"{logging.Formatter('%(levelname)s: %(name)s %(message)s').format(record)}\n")
        return True

    # Filters: uvicorn replaces the handlers of its loggers whenever a server is made. They see only what is logged on
    # their very logger.
    loggers = [logging.getLogger(name) for name in SERVER_LOGGERS]
    for logger in loggers:
        logger.addFilter(note)
    yield
    for logger in loggers:
        logger.removeFilter(note)


@pytest.fixture
def requests_fail_on_purpose(server_logs):
    """The store behind the test's server fails, which the server logs."""
    server_logs.expect("request failed", "the test's store fails")


@pytest.fixture(scope="session", autouse=True)
def _stop_servers():
    yield
    asyncio.run(SERVER.stop())
    POSTGRES.close()


async def open_http(place: Place, **settings: Any) -> LightningStore:
    await SERVER.start()
    SWITCH.store = await open_sqlite(place, **settings)
    place.needs.push_async_callback(SWITCH.store.close)
    return LightningStoreClient(SERVER.endpoint)


@pytest.fixture
def postgres() -> PostgresServer:
    """The PostgreSQL server of this session."""
    return POSTGRES


STORES: dict[str, Callable[..., Awaitable[LightningStore]]] = {
    "memory": open_memory,
    "sqlite": open_sqlite,
    "threaded": open_threaded,
    "postgres": open_postgres,
    "http": open_http,
}
"""For each kind of store a function that opens one in a ``Place``; settings are those of ``SqlLightningStore``."""
SHARED = [name for name in STORES if name not in ("memory", "threaded")]
"""Those whose data outlives the store object: opened twice in one place, both see the same."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=STORES)
async def make_store(request, tmp_path, clock):
    """Opens stores in one place; their watchdog looks at every call unless told otherwise."""
    place = Place(tmp_path, clock)

    async def make(**settings: Any) -> LightningStore:
        store = await STORES[request.param](place, **{"scan_debounce_seconds": 0, **settings})
        place.needs.push_async_callback(store.close)
        return store

    async with place.needs:
        yield make


@pytest_asyncio.fixture
async def store(make_store) -> LightningStore:
    return await make_store()


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


class Make:
    """Short ways to what nearly every test needs."""

    @staticmethod
    def span(rollout: AttemptedRollout, sequence_id: int = 1, **fields: Any) -> Span:
        attributes = fields.pop("attributes", {"reward": 0.5})
        return Span.from_attributes(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=sequence_id,
            attributes=attributes,
            **fields,
        )

    @staticmethod
    async def claimed(store: LightningStore, worker_id: str | None = None, **config: Any) -> AttemptedRollout:
        """A rollout that was enqueued and claimed, the queue being empty otherwise."""
        await store.enqueue_rollout({"task": 1}, config=RolloutConfig(**config) if config else None)
        claimed = await store.dequeue_rollout(worker_id)
        assert claimed is not None
        return claimed

    @staticmethod
    async def status(store: LightningStore, rollout_id: str) -> str:
        rollout = await store.get_rollout_by_id(rollout_id)
        assert rollout is not None
        return rollout.status


@pytest.fixture
def make() -> type[Make]:
    return Make
