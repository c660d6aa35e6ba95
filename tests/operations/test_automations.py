"""What `rollout ops install` promises, seen on real runs that are killed: tried again, given up, told."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.supervision import MAX_TRIES
from tests.flows.conftest import wait_for
from tests.operations.conftest import Machine, end

FLOWS = """
import os, signal, time
from pathlib import Path
from prefect import flow, suspend_flow_run
from prefect.runtime import flow_run
from prefect.states import Completed
from tasks.runtime.scheduled_runs import SKIPPED

def tries():
    file = Path(str(flow_run.id))
    with file.open("a") as lines:
        lines.write("x")
    return len(file.read_text())

@flow
def dies(times: int):
    if tries() <= times:
        os.kill(os.getpid(), signal.SIGKILL)

@flow
def fails():
    raise ValueError('said "no"')

@flow
def skips():
    return Completed(name=SKIPPED)

@flow
def waits_for_a_person():
    time.sleep(5)  # the first heartbeat is on its way
    suspend_flow_run(timeout=3600)

@flow
def hangs_once():
    if tries() == 1:
        time.sleep(600)
"""
KILLED = "exited with status code: -9|crashed"
MOST_DELIVERIES = 4
"""Prefect's broker hands a message over again, up to three times, where what follows an action fails."""
STARTED_TWICE = (
    "Lost connection to flow run 'once' infrastructure|Flow run 'once' - (.Errno 2.|Unexpected exception)|"
    "StepExecutionError: Encountered error while running prefect.deployments.steps.set_working_directory"
)


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    """The machine with its automations, and flows that come to grief."""
    (machine.folder / "grief.py").write_text(FLOWS)
    machine.deploy(
        {"name": "dies", "entrypoint": "grief.py:dies", "parameters": {"times": 1}},
        {"name": "fails", "entrypoint": "grief.py:fails"},
        {"name": "hangs-once", "entrypoint": "grief.py:hangs_once"},
        {"name": "skips", "entrypoint": "grief.py:skips"},
        {"name": "waits-for-a-person", "entrypoint": "grief.py:waits_for_a_person"},
        {"name": "of-others", "entrypoint": "grief.py:fails", "tags": ["mine"]},
    )
    machine.rollout("ops", "install", "--webhook", machine.webhook)
    return machine


def lines(text: str) -> dict[str, str]:
    """What was done with each automation, by name."""
    found = {}
    for line in text.splitlines():
        action, _, name = line.partition("  rollout: ")
        if name:
            found[name.partition(":")[0]] = action.strip()
    return found


def test_an_installation_changes_only_what_differs_and_shows_it(installed: Machine):
    again = installed.rollout("ops", "install")
    assert len(lines(again)) == 5 and set(lines(again).values()) == {"keep"}

    automations = {found["name"]: found for found in installed.ask("automations/filter", {})}
    names = ("try a crashed run again", "tell that a run is late", "tell that a run failed")
    crashed, late, failed = (automations[f"rollout: {name}"] for name in names)
    installed.ask(f"automations/{failed['id']}", method="DELETE")
    edited = {key: crashed[key] for key in ("name", "description", "enabled", "tags", "trigger", "actions")}
    edited["trigger"]["match"]["prefect.run-count"] = ["0"]
    installed.ask(f"automations/{crashed['id']}", edited, "PUT")
    installed.ask(f"automations/{late['id']}", {"enabled": False}, "PATCH")
    own = installed.ask("automations/", {**edited, "name": "of a person"})

    seen = installed.rollout("ops", "install", "--dry-run")
    assert lines(seen)["try a crashed run again"] == "update" and '+        "1",' in seen
    assert lines(seen)["tell that a run failed"] == "create", "whom to tell is known from the others"
    assert installed.rollout("ops", "install") == seen
    assert set(lines(installed.rollout("ops", "install")).values()) == {"keep"}
    after = {found["name"]: found for found in installed.ask("automations/filter", {})}
    assert after["rollout: tell that a run is late"]["enabled"] is False, "a person has switched it off"
    assert after["rollout: try a crashed run again"]["id"] == crashed["id"]
    assert after.keys() - automations.keys() == {"of a person"}
    installed.ask(f"automations/{own['id']}", method="DELETE")
    installed.ask(f"automations/{late['id']}", {"enabled": True}, "PATCH")

    quiet = installed.rollout("ops", "install", "--no-notify")
    assert sorted(lines(quiet).values()) == ["delete"] * 3 + ["keep"] * 2
    installed.rollout("ops", "install", "--notify", "webhook/rollout-notifications")
    assert len(installed.ask("automations/filter", {})) == 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--webhook", "ftp://x"], "begins with http"),
        (["--notify", "webhook"], "expected SLUG/NAME"),
        (["--notify", "webhook/none"], "no such block"),
        (["--notify", "json/none"], "no such block"),
        (["--webhook", "http://x", "--no-notify"], "give one of"),
        (["--silent-after", "20"], "at least 90"),
    ],
)
def test_what_cannot_be_installed_is_said_in_one_line(installed: Machine, options: list[str], told: str):
    done = installed.command("-c", "from deployments.cli import main; main()", "ops", "install", *options)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ([], ("http://all", None, False)),
        (["--webhook", "http://own"], ("http://own", None, False)),
        (["--notify", "slack-webhook/team"], (None, "slack-webhook/team", False)),
        (["--no-notify"], (None, None, True)),
    ],
)
def test_an_option_takes_the_place_of_the_webhook_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, options: list[str], known: tuple[str | None, str | None, bool]
):
    asked = []
    monkeypatch.setattr("deployments.cli.install.prefect_server", lambda home: nullcontext())
    monkeypatch.setattr("deployments.automations.bring_about", lambda *arguments: asked.append(arguments) or [])
    done = CliRunner().invoke(app, ["ops", "install", *options], env={"ROLLOUT_WEBHOOK_URL": "http://all"})
    assert done.exit_code == 0, done.output
    assert asked == [(*known, None, False)]


