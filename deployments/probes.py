"""What runs need, looked at from here and for a short time: the Prefect server, object store, database, disks; and how
`rollout doctor` shows what it found.

Nothing is started, created or changed. A part that hangs delays nothing but its own line, and whatever goes wrong is a
line too, without anything secret.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from rollout_core.base.errors import ConfigError, NotFound, RolloutError
from rollout_core.base.machine import GPU, Machine, free_disk
from rollout_core.base.processes import gibibytes
from rollout_core.base.settings import BLOCK_PREFIX, locations, without_password, without_passwords
from rollout_core.inference.folders import LocalFolder
from rollout_core.objects.buckets import RemoteFiles
from rollout_core.runs.run_records import RunRecords, silent_seconds
from rollout_core.store.reachable import Connections, plain_connections
from rollout_core.store.sql.by_url import count_all
from tasks.runtime.prefect_server import PREFECT_HOME, connections, running_server

LOOK_SECONDS = 15.0
"""The longest that a part is looked at; all are looked at side by side."""
REQUEST_SECONDS = 5
"""The longest wait for an answer of the Prefect server."""
BUSY_SECONDS = 5.0
"""The longest wait for others who write to the database."""
LEAST_FREE_BYTES = 2**30
"""On a disk with less the next snapshot may not fit."""
MOST_CHARACTERS = 400
"""Of an error's text."""
MOST_ROWS = 20
"""Of a table for people."""

Found = TypeVar("Found")


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


class Check(BaseModel):
    """One thing that was checked."""

    section: str = ""
    """Of `rollout doctor`."""
    name: str
    level: Level
    got: str
    expected: str
    advice: str = ""
    """What to do; empty where nothing is."""
    latency_ms: int | None = None
    """That it took, where something was tried."""
    data: dict[str, Any] | None = None
    """What was found as JSON, where it is more than a line."""


def check(name: str, problem: Level | None, got: str, expected: str, advice: str = "") -> Check:
    """A check that ended with ``problem``, for which there is advice; OK where that is None."""
    return Check(
        name=name, level=problem or Level.OK, got=got, expected=expected, advice=advice if problem is not None else ""
    )


class Server(BaseModel):
    """A Prefect server, as its health check answers."""

    address: str | None = None
    source: str
    """Who named the address: the setting PREFECT_API_URL, or the folder whose server it is."""
    clock_offset_seconds: float | None = None
    """What its clock is ahead of ours, to half a second; None where it does not tell."""
    version: str | None = None
    trouble: str | None = None
    """Why it cannot be used; None: all is well. So also below."""


class Storage(BaseModel):
    """The object store of this process's settings."""

    address: str
    readable: bool = False
    writable: bool | None = None
    """None: not known, because nothing is written to find out."""
    free_bytes: int | None = None
    """None where it is no folder of this machine."""
    trouble: str | None = None


class Database(BaseModel):
    """The store of rollouts of this process's settings."""

    address: str
    reachable: bool = False
    rollouts: dict[str, int] | None = None
    """By status; None where there is no store yet, or one that this version has still to bring to its schema. So
    also below."""
    attempts: int | None = None
    spans: int | None = None
    trouble: str | None = None


