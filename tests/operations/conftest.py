"""A Prefect server with the automations of this project, a project of small flows, and whoever is told of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.runtime.prefect_server import SERVER_SETTINGS
from tests.flows.conftest import PATIENCE_SECONDS, small_nightly, wait_for
from tests.support import forked
from tests.support.prefect_servers import prefect_process
from tests.support.server_logs import OF_SEVERAL_TESTS, ServerLogs

__all__ = ["small_nightly"]  # a fixture
PROJECT = Path(__file__).resolve().parents[2]
SETTINGS = {
    **SERVER_SETTINGS,
    "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "20",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "1",
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_LEVEL": "INFO",
}


@dataclass
class Machine:
    """A server, and commands and workers that use it."""

    folder: Path
    api: str
    webhook: str
    told: list[dict[str, Any]]
    """What came to the webhook, in order."""

    @property
    def environment(self) -> dict[str, str]:
        # The tests' own folder first: its flows are no package of the project.
        return {
            **os.environ,
            **SETTINGS,
            "PREFECT_API_URL": self.api,
            "PREFECT_HOME": str(self.folder / "home"),
            "PYTHONPATH": str(PROJECT),
            "ROLLOUT_POOL": "cpu",
        }

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Answer of the server's API; a POST where there is a body. Asks again while the server is busy."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.api}/{path}", data, headers={"Content-Type": "application/json"}, method=method
        )
        for pause in (1, 2, 5, 10, 0):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or not pause:
                    raise
                time.sleep(pause)

    def command(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return forked.run(command, env=self.environment, cwd=cwd or self.folder, timeout=400)

    def rollout(self, *arguments: str) -> str:
        """What the command `rollout` prints, which must succeed."""
        done = self.command("-c", "from deployments.cli import main; main()", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, *deployments: dict[str, Any], folder: Path | None = None) -> None:
        """Deploy these, on a pool `cpu`, of the flows in ``folder``; by default that of the machine."""
        assert self.command("-m", "deployments.pools").returncode == 0
        items = [{"work_pool": {"name": "cpu"}, "tags": ["rollout"], **item} for item in deployments]
        file = self.folder / "prefect.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "name": "operations",
                    "pull": [
                        {"prefect.deployments.steps.set_working_directory": {"directory": str(folder or self.folder)}}
                    ],
                    "deployments": items,
                }
            )
        )
        command = ["-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        done = self.command(*command, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_run(self, flow: str, deployment: str | None = None, **fields: Any) -> str:
        """Id of a run of a deployment that is due now."""
        found = self.ask(f"deployments/name/{flow}/{deployment or flow}")
        return self.ask(f"deployments/{found['id']}/create_flow_run", fields)["id"]

    def run(self, run_id: str) -> dict[str, Any]:
        return self.ask(f"flow_runs/{run_id}")

    def states(self, run_id: str) -> list[dict[str, Any]]:
        """States of a run, in order."""
        found = self.ask(f"flow_run_states/?flow_run_id={run_id}")
        return sorted(found, key=lambda state: state["timestamp"])

    def wait(self, run_id: str, *names: str, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The run once its state has one of the names."""

        def look() -> dict[str, Any] | None:
            run = self.run(run_id)
            return run if run["state"]["name"] in names else None

        try:
            return wait_for(look, f"{names} of run {run_id}", seconds=seconds)
        except AssertionError as error:
            shown = [(state["timestamp"], state["name"], state["message"]) for state in self.states(run_id)]
            raise AssertionError(f"{error}\n{shown}") from None

    @contextmanager
    def worker(self, logs: ServerLogs, *, supervised: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """A worker of the pool, for the length of the block; then it and all it started are killed. ``supervised``: its
        name, where `rollout ops worker` keeps it."""
        command = ["-m", "prefect", "worker", "start", "--pool", "cpu"]
        if supervised:
            main = "from deployments.cli import main; main()"
            command = ["-c", main, "ops", "worker", "--pool", "cpu", "--name", supervised]
        path = logs.watch(self.folder / f"worker-{len(list(self.folder.glob('worker-*')))}.log")
        with path.open("wb") as output:
            worker = forked.Process(
                [sys.executable, *command],
                env=self.environment, cwd=self.folder, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            yield worker
        finally:
            end(worker)


def end(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its runs, as when a machine is lost."""
    if worker.poll() is None:
        processes = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=120)
        worker.wait()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Machine]:
    """A server of its own, which ends without an error in its log."""
    folder, logs = tmp_path_factory.mktemp("operations"), ServerLogs()
    log = logs.watch(folder / "server.log")
    told: list[dict[str, Any]] = []
    with receiving(told) as webhook, prefect_process(folder / "home", prefect_database, log, SETTINGS) as api:
        yield Machine(folder, api, webhook, told)
    logs.check(OF_SEVERAL_TESTS)


@contextmanager
def receiving(told: list[dict[str, Any]]) -> Iterator[str]:
    """Address of a server that keeps what is posted to it."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/told?token=s3cret"
    finally:
        server.shutdown()
        thread.join()
