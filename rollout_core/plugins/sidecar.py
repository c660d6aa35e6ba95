"""The process that looks after a sidecar: it starts the program, speaks with it over a Unix socket, and ends it.

A message is JSON in UTF-8, with its length in bytes before it, a big-endian unsigned number of four bytes. Each request
is an object with ``method`` (``Init``, ``Preflight``, ``Call``, ``Reload``, ``Shutdown``) and ``payload``; each answer
one with ``result``, or with ``error``, a text. What runs here is `handle`, by `host`; limits on time, memory and
processes are those of `rollout_core.base.isolation`, as the program is a child of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rollout_core.base.errors import ConfigError, Fatal, shown
from rollout_core.base.processes import exit_reason
from rollout_core.plugins.confinement import confine

PROTOCOL = 1
LENGTH = struct.Struct(">I")
UDS, STDIO = "framed-json-uds", "framed-json-stdio"
SHUTDOWN_SECONDS = 2.0
_CONNECT_PAUSE_SECONDS = 0.01
_END_SECONDS = 1.0
"""For a program whose socket has ended to end itself."""

_sidecar: Sidecar | None = None


def handle(request: dict[str, Any], report: Callable[[int], None]) -> Any:
    """Start the program by the first request, pass on each that follows.

    The program's own ``error`` is part of the answer, and it continues; whatever else is wrong with an answer is
    raised, and the caller ends this process with it. ``{"gone": reason}``: it had ended before it was asked.
    """
    global _sidecar
    if "start" in request:
        _sidecar = Sidecar(**request["start"])
        _sidecar.greet()
        return {}
    assert _sidecar is not None, "the caller starts it first"
    if "shutdown" in request:
        return _sidecar.shut_down()
    method, payload = ("Reload", request["reload"]) if "reload" in request else ("Call", request["payload"])
    if (reason := _sidecar.ended()) is not None:
        return {"gone": reason}
    try:
        return _sidecar.ask(method, payload)
    except _Unread as error:
        return {"gone": error.reason}


class _Unread(Fatal):
    """The program ended before it had read the request, so the request is not why. ``reason`` says how it ended."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"ended with {reason} before it answered")


class Sidecar:
    """A program that is started now, and asked one thing after another."""

    def __init__(
        self,
        *,
        name: str,
        version: str,
        kind: str,
        folder: str,
        socket_path: str,
        command: Sequence[str],
        protocol: str,
        config: dict[str, Any],
        network: bool,
        gpu: bool,
        answer_bytes: int,
    ) -> None:
        self._name, self._kind = name, kind
        self._about = {"protocol": PROTOCOL, "name": name, "version": version, "kind": kind, "config": config}
        self._answer_bytes = answer_bytes
        confine(name, network=network, gpu=gpu)
        words = [sys.executable if word == "{python}" else word for word in command]
        # No folder of the user's own: what it imports is of its own folder, or installed.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        options: dict[str, Any] = {"cwd": folder, "env": environment | {"PYTHONDONTWRITEBYTECODE": "1"}}
        try:
            if protocol == STDIO:
                self._socket, theirs = socket.socketpair()
                with theirs:
                    self._program = subprocess.Popen(words, stdin=theirs.fileno(), stdout=theirs.fileno(), **options)
            else:
                self._program = subprocess.Popen([*words, socket_path], stdin=subprocess.DEVNULL, **options)
                self._socket = self._connect(socket_path)
        except OSError as error:
            raise ConfigError(f"plugin {name}: {words[0]} cannot be started: {error.strerror or error}") from error

    def _connect(self, path: str) -> socket.socket:
        """The caller's limit ends a program that never listens."""
        while True:
            ours = socket.socket(socket.AF_UNIX)
            try:
                ours.connect(path)
                os.chmod(path, 0o600)
                return ours
            except (FileNotFoundError, ConnectionRefusedError):
                ours.close()
            if (code := self._program.poll()) is not None:
                raise ConfigError(
                    f"plugin {self._name}: it ended with {exit_reason(code)} before it listened at the socket that is "
                    "its last argument"
                )
            time.sleep(_CONNECT_PAUSE_SECONDS)

    def greet(self) -> None:
        """It says that it is what the manifest says, and that it is ready. Raises ConfigError."""
        for method, payload in (("Init", self._about), ("Preflight", {})):
            try:
                answer = self.ask(method, payload)
            except Fatal as error:
                raise ConfigError(f"plugin {self._name}: at {method} it {error}") from error
            if "error" in answer:
                raise ConfigError(f"plugin {self._name}: at {method} it says: {answer['error']}")
            if method == "Init":
                self._check(answer["result"])

    def _check(self, said: Any) -> None:
        expected = {"protocol": PROTOCOL, "name": self._name, "kind": self._kind}
        got = {key: said.get(key) for key in expected} if isinstance(said, dict) else said
        if got != expected:
            raise ConfigError(f"plugin {self._name}: at Init it says that it is {shown(got)}; expected {expected}")

    def ended(self) -> str | None:
        """How it ended, if it has."""
        code = self._program.poll()
        return None if code is None else exit_reason(code)

    def ask(self, method: str, payload: Any) -> dict[str, Any]:
        """What it answers. Raises Fatal, whose text follows "it", where that is no answer."""
        self._refuse_unasked()
        text = json.dumps({"method": method, "payload": payload}, separators=(",", ":")).encode("ascii")
        try:
            self._socket.sendall(LENGTH.pack(len(text)) + text)
            (size,) = LENGTH.unpack(self._read(LENGTH.size))
            if size > self._answer_bytes:
                raise Fatal(
                    f"answered with a frame of {size} bytes; {self._answer_bytes} are allowed (limits.answer_bytes)"
                )
            answered = self._read(size)
        except OSError as error:
            # What the kernel says of a request that nobody reads any more. Its end may have begun before we asked: a
            # process that is killed needs a moment to be gone.
            self._raise_ended(is_unread=isinstance(error, BrokenPipeError | ConnectionResetError))
        try:
            answer = json.loads(answered)
        except (ValueError, RecursionError):
            raise Fatal(f"answered with {shown(answered[:60])}, which is no JSON") from None
        is_answer = isinstance(answer, dict) and len({"result", "error"} & answer.keys()) == 1
        if not is_answer or not isinstance(answer.get("error", ""), str):
            raise Fatal(f"answered with {shown(answer)}; expected an object with result, or with error, a text")
        return answer

    def _refuse_unasked(self) -> None:
        # Not `recv` without waiting: where the socket has a time-out, that waits.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return
        with contextlib.suppress(OSError):
            if self._socket.recv(1, socket.MSG_PEEK):
                raise Fatal("wrote to its socket without being asked")

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            read = self._socket.recv(min(size - len(found), 2**20))
            if not read:
                self._raise_ended()
            found += read
        return bytes(found)

    def _raise_ended(self, *, is_unread: bool = False) -> NoReturn:
        try:
            code = self._program.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Fatal("closed its socket before it answered") from None
        if is_unread:
            raise _Unread(exit_reason(code))
        raise Fatal(f"ended with {exit_reason(code)} before it answered")

    def shut_down(self) -> dict[str, Any]:
        """Ask it to end, for which it has a moment; the caller ends what is left."""
        self._socket.settimeout(SHUTDOWN_SECONDS)
        with contextlib.suppress(Fatal, OSError, subprocess.TimeoutExpired):
            self.ask("Shutdown", {})
            self._program.wait(SHUTDOWN_SECONDS)
        return {}
