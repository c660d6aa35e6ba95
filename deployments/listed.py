"""What a project's prefect.yaml lists: deployed on a pool; and which of its schedules cannot run as things are."""

from __future__ import annotations

from pathlib import Path

from prefect import get_client

from deployments import automations
from deployments.pools import FILE, deploy, listed_deployments
from rollout_core.base.errors import RolloutError
from rollout_core.config import NightlyConfig, parse_config
from rollout_core.plans.learner_plan import plan_nightly
from tasks.runtime.prefect_server import connections


def deploy_all(project: Path, pool: str, config: Path | None = None) -> None:
    """Deploy what ``prefect.yaml`` lists on the pool, and have crashed runs tried again. ``config`` as of `deploy`.

    Automations that are installed already stay as they are: `rollout ops install` changes them.
    """
    deploy(project, pool, config=config)
    with get_client(sync_client=True) as client:
        if not automations.present(client):
            automations.install(client, automations.changes(client, automations.healing()))


def unready_schedules(project: Path, config: Path | None = None) -> list[str]:
    """A line for each scheduled deployment of the nightly flow whose runs would fail as things are: what is missing."""
    lines = []
    for item in listed_deployments(project / FILE, config)["deployments"]:
        document = item.get("parameters", {}).get("config")
        if item["entrypoint"] != "flows/nightly.py:nightly" or not item.get("schedules") or document is None:
            continue
        try:
            plan_nightly(parse_config(document, NightlyConfig, name=item["name"]), project, connections())
        except RolloutError as error:
            reasons = "; ".join(str(error).splitlines())
            lines.append(f"deployment {item['name']}: its scheduled runs will fail until this is fixed: {reasons}")
    return lines
