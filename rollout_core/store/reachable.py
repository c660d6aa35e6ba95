"""What a run keeps its work in, the object store and the database, tried before any work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from rollout_core.base.ids import hash_bytes
from rollout_core.base.settings import locations
from rollout_core.objects import ObjectStore
from rollout_core.store.contract import LightningStore
from rollout_core.store.sql.by_url import check

OpenStore = Callable[[], AbstractAsyncContextManager[LightningStore]]
"""Opens a store for the length of a block."""


@dataclass(frozen=True)
class Connections:
    """How this process opens them; nothing is opened, let alone created, before a method is called."""

    open_objects: Callable[[], ObjectStore]
    database_url: Callable[[], str]

    def try_objects(self) -> ObjectStore:
        """The object store, once it answered. Raises ConfigError for an address or a place that cannot be one."""
        objects = self.open_objects()
        objects.exists(hash_bytes(b""))
        return objects

    def try_database(self) -> None:
        """Raises ConfigError unless the database is a store of this version, or can become one; creates nothing."""
        check(self.database_url())


def plain_connections() -> Connections:
    """The addresses in the settings as they stand, for a process that knows no Prefect blocks."""
    return Connections(lambda: ObjectStore.from_url(locations().storage), lambda: locations().database)
