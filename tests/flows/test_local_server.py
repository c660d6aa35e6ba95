"""Whose Prefect server a command talks to, and how long that of a folder lives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from rollout_core.base.errors import RolloutError
from rollout_core.base.locks import exclusive
from rollout_core.base.processes import ProcessName
from tasks.runtime import server_process
from tasks.runtime.prefect_server import prefect_server
from tasks.runtime.server_process import LOCK, TriedAgain, leave_out_prefect_dask, update_automations_without_waiting
from tasks.runtime.server_tables import DATABASE
from tests.flows.conftest import wait_for
from tests.support import forked
from tests.support.server_logs import ServerLogs

PROJECT = Path(__file__).resolve().parents[2]


class Healthy(BaseHTTPRequestHandler):
    """Answers like the health check of somebody's Prefect server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """Port of another server on this machine."""
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_taken_port_is_refused_before_anything_starts(
    foreign_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("this must start nothing"))
    with (
        pytest.raises(RolloutError, match=f"port {foreign_port} is taken.*PREFECT_API_URL"),
        prefect_server(tmp_path, port=foreign_port),
    ):
        pytest.fail("no server of ours")


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/api", "http://no-such-host.invalid/api", "127.0.0.1:4200/api"])
def test_a_configured_server_that_cannot_be_reached_is_one_clear_line(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_API_URL", address)
    with pytest.raises(RolloutError, match=r"PREFECT_API_URL=.* cannot be reached"), prefect_server(tmp_path):
        pytest.fail("nothing to run against")


def test_a_configured_server_is_used(foreign_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    address = f"http://127.0.0.1:{foreign_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", address)
    with prefect_server(tmp_path) as found:
        assert found == address


def test_an_address_that_a_dead_server_left_is_not_used_whoever_answers_there_now(
    foreign_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    left = {"process": str(ProcessName.of_this_process()), "url": f"http://127.0.0.1:{foreign_port}/api"}
    (tmp_path / LOCK).write_text(json.dumps(left))

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a server of its own is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RuntimeError, match="a server of its own"), prefect_server(tmp_path):
        pytest.fail("not our server")


def test_a_folder_whose_server_runs_on_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / LOCK).write_text(json.dumps({"process": "another:1:2", "url": "http://127.0.0.1:9/api"}))
    with (
        exclusive(tmp_path / LOCK),
        pytest.raises(RolloutError, match="runs on another machine or in another container; set PREFECT_API_URL"),
        prefect_server(tmp_path),
    ):
        pytest.fail("no server here")


COMMAND = """
import os, sys
from pathlib import Path
from tasks.runtime.prefect_server import prefect_server
def meanwhile():
    print("meanwhile", os.environ["PREFECT_API_URL"], flush=True)
say = lambda line: print("said", line, flush=True)
with prefect_server(Path("prefect"), say=say, meanwhile=meanwhile) as url:
    assert os.environ["PREFECT_API_URL"] == url
    print(url, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(120)
def test_a_changed_automation_waits_for_the_others_and_the_server_does_not(monkeypatch: pytest.MonkeyPatch):
    from prefect.server.events import triggers
    from prefect.server.events.models import automations

    # From 3.8.6 on Prefect starts a task there itself.
    assert not hasattr(automations, "create_task"), "update_automations_without_waiting is needed no more"
    monkeypatch.setattr(automations, "run_coro_as_sync", automations.run_coro_as_sync)  # as it was, afterwards
    update_automations_without_waiting()
    order = []

    async def take_in(name: str) -> None:
        async with triggers._automations_lock():
            order.append(name)

    async def server() -> None:
        async with triggers._automations_lock():
            automations.run_coro_as_sync(take_in("changed"))
            await asyncio.sleep(0.01)
            order.append("looked through")
        while len(order) < 2:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(triggers, "__automations_lock", None)  # of the next loop that asks for it
    asyncio.run(server())
    assert order == ["looked through", "changed"]
    automations.run_coro_as_sync(take_in("without a loop"))
    assert order[2:] == ["without a loop"]


BEFORE = """
import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4
from tasks.runtime.server_process import know_events_of_before
from prefect.server.database import provide_database_interface
from prefect.server.events.ordering import get_triggers_causal_ordering
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.events.storage.database import write_events

began = datetime.now(UTC)
resource = {"prefect.resource.id": "prefect.flow-run.1"}

def event(received, **more):
    return ReceivedEvent(id=uuid4(), occurred=began - timedelta(hours=1), received=received, event="e",
                         resource=resource, **more)

