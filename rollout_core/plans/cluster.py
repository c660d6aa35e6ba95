"""What is checked of a Dask cluster before a run: it answers, it has workers for what is placed on it, and they reach
what the run keeps its work in."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.config import DaskCluster, PlacementConfig
from rollout_core.plans.plan import Plan

CONNECT_SECONDS = 5.0
LOCAL_CLUSTERS = ("distributed.LocalCluster", "dask.distributed.LocalCluster")
"""Whose workers are processes of this machine."""


def check_cluster(config: DaskCluster) -> str:
    """A description of the cluster. Raises ConfigError unless its scheduler answers, or its class can be imported."""
    _check_installed()
    if config.cluster is not None:
        _import_class(config.cluster)
        return config.cluster
    assert config.address is not None, "validated"
    return f"{config.address}, {len(_ask_for_workers(config.address))} workers"


def check_placement(plan: Plan, config: PlacementConfig, kinds: Collection[str]) -> None:
    """The cluster answers, offers what stages of ``kinds`` ask for as far as they are placed, and reaches the places of
    the run."""
    workers = plan.check("placement.dask", lambda: _workers_of(config.dask))
    if workers is None:
        return
    where = config.dask.address or config.dask.cluster
    facts = plan.facts["placement"] = {}
    for kind in config.kinds:
        if kind not in kinds:
            continue
        wanted = config.of(kind).wanted
        offering = [offered for offered in workers.values() if offers(offered, wanted)]
        if workers and not offering:
            plan.violations.append(
                f"placement.{kind}.resources: none of the {len(workers)} workers of {where} offers {in_words(wanted)}; "
                f"they offer {_all_in_words(workers.values())}; start one with `dask worker ... --resources "
                f'"{in_words(wanted)}"`, or ask for what is there'
            )
        elif config.dask.address is None:
            facts[kind] = f"{where}, workers that offer {in_words(wanted)}"
        else:
            facts[kind] = f"{len(offering)} of {len(workers)} workers of {where} offer {in_words(wanted)}"
    if plan.connections is not None:
        check_reach(plan, workers)


def offers(offered: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Whether a worker with these resources gets a stage that asks for those."""
    return all(offered.get(name, 0.0) >= amount for name, amount in wanted.items())


def in_words(resources: Mapping[str, float]) -> str:
    """Resources as ``dask worker --resources`` takes them."""
    return " ".join(f"{name}={amount:g}" for name, amount in sorted(resources.items())) or "nothing in particular"


def _all_in_words(offered: Iterable[Mapping[str, float]]) -> str:
    return " or ".join(sorted({in_words(resources) if resources else "nothing" for resources in offered}))


def _workers_of(config: DaskCluster) -> dict[str, dict[str, float]]:
    """Resources of the workers by their addresses; none where they cannot be known before the cluster is started."""
    check_cluster(config)
    if config.address is not None:
        return {address: worker["resources"] for address, worker in _ask_for_workers(config.address).items()}
    if config.cluster in LOCAL_CLUSTERS:
        count = config.adapt.maximum if config.adapt is not None else config.options.get("n_workers") or 1
        return {f"tcp://127.0.0.1:{number}": config.options.get("resources") or {} for number in range(count)}
    return {}


def check_reach(plan: Plan, workers: Iterable[str]) -> None:
    """Object store and database are where workers can have them. A folder may be one that machines share."""
    connections = plan.connections
    assert connections is not None, "asked of a plan that has them"
    if plan.objects is not None and plan.objects.url.startswith("memory://"):
        plan.violations.append(
            "placement: the object store is in the memory of this process, which no worker reaches; set "
            "ROLLOUT_STORAGE to a bucket, or on one machine to a folder"
        )
    elsewhere = sorted({host for worker in workers if not _is_here(host := urlsplit(worker).hostname or "")})
    if not elsewhere:
        return
    if connections.database_url().startswith("sqlite"):
        plan.violations.append(
            f"placement: the database is a SQLite file, which workers of other machines ({', '.join(elsewhere)}) do "
            "not reach; set ROLLOUT_DATABASE, here and for them, to a PostgreSQL database"
        )
    if plan.objects is not None and plan.objects.url.startswith("file://"):
        plan.unchecked.append(
            f"the object store ({plan.objects.url} has to be a folder that this machine shares with "
            f"{', '.join(elsewhere)})"
        )


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return True
    return False


def _check_installed() -> None:
    if any(importlib.util.find_spec(package) is None for package in ("prefect_dask", "distributed")):
        raise ConfigError(f"Dask is not installed; install {DISTRIBUTION}[dask]")


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


def _ask_for_workers(address: str) -> dict[str, Any]:
    """What the scheduler knows of its workers, by their addresses."""
    # Not a Client, which keeps trying in the background when nobody answers.
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> dict[str, Any]:
        connection = rpc(address, connection_args=Security().get_connection_args("client"))
        async with asyncio.timeout(CONNECT_SECONDS), connection as scheduler:
            answer: Any = await scheduler.identity(n_workers=-1)
        if answer.get("type") != "Scheduler":
            raise OSError(f"a {answer.get('type')} answers there")
        return answer["workers"]

    try:
        return asyncio.run(ask())
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"address: no Dask scheduler answers at {address} within {CONNECT_SECONDS:.0f} s "
            f"({str(error) or type(error).__name__}); start one with `dask scheduler`, or correct the address"
        ) from error
