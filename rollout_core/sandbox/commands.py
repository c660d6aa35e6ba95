"""Sandboxes of others, called by a command for each program: docker, docker with gVisor, or one that is configured.

The command runs a Python within its walls. That one reads the program from standard input, runs it, and passes on what
it writes and how it ends. Walls and limits are the command's: the placeholders bring each program's limits to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout_core.base.errors import Recoverable
from rollout_core.base.stopping import raise_if_stopping
from rollout_core.sandbox.programs import Ended, Outcome, Program
from rollout_core.sandbox.walls import NoSandbox

PLACEHOLDERS = ("name", "image", "memory_bytes", "processes", "disk_bytes", "cpu_seconds", "script")
"""``{name}`` is another for each program; ``{script}`` what the sandbox's Python is to run: ``python3 -c {script}``."""
_DOCKER = (
    "docker",
    "run",
    "--rm",
    "--interactive",
    "--name={name}",
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={disk_bytes}",
    "--user=65534:65534",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--pids-limit={processes}",
    "--memory={memory_bytes}",
    "--memory-swap={memory_bytes}",
    "--ulimit=cpu={cpu_seconds}",
    "--ulimit=core=0",
    "--env=HOME=/tmp/box",
    "--env=TMPDIR=/tmp",
)
PRESETS: Mapping[str, Sequence[str]] = {
    "docker": (*_DOCKER, "{image}", "python3", "-c", "{script}"),
    "gvisor": (*_DOCKER, "--runtime=runsc", "{image}", "python3", "-c", "{script}"),
}
SLACK_SECONDS = 10.0
"""For a container to start; a program's own time is not known from outside."""
READ_BYTES = 2**16
SCRIPT = """
import base64, json, os, subprocess, sys
given = json.loads(sys.stdin.buffer.readline())
os.makedirs("/tmp/box", exist_ok=True)
os.chdir("/tmp/box")
for name, content in given["files"].items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(base64.b64decode(content))
environment = dict(os.environ, **given["environment"])
done = subprocess.run(given["argv"], input=base64.b64decode(given["stdin"]), env=environment)
code = done.returncode
# 125 to 127 are docker's own: with them a program would pass for a container that did not start.
os._exit(124 if 125 <= code <= 127 else code if code >= 0 else 128 - code)
"""


class CommandRunner:
    """Runs programs by a command."""

    def __init__(self, command: Sequence[str], image: str) -> None:
        self._command = tuple(command)
        self._image = image

    def lacking(self) -> str | None:
        """What it would take to run it; None where it seems to be there."""
        if shutil.which(self._command[0]) is None:
            return f"{self._command[0]} is not installed"
        if self._command[0] != "docker":
            return None
        found = subprocess.run(
            ["docker", "info", "--format", "{{json .Runtimes}}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if found.returncode:
            return f"docker does not answer: {(found.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        if "--runtime=runsc" in self._command and "runsc" not in found.stdout:
            return "docker has no runtime runsc; install gVisor and enter it in docker's daemon.json"
        return None

    def run(self, program: Program) -> Outcome:
        """Run it. Raises Recoverable where the command does not start."""
        limits = program.limits
        name = f"rollout-sandbox-{uuid.uuid4().hex[:12]}"
        values = {
            "name": name,
            "image": self._image,
            "memory_bytes": str(limits.memory_bytes),
            "processes": str(limits.processes + 1),
            "disk_bytes": str(limits.disk_bytes),
            "cpu_seconds": str(math.ceil(limits.cpu_seconds)),
            "script": SCRIPT,
        }
        command = [_filled(word, values) for word in self._command]
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Recoverable(f"{command[0]} does not start: {error.strerror}") from None
        ended = None
        try:
            ended, stdout, stderr = _drained(process, _message(program), program)
        finally:
            if "run" in command and name in " ".join(command) and process.poll() is None:
                # The container of docker or podman does not end with the command.
                kill = [*command[: command.index("run")], "kill", name]
                subprocess.run(kill, capture_output=True, check=False, timeout=60)
            process.kill()
            code = process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if code == 125 and "run" in command:
            raise Recoverable(f"{command[0]} did not run a program: {stderr.decode(errors='replace').strip()[-300:]}")
        died_of = code - 128 if 128 < code < 128 + 65 else 0
        if died_of == signal.SIGXCPU:
            ended = ended or "cpu"
        return Outcome(
            ended=ended or ("signal" if died_of else "exit"),
            exit_code=None if ended or died_of else code,
            signal=died_of or None if not ended else None,
            stdout=stdout,
            stderr=stderr,
            wall_seconds=time.monotonic() - started,
        )

    def run_linked(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Not to be had."""
        raise NoSandbox(
            f"a sandbox by the command {self._command[0]} links no two programs, which unit tests need; "
            "use kind namespaces, bubblewrap or http"
        )

    def close(self) -> None:
        """Nothing is held."""


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _message(program: Program) -> bytes:
    argv, files = program.command()
    fields = replace(program, source=None, argv=argv, files=files).to_json()
    return json.dumps({name: fields[name] for name in ("files", "environment", "argv", "stdin")}).encode() + b"\n"


def _drained(process: subprocess.Popen[bytes], message: bytes, program: Program) -> tuple[Ended | None, bytes, bytes]:
    """Why it has to be ended, if it has, and what it wrote."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + program.limits.wall_seconds + SLACK_SECONDS
    outgoing = memoryview(message)
    kept = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)}
    poll = select.poll()
    for descriptor in kept:
        poll.register(descriptor, select.POLLIN)
    os.set_blocking(process.stdin.fileno(), False)
    poll.register(process.stdin.fileno(), select.POLLOUT)
    waiting = set(kept)
    ended: Ended | None = None
    while waiting and ended is None:
        raise_if_stopping("a program in a sandbox")
        for descriptor, _ in poll.poll(500):
            if descriptor in kept:
                chunk = os.read(descriptor, READ_BYTES)
                room = program.limits.output_bytes - sum(map(len, kept.values()))
                kept[descriptor] += chunk[:room]
                if len(chunk) > room:
                    ended = "output"
                if not chunk:
                    poll.unregister(descriptor)
                    waiting.discard(descriptor)
            else:
                with contextlib.suppress(OSError):
                    outgoing = outgoing[os.write(descriptor, outgoing[:READ_BYTES]) :]
                    if outgoing:
                        continue
                poll.unregister(descriptor)
                process.stdin.close()
        if time.monotonic() > deadline:
            ended = "time"
    if ended is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
    stdout, stderr = map(bytes, kept.values())
    return ended, stdout, stderr
