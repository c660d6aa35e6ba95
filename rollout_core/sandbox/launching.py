"""The caller's side of the launcher: a process that is started with the first program, and again where it is gone.

Each program costs its caller two pipes, a memory file and a socket. What it writes is drained by the thread that waits
for it, and beyond the limit thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_core.base.errors import Recoverable
from rollout_core.base.locks import scratch_folder
from rollout_core.base.stopping import raise_if_stopping
from rollout_core.sandbox.inside import FOLDER, LENGTH_BYTES, TEMPORARY
from rollout_core.sandbox.programs import Outcome, Program

MODULES = (
    "base.process_tree",
    "sandbox.kernel",
    "sandbox.call_filter",
    "sandbox.inside",
    "sandbox.root",
    "sandbox.modes",
    "sandbox.launcher",
)
"""What the launcher is made of, each after those that it imports. They are handed over as text: its user may not be
allowed to read this folder."""
BOOT = """
import json, sys, types
with open(0, encoding="utf-8", closefd=False) as file:
    config = json.load(file)
for name, text in config["modules"]:
    parent, _, last = name.rpartition(".")
    for package in (parent.partition(".")[0], parent):
        sys.modules.setdefault(package, types.ModuleType(package))
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[parent], last, module)
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
program = module.main(config)
if program is not None:
    program.run()
"""
LOCALE = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
START_SECONDS = 60.0
MOST_SAID = 300
"""Characters of what bubblewrap says."""
READ_BYTES = 2**16
DRAIN_SECONDS = 5.0
"""For the last output once a program has ended. Without walls something that it started may hold on to the pipes."""
HEARING_SECONDS = 1.0
"""For a program to end by itself once its caller closes the socket. Without walls, what it has started ends with it
only then."""
LOOK_SECONDS = 1.0
"""Between two looks whether the caller is to stop."""


PACKAGE = Path(__file__).parents[1]


class Refusal(Recoverable):
    """The kernel refuses a wall. ``str`` is its reason."""


@dataclass(frozen=True)
class Setup:
    """How the launcher is started."""

    mode: str
    """``namespaces``, made here; ``bubblewrap``; ``none``."""
    interpreter: str
    """Folder of the Python that programs run by, as ``sys.base_prefix``."""
    executable: str
    readable: tuple[str, ...]
    search_path: tuple[str, ...]
    uid: int
    """The user that root becomes."""
    program: str = ""
    """Bubblewrap's path."""


