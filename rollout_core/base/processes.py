"""Which process is meant, whether it lives, and what its children get from it and may take.

A process id alone may be another's by the time it is looked at. So a process is known by the machine's boot, its id,
and its start in clock ticks since that boot, which no step of the wall clock changes. (Its creation time in seconds
since the epoch does change with one.)
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rollout_core.base.logs import FORM
from rollout_core.base.machine import machine_memory
from rollout_core.base.secret_sources import SECRET_PREFIX
from rollout_core.base.settings import SECRET_LIST, allowed_secrets

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


@dataclass(frozen=True)
class Limits:
    """For all processes that the code makes, together."""

    seconds: float = 300.0
    """Of one call, or of one step where the handler reports how far it is."""
    memory_bytes: int | None = None
    """Resident; None: three quarters of the machine's (or container's) memory."""
    processes: int = 64
    """At the same time, its own among them; threads do not count."""
    output_bytes: int = 16 * 2**20
    """Written to standard output and error in one call."""
    address_space: bool = False
    """Hold the code's own process to ``memory_bytes`` of address space too, so that a large allocation fails at once.
    Not for code that uses torch or a GPU, which reserve far more than they use."""


def allowed_memory(limits: Limits) -> int:
    """Bytes that code under these limits may use."""
    if limits.memory_bytes is not None:
        return limits.memory_bytes
    return machine_memory()[1] * 3 // 4


def size_text(num_bytes: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def gibibytes(num_bytes: int) -> str:
    """As messages show it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


_SECRET_NAME = re.compile(
    r"(?i)(^|_)(API_?KEY|ACCESS_?KEY|KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)"
    r"|PASSWORD|SECRET|CREDENTIAL|^PGPASS"
)
_OURS = ("ROLLOUT_", "PREFECT_")
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_PROXIES = re.compile(r"(?i)(https?|all|ftp)_proxy")


@contextmanager
def in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in this process's environment inside the block, and in what is started there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment() -> dict[str, str]:
    """Variables for a process of other people's code, which finds this package where this process did.

    A variable is left out where its name says that it holds a secret (``..._KEY``, ``..._TOKEN``,
    ``...PASSWORD...`` and so on), where its value is an address with a password, and where it is a setting of this
    project or of Prefect, which lead to storage and database (the form of logs does not). What the code needs of
    these, such as the key of a judge's endpoint, the owner of the worker puts on the list of secrets: with
    ``ROLLOUT_SECRETS=OPENAI_API_KEY`` both ``OPENAI_API_KEY`` and ``ROLLOUT_SECRET_OPENAI_API_KEY`` are passed on.
    """
    allowed = allowed_secrets()
    passed = {name: value for name, value in os.environ.items() if _may_pass(name, value, allowed)}
    return passed | {"PYTHONPATH": search_path()}


def _may_pass(name: str, value: str, allowed: frozenset[str]) -> bool:
    if name.removeprefix(SECRET_PREFIX) in allowed or name in (SECRET_LIST, FORM):
        return True
    if holds_a_secret(name):
        return False
    return _PROXIES.fullmatch(name) is not None or not _PASSWORD_IN_ADDRESS.search(value)


def holds_a_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, or is a setting of this project or of Prefect."""
    return name.startswith(_OURS) or _SECRET_NAME.search(name) is not None


def exit_reason(code: int) -> str:
    """How a process of this exit code ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
