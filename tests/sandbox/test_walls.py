"""Which walls stand is found out by trying them, and said; without one nothing runs, unless "none" is written out."""

from __future__ import annotations

import ctypes
import errno
import http.client
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from deployments.health import GROUPS
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.sandbox import (
    Limits,
    NoSandbox,
    Program,
    Sandbox,
    Walls,
    kernel,
    sandbox as sandbox_module,
    service as service_module,
    walls as walls_module,
)
from rollout_core.sandbox.call_filter import _AUDIT, _REFUSED, call_filter
from rollout_core.sandbox.commands import CommandRunner
from rollout_core.sandbox.remote import RemoteRunner
from rollout_core.sandbox.service import SandboxService
from tests.conftest import PROJECT
from tests.store.patience import LONG
from tests.store.ports import own_port
from tests.support.machine import BUBBLEWRAP, require

CASE = Program(source="print('ran')", limits=Limits(wall_seconds=60))
CLONE_NEWUSER = 0x10000000


def test_a_hostile_program_meets_every_wall(sandbox: Sandbox):
    walls = sandbox.walls()
    assert walls.kind == sandbox.settings.kind and walls.stand
    assert {wall.name for wall in walls.walls} == {*walls_module.PROBED, "landlock"}
    assert all(wall.detail for wall in walls.walls)


def test_a_program_without_walls_is_found_out(tmp_path: Path):
    """What tries the walls says of each that it is not there."""
    program = walls_module.probe_program(tmp_path)
    unwatched = replace(program, limits=replace(program.limits, processes=100))
    with Sandbox(kind="none") as sandbox:
        found = {wall.name: wall.stands for wall in walls_module.found_by(sandbox.run(unwatched))}
    expected = dict.fromkeys(("files", "processes", "system calls"), False)
    assert {name: found[name] for name in expected} == expected
    if os.geteuid() == 0:
        assert not found["privileges"]


NO_USER_NAMESPACES = """
import ctypes, errno, struct
def refuse(call):
    step = lambda code, value, yes=0, no=0: struct.pack("=HBBI", code, yes, no, value)
    program = step(0x20, 0) + step(0x15, call, 0, 1) + step(0x06, 0x50000 | errno.EPERM) + step(0x06, 0x7FFF0000)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, head, 0, 0) == 0
refuse(272)
from rollout_core.base.errors import ConfigError
from rollout_core.sandbox import Program, Sandbox
for kind in ("auto", "namespaces", "bubblewrap"):
    with Sandbox(kind=kind) as sandbox:
        walls = sandbox.walls()
        try:
            sandbox.run(Program(source="print(1)"))
        except ConfigError as error:
            print(kind, walls.stand, error)
        else:
            print(kind, walls.stand, "ran")
with Sandbox(kind="none") as sandbox:
    print("none", sandbox.run(Program(source="print(1)")).stdout)
"""
"""As a container whose runtime refuses `unshare`."""