async def main():
    await provide_database_interface().create_db()
    before, after = event(began - timedelta(minutes=1)), event(began + timedelta(minutes=1))
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        await write_events(session, [before, after])
    await confirm(before)
    know_events_of_before(began)
    await confirm(before)
    await confirm(after)

async def confirm(follows):
    try:
        ordering = get_triggers_causal_ordering()
        async with ordering.preceding_event_confirmed(None, event(datetime.now(UTC), follows=follows.id)):
            print("handled")
    except Exception as error:
        print(type(error).__name__)

asyncio.run(main())
"""
"""What Prefect does, and then what the folder's server does with an event of before and with one of its own time."""

FIRST_STATES = """
import asyncio
from datetime import UTC, datetime
from uuid import uuid4
from prefect.server import models
from prefect.server.database import provide_database_interface
from prefect.server.orchestration import instrumentation_policies
from prefect.server.schemas.core import Flow, FlowRun
from prefect.server.schemas.states import Pending, Scheduled
from tasks.runtime.server_process import order_events_of_schedules

async def main():
    await provide_database_interface().create_db()
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        flow = await models.flows.create_flow(session, Flow(name="nightly"))
        runs = [
            await models.flow_runs.create_flow_run(session, FlowRun(flow_id=flow.id, auto_scheduled=of_schedule))
            for of_schedule in (True, False)
        ]
        await follows(session, runs)
        order_events_of_schedules()
        await follows(session, runs)

async def follows(session, runs):
    for run in runs:
        event = await instrumentation_policies.flow_run_state_change_event(
            session=session, occurred=datetime.now(UTC), flow_run=run, initial_state_id=uuid4(),
            initial_state=Scheduled(), validated_state_id=uuid4(), validated_state=Pending(),
        )
        print(event.follows is not None)

asyncio.run(main())
"""
"""Whether the event of a second state follows one, of a run by schedule and by hand: by Prefect, by the own server."""


def test_a_run_of_a_schedule_has_a_first_event_that_follows_none(tmp_path: Path, prefect_database: Path):
    """Prefect makes no event of its first state, which would be waited for in vain."""
    (tmp_path / DATABASE).write_bytes(prefect_database.read_bytes())
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    done = forked.run([sys.executable, "-c", FIRST_STATES], env=environment, cwd=tmp_path, timeout=300)
    assert done.stdout == "True\nTrue\nFalse\nTrue\n", done.stdout + done.stderr


@pytest.mark.parametrize("kept_in", ["memory", "db"])
def test_events_that_the_server_before_received_hold_no_others_back(
    kept_in: str, tmp_path: Path, prefect_database: Path
):
    (tmp_path / DATABASE).write_bytes(prefect_database.read_bytes())
    environment = {
        **os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT),
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": f"prefect.server.events.ordering.{kept_in}",
    }  # fmt: skip
    done = forked.run([sys.executable, "-c", BEFORE], env=environment, cwd=tmp_path, timeout=300)
    assert done.stdout == "EventArrivedEarly\nhandled\nEventArrivedEarly\n", done.stdout + done.stderr


def test_the_server_imports_every_package_with_blocks_but_dasks(monkeypatch: pytest.MonkeyPatch):
    collections = import_module("prefect._internal.plugins.collections")
    monkeypatch.setattr(collections, "entry_points", collections.entry_points)  # as it was, afterwards
    assert collections.entry_points is entry_points, "the name by which Prefect finds them"
    leave_out_prefect_dask()
    all_of_them = {found.value for found in entry_points(group="prefect.collections")}
    assert {found.value for found in collections.entry_points(group="prefect.collections")} == all_of_them - {
        "prefect_dask"
    }
    assert "prefect_dask" in all_of_them


