"""The caller's side: a child process that is started when it is first called, and again after it has ended; and one
that is ended when it has not been called for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_core.base.errors import Fatal, Recoverable, error_of
from rollout_core.base.isolation.warden import (
    BUSY,
    END,
    FRAME_LENGTH,
    IDLE,
    PROGRESS_BYTES,
    STARTING,
    BadFrame,
    Progress,
    decode_frame,
    encode_frame,
    frame_size,
)
from rollout_core.base.logs import text_of
from rollout_core.base.processes import Limits, allowed_memory, child_environment, gibibytes, signal_name
from rollout_core.base.stopping import raise_if_stopping

log = logging.getLogger(__name__)

READ_BYTES = PIPE_BYTES = 2**20
LINE_CHARACTERS = 1000
LOGGED_LINES = 200
"""Of one call; further lines are only counted."""
LAST_LINES = 5
START_SECONDS = 120.0
"""For a process to begin with a request. A busy machine takes long, which is not the code's fault."""
STOPPED = "code running in a child process"
WARDEN = "rollout_core.base.isolation.warden"
PACKAGE = Path(__file__).parents[2]
BOOT = """
import importlib.util, runpy, sys
found = importlib.util.spec_from_file_location(
    "rollout_core", {package!r} + "/__init__.py", submodule_search_locations=[{package!r}]
)
sys.modules["rollout_core"] = module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
runpy.run_module({warden!r}, run_name="__main__")
"""
"""For another interpreter: the folder that this package is in may hold more that is not for it."""
END_SECONDS = 15.0


class Ended(Fatal):
    """The code did not come to the end of a call, and its processes are gone. ``str`` is the reason, in a form that
    follow "it"; ``place`` how far the handler was, None before its first step."""

    def __init__(self, reason: str, place: int | None = None) -> None:
        self.place = place
        super().__init__(reason)

    def __reduce__(self):
        return type(self), (self.args[0], self.place)


class Interrupted(Recoverable):
    """A call did not come to its end, or did not begin, for a reason that lies with the machine and not with the code.

    ``reason`` and ``place`` are as `Ended` has them.
    """

    def __init__(self, reason: str, place: int | None = None) -> None:
        self.reason = reason
        self.place = place
        super().__init__(f"a child process {reason}")

    def __reduce__(self):
        return type(self), (self.reason, self.place)


