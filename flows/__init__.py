"""Flows: order, fan-out and placement of stages; and the `rollout` command."""

import os

from rollout_core.base.numerics import NUMERICS, hold_numerics
from rollout_core.base.own_packages import require_own
from rollout_core.base.seeding import prepare_environment

# Every process that runs a flow imports this package first, before torch reads its environment.
prepare_environment()
require_own("tasks", "blocks")
if "PREFECT__FLOW_RUN_ID" in os.environ and NUMERICS not in os.environ:
    # Started by a worker for one flow run, whose parameters say how it is to compute.
    from flows.flow_run import asked_numerics

    hold_numerics(asked_numerics(os.environ["PREFECT__FLOW_RUN_ID"]))
# OpenMP's threads otherwise spin while they wait for each other: beside any other busy process on the same cores,
# training on the CPU was then measured ten to twenty times slower; asleep, a few percent slower alone.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
