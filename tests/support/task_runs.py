"""Task runs as a Prefect server has them on record, which it learns of by events: some moments after they happen."""

from __future__ import annotations

from typing import Any

from tests.flows.conftest import wait_for


def ended_task_runs(run_id: Any, count: int) -> list[Any]:
    """The task runs of a flow run, once so many are on record and all have ended."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    seen: list[Any] = []

    def look() -> bool:
        seen[:] = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
        return len(seen) == count and all(task.state is not None and task.state.is_final() for task in seen)

    with get_client(sync_client=True) as client:
        try:
            wait_for(look, f"the record of {count} task runs that have ended")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{sorted((task.name, task.state_name) for task in seen)}") from None
    return seen
