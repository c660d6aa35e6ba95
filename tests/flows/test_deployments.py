"""Deployments: prefect.yaml says what the example says, deploys as it is, its schedules fire, and a killed run can be
retried."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import tomllib
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prefect import get_client

from deployments import pools
from deployments.listed import unready_schedules
from rollout_core.base.errors import RolloutError
from rollout_core.config import NightlyConfig, parse_config
from rollout_core.objects.lineage import lineage_of
from tasks.runtime.prefect_server import LOG
from tests.flows.conftest import objects, snapshots_of, wait_for
from tests.support import forked

PROJECT = Path(__file__).resolve().parent.parent.parent


def prefect_yaml() -> dict:
    return yaml.safe_load((PROJECT / "prefect.yaml").read_text())


def test_the_deployed_nightly_is_the_example():
    [nightly] = [item for item in prefect_yaml()["deployments"] if item["name"] == "nightly"]
    example = tomllib.loads((PROJECT / "examples" / "nightly-tiny.toml").read_text())
    assert nightly["parameters"]["config"] == example
    assert nightly["schedules"][0]["cron"]


def test_every_flow_is_deployed_once_on_the_pool_that_is_chosen():
    items = prefect_yaml()["deployments"]
    training = {f"flows/train.py:train_{kind}" for kind in ("sft", "ppo", "grpo")}
    preferences = {f"flows/train.py:train_{kind}" for kind in ("rm", "dpo", "ipo", "kto")}
    agents = {"flows/agent.py:train_agent", "flows/prompts.py:tune_prompt", "flows/online.py:learn_online"}
    flows = {"flows/nightly.py:nightly", "flows/batch.py:batch_inference", *agents, *training, *preferences}
    flows.add("flows/evaluate.py:evaluate_suites")
    light = {
        "flows/rollback.py:rollback",
        "flows/daily_report.py:morning_check",
        "flows/candidate.py:promote_candidate",
        "flows/canary.py:canary",
        "flows/housekeeping.py:housekeeping",
        "deployments/cloud_check.py:cloud_doctor",
    }
    assert sorted(item["entrypoint"] for item in items) == sorted(flows | light)
    assert {item["work_pool"]["name"] for item in items} == {"{{ $ROLLOUT_POOL }}"}


def test_a_deployment_of_an_earlier_version_finds_its_flow():
    from prefect.flows import load_flow_from_entrypoint

    assert load_flow_from_entrypoint(f"{PROJECT}/flows/morning.py:morning_check").name == "morning-check"


@pytest.mark.server
def test_deployments_move_to_the_pool_that_is_named_and_bad_names_change_nothing(prefect_server, tmp_path, capfd):
    def ops_deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from deployments.cli import main; main()", "ops", "deploy", *arguments]
        environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(PROJECT)}
        return forked.run(command, cwd=PROJECT, env=environment, timeout=300)

    def placed(name: str) -> tuple[str | None, Any]:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(f"{name}/{name}")
        return found.work_pool_name, (found.pull_steps or [{}])[0]

    done = ops_deploy("train-kto", "train-ipo", "--pool", "gpu", "--project", "/opt/rollout")
    assert done.returncode == 0, done.stdout + done.stderr
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "/opt/rollout"}}
    assert placed("train-kto") == placed("train-ipo") == ("gpu", step)
    pools.deploy(PROJECT, "cpu", ["train-kto"])
    assert placed("train-kto")[0] == "cpu"
    assert placed("train-ipo")[0] == "gpu", "nobody asked for it"

    def seeds() -> list[int]:
        with get_client(sync_client=True) as client:
            found = [client.read_deployment_by_name(f"{name}/{name}") for name in ("nightly", "canary")]
        return [item.parameters["config"]["seed"] for item in found]

    example = (PROJECT / "examples" / "nightly-tiny.toml").read_text()
    own = tmp_path / "nightly.toml"
    own.write_text(example.replace("seed = 7", "seed = 8"))
    wrong, elsewhere = tmp_path / "wrong.toml", tmp_path / "cloud.toml"
    wrong.write_text(example.replace("seed = 7", "sed = 7"))
    elsewhere.write_text(example + '\n[cloud]\nprovider = "local"\n')
    done = ops_deploy("nightly", "canary", "--config", str(own))
    assert done.returncode == 0 and seeds() == [8, 8], done.stdout + done.stderr
    # What a person has switched off stays off, and the deployment says so.
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name("nightly/nightly")
        client.update_deployment_schedule(found.id, found.schedules[0].id, active=False)
        client.pause_deployment(client.read_deployment_by_name("train-kto/train-kto").id)
    pools.deploy(PROJECT, "cpu", ["nightly", "canary", "train-kto"])
    assert seeds() == [7, 7]
    with get_client(sync_client=True) as client:
        schedules = {
            name: [one.active for one in client.read_deployment_by_name(f"{name}/{name}").schedules]
            for name in ("nightly", "canary")
        }
        paused = {name: client.read_deployment_by_name(f"{name}/{name}").paused for name in ("train-kto", "canary")}
    assert schedules == {"nightly": [False], "canary": [True]} and paused == {"train-kto": True, "canary": False}
    assert "deployment nightly: its schedule (0 2 * * *) is paused, and stays so: prefect " in capfd.readouterr().out

    done = ops_deploy("nightly", "--config", str(wrong))
    assert done.returncode and "sed: unknown key; did you mean 'seed'?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for folder, pool, name, config, message in (
        (PROJECT, "cpu", "nightly", elsewhere, "a table [cloud] is for runs by command"),
        (PROJECT, "cpu", "train-ktp", None, "has no deployment train-ktp; it has nightly, "),
        (PROJECT, "tpu", "train-kto", None, "the server has no work pool 'tpu'; give one of cpu, gpu"),
        (tmp_path, "cpu", "train-kto", None, f"{tmp_path / 'prefect.yaml'} cannot be read"),
    ):
        with pytest.raises(RolloutError, match=re.escape(message)):
            pools.deploy(folder, pool, [name], config=config)
    assert placed("train-kto")[0] == "cpu"


@pytest.mark.server
def test_deployed_killed_and_retried_through_the_server_it_resumes(
    prefect_server, small_nightly, start_process, tmp_path, server_logs
):
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "ROLLOUT_PROJECT": str(PROJECT)}

    def prefect(*arguments: str) -> None:
        done = forked.run([sys.executable, "-m", "prefect", *arguments], env=environment, cwd=PROJECT, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr

    pools.deploy(PROJECT, "cpu")
    with get_client(sync_client=True) as client:
        deployed = {item.name for item in client.read_deployments()}
    assert {item["name"] for item in prefect_yaml()["deployments"]} <= deployed

    server_logs.expect("exited with status code: -9", "the test kills the flow's process")
    log = server_logs.watch(tmp_path / "worker.log")
    with log.open("w") as output:
        worker = start_process(
            "-m", "prefect", "worker", "start", "--pool", "cpu", "--name", "test",
            env={"PREFECT_API_URL": prefect_server, "ROLLOUT_PROJECT": str(PROJECT)}, stdout=output,
        )  # fmt: skip
    short = {"iterations": 1, "prompts_per_iteration": 32, "epochs": 1, "minibatch_size": 16}
    config = parse_config({**small_nightly, "ppo": {**small_nightly["ppo"], **short}}, NightlyConfig)
    # The scheduled runs of the real nightly deployment are hours away; this one is started now.
    overrides = json.dumps({"run.name": "retried", "numerics": "portable"})
    prefect(
        "deployment", "run", "nightly/nightly",
        "--param", f"config={json.dumps(config.model_dump(mode='json'))}",
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

    def both_tries_are_on_record() -> bool:
        states = task_states(prefect_server, run.id)
        return "Cached" in states.get("evaluate", ()) and "Completed" in states.get("sft_update", ())

    wait_for(both_tries_are_on_record, "stages of both tries on record, which are told by events")
    lineage = lineage_of(objects(), snapshots_of("ppo")[0].id)
    assert lineage is not None
    assert (lineage.arithmetic["numerics"], lineage.arithmetic["instructions"]) == ("portable", "AVX2")


@pytest.mark.parametrize("width", [200, 80, 50])
def test_how_to_start_a_worker_is_not_said_for_each_deployment(width: int):
    """What `prefect deploy` prints of two deployments, wrapped as rich does it."""
    hint = (
        "To execute flow runs from these deployments, start a worker in a separate terminal that pulls work from the "
        "'cpu' work pool:"
    )
    command = "\t$ prefect worker start --pool 'cpu'"
    rest = ["Deployment 'x/x' successfully created with id '1'.", "", "To schedule a run for this deployment, use ..."]
    lines = [rest[0], rest[1], *textwrap.wrap(hint, width), "", command, rest[1], rest[2]]
    shown = [line for line, is_hint in pools.marked([*lines, *lines]) if not is_hint]
    assert shown == [rest[0], "", "", rest[2]] * 2
    assert not any(is_hint for _, is_hint in pools.marked(rest))


def test_a_schedule_whose_data_is_missing_is_told_in_one_line(tmp_path: Path):
    clone(tmp_path / "clone")
    [line] = unready_schedules(tmp_path / "clone")
    assert (
        line.startswith("deployment nightly: its scheduled runs will fail until this is fixed: ") and "\n" not in line
    )
    assert "data/example/sft.jsonl" in line and "data/example/model" in line


TICK = {
    "name": "tick",
    "entrypoint": "tick.py:tick",
    "work_pool": {"name": "cpu"},
    "schedules": [{"interval": 20}],
}
LONG = {"name": "long", "entrypoint": "tick.py:long", "work_pool": {"name": "cpu"}}
TICK_FLOW = """
import os, time
from pathlib import Path
from prefect import flow

