"""Runners on the workers of real Dask clusters: one is killed, the scheduler is, the agent cannot be loaded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dask import config as dask_config
from distributed import LocalCluster

from rollout_core.agents.code import AgentCode
from rollout_core.agents.runner_fleet import Fleet
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.config import RunnersConfig
from rollout_core.store import SqlLightningStore
from tests.agents.test_fleet import AGENT, RESOURCES, enqueue, numbers, runs
from tests.store.patience import LONG, until
from tests.support.alive import lives


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlLightningStore]:
    async with SqlLightningStore.from_url(f"sqlite:///{tmp_path}/rollout.db") as store:
        yield store


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentCode:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "helper.py").write_text("WORD = 'first'\n")
    monkeypatch.setenv("AGENT_RUNS", str(tmp_path / "runs.jsonl"))
    monkeypatch.setenv("ROLLOUT_SECRETS", "RUNNERS")
    monkeypatch.setenv("ROLLOUT_SECRET_RUNNERS", "the-key-of-this-run")
    return AgentCode.read("agent.py:agent", tmp_path)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Dask's processes, and what of Dask is in this one, have their files."""
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", str(tmp_path / "dask"))
    with dask_config.set({"temporary-directory": str(tmp_path / "dask")}):
        yield


@pytest.fixture
def cluster(code: AgentCode, tmp_path: Path) -> Iterator[LocalCluster]:
    """Two workers, each a process with the environment of ``code``."""
    made = LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,  # pyright: ignore[reportArgumentType] - None is what Dask's documentation says
        memory_limit=0,
        local_directory=str(tmp_path / "dask"),
    )
    with made:
        yield made


def config(address: str | None, **settings: Any) -> RunnersConfig:
    given = {"where": "dask", "dask": {"address": address}, "api_key": "RUNNERS", "concurrency": 2, **settings}
    return RunnersConfig(**{"worker_timeout_seconds": 30, **given})


def fleet_of(store: SqlLightningStore, code: AgentCode, runners: RunnersConfig) -> Fleet:
    return Fleet(store, code, runners, api_key=os.environ["ROLLOUT_SECRET_RUNNERS"])


def runner_processes() -> list[psutil.Process]:
    """Those of this test's clusters."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if any("rollout_core.agents.nursery" in part for part in _command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def dask(part: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", f"distributed.cli.dask_{part}", *options], stderr=subprocess.DEVNULL)


def address_in(file: Path) -> str | None:
    """What a scheduler has written there, once it is all there."""
    try:
        return json.loads(file.read_text())["address"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None


async def test_the_workers_of_a_cluster_do_the_work_also_when_one_is_killed(store, code, cluster, tmp_path):
    address = cluster.scheduler_address
    may_end = tmp_path / "may-end"
    ids = await enqueue(store, numbers(16, until=str(may_end)))
    async with fleet_of(store, code, config(address, worker_timeout_seconds=9)) as fleet:
        fleet.set_resources(RESOURCES)
        work = asyncio.ensure_future(fleet.run(ids))
        await until(lambda: len({process for *_, process, _ in runs(tmp_path)}) == 2)
        *_, (*_, newest, _) = runs(tmp_path)
        lost = psutil.Process(newest)
        os.kill(psutil.Process(lost.ppid()).ppid(), signal.SIGKILL)  # the Dask worker
        await until(lambda: not lives(lost))
        may_end.touch()
        await asyncio.wait_for(work, LONG)
    rollouts = await store.query_rollouts(rollout_id_in=ids)
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    attempts = [attempt for name in ids for attempt in await store.query_attempts(name)]
    assert sum(attempt.status == "succeeded" for attempt in attempts) == 16
    assert "unresponsive" in {attempt.status for attempt in attempts}, "what the killed worker had is tried again"
    assert {word for *_, word in runs(tmp_path)} == {"first"}
    await until(lambda: not runner_processes())  # the stage is over; the cluster is not


async def test_an_agent_that_no_worker_can_load_ends_the_run(store, code, cluster, tmp_path):
    (tmp_path / "agent.py").write_text("import nonesuch_at_all\n\nagent = 1\n")
    broken = AgentCode.read("agent.py:agent", tmp_path)
    ids = await enqueue(store, numbers(1))
    async with fleet_of(store, broken, config(cluster.scheduler_address)) as fleet:
        with pytest.raises(ConfigError, match=r"nonesuch_at_all.*on Dask worker tcp://"):
            await asyncio.wait_for(fleet.run(ids), LONG)


async def test_a_worker_without_the_key_says_so(store, code, cluster):
    ids = await enqueue(store, numbers(1))
    runners = config(cluster.scheduler_address, api_key="ANOTHER")
    async with fleet_of(store, code, runners) as fleet:
        with pytest.raises(ConfigError, match="ANOTHER"):
            await asyncio.wait_for(fleet.run(ids), LONG)


async def test_a_scheduler_that_goes_away_ends_the_run(store, code, tmp_path):
    """And the runners end with it, though nobody tells them."""
    file = tmp_path / "scheduler.json"
    where = ("--no-dashboard", "--scheduler-file", str(file))
    scheduler = dask("scheduler", "--host", "127.0.0.1", "--port", "0", *where)
    worker = None
    try:
        await until(lambda: address_in(file))
        worker = dask("worker", "--no-nanny", "--nthreads", "1", "--death-timeout", f"{LONG:.0f}", *where)
        address = address_in(file)
        ids = await enqueue(store, numbers(4, until=str(tmp_path / "never")))
        async with fleet_of(store, code, config(address)) as fleet:
            fleet.set_resources(RESOURCES)
            work = asyncio.ensure_future(fleet.run(ids))
            await until(lambda: runs(tmp_path))
            scheduler.kill()
            with pytest.raises(Recoverable, match="scheduler"):
                await asyncio.wait_for(work, LONG)
        await until(lambda: not runner_processes())
    finally:
        for process in filter(None, (worker, scheduler)):
            process.kill()
            process.wait()
    with pytest.raises(Recoverable, match="no Dask scheduler answers"):
        async with fleet_of(store, code, config(address)):
            pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dask": None}, "needs? both"),
        ({"where": "processes"}, "needs? both"),
        ({"api_key": None}, "name a secret"),
        ({"dask": {"address": "tcp://10.0.0.7:8786"}}, "do not reach"),
        ({"dask": {"address": "scheduler:8786"}}, "pattern"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        config("tcp://127.0.0.1:8786", **settings)
    config("tcp://10.0.0.7:8786", host="0.0.0.0", public_host="10.0.0.1", model_port=4748)
