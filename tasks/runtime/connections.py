"""The shared parts as this process's settings name them: object storage, database, local cache.

A setting is an address, or ``block:SLUG/NAME`` for a block saved on the Prefect server. It is looked up when a stage
runs, on the machine it runs on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import parse_qs, urlsplit

from prefect.blocks.core import Block

from blocks import ContentAddressedStorage, ExperimentTracker, RolloutDatabase
from rollout_core.base.errors import ConfigError
from rollout_core.base.settings import BLOCK_PREFIX, locations, without_password
from rollout_core.objects import ObjectStore
from rollout_core.store import SqlLightningStore
from rollout_core.store.reachable import Connections
from rollout_core.store.sql.by_url import is_postgres
from tasks.runtime.dry_run import current_dry_run

BlockT = TypeVar("BlockT", bound=Block)


def result_storage() -> ContentAddressedStorage:
    """The block that ``ROLLOUT_STORAGE`` names; also where Prefect keeps stage results. In a dry run, its copy."""
    dry_run = current_dry_run()
    if dry_run is not None:
        return dry_run.storage
    return storage_at(locations().storage)


def storage_at(address: str) -> ContentAddressedStorage:
    """The storage block of an address, one of its own for a URL. Raises ConfigError where there is no such block."""
    if address.startswith(BLOCK_PREFIX):
        return _load(address, ContentAddressedStorage)
    return ContentAddressedStorage(url=address)


def objects() -> ObjectStore:
    """The object store of this process's settings."""
    return result_storage().objects()


_stores: dict[str, tuple[SqlLightningStore, int]] = {}
"""Stores that are open in this process, with the number of their users."""
_stores_lock = threading.Lock()


@asynccontextmanager
async def open_store() -> AsyncIterator[SqlLightningStore]:
    """The LightningStore of this process's settings, open for the length of the block.

    Those who use it at the same time, in any thread, share one: what they write then shares transactions, where two
    stores of one SQLite file would wait for each other.
    """
    url = database_url()
    with _stores_lock:
        store, users = _stores.get(url, (None, 0))
        if store is None:
            store = SqlLightningStore.from_url(url)
        _stores[url] = (store, users + 1)
    try:
        yield store
    finally:
        with _stores_lock:
            users = _stores[url][1] - 1
            if users:
                _stores[url] = (store, users)
            else:
                del _stores[url]
        if not users:
            await store.close()


def current_connections() -> Connections:
    """Object store and database, for a plan to check."""
    return Connections(objects, database_url)


def description() -> str:
    """Object storage and database for a message, without user, password or options."""
    parts = urlsplit(database_url())
    # PostgreSQL's folder of sockets stands in the query.
    host = parts.netloc.rpartition("@")[2] or parse_qs(parts.query).get("host", [""])[0]
    database = parts._replace(netloc=host, query="").geturl()
    return f"storage {without_password(result_storage().url)}, database {database}"


def machines_meet() -> bool:
    """Whether stages may run on several machines at once: their database is a server, not a file."""
    return is_postgres(database_url())


def database_url() -> str:
    """The address of the store's database, with its password."""
    address = locations().database
    if address.startswith(BLOCK_PREFIX):
        return _load(address, RolloutDatabase).url.get_secret_value()
    return address


AGENT_LOGS = "agent-logs"
"""Below the cache: what agents print."""


def cache_folder() -> Path:
    """Local folder for models fetched from the object store."""
    return locations().cache


def tracker() -> ExperimentTracker:
    """Where trackers report to. Raises ConfigError where the settings name a block that is not there."""
    address = locations().tracking
    return _load(address, ExperimentTracker) if address.startswith(BLOCK_PREFIX) else ExperimentTracker(folder=address)


def lock_folder() -> Path:
    """Where processes of this machine that share the object storage meet to spare double work."""
    folder = _local_folder()
    return (folder or cache_folder()) / "locks"


def storage_is_local() -> bool:
    """Whether every user of the storage is on this machine, so that its file locks bind all of them."""
    return _local_folder() is not None


def _local_folder() -> Path | None:
    url = result_storage().url
    if "://" in url and not url.startswith("file://"):
        return None
    return Path(url.removeprefix("file://"))


def _load(address: str, kind: type[BlockT]) -> BlockT:
    slug = address.removeprefix(BLOCK_PREFIX)
    try:
        return cast(BlockT, kind.load(slug.partition("/")[2] or slug))
    except ValueError as error:
        raise ConfigError(f"setting {address!r} names no block of the Prefect server: {error}") from error


def working_folder() -> Path:
    """Where relative paths of a configuration start."""
    return Path(os.getcwd())
