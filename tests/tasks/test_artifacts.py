"""Artifacts: what a run shows reaches the Prefect server, and no run waits for one that is away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import hash_bytes
from rollout_core.base.settings import ui_address
from rollout_core.config import Run, RunInfo
from rollout_core.objects.records import Dataset
from tests.flows.conftest import wait_for

pytestmark = pytest.mark.server


def shown(server: str, flow_run: str) -> dict[str, Any]:
    """The data of a run's artifacts by key."""
    body = json.dumps({"artifacts": {"flow_run_id": {"any_": [flow_run]}}}).encode()
    request = urllib.request.Request(f"{server}/artifacts/filter", body, headers={"Content-Type": "application/json"})
    found = json.load(urllib.request.urlopen(request, timeout=30))
    assert len({artifact["key"] for artifact in found}) == len(found), "one version of each"
    return {artifact["key"]: artifact["data"] for artifact in found}


def test_what_a_run_shows_is_at_the_server_when_it_ends(prefect_server, monkeypatch, capfd, caplog):
    from prefect import flow
    from prefect.context import FlowRunContext

    from tasks.runtime import artifacts
    from tasks.runtime.flow_run import recompute_missing

    monkeypatch.setattr(artifacts, "PROGRESS_INTERVAL_SECONDS", 0.0)

    def body(journal):
        with artifacts.ProgressBar("some-progress", "Some work") as bar:
            for done in range(200):
                bar.show(done, 200)
            bar.end(150, 200)
        artifacts.table("some-figures", [{"loss": float("nan"), "step": 1}], "Figures")
        artifacts.table("Not A Key", [], "refused by Prefect")
        artifacts.curve("some-curve", [1.0, 2.0], title="Curve", x_label="step", y_label="loss")
        artifacts.origin("some-origin", "Made", {"model": hash_bytes(b"m")}, {"data": hash_bytes(b"d"), "none": None})
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        return str(context.flow_run.id)

    @flow(persist_result=False)
    def shows():
        return recompute_missing(body, Run(run=RunInfo()))

    found = shown(prefect_server, shows())
    assert found.keys() == {"summary", "some-progress", "some-figures", "some-curve", "some-origin"}
    assert found["some-progress"] == 75.0
    assert json.loads(found["some-figures"]) == [{"loss": None, "step": 1}]
    assert found["some-curve"].startswith("data:image/png;base64,")
    assert hash_bytes(b"d") in found["some-origin"] and "none" not in found["some-origin"]
    assert "the artifact Not A Key could not be made" in caplog.text + capfd.readouterr().err


def test_the_summary_of_a_failed_run_names_stage_and_error_and_another_try_goes_on_with_it(prefect_server, monkeypatch):
    from prefect import flow
    from prefect.runtime import flow_run

    from tasks.runtime.flow_run import recompute_missing
    from tasks.runtime.journal import Outcome
    from tasks.runtime.stage import current_stage, stage

    tries: list[str] = []

    @stage(version=1)
    def breaks(number: int, *, label: str = "") -> Dataset:
        """Fail the first time."""
        tries.append(str(flow_run.id))
        if len(tries) == 1:
            raise ValueError(f"no row {number} | at http://ann:hidden@host/rows\n" + "and much more")
        return Dataset(data=current_stage().objects.put_bytes(b"%d" % number), num_rows=number)

    def body(journal):
        breaks(3, label="iteration 2")
        journal.outcome = Outcome(facts={"what": "rows"}, held_out={"before": 0.5, "after": 0.25})

    def work(**options: Any) -> Any:
        @flow(persist_result=False, **options)
        def works():
            return recompute_missing(body, Run(run=RunInfo(name="some")))

        return works

    assert work()(return_state=True).is_failed()
    summary = shown(prefect_server, tries[0])["summary"]
    expected = (
        "- **state**: failed at **breaks iteration 2**: ValueError: no row 3 \\| at http://ann:\\*\\*\\*@host/rows"
    )
    assert expected in summary.splitlines()
    assert "held-out" not in summary and "- **stages**: 1 failed" in summary
    assert "curves and samples" not in summary, "nobody said where the pages of runs are"

    tries.clear()
    monkeypatch.setenv("ROLLOUT_UI_URL", "http://runs.example:4747/ui/")
    work(retries=1)()
    assert len(tries) == 2 and len(set(tries)) == 1
    lines = shown(prefect_server, tries[0])["summary"].splitlines()
    rewards = {"- **held-out reward before**: **0.5000**", "- **held-out reward after**: **0.2500** (-0.2500)"}
    page = f"- **curves and samples**: http://runs.example:4747/ui/runs/{tries[0]}"
    assert {"- **state**: completed", "- **what**: rows", page, *rewards} <= set(lines)


