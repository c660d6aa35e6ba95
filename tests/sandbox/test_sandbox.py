"""What a program gets, what it may take, how its end is told, and what is left of it: nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.sandbox import Limits, Outcome, Program, Sandbox, SandboxSettings, launching
from rollout_core.sandbox.programs import LANGUAGES
from rollout_core.sandbox.sandbox import _setup
from tests.store.patience import LONG, wait_until

LIMITS = Limits(wall_seconds=60, cpu_seconds=30)
SHARED_MEMORY = """
import mmap, time
maps = [mmap.mmap(-1, 2**24) for _ in range(9)]
for one in maps:
    one.write(bytes(2**24))
time.sleep(600)
"""


def python(sandbox: Sandbox, source: str, **fields: object) -> Outcome:
    return sandbox.run(Program(source=source, **({"limits": LIMITS} | fields)))  # type: ignore[arg-type]


def test_output_error_and_exit_code_come_back(sandbox: Sandbox):
    done = python(sandbox, "import sys\nprint(input()[::-1])\nprint('bad', file=sys.stderr)\nsys.exit(3)", stdin=b"abc")
    assert (done.ended, done.exit_code, done.signal) == ("exit", 3, None)
    assert (done.stdout, done.stderr) == (b"cba\n", b"bad\n")
    assert not done.ok and done.reason == "ended with exit code 3"
    assert 0 < done.wall_seconds < 60 and 0 < done.cpu_seconds < 30


def test_a_traceback_shows_the_program_alone(sandbox: Sandbox):
    done = python(sandbox, "def f():\n    return 1 / 0\nf()\n")
    assert done.exit_code == 1
    assert done.stderr.decode().startswith('Traceback (most recent call last):\n  File "main.py", line 3, in <module>')
    assert done.stderr.decode().endswith("ZeroDivisionError: division by zero\n")
    assert b"SyntaxError" in python(sandbox, "def").stderr


@pytest.mark.parametrize("how", ["source", "argv"])
def test_python_is_as_python_is(sandbox: Sandbox, how: str):
    """A source goes on in the launcher's interpreter; a command starts one."""
    text = """
import atexit, sys, threading, os, json, random
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: print("thread")).start()
print(__name__, __file__, sys.argv, sys.path[0] == os.getcwd(), [k for k in sys.modules if k.startswith("rollout")])
print(json.dumps({"a": 1}), sys.stdin.read(), sorted(globals())[:3], hash("x"))
import helper
print(helper.VALUE, sys.modules["__main__"].__dict__ is globals(), sys.getrecursionlimit())
exit(0)
"""
    files = {"helper.py": b"VALUE = 7", "main.py": text.encode()}
    if how == "source":
        done = python(sandbox, text, argv=["one", "two"], stdin=b"in", files=files)
    else:
        program = Program(argv=["python3", "main.py", "one", "two"], stdin=b"in", files=files, limits=LIMITS)
        done = sandbox.run(program)
    assert done.stderr == b"" and done.ok, done
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "thread" or lines[1] == "thread"
    assert "__main__ main.py ['main.py', 'one', 'two'] True []" in [line.replace("/box/home/", "") for line in lines]
    assert lines[-2:] == ["7 True 1000", "at exit"]
    hashes = {line.rpartition(" ")[2] for line in lines if line.startswith("{")}
    assert hashes == {python(sandbox, "print(hash('x'))").stdout.decode().strip()}, "the same in each run"


def test_random_numbers_differ_between_runs(sandbox: Sandbox):
    source = "import random, uuid\nprint(random.random(), uuid.uuid4())"
    assert python(sandbox, source).stdout != python(sandbox, source).stdout


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("sh", "read x; echo $x"),
        ("bash", "read x; echo $x"),
        ("javascript", "console.log(require('fs').readFileSync(0, 'utf8').trim())"),
        ("perl", "print scalar <STDIN>;"),
        ("c", '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x); return 0; }'),
        ("c++", "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x << std::endl; }"),
    ],
)
def test_other_languages(namespaces: Sandbox, language: str, source: str):
    command = {"c": "cc", "c++": "c++"}.get(language, LANGUAGES[language][1][0])
    if shutil.which(command) is None:
        pytest.skip(f"no {command} on this machine")
    done = python(namespaces, source, language=language, stdin=b"42\n")
    assert (done.stdout, done.stderr, done.ok) == (b"42\n", b"", True)


