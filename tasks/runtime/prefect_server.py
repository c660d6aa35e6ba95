"""What a command connects to: object store, database, and a Prefect server for people who have none running.

One Prefect server a folder: started by the first command, shared by all that run there at the same time, gone with the
last one. It belongs to no command; its users are known by locks, which the kernel frees whoever is killed
(`tasks.runtime.server_process` says which).

prefect reads its own settings when it is imported, so nothing here imports it before the server's address is in the
environment, and object store and database go through it only where a setting names a block.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.locks import exclusive, shared, try_exclusive
from rollout_core.base.logs import say
from rollout_core.base.processes import ProcessName, in_environment, search_path, this_machine
from rollout_core.base.settings import BLOCK_PREFIX, locations, without_password
from rollout_core.objects import ObjectStore
from rollout_core.store.reachable import Connections, plain_connections
from tasks.runtime.server_process import LOCK, LOG, USERS_LOCK, Listening, api_address

PREFECT_HOME = Path("data/prefect")
"""Of the server that a command starts where none is configured."""
START_LOCK = "server-start.lock"
"""Held by the command that looks for the folder's server or starts it, until it answers."""
START_TIMEOUT_SECONDS = 300.0
END_TIMEOUT_SECONDS = 10.0
SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    # Prefect's client keeps idle connections for 25 s, its server closes them after 5; a call in between meets a dead
    # connection and is tried again 2 s later.
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "60",
    # In memory, as by default, the leases of deployments' concurrency limits end with the server, and Prefect then ends
    # the runs that hold them.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}


def connections() -> Connections | None:
    """Those of the settings; None where they are blocks of a server that is not running yet."""
    settings = locations()
    if not any(address.startswith(BLOCK_PREFIX) for address in (settings.storage, settings.database)):
        return plain_connections()
    if not os.environ.get("PREFECT_API_URL"):
        return None
    from tasks.runtime.connections import current_connections

    return current_connections()


@contextmanager
def object_store(storage: str | None) -> Iterator[ObjectStore]:
    """The object store at ``storage``, else that of the settings; a URL, a path, or ``block:SLUG/NAME``."""
    address = storage or locations().storage
    if not address.startswith(BLOCK_PREFIX):
        yield ObjectStore.from_url(address)
        return
    with prefect_server(PREFECT_HOME):
        from tasks.runtime.connections import storage_at

        yield storage_at(address).objects()


@contextmanager
def storage_and_database() -> Iterator[Connections]:
    """Those of the settings, with a Prefect server where they are its blocks."""
    known = connections()
    if known is not None:
        yield known
        return
    with prefect_server(PREFECT_HOME):
        from tasks.runtime.connections import current_connections

        yield current_connections()


def _say(line: str) -> None:
    say(line)


def _nothing() -> None:
    pass


@contextmanager
def prefect_server(
    home: Path,
    *,
    port: int | None = None,
    say: Callable[[str], None] = _say,
    meanwhile: Callable[[], object] = _nothing,
) -> Iterator[str]:
    """Address of the configured Prefect API, or of the server of the folder ``home``, while the block runs.

    Where no command uses that server now, it is started, on ``port`` or a free one. Its database lives in ``home``, so
    its runs can be looked at later (``PREFECT_HOME=... prefect server start``). ``say`` receives a line for each wait.
    ``meanwhile`` is called while a server that was started here starts, its address in the environment: time for
    imports, which take as long.
    Raises RolloutError when the configured server cannot be reached, or the folder's does not start.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _refuse_unreachable(configured)
        yield configured
        return
    home = home.resolve()
    for name, value in SERVER_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["PREFECT_HOME"] = str(home)
    with shared(home / USERS_LOCK, on_wait=lambda: say("waiting for the last Prefect server to end ...")):
        with exclusive(home / START_LOCK, on_wait=lambda: say("waiting for the Prefect server to start ...")):
            server = _find_or_start(home, port, say, meanwhile)
        with in_environment({"PREFECT_API_URL": server.url}):
            yield server.url
    _end_if_unused(home, server)


def running_server(home: Path) -> str | None:
    """Address of the configured Prefect API, else of the server of the folder ``home`` if it runs now; starts none.

    Whether it answers is not looked at. Raises RolloutError for an address that holds a password, and where the
    folder's server cannot be used from here, or does not say yet where it listens.
    """
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _refuse_password(configured)
        return configured
    home = home.resolve()
    if not (home / LOCK).exists():
        return None
    lock = try_exclusive(home / LOCK)
    if lock is not None:
        os.close(lock)
        return None
    found = _read(home)
    if found is None:
        raise RolloutError(f"the Prefect server of {home} is only starting; see {home / LOG}")
    return found.url


def keep_server(home: Path, port: int, say: Callable[[str], None]) -> bool:
    """For one who is inside `prefect_server`: start the folder's server again if it has died; whether it had.

    Raises RolloutError when it does not start.
    """
    home = home.resolve()
    with exclusive(home / START_LOCK):
        lock = try_exclusive(home / LOCK)
        if lock is None:
            return False
        os.close(lock)
        say(f"the Prefect server has died; what it wrote is in {home / LOG}")
        _find_or_start(home, port, say, _nothing)
    return True


def _find_or_start(
    home: Path, port: int | None, say: Callable[[str], None], meanwhile: Callable[[], object]
) -> Listening:
    """The folder's server once it answers. The caller is among its users, and nobody else starts one."""
    while (lock := try_exclusive(home / LOCK)) is None:
        found = _wait_until_healthy(home)
        if found is not None:
            say(f"using the Prefect server of this folder, {found.url}")
            return found
        # It was about to end.
    try:
        say("starting a Prefect server ...")
        began = time.monotonic()
        os.ftruncate(lock, 0)
        port = _free_port() if port is None else port
        _start(home, port, lock)
    finally:
        os.close(lock)
    with in_environment({"PREFECT_API_URL": api_address(port)}):
        meanwhile()
    found = _wait_until_healthy(home)
    if found is None:
        raise RolloutError(f"the local Prefect server ended while it started; see {home / LOG}")
    say(f"Prefect server ready in {time.monotonic() - began:.0f} s: {found.url}")
    return found


