"""Object store and database as a command finds them: through Prefect only where a setting names a block.

prefect reads its own settings when it is imported, so a command that may start a server must not import it before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.base.settings import BLOCK_PREFIX, locations
from rollout_core.objects import ObjectStore
from rollout_core.store.connections import Connections, plain_connections

PREFECT_HOME = Path("data/prefect")
"""Of the server that a command starts where none is configured."""


def connections() -> Connections | None:
    """Those of the settings; None where they are blocks of a server that is not running yet."""
    settings = locations()
    if not any(address.startswith(BLOCK_PREFIX) for address in (settings.storage, settings.database)):
        return plain_connections()
    if not os.environ.get("PREFECT_API_URL"):
        return None
    from tasks.connections import current_connections

    return current_connections()


@contextmanager
def object_store(storage: str | None) -> Iterator[ObjectStore]:
    """The object store at ``storage``, else that of the settings; a URL, a path, or ``block:SLUG/NAME``."""
    address = storage or locations().storage
    if not address.startswith(BLOCK_PREFIX):
        yield ObjectStore.from_url(address)
        return
    from flows.local_server import prefect_server

    with prefect_server(PREFECT_HOME):
        from tasks.connections import storage_at

        yield storage_at(address).objects()
