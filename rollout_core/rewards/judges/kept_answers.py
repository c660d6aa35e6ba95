"""Where answers of judges are kept. Imports little: what asks judges is imported once a reward has any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollout_core.objects import ObjectStore
from rollout_core.store import InMemoryLightningStore, LightningStore
from rollout_core.store.reachable import OpenStore


@dataclass(frozen=True)
class AnswerLedger:
    """Each answer is a sample's completion, as of a model that generates."""

    objects: ObjectStore
    open_store: OpenStore

    @classmethod
    def in_memory(cls) -> AnswerLedger:
        """One for the length of this process."""
        store = InMemoryLightningStore()

        @asynccontextmanager
        async def opened() -> AsyncIterator[LightningStore]:
            yield store

        return cls(ObjectStore.from_url(f"memory://judges-{id(store)}"), opened)
