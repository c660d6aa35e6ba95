"""A Prefect server for the tests of one file, and the `rollout` command beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tasks.runtime.prefect_server import SERVER_SETTINGS
from tests.flows.conftest import wait_for
from tests.support import forked
from tests.support.prefect_servers import prefect_process
from tests.support.server_logs import OF_SEVERAL_TESTS, ServerLogs

PROJECT = Path(__file__).resolve().parents[2]
ROLLOUT = ("-c", "from deployments.cli import main; main()")


def rollout(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command prints that is given in ``folder``."""
    return forked.run(
        [sys.executable, *ROLLOUT, *arguments],
        env={**os.environ, "PREFECT_API_URL": "", "PYTHONPATH": str(PROJECT), **environment},
        cwd=folder,
        timeout=300,
    )


@dataclass(frozen=True)
class OwnServer:
    """A server whose home and settings are the tests' own."""

    folder: Path
    api: str

    @property
    def environment(self) -> dict[str, str]:
        return {**SERVER_SETTINGS, "PREFECT_API_URL": self.api, "PREFECT_HOME": str(self.folder / "home")}

    def rollout(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return rollout(self.folder, *arguments, **{**self.environment, **environment})

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Answer of the API; a POST where there is a body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.api}/{path}", data, headers=headers, method=method)
        # On SQLite a write may meet another one; nothing of it is kept then.
        text = wait_for(lambda: _answer(request), f"an answer to {path} that is not 503")
        return json.loads(text) if text.strip() else None

    @contextmanager
    def deployed(self, name: str, *schedules: dict[str, Any], active: bool = True, **fields: Any) -> Iterator[str]:
        """Id of a deployment of the flow ``name`` on a pool of that name; both are gone after the block."""
        flow = self.ask("flows/", {"name": name})["id"]
        self.ask("work_pools/", {"name": name, "type": "process"})
        planned = [{"schedule": schedule, "active": active} for schedule in schedules]
        body = {"name": name, "flow_id": flow, "work_pool_name": name, "schedules": planned, **fields}
        made = self.ask("deployments/", body)["id"]
        try:
            yield made
        finally:
            self.ask(f"deployments/{made}", method="DELETE")
            self.ask(f"work_pools/{name}", method="DELETE")


@contextmanager
def own_server(folder: Path, database: Path) -> Iterator[OwnServer]:
    """A server with a copy of a database, which runs for the length of the block and then has written no error."""
    logs = ServerLogs()
    with prefect_process(folder / "home", database, logs.watch(folder / "server.log")) as api:
        yield OwnServer(folder, api)
    logs.check(OF_SEVERAL_TESTS)


@contextmanager
def stranger(status: int, hours: float = 0.0) -> Iterator[str]:
    """Address of an API that is healthy, whose clock is ahead, and that answers everything else with ``status``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200 if self.path.endswith("/health") else status)
            self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True))
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api"
    finally:
        server.shutdown()
        thread.join()


def _answer(request: urllib.request.Request) -> bytes | None:
    try:
        # On SQLite, Prefect waits for a lock for a minute, and all its answers with it.
        with urllib.request.urlopen(request, timeout=150) as answer:
            return answer.read() or b" "
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None
