"""What the database of rollouts names in the object store."""

from __future__ import annotations

import os
import time

from rollout_core.base.ids import ContentId
from rollout_core.inference.ledger import COMPLETION_SPAN, FAILURE_SPAN
from rollout_core.objects.gc import named_ids
from rollout_core.store.sql.by_url import is_postgres
from rollout_core.store.sql.sqlite import parse_url
from rollout_core.store.sql.store import SqlLightningStore

DAY = 86400.0


async def named_by_database(url: str, *, completion_days: float) -> frozenset[ContentId]:
    """Ids in the latest resources, and in the completions of samples that have not ended or ended within these days.

    None where there is no database yet. Raises what opening the store raises.
    """
    if not is_postgres(url) and not os.path.exists(parse_url(url)):
        return frozenset()
    store = SqlLightningStore.from_url(url)
    try:
        latest = await store.get_latest_resources()
        served = "" if latest is None else latest.model_dump_json()
        since = time.time() - completion_days * DAY
        completions = await store.ids_in_spans((COMPLETION_SPAN, FAILURE_SPAN), since=since)
        return frozenset(completions.union(named_ids([served.encode()])))
    finally:
        await store.close()
