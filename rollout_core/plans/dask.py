"""The Dask cluster of a configuration, as far as it can be known before a run."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.config import DaskConfig

CONNECT_SECONDS = 5.0


def check_cluster(config: DaskConfig) -> str:
    """The cluster in words. Raises ConfigError unless its scheduler answers, or its class can be imported."""
    if any(importlib.util.find_spec(package) is None for package in ("prefect_dask", "distributed")):
        raise ConfigError(f"Dask is not installed; install {DISTRIBUTION}[dask]")
    if config.cluster is not None:
        _import_class(config.cluster)
        return config.cluster
    assert config.address is not None, "validated"
    count = _count_workers(config.address)
    return f"{config.address}, {count} workers"


def _import_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cluster: {path!r} cannot be imported ({error}); give a class such as distributed.LocalCluster, and "
            "install the package it is in"
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"cluster: {path!r} is {type(found).__name__}, not a class such as distributed.LocalCluster")
    return found


def _count_workers(address: str) -> int:
    # Not a Client, which goes on trying in the background when nobody answers.
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> int:
        async with rpc(address, connection_args=Security().get_connection_args("client")) as scheduler:
            answer: Any = await scheduler.identity(n_workers=-1)
        if answer.get("type") != "Scheduler":
            raise OSError(f"a {answer.get('type')} answers there")
        return len(answer["workers"])

    try:
        return asyncio.run(asyncio.wait_for(ask(), CONNECT_SECONDS))
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"address: no Dask scheduler answers at {address} within {CONNECT_SECONDS:.0f} s "
            f"({str(error) or type(error).__name__}); start one with `dask scheduler`, or correct the address"
        ) from error