def test_killed_runs_are_tried_again_and_only_the_hopeless_are_told(installed: Machine, server_logs):
    server_logs.expect(KILLED, "the flows kill themselves")
    server_logs.expect(STARTED_TWICE, "a crash that runner and worker report seconds apart is tried again for each")
    server_logs.expect("ValueError|Finished in state Failed|Encountered an exception|status code: 1;", "a flow fails")
    installed.told.clear()
    with installed.worker(server_logs):
        once = installed.start_run("dies", name="once")
        always = installed.start_run("dies", name="always", parameters={"times": 99})
        failing = installed.start_run("fails", name="failing")
        foreign = installed.start_run("fails", "of-others", name="foreign")
        run = installed.wait(once, "Completed")
        assert (run["id"], run["run_count"]) == (once, 2)
        installed.wait(failing, "Failed")
        installed.wait(foreign, "Failed")
        wait_for(lambda: told_of(installed, always, "Crashed"), "word of the run that dies always")
        assert installed.run(always)["run_count"] == MAX_TRIES
        wait_for(lambda: told_of(installed, failing, "Failed"), "word of the run that failed")

    late = installed.start_run("fails", name="late", state=scheduled(ago=60))
    wait_for(lambda: told_of(installed, late, "Late"), "word of the run that nobody takes")
    # On a busy machine others may have been late, too, and Prefect acts at least once: word may come again.
    times = Counter((told["run"], told["state"]) for told in installed.told if told["state"] != "Late")
    assert set(times) == {("always", "Crashed"), ("failing", "Failed")}
    assert max(times.values()) <= MOST_DELIVERIES, times
    word, *again = told_of(installed, failing, "Failed")
    assert all(other == word for other in again)
    assert word["flow"] == "fails" and failing in word["url"] and 'said "no"' in word["text"]
    # Prefect reports a crash twice, by runner and worker.
    assert [state["name"] for state in installed.states(always)].count("Running") == MAX_TRIES
    installed.ask(f"flow_runs/{late}", method="DELETE")


