"""Workers that are told to end, by a signal or by the cloud, hand back what they have and take nothing more."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import psutil
import pytest

from deployments.cli.worker import EXIT_DRAINED
from rollout_core.base.errors import ConfigError
from rollout_core.base.spot import (
    AWSMetadata,
    AzureMetadata,
    GCEMetadata,
    SpotWatch,
    look_at_spot,
    machine_type,
    metadata,
)
from rollout_core.objects.object_store import ObjectStore
from rollout_core.objects.snapshots import SnapshotStore
from tasks.runtime.flow_run import HANDED_BACK
from tests.flows.conftest import wait_for
from tests.operations.conftest import PROJECT, Machine
from tests.operations.own_server import stranger
from tests.support import forked
from tests.support.server_logs import ServerLogs

INTERRUPTED = "Crash detected! Execution was aborted|Finished in state .*(by a termination|process was asked to stop)"
STEPS = 500
SLACK_SECONDS = 20.0
"""For machines under load."""


class Cloud:
    """Metadata services of AWS and Google on loopback, as their documents have them."""

    def __init__(self) -> None:
        self.end: datetime | None = None
        """When the machine is taken back; None: nobody has said so."""
        self.is_at_risk = False
        self.tokens: list[str] = []
        """Those that were given out and are valid."""
        self.asked: list[str] = []
        self.changed = threading.Event()

    def take_back(self, seconds: float) -> None:
        self.end = datetime.now(UTC) + timedelta(seconds=seconds)
        self.changed.set()

    def answer(self, method: str, url: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        self.asked.append(path)
        if (method, path) == ("PUT", "/latest/api/token"):
            if "X-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 400, "", {}
            self.tokens.append(f"token-{len(self.asked)}")
            return 200, self.tokens[-1], {}
        if path.startswith("/latest/"):
            if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
                return 401, "", {}
            if path.endswith("spot/instance-action") and self.end is not None:
                return 200, json.dumps({"action": "terminate", "time": f"{self.end:%Y-%m-%dT%H:%M:%SZ}"}), {}
            if path.endswith("recommendations/rebalance") and self.is_at_risk:
                return 200, json.dumps({"noticeTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}), {}
            if path.endswith("meta-data/instance-type"):
                return 200, "m7i.2xlarge\n", {}
            return 404, "", {}
        if path == "/computeMetadata/v1/instance/machine-type" and headers.get("Metadata-Flavor") == "Google":
            return 200, "projects/12345/machineTypes/n2-standard-8", {}
        if path.startswith("/metadata/"):
            if headers.get("Metadata") != "true" or "api-version" not in query:
                return 400, "", {}
            return 200, self.azure(path.removeprefix("/metadata/")), {}
        if path == "/computeMetadata/v1/instance/preempted":
            if headers.get("Metadata-Flavor") != "Google":
                return 403, "", {}
            known = "true" if self.end is not None else "false"
            if query.get("wait_for_change") == ["true"] and query.get("last_etag") == [known]:
                self.changed.wait(float(query["timeout_sec"][0]))
            value = "TRUE" if self.end is not None else "FALSE"
            return 200, value, {"Metadata-Flavor": "Google", "ETag": value.lower()}
        return 404, "", {}

    def azure(self, path: str) -> str:
        if path == "instance/compute/name":
            return "scale-set_7"
        if path == "instance/compute/vmSize":
            return "Standard_NC24ads_A100_v4"
        preempt = {"EventId": "1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "EventStatus": "Scheduled"}
        others = [{**preempt, "Resources": ["scale-set_8"], "NotBefore": ""}]
        others += [{**preempt, "EventType": "Freeze", "Resources": ["scale-set_7"], "NotBefore": ""}]
        ours = [] if self.end is None else [{**preempt, "Resources": ["scale-set_7"], "NotBefore": self.azure_time}]
        return json.dumps({"DocumentIncarnation": 2, "Events": [*others, *ours]})

    @property
    def azure_time(self) -> str:
        return "" if self.end is None else format_datetime(self.end, usegmt=True)


@contextmanager
def cloud_at() -> Iterator[tuple[Cloud, str]]:
    """A cloud, and host and port of its metadata."""
    cloud = Cloud()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, text, headers = cloud.answer(self.command, self.path, self.headers)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cloud, f"127.0.0.1:{server.server_port}"
    finally:
        cloud.changed.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with cloud_at() as (found, host):
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{host}")
        yield found


@contextmanager
def ops_worker(
    machine: Machine, logs: ServerLogs, *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`rollout ops worker` of the pool, and its log; killed after the block, with all it started, if it still lives."""
    path = logs.watch(machine.folder / f"ops-worker-{len(list(machine.folder.glob('ops-worker-*')))}.log")
    command = [sys.executable, "-c", "from deployments.cli import main; main()", "ops", "worker", "--pool", "cpu"]
    with path.open("wb") as output:
        worker = forked.Process(
            [*command, *options], env={**machine.environment, **environment}, cwd=machine.folder,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield worker, path
    finally:
        if worker.poll() is None:
            for process in [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]:
                process.kill()
            worker.wait()


def ended(worker: subprocess.Popen[bytes], log: Path, within: float) -> int:
    """Exit code of a worker of which nothing is left."""
    started = psutil.Process(worker.pid).children(recursive=True)
    try:
        worker.wait(within)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the worker did not end:\n{log.read_text()}") from None
    assert psutil.wait_procs(started, timeout=SLACK_SECONDS)[1] == [], log.read_text()
    return worker.returncode


def training(model: Path, rows: Path) -> dict[str, Any]:
    """Only a stop makes a snapshot of it."""
    return {
        "num_threads": 1,
        "algorithm": {
            "kind": "sft",
            "minibatch_size": 16,
            "base_model": {"uri": str(model)},
            "dataset": {"path": str(rows)},
            "budget": {"max_steps": STEPS},
            "sequence": {"max_length": 64},
            "optimizer": {"lr": 1e-3},
            "snapshots": {"every_steps": 100_000},
        },
    }


def batch(model: Path, prompts: Path, output: Path) -> dict[str, Any]:
    """Samples that take minutes."""
    return {
        "model": {"uri": str(model)},
        "backend": {"kind": "scripted", "delay_seconds": 0.5},
        "input": {"glob": str(prompts)},
        "output": {"dir": str(output)},
        "sampling": {"max_tokens": 8, "temperature": 0.0},
    }


def steps(storage: Path) -> list[int]:
    """Of the snapshots in an object store, the highest first."""
    found = SnapshotStore(ObjectStore.from_url(f"file://{storage}")).list()
    return sorted((snapshot.step for snapshot in found if snapshot.kind == "train_state"), reverse=True)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_drain_within_lead_time(machine: Machine, cloud: Cloud, tiny_model, sorting_task, tmp_path, server_logs):
    """Three workers lose their run, by SIGTERM, AWS and Google; a fourth ends it in the bytes of an undisturbed one."""
    server_logs.expect(INTERRUPTED, "a stage is interrupted")
    machine.rollout("ops", "install", "--webhook", machine.webhook)
    machine.told.clear()
    config = training(tiny_model, sorting_task.sft)
    own = {"tags": ["rollout"], "entrypoint": "flows/train.py:train_sft", "parameters": {"config": config}}
    machine.deploy({"name": "train-sft", **own}, folder=PROJECT)
    storage = tmp_path / "objects"
    run_id = machine.start_run("train-sft")
    kept = [0]
    for kind, lead in (("none", 30.0), ("aws", 120.0), ("gce", 30.0)):
        cloud.end = None
        cloud.changed.clear()
        options = ["--spot", kind, *(["--drain-seconds", "30"] if kind == "none" else [])]
        with ops_worker(machine, server_logs, *options) as (worker, log):
            machine.wait(run_id, "Running")
            training_at = len(machine.ask(f"flow_run_states/?flow_run_id={run_id}"))
            wait_for(lambda: re.search("SFT: step|resumes at step", log.read_text()), "training")
            began = time.monotonic()
            if kind == "none":
                worker.send_signal(signal.SIGTERM)
            else:
                cloud.take_back(lead)
            code = ended(worker, log, lead)
            assert time.monotonic() - began < lead
            assert code == (0 if kind == "none" else EXIT_DRAINED), log.read_text()
        run = machine.run(run_id)
        assert (run["state"]["name"], run["run_count"]) == ("AwaitingRetry", 1), log.read_text()
        assert run["state"]["message"].startswith(HANDED_BACK)
        assert len(machine.ask(f"flow_run_states/?flow_run_id={run_id}")) == training_at + 1, "nothing in between"
        kept.append(steps(storage)[0])
        assert kept[-2] < kept[-1] < STEPS, kept

    undisturbed = tmp_path / "undisturbed"
    elsewhere = {"ROLLOUT_STORAGE": f"file://{undisturbed}", "ROLLOUT_CACHE": str(tmp_path / "other")}
    quiet = machine.start_run("train-sft", job_variables={"env": elsewhere})
    with ops_worker(machine, server_logs) as (worker, log):
        run = machine.wait(run_id, "Completed", seconds=500)
        assert run["run_count"] == 1, "the machines were at fault"
        assert f"resumes at step {kept[-1]} " in log.read_text()
        machine.wait(quiet, "Completed", seconds=500)
        worker.send_signal(signal.SIGINT)
        assert ended(worker, log, SLACK_SECONDS) == 0
    assert {told["state"] for told in machine.told} <= {"Late"}, "a busy machine may be late; nothing else is told"

    def result(folder: Path) -> str:
        found = SnapshotStore(ObjectStore.from_url(f"file://{folder}")).list()
        [last] = {snapshot.id for snapshot in found if snapshot.step == STEPS and snapshot.kind == "train_state"}
        return last

    assert result(storage) == result(undisturbed)


FLOWS = '''
import signal, time
from pathlib import Path
from prefect import flow

@flow
def stubborn(seconds: float):
    """Does not heed a signal until the time is up, and then ends as one that was killed."""
    end, is_told = time.monotonic() + 600, False
    Path("began").touch()
    while time.monotonic() < end:
        try:
            time.sleep(0.1)
        except BaseException:
            if is_told:
                raise
            end, is_told = time.monotonic() + seconds, True
            Path("told").touch()
    raise SystemExit(1)

@flow
def ends_at_once():
    pass
'''


def test_a_worker_that_drains_takes_no_run_and_hands_back_what_does_not_heed_it(machine: Machine, server_logs):
    server_logs.expect("Crash detected|status code: |interrupted by base exception", "a run does not stop")
    (machine.folder / "drained.py").write_text(FLOWS)
    deployed = [
        {"name": name, "entrypoint": f"drained.py:{flow}", "tags": ["rollout"]}
        for name, flow in (("stubborn", "stubborn"), ("ends-at-once", "ends_at_once"))
    ]
    machine.deploy(*deployed)
    with ops_worker(machine, server_logs, "--drain-seconds", "24", "--limit", "3") as (worker, log):
        before = machine.start_run("ends-at-once")
        machine.wait(before, "Completed")
        for run in (stubborn := [machine.start_run("stubborn", parameters={"seconds": 12 + 600 * n}) for n in (0, 1)]):
            machine.wait(run, "Running")
        time.sleep(1.0)
        worker.send_signal(signal.SIGTERM)
        wait_for(lambda: "the worker is draining" in log.read_text(), "the drain")
        after = machine.start_run("ends-at-once")
        time.sleep(6.0)
        assert worker.poll() is None, "it waits for its runs"
        assert machine.run(after)["state"]["type"] == "SCHEDULED", "it would have been done by now"
        assert ended(worker, log, 24.0) == 0
    for run in stubborn:
        found = machine.run(run)
        assert (found["state"]["name"], found["run_count"]) == ("AwaitingRetry", 1), log.read_text()
        assert found["state"]["message"].startswith(HANDED_BACK)
    assert [state["type"] for state in machine.states(after)] in (["SCHEDULED"], ["SCHEDULED"] * 2)  # Late
    for run in (after, *stubborn):
        machine.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLED"}})


def statuses(database: Path) -> dict[str, int]:
    """Rollouts of a store by their status."""
    if not database.exists():
        return {}
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5) as found:
            return dict(found.execute("SELECT status, count(*) FROM rollouts GROUP BY status").fetchall())
    except sqlite3.OperationalError:
        return {}


