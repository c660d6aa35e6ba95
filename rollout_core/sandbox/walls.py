"""Which walls this machine has: what the kernel allows, and what a program met that tried each of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.locks import scratch_folder
from rollout_core.sandbox.launching import Launcher
from rollout_core.sandbox.programs import Limits, Outcome, Program

PROBED = ("files", "processes", "network", "system calls", "privileges", "limits")
"""Without one of these a sandbox refuses to run anything."""
_LIMITS = Limits(
    wall_seconds=30, cpu_seconds=10, memory_bytes=128 * 2**20, processes=6, output_bytes=2**16, disk_bytes=2**20
)


@dataclass(frozen=True)
class Wall:
    """One of them."""

    name: str
    stands: bool
    detail: str
    """What it is made of, or why it is not there."""
    needed: bool = True


@dataclass(frozen=True)
class Walls:
    """Those of one kind of sandbox on this machine."""

    kind: str
    walls: tuple[Wall, ...]

    @property
    def stand(self) -> bool:
        """Whether all that are needed do."""
        return all(wall.stands for wall in self.walls if wall.needed)

    def missing(self) -> list[str]:
        """A line for each that is needed and does not stand."""
        return [f"{wall.name}: {wall.detail}" for wall in self.walls if wall.needed and not wall.stands]


class NoSandbox(ConfigError):
    """There is none here, or it is closed to this caller: a fault of the machine's settings, never of a program."""


def probe(kind: str, launcher: Launcher) -> Walls:
    """Start a sandbox and have a program try its walls."""
    try:
        own = launcher.start()
        found = probed(launcher.run)
    except Recoverable as refusal:
        return refused(kind, str(refusal))
    landlock = Wall(
        "landlock",
        "landlock" in own,
        "files and signals a second time" if "landlock" in own else "the kernel has none",
        needed=False,
    )
    return Walls(kind, (*found, landlock))


def refused(kind: str, reason: str) -> Walls:
    """Of a kind that does not start."""
    advice = remedy()
    return Walls(kind, (Wall("namespaces", False, f"{reason}{f'; {advice}' if advice else ''}"),))


def probed(run: Callable[[Program], Outcome]) -> list[Wall]:
    """The walls of what runs programs. Raises Recoverable where the program that tries them does not get to say."""
    with scratch_folder("sandbox-walls") as outside:
        outside.chmod(0o755)  # so that only a wall hides it
        return found_by(run(probe_program(outside)))


def probe_program(folder: Path) -> Program:
    """What tries the walls, of which ``folder`` is outside."""
    limits = (_LIMITS.memory_bytes, _LIMITS.processes, _LIMITS.disk_bytes)
    outside = (os.getpid(), folder, *limits)
    source = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    return Program(source=source, argv=[str(item) for item in outside], limits=_LIMITS)


def found_by(outcome: Outcome) -> list[Wall]:
    """The walls that it met. Raises Recoverable where it did not get to say."""
    try:
        found = json.loads(outcome.stdout)
        return [Wall(name, bool(found[name][0]), str(found[name][1])) for name in PROBED]
    except (ValueError, KeyError, TypeError, IndexError):
        said = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:]
        text = f": {said[0]}" if said else ""
        raise Recoverable(f"the program that tries a sandbox's walls {outcome.reason}{text}") from None


_SWITCHES: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("kernel/unprivileged_userns_clone", lambda value: value == "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        lambda value: value == "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or install bubblewrap with its AppArmor profile",
    ),
    ("user/max_user_namespaces", lambda value: value == "0", "sysctl user.max_user_namespaces=10000"),
)


def remedy() -> str:
    """What lets namespaces be made here, by what the kernel says of its switches; empty where nothing is in sight."""
    for name, is_off, advice in _SWITCHES:
        try:
            value = Path("/proc/sys", name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if is_off(value):
            return advice
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "in a container: start it with --security-opt seccomp=unconfined, or name a sandbox outside by kind http"
    return ""
