"""The Prefect server of a folder as a process that nobody owns: it ends with the last command that uses it.

Run by `tasks.runtime.prefect_server`: ``python -m tasks.runtime.server_process PORT FOLDER LOCK``. LOCK is a descriptor
that holds the lock file of the folder's server, in which the process says who it is and where it listens.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rollout_core.base.locks import try_exclusive
from rollout_core.base.processes import ProcessName
from tasks.runtime.server_tables import make_tables

LOCK = "server.lock"
"""Held by the server while it lives; holds a `Listening` once it has started."""
LOG = "server.log"
"""What it writes. The file before it, of at most `LOG_BYTES`, is ``server.log.1``."""
USERS_LOCK = "server-users.lock"
"""Held by all commands that use the server, together; who gets it exclusively knows that there is none left, even if
the last ones were killed."""
LOOK_SECONDS = 0.2
COLLECT_SECONDS = 0.25
YOUNG, MIDDLE, OLD = 0, 1, 2
_MIDDLE_EVERY, _OLD_EVERY = 10, 240
"""Of the collections, how often they look at objects that have survived one, or two."""
LOG_BYTES = 16 * 2**20
LOG_LOOK_SECONDS = 10.0
SAY_SECONDS = 3600.0
"""Between two lines about tasks of the server that met a locked database."""
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
    threading.Thread(target=_keep_log_small, args=[folder / LOG], name="rollout-server-log", daemon=True).start()
    serve(port)


def serve(port: int) -> None:
    """Be Prefect's server, with what keeps one on SQLite from standing still, until SIGTERM."""
    gc.disable()
    threading.Thread(target=_collect_garbage, name="rollout-server-garbage", daemon=True).start()
    make_tables()
    leave_out_prefect_dask()
    update_automations_without_waiting()
    order_events_of_schedules()
    know_events_of_before(datetime.now(UTC))
    logging.getLogger("docket.dependencies").addFilter(TriedAgain())

    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    app()


def leave_out_prefect_dask() -> None:
    """Of the packages that Prefect's server imports in search of types of blocks, leave out the one that has none: its
    import of Dask and pandas is a third of a server's start. Prefect 3.9.1 imports them all, too."""
    collections: Any = import_module("prefect._internal.plugins.collections")
    collections.entry_points = lambda **of: [found for found in entry_points(**of) if found.value != "prefect_dask"]


def update_automations_without_waiting() -> None:
    """Keep the event loop running while a changed automation is taken into memory.

    Before 3.8.6 Prefect's server on SQLite stops its event loop there until it has a lock. A task of the same loop may
    hold that, as the look at all triggers every few seconds does, and then the server stands still for good
    (PrefectHQ/prefect #23055). This goes with Prefect 3.8.6.
    """
    automations: Any = import_module("prefect.server.events.models.automations")
    wait, updates = automations.run_coro_as_sync, set[asyncio.Task[Any]]()

    def update(coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            task = asyncio.get_running_loop().create_task(coroutine)
        except RuntimeError:
            wait(coroutine)
            return
        updates.add(task)  # the loop itself would drop it
        task.add_done_callback(updates.discard)

    automations.run_coro_as_sync = update


def order_events_of_schedules() -> None:
    """Have automations see a run that begins within five minutes of being planned.

    Prefect names the event of the state before as one that each event follows, and holds it back for a quarter of an
    hour where that has not come. The first state of a run of a schedule never makes an event, so of such a run
    automations would see all that happens as much later: that it failed, or that its process died. So it is in 3.9.1,
    too.
    """
    import_module("prefect.server.models")  # these import each other, and only from here on all is found
    policies: Any = import_module("prefect.server.orchestration.instrumentation_policies")
    make = policies.flow_run_state_change_event

    async def make_event(**about: Any) -> Any:
        event = await make(**about)
        before = about["initial_state"]
        is_first = before is not None and before.name == "Scheduled" and not about["flow_run"].run_count
        return event.model_copy(update={"follows": None}) if is_first and about["flow_run"].auto_scheduled else event

    policies.flow_run_state_change_event = make_event


def know_events_of_before(began: datetime) -> None:
    """Have automations wait for no event that a server received before ``began``, when this one started.

    Which events it has seen Prefect remembers in its process, whatever its setting for their order, and holds one whose
    predecessor it does not know back for a quarter of an hour: automations would act that late on a run that began
    before a restart, also when it has ended since, and start it once more. Nobody follows an event of longer ago. So it
    is in 3.9.1, too.
    """
    interface: Any = import_module("prefect.server.database").provide_database_interface()
    events: Any = import_module("prefect.server.events.ordering")
    select = import_module("sqlalchemy").select
    ordering: Any = type(events.get_triggers_causal_ordering())
    confirmed = ordering.preceding_event_confirmed

    async def is_of_before(event_id: Any) -> bool:
        table = interface.Event
        async with interface.session_context() as session:
            found = await session.scalar(select(table.id).where(table.id == event_id, table.received < began))
        return found is not None

    @asynccontextmanager
    async def preceding_event_confirmed(self: Any, handler: Any, event: Any, depth: int = 0) -> AsyncIterator[None]:
        is_young = datetime.now(UTC) < began + events.PRECEDING_EVENT_LOOKBACK
        if is_young and event.follows is not None and await is_of_before(event.follows):
            event = event.model_copy(update={"follows": None})
        async with confirmed(self, handler, event, depth):
            yield

    ordering.preceding_event_confirmed = preceding_event_confirmed


class TriedAgain(logging.Filter):
    """Of the tasks that the server tries again because SQLite was locked, a line an hour with their number, where each
    poll of a worker would leave a traceback: 50 MB a day."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._said = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; it may become that line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or "database is locked" not in str(error):
            return True
        self._count += 1
        if time.monotonic() - self._said < SAY_SECONDS:
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "the database was locked; tasks of the server that were tried again since the last such line: %d"
        record.args, record.exc_info, record.exc_text = (self._count,), None, None
        self._count, self._said = 0, time.monotonic()
        return True


def _keep_log_small(file: Path) -> None:
    while True:
        time.sleep(LOG_LOOK_SECONDS)
        rotate(file)


def rotate(file: Path) -> None:
    """Have this process write on into a new ``file`` where it has grown; nothing that it writes is lost."""
    following = file.with_name(f"{file.name}.next")
    try:
        is_there = file.exists()
        if is_there and (file.stat().st_size < LOG_BYTES or not os.path.samestat(file.stat(), os.fstat(1))):
            return
        opened = os.open(following, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if is_there:
            file.replace(file.with_name(f"{file.name}.1"))
        following.replace(file)
    except OSError as error:
        sys.stderr.write(f"cannot begin another {file}: {error}\n")
        return
    for standard in (1, 2):
        os.dup2(opened, standard)
    os.close(opened)


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
