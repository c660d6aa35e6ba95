"""A Dask cluster for the length of a run: its own, or one that is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import dask.config
from distributed import Client
from prefect.settings import PREFECT_API_URL
from prefect_dask.task_runners import DaskTaskRunner

from flows.dask.fleet import SHARDS_PER_WORKER, DaskFleet
from flows.dask.worker import Driver, EngineKeeper
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.numerics import current_numerics
from rollout_core.base.processes import this_machine
from rollout_core.config import DaskConfig, WorkersConfig
from rollout_core.inference.workers import this_worker
from tasks import connections
from tasks.stage import retry

END_SECONDS = 20.0
CLUSTER_SETTINGS = {
    # Daemonic processes may not have children, and an engine is one.
    "distributed.worker.daemon": False,
    # Dask sizes adaptive clusters by the time that tasks take, which it does not know before the first has ended.
    "distributed.scheduler.default-task-durations": {"infer_shard": "1h"},
}
LOCAL_CLUSTER_OPTIONS = {"threads_per_worker": SHARDS_PER_WORKER, "memory_limit": 0, "dashboard_address": None}
"""Unless given: an engine's memory is not Dask's to bound, and nobody asked for an open port."""


@contextmanager
def dask_fleet(workers: WorkersConfig, config: DaskConfig, run_id: str) -> Iterator[DaskFleet]:
    """The configured cluster, with what its workers need to know of this run.

    Raises ConfigError where it cannot be made, or its workers cannot run our code; Recoverable where none answers.
    """
    with dask.config.set(CLUSTER_SETTINGS), _runner(config) as runner:
        client = _client(runner, config)
        driver = introduce(run_id)
        keeper = EngineKeeper(run_id, workers_end=config.cluster is not None)
        try:
            _register(client, keeper)
            yield DaskFleet(client, workers, config, driver)
        finally:
            connections.objects().delete_ref(driver.mark)
            # Also where the cluster ends with the run: it does not wait for engines to close. A worker that hangs must
            # not keep us.
            if client.status == "running":
                _within(END_SECONDS, lambda: client.unregister_worker_plugin(keeper.name))


def _runner(config: DaskConfig) -> DaskTaskRunner:
    if config.address is not None:
        return DaskTaskRunner(address=config.address)
    local = config.cluster in ("distributed.LocalCluster", "dask.distributed.LocalCluster")
    return DaskTaskRunner(
        cluster_class=config.cluster,
        cluster_kwargs={**(LOCAL_CLUSTER_OPTIONS if local else {}), **config.options},
        adapt_kwargs=config.adapt.model_dump() if config.adapt is not None else None,
    )


def _client(runner: DaskTaskRunner, config: DaskConfig) -> Client:
    try:
        return runner.client
    except OSError as error:
        raise Recoverable(f"no Dask scheduler answers at {config.address or config.cluster}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"workers.dask.options: {config.cluster} does not take them: {error}") from error


def introduce(run_id: str) -> Driver:
    """Leave a mark in storage and database, by which a worker knows that they are its own, too."""
    mark = f"fan-out/{run_id}"

    def appear() -> None:
        storage = connections.objects()
        storage.set_ref(mark, storage.put_bytes(mark.encode()))
        asyncio.run(_appear())

    retry(appear)
    return Driver(
        run_id=run_id,
        worker_id=this_worker(),
        mark=mark,
        connections=connections.description(),
        machine=this_machine(),
        api_url=PREFECT_API_URL.value(),
        numerics=current_numerics(),
    )


async def _appear() -> None:
    async with connections.open_store() as store:
        await store.update_worker(this_worker())


def _register(client: Client, keeper: EngineKeeper) -> None:
    try:
        client.register_plugin(keeper)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"a Dask worker cannot run rollout ({error}); install the driver's version of it on every worker"
        ) from error


def _within(seconds: float, call: Callable[[], Any]) -> None:
    def run() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=run, name="rollout-end-of-run", daemon=True)
    thread.start()
    thread.join(seconds)
