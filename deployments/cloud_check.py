"""The flow that has `rollout doctor cloud` check what runs count on, such as every night before they begin."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

import tasks.runtime.scheduled_runs  # noqa: F401 - a run that loses its place continues
from deployments.cloud_doctor import Provider, document, examined
from deployments.probes import Level, checks_text
from rollout_core.base.errors import Fatal
from tasks.runtime.journal import stage_logger


@flow(name="cloud-doctor", flow_run_name="cloud-doctor", persist_result=False)
def cloud_doctor(provider: Provider | None = None) -> dict[str, Any]:
    """Try what runs on this machine count on: storage, credentials, queue, secrets and machine, by its own settings.

    Fails where a check does, with what to do about it. Without ``provider`` it is that of the settings.
    """
    checks = examined(provider, None)
    shown = checks_text(checks)
    for line in shown.splitlines():
        stage_logger().info("%s", line)
    create_markdown_artifact(f"```\n{shown}\n```", key="cloud-doctor", description="rollout doctor cloud")
    failed = [check for check in checks if check.level is Level.FAIL]
    if failed:
        raise Fatal("\n".join(f"{check.name}: {check.got}; {check.advice}" for check in failed))
    return document(checks)
