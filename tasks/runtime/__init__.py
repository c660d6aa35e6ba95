"""What makes a function a stage, and a flow a run: cache, retries, leases, time limits, events, artifacts, journal, run
records, dry runs, placement, and the Prefect server that a command starts.

Every process that runs a stage or a flow imports this package first, before torch reads its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from rollout_core.base.collector import collect_seldom
from rollout_core.base.determinism import NUMERICS, hold_numerics, prepare_environment


def requested_numerics(parameters: Mapping[str, Any]) -> Any:
    """The ``numerics`` of a flow run's configuration, after the overrides that the nightly flow takes; None where the
    parameters leave it out."""
    config, overrides = parameters.get("config"), parameters.get("overrides")
    requested = config.get("numerics") if isinstance(config, Mapping) else None
    return overrides.get("numerics", requested) if isinstance(overrides, Mapping) else requested


def _parameters_of(flow_run_id: str) -> Mapping[str, Any]:
    from prefect import get_client  # commands import this package, too, and most of them need no Prefect

    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run_id)).parameters


prepare_environment()
if "PREFECT__FLOW_RUN_ID" in os.environ:  # started by a worker for one flow run
    collect_seldom()
    if NUMERICS not in os.environ:  # its parameters say how it is to compute
        hold_numerics(requested_numerics(_parameters_of(os.environ["PREFECT__FLOW_RUN_ID"])))
# OpenMP's threads otherwise spin while they wait for each other: next to any other busy process on the same cores,
# training on the CPU was then measured ten to twenty times slower; asleep, a few percent slower alone.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
