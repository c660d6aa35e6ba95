"""Models that wait for a person: asked about once, rejected, approved, and left to time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.flows.conftest import wait_for
from tests.operations.conftest import PROJECT, Machine
from tests.operations.test_nights import nightly, own_deployment, shortest


@pytest.fixture
def asking(machine: Machine, small_nightly, server_logs) -> Iterator[Machine]:
    """The machine with a worker, and nights whose models wait for a person whatever they earn."""
    machine.deploy(nightly(small_nightly, schedules=[]), own_deployment("promote-candidate"), folder=PROJECT)
    with machine.worker(server_logs):
        yield machine


def questions(machine: Machine) -> list[dict[str, Any]]:
    """Runs that ask a person, the first one first; those that decide for somebody are none."""
    found = machine.ask("flow_runs/filter", {"deployments": {"name": {"any_": ["promote-candidate"]}}})
    asked = [run for run in found if run["parameters"].get("decides_for") is None]
    return sorted(asked, key=lambda run: run["created"])


def deciding(machine: Machine) -> list[dict[str, Any]]:
    found = machine.ask("flow_runs/filter", {"deployments": {"name": {"any_": ["promote-candidate"]}}})
    return [run for run in found if run["parameters"].get("decides_for") is not None]


def promotions(machine: Machine) -> list[dict[str, Any]]:
    """The history of the served model, the newest first."""
    return json.loads(machine.rollout("promotions", "--json"))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_person_rejects_approves_or_leaves_it_to_time(asking: Machine, small_nightly):
    def night(seed: int, **promotion: Any) -> str:
        config = shortest(small_nightly, seed)
        # At most one night is better than the one before; what a person decides about is all the same here.
        config["promotion"] = {"tolerance": 1.0, "approval": "person", **promotion}
        run_id = asking.start_run("nightly", parameters={"config": config})
        asking.wait(run_id, "Completed", seconds=300)
        return run_id

    def suspended(count: int) -> dict[str, Any]:
        asked = wait_for(lambda: len(questions(asking)) >= count and questions(asking), "a question")
        run = asking.wait(asked[count - 1]["id"], "Suspended")
        # Prefect loses a run that is resumed while its first process still ends.
        wait_for(lambda: run["id"] not in processes(), "the end of the process that suspended")
        return run

    def decide(run: dict[str, Any], **decision: Any) -> dict[str, Any]:
        return asking.ask(f"flow_runs/{run['id']}/resume", {"run_input": decision})

    first = night(5)
    run = suspended(1)
    assert "a person is to decide; it waits for a person: http" in summary(asking, first)
    assert {"promotion-evidence", "samples"} <= keys(asking, run["id"])
    [end] = deciding(asking)
    assert end["state"]["type"] == "SCHEDULED"
    refused = decide(run, decision="perhaps", decided_by="Ada")
    assert refused["status"] == "REJECT" and "'perhaps' is not one of" in refused["details"]["reason"]
    assert asking.run(run["id"])["state"]["name"] == "Suspended"
    decide(run, decision="reject", decided_by="Ada", reason="it is rude")
    ended = asking.wait(run["id"], "Rejected")
    assert ended["state"]["type"] == "COMPLETED" and ended["state"]["message"] == "rejected by Ada: it is rude"
    assert promotions(asking) == [] and deciding(asking) == []
    assert "it was rejected before" in summary(asking, night(5))
    assert len(questions(asking)) == 1, "the same model is asked about once"

    night(6)
    run = suspended(2)
    for state in ({"type": "CRASHED", "name": "Crashed"}, {"type": "SCHEDULED", "name": "AwaitingRetry"}):
        asking.ask(f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    wait_for(lambda: asking.run(run["id"])["run_count"] == 2, "its second start")
    run = suspended(2)  # it waits again
    decide(run, decision="approve", decided_by="Grace")
    asking.wait(run["id"], "Promoted")
    [entry] = promotions(asking)
    assert entry["reason"].startswith("approved by Grace; held-out reward") and entry["evidence"]["comparisons"]
    assert entry["model"] in run["name"] or run["name"].startswith(f"promote {entry['model'][:8]}")

    night(7, approval_hours=0.004, undecided="promote")
    run = wait_for(lambda: len(questions(asking)) == 3 and questions(asking)[2], "a third question")
    asking.wait(run["id"], "Promoted", seconds=180)
    newest = promotions(asking)[0]
    assert "approved by time-out: nobody decided in 0.004 hours" in newest["reason"]
    assert newest["previous"] == entry["model"]


def processes() -> set[str]:
    """Ids of flow runs that have a process here."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return found


def summary(machine: Machine, run_id: str) -> str:
    """The page that sums a run up."""
    found = machine.ask(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": ["summary"]}}}
    )
    return max(found, key=lambda artifact: artifact["created"])["data"].replace("\\", "")


def keys(machine: Machine, run_id: str) -> set[str]:
    found = machine.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}})
    return {artifact["key"] for artifact in found}
