"""Which process is meant, whether it lives, and what its children get from it.

A process id alone may be another's by the time it is looked at. So a process is known by the machine's boot, its id,
and its start in clock ticks since that boot, which no step of the wall clock changes. (Its creation time in seconds
since the epoch does change with one.)
"""

from __future__ import annotations

import functools
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

PROC = Path("/proc")
_ENDED = {"Z", "X"}
"""States of a process that is no more, but whose parent has not asked for its exit code."""


@functools.cache
def this_machine() -> str:
    """Name of this boot of this machine or container: processes of one name see the same process ids."""
    marks = [socket.gethostname()]
    boot, namespace = PROC / "sys/kernel/random/boot_id", PROC / "self/ns/pid"
    if boot.exists():
        marks.append(boot.read_text().strip())
    if namespace.exists():
        marks.append(os.readlink(namespace))
    return blake3("\n".join(marks).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ProcessName:
    """One process among all that ever ran, on any machine."""

    machine: str
    """As `this_machine` has it."""
    pid: int
    start_ticks: int
    """Since the machine's boot; 0 where the system does not say."""

    @classmethod
    def of_this_process(cls) -> ProcessName:
        """The calling process."""
        pid = os.getpid()
        _, ticks = _state_and_start(pid) or ("", 0)
        return cls(this_machine(), pid, ticks)

    @classmethod
    def parse(cls, text: str) -> ProcessName | None:
        """Inverse of ``str``; None for any other text."""
        machine, _, numbers = text.partition(":")
        pid, _, ticks = numbers.partition(":")
        if not (machine and _is_number(pid) and _is_number(ticks)):
            return None
        return cls(machine, int(pid), int(ticks))

    def __str__(self) -> str:
        return f"{self.machine}:{self.pid}:{self.start_ticks}"

    def has_ended(self) -> bool:
        """Whether this was a process of this machine that has ended; False where that cannot be known."""
        if self.machine != this_machine() or not self.start_ticks:
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return not _is_known(self.pid)
        state, ticks = found
        return state in _ENDED or ticks != self.start_ticks


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks of a process by the kernel's table; None where it shows none of that id."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets, which may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _is_known(pid: int) -> bool:
    """Whether there is a process of that id, also one that the kernel's table hides from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; most real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def search_path() -> str:
    """PYTHONPATH for a child process that is to run this very code."""
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