@flow
def tick():
    return 1

@flow
def long():
    tries = Path(os.environ["ROLLOUT_PROJECT"], "tries")
    with tries.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if len(tries.read_text().split()) % 2 == 1:  # each run has two
        time.sleep(600)
"""


def test_two_first_commands_started_together_make_the_example_once(start_process, tmp_path):
    made = [start_process(str(PROJECT / "examples" / "make_tiny.py"), cwd=tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in made]
    assert [process.returncode for process in made] == [0, 0], said
    assert sorted("already made" in words for words in said) == [False, True], said


@dataclass
class Serving:
    """`make serve` in a fresh clone."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path
    api: str

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
        return wait_for(condition, what, process=self.process, seconds=seconds)

    def ticks(self) -> int:
        return len(runs_of(self.api, "tick", "COMPLETED"))

    def end(self) -> None:
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(120)
        assert psutil.wait_procs(started, timeout=120)[1] == [], "nothing is left of it"


@pytest.fixture
def serving(start_process, server_logs, tmp_path, monkeypatch) -> Serving:
    for name in ("ROLLOUT_STORAGE", "ROLLOUT_DATABASE", "ROLLOUT_CACHE"):
        monkeypatch.delenv(name)
    clone(folder := tmp_path / "clone")
    monkeypatch.chdir(folder)
    deployments = prefect_yaml()
    scheduled = [item for item in deployments["deployments"] if item["name"] == "nightly"]
    deployments["deployments"] = [*scheduled, TICK, LONG]  # another test deploys all of them
    Path("prefect.yaml").write_text(yaml.safe_dump(deployments))
    Path("tick.py").write_text(TICK_FLOW)
    server_logs.watch(folder / "data" / "prefect" / LOG)
    log = server_logs.watch(tmp_path / "serve.log")
    *preparations, last = served_by_make()
    for command in preparations:
        subprocess.run([sys.executable, *command], check=True, env=in_clone(), capture_output=True)
    with log.open("w") as output:
        process = start_process(*last, cwd=folder, env=in_clone(), stdout=output)
    wait_for(lambda: "Prefect UI" in log.read_text() or process.poll() is not None, "make serve", seconds=400)
    assert process.poll() is None and "its scheduled runs fail" not in log.read_text(), log.read_text()
    api = re.search(r"PREFECT_API_URL=(\S+)", log.read_text())
    assert api is not None
    return Serving(process, folder, log, api[1])


