"""The Prefect server of a folder as a process that nobody owns: it ends with the last command that uses it.

Run by `flows.connections`: ``python -m flows.server_process PORT FOLDER LOCK``. LOCK is a descriptor that holds the
lock file of the folder's server, in which the process says who it is and where it listens.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout_core.base.locks import try_exclusive
from rollout_core.base.processes import ProcessName

LOCK = "server.lock"
"""Held by the server while it lives; holds a `Listening` once it has started."""
USERS_LOCK = "server-users.lock"
"""Held by all commands that use the server, together; who gets it exclusively knows that there is none left, even if
the last ones were killed."""
LOOK_SECONDS = 0.2
COLLECT_SECONDS = 0.25
YOUNG, MIDDLE, OLD = 0, 1, 2
_MIDDLE_EVERY, _OLD_EVERY = 10, 240
"""Of the collections, how often they look at objects that have survived one, or two."""
END_SECONDS = 10.0
"""From SIGTERM to SIGKILL: an open connection, such as a browser's, would keep the server alive."""


@dataclass(frozen=True)
class Listening:
    """A server's process and its address."""

    process: str
    """As `ProcessName` writes it."""
    url: str


def api_address(port: int) -> str:
    """Of the API of a server of this machine."""
    return f"http://127.0.0.1:{port}/api"


def main() -> None:
    """Serve until the last user is gone."""
    port, folder, lock = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    # Nobody's child: a command that ends its own children must leave alone what others use.
    if os.fork():
        os._exit(0)
    # For this process alone: what it may start must not keep the lock.
    os.set_inheritable(lock, False)
    listening = Listening(str(ProcessName.of_this_process()), api_address(port))
    os.pwrite(lock, json.dumps(asdict(listening)).encode(), 0)
    threading.Thread(target=_end_with_last_user, args=[folder], name="rollout-server-users", daemon=True).start()
    serve(port)


def serve(port: int) -> None:
    """Be Prefect's server, with what keeps one on SQLite from standing still, until SIGTERM."""
    gc.disable()
    threading.Thread(target=_collect_garbage, name="rollout-server-garbage", daemon=True).start()
    update_automations_without_waiting()

    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    app()


def update_automations_without_waiting() -> None:
    """Keep the event loop running while a changed automation is taken into memory.

    Before 3.8.6 Prefect's server on SQLite stops its event loop there until it has a lock. A task of the same loop may
    hold that, as the look at all triggers every few seconds does, and then the server stands still for good
    (PrefectHQ/prefect #23055).
    """
    automations: Any = import_module("prefect.server.events.models.automations")
    wait, updates = automations.run_coro_as_sync, set[asyncio.Task[Any]]()

    def update(coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            task = asyncio.get_running_loop().create_task(coroutine)
        except RuntimeError:
            wait(coroutine)
            return
        updates.add(task)  # the loop itself would let go of it
        task.add_done_callback(updates.discard)

    automations.run_coro_as_sync = update


def _collect_garbage() -> None:
    """Instead of Python, which collects on any thread, also on that of the event loop.

    A statement of SQLite that an exception's traceback has kept is ended when it is collected, and that waits for its
    connection. Where the connection itself waits for the database, up to Prefect's 60 seconds, because a transaction
    is open that the event loop is to commit, the whole server stood still for as long.
    """
    for turn in itertools.count(1):
        time.sleep(COLLECT_SECONDS)
        gc.collect(OLD if turn % _OLD_EVERY == 0 else MIDDLE if turn % _MIDDLE_EVERY == 0 else YOUNG)


def _end_with_last_user(folder: Path) -> None:
    # Held until this process is gone: who comes now waits for that, and then starts another server.
    while try_exclusive(folder / USERS_LOCK) is None:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
