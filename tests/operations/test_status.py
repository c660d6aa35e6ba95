"""`rollout doctor status`: what it tells of servers, workers and runs, that it starts nothing, and when it exits 1."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, StateType

from deployments.probes import Database, Server, Storage, look_for_silent
from deployments.status import (
    Deployment,
    Pool,
    Run,
    Status,
    Worker,
    _deployment_row,
    _pool_row,
    _problems,
    _tells,
    _with_silence,
    problems_of_workers,
)
from rollout_core.objects import ObjectStore
from rollout_core.runs.run_records import RunDetail, RunHead, RunRecords
from rollout_core.store import SqlLightningStore
from rollout_core.store.types import EnqueueRolloutRequest
from tests.flows.conftest import wait_for
from tests.operations.own_server import PROJECT, OwnServer, own_server, rollout, stranger
from tests.support.server_logs import ServerLogs

SECRET = "s3cret-of-the-database"
NIGHTLY = {"cron": "0 2 * * *", "timezone": "UTC"}
FLOW = """
from prefect import flow

@flow
def {name}():
    {body}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[OwnServer]:
    with own_server(tmp_path_factory.mktemp("status"), prefect_database) as started:
        yield started


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore.from_url(os.environ["ROLLOUT_STORAGE"])


def report(server: OwnServer, **environment: str) -> dict[str, Any]:
    """The status as JSON, whose problems and exit code say the same."""
    done = server.rollout("doctor", "status", "--json", **environment)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0), done.stdout
    return found


def deployment(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in found["deployments"] if item["name"] == f"{name}/{name}")


def dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_without_a_server_it_says_so_and_starts_none(command: str, tmp_path: Path):
    done = rollout(tmp_path, "ops", command, PREFECT_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    assert "no Prefect server: PREFECT_API_URL is not set" in done.stdout
    assert not (tmp_path / "data").exists(), "nothing was made where a server would be"
    assert "starting" not in done.stderr and "Traceback" not in done.stderr


HOLDER = """
import sys
from pathlib import Path
from tasks.runtime.prefect_server import PREFECT_HOME, prefect_server
with prefect_server(PREFECT_HOME) as url:
    print("serving", url, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.server
def test_the_folders_server_is_used_while_it_runs(
    start_process: Callable[..., subprocess.Popen[str]], tmp_path: Path, server_logs: ServerLogs
):
    server_logs.watch(tmp_path / "data" / "prefect" / "server.log")
    environment = {"PREFECT_API_URL": "", "PYTHONPATH": str(PROJECT)}
    holder = start_process("-c", HOLDER, cwd=tmp_path, env=environment, stdin=subprocess.PIPE)
    assert holder.stdout is not None
    url = next(line.split()[1] for line in holder.stdout if line.startswith("serving"))
    done = rollout(tmp_path, "doctor", "status", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, [])
    assert found["server"]["address"] == url and found["server"]["version"]
    installed = rollout(tmp_path, "ops", "install")
    assert installed.returncode == 0 and installed.stdout.count("create ") == 2, installed.stdout + installed.stderr
    doctor = json.loads(rollout(tmp_path, "doctor", "--json").stdout)
    checks = {check["name"]: check["level"] for check in doctor["checks"]}
    assert checks["automations"] == "ok", "of the folder's server"
    holder.communicate("leave\n", timeout=120)
    after = rollout(tmp_path, "doctor", "status")
    assert after.returncode == 1 and "no Prefect server" in after.stdout, "the lock file that it left is no server"


@pytest.mark.server
def test_a_server_with_nothing_to_do_is_well(server: OwnServer):
    done = server.rollout("doctor", "status")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is well"), done.stdout + done.stderr
    assert f"server    {server.api}" in done.stdout


@pytest.mark.server
def test_a_schedule_without_a_worker_needs_a_person_and_its_runs_become_late(server: OwnServer):
    schedule = {"interval": 600, "anchor_date": "2020-01-01T00:00:00Z"}
    with server.deployed("unworked", schedule) as made:
        found = report(server)
        assert any("unworked/unworked need, has no worker online" in line for line in found["problems"])
        wait_for(lambda: deployment(report(server), "unworked")["next_run"], "a run of the schedule")
        # Its runs are minutes away; this one has waited for an hour.
        due = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2020-01-01T00:00:00Z"}}
        run = server.ask(f"deployments/{made}/create_flow_run", {"name": "waits", "state": due})
        done = server.rollout("doctor", "status")
        assert done.returncode == 1
        problems = [line for line in done.stdout.splitlines() if line.startswith("! ")]
        [late] = [line for line in problems if "late: run 'waits' of unworked/unworked" in line]
        assert "was due 01-01 00:00:00" in late
        assert [item["id"] for item in report(server)["late"]] == [run["id"]]


@pytest.mark.server
def test_a_run_of_a_schedule_that_nobody_takes_is_late(server: OwnServer):
    with server.deployed("forgotten", {"interval": 5}):
        forgotten = {
            "deployments": {"name": {"any_": ["forgotten"]}},
            "flow_runs": {"state": {"name": {"any_": ["Late"]}}},
        }
        wait_for(lambda: server.ask("flow_runs/filter", forgotten), "a run that the server calls late", seconds=240)
        # Only what has been due for a minute is told of.
        found = wait_for(lambda: with_late_runs(server), "a late run", seconds=240)
    assert {run["of"] for run in found["late"]} == {"forgotten/forgotten"}
    assert all(run["auto_scheduled"] for run in found["late"])
    assert any(line.startswith("late: run ") and "is Late" in line for line in found["problems"])


def with_late_runs(server: OwnServer) -> dict[str, Any] | None:
    """A status that lists late runs. A look takes seconds of a processor, so it is not taken again at once."""
    found = report(server)
    if found["late"]:
        return found
    time.sleep(10)
    return None


@pytest.mark.server
@pytest.mark.timeout(900)
def test_workers_and_failed_runs_are_told_until_the_next_run_completes(
    server: OwnServer, start_process: Callable[..., subprocess.Popen[str]], server_logs: ServerLogs, tmp_path: Path
):
    server_logs.expect(SECRET, "the flow fails as the test wants it")
    server_logs.expect("Finished in state Failed|encountered an exception|exited with status code", "as above")
    code = tmp_path / "worked.py"
    body = f'raise ValueError("postgresql://me:{SECRET}@db/x is away")'
    code.write_text(FLOW.format(name="worked", body=body))
    fields = {"path": str(tmp_path), "entrypoint": "worked.py:worked"}
    log = server_logs.watch(tmp_path / "worker.log")
    with server.deployed("worked", {"interval": 10}, **fields), log.open("w") as output:
        worker = start_process(
            # One run at a time: on a busy machine a run takes longer than what lies between two.
            "-m", "prefect", "worker", "start", "--pool", "worked", "--name", "night-owl", "--limit", "1",
            env={**server.environment, "PREFECT_WORKER_HEARTBEAT_SECONDS": "2", "PREFECT_WORKER_QUERY_SECONDS": "1"},
            stdout=output,
        )  # fmt: skip

        def judged(state: str) -> dict[str, Any] | None:
            found = report(server)
            if found["server"]["trouble"] is not None:
                return None
            last = deployment(found, "worked")["telling_run"]
            return found if last is not None and last["state"] == state else None

        failed = wait_for(lambda: judged("Failed"), "a failed run", process=worker, seconds=240)
        [seen] = next(pool for pool in failed["pools"] if pool["name"] == "worked")["workers"]
        assert (seen["name"], seen["online"]) == ("night-owl", True)
        [problem] = [line for line in failed["problems"] if line.startswith("worked/worked: its last scheduled run")]
        assert "Failed" in problem and "postgresql://me:***@db/x is away" in problem
        assert SECRET not in json.dumps(failed) and SECRET not in server.rollout("doctor", "status").stdout
        assert "worked/worked" in {run["of"] for run in failed["failed"]}

        code.write_text(FLOW.format(name="worked", body="return 1"))
        well = wait_for(lambda: judged("Completed"), "a completed run", process=worker, seconds=240)
        assert not [line for line in well["problems"] if "last scheduled run" in line]
        assert well["failed"], "they are still listed"

        worker.kill()
        gone = "has no worker online"
        wait_for(lambda: any(gone in line for line in report(server)["problems"]), "the worker's end", seconds=240)


@pytest.mark.server
def test_what_is_away_is_named_without_its_secrets(server: OwnServer, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    away = {
        "ROLLOUT_STORAGE": f"file://{tmp_path}/file/objects",
        "ROLLOUT_DATABASE": f"postgresql://me:{SECRET}@127.0.0.1:{dead_port()}/rollout",
    }
    found = report(server, **away)
    assert [line.split()[0] for line in found["problems"]] == ["storage", "database"]
    assert not found["storage"]["readable"] and not found["database"]["reachable"]
    for arguments in ([], ["--json"], ["--debug"]):
        done = server.rollout("doctor", "status", *arguments, **away)
        assert done.returncode == 1 and SECRET not in done.stdout + done.stderr
        assert "postgresql://me:***@127.0.0.1" in done.stdout
        assert ("Traceback" in done.stderr) == (arguments == ["--debug"])


@pytest.mark.server
def test_blocks_of_the_server_are_looked_at_as_addresses_are(server: OwnServer, tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'block.db'}"
    saving = (
        "from blocks import ContentAddressedStorage as C, RolloutDatabase as D;"
        f"C(url='file://{tmp_path}/there').save('kept'); D(url={url!r}).save('kept')"
    )
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(PROJECT)}
    subprocess.run([sys.executable, "-c", saving], check=True, env=environment, capture_output=True)
    blocks = {
        "ROLLOUT_STORAGE": "block:content-addressed-storage/kept",
        "ROLLOUT_DATABASE": "block:rollout-database/kept",
    }
    found = report(server, **blocks)
    assert found["problems"] == []
    assert found["storage"]["address"] == f"file://{tmp_path}/there" and found["database"]["address"] == url
    blocks["ROLLOUT_STORAGE"] = "block:content-addressed-storage/lost"
    [problem] = report(server, **blocks)["problems"]
    assert problem.startswith("storage") and "names no block" in problem


def test_a_password_in_the_address_of_the_api_is_refused_and_not_shown(tmp_path: Path):
    api = f"http://me:{SECRET}@127.0.0.1:{dead_port()}/api"
    done = rollout(tmp_path, "doctor", "status", PREFECT_API_URL=api)
    assert done.returncode == 1 and "PREFECT_API_AUTH_STRING" in done.stdout
    assert SECRET not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_server_that_lets_nobody_in_and_one_that_is_ill_are_told_apart(tmp_path: Path):
    for code, hint in ((401, "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY"), (500, "answers 500")):
        with stranger(code) as address:
            done = rollout(tmp_path, "doctor", "status", PREFECT_API_URL=address)
        [problem] = [line for line in done.stdout.splitlines() if line.startswith("! ")]
        assert f"answers {code} to /api/admin/version" in problem and hint in problem
        assert done.returncode == 1 and "Traceback" not in done.stderr


def test_only_runs_that_say_how_a_schedule_fares_are_judged():
    def ended(kind: str, name: str | None = None, scheduled: bool = True) -> FlowRun:
        return FlowRun(
            flow_id=uuid4(), state_type=StateType(kind), state_name=name or kind.title(), auto_scheduled=scheduled
        )

    assert all(_tells(run) for run in (ended("FAILED"), ended("FAILED", "TimedOut"), ended("CRASHED")))
    assert _tells(ended("COMPLETED")) and _tells(ended("COMPLETED", scheduled=False)), "a person has seen to it"
    assert not _tells(ended("FAILED", scheduled=False)), "a person tried it"
    assert not _tells(ended("COMPLETED", "Skipped")), "it left its work to another"
    assert not _tells(ended("CANCELLED"))


def test_a_pool_without_a_worker_or_that_is_missing_comes_with_a_command_that_helps():
    def told(name: str, kind: str | None) -> str:
        """Of a pool of a type, or of none, that a schedule counts on."""
        idle = {"paused": False, "needs_worker": True, "concurrency_limit": None, "active_slots": None}
        pools = [] if kind is None else [Pool(name=name, type=kind, **idle, workers=[], num_gone=0)]
        found = Status.model_construct(
            pools=pools, deployments=[Deployment.model_construct(name="a/b", pool=name, schedules=["every 5 s"])]
        )
        [problem] = problems_of_workers(found)
        return problem

    assert told("gpu", "process").endswith("has no worker online; start one: rollout ops worker --pool gpu")
    assert told("gpu", "kubernetes").endswith("has no worker online; start one: prefect worker start --pool gpu")
    assert told("gpu", None).endswith("does not exist; run python -m deployments.pools")
    assert "does not exist; create it: prefect work-pool create h100 --type" in told("h100", None)


def test_a_pool_without_a_worker_is_not_at_work():
    idle = {"type": "process", "concurrency_limit": None, "active_slots": None, "num_gone": 0}
    online = Worker(name="here-cpu", online=True, last_heartbeat=None, age_seconds=1.0)

    def state(*workers: Worker, paused: bool = False, needs_worker: bool = True) -> str:
        return _pool_row(Pool(name="cpu", paused=paused, needs_worker=needs_worker, workers=list(workers), **idle))[2]

    assert state() == state(online.model_copy(update={"online": False})) == "no worker online"
    assert state(online) == state(needs_worker=False) == "at work"
    assert state(online, paused=True) == "paused"


def test_a_run_that_is_not_heard_of_is_a_problem_and_says_since_when(objects: ObjectStore):
    now = datetime.now(UTC)
    of = {"of": "nightly/nightly", "state": "Running", "type": StateType.RUNNING, "message": "", "auto_scheduled": True}
    times = {"due": None, "start": now, "end": None, "since": now, "seconds": 0.0}
    lost, well = (Run(id=uuid4(), name=name, **of, **times) for name in ("lost", "well"))
    records = RunRecords(objects)
    for run in (lost, well):
        head = RunHead(id=str(run.id), name=run.name, flow="nightly", state="running", began=now, written=now)
        records.write(head, RunDetail(config={}))
    folder = Path(objects.url.removeprefix("file://")) / "refs"
    [ref] = [path for path in folder.rglob("*") if str(lost.id) in path.name]
    os.utime(ref, (time.time() - 420, time.time() - 420))
    silent = look_for_silent([str(lost.id), str(well.id), str(uuid4())])
    assert silent.keys() == {str(lost.id)}
    nights = Deployment(
        id=uuid4(), name="nightly/nightly", pool="cpu", schedules=[], num_paused=0, concurrency_limit=1, next_run=None,
        should_have_next=False, last_run=None, telling_run=None, running=[lost, well],
    )  # fmt: skip
    nights = _with_silence(nights, silent)
    assert (
        "lost since" in _deployment_row(nights, now)[4]
        and "last heard of 7 min ago, well" in _deployment_row(nights, now)[4]
    )
    found = Status.model_construct(
        server=Server(source="x"), storage=Storage(address="x"), database=Database(address="x"), pools=[], late=[],
        deployments=[nights],
    )  # fmt: skip
    [problem] = _problems(found)
    assert problem.startswith("nightly/nightly: run 'lost' was last heard of 7 min ago; is its machine there?")


def test_it_ends_where_nothing_ever_answers(tmp_path: Path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        place = f"127.0.0.1:{deaf.getsockname()[1]}"
        done = rollout(
            tmp_path,
            "ops",
            "status",
            PREFECT_API_URL=f"http://{place}/api",
            ROLLOUT_STORAGE="s3://bucket/objects",
            ROLLOUT_DATABASE=f"postgresql://me:{SECRET}@{place}/rollout",
            AWS_ENDPOINT_URL=f"http://{place}",
            AWS_ACCESS_KEY_ID="me",
            AWS_SECRET_ACCESS_KEY=SECRET,
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("! ")] == [
        "the",
        "storage",
        "database",
    ]
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.server
def test_rollouts_are_counted_by_status(server: OwnServer, tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'counted.db'}"

    async def fill() -> None:
        store = SqlLightningStore.from_url(url)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
        await store.dequeue_many_rollouts(limit=1)
        await store.close()

    asyncio.run(fill())
    counts = report(server, ROLLOUT_DATABASE=url)["database"]["rollouts"]
    assert {name: count for name, count in counts.items() if count} == {"queuing": 2, "preparing": 1}
    text = server.rollout("doctor", "status", ROLLOUT_DATABASE=url).stdout
    assert "rollouts: 2 queuing, 1 preparing" in text
    new = tmp_path / "new.db"
    assert report(server, ROLLOUT_DATABASE=f"sqlite:///{new}")["database"]["rollouts"] is None
    assert not new.exists(), "looking creates nothing"