class Commands:
    """Commands in one folder that use its server until they are told to leave."""

    def __init__(self, start_process: Any, folder: Path) -> None:
        self._start_process = start_process
        self._folder = folder

    def start(self) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": str(PROJECT), "PREFECT_API_URL": ""}
        return self._start_process("-c", COMMAND, cwd=self._folder, env=environment, stdin=subprocess.PIPE)

    @staticmethod
    def read(command: subprocess.Popen[str], start: str) -> str:
        """The command's next line that begins so."""
        assert command.stdout is not None
        seen = []
        for line in command.stdout:
            seen.append(line)
            if line.startswith(start):
                return line.strip()
        raise AssertionError("".join(seen))

    @property
    def server(self) -> ProcessName:
        """The process of the folder's server."""
        found = ProcessName.parse(json.loads((self._folder / "prefect" / LOCK).read_text())["process"])
        assert found is not None
        return found

    def kill_all_servers(self) -> None:
        """Those that a failed test leaves."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                if "tasks.runtime.server_process" in command and str(self._folder / "prefect") in command:
                    process.kill()


@pytest.fixture
def commands(start_process: Any, tmp_path: Path, server_logs: ServerLogs) -> Iterator[Commands]:
    started = Commands(start_process, tmp_path)
    server_logs.watch(tmp_path / "prefect" / "server.log")
    yield started
    started.kill_all_servers()


def answers(url: str) -> bool:
    return urllib.request.urlopen(f"{url}/health", timeout=120).status == 200


@pytest.mark.server
def test_commands_of_one_folder_share_a_server_that_lives_as_long_as_the_last_of_them(commands: Commands):
    first, second = commands.start(), commands.start()
    one, other = commands.read(first, "said"), commands.read(second, "said")
    if "waiting" in one:
        first, second, one, other = second, first, other, one
    assert one == "said starting a Prefect server ..." and other == "said waiting for the Prefect server to start ..."
    # Whoever starts it may be killed before it answers: it belongs to nobody.
    wait_for(lambda: server_began(commands), "the server's first word")
    server = commands.server
    assert psutil.Process(server.pid).ppid() != first.pid, "who ends its children leaves it alone"
    address = commands.read(first, "meanwhile").removeprefix("meanwhile ")
    first.kill()
    url = commands.read(second, "http://")
    assert commands.server == server and answers(url)
    assert address == url, "what is imported while it starts finds it"
    third = commands.start()
    assert commands.read(third, "http://") == url
    second.kill()
    second.wait()
    time.sleep(2)
    assert not server.has_ended() and answers(url), "one still uses it"
    third.communicate("leave\n", timeout=120)
    assert server.has_ended(), "a command leaves nothing behind"


def server_began(commands: Commands) -> bool:
    with suppress(OSError, ValueError):
        return not commands.server.has_ended()
    return False


@pytest.mark.server
def test_the_next_command_gets_another_server_when_one_was_killed_and_none_outlives_killed_commands(commands: Commands):
    command = commands.start()
    url = commands.read(command, "http://")
    server = commands.server
    os.kill(server.pid, signal.SIGKILL)
    later = commands.start()
    assert commands.read(later, "http://") != url and commands.server != server
    server = commands.server
    for process in (command, later):
        process.kill()
    wait_for(server.has_ended, "the end of a server without users")


def test_a_log_that_grew_goes_on_in_another_file_without_losing_a_line(tmp_path: Path):
    code = """
import sys, pathlib
from tasks.runtime import server_process
server_process.LOG_BYTES = 1000
file = pathlib.Path(sys.argv[1])
for number in range(300):
    print(f"line {number}", flush=True)
    print(f"error {number}", file=sys.stderr, flush=True)
    server_process.rotate(file)
"""
    file = tmp_path / "server.log"
    with file.open("ab") as output:
        subprocess.run([sys.executable, "-c", code, str(file)], stdout=output, stderr=output, check=True, cwd=PROJECT)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"server.log", "server.log.1"} and sizes["server.log.1"] < 1100
    last = file.with_name("server.log.1").read_text().splitlines() + file.read_text().splitlines()
    expected = [f"{kind} {number}" for number in range(300) for kind in ("line", "error")]
    assert last == expected[-len(last) :] and last[0] != expected[0]


def test_tasks_of_the_server_that_are_tried_again_are_counted_in_a_line(monkeypatch, caplog):
    log = logging.getLogger("docket.dependencies")
    told = TriedAgain()
    log.addFilter(told)
    try:
        for error in (*[OSError("(sqlite3.OperationalError) database is locked")] * 3, OSError("no such table")):
            log.error("tried again", exc_info=error)
        monkeypatch.setattr(server_process, "SAY_SECONDS", 0.0)
        log.error("tried again", exc_info=OSError("database is locked"))
    finally:
        log.removeFilter(told)
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    line = "the database was locked; tasks of the server that were tried again since the last such line: {}"
    assert found == [("WARNING", line.format(1)), ("ERROR", "tried again"), ("WARNING", line.format(3))]
    assert [record.exc_info is None for record in caplog.records] == [True, False, True]
