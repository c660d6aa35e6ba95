"""Nights that were missed, and nights that come while the last one still runs."""

from __future__ import annotations

import logging
import subprocess
import sys
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml
from prefect import flow_engine
from prefect._internal.concurrency.cancellation import CancelledError
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations import WEBHOOK_BLOCK
from tasks.runtime import scheduled_runs as nights
from tests.flows.conftest import wait_for
from tests.operations.conftest import PROJECT, Machine

NIGHTS = 3


def shortest(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """A nightly run of a few steps."""
    short = deepcopy(config)
    short["seed"] = seed
    short["sft"]["budget"]["max_steps"] = 4
    short["ppo"] |= {"iterations": 1, "prompts_per_iteration": 32, "epochs": 1, "minibatch_size": 16}
    return short


def nightly(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The project's own deployment of the nightly flow, with another configuration."""
    return own_deployment("nightly", parameters={"config": config}, **fields)


def own_deployment(name: str, **fields: Any) -> dict[str, Any]:
    """What ``prefect.yaml`` says of a deployment, with other fields."""
    items = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    [own] = [item for item in items if item["name"] == name]
    return {**own, **fields}


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_of_three_missed_nights_one_runs_and_two_triggers_never_overlap(machine: Machine, small_nightly, server_logs):
    machine.rollout("ops", "install", "--webhook", machine.webhook)
    missed = nightly(shortest(small_nightly, seed=5), schedules=[])
    machine.deploy(missed, own_deployment("morning-check", schedules=[]), folder=PROJECT)
    # Only now, or on a busy machine the nights would be over before they are known.
    first = datetime.now(UTC) + timedelta(seconds=20)
    rule = f"DTSTART:{first:%Y%m%dT%H%M%S}\nRRULE:FREQ=SECONDLY;INTERVAL=2;COUNT={NIGHTS}"
    deployment = machine.ask("deployments/name/nightly/nightly")["id"]
    machine.ask(f"deployments/{deployment}/schedules", [{"schedule": {"rrule": rule, "timezone": "UTC"}}])
    late = wait_for(lambda: runs(machine, "Late", NIGHTS), "three missed nights")
    newest = max(late, key=lambda run: run["expected_start_time"])

    server_logs.expect("exited with status code: -9|crashed", "the test kills a run")
    with machine.worker(server_logs) as worker:
        assert machine.wait(newest["id"], "Completed", seconds=300)["run_count"] == 1
        for run in late:
            if run is not newest:
                ended = machine.wait(run["id"], "Skipped")
                assert ended["state"]["type"] == "COMPLETED" and newest["id"] in ended["state"]["message"]

        other = {"config": shortest(small_nightly, seed=6)}
        pair = [machine.start_run("nightly", parameters=other) for _ in range(2)]
        wait_for(lambda: [run for run in pair if state(machine, run) == "Running"], "one of two")
        [running] = [run for run in pair if state(machine, run) == "Running"]
        [waiting] = set(pair) - {running}
        machine.wait(waiting, "AwaitingConcurrencySlot")
        kill_run(worker, running)
        # Its slot is free: one of them takes it, the other waits, and in the end both are done.
        machine.wait(running, "Crashed")
        machine.ask(f"flow_runs/{running}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}})
        for run in pair:
            machine.wait(run, "Completed", seconds=300)
        check = machine.start_run("morning-check", parameters={"webhook": WEBHOOK_BLOCK})
        machine.wait(check, "Completed")
    [word] = [told for told in machine.told if told.get("deployment") == "nightly/nightly"]
    assert word["ok"] and {run["id"] for run in word["runs"]} == {*pair, newest["id"]}
    assert "the last run is Completed" in word["text"] and "promoted: no: it did not rise" in word["text"]
    spans = sorted(span for run in pair for span in running_times(machine, run))
    assert len(spans) == 3
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), spans


def runs(machine: Machine, name: str, count: int) -> list[dict[str, Any]] | None:
    """Runs of the nightly deployment in a state, once there are so many."""
    found = machine.ask(
        "flow_runs/filter",
        {"flow_runs": {"state": {"name": {"any_": [name]}}}, "deployments": {"name": {"any_": ["nightly"]}}},
    )
    return found if len(found) == count else None


def state(machine: Machine, run_id: str) -> str:
    return machine.run(run_id)["state"]["name"]


def kill_run(worker: Any, run_id: str) -> None:
    """Kill the processes of a run, and leave its worker alone."""
    for process in psutil.Process(worker.pid).children(recursive=True):
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == run_id:
                process.kill()
        except psutil.Error:
            continue


def running_times(machine: Machine, run_id: str) -> list[tuple[str, str]]:
    """When a run began and ceased to be Running, as ISO timestamps, each time."""
    states = machine.states(run_id)
    return [(one["timestamp"], after["timestamp"]) for one, after in pairwise(states) if one["type"] == "RUNNING"]


def test_no_flow_of_a_deployment_ends_because_its_place_is_lost():
    """Any of them may have a concurrency limit, and a worker's process imports one alone."""
    items = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    modules = {item["entrypoint"].partition(".py:")[0].replace("/", ".") for item in items}
    command = [sys.executable, "-c", IN_PROCESSES_OF_THEIR_OWN, *sorted(modules)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{module}:tasks.runtime.scheduled_runs" for module in sorted(modules)]


IN_PROCESSES_OF_THEIR_OWN = """
import os, sys
from importlib import import_module
from prefect import flow_engine

for module in sys.argv[1:]:
    if os.fork() == 0:
        import_module(module)
        print(f"{module}:{flow_engine.maintain_concurrency_lease.__module__}", flush=True)
        os._exit(0)
    os.wait()
"""
"""Imports each module in a fork of a process that has Prefect and no flow; prints which module has the place-keeper."""


def test_a_run_whose_place_is_lost_goes_on(machine: Machine, monkeypatch, caplog):
    """Prefect alone ends it, after three attempts within seconds: then `hold_place` is needed."""
    assert flow_engine.maintain_concurrency_lease is nights.hold_place
    monkeypatch.setenv("PREFECT_API_URL", machine.api)
    with temporary_settings({PREFECT_API_URL: machine.api}), caplog.at_level(logging.WARNING):
        with nights.hold_place(uuid4(), 300, raise_on_lease_renewal_failure=True):
            wait_for(lambda: "has lost its place" in caplog.text, "word of it")
        with (
            pytest.raises(CancelledError),
            maintain_concurrency_lease(uuid4(), 300, raise_on_lease_renewal_failure=True),
        ):
            wait_for(lambda: False, "the end of the run")
