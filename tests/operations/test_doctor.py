"""`rollout doctor`: what it finds, what it advises, and when it exits with 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from deployments import health as doctor
from deployments.cli.doctor import SECTIONS
from deployments.probes import Check, Database, Level, Server, Storage
from deployments.status import Deployment, Run, Status
from tests.operations.own_server import OwnServer, own_server, rollout, stranger
from tests.operations.test_drain import cloud_at

NIGHTLY = {"cron": "0 2 * * *", "timezone": "UTC"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[OwnServer]:
    with own_server(tmp_path_factory.mktemp("doctor"), prefect_database) as started:
        yield started


def examined(server: OwnServer, **environment: str) -> dict[str, dict[str, Any]]:
    """The checks by name; the exit code says whether one failed."""
    done = server.rollout("doctor", "--json", **environment)
    assert "Traceback" not in done.stderr, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    failed = any(check["level"] == "fail" for check in checks.values())
    assert done.returncode == int(failed), done.stdout
    return checks


@pytest.mark.server
def test_automations_are_missed_until_they_are_installed_and_heartbeats_must_fit_them(server: OwnServer):
    with server.deployed("nightly", NIGHTLY):
        before = server.rollout("doctor", "schedule")
        assert before.returncode == 1
        lines = before.stdout.splitlines()
        [found] = [number for number, line in enumerate(lines) if line.startswith("fail  automations")]
        assert "create" in lines[found] and lines[found + 1].strip() == "-> rollout ops install"
        assert "heartbeats" not in examined(server)

        assert server.rollout("ops", "install", "--webhook", "http://127.0.0.1:9/?key=s3cret").returncode == 0
        checks = examined(server)
        assert [checks[name]["level"] for name in ("automations", "heartbeats")] == ["ok", "ok"]
        assert "notifications" not in checks and "s3cret" not in json.dumps(checks)
        slow = examined(server, PREFECT_FLOWS_HEARTBEAT_FREQUENCY="300")["heartbeats"]
        assert slow["level"] == "fail" and "every 300 s" in slow["got"] and "FREQUENCY=200" in slow["advice"]

        assert server.rollout("ops", "install", "--silent-after", "900", "--no-notify").returncode == 0
        checks = examined(server, PREFECT_FLOWS_HEARTBEAT_FREQUENCY="300")
        assert [checks[name]["level"] for name in ("automations", "heartbeats")] == ["ok", "ok"], "as a person chose"
        assert checks["notifications"]["level"] == "warn"

        [lost] = [item for item in server.ask("automations/filter", {}) if "heartbeats" in item["name"]]
        server.ask(f"automations/{lost['id']}", {"enabled": False}, method="PATCH")
        off = examined(server)["automations"]
        assert off["level"] == "warn" and "switched off" in off["got"]
        server.ask(f"automations/{lost['id']}", method="DELETE")
        assert examined(server)["automations"]["level"] == "fail"


@pytest.mark.server
def test_nights_that_may_overlap_and_paused_schedules_are_told(server: OwnServer):
    with server.deployed("nightly", NIGHTLY), server.deployed("paused", NIGHTLY, active=False):
        checks = examined(server)
        assert checks["one run at a time"]["level"] == "warn"
        assert "nightly/nightly" in checks["one run at a time"]["got"]
        assert "paused" not in checks["one run at a time"]["got"]
        assert (checks["paused schedules"]["level"], checks["paused schedules"]["got"]) == ("info", "paused/paused")
    with server.deployed("nightly", NIGHTLY, concurrency_limit=1):
        assert examined(server)["one run at a time"]["level"] == "ok"


@pytest.mark.server
def test_versions_disks_and_access_of_a_sound_server(server: OwnServer):
    checks = examined(server)
    for name in ("python", "prefect", "torch", "prefect.yaml", "server", "clock", "schedule service", "access"):
        assert checks[name]["level"] == "ok", checks[name]
    assert {"disk of storage", "disk of cache", "disk of Prefect home", "disk of database"} <= checks.keys()
    assert all(check["got"] and check["expected"] for check in checks.values())
    assert {check["section"] for check in checks.values()} == set(SECTIONS)
    earlier = server.rollout("ops", "doctor", "--json")
    found = json.loads(earlier.stdout)
    assert found.keys() == {"checked_at", "checks"}
    assert {check["name"] for check in found["checks"]} == checks.keys() - {"pools", "runs"}


def test_a_section_alone_says_why_there_is_nothing_and_words_that_do_not_go_together_are_refused(tmp_path: Path):
    done = rollout(tmp_path, "doctor", "workers", "--json")
    assert done.returncode == 1
    assert [check["name"] for check in json.loads(done.stdout)["checks"]] == ["server"]
    for words in (("status", "store"), ("machine", "--provider", "aws")):
        done = rollout(tmp_path, "doctor", *words)
        assert done.returncode == 2 and done.stderr.startswith("rollout: ") and done.stdout == ""


def test_what_needs_no_server_is_checked_without_one(tmp_path: Path):
    done = rollout(tmp_path, "doctor", "--json", ROLLOUT_STORAGE="file:///dev/null/objects")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert [checks[name]["level"] for name in ("python", "server", "storage")] == ["ok", "fail", "fail"]
    assert "automations" not in checks and "clock" not in checks


def test_the_inventory_of_this_machine_is_a_line_and_json_and_a_notice_fails(tmp_path: Path):
    storage = {"ROLLOUT_STORAGE": f"file://{tmp_path / 'objects'}"}
    with cloud_at() as (cloud, host):
        services = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}"}
        done = rollout(tmp_path, "doctor", "machine", "--json", **storage, **services)
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        found = checks["inventory"]["data"]
        assert found["spot"] == {"cloud": "aws", "machine_type": "m7i.2xlarge", "notice": None, "seconds_left": None}
        assert found["disks"]["objects"]["path"] == str(tmp_path / "objects")
        assert checks["inventory"]["got"].startswith("m7i.2xlarge: ") and "GiB of memory" in checks["inventory"]["got"]
        assert (checks["spot"]["level"], checks["spot"]["got"]) == ("ok", "aws: no notice")
        cloud.take_back(100.0)
        done = rollout(tmp_path, "doctor", "machine", **storage, **services)
    assert done.returncode == 1
    assert "fail  spot" in done.stdout and "AWS will terminate this machine" in done.stdout


def test_a_servers_clock_that_is_wrong_is_told_and_a_stranger_is_no_prefect_server(tmp_path: Path):
    with stranger(404, hours=1) as address:
        done = rollout(tmp_path, "doctor", "server", "--json", PREFECT_API_URL=address)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["clock"]["level"] == "warn" and "+3" in checks["clock"]["got"]
    assert "heartbeats and leases" in checks["clock"]["advice"]
    assert checks["server"]["level"] == "fail" and "404" in checks["server"]["got"]


def test_a_schedule_without_runs_and_overdue_runs_that_nobody_marked_show_that_the_services_are_away():
    status = Status(
        checked_at=datetime.now(UTC),
        server=Server(source="PREFECT_API_URL"),
        storage=Storage(address="file:///x"),
        database=Database(address="sqlite:///x"),
    )

    def service(**found: Any) -> Check:
        return next(doctor._schedules(status.model_copy(update=found)))

    deployment = Deployment.model_construct(
        name="nightly/nightly", schedules=["0 2 * * * UTC"], num_paused=0, next_run=None, should_have_next=True
    )
    missing = service(deployments=[deployment])
    assert missing.level is Level.FAIL and "nightly/nightly" in missing.got and "--no-services" in missing.advice
    new = deployment.model_copy(update={"should_have_next": False})
    assert service(deployments=[new]).level is Level.OK
    overdue = Run.model_construct(name="waits", state="Scheduled", due=status.checked_at - timedelta(minutes=5))
    assert service(late=[overdue]).level is Level.FAIL
    assert service(late=[overdue.model_copy(update={"state": "Late"})]).level is Level.OK


def test_a_version_that_does_not_fit_fails():
    wanted = SpecifierSet(">=2.13,<3")
    assert doctor._version("torch", "2.13.0+cpu", wanted, "get it").level is Level.OK
    old = doctor._version("torch", "2.12.1", wanted, "get it")
    assert (old.level, old.advice) == (Level.FAIL, "get it")


@pytest.mark.server
def test_an_api_is_open_where_it_answers_without_a_password(server: OwnServer):
    assert doctor._answers_anyone(server.api)
    with stranger(401) as address:
        assert not doctor._answers_anyone(address)
    assert doctor._public_addresses("http://10.1.2.3:4200/api") == ["http://10.1.2.3:4200/api"]
    own = doctor._public_addresses("http://127.0.0.1:4200/api")
    assert all(address.endswith(":4200/api") and "127.0.0.1" not in address for address in own)
