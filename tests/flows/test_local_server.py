"""Whose Prefect server a command talks to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from flows.local_server import prefect_server
from rollout_core.errors import RolloutError


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