def test_what_happens_to_a_run_that_was_planned_a_moment_ago_is_seen_at_once(installed: Machine):
    """The first state of a run of a schedule makes no event, for which Prefect holds the next one a quarter of an hour
    back where that follows within five minutes."""
    deployment = installed.ask("deployments/name/skips/skips")["id"]
    due = datetime.now(UTC) + timedelta(seconds=30)
    rule = f"DTSTART:{due:%Y%m%dT%H%M%S}\nRRULE:FREQ=MINUTELY;INTERVAL=2;COUNT=2"
    installed.ask(f"deployments/{deployment}/schedules", [{"schedule": {"rrule": rule, "timezone": "UTC"}}])
    planned = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"state": {"name": {"any_": ["Late"]}}}}
    # The other tests' runs of this deployment are not of a schedule.
    late = wait_for(
        lambda: [run for run in installed.ask("flow_runs/filter", planned) if run["auto_scheduled"]], "Late"
    )
    about = {"event": {"name": ["prefect.flow-run.Late"]}, "resource": {"id": [f"prefect.flow-run.{late[0]['id']}"]}}
    [event] = wait_for(lambda: installed.ask("events/filter", {"filter": about})["events"], "the event")
    assert event["payload"]["initial_state"]["name"] == "Scheduled" and event["follows"] is None
    for run in installed.ask("flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}}):
        installed.ask(f"flow_runs/{run['id']}", method="DELETE")


@pytest.mark.campaign
def test_a_run_whose_machine_is_lost_is_done_by_another(installed: Machine, server_logs):
    server_logs.expect(KILLED, "the machine is killed")
    # Less than a heartbeat more than one: the command refuses it, for this is a rule to be careful with.
    automation = next(found for found in installed.ask("automations/filter", {}) if "heartbeats" in found["name"])
    fields = {key: automation[key] for key in ("name", "description", "enabled", "tags", "trigger", "actions")}
    fields["trigger"]["within"] = 35
    installed.ask(f"automations/{automation['id']}", fields, "PUT")
    silent = {name: installed.start_run(name) for name in ("skips", "waits-for-a-person")}
    run_id = installed.start_run("hangs-once")
    with installed.worker(server_logs) as worker:
        installed.wait(silent["skips"], "Skipped")
        installed.wait(silent["waits-for-a-person"], "Suspended")
        installed.wait(run_id, "Running")
        wait_for(lambda: heartbeats(installed, run_id), "its first heartbeat")
        end(worker)
    assert installed.run(run_id)["state"]["name"] == "Running", "nobody has noticed yet"
    with installed.worker(server_logs):
        run = installed.wait(run_id, "Completed", seconds=180)
    assert run["run_count"] == 2
    names = [state["name"] for state in installed.states(run_id)]
    assert names.index("Crashed") < names.index("AwaitingRetry"), names
    ended = {name: installed.run(quiet)["state"]["name"] for name, quiet in silent.items()}
    assert ended == {"skips": "Skipped", "waits-for-a-person": "Suspended"}, "they have no heartbeats and are not lost"
    seen = installed.rollout("ops", "install")
    assert lines(seen)["a run without heartbeats has crashed"] == "update" and '+    "within": 90.0' in seen


def test_a_server_that_dies_midway_is_told_in_one_line():
    from http.server import BaseHTTPRequestHandler, HTTPServer

    import prefect
    from prefect import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from deployments.automations import Action, Change, healing, install
    from rollout_core.base.errors import RolloutError

    class Dying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # What the client asks before: the server's version, and whether it wants CSRF tokens.
            is_version = self.path.endswith("/version")
            body = json.dumps(prefect.__version__ if is_version else {}).encode()
            self.send_response(200 if is_version else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            if answers:
                self.send_error(answers.pop(), "busy")
            else:
                self.connection.close()

        def log_message(self, format: str, *args: Any) -> None: ...

    answers = [409]
    with HTTPServer(("127.0.0.1", 0), Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/api"
        wanted = [Change(Action.CREATE, healing()[0], None)]
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            with get_client(sync_client=True) as client:
                with pytest.raises(RolloutError, match=r"answered 409 while automations were installed .*busy"):
                    install(client, wanted)
                with pytest.raises(
                    RolloutError, match=r"went away while automations were installed .*: start the serv"
                ):
                    install(client, wanted)
        server.shutdown()


def heartbeats(machine: Machine, run_id: str) -> int:
    criteria: dict[str, Any] = {
        "occurred": {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()},
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run_id}"]},
    }
    return machine.ask("events/filter", {"filter": criteria})["total"]


def told_of(machine: Machine, run_id: str, state: str) -> list[dict[str, Any]]:
    return [told for told in machine.told if (told["id"], told["state"]) == (run_id, state)]


def scheduled(ago: float) -> dict[str, Any]:
    when = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
    return json.loads(json.dumps({"type": "SCHEDULED", "state_details": {"scheduled_time": when}}))
