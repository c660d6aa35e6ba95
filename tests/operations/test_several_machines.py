"""What docs/operations.md says of several machines, with processes of this one: Prefect's server and the store on
PostgreSQL, objects in S3, and workers that share nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_core.objects.object_store import ObjectStore
from rollout_core.objects.snapshots import SnapshotStore
from tests.flows.conftest import wait_for
from tests.flows.kills import answers, free_port
from tests.objects.object_files import BUCKET
from tests.operations.conftest import PROJECT, SETTINGS, end
from tests.operations.several import OneOfSeveral, server_settings
from tests.operations.test_nights import kill_run, nightly, shortest
from tests.store.postgres import PostgresServer
from tests.support.server_logs import ServerLogs


@contextmanager
def server_on(database: str, folder: Path) -> Iterator[str]:
    """Address of `prefect server start` with the settings of the document, on a database of PostgreSQL."""
    port, logs = free_port(), ServerLogs()
    with logs.watch(folder / "server.log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **SETTINGS, **server_settings(database), "PREFECT_HOME": str(folder / "home")},
            cwd=folder, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/api/health"), "the server's start", seconds=180)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    logs.check()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, Any]) -> Iterator[OneOfSeveral]:
    """A machine beside a server and a store on PostgreSQL, and a bucket."""
    folder, postgres = tmp_path_factory.mktemp("several"), PostgresServer()
    try:
        settings = {
            "ROLLOUT_STORAGE": f"s3://{BUCKET}/several",
            "ROLLOUT_DATABASE": postgres.new_database("rollout"),
            "AWS_ENDPOINT_URL": s3["endpoint_url"],
            "AWS_ACCESS_KEY_ID": s3["key"],
            "AWS_SECRET_ACCESS_KEY": s3["secret"],
        }
        with server_on(postgres.new_database("prefect"), folder) as api:
            own = folder / "first"
            own.mkdir()
            yield OneOfSeveral(own, api, "", [], settings)
    finally:
        postgres.close()


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_that_one_machine_began_is_ended_by_another_and_cached_for_all(
    first: OneOfSeveral, small_nightly, server_logs, s3
):
    server_logs.expect("exited with status code: -9|crashed", "the test kills a run")
    first.rollout("ops", "install")
    config = {**shortest(small_nightly, seed=5), "report_dir": "report"}
    config["sft"]["snapshots"] = {"every_steps": 1}
    first.deploy(nightly(config), folder=PROJECT)
    snapshots = SnapshotStore(ObjectStore.from_url(f"s3://{BUCKET}/several", storage_options=s3))

    run_id = first.start_run("nightly")
    with first.worker(server_logs) as worker:
        wait_for(lambda: len(snapshots.list()) >= 2, "two snapshots")
        kill_run(worker, run_id)
        first.wait(run_id, "Crashed", "AwaitingRetry")
        end(worker)
    other = first.named("other")
    with other.worker(server_logs):
        run = other.wait(run_id, "Completed", seconds=300)
        assert run["run_count"] == 2
        again = other.start_run("nightly")
        other.wait(again, "Completed", seconds=300)
        found = json.loads(other.rollout("doctor", "status", "--json"))
    assert found["problems"] == []
    computed = {
        task["name"] for task in other.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [again]}}})
        if task["state"]["name"] == "Completed"
    }  # fmt: skip
    assert not any(name.startswith(("sft_update", "ppo_update", "infer", "score")) for name in computed), computed


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_machine_that_vanishes_is_noticed_by_another_by_its_lease(first: OneOfSeveral, small_nightly, server_logs):
    """Its supervisor, worker and run are killed at once; Prefect's own heartbeats would be missed after ten minutes."""
    config = {**shortest(small_nightly, seed=6), "report_dir": "report"}
    config["sft"]["snapshots"] = {"every_steps": 1}
    first.deploy(nightly(config), folder=PROJECT)
    run_id = first.start_run("nightly")
    other = first.named("survivor")
    with first.worker(server_logs, supervised="vanishing") as worker:
        first.wait(run_id, "Running")
        with other.worker(server_logs, supervised="surviving"):
            end(worker)
            run = other.wait(run_id, "Completed", seconds=600)
    reasons = [state["message"] for state in other.states(run_id) if state["name"] == "AwaitingRetry"]
    assert reasons == ["nothing is heard of its worker vanishing"] and run["run_count"] == 2