class Child:
    """A process that runs ``handler`` (``module:function``, see `warden.Handler`), and whatever that runs.

    Calls take turns. A child that was ended by a call that failed starts anew with the next one.
    ``on_line`` gets the lines that the code writes. ``prepare`` gets every new process ready: it is given what asks it,
    as `call` does, before any call gets through, and within ``prepare_seconds`` (default: as a call). A process that it
    raises for is ended. ``python``: an interpreter, from 3.11 on, with packages of its own; of ours it finds this one
    alone. Default: the one that runs this, with all that it finds.
    """

    def __init__(
        self,
        handler: str,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        on_line: Callable[[str], None] = log.info,
        prepare: Callable[[Callable[[Any], Any]], object] = lambda ask: None,
        prepare_seconds: float | None = None,
    ) -> None:
        self._handler = handler
        self._python = python
        self._prepare = prepare
        self._limits = limits or Limits()
        self._preparing = self._limits if prepare_seconds is None else replace(self._limits, seconds=prepare_seconds)
        self._on_line = on_line
        self._lock = threading.Lock()
        self._process: _Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not ended; what an earlier call left in its memory is then still there."""
        return self._process is not None and self._process.popen.poll() is None

    def call(self, request: Any) -> Any:
        """What the handler returns for ``request``, both as JSON values.

        Raises Ended where it does not come to its end within the limits, Interrupted where the machine is to blame, and
        what the handler raised: an error of this project as it was, another as Fatal naming its kind. Also what
        ``prepare`` raises.
        """
        with self._lock:
            return self._ask(self._running(), request, self._limits)

    def start(self) -> None:
        """Start it and get it ready where it does not run. Raises what ``prepare`` does."""
        with self._lock:
            self._running()

    def _running(self) -> _Process:
        if self._process is not None and self.is_running:
            return self._process
        self._close()
        process = self._process = _start(self._handler, self._limits, self._python)
        try:
            self._prepare(lambda request: self._ask(process, request, self._preparing))
        except BaseException:
            self._close()
            raise
        return process

    def _ask(self, process: _Process, request: Any, limits: Limits) -> Any:
        try:
            answer = _Call(process, limits, self._on_line).run(request)
        except BaseException:
            self._close()  # also on a signal: an answer to come would be taken for that of the next call
            raise
        if "error" in answer:
            error = error_of(answer["error"])
            # Only an error that says so itself is worth another try.
            raise Fatal(str(error)) if answer["error"]["hint"] is None and isinstance(error, Recoverable) else error
        return answer["value"]

    def close(self) -> None:
        """End all of the code's processes."""
        with self._lock:
            self._close()

    def end(self) -> None:
        """Have all of the code's processes end, also those of a call under way in another thread, which then raises
        Interrupted."""
        process = self._process
        if process is not None:
            process.pipes.tell(END)

    def _close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Pipes:
    """The caller's ends, and the memory that shows how far the code is."""

    control: int
    verdict: int
    requests: int
    answers: int
    output: int
    progress: Progress
    _open: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def tell(self, what: bytes) -> None:
        """Say something to the warden, from any thread: once it is closed, the number may be another file's."""
        with self._open:
            if not self._is_closed:
                with contextlib.suppress(OSError):  # it is gone, which the verdict says
                    os.write(self.control, what)

    def close(self) -> None:
        with self._open:
            self._is_closed = True
            for descriptor in (self.control, self.verdict, self.requests, self.answers, self.output):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.progress.close()


class _Process:
    """A warden that runs, with the pipes to it and to the code."""

    def __init__(self, popen: subprocess.Popen[bytes], pipes: _Pipes) -> None:
        self.popen = popen
        self.pipes = pipes
        self.end = weakref.finalize(self, _end, popen, pipes, os.getpid())