@pytest.mark.parametrize(
    "address", ["runs.example", "javascript:alert(1)", "http://ann:sesame@host/", "http://a/)[x](y"]
)
def test_the_address_of_the_pages_is_one_that_may_be_shown(monkeypatch, address):
    monkeypatch.setenv("ROLLOUT_UI_URL", address)
    with pytest.raises(ConfigError) as refused:
        ui_address()
    assert "sesame" not in str(refused.value)


PROGRAM = """
import os, time
from pathlib import Path
from prefect import flow
from prefect.context import FlowRunContext
from tasks.runtime.flow_run import recompute_missing
from rollout_core.config import Run, RunInfo
from rollout_core.objects.records import Dataset
from tasks.runtime import artifacts
from tasks.runtime.stage import current_stage, stage

@stage(version=1)
def work(number: int) -> Dataset:
    "Steps until it is told to end."
    total = 1_000_000
    with artifacts.ProgressBar("work-progress", "Work") as bar, open("steps", "w", buffering=1) as steps:
        for step in range(total):
            bar.show(step, total)
            steps.write(".")
            steps.flush()
            if Path("end").exists():
                artifacts.table("work", [{"steps": step}], "What came of it")
                return Dataset(data=current_stage().objects.put_bytes(b"%d" % number), num_rows=step)
            time.sleep(0.005)
    raise AssertionError("never told to end")

def body(journal):
    Path("run").write_text(str(FlowRunContext.get().flow_run.id))
    return work(1).num_rows

@flow(persist_result=False)
def works():
    return recompute_missing(body, Run(run=RunInfo()))

if __name__ == "__main__":
    os.environ["PREFECT__FLOW_RUN_ID"] = "as a worker does"  # not at the imports, which ask the server about it
    works()
"""


class KilledServer:
    """A Prefect server that is killed and started again in its place."""

    def __init__(self, folder: Path, start_process: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._folder, self._start_process = folder, start_process
        self.log = folder / "server.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = self._start_process(
                "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port),
                env={"PREFECT_HOME": str(self._folder / "prefect"), "PREFECT_LOGGING_SERVER_LEVEL": "WARNING"},
                stdout=log,
            )  # fmt: skip
        wait_for(self._answers, "the server's answer")

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False


def test_a_run_goes_on_without_its_server_and_tells_it_all_once_it_is_back(tmp_path, start_process, server_logs):
    server = KilledServer(tmp_path, start_process)
    server_logs.watch(server.log)
    (tmp_path / "program.py").write_text(PROGRAM)
    steps, log = tmp_path / "steps", tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                "PREFECT_API_URL": server.url,
            },
        )

    def wait(condition: Any, what: str) -> None:
        wait_for(lambda: condition() or run.poll() is not None, what)
        assert condition(), log.read_text()

    try:
        flow_run = tmp_path / "run"
        wait(lambda: flow_run.exists() and "work-progress" in shown(server.url, flow_run.read_text()), "progress")
        server.kill()
        # The progress is shown every 2 s, so a stage that waited for the server would not come this far.
        taken = steps.stat().st_size
        wait(lambda: steps.stat().st_size > taken + 1200, "steps without a server")
        (tmp_path / "end").touch()
        wait(lambda: "waits at its end for the Prefect server" in log.read_text(), "the end of the run")
        server.start()
        assert run.wait(120) == 0, log.read_text()
    finally:
        run.kill()
    told = log.read_text()
    assert "the Prefect server does not answer" in told and "the Prefect server answers again" in told
    found = shown(server.url, flow_run.read_text())
    assert json.loads(found["work"]) == [{"steps": steps.stat().st_size - 1}]
    with urllib.request.urlopen(f"{server.url}/flow_runs/{flow_run.read_text()}", timeout=30) as answer:
        assert json.load(answer)["state"]["type"] == "COMPLETED"