class Launcher:
    """Runs programs on this machine."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> list[str]:
        """Start it where it does not run; gives the walls that a program puts on itself. Raises Refusal."""
        return self._running().walls

    def run(self, program: Program) -> Outcome:
        """Run it to its end. Raises Recoverable where the machine is at fault, as Refusal where no launcher starts."""
        return _Running(self._running(), self._setup, program).outcome()

    def run_linked(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Run two with a socket between them, each one's descriptor 3; the second ends with the first."""
        process = self._running()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            second_run = _Running(process, self._setup, second, theirs.fileno())
            try:
                first_run = _Running(process, self._setup, first, ours.fileno())
            except BaseException:
                second_run.close()
                raise
        with ThreadPoolExecutor(1, thread_name_prefix="rollout-sandbox-partner") as pool:
            answering = pool.submit(second_run.outcome)
            try:
                outcome = first_run.outcome()
            finally:
                second_run.stop()
            return outcome, answering.result()

    def open(self, program: Program) -> Session:
        """Start it, with a socket to its caller. Raises as `run`."""
        return Session(self._running(), self._setup, program)

    def close(self) -> None:
        """End it, and what it still runs."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _running(self) -> _Process:
        with self._lock:
            found = self._process
            if found is None or found.owner != os.getpid() or found.popen.poll() is not None:
                if found is not None and found.owner == os.getpid():
                    found.end()
                found = self._process = _Process(self._setup)
            return found


class _Process:
    """A launcher that has said what it can do."""

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner = os.getpid()
        self.control = ours
        config = {
            "mode": setup.mode,
            "control": theirs.fileno(),
            "caller": self.owner,
            "interpreter": setup.interpreter,
            "readable": list(setup.readable),
            "uid": setup.uid,
            "executable": setup.executable,
            "program": setup.program,
            "modules": [[f"{PACKAGE.name}.{name}", _text_of(name)] for name in MODULES],
        }
        boot = _memory_file([json.dumps(config).encode()])
        with theirs:
            try:
                self.popen = subprocess.Popen(
                    [setup.executable, "-P", "-s", "-S", "-c", BOOT],
                    stdin=boot,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment(setup.interpreter),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                ours.close()
                raise Refusal(f"{setup.executable} does not start: {error.strerror}") from None
            finally:
                os.close(boot)
        self.end = weakref.finalize(self, _end, self.popen, ours, self.owner)
        self.walls = self._greeting()

    def _greeting(self) -> list[str]:
        self.control.settimeout(START_SECONDS)
        try:
            said = json.loads(self.control.recv(READ_BYTES) or b"{}")
        except (OSError, ValueError):
            said = {}
        if "walls" in said:
            self.control.settimeout(None)
            return said["walls"]
        if "refused" in said:
            self.end()
            raise Refusal(said["refused"])
        self.popen.kill()
        assert self.popen.stdout is not None
        last = self.popen.stdout.read().decode(errors="replace").strip().splitlines()[-1:]
        self.end()
        raise Refusal(f"the launcher did not start: {last[0] if last else 'it said nothing'}")

    def send(self, header: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Ask for a program. Raises Recoverable where the launcher is gone."""
        try:
            socket.send_fds(self.control, [json.dumps(header).encode()], descriptors)
        except OSError as error:
            if isinstance(error, ConnectionError):
                self.end()  # it has closed its end, and may not have ended yet; the next program starts another
            raise Recoverable(f"the launcher of sandboxes is gone: {error.strerror}") from None


