"""A sandbox: runs programs of others, many at once, behind walls that were tried first.

Without a wall it refuses, unless ``kind="none"`` is written out.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, get_args

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.machine import usable_cores
from rollout_core.sandbox.commands import PRESETS, CommandRunner
from rollout_core.sandbox.kernel import MACHINE, is_supported
from rollout_core.sandbox.launching import Launcher, Session, Setup
from rollout_core.sandbox.programs import Outcome, Program, SandboxKind
from rollout_core.sandbox.remote import RemoteRunner
from rollout_core.sandbox.walls import NoSandbox, Wall, Walls, probe, probed, refused

AUTO: tuple[SandboxKind, ...] = ("namespaces", "bubblewrap")
"""Tried in this order. Namespaces made here have all of bubblewrap's walls and landlock, and start in a seventh of its
time; bubblewrap can be allowed where an ordinary program is not (AppArmor, set-user-id)."""
NOBODY = 65534
"""The user that programs are outside their namespaces where this process is root's."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Which sandbox, and what programs find in it."""

    kind: SandboxKind = "auto"
    """``auto``: the first of `AUTO` whose walls stand. ``none``: no wall, which has to be written out."""
    parallel: int | None = None
    """Programs at a time; None: one for each processor of this process."""
    readable: Sequence[str] = ()
    """Folders or files that programs may read, too, under their own names."""
    search_path: Sequence[str] = ()
    """Where programs in Python find further modules. Each is readable, too."""
    python: str | None = None
    """Interpreter of programs in Python; None: the one that runs this."""
    image: str = "python:3.11-slim"
    """Of docker and gvisor."""
    command: Sequence[str] = ()
    """Of ``command``: what runs a program, with placeholders (`commands.PLACEHOLDERS`)."""
    url: str = ""
    """Of ``http``: the address of a sandbox service."""
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(SandboxKind):
            raise ConfigError(f"sandbox {self.kind!r} is not known; expected one of {', '.join(get_args(SandboxKind))}")
        if self.parallel is not None and self.parallel < 1:
            raise ConfigError(f"parallel of a sandbox is {self.parallel}; expected at least 1")
        for path in (*self.readable, *self.search_path):
            if not os.path.isabs(path) or os.path.normpath(path) == "/":
                raise ConfigError(f"{path!r} is to be readable in a sandbox; expected an absolute path other than /")
        if (self.kind == "http") != bool(self.url):
            raise ConfigError("url of a sandbox goes with kind = 'http', which needs one")
        if (self.kind == "command") != bool(self.command):
            raise ConfigError("command of a sandbox goes with kind = 'command', which needs one")


class Runner(Protocol):
    """What runs one program."""

    def run(self, program: Program) -> Outcome: ...

    def run_linked(self, first: Program, second: Program) -> tuple[Outcome, Outcome]: ...

    def close(self) -> None: ...


