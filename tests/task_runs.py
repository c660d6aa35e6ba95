"""Task runs as a Prefect server has them on record, which it learns of by events: some moments after they happen."""

from __future__ import annotations

import time
from typing import Any

SECONDS = 120.0


def ended_task_runs(run_id: Any, count: int) -> list[Any]:
    """The task runs of a flow run, once so many are on record and all have ended."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    deadline = time.monotonic() + SECONDS
    with get_client(sync_client=True) as client:
        while True:
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
            states = [task.state for task in found]
            if len(found) == count and all(state is not None and state.is_final() for state in states):
                return found
            if time.monotonic() > deadline:
                shown = sorted((task.name, task.state_name) for task in found)
                raise AssertionError(f"after {SECONDS} s {len(found)} task runs, of {count}, are on record: {shown}")
            time.sleep(0.2)
