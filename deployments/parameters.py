"""Parameters of a run that waits for its place: where they are wrong it fails now, and not once its turn has come.

`deployments.worker` starts this as ``python -m deployments.parameters RUN`` for a run that the server lets wait.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any
from uuid import UUID

from prefect import Flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ParameterBindError, ParameterTypeError
from prefect.states import Failed

from deployments.worker import REFUSED
from rollout_core.base.errors import ConfigError
from rollout_core.config import Settings, apply_overrides, as_given, parse_config
from tasks.runtime.run_record import record_refused


def refuse_if_wrong(client: SyncPrefectClient, run_id: UUID) -> bool:
    """Have a scheduled run fail, and be recorded as failed, if its flow would refuse its parameters; whether it did."""
    run = client.read_flow_run(run_id)
    flow = _flow_of(client, run)
    if flow is None:
        return False
    try:
        check_parameters(flow, run.parameters)
    except (ConfigError, ParameterTypeError, ParameterBindError) as error:
        message = f"{type(error).__name__}: {error}"
    else:
        return False
    now = client.read_flow_run(run_id).state
    if now is None or not now.is_scheduled():
        return False  # its turn has come meanwhile, and it finds out by itself
    client.set_flow_run_state(run_id, Failed(message=message), force=True)
    record_refused(flow.name, run, message)
    return True


def check_parameters(flow: Flow[..., Any], parameters: dict[str, Any]) -> None:
    """Raises ConfigError, or what Prefect raises, for parameters that the flow refuses before it looks at anything."""
    given = flow.validate_parameters(parameters)
    config, overrides = given.get("config"), given.get("overrides")
    if overrides and isinstance(config, Settings):
        parse_config(apply_overrides(as_given(config), overrides), type(config), name="overrides")


def _flow_of(client: SyncPrefectClient, run: FlowRun) -> Flow[..., Any] | None:
    """The flow that a run's deployment names, where it is one of ours."""
    if run.deployment_id is None:
        return None
    file, _, name = (client.read_deployment(run.deployment_id).entrypoint or "").rpartition(":")
    module = file.removesuffix(".py").replace("/", ".")
    if not module.startswith("flows."):
        return None
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError:
        return None
    return found if isinstance(found, Flow) else None


if __name__ == "__main__":
    with get_client(sync_client=True) as own_client:
        sys.exit(REFUSED if refuse_if_wrong(own_client, UUID(sys.argv[1])) else 0)
