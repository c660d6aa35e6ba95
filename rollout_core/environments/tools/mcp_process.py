"""The process of an MCP server: started in a folder, with few variables, and ended with all that it started, also where
the process that started it is killed.

Its messages are lines. A line that is too long, or too many of them for a call, end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.streams import FlowControlMixin
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from rollout_core.base import process_tree
from rollout_core.base.errors import RolloutError
from rollout_core.base.isolation.warden import END
from rollout_core.base.processes import exit_reason

MESSAGE_BYTES = 2**24
"""Of a line, or of an answer over HTTP."""
MOST_LINES = 10_000
"""Since a call began. Each is read by the process that has the model, too."""
INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Variables that every server gets."""
LAST_LINES = 5
LINE_CHARACTERS = 300
GRACE_SECONDS = 2.0
"""For a server to end by itself once its input ends, as the protocol has it."""
END_SECONDS = 15.0


class ServerLost(RolloutError):
    """A server ended, or what it wrote is no answer; ``reason`` says what happened, in a form that follows its name,
    and ``str`` also what it said last."""

    def __init__(self, reason: str, details: str = "") -> None:
        self.reason, self.details = reason, details
        super().__init__(reason + details)

    def __reduce__(self):
        return type(self), (self.reason, self.details)


class TooMuch(ServerLost):
    """A server wrote more than it may for one call."""


def command_line(command: Sequence[str], base: Path) -> list[str]:
    """A server's program and arguments, for another working folder than ``base``."""
    return [str(path) if (path := local_path(argument, base)) is not None else argument for argument in command]


def local_path(argument: str, base: Path) -> Path | None:
    """The file or folder that an argument of a command names; None where it names none."""
    if "/" not in argument and "." not in argument:
        return None
    path = base.resolve() / argument
    with contextlib.suppress(OSError, ValueError):  # such as a name that is too long for one
        return path if path.exists() else None
    return None


class ServerProcess:
    """A server that runs, from its start to its end; in one event loop."""

    def __init__(self, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        """Raises OSError where it cannot be started. ``variables``: besides those that every server gets."""
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(variables)
        reading, control = os.pipe()
        tied = [sys.executable, "-I", "-S", process_tree.__file__, "tie", str(reading), str(os.getpid())]
        try:
            self._popen = subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=environment,
                pass_fds=(reading,),
                start_new_session=True,  # Ctrl-C and hang-ups of a terminal are ours to hear
            )
        except BaseException:
            os.close(control)
            raise
        finally:
            os.close(reading)
        self._control: int | None = control
        self._output = asyncio.StreamReader(MESSAGE_BYTES)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._num_lines = self._num_bytes = 0
        self.excess: TooMuch | None = None
        """It wrote more than it may."""
        self._transports: list[asyncio.BaseTransport] = []
        self._reading: asyncio.Task[None] | None = None
        self._stray: str | None = None
        """The first line that was no message, if there was one."""

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> ServerProcess:
        """One that is ready to be read and written to. Raises OSError where it cannot be started."""
        process = cls(command, folder, variables)
        try:
            await process._connect()
        except BaseException:
            process._end()
            raise
        return process

    async def _connect(self) -> None:
        popen, loop = self._popen, asyncio.get_running_loop()
        errors = asyncio.StreamReader(2**16)
        for reader, pipe in ((self._output, popen.stdout), (errors, popen.stderr)):
            transport, _ = await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader), pipe
            )
            self._transports.append(transport)
        transport, protocol = await loop.connect_write_pipe(FlowControlMixin, popen.stdin)
        self._transports.append(transport)
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        self._reading = asyncio.create_task(self._read_errors(errors))

    async def _read_errors(self, errors: asyncio.StreamReader) -> None:
        """Keep the last lines of what it says to people."""
        rest = b""
        while chunk := await errors.read(2**16):
            self._num_bytes += len(chunk)
            if self._num_bytes > MESSAGE_BYTES:
                self.excess = TooMuch(f"wrote more than {MESSAGE_BYTES // 2**20} MiB to its log for one call")
                return self._end()
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[: 4 * LINE_CHARACTERS]
            self._last += [text for line in lines if (text := _shown(line))]
        if text := _shown(rest):
            self._last.append(text)

    def begin_call(self) -> None:
        """Lines are counted from here on."""
        self._num_lines = self._num_bytes = 0

    async def lines(self) -> AsyncIterator[bytes]:
        """What it writes, until it ends, or writes too much (`excess`)."""
        while True:
            try:
                line = await self._output.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                self.excess = TooMuch(f"wrote a message of more than {MESSAGE_BYTES // 2**20} MiB", self.said())
                return
            self._num_lines += 1
            if self._num_lines > MOST_LINES:
                self.excess = TooMuch(f"wrote more than {MOST_LINES:,} messages for one call", self.said())
                return
            yield line

    def note_stray(self, line: bytes) -> None:
        """A line was no message."""
        self._stray = self._stray or _shown(line)

    async def write(self, line: bytes) -> None:
        """Give it a message. Raises OSError where nobody reads any more."""
        self._writer.write(line)
        await self._writer.drain()

    async def ended(self) -> ServerLost:
        """How it ended, once its output has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._popen.wait, GRACE_SECONDS)
        code = self._popen.poll()
        how = "closed its output" if code is None else f"ended with {exit_reason(128 - code if code > 128 else code)}"
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=GRACE_SECONDS)
        return ServerLost(how, self.said())

    def said(self) -> str:
        """What is known of why it does not answer, to follow a sentence."""
        stray = f"; it wrote what is no message: {self._stray!r}" if self._stray else ""
        return stray + (f"; its last output: {' / '.join(self._last)}" if self._last else "")

    async def close(self, *, at_once: bool = False) -> None:
        """End it, with all that it started. Unless ``at_once``, it has a moment to end by itself."""
        try:
            self._writer.close()
            if not at_once:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._popen.wait, GRACE_SECONDS)
        finally:
            self._end()
        try:
            await asyncio.to_thread(self._popen.wait, END_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel ends the server when what holds it ends
            self._popen.kill()
            await asyncio.to_thread(self._popen.wait)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def _end(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._control is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._control, END)
            os.close(self._control)
            self._control = None


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:LINE_CHARACTERS]
