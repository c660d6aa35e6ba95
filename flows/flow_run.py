"""The flow run that a worker started this process for, before any flow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect import get_client


def asked_numerics(flow_run_id: str) -> Any:
    """What the parameters of the flow run give as its ``numerics``; None where they leave it out."""
    with get_client(sync_client=True) as client:
        parameters = client.read_flow_run(UUID(flow_run_id)).parameters
    return numerics_among(parameters)


def numerics_among(parameters: Mapping[str, Any]) -> Any:
    """The configuration's ``numerics``, as it is after the overrides that the nightly flow takes."""
    config, overrides = parameters.get("config"), parameters.get("overrides")
    asked = config.get("numerics") if isinstance(config, Mapping) else None
    return overrides.get("numerics", asked) if isinstance(overrides, Mapping) else asked
