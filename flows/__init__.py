"""Flows: order, fan-out and placement of stages; and the `rollout` command.

Names are imported when they are first used; the nightly flow, which has its module's name, is `flows.nightly.nightly`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import lazy_loader

from rollout_core.base import moved
from rollout_core.base.own_packages import require_own

require_own("tasks", "blocks")

import tasks.runtime  # noqa: E402 - first of all, see there; `tasks` is ours, as was just made sure

moved.alias(
    __name__,
    {
        "curriculum": "flows.sampling",
        "connections": "tasks.runtime.prefect_server",
        "dask": "tasks.runtime.dask",
        "dask.fleet": "tasks.runtime.dask.fleet",
        "dask.worker": "tasks.runtime.dask.worker",
        "flow_run": "tasks.runtime.flow_run",
        "iterations": "tasks.runtime.iterations",
        "keeping": "tasks.runtime.kept_states",
        "nights": "tasks.runtime.scheduled_runs",
        "nightly_steps": "flows.evaluation",
        "outage_logs": "tasks.runtime.prefect_logs",
        "placement": "tasks.runtime.dask.placed_stages",
        "planning": "tasks.runtime.planning",
        "recording": "tasks.runtime.run_record",
        "replay": "flows.sampling",
        "report": "tasks.runtime.report",
        "server_process": "tasks.runtime.server_process",
        "server_tables": "tasks.runtime.server_tables",
        "summary": "tasks.runtime.summary",
    },
)

_attached, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["prefect_server"]


def __getattr__(name: str) -> Any:
    # Where they were in earlier versions.
    if name == "prefect_server":
        return import_module(f"{__name__}.connections").prefect_server
    if name == "requested_numerics":
        return tasks.runtime.requested_numerics
    return _attached(name)