def _start(home: Path, port: int, lock: int) -> None:
    if _is_taken(port):
        raise RolloutError(
            f"port {port} is taken, possibly by a Prefect server: set PREFECT_API_URL to use it, or give another port"
        )
    with (home / LOG).open("ab") as output:
        # Returns at once: the server lives on as a process that is nobody's child.
        subprocess.run(
            # -P: the folder it runs in may have a `flows` of its own.
            [sys.executable, "-P", "-m", "tasks.runtime.server_process", str(port), str(home), str(lock)],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            # Pages in the browser ask the API at this address; by default it would be that of another port.
            env={
                **os.environ,
                "PREFECT_SERVER_UI_API_URL": api_address(port),
                # Of links in notifications.
                "PREFECT_UI_URL": api_address(port).removesuffix("/api"),
                # What it remembers of its database, to start faster; by default all servers of a user write one file.
                "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
                "PYTHONPATH": search_path(),
            },
            # Its own session: Ctrl-C in a terminal is for the command, and others may use the server.
            start_new_session=True,
            # It holds the lock from its first moment to its last.
            pass_fds=[lock],
            check=False,  # one that ended does not answer
        )


def _wait_until_healthy(home: Path) -> Listening | None:
    """The living server once it answers; None where it has ended."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        found = _read(home)
        healthy = found is not None and _is_healthy(found)
        # It lives, looked at last: its port may have become another server's.
        if (lock := try_exclusive(home / LOCK)) is not None:
            os.close(lock)
            return None
        if healthy:
            return found
        time.sleep(0.1)
    raise RolloutError(
        f"the local Prefect server did not answer within {START_TIMEOUT_SECONDS:.0f} s; see {home / LOG}, end its "
        f"process ({_read(home)}) and run again"
    )


def _read(home: Path) -> Listening | None:
    """Who the server is and where it listens; None where it has not said yet."""
    try:
        found = Listening(**json.loads((home / LOCK).read_bytes()))
    except ValueError:
        return None
    process = ProcessName.parse(found.process)
    if process is not None and process.machine != this_machine():
        raise RolloutError(
            f"the Prefect server of {home} runs on another machine or in another container; set PREFECT_API_URL to an "
            "address of it that this one reaches, or run in another folder"
        )
    return found


def _is_healthy(server: Listening) -> bool:
    # By urllib, here and below: every command begins with a probe, and aiohttp takes ten times as long to import.
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _end_if_unused(home: Path, server: Listening) -> None:
    """End the server unless somebody uses it, so that nothing of a command is left when it is done.

    It would end by itself, which is what happens after users that were killed.
    """
    process = ProcessName.parse(server.process)
    users = try_exclusive(home / USERS_LOCK)
    if users is None or process is None:
        return
    try:
        deadline = time.monotonic() + END_TIMEOUT_SECONDS
        if not process.has_ended():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        while not process.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.close(users)


def _refuse_password(address: str) -> None:
    """Prefect would write it into the log of every run."""
    shown = without_password(address)
    if shown != address:
        raise ConfigError(
            f"PREFECT_API_URL={shown} holds a password, which Prefect writes into the log of every run; leave it out, "
            "and set PREFECT_API_AUTH_STRING=user:password"
        )


def _refuse_unreachable(address: str) -> None:
    """Prefect itself would try for minutes and end in a traceback."""
    _refuse_password(address)
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
