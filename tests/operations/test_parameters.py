"""Runs whose parameters are refused: they fail before their place is free, and are on record."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed, Failed, Pending, Scheduled
from prefect.workers.process import ProcessWorker
from typer.testing import CliRunner

from deployments import worker as worker_module
from deployments.worker import DrainingWorker
from flows.cli import app
from flows.nightly import nightly
from rollout_core.base.errors import ConfigError
from rollout_core.runs.run_records import RunRecords
from tasks.runtime.connections import objects

pytestmark = pytest.mark.server
WRONG = {"ppo.iteration": 4}


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def waiting(client: SyncPrefectClient, config: dict[str, Any], **parameters: Any) -> tuple[FlowRun, FlowRun]:
    """Two runs of a deployment with one place; the first has it."""
    flow, name = client.create_flow_from_name("nightly"), f"nightly-{uuid4().hex}"
    deployment = client.create_deployment(flow, name, entrypoint="flows/nightly.py:nightly", concurrency_limit=1)
    first, second = (
        client.create_flow_run_from_deployment(
            deployment, parameters={"config": config, **parameters}, state=Scheduled()
        )
        for _ in range(2)
    )
    client.set_flow_run_state(first.id, Pending())
    return first, second


async def proposed(worker: DrainingWorker, run: FlowRun) -> None:
    """What a worker does that finds it, until it has checked its parameters."""
    for _ in range(2):
        assert not await worker._propose_pending_state(run)
    await worker._checks[run.id].task
    assert not await worker._propose_pending_state(run)
    assert list(worker._checks) == [run.id]


def at_work(does: Callable[[DrainingWorker], Awaitable[None]]) -> None:
    """A worker with a client of the server."""

    async def work() -> None:
        worker = DrainingWorker(name="here", work_pool_name="cpu")
        async with get_client() as its_client:
            worker._client = its_client
            await does(worker)

    asyncio.run(work())


def test_a_run_that_waits_for_its_place_with_wrong_parameters_fails_at_once(
    client: SyncPrefectClient, small_nightly: dict[str, Any]
):
    _, run = waiting(client, small_nightly, overrides=WRONG)
    at_work(lambda worker: proposed(worker, run))
    state = client.read_flow_run(run.id).state
    assert state is not None and state.is_failed()
    assert state.message == "ConfigError: overrides: ppo.iteration: unknown key; did you mean 'iterations'?"
    shown = CliRunner().invoke(app, ["show", str(run.id)]).output
    assert f"failed: {state.message}" in shown and "small" in shown and '{"ppo.iteration": 4}' in shown
    assert str(run.id)[:8] in CliRunner().invoke(app, ["runs", "--state", "failed"]).output


def test_a_run_that_waits_for_its_place_with_right_parameters_goes_on_waiting(
    client: SyncPrefectClient, small_nightly: dict[str, Any]
):
    _, run = waiting(client, small_nightly, overrides={"ppo.iterations": 1})
    at_work(lambda worker: proposed(worker, run))
    state = client.read_flow_run(run.id).state
    assert state is not None and state.name == "AwaitingConcurrencySlot"


def test_a_run_that_was_refused_while_it_waited_is_taken_when_it_is_retried(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
):
    first, run = waiting(client, {})
    refusals: list[str] = []

    async def refuse(self: DrainingWorker, run_id: UUID) -> bool:
        refusals.append(str(run_id))
        with get_client(sync_client=True) as own:
            own.set_flow_run_state(run_id, Failed(), force=True)
        return True

    monkeypatch.setattr(DrainingWorker, "_refuses", refuse)

    async def retry(worker: DrainingWorker) -> None:
        await proposed(worker, run)
        retried = Scheduled(message="Retried via CLI")
        client.set_flow_run_state(run.id, retried, force=True)
        assert not await worker._propose_pending_state(run), "its place is not free"
        await worker._checks[run.id].task
        client.set_flow_run_state(run.id, retried, force=True)
        client.set_flow_run_state(first.id, Completed(), force=True)
        assert await worker._propose_pending_state(run)
        assert refusals == [str(run.id)] * 2, "it is checked again"
        assert not worker._checks

    at_work(retry)


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_run_whose_parameters_cannot_be_checked_is_proposed_as_any_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
):
    asked: list[UUID] = []
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def propose(self: ProcessWorker, run: FlowRun) -> bool:
        asked.append(run.id)
        return len(asked) == 2

    async def starts(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if fault == "raises":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(await start("sleep", "infinity", **options))
        return started[0]

    monkeypatch.setattr(ProcessWorker, "_propose_pending_state", propose)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    monkeypatch.setattr(worker_module, "CHECK_SECONDS", 0.05, raising=False)
    caplog.set_level("INFO")

    async def work() -> None:
        worker, run = DrainingWorker(name="here", work_pool_name="cpu"), FlowRun(flow_id=uuid4())
        assert not await worker._propose_pending_state(run)
        assert not await worker._checks[run.id].task
        assert await worker._propose_pending_state(run)
        assert not worker._checks

    asyncio.run(work())
    assert [process.returncode for process in started] == [-signal.SIGKILL] * (fault == "hangs")
    assert "could not be checked: " in caplog.text


def test_checks_of_runs_that_come_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    async def propose(self: ProcessWorker, run: FlowRun) -> bool:
        return False

    async def refuses(self: DrainingWorker, run_id: UUID) -> bool:
        return False

    monkeypatch.setattr(ProcessWorker, "_propose_pending_state", propose)
    monkeypatch.setattr(DrainingWorker, "_refuses", refuses)
    monkeypatch.setattr(worker_module, "monotonic", lambda: now[0])

    async def work() -> None:
        worker = DrainingWorker(name="here", work_pool_name="cpu")
        cancelled, waits, later = (FlowRun(flow_id=uuid4()) for _ in range(3))
        for run, at in ((cancelled, 0.0), (waits, 1.0), (waits, 3600.0), (later, 3601.0)):
            now[0] = at
            assert not await worker._propose_pending_state(run)
            await worker._checks[run.id].task
        assert list(worker._checks) == [waits.id, later.id]

    asyncio.run(work())


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