@pytest.mark.campaign
def test_claims_of_a_batch_are_given_back_and_a_cancelled_one_is_cancelled(
    machine: Machine, tiny_model, sorting_task, tmp_path, server_logs
):
    server_logs.expect(INTERRUPTED, "a stage is interrupted")
    item = {"name": "batch-inference", "entrypoint": "flows/batch.py:batch_inference", "tags": ["rollout"]}
    machine.deploy(item, folder=PROJECT)
    database = tmp_path / "rollout.db"

    def start(name: str) -> str:
        config = batch(tiny_model, sorting_task.prompts, tmp_path / name)
        return machine.start_run("batch-inference", parameters={"config": config})

    with ops_worker(machine, server_logs) as (worker, log):
        run_id = start("drained")
        wait_for(lambda: statuses(database).get("succeeded"), "a finished sample")
        assert statuses(database).keys() & {"preparing", "running"}
        worker.send_signal(signal.SIGTERM)
        assert ended(worker, log, 40.0) == 0
    assert machine.run(run_id)["state"]["name"] == "AwaitingRetry", log.read_text()
    left = statuses(database)
    assert left["succeeded"] >= 1 and not left.keys() & {"preparing", "running"}, left

    with ops_worker(machine, server_logs) as (worker, log):
        machine.wait(run_id, "Running")
        wait_for(lambda: statuses(database).get("succeeded", 0) > left["succeeded"], "a sample of the next worker")
        machine.ask(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING"}})
        machine.wait(run_id, "Cancelled")
        assert not statuses(database).keys() & {"preparing", "running"}
        worker.send_signal(signal.SIGTERM)
        assert ended(worker, log, 40.0) == 0


@pytest.mark.parametrize("is_early", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_a_run_in_a_container_of_its_own_is_told_and_handed_back(
    machine: Machine, tiny_model, sorting_task, tmp_path, server_logs, is_early: bool
):
    """Early: Prefect fetches the code yet, or imports it."""
    server_logs.expect(f"{INTERRUPTED}|status code: -15", "a stage is interrupted, or a process before its first line")
    item = {"name": "batch-inference", "entrypoint": "flows/batch.py:batch_inference", "tags": ["rollout"]}
    machine.deploy(item, folder=PROJECT)
    config = batch(tiny_model, sorting_task.prompts, tmp_path / "completions")
    run_id = machine.start_run("batch-inference", parameters={"config": config})
    machine.ask(f"flow_runs/{run_id}/set_state", {"state": {"type": "PENDING"}})  # as Prefect's worker does
    log, database = server_logs.watch(tmp_path / "container.log"), tmp_path / "rollout.db"
    with log.open("wb") as output:
        container = subprocess.Popen(
            [sys.executable, "-m", "deployments.container"], stdout=output, stderr=output, start_new_session=True,
            cwd=PROJECT, env={**machine.environment, "PREFECT__FLOW_RUN_ID": run_id},
        )  # fmt: skip
    try:
        if is_early:
            wait_for(lambda: psutil.Process(container.pid).children(), "Prefect's own command")
        else:
            wait_for(lambda: statuses(database).get("succeeded"), "a finished sample")
        container.send_signal(signal.SIGTERM)
        assert ended(container, log, 120.0 if is_early else 40.0) == 0
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(container.pid).children(recursive=True), psutil.Process(container.pid)]:
                process.kill()
        container.wait()
    run = machine.run(run_id)
    assert run["state"]["name"] == "AwaitingRetry" and run["run_count"] <= 1, log.read_text()
    assert run["state"]["message"].startswith(HANDED_BACK)
    left = statuses(database)
    assert (is_early or left["succeeded"] >= 1) and not left.keys() & {"preparing", "running"}, left
    machine.ask(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLED"}})


@pytest.mark.parametrize("kind", ["aws", "gce"])
def test_a_notice_is_seen_and_says_how_long_is_left(cloud: Cloud, kind: Any):
    said: list[str] = []
    watch = SpotWatch(required(kind), said.append)
    assert watch.notice() is None
    cloud.tokens.clear()  # those of AWS are of a time
    cloud.is_at_risk = True
    if kind == "aws":
        wait_for(lambda: said, "word of the risk")
    cloud.take_back(50.0)
    notice = wait_for(watch.notice, "the notice")
    left = 30.0 if kind == "gce" else 50.0
    assert left - 10.0 < notice.seconds_left <= left
    assert len(said) == (kind == "aws")
    assert required("auto") is not None


def required(kind: Any) -> Any:
    found = metadata(kind)
    assert found is not None
    return found


def test_a_run_that_cannot_be_handed_back_is_left_to_the_supervisor(monkeypatch: pytest.MonkeyPatch):
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from deployments.worker import DrainingWorker

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            worker = DrainingWorker(name="here", work_pool_name="cpu")
            asyncio.run(worker._give_back(str(uuid4())))
    assert worker.has_left_runs


def test_a_worker_outlives_its_server_and_its_database(caplog: pytest.LogCaptureFixture):
    """Prefect's own gives up after some minutes, and its runs end with it, of which that counts as a try."""
    from prefect import get_client
    from prefect.client.schemas.objects import WorkPool
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from deployments.worker import DrainingWorker

    async def ask(address: str) -> None:
        worker = DrainingWorker(name="here", work_pool_name="cpu")
        worker._work_pool = WorkPool(name="cpu", type="process", default_queue_id=uuid4())
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            async with get_client() as client:
                worker._client = client
                for _ in range(5):
                    assert await worker.get_and_submit_flow_runs() == []
                    await worker.sync_with_backend()

    with stranger(500) as address:
        asyncio.run(ask(address))
    asyncio.run(ask(address))  # nobody listens there any more
    assert [record.levelno for record in caplog.records if "is away" in record.message] == [logging.WARNING] * 2


@pytest.mark.parametrize(("left", "least", "most"), [(3600.0, 100.0, 120.0), (-60.0, 20.0, 30.0)])
def test_a_wrong_clock_makes_the_time_no_longer_than_the_cloud_gives_and_leaves_some(
    cloud: Cloud, left: float, least: float, most: float
):
    cloud.take_back(left)
    notice = AWSMetadata().notice(wait=False)
    assert notice is not None and least < notice.seconds_left <= most


def test_the_cloud_names_the_kind_of_its_machine(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    assert machine_type(AWSMetadata()) == "m7i.2xlarge"
    assert machine_type(GCEMetadata()) == "n2-standard-8"
    assert machine_type(AzureMetadata()) == "Standard_NC24ads_A100_v4"
    with cloud_at() as (_, host):
        pass  # nobody listens there any more
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    assert machine_type(GCEMetadata()) is None


def test_a_silent_service_is_told_once_and_when_it_answers_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_core.base.spot.POLL_SECONDS", 0.1)
    said: list[str] = []
    with cloud_at() as (_, host):
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
        watch = SpotWatch(service := AWSMetadata(), said.append)
        there = service._latest
        with cloud_at() as (_, nowhere):
            pass
        service._latest = f"http://{nowhere}/latest"
        wait_for(lambda: said, "word of the trouble")
        service._latest = there
        wait_for(lambda: len(said) == 2, "word that it is over")
    assert "does not answer" in said[0] and "answers again" in said[1]
    assert watch.notice() is None


def test_no_cloud_is_an_error_only_where_it_was_named(monkeypatch: pytest.MonkeyPatch):
    with cloud_at() as (_, host):
        pass  # nobody listens there any more
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{host}")
    assert metadata("none") is metadata("auto") is None
    for kind in ("aws", "gce", "azure"):
        with pytest.raises(ConfigError, match=f"--spot {kind}: the metadata service does not answer"):
            metadata(kind)
    with cloud_at() as (_, host):
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        assert isinstance(metadata("auto"), GCEMetadata)
    with cloud_at() as (_, host):
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"http://{host}")
        assert isinstance(metadata("auto"), AzureMetadata)


def test_an_event_of_azure_counts_where_it_evicts_this_machine(cloud: Cloud):
    service = AzureMetadata()
    assert service.notice(wait=False) is None, "another machine of the set, and what only pauses this one"
    cloud.take_back(600.0)
    notice = service.notice(wait=True)
    assert notice is not None and 20.0 < notice.seconds_left <= 30.0
    found = look_at_spot(service)
    assert (found.cloud, found.machine_type, found.notice) == (
        "azure", "Standard_NC24ads_A100_v4", "Azure evicts this machine",
    )  # fmt: skip
    assert found.seconds_left is not None and found.seconds_left <= 30.0
    cloud.end = None
    assert look_at_spot(service).notice is None