@pytest.mark.skipif(kernel.MACHINE != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_a_machine_that_refuses_namespaces_runs_nothing_unless_none_is_written_out(tmp_path: Path):
    script = tmp_path / "refused.py"
    script.write_text(NO_USER_NAMESPACES)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("auto False this machine has no sandbox of kind namespaces: namespaces: ")
    assert "Operation not permitted" in lines[0]
    assert "rollout doctor machine" in lines[0] and 'sandbox = "none"' in lines[0]
    assert lines[1].startswith("namespaces False") and lines[2].startswith("bubblewrap False")
    assert lines[3] == r"none b'1\n'"


IN_CONTAINER = """
import sys
from rollout_core.sandbox import Limits, Program, Sandbox
limits = Limits(wall_seconds=60, cpu_seconds=1, memory_bytes=2**26)
with Sandbox(python=sys.argv[1]) as sandbox:
    print(sandbox.walls().kind, sandbox.walls().missing())
    print(sandbox.run(Program(source="import os\\nprint(sorted(os.listdir('/proc'))[:1])", limits=limits)).stdout)
    print(sandbox.run(Program(source="while True: pass", limits=limits)).ended)
    print(sandbox.run(Program(source="import mmap\\nmmap.mmap(-1, 2**27)", limits=limits)).stderr[-40:])
"""


def in_container(*command: str) -> list[str]:
    """What `IN_CONTAINER` prints under a command that takes rights from root."""
    if os.geteuid() != 0 or shutil.which(command[0]) is None or not Path("/usr/bin/python3").exists():
        pytest.skip(f"not root, no {command[0]}, or no Python of the system")
    done = subprocess.run(
        [*command, sys.executable, "-c", IN_CONTAINER, "/usr/bin/python3"],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_root_of_a_container_without_its_rights_becomes_an_ordinary_user(namespaces: Sandbox):
    """As docker's, which may not mount."""
    lines = in_container("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert lines[:3] == ["namespaces []", repr(b"['1']\n"), "cpu"]


def test_a_container_that_hides_parts_of_proc_has_the_same_walls_without_one(namespaces: Sandbox):
    """Memory and processor time are each process's own there."""
    hide = 'mount --bind /dev/null /proc/kmsg && exec "$0" "$@"'
    lines = in_container("unshare", "--mount", "sh", "-c", hide)
    assert lines[:3] == ["namespaces []", repr(b"[]\n"), "cpu"]
    assert "Cannot allocate memory" in lines[3]


def test_refusals_name_every_wall_that_is_missing(monkeypatch: pytest.MonkeyPatch, namespaces: Sandbox):
    found = [
        walls_module.Wall("files", True, "fine"),
        walls_module.Wall("network", False, "an address can be reached"),
        walls_module.Wall("limits", False, "no limit of disk"),
        walls_module.Wall("landlock", False, "the kernel has none", needed=False),
    ]
    monkeypatch.setattr("rollout_core.sandbox.sandbox.probe", lambda kind, launcher: Walls(kind, tuple(found)))
    with Sandbox(kind="namespaces") as sandbox, pytest.raises(ConfigError) as caught:
        sandbox.run(CASE)
    assert caught.value.violations == ("network: an address can be reached", "limits: no limit of disk")


def test_a_container_and_the_kernels_switches_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    switch = tmp_path / "userns"
    switch.write_text("0\n")
    monkeypatch.setattr(walls_module, "_SWITCHES", ((str(switch), lambda value: value == "0", "sysctl it=1"),))
    assert walls_module.remedy() == "sysctl it=1"
    assert walls_module.refused("namespaces", "refused").missing() == ["namespaces: refused; sysctl it=1"]


def test_the_doctor_says_which_walls_this_machine_has(namespaces: Sandbox):
    [check] = GROUPS["sandbox"].make(None)  # type: ignore[arg-type]
    assert (check.name, check.level) == ("sandbox", "ok")
    assert check.got.startswith("namespaces: files, processes, network, system calls, privileges, limits")


# The filter of system calls


@pytest.mark.parametrize("machine", list(_AUDIT))
def test_the_filter_by_an_interpreter_of_its_own(machine: str):
    column = list(_AUDIT).index(machine)
    run = Filter(call_filter(machine), _AUDIT[machine])
    for name, numbers in _REFUSED.items():
        if numbers[column] is not None:
            assert run.on(numbers[column]) == errno.EPERM, name
    known = {"x86_64": (0, 1, 2, 57, 59, 257), "aarch64": (63, 64, 56, 221)}[machine]
    assert [run.on(number) for number in known] == [0] * len(known)
    clone, socket, ioctl = {"x86_64": (56, 41, 16), "aarch64": (220, 198, 29)}[machine]
    assert run.on(clone, 17) == 0
    assert run.on(clone, 17 | CLONE_NEWUSER) == errno.EPERM
    assert run.on(435) == errno.ENOSYS, "clone3"
    assert [run.on(socket, family) for family in (1, 2, 10, 16, 17, 40)] == [0] + [errno.EAFNOSUPPORT] * 5
    assert [run.on(ioctl, 0, request) for request in (0x5401, 0x5412, 0x541C)] == [0, errno.EPERM, errno.EPERM]
    assert run.on(0x40000000) == run.on(9999) == errno.ENOSYS
    assert run.on(0, architecture=0x40000003) is None, "calls of another machine end the program"


class Filter:
    """What the kernel does with the instructions."""

    def __init__(self, program: bytes, architecture: int) -> None:
        self._steps = list(struct.iter_unpack("=HBBI", program))
        self._architecture = architecture

    def on(self, number: int, *arguments: int, architecture: int | None = None) -> int | None:
        """The error that a call gets; 0: none; None: the process ends."""
        words = {0: number, 4: self._architecture if architecture is None else architecture}
        words |= {16 + 8 * place: value for place, value in enumerate(arguments)}
        at, loaded = 0, 0
        while True:
            code, if_true, if_false, value = self._steps[at]
            at += 1
            if code == 0x20:
                loaded = words.get(value, 0)
            elif code == 0x06:
                return None if value == 0x80000000 else 0 if value == 0x7FFF0000 else value & 0xFFFF
            else:
                holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
                at += if_true if holds else if_false


@pytest.mark.skipif(kernel.MACHINE != "x86_64", reason="the numbers of the calls are those of x86-64")
def test_numbers_of_calls_are_those_of_the_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no headers of the kernel on this machine")
    lines = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    numbers = {name.removeprefix("__NR_"): int(number) for _, name, number in lines}
    assert {name: found for name, (found, _) in _REFUSED.items() if numbers.get(name, found) != found} == {}


# Elsewhere


@pytest.fixture(scope="module")
def service(namespaces: Sandbox) -> Iterator[SandboxService]:
    with Sandbox(kind="namespaces") as served:
        made = SandboxService(served, api_key="k").start()
        yield made
        made.close()


def test_a_service_runs_programs_for_others(service: SandboxService):
    with Sandbox(kind="http", url=service.url, api_key="k") as sandbox:
        assert sandbox.walls().stand and sandbox.walls().kind == "http"
        done = sandbox.run(Program(source="print(input())", stdin=b"x", limits=CASE.limits))
        assert (done.stdout, done.ok) == (b"x\n", True)
        first = Program(source="import socket\nprint(socket.socket(fileno=3).recv(9))", limits=CASE.limits)
        second = Program(source="import socket\nsocket.socket(fileno=3).sendall(b'hello')", limits=CASE.limits)
        assert sandbox.run_linked(first, second)[0].stdout == b"b'hello'\n"
        assert [int(done.stdout) for done in sandbox.run_many(Program(source=f"print({n})") for n in range(8))] == [
            *range(8)
        ]


def test_a_service_talks_with_no_program(service: SandboxService):
    with Sandbox(kind="http", url=service.url, api_key="k") as sandbox:
        with pytest.raises(ConfigError, match="kind http talks with no program that runs"):
            sandbox.open(Program(source="print(1)"))


def test_a_service_refuses_strangers_and_what_is_no_program(service: SandboxService):
    with Sandbox(kind="http", url=service.url, api_key="other") as sandbox:
        assert "status 401" in sandbox.walls().missing()[0]
        with pytest.raises(ConfigError, match="this machine has no sandbox of kind http"):
            sandbox.run(CASE)
    with pytest.raises(ConfigError, match=r"host is 0\.0\.0\.0, .* there is no API key"):
        SandboxService(Sandbox(), "0.0.0.0")
    with pytest.raises(ConfigError, match=r"refuses \(status 400\): not a program"):
        RemoteRunner(service.url, "k")._ask("POST", "/v1/programs", {"source": 3}, 1)
    with pytest.raises(ConfigError, match=r"refuses \(status 404\)"):
        RemoteRunner(service.url, "k")._ask("POST", "/v1/other", {}, 1)
    for body in (b"{", b"[" * 100_000, b"[{}]"):
        status, reply = asked(service, {"Authorization": "Bearer k", "Content-Length": str(len(body))}, body)
        assert (status, reply["error"]) == (400, "ConfigError"), reply


def asked(service: SandboxService, headers: dict[str, str], body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """What it answers to a request with these headers, of which ``body`` is sent."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=LONG)
    try:
        connection.putrequest("POST", "/v1/linked")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def test_a_service_reads_no_body_without_the_key_and_none_that_is_too_large(service: SandboxService):
    status, reply = asked(service, {"Content-Length": "1000000"})
    assert status == 401 and "no valid API key" in reply["detail"]
    status, reply = asked(service, {"Authorization": "Bearer k", "Content-Length": str(2**40)})
    assert status == 413 and "larger than" in reply["detail"]


def test_faults_of_a_service_are_told_apart(service: SandboxService, monkeypatch: pytest.MonkeyPatch):
    remote = RemoteRunner(service.url, "k")
    for error, raised, message in (
        (NoSandbox("no walls"), NoSandbox, r"refuses \(status 409\): no walls"),
        (Recoverable("the launcher is gone"), Recoverable, r"fails \(status 503\): the launcher is gone"),
        (KeyError("a fault of its own"), Recoverable, r"fails \(status 500\): the server failed"),
    ):

        def fail(program: Program, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(service._sandbox, "run", fail)
        with pytest.raises(raised, match=message):
            remote.run(CASE)


def test_a_service_that_is_away_is_worth_another_try_and_found_once_it_is_there(namespaces: Sandbox):
    with own_port() as port:
        sandbox = Sandbox(kind="http", url=f"http://127.0.0.1:{port}")
        with pytest.raises(Recoverable, match="does not answer"):
            sandbox.run(CASE)
        assert "does not answer" in sandbox.walls().missing()[0]
        with Sandbox(kind="namespaces") as served:
            service = SandboxService(served, port=port).start()
            assert sandbox.run(CASE).stdout == b"ran\n"
            service.close()


def test_walls_that_did_not_stand_are_tried_again(monkeypatch: pytest.MonkeyPatch, namespaces: Sandbox):
    with Sandbox(kind="namespaces") as sandbox:
        with monkeypatch.context() as patched:
            patched.setattr(sandbox_module, "probe", lambda kind, launcher: walls_module.refused(kind, "too busy"))
            with pytest.raises(NoSandbox, match="too busy"):
                sandbox.run(CASE)
        assert sandbox.run(CASE).stdout == b"ran\n"


SERVE = [sys.executable, "-m", "rollout_core.sandbox.service", "--port=0"]


def test_a_service_of_its_own_ends_by_a_signal(namespaces: Sandbox, tmp_path: Path):
    (tmp_path / "key").write_text("k\n")
    command = [*SERVE, "--api-key-file", str(tmp_path / "key"), "--parallel=1"]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with Sandbox(kind="http", url=process.stdout.readline().strip(), api_key="k") as sandbox:
            assert sandbox.run(CASE).stdout == b"ran\n"
        process.terminate()
        _, said = process.communicate(timeout=LONG)
        assert (process.returncode, said) == (0, "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind=http"], "error: --kind http: a service has its own machine's sandbox; expected auto, namespaces"),
        (["--api-key-file=/no/such"], "error: --api-key-file /no/such cannot be read: No such file or directory"),
        (["--parallel=0"], "error: parallel of a sandbox is 0; expected at least 1"),
        (["--host=0.0.0.0"], "error: host is 0.0.0.0, which other machines can reach, and there is no API key"),
    ],
)
def test_a_service_says_in_one_line_what_it_cannot_do(
    namespaces: Sandbox, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", [*SERVE[2:], *options])
    with pytest.raises(SystemExit) as ended:
        service_module.main()
    assert str(ended.value).startswith(message) and "\n" not in str(ended.value)


def test_docker_says_what_is_missing():
    with Sandbox(kind="docker") as sandbox:
        walls = sandbox.walls()
        if walls.stand:
            assert sandbox.run(CASE).stdout == b"ran\n"
        else:
            with pytest.raises(ConfigError, match=r"docker(: | )"):
                sandbox.run(CASE)


COMMAND = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--proc", "/proc", "--size", "{disk_bytes}", "--tmpfs", "/tmp", "--dev", "/dev", "--setenv", "PATH", "/usr/bin"),
    *("--", "/usr/bin/python3", "-c", "{script}"),
]


def test_a_command_of_ones_own(namespaces: Sandbox):
    require(BUBBLEWRAP)
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no Python of the system")
    command = CommandRunner(COMMAND, "")
    assert command.lacking() is None
    limits = Limits(wall_seconds=60, output_bytes=1000)
    done = command.run(Program(source="print(input())", stdin=b"x" * 500, limits=limits, files={"a/b": b"1"}))
    assert (done.stdout, done.ended, done.exit_code) == (b"x" * 500 + b"\n", "exit", 0)
    assert command.run(Program(source="raise SystemExit(7)", limits=limits)).exit_code == 7
    pretends = command.run(Program(source="raise SystemExit(125)", limits=limits))
    assert pretends.exit_code == 124, "docker's code for a container that did not start"
    assert command.run(Program(source="while True: print('x' * 99)", limits=limits)).ended == "output"
    killed = command.run(Program(source="import os\nos.kill(os.getpid(), 9)", limits=limits))
    assert (killed.ended, killed.signal) == ("signal", 9)
    # This one has neither a filter of calls nor limits, which is found out, so it would not be used.
    with Sandbox(kind="command", command=COMMAND) as weak:
        assert not weak.walls().stand
        with pytest.raises(ConfigError, match="no filter of system calls"):
            weak.run(CASE)
    with pytest.raises(NoSandbox, match="links no two programs"):
        command.run_linked(CASE, CASE)


def test_what_is_no_address_of_a_service_is_refused():
    with pytest.raises(ConfigError, match="expected http"):
        Sandbox(kind="http", url="ftp://x").walls()


def test_threads_may_share_one_that_is_just_starting(namespaces: Sandbox):
    with Sandbox(kind="namespaces", parallel=4) as fresh:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(fresh.run(CASE).stdout)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [b"ran\n"] * 6


def test_the_kernel_is_one_that_is_known():
    assert kernel.is_supported() == (sys.platform == "linux" and kernel.MACHINE in ("x86_64", "aarch64"))
    assert ctypes.sizeof(ctypes.c_long) == 8