class Sandbox:
    """Runs programs. Threads may share one; it starts with its first program, and `close` ends what it holds."""

    def __init__(self, settings: SandboxSettings | None = None, **options: Any) -> None:
        self.settings = replace(settings or SandboxSettings(), **options)
        self.parallel = self.settings.parallel or usable_cores()
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(self.parallel)
        self._opened: tuple[Runner, Walls] | None = None

    def run(self, program: Program) -> Outcome:
        """Run it to its end, once it is its turn.

        Raises NoSandbox, a ConfigError, where this machine has no such sandbox, and Recoverable where it or the service
        failed: never for what the program does.
        """
        with self._turns:
            return self._standing().run(program)

    def run_many(self, programs: Iterable[Program]) -> list[Outcome]:
        """Run them side by side; outcomes in their order. Raises as `run`."""
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="rollout-sandbox") as pool:
            return list(pool.map(self.run, programs))

    async def run_async(self, program: Program) -> Outcome:
        """`run`, in a thread."""
        return await asyncio.to_thread(self.run, program)

    def run_linked(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Run two programs, each in walls of its own, with nothing between them but a stream socket, which both have
        as descriptor 3. The second is ended when the first has ended. Raises as `run`, and ConfigError where this kind
        of sandbox cannot link programs."""
        with self._turns:
            return self._standing().run_linked(first, second)

    def open(self, program: Program) -> Session:
        """Start a program that runs until its caller ends it. It takes no turn: callers bound how many there are.
        Raises as `run`, and ConfigError where this kind of sandbox cannot talk with programs."""
        runner = self._standing()
        if not isinstance(runner, Launcher):
            raise ConfigError(
                f"a sandbox of kind {self.settings.kind} talks with no program that runs; use namespaces or bubblewrap"
            )
        return runner.open(program)

    def walls(self) -> Walls:
        """What this sandbox is made of on this machine. Raises ConfigError for settings that name what is not there."""
        try:
            with self._lock:
                return self._open()[1]
        except Recoverable as error:
            return Walls(self.settings.kind, (Wall("service", False, str(error)),))

    def close(self) -> None:
        """End the processes that it holds; another program starts them again."""
        with self._lock:
            if self._opened is not None:
                self._opened[0].close()
                self._opened = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _standing(self) -> Runner:
        with self._lock:
            runner, walls = self._open()
        if walls.stand or (self.settings.kind == "none" and is_supported()):
            return runner
        raise NoSandbox(
            f"this machine has no sandbox of kind {walls.kind}: {'; '.join(walls.missing())}. Programs of others are "
            'not run without one; see `rollout doctor machine`, or write sandbox = "none" to run them without any wall',
            walls.missing(),
        )

    def _open(self) -> tuple[Runner, Walls]:
        """What runs programs, and its walls. One whose walls do not stand is closed and tried again the next time: what
        was in their way may have passed. Raises Recoverable where a service does not answer."""
        if self._opened is None:
            found: list[tuple[Runner, Walls]] = []
            for kind in AUTO if self.settings.kind == "auto" else (self.settings.kind,):
                found.append(opened(kind, self.settings))
                if found[-1][1].stand:
                    break
            best = next((one for one in found if one[1].stand), found[0])
            for runner, _ in found:
                if runner is not best[0]:
                    runner.close()
            if not best[1].stand and self.settings.kind != "none":
                best[0].close()
                return best
            self._opened = best
        return self._opened


def opened(kind: SandboxKind, settings: SandboxSettings) -> tuple[Runner, Walls]:
    """A sandbox of this kind, and its walls. Raises Recoverable where a service does not answer."""
    if kind == "http":
        remote = RemoteRunner(settings.url, settings.api_key)
        return remote, remote.walls()
    if kind in PRESETS or kind == "command":
        command = CommandRunner(settings.command or PRESETS[kind], settings.image)
        lacking = command.lacking()
        if lacking is not None:
            return command, Walls(kind, (Wall(kind, False, lacking),))
        try:
            found = probed(command.run)
        except Recoverable as error:
            return command, Walls(kind, (Wall(kind, False, str(error)),))
        if kind == "gvisor":  # its programs' calls never reach this machine's kernel
            calls = Wall("system calls", True, "a kernel of gVisor's own")
            found = [calls if wall.name == calls.name else wall for wall in found]
        return command, Walls(kind, tuple(found))
    launcher = Launcher(_setup(kind, settings))
    if not is_supported():
        return launcher, Walls(kind, (Wall("kernel", False, f"{sys.platform} on {MACHINE} is not known here"),))
    if kind == "none":
        return launcher, Walls(kind, (Wall("none", False, 'sandbox = "none": programs run as this user'),))
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return launcher, refused(kind, "bubblewrap is not installed (apt-get install bubblewrap)")
    return launcher, probe(kind, launcher)


def _setup(kind: SandboxKind, settings: SandboxSettings) -> Setup:
    executable, prefix = _interpreter(settings.python)
    for path in (*settings.readable, *settings.search_path):
        if not os.path.exists(path):
            raise ConfigError(f"{path} is to be readable in a sandbox and does not exist")
    return Setup(
        mode=kind,
        interpreter=prefix,
        executable=executable,
        readable=tuple(os.path.normpath(path) for path in (*settings.readable, *settings.search_path)),
        search_path=tuple(settings.search_path),
        uid=NOBODY,
        program=shutil.which("bwrap") or "",
    )


def _interpreter(python: str | None) -> tuple[str, str]:
    """Its executable and the folder it is installed in; not those of a virtual environment."""
    if python is None:
        return getattr(sys, "_base_executable", None) or sys.executable, sys.base_prefix
    found = Path(python).resolve()
    if not found.is_file():
        raise ConfigError(f"python = {python!r} of a sandbox is no file; expected the path of an interpreter")
    return str(found), str(found.parent.parent)


__all__ = ["AUTO", "Runner", "Sandbox", "SandboxSettings", "opened"]
