"""What `make serve` hands back of what its server says, without having seen a process of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any, cast
from uuid import UUID

import pytest
from prefect import get_client, task
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.states import Cancelling, Completed, Crashed, Pending, Running

from deployments import supervision
from deployments.supervision import MAX_TRIES, SupervisedWorker


class Ended(Exception):
    """The test has seen enough."""


@pytest.fixture
def start(prefect_server: str) -> Callable[..., UUID]:
    """Make a run on a work pool that goes through these states."""

    def make(pool: str, *states: Any, worker: str | None = None, of_task: Any = None) -> UUID:
        with get_client(sync_client=True) as client:
            if pool not in {found.name for found in client.read_work_pools()}:
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
            flow = client.create_flow_from_name("left")
            deployment = client.create_deployment(flow, f"on-{pool}", work_pool_name=pool)
            run = client.create_flow_run_from_deployment(deployment)
            if worker is not None:
                client.update_flow_run_labels(run.id, {"prefect.worker.name": worker})
            for state in states:
                client.set_flow_run_state(run.id, state, force=True)
            if of_task is not None:
                client.create_task_run(nothing, run.id, "0", state=of_task)
            return run.id

    return make


@task
def nothing() -> None:
    """Of a run that is only told of."""


def task_states(run_id: UUID) -> list[str]:
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        return [found.state_name or "" for found in client.read_task_runs(flow_run_filter=of_run)]


def state_of(run_id: UUID) -> str:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    return "" if state is None else state.name


@pytest.mark.server
def test_crashed_and_pending_runs_of_its_pool_are_handed_back_and_no_others(start, monkeypatch):
    monkeypatch.setattr(supervision, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "LEFT_SECONDS", {**supervision.LEFT_SECONDS, "CRASHED": 1.0, "PENDING": 2.0})
    once = (Pending(), Running(), Crashed())
    before = start("supervised", *once)
    said: list[str] = []

    def keep_server() -> bool:
        if not wanted:  # the first look: what is left from now on counts
            wanted.update(
                crashed=start("supervised", *once, of_task=Running()),
                pending=start("supervised", Pending()),
                last=start("supervised", *once * MAX_TRIES, of_task=Completed()),
                elsewhere=start("others", *once),
            )
        if {"crashed", "pending"} <= {name for name, run in wanted.items() if state_of(run) == "AwaitingRetry"}:
            raise Ended
        return False

    wanted: dict[str, UUID] = {}
    worker = SupervisedWorker(["sleep", "600"], os.environ, "supervised", keep_server=keep_server, say=said.append)
    with pytest.raises(Ended):
        worker.run()
    assert {name: state_of(run) for name, run in wanted.items()} == {
        "crashed": "AwaitingRetry",
        "pending": "AwaitingRetry",
        "last": "Crashed",
        "elsewhere": "Crashed",
    }
    assert state_of(before) == "Crashed", "somebody may have left it so"
    assert task_states(wanted["crashed"]) == ["Crashed"], "its process is gone, too"
    assert task_states(wanted["last"]) == ["Completed"]
    assert f"flow run {wanted['crashed']} is tried again, as its process died" in said
    assert f"flow run {wanted['pending']} is tried again, as its worker died" in said


@pytest.mark.server
def test_a_crashed_run_is_left_to_an_automation_first(start, monkeypatch):
    monkeypatch.setattr(supervision, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "LEFT_SECONDS", {**supervision.LEFT_SECONDS, "CRASHED": 60.0, "PENDING": 60.0})
    runs: list[UUID] = []
    looks: list[str] = []

    def keep_server() -> bool:
        if not runs:
            runs.append(start("supervised", Pending(), Running(), Crashed()))
        looks.append(state_of(runs[0]))
        if len(looks) == 4:
            raise Ended
        return False

    with pytest.raises(Ended):
        SupervisedWorker(["sleep", "600"], os.environ, "supervised", keep_server=keep_server, say=print).run()
    assert set(looks) == {"Crashed"}, "an automation has its time first"


@pytest.mark.server
def test_runs_that_a_killed_supervisor_left_running_are_handed_back_by_the_next_one(start, monkeypatch):
    """Those of its own worker that have no process here, and of others only those whose machines have vanished."""
    monkeypatch.setattr(supervision, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "LEFT_SECONDS", {**supervision.LEFT_SECONDS, "RUNNING": 0.5, "CANCELLING": 0.5})
    began = (Pending(), Running())
    wanted = {
        "left": start("killed", *began, worker="this-one"),
        "cancelling": start("killed", *began, Cancelling(), worker="this-one"),
        "alive": start("killed", *began, worker="this-one"),
        "vanished": start("killed", *began, worker="gone"),
        "elsewhere": start("killed", *began, worker="another"),
        "unknown": start("killed", *began),
    }
    said: list[str] = []

    def keep_server() -> bool:
        if all(state_of(wanted[name]) not in ("Running", "Cancelling") for name in ("left", "cancelling", "vanished")):
            raise Ended
        return False

    class Vanished:
        is_held = True

        def gone(self, workers: set[str]) -> set[str]:
            assert workers == {"this-one", "gone", "another"}
            return {"gone"}

    environment = {**os.environ, supervision._RUN_ID: str(wanted["alive"])}
    process = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        worker = SupervisedWorker(
            ["sleep", "600"], os.environ, "killed", keep_server=keep_server, say=said.append, worker_name="this-one",
            presence=cast("Any", Vanished()),
        )  # fmt: skip
        with pytest.raises(Ended):
            worker.run()
    finally:
        process.kill()
        process.wait()
    assert {name: state_of(run) for name, run in wanted.items()} == {
        "left": "AwaitingRetry",
        "cancelling": "Cancelled",
        "alive": "Running",
        "vanished": "AwaitingRetry",
        "elsewhere": "Running",
        "unknown": "Running",
    }
    assert f"flow run {wanted['vanished']} is tried again, as nothing is heard of its worker gone" in said


def test_of_the_processes_of_a_run_the_one_that_began_it_is_found_whatever_their_pids():
    """Pids wrap around: in a long night with an engine a child has a lower one than what started it."""

    class Process:
        def __init__(self, pid: int, ppid: int, run: str | None, created: float) -> None:
            self.pid, self._ppid, self._run, self._created = pid, ppid, run, created

        def environ(self) -> dict[str, str]:
            return {} if self._run is None else {supervision._RUN_ID: self._run}

        def ppid(self) -> int:
            return self._ppid

        def create_time(self) -> float:
            return self._created

    worker, flow, engine = Process(20, 1, None, 1.0), Process(30001, 20, "a", 2.0), Process(301, 30001, "a", 3.0)
    orphans = [Process(7, 1, "b", 9.0), Process(400, 1, "b", 8.0), Process(3, 400, "b", 10.0)]
    for processes in ([engine, flow, worker, *orphans], [*orphans, worker, flow, engine]):
        found: dict[str, Any] = dict(supervision.runs_of(processes))  # pyright: ignore[reportArgumentType]
        assert found == {"a": flow, "b": orphans[1]}
