"""One night at a time: of several runs that were missed only the newest runs, and none ends because of its place.

Deployments of scheduled flows have a concurrency limit of one, for which a run holds a lease on the Prefect server.
Every module of a flow imports this one, by `tasks.runtime.flow_run` or by itself; with it Prefect's own parts say less
of an outage.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect import flow_engine, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Completed

from tasks.runtime import prefect_logs
from tasks.runtime.journal import stage_logger

SKIPPED = "Skipped"
"""Name of the state, of type Completed, in which a run ends whose work a newer one does."""
RENEWALS = 3
"""In the time that a lease lasts."""
RETRY_SECONDS = 5.0
_AT_WORK = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.COMPLETED]


def skipped_for_newer() -> State[None] | None:
    """State in which this run is to end because a newer one of its schedule is due; None where it is to run.

    After a worker was away for three nights, three runs are late, which would compute the same thing one after the
    other. A run that has begun before is wanted, by a person or after a crash, and is never skipped.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or not run.auto_scheduled or run.total_run_time or run.deployment_id is None:
        return None
    try:
        newer = _newer_run(run)
    except httpx.HTTPError as error:
        stage_logger().warning("whether a newer run is due is not known, so this one continues: %s", error)
        return None
    if newer is None:
        return None
    message = f"run {newer.name!r} ({newer.id}), scheduled for {newer.expected_start_time:%Y-%m-%d %H:%M} UTC, is due"
    stage_logger().info("skipped: %s", message)
    return Completed(name=SKIPPED, message=message)


def _newer_run(run: FlowRun) -> FlowRun | None:
    """The newest run of the same schedule that is due and has not ended badly."""
    if run.deployment_id is None or run.expected_start_time is None:
        return None
    with get_client(sync_client=True) as client:
        due = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[run.deployment_id])),
            flow_run_filter=FlowRunFilter(
                expected_start_time=FlowRunFilterExpectedStartTime.model_validate(
                    {"after_": run.expected_start_time + timedelta(microseconds=1), "before_": datetime.now(UTC)}
                ),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_AT_WORK)),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )
    # Another schedule of the deployment may have other parameters, and is then other work.
    return next((other for other in due if other.auto_scheduled and other.parameters == run.parameters), None)


@contextmanager
def hold_place(
    lease_id: UUID,
    lease_duration: float,
    raise_on_lease_renewal_failure: bool = False,
    suppress_warnings: bool = False,
) -> Iterator[None]:
    """Renew the lease of a run's place among those of its deployment, until the end of the block.

    Takes the place of Prefect's own, which ends a run whose lease cannot be renewed: by an outage of more than 75 s, or
    one of any length where leases are in the server's memory. Here a run continues; should another one start meanwhile,
    both compute the same stages under the same keys, with one result. Prefect 3.9.1 ends a run, too, and no setting is
    against it.
    """
    ended = threading.Event()
    renewing = threading.Thread(
        target=copy_context().run, args=[_renew, lease_id, lease_duration, ended], name="rollout-lease", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        ended.set()


def _renew(lease_id: UUID, lease_duration: float, ended: threading.Event) -> None:
    pause = 0.0
    while not ended.wait(pause):
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease_id=lease_id, lease_duration=lease_duration)
            pause = lease_duration / RENEWALS
        except PrefectHTTPStatusError as error:
            if error.response.status_code == httpx.codes.GONE:
                stage_logger().warning("the run has lost its place among those of its deployment; it continues")
                return
            pause = RETRY_SECONDS
        except httpx.HTTPError:
            pause = RETRY_SECONDS


prefect_logs.shorten()
# Where the engine finds it, for every flow of this process.
flow_engine.maintain_concurrency_lease = hold_place  # pyright: ignore[reportPrivateImportUsage]
