"""A Prefect server for the length of one command, for people who have none running.

Imported before prefect: the address has to be in the environment first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_core.errors import RolloutError

START_TIMEOUT_SECONDS = 120.0
SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    # Prefect's client keeps idle connections for 25 s, its server closes them after 5; a call in between meets a dead
    # connection and is tried again 2 s later.
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "60",
}


@contextmanager
def prefect_server(home: Path, *, port: int | None = None) -> Iterator[str]:
    """Address of the configured Prefect API, or of a server started here, on ``port`` or a free one, until the end.

    The server's database lives in ``home``, so its runs can be looked at later (``PREFECT_HOME=... prefect server
    start``). Raises RolloutError when the configured one cannot be reached, or ours does not answer within two minutes.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _refuse_unreachable(configured)
        yield configured
        return
    home.mkdir(parents=True, exist_ok=True)
    for name, value in SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["PREFECT_HOME"] = str(home.resolve())
    if port is None:
        port = _free_port()
    elif _is_taken(port):
        raise RolloutError(
            f"port {port} is taken, perhaps by a Prefect server: set PREFECT_API_URL to use it, or give another port"
        )
    address = f"http://127.0.0.1:{port}/api"
    log = home / "server.log"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            # Pages in the browser ask the API at this address; by default it would be that of another port.
            env={**os.environ, "PREFECT_SERVER_UI_API_URL": address},
            # Its own session: Ctrl-C in the terminal reaches the flow first, which then still has its server.
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    try:
        _wait_until_healthy(server, address, log)
        os.environ["PREFECT_API_URL"] = address
        yield address
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _end_with_parent() -> None:
    """In the child: ask the kernel for SIGTERM when the parent dies, also by ``kill -9``."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _refuse_unreachable(address: str) -> None:
    """Prefect itself would try for minutes and end in a traceback."""
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return  # It answers; whether it lets us in is seen with the key that Prefect sends.
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RolloutError(
            f"the Prefect server at PREFECT_API_URL={address} cannot be reached ({reason}); start it, correct the "
            "address, or unset it to have one started for this command"
        ) from error


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RolloutError(f"the local Prefect server ended with exit code {server.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
                # While ours lives: the port may have become another server's since it was looked at.
                if answer.status == 200 and server.poll() is None:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RolloutError(f"the local Prefect server did not answer within {START_TIMEOUT_SECONDS:.0f} s; see {log}")
