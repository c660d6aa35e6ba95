"""Prefect servers of tests, each with a copy of a database that was made once, forked from `tests.support.forked`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tasks.runtime.prefect_server import SERVER_SETTINGS
from tasks.runtime.server_tables import DATABASE
from tests.support import forked

PROJECT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0


@contextmanager
def prefect_process(home: Path, database: Path, log: Path, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Address of the API of a server with its home in ``home``, which is made, for the length of the block."""
    home.mkdir(exist_ok=True)
    shutil.copy(database, home / DATABASE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, **SERVER_SETTINGS, **(settings or {})}
    own = {"PREFECT_API_URL": address, "PREFECT_HOME": str(home), "PYTHONPATH": str(PROJECT)}
    with log.open("wb") as output:
        server = forked.Process(
            [sys.executable, "-c", f"from tasks.runtime.server_process import serve; serve({port})"],
            env={**environment, **own}, cwd=home, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    try:
        while not _answers(address):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)


def _answers(api: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2):
            return True
    except OSError:
        return False