def _end(popen: subprocess.Popen[bytes], pipes: _Pipes, owner: int) -> None:
    if os.getpid() != owner:
        return  # a copy of the caller's process ends, such as one that multiprocessing forked
    # It is asked to end: closing the pipe would not do, where another process of ours has a copy of it.
    pipes.tell(END)
    pipes.close()
    try:
        popen.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _start(handler: str, limits: Limits, python: str | None) -> _Process:
    opened: list[int] = []

    def pipe() -> tuple[int, int]:
        pair = os.pipe()
        opened.extend(pair)
        return pair

    try:
        (control_end, control), (verdict, verdict_end) = pipe(), pipe()
        (requests_end, requests), (answers, answers_end), (output, output_end) = pipe(), pipe(), pipe()
        memory = os.memfd_create("rollout-progress")
        opened.append(memory)
        os.truncate(memory, PROGRESS_BYTES)
        options = {
            "caller": os.getpid(),
            "control": control_end,
            "verdict": verdict_end,
            "requests": requests_end,
            "answers": answers_end,
            "progress": memory,
            "handler": handler,
            "search_path": [entry or os.getcwd() for entry in sys.path] if python is None else None,
            "memory_bytes": allowed_memory(limits),
            "max_processes": limits.processes,
            "address_space": limits.address_space,
        }
        theirs = (control_end, verdict_end, requests_end, answers_end, memory)
        popen = subprocess.Popen(
            [*_command(python), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            env=child_environment() if python is None else _without_path(child_environment()),
            pass_fds=theirs,
            start_new_session=True,  # Ctrl-C and hang-ups of a terminal are ours to hear
        )
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
    progress = Progress(memory)
    for descriptor in (*theirs[:-1], output_end):
        os.close(descriptor)
    for descriptor in (verdict, requests, answers, output):
        os.set_blocking(descriptor, False)
    for descriptor in (requests, answers):
        with contextlib.suppress(OSError):  # beyond what this user may have
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return _Process(popen, _Pipes(control, verdict, requests, answers, output, progress))


def _command(python: str | None) -> list[str]:
    if python is None:
        return [sys.executable, "-P", "-u", "-m", WARDEN]
    return [python, "-P", "-u", "-c", BOOT.format(package=str(PACKAGE), warden=WARDEN)]


def _without_path(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "PYTHONPATH"}


class _Call:
    """One request on its way to its answer: writes, reads and waits at once, so that neither side blocks the other."""

    def __init__(self, process: _Process, limits: Limits, on_line: Callable[[str], None]) -> None:
        self._pipes = process.pipes
        self._limits = limits
        self._output = _Output(on_line)
        self._answer = bytearray()
        self._selector = selectors.DefaultSelector()
        self._place = STARTING
        self._since = time.monotonic()

    def run(self, request: Any) -> Any:
        """The answer's frame, decoded. Raises Ended and Interrupted."""
        outgoing = memoryview(encode_frame({"request": request}))
        self._pipes.progress.place = STARTING
        self._pipes.tell(BUSY)
        try:
            with self._selector:
                for descriptor in (self._pipes.verdict, self._pipes.answers, self._pipes.output):
                    self._selector.register(descriptor, selectors.EVENT_READ)
                self._selector.register(self._pipes.requests, selectors.EVENT_WRITE)
                while True:
                    ready = {key.fd for key, _ in self._selector.select(min(1.0, self._limits.seconds / 5))}
                    if self._pipes.requests in ready:
                        outgoing = self._write(outgoing)
                    if self._pipes.output in ready:
                        self._read_output()
                    if self._pipes.answers in ready and (answer := self._read_answer()) is not None:
                        return answer
                    if self._pipes.verdict in ready:
                        raise self._verdict()
                    self._check_time()
                    raise_if_stopping(STOPPED)
        finally:
            self._pipes.tell(IDLE)
            self._output.finish()

    def _write(self, outgoing: memoryview) -> memoryview:
        try:
            outgoing = outgoing[os.write(self._pipes.requests, outgoing[:READ_BYTES]) :]
        except BlockingIOError:
            return outgoing
        except OSError:  # nobody reads any more, which the verdict says
            outgoing = outgoing[:0]
        if not outgoing:
            self._selector.unregister(self._pipes.requests)
        return outgoing

    def _read(self, descriptor: int) -> bytes:
        """What is there; nothing more will come of a pipe that gives none."""
        with contextlib.suppress(BlockingIOError):
            read = os.read(descriptor, READ_BYTES)
            if not read:
                self._selector.unregister(descriptor)
            return read
        return b""

    def _read_output(self) -> None:
        self._output.take(self._read(self._pipes.output))
        if self._output.num_bytes > self._limits.output_bytes:
            raise self._ended(f"wrote more than {gibibytes(self._limits.output_bytes)} of output")

    def _read_answer(self) -> Any:
        self._answer += self._read(self._pipes.answers)
        head = FRAME_LENGTH.size
        try:
            if len(self._answer) < head or len(self._answer) < head + frame_size(bytes(self._answer[:head])):
                return None
            answer = decode_frame(bytes(self._answer[head:]))
            if not isinstance(answer, dict) or not {"value", "error"} & answer.keys():
                raise BadFrame("a frame that is no answer")
        except BadFrame as error:
            raise self._ended(f"wrote into the pipe that its results go through ({error})") from None
        self._read_rest()
        return answer

    def _read_rest(self) -> None:
        """What it wrote before it answered or ended."""
        while self._pipes.output in self._selector.get_map() and self._output.num_bytes <= self._limits.output_bytes:
            read = self._read(self._pipes.output)
            if not read:
                break
            self._output.take(read)

    def _check_time(self) -> None:
        place = self._pipes.progress.place
        if place != self._place:
            self._place, self._since = place, time.monotonic()
            return
        seconds = time.monotonic() - self._since
        if place == STARTING and seconds > START_SECONDS:
            raise self._ended(f"took longer than {START_SECONDS:g} s to start (the machine may be busy)", Interrupted)
        if place != STARTING and seconds > self._limits.seconds:
            raise self._ended(f"took longer than {self._limits.seconds:g} s")

    def _verdict(self) -> Ended | Interrupted:
        """Of the process that watches the code's."""
        verdict_text = self._read(self._pipes.verdict)
        if not verdict_text:
            return self._ended("lost the process that watches it", Interrupted)
        verdict = json.loads(verdict_text)
        if "fault" in verdict:
            return self._ended(f"lost the process that watches it ({verdict['fault']})", Interrupted)
        if "processes" in verdict:
            return self._ended(f"had {verdict['processes']} processes at once; {self._limits.processes} are allowed")
        if "memory_bytes" in verdict:
            allowed = gibibytes(allowed_memory(self._limits))
            return self._ended(f"used {gibibytes(verdict['memory_bytes'])} of memory; {allowed} are allowed")
        code = verdict["exit_code"]
        if code >= 0:
            return self._ended(f"ended its process with exit code {code}")
        if code == -signal.SIGKILL:
            return self._ended("was killed by SIGKILL (the machine may have run out of memory)", Interrupted)
        return self._ended(f"was killed by {signal_name(-code)}")

    def _ended(self, reason: str, kind: type[Ended | Interrupted] = Ended) -> Ended | Interrupted:
        self._read_rest()
        self._output.end_line()
        lines = f"; its last output: {' / '.join(self._output.last)}" if self._output.last else ""
        place = self._pipes.progress.place
        return kind(reason + lines, place if place >= 0 else None)


class _Output:
    """What the code writes, as lines of bounded length and number."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.num_bytes = 0
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._on_line = on_line
        self._num_lines = 0
        self._rest = b""

    def take(self, read: bytes) -> None:
        """More of it."""
        self.num_bytes += len(read)
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[: 4 * LINE_CHARACTERS]
        for line in lines:
            self._line(line)

    def end_line(self) -> None:
        """The line begun is all there is of it."""
        self._line(self._rest)
        self._rest = b""

    def finish(self) -> None:
        """No more comes."""
        self.end_line()
        if self._num_lines > LOGGED_LINES:
            self._on_line(f"({self._num_lines - LOGGED_LINES} more lines of output are not shown)")

    def _line(self, line: bytes) -> None:
        text = text_of(line.decode("utf-8", "replace").rstrip())
        if not text:
            return
        self.last.append(text[: LINE_CHARACTERS // 5])
        self._num_lines += 1
        if self._num_lines <= LOGGED_LINES:
            self._on_line(text[:LINE_CHARACTERS])


IDLE_SECONDS = 600.0
"""How long a child without calls is kept: longer than an iteration of training, which asks once each time."""


class KeptChild:
    """A `Child` for this process; whoever is forked from it has another."""

    def __init__(self, handler: str, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._child: Child | None = None
        self._owner = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._calls = 0

    def call(self, request: Any) -> Any:
        """As `Child.call`."""
        with self._lock:
            child = self._begin()
        try:
            return child.call(request)
        finally:
            with self._lock:
                self._end()

    def close(self) -> None:
        """End the child. The next call starts another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None and self._owner == os.getpid():
            self._child.close()
        self._child = None

    def _begin(self) -> Child:
        if self._child is None or self._owner != os.getpid():
            self._child = Child(self._handler, self._limits, on_line=log.debug)
            self._owner, self._calls = os.getpid(), 0
        if self._timer is not None:
            self._timer.cancel()
        self._calls += 1
        return self._child

    def _end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._timer = threading.Timer(IDLE_SECONDS, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        with self._lock:
            if not self._calls:
                self._close()
