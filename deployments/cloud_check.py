"""The flow that has `rollout cloud doctor` look at what runs count on, such as every night before they begin."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

import tasks.runtime.scheduled_runs  # noqa: F401 - a run that loses its place continues
from deployments.cloud_doctor import Provider, examined, text
from rollout_core.base.errors import Fatal
from tasks.runtime.journal import stage_logger


@flow(name="cloud-doctor", flow_run_name="cloud-doctor", persist_result=False)
def cloud_doctor(provider: Provider | None = None) -> dict[str, Any]:
    """Try what runs on this machine count on: storage, credentials, queue, secrets and machine, by its own settings.

    Fails where a check does, with what to do about it. Without ``provider`` it is that of the settings.
    """
    report = examined(provider, None)
    shown = text(report, coloured=False)
    for line in shown.splitlines():
        stage_logger().info("%s", line)
    create_markdown_artifact(f"```\n{shown}\n```", key="cloud-doctor", description="rollout cloud doctor")
    failed = [check for check in report.checks if check.status == "fail"]
    if failed:
        raise Fatal("\n".join(f"{check.name}: {check.error}; {check.remedy}" for check in failed))
    return report.model_dump(mode="json", exclude_none=True)