class Look(Generic[Found]):
    """One part that is looked at in a thread of its own, which is left alone where it does not come back."""

    def __init__(self, look: Callable[[], Found], *, debug: bool = False) -> None:
        self._found: list[Found] = []
        self._trouble = f"did not answer within {LOOK_SECONDS:g} s"
        self._debug = debug
        self._deadline = time.monotonic() + LOOK_SECONDS
        self._thread = threading.Thread(target=self._run, args=[look], name="rollout-look", daemon=True)
        self._thread.start()

    def _run(self, look: Callable[[], Found]) -> None:
        try:
            self._found.append(look())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one part, the others are reported
            if self._debug:
                sys.stderr.write(without_passwords(traceback.format_exc()))
            self._trouble = one_line(error)

    def result(self, in_trouble: Callable[[str], Found]) -> Found:
        """What was found, else what ``in_trouble`` makes of a line that says why there is nothing."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._found[0] if self._found else in_trouble(self._trouble)


def one_line(error: BaseException) -> str:
    """An error for a person, without passwords."""
    text = " ".join(str(error).split())
    if not isinstance(error, RolloutError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    text = without_passwords(text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def find_server(home: Path = PREFECT_HOME, *, debug: bool = False) -> Server:
    """The configured Prefect API, or the server of the folder ``home`` if it runs now.

    Prefect takes its settings when it is imported, so this comes before: from then on it uses this server, and gives up
    early where the server does not answer.
    """
    configured = os.environ.get("PREFECT_API_URL")
    source = "PREFECT_API_URL" if configured else f"server of {home}"
    try:
        address = running_server(home)
    except RolloutError as error:
        shown = without_password(configured) if configured else None
        return Server(address=shown, source=source, trouble=one_line(error))
    if address is None:
        return Server(
            source=source,
            trouble=f"no Prefect server: PREFECT_API_URL is not set, and none runs for {home} of this folder; set it, "
            "or start one (make serve)",
        )
    os.environ["PREFECT_API_URL"] = address
    os.environ["PREFECT_API_REQUEST_TIMEOUT"] = str(REQUEST_SECONDS)
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "1"
    if not configured:
        os.environ["PREFECT_HOME"] = str(home.resolve())
    server = Server(address=without_password(address), source=source)
    return Look(lambda: _asked(server, address), debug=debug).result(
        lambda trouble: server.model_copy(update={"trouble": f"the Prefect server at {server.address} {trouble}"})
    )


def _asked(server: Server, address: str) -> Server:
    """``server`` with its clock. Raises RolloutError where it is not healthy."""
    began = time.time()
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=REQUEST_SECONDS) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        raise RolloutError(f"answers {error.code} to /health; is this the address of its API?") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = without_passwords(str(getattr(error, "reason", error)))
        raise RolloutError(f"cannot be reached ({reason}); start it, or correct PREFECT_API_URL") from error
    with suppress(TypeError, ValueError):  # no date, or none that can be read
        # It tells whole seconds.
        offset = parsedate_to_datetime(date).timestamp() + 0.5 - (began + time.time()) / 2
        return server.model_copy(update={"clock_offset_seconds": round(offset, 2)})
    return server


def look_at_storage() -> Storage:
    """Raises what is wrong with the object store."""
    objects = _connections(locations().storage).try_objects()
    found = Storage(address=without_password(objects.url), readable=True)
    if isinstance(objects.files, RemoteFiles):
        if not objects.files.has_bucket():
            raise ConfigError(f"there is no bucket at {found.address}, or it cannot be reached")
        return found
    folder = Path(objects.url.removeprefix("file://"))
    LocalFolder(folder).check()
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"no permission to read {folder}")
    return found.model_copy(update={"writable": True, "free_bytes": free_disk(folder)})


def look_for_silent(runs: Sequence[str]) -> dict[str, float]:
    """For how many seconds nothing was heard of runs under way, by their ids, where that is long."""
    records, found = RunRecords(_connections(locations().storage).try_objects()), {}
    for run in runs:
        with suppress(NotFound):
            head = records.find(run)
            seconds = silent_seconds(head, head.state)
            found |= {} if seconds is None else {run: seconds}
    return found


def storage_in_trouble(trouble: str) -> Storage:
    """For the address in the settings."""
    return Storage(address=without_password(locations().storage), trouble=trouble)


def look_at_database() -> Database:
    """Raises what is wrong with the database."""
    url = _connections(locations().database).database_url()
    found = count_all(url, BUSY_SECONDS)
    counts = {} if found is None else found._asdict()
    return Database(address=without_password(url), reachable=True, **counts)


def database_in_trouble(trouble: str) -> Database:
    """For the address in the settings."""
    return Database(address=without_password(locations().database), trouble=trouble)


def _connections(address: str) -> Connections:
    """Those of the settings, of which ``address`` is the one that is used."""
    known = connections()
    if known is None and address.startswith(BLOCK_PREFIX):
        raise RolloutError(f"{address} is a block of the Prefect server, and there is none")
    return known or plain_connections()


def named(address: str, trouble: str) -> str:
    """A line of trouble that says where, once."""
    return trouble if address in trouble else f"{address}: {trouble}"


# For people


def machine_text(machine: Machine) -> str:
    """Processor, memory, GPUs and disks on a line."""
    cores = "core" if machine.cores == 1 else "cores"
    others = f" of {machine.machine_cores}" if machine.cores != machine.machine_cores else ""
    memory = f"{gibibytes(machine.available_bytes)} of {gibibytes(machine.memory_bytes)} of memory available"
    disks = [f"{gibibytes(disk.free_bytes)} free at {disk.path} ({name})" for name, disk in machine.disks.items()]
    parts = [f"{machine.cores}{others} {cores}", memory, *(_gpus_text(machine.gpus) or ["no GPU"]), *disks]
    size = "" if machine.spot is None or machine.spot.machine_type is None else f"{machine.spot.machine_type}: "
    return size + ", ".join(parts)


def _gpus_text(gpus: Sequence[GPU]) -> list[str]:
    """Those that are alike together."""
    sizes = {gpu: "" if gpu.memory_bytes is None else f" with {gibibytes(gpu.memory_bytes)}" for gpu in gpus}
    counts = Counter(f"{gpu.name}{sizes[gpu]}" for gpu in gpus)
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


def checks_text(checks: Sequence[Check]) -> str:
    """A line for each check, and below it what to do; by section."""
    rows = [[check.level, check.name, f"{check.got} (expected: {check.expected})"] for check in checks]
    lines: list[str] = []
    for section, found in groupby(zip(table(rows), checks, strict=True), key=lambda pair: pair[1].section):
        lines += [section, *(line for pair in found for line in _with_advice(*pair)), ""]
    counts = Counter(check.level for check in checks)
    lines.append(", ".join(f"{counts[level]} {level}" for level in Level if counts[level]))
    return "\n".join(printable(line) for line in lines)


def _with_advice(line: str, check: Check) -> list[str]:
    return [line, f"      -> {check.advice}"] if check.advice else [line]


def span(seconds: float) -> str:
    """A length of time, short."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def when(moment: datetime | None, now: datetime) -> str:
    """A time with what it is from now."""
    if moment is None:
        return "-"
    seconds = (moment - now).total_seconds()
    relative = f"in {span(seconds)}" if seconds >= 0 else f"{span(-seconds)} ago"
    return f"{moment.astimezone(UTC):%m-%d %H:%M:%S} ({relative})"


def section(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table with its title."""
    found = list(rows)
    lines = table([names, *found[:MOST_ROWS]], indent=2) if found else ["  none"]
    more = [f"  and {len(found) - MOST_ROWS} more (--json has them)"] if len(found) > MOST_ROWS else []
    return ["", title, *lines, *more]


def table(rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """Lines of columns that stand one below the other."""
    found = list(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return [
        " " * indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in found
    ]


def printable(line: str) -> str:
    """Names and messages are others': none of them may move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in line)
