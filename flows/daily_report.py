"""The morning check: one message a day that says whether last night's run ended, and what came of it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import flow, get_client
from prefect.artifacts import create_markdown_artifact
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from tasks.runtime.journal import stage_logger
from tasks.runtime.scheduled_runs import SKIPPED
from tasks.runtime.summary import KEY as SUMMARY

_MARKS = re.compile(r"\*\*|\\(?=[^\w\s])|^- ", re.MULTILINE)


@flow(name="morning-check", flow_run_name="morning check of {deployment}", persist_result=False)
async def morning_check(
    deployment: str = "nightly/nightly", webhook: str | None = None, hours: float = 12.0
) -> dict[str, Any]:
    """Report once on the runs of a deployment that were due in the last hours.

    ``deployment`` is FLOW/DEPLOYMENT. ``webhook`` names a webhook block of the Prefect server, such as
    ``rollout-notifications``, which `rollout ops install --webhook URL` saves; without one the message is only logged
    and shown. Returns the message: ``text``, ``deployment``, ``ok`` and the runs with name, id, state and url.
    """
    flow_name, _, name = deployment.partition("/")
    if not flow_name or not name or hours <= 0:
        raise ConfigError(f"deployment {deployment!r}, hours {hours:g}: expected FLOW/DEPLOYMENT and more than 0 hours")
    block = None if webhook is None else await _webhook(webhook)
    with get_client(sync_client=True) as client:
        message = message_of(client, deployment, hours)
    stage_logger().info("%s", message["text"])
    await create_markdown_artifact(message["text"].replace("\n", "\n\n"), key="morning-check", description=deployment)  # pyright: ignore[reportGeneralTypeIssues]
    if block is not None:
        answer = await block.call(message)
        if answer.status_code >= 400:
            raise RolloutError(f"the webhook {webhook!r} answered {answer.status_code}; the message was not delivered")
    return message


async def _webhook(name: str) -> Webhook:
    try:
        return await Webhook.aload(name)
    except ValueError as error:
        raise NotFound(
            f"webhook {name!r}: the Prefect server has no such webhook block; `rollout ops install --webhook URL` "
            "saves one named rollout-notifications"
        ) from error


def message_of(client: SyncPrefectClient, deployment: str, hours: float) -> dict[str, Any]:
    """What there is to tell of a deployment's runs that were due in the last ``hours``.

    Raises NotFound where there is no such deployment.
    """
    runs = [run for run in _due(client, deployment, hours) if run.state_name != SKIPPED]
    if not runs:
        text = f"{deployment}: no run was due in the last {hours:g} hours; is its schedule on?"
        return {"text": text, "deployment": deployment, "ok": False, "runs": []}
    lines = [line for run in runs for line in _lines(client, run)]
    return {
        "text": "\n".join([f"{deployment}: {_outcome(runs[0])}", *lines]),
        "deployment": deployment,
        "ok": runs[0].state is not None and runs[0].state.is_completed(),
        "runs": [{"name": run.name, "id": str(run.id), "state": run.state_name, "url": url_for(run)} for run in runs],
    }


def _due(client: SyncPrefectClient, deployment: str, hours: float) -> list[FlowRun]:
    """The newest first; those that a person started, too."""
    try:
        found = client.read_deployment_by_name(deployment)
    except ObjectNotFound as error:
        raise NotFound(f"deployment {deployment!r}: the Prefect server has none of this name") from error
    now = datetime.now(UTC)
    period = {"after_": now - timedelta(hours=hours), "before_": now}
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])),
        flow_run_filter=FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime.model_validate(period)),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )


def _outcome(run: FlowRun) -> str:
    state = run.state
    if state is None or state.is_scheduled() or state.is_pending():
        return f"the last run, due at {run.expected_start_time:%H:%M} UTC, has not started; is a worker there?"
    if state.is_running():
        return "the last run is still running"
    return f"the last run is {state.name} after {timedelta(seconds=round(run.total_run_time.total_seconds()))}"


def _lines(client: SyncPrefectClient, run: FlowRun) -> list[str]:
    """The run, and the facts at the head of its summary."""
    pages = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), key=ArtifactFilterKey(any_=[SUMMARY])
        )
    )
    head = str(pages[-1].data).partition("\n\n")[0] if pages else ""
    facts = [f"    {line}" for line in _MARKS.sub("", head).splitlines()]
    if not facts and run.state is not None and run.state.message:
        facts = [f"    {run.state.message}"]
    return [f"- {run.name}, {run.state_name}: {url_for(run)}", *facts]
