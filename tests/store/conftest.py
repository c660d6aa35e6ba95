"""Stores for the contract suite: every test that takes ``store`` or ``make_store`` runs once for each factory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollout_core.store import AttemptedRollout, LightningStore, RolloutConfig, Span, SqlLightningStore


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def _sqlite(folder: Path, clock: Callable[[], float], **settings: Any) -> LightningStore:
    return SqlLightningStore.from_url(f"sqlite:///{folder}/store.db", clock=clock, **settings)


FACTORIES = {"sqlite": _sqlite}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=FACTORIES)
async def make_store(request, tmp_path, clock):
    """Opens stores on the same data; the watchdog looks at every call unless told otherwise."""
    opened: list[LightningStore] = []

    def make(**settings: Any) -> LightningStore:
        store = FACTORIES[request.param](tmp_path, clock, **{"scan_debounce_seconds": 0, **settings})
        opened.append(store)
        return store

    yield make
    for store in opened:
        await store.close()


@pytest_asyncio.fixture
async def store(make_store) -> LightningStore:
    return make_store()


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
