"""Deployments: prefect.yaml says what the example says, deploys as it is, and a killed run can be retried."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml

from rollout_core.config import NightlyConfig, parse_config
from rollout_core.lineage import lineage_of
from tests.flows.conftest import objects, snapshots_of, wait_for

PROJECT = Path(__file__).resolve().parent.parent.parent


def prefect_yaml() -> dict:
    return yaml.safe_load((PROJECT / "prefect.yaml").read_text())


def test_the_deployed_nightly_is_the_example():
    [nightly] = [item for item in prefect_yaml()["deployments"] if item["name"] == "nightly"]
    example = tomllib.loads((PROJECT / "examples" / "nightly-tiny.toml").read_text())
    assert nightly["parameters"]["config"] == example
    assert nightly["schedules"][0]["cron"]


def test_every_flow_is_deployed_on_both_pools():
    by_entrypoint: dict[str, set[str]] = {}
    for item in prefect_yaml()["deployments"]:
        by_entrypoint.setdefault(item["entrypoint"], set()).add(item["work_pool"]["name"])
    training = {f"flows/train.py:train_{kind}" for kind in ("sft", "ppo", "grpo")}
    preferences = {f"flows/preference.py:train_{kind}" for kind in ("rm", "dpo", "ipo", "kto")}
    flows = {"flows/nightly.py:nightly", "flows/batch.py:batch_inference", *training, *preferences}
    assert by_entrypoint == {flow: {"cpu", "gpu"} for flow in flows}


@pytest.mark.server
def test_deployed_killed_and_retried_through_the_server_it_resumes(
    prefect_server, small_nightly, start_process, tmp_path
):
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "ROLLOUT_PROJECT": str(PROJECT)}

    def prefect(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    subprocess.run([sys.executable, "-m", "deployments.pools"], env=environment, cwd=PROJECT, check=True)
    prefect("--no-prompt", "deploy", "--all")
    listed = prefect("deployment", "ls")
    assert all(name in listed for name in ("nightly/nightly", "train-sft/train-sft-gpu", "batch-inference"))

    worker = start_process(
        "-m", "prefect", "worker", "start", "--pool", "cpu", "--name", "test",
        env={"PREFECT_API_URL": prefect_server, "ROLLOUT_PROJECT": str(PROJECT)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # The scheduled runs of the real nightly deployment are hours away; this one is started now.
    overrides = json.dumps({"run.name": "retried", "numerics": "portable"})
    prefect(
        "deployment", "run", "nightly/nightly",
        "--param", f"config={json.dumps(parse_config(small_nightly, NightlyConfig).model_dump(mode='json'))}",
        "--param", f"overrides={overrides}",
    )  # fmt: skip

    wait_for(lambda: snapshots_of("sft"), "an SFT snapshot of the deployed run", seconds=180)
    flow_process = deepest_python(worker.pid)
    os.kill(flow_process, signal.SIGKILL)
    run = wait_for(lambda: run_in_state(prefect_server, "Crashed"), "the killed run to be Crashed")

    prefect("flow-run", "retry", str(run.id))
    wait_for(lambda: run_in_state(prefect_server, "Completed"), "the retried run to complete", seconds=240)
    retried = run_in_state(prefect_server, "Completed")
    assert retried.id == run.id and retried.run_count == 2
    states = task_states(prefect_server, run.id)
    assert "Cached" in states["evaluate"] and "Completed" in states["sft_update"]
    lineage = lineage_of(objects(), snapshots_of("ppo")[0].id)
    assert lineage is not None
    assert (lineage.arithmetic["numerics"], lineage.arithmetic["instructions"]) == ("portable", "AVX2")


def deepest_python(pid: int) -> int:
    """The process a worker started to run a flow."""
    children = psutil.Process(pid).children(recursive=True)
    running = [child for child in children if "prefect.engine" in child.cmdline()]
    assert running, [child.cmdline() for child in children]
    return running[-1].pid


def run_in_state(api: str, state: str):
    """The retried flow run, once it is in ``state``."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    async def find():
        async with PrefectClient(api=api) as client:
            runs = await client.read_flow_runs(
                flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["small", "retried"]))
            )
        return next((run for run in runs if run.deployment_id and run.state_name == state), None)

    return asyncio.run(find())


def task_states(api: str, run_id) -> dict[str, set[str]]:
    """State names of a flow run's task runs, by stage."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    async def find():
        async with PrefectClient(api=api) as client:
            return await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))

    states: dict[str, set[str]] = {}
    for task_run in asyncio.run(find()):
        states.setdefault(task_run.name.rpartition("-")[0], set()).add(task_run.state_name)
    return states
