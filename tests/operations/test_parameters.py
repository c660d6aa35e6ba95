"""Runs whose parameters are refused: they fail before their place is free, and are on record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Pending, Scheduled
from typer.testing import CliRunner

from deployments.worker import DrainingWorker
from flows.cli import app
from flows.nightly import nightly
from rollout_core.base.errors import ConfigError
from rollout_core.runs.records import RunRecords
from tasks.connections import objects

pytestmark = pytest.mark.server
WRONG = {"ppo.iteration": 4}


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def waiting(client: SyncPrefectClient, config: dict[str, Any], **parameters: Any) -> FlowRun:
    """A run of a deployment with one place, which another run has."""
    flow, name = client.create_flow_from_name("nightly"), f"nightly-{uuid4().hex}"
    deployment = client.create_deployment(flow, name, entrypoint="flows/nightly.py:nightly", concurrency_limit=1)
    first, second = (
        client.create_flow_run_from_deployment(
            deployment, parameters={"config": config, **parameters}, state=Scheduled()
        )
        for _ in range(2)
    )
    client.set_flow_run_state(first.id, Pending())
    return second


def proposed(run: FlowRun) -> None:
    """What a worker does that finds it, until it has checked its parameters."""

    async def work() -> None:
        worker = DrainingWorker(name="here", work_pool_name="cpu")
        async with get_client() as its_client:
            worker._client = its_client
            for _ in range(2):
                assert not await worker._propose_pending_state(run)
            await asyncio.gather(*worker._checks.values())
            assert not await worker._propose_pending_state(run)
            assert list(worker._checks) == [run.id]

    asyncio.run(work())


def test_a_run_that_waits_for_its_place_with_wrong_parameters_fails_at_once(
    client: SyncPrefectClient, small_nightly: dict[str, Any]
):
    run = waiting(client, small_nightly, overrides=WRONG)
    proposed(run)
    state = client.read_flow_run(run.id).state
    assert state is not None and state.is_failed()
    assert state.message == "ConfigError: overrides: ppo.iteration: unknown key; did you mean 'iterations'?"
    shown = CliRunner().invoke(app, ["show", str(run.id)]).output
    assert f"failed: {state.message}" in shown and "small" in shown and '{"ppo.iteration": 4}' in shown
    assert str(run.id)[:8] in CliRunner().invoke(app, ["runs", "--state", "failed"]).output


def test_a_run_that_waits_for_its_place_with_right_parameters_goes_on_waiting(
    client: SyncPrefectClient, small_nightly: dict[str, Any]
):
    run = waiting(client, small_nightly, overrides={"ppo.iterations": 1})
    proposed(run)
    state = client.read_flow_run(run.id).state
    assert state is not None and state.name == "AwaitingConcurrencySlot"


@pytest.mark.parametrize("fault", ["overrides", "plan"])
def test_a_workers_run_that_is_refused_before_its_first_stage_is_recorded(
    prefect_server: str, small_nightly: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
):
    overrides = WRONG if fault == "overrides" else {"model.uri": str(tmp_path / "https://me:secret@host/gone")}
    with pytest.raises(ConfigError):
        nightly(small_nightly, overrides)
    assert not (tmp_path / "objects").exists(), "a command's run was told to who started it"
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "as a worker does")
    state = nightly(small_nightly, overrides, return_state=True)
    [head] = RunRecords(objects()).heads()
    assert (head.id, head.state, head.name) == (str(state.state_details.flow_run_id), "failed", "small")
    assert head.error is not None and head.error.startswith("ConfigError: ")
    expected = "did you mean 'iterations'?" if fault == "overrides" else "does not exist"
    assert expected in head.error and "secret" not in head.model_dump_json()
    _, detail = RunRecords(objects()).detail(head)
    assert "overrides" in detail.facts and "secret" not in detail.model_dump_json()