def test_a_command_that_is_not_there_says_so(sandbox: Sandbox):
    done = sandbox.run(Program(argv=["no-such-command"], limits=LIMITS))
    assert (done.exit_code, done.stderr) == (127, b"no-such-command: No such file or directory\n")


def test_files_lie_in_a_folder_that_is_the_programs_own(sandbox: Sandbox):
    files = {"data/a b.txt": b"\x00\xff" * 100_000, "run": b"#!/bin/sh\necho ran\n", "empty": b""}
    source = (
        "import os\nprint(os.path.getsize('data/a b.txt'), os.path.getsize('empty'), flush=True)\nos.system('./run')"
    )
    assert python(sandbox, source, files=files).stdout == b"200000 0\nran\n"
    python(sandbox, "open('mine', 'w').write('x')")
    assert (
        python(sandbox, "import os\nprint(os.listdir(), os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout
        == b"['main.py'] [] []\n"
    )


def test_the_environment_is_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    source = (
        "import os\nprint(sorted(os.environ), os.environ['MINE'], b'sk-1' in open('/proc/self/environ', 'rb').read())"
    )
    names = [
        "HOME",
        "LANG",
        "LC_ALL",
        "MINE",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONHASHSEED",
        "PYTHONUTF8",
        "TMPDIR",
    ]
    with Sandbox(kind=sandbox.settings.kind) as fresh:
        for found in (sandbox, fresh):
            assert python(found, source, environment={"MINE": "1"}).stdout.decode() == f"{names} 1 False\n"


def test_installed_packages_are_hidden_unless_they_are_given(tmp_path: Path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "mine.py").write_text("VALUE = 3")
    with Sandbox(search_path=[str(tmp_path / "given")]) as sandbox:
        if not sandbox.walls().stand:
            pytest.skip(f"no sandbox: {sandbox.walls().missing()}")
        source = "import mine, os\nprint(mine.VALUE)\nopen(mine.__file__, 'w')"
        done = python(sandbox, source)
        assert done.stdout == b"3\n" and b"Read-only file system" in done.stderr
        assert b"No module named 'pip'" in python(sandbox, "import pip").stderr


@pytest.mark.parametrize(
    ("ended", "source", "limits"),
    [
        ("time", "import time\ntime.sleep(600)", {"wall_seconds": 0.3}),
        ("cpu", "while True: pass", {"cpu_seconds": 0.3}),
        ("memory", SHARED_MEMORY, {"memory_bytes": 2**26}),
        ("output", "while True: print('x' * 1000)", {"output_bytes": 5000}),
    ],
)  # fmt: skip
def test_limits(sandbox: Sandbox, ended: str, source: str, limits: dict):
    given = Limits(**({"wall_seconds": 60, "cpu_seconds": 30} | limits))
    done = python(sandbox, source, limits=given)
    assert (done.ended, done.exit_code, done.signal, done.ok) == (ended, None, None, False)
    assert len(done.stdout) + len(done.stderr) == (5000 if ended == "output" else 0)
    if ended == "cpu":
        assert done.cpu_seconds >= 0.3


def test_files_that_do_not_fit_are_the_programs_fault(sandbox: Sandbox):
    limits = Limits(wall_seconds=60, disk_bytes=2**20)
    done = python(sandbox, f"x = {'1' * 2**21!r}", limits=limits)
    assert (done.ended, done.ok) == ("disk", False)
    assert done.reason == "passed its limit of disk, by the files that it comes with"


def test_memory_that_children_share_counts_once(namespaces: Sandbox):
    source = """
import os, time
data = bytearray(b"x" * 40 * 2**20)
if all([os.fork() for _ in range(3)]):
    time.sleep(0.3)
    print("done")
else:
    time.sleep(60)
"""
    limits = Limits(wall_seconds=60, cpu_seconds=30, memory_bytes=100 * 2**20)
    assert python(namespaces, source, limits=limits).stdout == b"done\n"


def test_a_signal_is_told(sandbox: Sandbox):
    done = python(sandbox, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert (done.ended, done.signal, done.reason) == ("signal", signal.SIGTERM, "was ended by SIGTERM")


def below() -> list[psutil.Process]:
    """Processes that this one has started for sandboxes."""
    return [process for child in psutil.Process().children() if is_launcher(child) for process in tree(child)]


def is_launcher(process: psutil.Process) -> bool:
    try:
        return "config = json.load(file)" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def test_what_a_program_leaves_running_ends_with_it(sandbox: Sandbox):
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(0.1)"
    python(sandbox, "pass")
    wait_until(lambda: all(map(is_launcher, below())))
    launchers = set(below())
    assert python(sandbox, source).ok
    wait_until(lambda: set(below()) <= launchers)


def test_many_at_once_come_back_in_order(sandbox: Sandbox):
    programs = [Program(source=f"print({number})", limits=LIMITS) for number in range(24)]
    assert [int(done.stdout) for done in sandbox.run_many(programs)] == list(range(24))


async def test_without_a_thread_of_ones_own(namespaces: Sandbox):
    assert (await namespaces.run_async(Program(source="print(1)", limits=LIMITS))).stdout == b"1\n"


def test_a_large_input_and_a_large_output(namespaces: Sandbox):
    limits = Limits(wall_seconds=60, cpu_seconds=30, output_bytes=2**25, disk_bytes=2**25)
    data = os.urandom(2**24)
    done = python(namespaces, "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data, limits=limits)
    assert done.stdout == data


def test_linked_programs_speak_and_end_together(sandbox: Sandbox):
    first = Program(
        source="import socket\ns = socket.socket(fileno=3)\ns.sendall(b'ping')\nprint(s.recv(9))", limits=LIMITS
    )
    second = Program(
        source="import socket, time\ns = socket.socket(fileno=3)\ns.sendall(s.recv(9) + b' pong')\ntime.sleep(600)",
        limits=LIMITS,
    )
    asked, answering = sandbox.run_linked(first, second)
    assert asked.stdout == b"b'ping pong'\n"
    assert answering.ended == "stopped"


def test_a_program_that_ends_while_it_is_stopped_has_an_outcome(namespaces: Sandbox):
    first = Program(source="pass", limits=LIMITS)
    for _ in range(40):
        answering = namespaces.run_linked(first, first)[1]
        assert answering.ended in ("exit", "stopped")


def test_a_launcher_that_is_killed_takes_its_programs_along_and_is_started_again():
    with Sandbox(kind="none") as sandbox:
        others = set(below())
        python(sandbox, "pass")
        [launcher] = set(filter(is_launcher, psutil.Process().children())) - others
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(python, sandbox, "import time\ntime.sleep(600)")
            wait_until(lambda: len(launcher.children(recursive=True)) == 2)
            programs = launcher.children(recursive=True)
            launcher.kill()
            with pytest.raises(Recoverable, match="the launcher of sandboxes ended"):
                running.result()
        psutil.wait_procs(programs[:1], timeout=LONG)
        assert python(sandbox, "print(1)").stdout == b"1\n"
        for process in programs:  # without a PID namespace they end with their watcher, or not at all
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_launcher_that_listens_no_more_is_ended_and_another_started():
    launcher = launching.Launcher(_setup("none", SandboxSettings(kind="none")))
    program = Program(source="print(1)", limits=LIMITS)
    launcher.start()
    process = launcher._process
    assert process is not None
    try:
        os.kill(process.popen.pid, signal.SIGSTOP)  # it cannot end by itself
        process.control.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Recoverable, match="the launcher of sandboxes is gone"):
            launcher.run(program)
        assert launcher.run(program).stdout == b"1\n" and launcher._process is not process
    finally:
        launcher.close()


def test_an_interpreter_that_does_not_start_is_worth_another_try():
    launcher = launching.Launcher(replace(_setup("none", SandboxSettings(kind="none")), executable="/no/python"))
    with pytest.raises(Recoverable, match="/no/python does not start"):
        launcher.run(Program(source="print(1)"))


def test_a_limit_may_be_longer_than_a_poll_takes(sandbox: Sandbox):
    assert python(sandbox, "print(1)", limits=Limits(wall_seconds=1e9, cpu_seconds=1e9)).stdout == b"1\n"


def test_programs_end_with_the_process_that_asked_for_them():
    code = """
import sys, threading, time
from rollout_core.sandbox import Limits, Program, Sandbox
sandbox = Sandbox()
if not sandbox.walls().stand:
    print("none", flush=True)
    sys.exit()
limits = Limits(wall_seconds=600)
run = lambda: sandbox.run(Program(source="import time\\ntime.sleep(600)", limits=limits))
threading.Thread(target=run, daemon=True).start()
sandbox.run(Program(source="print(1)", limits=limits))
print("runs", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline().strip() == "none":
        process.communicate()
        pytest.skip("this machine has no sandbox")
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3, "the launcher, a first process and a program"
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=LONG)
    assert alive == []


def test_a_forked_process_has_a_launcher_of_its_own(namespaces: Sandbox):
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writable, python(namespaces, "print(5)").stdout)
            namespaces.close()
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    assert os.read(readable, 10) == b"5\n"
    os.close(readable)
    os.close(writable)
    assert python(namespaces, "print(6)").stdout == b"6\n"


def test_a_wall_that_cannot_be_put_up_is_the_machines_fault_and_no_score(monkeypatch: pytest.MonkeyPatch):
    texts = {name: launching._text_of(name) for name in launching.MODULES}
    broken = texts["sandbox.inside"].replace("kernel.forbid_new_privileges()", "raise OSError('no such wall')")
    monkeypatch.setattr(launching, "_text_of", lambda name: broken if name == "sandbox.inside" else texts[name])
    with (
        Sandbox(kind="none") as sandbox,
        pytest.raises(Recoverable, match="could not be set up: OSError: no such wall"),
    ):
        python(sandbox, "print(1)")


def test_no_descriptor_is_left_open(namespaces: Sandbox):
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        python(namespaces, "print(1)")
        python(namespaces, "while True: print(1)", limits=Limits(output_bytes=100))
    assert os.listdir("/proc/self/fd") == before


def test_nothing_is_started_before_the_first_program():
    before = set(below())
    with Sandbox():
        assert set(below()) <= before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(wall_seconds=0), "wall_seconds of a sandbox's limits is 0; expected a positive number"),
        (lambda: Limits(processes=True), "processes of a sandbox's limits is True"),
        (lambda: Limits(memory_bytes=-1), "expected a positive number"),
        (
            lambda: Limits(memory_bytes=1.5),
            "memory_bytes of a sandbox's limits is 1.5; expected a positive number, a whole",
        ),
        (lambda: Program(), "neither source nor argv"),
        (lambda: Program(source="", language="cobol"), "language 'cobol' is not known; expected one of python"),
        (lambda: Program(argv=["a\0b"]), "null character"),
        (lambda: Program(source=b"print(1)"), "source of a program is bytes; expected a text"),
        (lambda: Program(source="", files={"a/b": b"", "a": b""}), "files 'a' and 'a/b' of a program"),
        (lambda: Program(source="", files={"main.py/b": b""}), "files 'main.py' and 'main.py/b' of a program"),
        (lambda: Program(source="", files={"../x": b""}), "expected a relative path"),
        (lambda: Program(source="", files={"/etc/x": b""}), "expected a relative path"),
        (lambda: Program(source="", files={"a//b": b""}), "expected a relative path"),
        (lambda: Program(source="", files={"a" * 61: b""}), "expected a relative path"),
        (lambda: SandboxSettings(kind="chroot"), "sandbox 'chroot' is not known; expected one of auto, namespaces"),
        (lambda: SandboxSettings(parallel=0), "parallel of a sandbox is 0"),
        (lambda: SandboxSettings(readable=["/"]), "expected an absolute path other than /"),
        (lambda: SandboxSettings(readable=["data"]), "expected an absolute path"),
        (lambda: Sandbox(readable=["/no/such/folder"]).walls(), "does not exist"),
        (lambda: SandboxSettings(kind="http"), "which needs one"),
        (lambda: SandboxSettings(url="http://x"), "url of a sandbox goes with kind = 'http'"),
        (lambda: SandboxSettings(kind="command"), "which needs one"),
        (lambda: Sandbox(python="/no/python").walls(), "is no file; expected the path of an interpreter"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(make: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make()


def test_a_program_and_an_outcome_are_the_same_after_a_way_as_json():
    program = Program(source="x", argv=["1"], stdin=b"\xff", files={"a": b"\0"}, environment={"A": "b"}, limits=LIMITS)
    assert Program.from_json(program.to_json()) == Program(**(vars(program) | {"argv": ("1",)}))
    outcome = Outcome(ended="exit", exit_code=1, stdout=b"\xff", stderr=b"e", wall_seconds=1.5)
    assert Outcome.from_json(outcome.to_json()) == outcome
    for message in (
        {},
        {"source": 1},
        program.to_json() | {"limits": {"other": 1}},
        program.to_json() | {"stdin": "%"},
    ):
        with pytest.raises(ConfigError, match=r"not a program|expected"):
            Program.from_json(message)


def test_the_interpreter_of_a_virtual_environment_is_not_what_programs_get(namespaces: Sandbox):
    done = python(namespaces, "import sys\nprint(sys.prefix, *sys.version_info[:2])")
    assert done.stdout.decode() == f"{sys.base_prefix} {sys.version_info.major} {sys.version_info.minor}\n"


ECHO = """
import os, socket
with socket.socket(fileno=3) as channel:
    while said := channel.recv(100):
        channel.sendall(said.upper())
print("the end")
"""


def test_a_program_speaks_with_its_caller_until_it_is_ended(sandbox: Sandbox):
    session = sandbox.open(Program(source=ECHO, limits=LIMITS))
    for text in (b"one", b"two"):
        session.channel.sendall(text)
        assert session.channel.recv(100) == text.upper()
    outcome = session.end()
    assert outcome.stdout == b"the end\n"
    assert session.channel.fileno() == -1


def test_a_program_that_does_not_hear_its_caller_is_killed(sandbox: Sandbox):
    session = sandbox.open(Program(source="import time; time.sleep(600)", limits=LIMITS))
    assert session.end().ended == "stopped"


def test_a_program_that_ends_lets_go_of_its_caller(sandbox: Sandbox):
    session = sandbox.open(Program(source=ECHO, limits=LIMITS))
    session.channel.shutdown(socket.SHUT_WR)
    assert session.channel.recv(100) == b""
    assert session.end().stdout == b"the end\n"


def test_sessions_take_no_turns(namespaces: Sandbox):
    sessions = [namespaces.open(Program(source=ECHO, limits=LIMITS)) for _ in range(namespaces.parallel + 4)]
    for session in sessions:
        session.channel.sendall(b"x")
    assert [session.channel.recv(100) for session in sessions] == [b"X"] * len(sessions)
    assert namespaces.run(Program(source="print(1)", limits=LIMITS)).stdout == b"1\n"
    for session in sessions:
        session.end()
