"""A small process that starts programs of others within walls, one after another or many at once.

It is forked from, and not from the process that trains: that one has gigabytes and threads. So it imports the
standard library's smallest parts alone, and holds nothing that a program may not see: it never reads what it is
asked to run, a program's own first process does. A program in Python continues in a copy of this
interpreter, in namespaces of its own, instead of starting one.

It listens on a socket of sequenced packets. A packet asks for one program: a line of JSON with its wall-clock limit,
and descriptors: payload, standard input, output and error, the socket for its answer, and that of a partner where it
has one. It ends with the process that started it.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from rollout_core.sandbox import inside, modes

MOST_BYTES = 4096
"""Of a packet."""
MOST_WAIT_MS = 60_000
"""At a time: ``poll`` takes no number beyond 31 bits."""
SLACK_SECONDS = 1.0
"""For a program's first process, which ends it at its limit; past this, the launcher does."""
KILL = b"kill"
"""What the caller writes to the socket of an answer to end a program."""


class Run:
    """A program that runs."""

    def __init__(self, pid: int, answer: int, report: int, wall_seconds: float) -> None:
        self.pid = pid
        self.process = os.pidfd_open(pid)
        self.answer = answer
        self.report = report
        self.started = time.monotonic()
        self.deadline = self.started + wall_seconds + SLACK_SECONDS
        self.ended: str | None = None

    def kill(self, reason: str) -> None:
        """End it, and all that it has started."""
        if self.ended is None:
            self.ended = reason
            os.kill(self.pid, signal.SIGKILL)


class Mode(Protocol):
    """How programs are put behind walls."""

    walls: list[str]

    def fork(self) -> int:
        """Make a program's first process; 0 in it."""
        ...

    def begin(self, header: dict[str, Any], descriptors: inside.Descriptors) -> inside.Program:
        """Of the first process; returns in the program alone."""
        ...


class Launcher:
    """What `main` makes: the loop."""

    def __init__(self, control: socket.socket, caller: int, mode: Mode) -> None:
        self._control = control
        self._caller = os.pidfd_open(caller)
        self._mode = mode
        self._poll = select.poll()
        for descriptor in (control.fileno(), self._caller):
            self._poll.register(descriptor, select.POLLIN)
        self._processes: dict[int, Run] = {}
        self._answers: dict[int, Run] = {}

    def serve(self) -> inside.Program | None:
        """Start programs until the caller is gone. In a program's own process it returns that program."""
        while True:
            for descriptor, event in self._poll.poll(self._wait_ms()):
                if descriptor == self._caller:
                    return None
                if descriptor == self._control.fileno():
                    try:
                        packet, descriptors = self._receive()
                    except ConnectionError:
                        return None
                    if not packet:
                        return None
                    if (program := self._start(json.loads(packet), descriptors)) is not None:
                        return program
                elif run := self._processes.get(descriptor):
                    self._finish(run)
                elif run := self._answers.get(descriptor):
                    run.kill("stopped")
                    if event & ~select.POLLIN or not os.read(descriptor, 64):
                        self._poll.unregister(descriptor)
            now = time.monotonic()
            for run in self._processes.values():
                if now >= run.deadline:
                    run.kill("time")

    def _wait_ms(self) -> int | None:
        deadlines = [run.deadline for run in self._processes.values() if run.ended is None]
        if not deadlines:
            return None
        return max(0, min(int((min(deadlines) - time.monotonic()) * 1000) + 1, MOST_WAIT_MS))

    def _receive(self) -> tuple[bytes, list[int]]:
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(8 * descriptors.itemsize)
        packet, ancillary, _, _ = self._control.recvmsg(MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return packet, list(descriptors)

    def _start(self, header: dict[str, Any], descriptors: list[int]) -> inside.Program | None:
        payload, stdin, stdout, stderr, answer, *partner = descriptors
        ours, theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        given = inside.Descriptors(payload, (stdin, stdout, stderr), theirs, partner[0] if partner else None)
        try:
            pid = self._mode.fork()
        except OSError as error:
            os.write(answer, json.dumps({"error": str(error)}).encode())
            for descriptor in (*descriptors, ours, theirs):
                os.close(descriptor)
            return None
        if pid == 0:
            self._control.detach()
            return self._mode.begin(header, given)
        run = Run(pid, answer, ours, header["wall_seconds"])
        for descriptor in given.all():
            os.close(descriptor)
        self._processes[run.process] = self._answers[answer] = run
        for descriptor in (run.process, answer):
            self._poll.register(descriptor, select.POLLIN)
        return None

    def _finish(self, run: Run) -> None:
        _, status, usage = os.wait4(run.pid, 0)
        report = _reported(run.report)
        answer = {
            "wall_seconds": time.monotonic() - run.started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            **({"ended": run.ended} if run.ended is not None else {}),
            **report,
        }
        if not {"ended", "status", "error"} & answer.keys():
            if report:
                answer["status"] = signal.SIGKILL  # the program has ended what watches it, where it can
            else:
                answer["error"] = f"the first process ended with wait status {status} before the program began"
        with contextlib.suppress(OSError):  # nobody waits for it any more
            os.write(run.answer, json.dumps(answer).encode())
        del self._processes[run.process], self._answers[run.answer]
        self._poll.unregister(run.process)
        with contextlib.suppress(KeyError):
            self._poll.unregister(run.answer)
        for descriptor in (run.process, run.answer, run.report):
            os.close(descriptor)


def _reported(report: int) -> dict[str, Any]:
    """All that the first process has said."""
    found: dict[str, Any] = {}
    os.set_blocking(report, False)
    with contextlib.suppress(OSError):
        while packet := os.read(report, MOST_BYTES):
            found |= inside.said(packet.decode("utf-8", "replace"))
    return found


MODES: dict[str, Callable[[dict[str, Any]], Mode]] = {
    "namespaces": modes.Namespaces,
    "bubblewrap": modes.Bubblewrap,
    "none": modes.Bare,
}


def main(config: dict[str, Any]) -> inside.Program | None:
    """Say whether it can be done here, and do it. Returns a program in that program's own process."""
    control = socket.socket(fileno=config["control"])
    try:
        mode = MODES[config["mode"]](config)
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return None
    control.send(json.dumps({"walls": mode.walls}).encode())
    gc.collect()
    gc.disable()
    gc.freeze()
    return Launcher(control, config["caller"], mode).serve()
