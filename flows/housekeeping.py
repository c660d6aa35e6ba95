"""Housekeeping: the object store, the locks and the cache of this machine are kept from growing for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

import tasks.runtime.scheduled_runs  # noqa: F401 - a run that loses its place continues
from rollout_core.base.locks import sweep
from rollout_core.base.settings import cache_bytes
from rollout_core.config.retention import Retention
from rollout_core.inference.ledger import named_by_database
from rollout_core.objects.local_trees import evict_local_trees
from rollout_core.objects.retention.rounds import Cleaned, clean
from rollout_core.promotion.history import histories
from tasks.runtime.connections import AGENT_LOGS, cache_folder, current_connections, lock_folder, objects
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import retry

OLD_LOCK_SECONDS = 30 * 86400.0
OLD_LOG_SECONDS = 30 * 86400.0


@flow(name="housekeeping", flow_run_name="housekeeping", persist_result=False)
def housekeeping(rules: Retention = Retention(), dry_run: bool = False) -> dict[str, Any]:  # noqa: B008
    """Give up training states, results and promoted models that ``rules`` do not keep, and delete what nothing needs.

    Safe while flows run. A ``dry_run`` only says what would go. Returns the figures.
    """
    cleaned = retry(lambda: _clean(rules, dry_run))
    for line in cleaned.lines:
        stage_logger().info("%s", line)
    text = "\n".join(f"- {line}" for line in cleaned.lines)
    create_markdown_artifact(text, key="housekeeping", description=objects().url)
    return cleaned.model_dump(mode="json")


def _clean(rules: Retention, dry_run: bool) -> Cleaned:
    url = current_connections().database_url()
    named = asyncio.run(named_by_database(url, completion_days=rules.completion_days))
    if not dry_run:
        sweep(lock_folder(), "*.lock", min_age_seconds=OLD_LOCK_SECONDS)
        sweep(cache_folder(), ".*.lock", min_age_seconds=OLD_LOCK_SECONDS)
        sweep(cache_folder() / AGENT_LOGS, "*.log", min_age_seconds=OLD_LOG_SECONDS)
        evict_local_trees(cache_folder(), cache_bytes())
    return clean(objects(), rules, histories=histories(objects()), named_elsewhere=named, dry_run=dry_run)
