"""The two processes within the walls: one that sets them up and watches, and the program itself.

The watcher is the first process of the program's PID namespace, so that nothing in there can end it, and all in there
ends with it. It has no capabilities once the program runs, and cannot be looked into.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import marshal
import math
import os
import resource
import select
import signal
import site
import sys
import time
import types
from collections.abc import Callable, Sequence

from rollout_core.sandbox import kernel
from rollout_core.sandbox.call_filter import call_filter

PLACE = "/box"
"""The one place a program may write to; gone with it."""
FOLDER = f"{PLACE}/home"
"""Where it starts."""
TEMPORARY = f"{PLACE}/tmp"
"""Also under the name ``/tmp``, unless folders below that are to be readable."""
SOURCE = "main.py"
USER = 1000
CHANNEL = 3
"""The descriptor that leads to another program, where there is one."""
TICK_SECONDS = 0.025
"""Between two looks at what all its processes use together. A trivial program has ended before the first."""
OPEN_FILES = 256
LENGTH_BYTES = 8
MOST_MESSAGE = 2000
"""Bytes of what a first process says at a time."""
MOST_DESCRIPTORS = 2**16
"""More than the launcher ever has."""
NUM_INODES = 16_384
_PAGE = os.sysconf("SC_PAGESIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
FILTER = call_filter() if kernel.is_supported() else b""


class Descriptors:
    """Those of one program, as the launcher received them."""

    def __init__(self, payload: int, standard: tuple[int, int, int], launcher: int, channel: int | None) -> None:
        self.payload = payload
        self.standard = standard
        self.launcher = launcher
        self.channel = channel

    def all(self) -> list[int]:
        """Every one."""
        return [self.payload, *self.standard, self.launcher, *([] if self.channel is None else [self.channel])]

    def to_fields(self) -> list[object]:
        """As plain values, for another process that has the same descriptors."""
        return [self.payload, self.standard, self.launcher, self.channel]

    @classmethod
    def from_fields(cls, fields: list) -> Descriptors:
        """Inverse of `to_fields`."""
        payload, standard, launcher, channel = fields
        return cls(payload, tuple(standard), launcher, channel)

    def close_programs(self) -> None:
        """Close those that only the program needs."""
        for descriptor in self.all():
            if descriptor != self.launcher:
                os.close(descriptor)


class Request:
    """A program, and what it may take. Read within the walls, from a memory file: the length of the fields, these by
    `marshal`, then the contents of its files one after another. JSON would cost bubblewrap's programs 5 ms of imports.
    """

    def __init__(self, payload: int) -> None:
        size = os.fstat(payload).st_size
        data = memoryview(os.pread(payload, size, 0)) if size < 2**20 else _read_all(payload, size)
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        self.fields = marshal.loads(data[LENGTH_BYTES:end])  # noqa: S302 - written by `launching`
        self._contents = data[end:]

    def unpack(self, folder: str) -> None:
        """Write the program's files. Raises OSError with ENOSPC where they do not fit."""
        offset = 0
        for name, mode, size in self.fields["files"]:
            path = f"{folder}/{name}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            rest = self._contents[offset : offset + size]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.close(descriptor)
            offset += size


def _read_all(payload: int, size: int) -> memoryview:
    parts, offset = [], 0
    while offset < size:
        parts.append(os.pread(payload, size - offset, offset))
        offset += len(parts[-1])
    return memoryview(b"".join(parts))


class Program:
    """The program's own process, before it becomes the program."""

    def __init__(self, request: Request, descriptors: Descriptors, folder: str, walls: Sequence[str]) -> None:
        self._request = request
        self._descriptors = descriptors
        self._folder = folder
        self._walls = walls

    def run(self) -> None:
        """Become it: returns when a program in Python has come to its end, and not at all otherwise."""
        fields = self._request.fields
        launcher = fcntl.fcntl(self._descriptors.launcher, fcntl.F_DUPFD_CLOEXEC, CHANNEL + 1)
        try:
            self._confine(fields, launcher)
        except BaseException as error:  # noqa: BLE001 - the machine's fault, and never the program's
            tell(launcher, {"error": f"{type(error).__name__}: {error}"})
            os._exit(1)
        os.close(launcher)
        if fields["source"] is None:
            _execute(fields["argv"], fields["env"])
        else:
            # A large list of arguments is no reason to keep it.
            self._request._contents = memoryview(b"")
            _interpret(fields["source"], fields["argv"], fields["env"], fields["search_path"])

    def _confine(self, fields: dict, launcher: int) -> None:
        kernel.die_with_parent()
        os.setsid()
        os.chdir(self._folder)
        os.umask(0o022)
        for number, descriptor in enumerate(self._descriptors.standard):
            os.dup2(descriptor, number)
        kept = {launcher}
        if self._descriptors.channel is not None:
            os.dup2(self._descriptors.channel, CHANNEL)
            os.set_inheritable(CHANNEL, True)
            kept.add(CHANNEL)
        close_others(kept)
        _limit(fields)
        if "capabilities" in self._walls:
            kernel.drop_capabilities()
        kernel.set_dumpable(True)
        kernel.forbid_new_privileges()
        if "landlock" in self._walls:
            kernel.landlock(PLACE, "/dev")
        if "system calls" in self._walls:
            kernel.filter_calls(FILTER)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            if fields["source"] is None:
                signal.signal(number, signal.SIG_DFL)