@pytest.mark.server
@pytest.mark.timeout(1200)
def test_in_a_fresh_clone_make_serve_has_runs_start_and_complete_by_their_schedules_alone(serving: Serving):
    serving.wait(lambda: serving.ticks() >= 2, "two scheduled runs", seconds=400)
    assert all(run.auto_scheduled for run in runs_of(serving.api, "tick", "COMPLETED"))
    scheduled = runs_of(serving.api, "nightly", "SCHEDULED")
    assert scheduled and all(run.auto_scheduled for run in scheduled)
    serving.end()


@pytest.mark.campaign
@pytest.mark.server
@pytest.mark.timeout(1200)
def test_runs_of_make_serve_outlive_its_worker_and_its_server(serving: Serving, server_logs):
    api, log = serving.api, serving.log
    server_logs.expect(
        r"(?i)EventsWorker|FlowRun\w+Observer|connect|websocket|ReadError|RemoteProtocolError",
        "the worker misses the server that the test kills",
    )
    run_id, tries = start_run(api, "long"), Path("tries")
    serving.wait(lambda: tries.exists() and tries.read_text(), "the run that its worker leaves behind")
    children = psutil.Process(serving.process.pid).children()
    [worker] = [child for child in children if "deployments.worker" in child.cmdline()]
    worker.kill()
    serving.wait(lambda: runs_of(api, "long", "COMPLETED"), "the run's second try")
    [run] = runs_of(api, "long", "COMPLETED")
    assert (str(run.id), run.run_count) == (run_id, 2)
    assert not psutil.pid_exists(int(tries.read_text().split()[0]))
    assert f"flow run {run_id} is tried again, as its worker died" in log.read_text()

    crashing = start_run(api, "long")
    serving.wait(lambda: len(tries.read_text().split()) == 3, "a run under way", seconds=120)
    [server] = [process for process in psutil.process_iter() if is_server_of(process, serving.folder)]
    server.kill()
    serving.wait(lambda: log.read_text().count("Prefect server ready") == 2, "another server", seconds=120)
    # The server knows nothing of what it follows on, and its automation waits; the supervisor does not.
    server_logs.expect("exited with status code: -9", "the test kills a run")
    os.kill(int(tries.read_text().split()[-1]), signal.SIGKILL)
    serving.wait(lambda: "has lost its server" in log.read_text(), "another worker")
    serving.wait(lambda: len(runs_of(api, "long", "COMPLETED")) == 2, "its second try")
    assert {str(run.id): run.run_count for run in runs_of(api, "long", "COMPLETED")} == {run_id: 2, crashing: 2}
    ticks = serving.ticks()
    serving.wait(lambda: serving.ticks() > ticks, "a scheduled run")
    serving.end()


