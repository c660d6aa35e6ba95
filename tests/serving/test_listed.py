"""Servers of a machine are found by `rollout doctor status`, with what they say of themselves."""

from __future__ import annotations

import asyncio
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deployments.probes import Database, Server, Storage
from deployments.status import Status, look_at_servers, text
from rollout_core.base.processes import ProcessName
from rollout_core.base.settings import locations
from rollout_core.serving.listed import Listed, listed, servers_here
from tests.serving.fronts import MODEL, front_over
from tests.serving.test_following import Promoted


async def test_the_status_says_what_is_served_and_why_it_is_not_the_latest(tmp_path: Path):
    latest = Promoted()
    async with front_over(tmp_path, latest=latest) as front:
        with listed(locations().cache, front.url, "tiny"):
            [found] = await asyncio.to_thread(look_at_servers)
            assert (found.name, found.model, found.follows, found.trouble) == ("tiny", MODEL, "policy", None)
            latest.now = None
            await latest.has_been_seen()
            [found] = await asyncio.to_thread(look_at_servers)
            assert found.trouble is not None and "names no model" in found.trouble
    assert look_at_servers() == []
    status = Status(
        checked_at=datetime.now(UTC),
        server=Server(source="x", trouble="away"),
        storage=Storage(address="file:///x"),
        database=Database(address="sqlite:///x"),
        serving=[found],
    )
    assert MODEL[:12] in text(status) and "serving here" in text(status)


def test_a_server_that_does_not_answer_is_trouble(tmp_path: Path):
    with listed(locations().cache, "http://127.0.0.1:9", "tiny"):
        [found] = look_at_servers()
    assert found.trouble is not None and "does not say whether it is ready" in found.trouble


def test_a_server_that_was_killed_and_those_of_other_machines_are_not_listed(tmp_path: Path):
    with listed(tmp_path, "http://here", "tiny"):
        [kept] = (tmp_path / "serving").iterdir()
        entry = json.loads(kept.read_text())
        with subprocess.Popen(["sleep", "1000"]) as gone:
            name = str(ProcessName.of_this_process()).split(":")
            start = Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[19]
            killed = {**entry, "process": f"{name[0]}:{gone.pid}:{start}"}
            (tmp_path / "serving" / "1.json").write_text(json.dumps(killed))
            assert len(servers_here(tmp_path)) == 2
            gone.kill()
        elsewhere = {**entry, "process": f"otherbox:{name[1]}:{name[2]}"}
        (tmp_path / "serving" / "2.json").write_text(json.dumps(elsewhere))
        (tmp_path / "serving" / "3.json").write_text("{")
        assert servers_here(tmp_path) == [Listed(**entry)]
        assert sorted(file.name for file in kept.parent.iterdir()) == sorted([kept.name, "2.json", "3.json"])
    assert not kept.exists()


def test_a_cache_that_cannot_be_written_keeps_nobody_from_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "serving").touch()
    with listed(tmp_path, "http://here", "tiny"):
        assert "does not see this server" in caplog.text