def close_others(kept: set[int]) -> None:
    """Close all descriptors but the standard ones and these."""
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, MOST_DESCRIPTORS)


def _limit(fields: dict) -> None:
    processes, memory, disk = fields["processes"], fields["memory_bytes"], fields["disk_bytes"]
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(fields["cpu_seconds"])),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_MEMLOCK, 65_536),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        # Without a user namespace the kernel would count all that this user runs.
        *([(resource.RLIMIT_NPROC, processes + fields["extra_processes"])] if fields["own_users"] else []),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        *([(resource.RLIMIT_AS, memory)] if fields["address_space"] else []),
    ):
        # SIGXCPU comes first, and a second later SIGKILL for those that ignore it.
        wanted = most + 1 if kind == resource.RLIMIT_CPU else most
        before = resource.getrlimit(kind)[1]
        hard = wanted if before == resource.RLIM_INFINITY else min(wanted, before)
        resource.setrlimit(kind, (min(most, hard), hard))


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _interpret(source: str, argv: Sequence[str], environment: dict[str, str], search_path: Sequence[str]) -> None:
    """Run Python's source in this interpreter, which has run nothing yet but the launcher, as ``python main.py``."""
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollout_core"]:
        del sys.modules[name]
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=SOURCE)
    sys.modules["__main__"] = module
    sys.argv = [SOURCE, *argv]
    sys.path[:0] = [os.getcwd()]
    sys.path.extend(search_path)
    site.setquit()
    site.sethelper()
    gc.enable()
    try:
        exec(compile(source, SOURCE, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its top
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


# The watcher


def watch(child: int, launcher: int, fields: dict, living: Callable[[], list[int]]) -> None:
    """Wait for the program's end and tell the launcher how it came, or which limit the program has passed.

    ``living`` finds the program's processes. The caller ends them.
    """
    program = os.pidfd_open(child)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(launcher, 0)  # only that it is gone
    deadline = time.monotonic() + fields["wall_seconds"]
    while True:
        rest = max(0.0, deadline - time.monotonic())
        events = dict(poll.poll(min(TICK_SECONDS, rest) * 1000))
        if launcher in events:
            return
        usage = _usage(living())
        if program in events:
            _, status = os.waitpid(child, 0)
            tell(launcher, {"status": status, "cpu_seconds": _waited_seconds() + usage[2]})
            return
        _reap(child)
        if usage[1] > fields["memory_bytes"]:
            usage = (usage[0], _own_bytes(living()), usage[2])
        if reason := _passed(fields, *usage, rest):
            tell(launcher, {"ended": reason, "cpu_seconds": _waited_seconds() + usage[2]})
            return


def tell(launcher: int, message: dict) -> None:
    """Send a message to the launcher: a line for each field."""
    text = "".join(f"{name}={str(value).replace(chr(10), ' ')}\n" for name, value in message.items())
    with contextlib.suppress(OSError):  # it is gone, and nobody waits for it
        os.write(launcher, text.encode("utf-8", "replace")[:MOST_MESSAGE])


def said(text: str) -> dict:
    """Inverse of what `tell` writes."""
    kinds = {"status": int, "cpu_seconds": float}
    fields = (line.partition("=") for line in text.split("\n") if line)
    return {name: kinds.get(name, str)(value) for name, _, value in fields}


def _reap(program: int) -> None:
    """Wait for what the program has left to the first process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == program:
                return
            os.waitpid(ended.si_pid, 0)


def _waited_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_namespace() -> list[int]:
    """The other processes of this PID namespace; none where its table is not to be had."""
    own = str(os.getpid())
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != own]


def _usage(living: list[int]) -> tuple[int, int, float]:
    """The number of these processes that live, their resident memory, and what they have had of a processor, in
    seconds."""
    processes, memory, seconds = 0, 0, 0.0
    for process in living:
        with contextlib.suppress(OSError, IndexError, ValueError):  # it ended meanwhile
            with open(f"/proc/{process}/stat", "rb") as file:
                found = file.read().rpartition(b")")[2].split()
            if found[0] not in (b"Z", b"X"):
                processes += 1
                memory += int(found[21]) * _PAGE
                seconds += sum(map(int, found[11:15])) / _TICKS
    return processes, memory, seconds


def _own_bytes(living: list[int]) -> int:
    """Their memory, with what several share counted once. Expensive: the kernel walks the pages."""
    total = 0
    for process in living:
        try:
            with open(f"/proc/{process}/smaps_rollup", "rb") as file:
                total += next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
        except OSError:  # it has ended, or hides
            total += _usage([process])[1]
    return total


def _passed(fields: dict, processes: int, memory: int, seconds: float, rest: float) -> str | None:
    """The limit that all processes of this namespace together have passed."""
    if memory > fields["memory_bytes"]:
        return "memory"
    if seconds + _waited_seconds() > fields["cpu_seconds"]:
        return "cpu"
    if processes > fields["processes"] + fields["extra_processes"]:
        return "processes"
    return "time" if rest <= 0 else None