def clone(folder: Path) -> None:
    """What git has of this project, as it is now, in ``folder``."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True, text=True)
    for name in listed.stdout.rstrip("\0").split("\0"):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)


def in_clone() -> dict[str, str]:
    """Environment in which the clone's own code runs, as if nobody had set anything."""
    return {**os.environ, "PYTHONPATH": os.getcwd(), "PREFECT_API_URL": "", "PREFECT_HOME": ""}


def served_by_make() -> list[list[str]]:
    """Arguments of the Python commands that `make serve` runs after the installation."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe = subprocess.run(
        ["make", "--dry-run", "serve", f"PORT={port}"], check=True, capture_output=True, text=True
    ).stdout
    lines = [line.split() for line in recipe.splitlines()]
    return [words[1:] for words in lines if words[0] == ".venv/bin/python"]


def start_run(api: str, deployment: str) -> str:
    """Id of a run that the server is to start now."""

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{api}/{path}", data, headers={"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=30))

    found = ask(f"deployments/name/{deployment}/{deployment}")
    return ask(f"deployments/{found['id']}/create_flow_run", {})["id"]


def is_server_of(process: psutil.Process, folder: Path) -> bool:
    """Whether it is the Prefect server of a folder."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "tasks.runtime.server_process" in command and str(folder / "data" / "prefect") in command


def runs_of(api: str, deployment: str, state: str) -> list[Any]:
    """Runs of a deployment in a type of state."""
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterName,
        FlowRunFilter,
        FlowRunFilterState as OfState,
        FlowRunFilterStateType as OfType,
    )
    from prefect.client.schemas.objects import StateType

    async def find() -> list[Any]:
        async with PrefectClient(api=api) as client:
            return await client.read_flow_runs(
                deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[deployment])),
                flow_run_filter=FlowRunFilter(state=OfState(type=OfType(any_=[StateType(state)]))),
            )

    return asyncio.run(find())


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
        states.setdefault(task_run.name.partition(" ")[0], set()).add(task_run.state_name)
    return states