def _end(popen: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # a copy of the caller's process ends
    control.close()
    # Others that this process forked may hold copies of the socket, so it is killed; the kernel ends what it runs.
    popen.kill()
    if popen.stdout is not None:
        popen.stdout.close()
    popen.wait()


def _text_of(module: str) -> str:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def environment(interpreter: str) -> dict[str, str]:
    """All that programs find there."""
    return {
        "PATH": f"{interpreter}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": FOLDER,
        "TMPDIR": TEMPORARY,
        "PYTHONHASHSEED": "0",  # a program in Python does the same again
        "PYTHONDONTWRITEBYTECODE": "1",
        **LOCALE,
    }


def _memory_file(parts: Sequence[bytes]) -> int:
    """A descriptor of a file of memory that nobody can change, read from its beginning."""
    descriptor = os.memfd_create("rollout-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _payload(program: Program, setup: Setup) -> int:
    """What the program's first process reads."""
    argv, files = program.command()
    source = None
    if program.source is not None and program.language == "python":  # continues in the launcher's interpreter
        source, argv = program.source, program.argv
    header = {
        "source": source,
        "argv": list(argv),
        "env": environment(setup.interpreter) | dict(program.environment),
        "search_path": list(setup.search_path),
        "files": [[name, 0o755 if body.startswith(b"#!") else 0o644, len(body)] for name, body in files.items()],
        **asdict(program.limits),
    }
    # The second version of the format is the same in every Python.
    fields = marshal.dumps(header, 2)
    return _memory_file([len(fields).to_bytes(LENGTH_BYTES, "little"), fields, *files.values()])


class Session:
    """A program that runs while its caller talks with it over ``channel``, a stream socket that the program has as its
    descriptor 3, and that is to end when it is closed. What it writes to its output is not read before its end, so it
    has to speak by the socket."""

    def __init__(self, process: _Process, setup: Setup, program: Program) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._program = _Running(process, setup, program, theirs.fileno())
            except BaseException:
                self.channel.close()
                raise

    def stop(self) -> None:
        """Tell it to end, without waiting for that."""
        with contextlib.suppress(OSError):  # it has ended
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self) -> Outcome:
        """End it where it still runs, with all that it started; how it ended. It is killed where it does not hear that
        it is to end. Raises Recoverable where the launcher is gone, and the program with it."""
        self.stop()
        if not self._program.answers_within(HEARING_SECONDS):
            self._program.stop()
        with self.channel:
            return self._program.outcome()


class _Running:
    """One program on its way to its outcome."""

    def __init__(self, process: _Process, setup: Setup, program: Program, channel: int | None = None) -> None:
        self._limits = program.limits
        self._is_flooded = False
        with ExitStack() as theirs:

            def passed(descriptor: int) -> int:
                theirs.callback(os.close, descriptor)
                return descriptor

            with ExitStack() as ours:
                payload = passed(_payload(program, setup))
                stdin = passed(
                    _memory_file([program.stdin]) if program.stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                )
                pipes = [os.pipe(), os.pipe()]
                for readable, writable in pipes:
                    ours.callback(os.close, readable)
                    passed(writable)
                self._answer, answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.enter_context(self._answer)
                given = [payload, stdin, pipes[0][1], pipes[1][1], passed(answer.detach())]
                self._outputs = {readable: bytearray() for readable, _ in pipes}
                header: dict[str, Any] = {"wall_seconds": self._limits.wall_seconds}
                header["disk_bytes"] = self._limits.disk_bytes
                if setup.mode == "none":
                    header["folder"] = str(ours.enter_context(scratch_folder("sandbox")))
                process.send(header, [*given, *([] if channel is None else [channel])])
                self.close = ours.pop_all().close

    def stop(self) -> None:
        """End it before its time."""
        with contextlib.suppress(OSError):
            self._answer.send(b"kill")

    def answers_within(self, seconds: float) -> bool:
        """Whether it ends in this time, or has ended."""
        poll = select.poll()
        poll.register(self._answer, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def outcome(self) -> Outcome:
        """Wait for its end. Raises Recoverable where the machine is at fault."""
        with contextlib.closing(self):
            answer = self._wait()
        if answer is None:
            raise Recoverable("the launcher of sandboxes ended while it ran a program; trying again starts another")
        stdout, stderr = map(bytes, self._outputs.values())
        if "error" in answer:
            said = stderr.decode(errors="replace").strip()[-MOST_SAID:]
            raise Recoverable(f"a sandbox could not be set up: {answer['error']}{f' ({said})' if said else ''}")
        ended, status = answer.get("ended"), answer.get("status", 0)
        if self._is_flooded:
            ended = "output"
        code = None if ended is not None else os.waitstatus_to_exitcode(status)
        if code is not None and -code == signal.SIGXCPU:
            ended = "cpu"
        return Outcome(
            ended=ended or ("exit" if code is not None and code >= 0 else "signal"),
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            wall_seconds=answer["wall_seconds"],
            cpu_seconds=answer["cpu_seconds"],
        )

    def _wait(self) -> dict[str, Any] | None:
        """The launcher's answer, once all output is read."""
        poll = select.poll()
        waiting = {*self._outputs, self._answer.fileno()}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        message, last = b"", math.inf
        while waiting and time.monotonic() < last:
            for descriptor, _ in poll.poll(LOOK_SECONDS * 1000):
                if descriptor in self._outputs:
                    chunk = os.read(descriptor, READ_BYTES)
                    self._keep(descriptor, chunk)
                else:
                    message = self._receive()
                    chunk, last = b"", time.monotonic() + DRAIN_SECONDS
                if not chunk:
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
            raise_if_stopping("a program in a sandbox")
        return json.loads(message) if message else None

    def _receive(self) -> bytes:
        try:
            return self._answer.recv(READ_BYTES)
        except ConnectionResetError:
            # The launcher ended without having read that it is to stop the program. The error comes before the answer.
            return self._answer.recv(READ_BYTES)

    def _keep(self, descriptor: int, chunk: bytes) -> None:
        room = self._limits.output_bytes - sum(map(len, self._outputs.values()))
        self._outputs[descriptor] += chunk[: max(0, room)]
        if len(chunk) > room and not self._is_flooded:
            self._is_flooded = True
            self.stop()
