"""Python and shell: what stays between calls, what is bounded, and what hostile programs come to."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from rollout_core.base.errors import ConfigError
from rollout_core.config.base import identity
from rollout_core.config.tools import FilesTool, PythonTool, ShellTool
from rollout_core.config.verifiers import CodeSandbox
from rollout_core.environments.tools import supervisor
from rollout_core.environments.tools.toolbox import Toolbox, ToolResources, check_tools
from rollout_core.sandbox import Sandbox
from rollout_core.sandbox.service import SandboxService
from tests.environments.boxes import failed, said, shared
from tests.store.patience import LONG, until

SHORT = {"seconds": 1.0, "cpu_seconds": 20.0, "memory_mb": 128, "max_processes": 8, "disk_mb": 4}
PATIENT = {"seconds": 120.0, "cpu_seconds": 60.0}
KINDS = ("namespaces", "bubblewrap", "none")


def tools(kind: str) -> list:
    place = "none" if kind == "none" else CodeSandbox(kind=kind)
    return [
        PythonTool(sandbox=place, **PATIENT),
        PythonTool(name="fresh", keeps_state=False, sandbox=place, **PATIENT),
        ShellTool(commands="any", sandbox=place, **PATIENT),
        ShellTool(name="limited", commands=("ls", "cat", "echo", "env"), sandbox=place, **PATIENT),
        FilesTool(),
        PythonTool(name="short", sandbox=place, **SHORT),
        ShellTool(name="short_shell", commands="any", sandbox=place, **SHORT),
    ]


@pytest.fixture(scope="module", params=KINDS)
def resources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolResources]:
    if request.param != "none":
        with Sandbox(kind=request.param) as sandbox:
            walls = sandbox.walls()
        if not walls.stand:
            pytest.skip(f"this machine has no sandbox of kind {request.param}: {'; '.join(walls.missing())}")
    with shared(*tools(request.param), base=tmp_path_factory.mktemp("base")) as made:
        made.kind = request.param  # type: ignore[attr-defined]
        yield made


@pytest.fixture
async def box(resources: ToolResources, tmp_path: Path) -> AsyncIterator[Toolbox]:
    folder = tmp_path / "episode"
    folder.mkdir()
    async with Toolbox(resources.tools, folder, resources=resources) as made:
        yield made


def walled(resources: ToolResources) -> None:
    if resources.kind == "none":  # type: ignore[attr-defined]
        pytest.skip("without a wall it is not held")


# Python


async def test_variables_and_imports_stay(box: Toolbox):
    assert await said(box, "python", code="import math\nx = 6\nprint('set')") == "set\n"
    assert await said(box, "python", code="def f(n): return n * x") == ""
    assert await said(box, "python", code="f(7), math.floor(2.5)") == "(42, 2)\n"
    assert await said(box, "python", code="_[0] + 1") == "43\n"
    assert await said(box, "python", code="x; None") == ""


async def test_without_state_each_call_begins_anew(box: Toolbox):
    assert await said(box, "fresh", code="x = 1\nopen('kept', 'w').write('1')") == "1\n"
    assert "NameError" in (await failed(box, "fresh", code="x")).text
    assert await said(box, "fresh", code="open('kept').read()") == "'1'\n"


async def test_a_traceback_shows_the_models_lines_alone(box: Toolbox):
    await said(box, "python", code="def divide(n):\n    return 1 / n")
    text = (await failed(box, "python", code="y = 2\ndivide(0)")).text
    lines = [line for line in text.splitlines() if not re.fullmatch(r"[ ~^]*", line)]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<call 2>", line 2, in <module>',
        "    divide(0)",
        '  File "<call 1>", line 2, in divide',
        "    return 1 / n",
        "ZeroDivisionError: division by zero",
    ]
    assert await said(box, "python", code="y") == "2\n"
    assert "SyntaxError" in (await failed(box, "python", code="def")).text


async def test_output_and_error_are_in_their_order(box: Toolbox):
    code = "import sys\nprint('a'); print('b', file=sys.stderr); print('c')\nimport os; os.system('echo d'); print('e')"
    assert await said(box, "python", code=code) == "a\nb\nc\nd\ne\n"


async def test_leaving_is_no_end_of_the_interpreter(box: Toolbox):
    await said(box, "python", code="x = 1\nraise SystemExit")
    assert "no luck" in (await failed(box, "python", code="raise SystemExit('no luck')")).text
    assert await said(box, "python", code="x") == "1\n"


async def test_a_process_of_the_models_modules_is_what_python_has(box: Toolbox):
    code = """
from dataclasses import dataclass
import multiprocessing, pickle, threading
@dataclass
class Point:
    x: int
def double(n):
    return 2 * n
threads = [threading.Thread(target=print, args=[n]) for n in range(3)]
for one in threads:
    one.start()
    one.join()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(double, [1, 2]))
pickle.loads(pickle.dumps(Point(3)))
"""
    assert await said(box, "python", code=code) == "0\n1\n2\n[2, 4]\nPoint(x=3)\n"
    assert "EOFError" in (await failed(box, "python", code="input()")).text


async def test_a_call_past_its_time_costs_the_state_and_says_so(box: Toolbox):
    await said(box, "short", code="x = 1\nopen('early', 'w').write('kept')")
    result = await failed(box, "short", code="open('late', 'w').write('kept, too')\nprint('begun')\nwhile True: pass")
    assert result.text.splitlines() == [
        "begun",
        "The program took longer than 1 s, and was ended.",
        "The interpreter was ended: variables, functions and imports of earlier calls are gone. Files stay.",
    ]
    assert "NameError" in (await failed(box, "short", code="x")).text
    assert await said(box, "short", code="print(open('early').read(), open('late').read())") == "kept kept, too\n"


async def test_an_interpreter_that_ends_itself_costs_the_state_and_no_more(box: Toolbox):
    await said(box, "python", code="x = 1")
    text = (await failed(box, "python", code="import os; print('bye', flush=True); os._exit(7)")).text
    assert text.startswith("bye\nThe interpreter ended with code 7.\nThe interpreter was ended")
    text = (await failed(box, "python", code="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).text
    assert "ended with code -11" in text
    assert "NameError" in (await failed(box, "python", code="x")).text


async def test_much_output_is_cut_while_it_comes_and_the_end_is_kept(box: Toolbox):
    result = await box.call("python", {"code": "print('ä' * 1_000_000)\nprint('the end')"})
    assert result.truncated
    assert result.text.startswith("äää")
    assert result.text.endswith("the end\n")
    missing = re.search(r"\n\[\.\.\. ([\d,]+) characters left out \.\.\.\]\n", result.text)
    assert missing is not None
    kept = len(result.text) - len(missing[0])
    assert kept == 8_000
    assert int(missing[1].replace(",", "")) + kept == 1_000_000 + len("\nthe end\n")


# Shell


async def test_commands_have_the_shell_that_people_have(box: Toolbox):
    command = (
        "mkdir -p sub && cd sub && for n in 1 2 3; do echo $n > $n.txt; done; cat *.txt | tail -2; pwd | grep -c sub"
    )
    assert await said(box, "shell", command=command) == "2\n3\n1\n"
    assert await said(box, "shell", command="cd sub && ls") == "1.txt\n2.txt\n3.txt\n"


async def test_a_failed_command_says_its_code(box: Toolbox):
    assert (await failed(box, "shell", command="echo no >&2; exit 3")).text == "no\nexit code 3"
    assert "exit code 127" in (await failed(box, "shell", command="nosuchprogram")).text


@pytest.mark.parametrize("command", ["echo \ud800", "echo \0", f"echo {'x' * 200_000}"])
async def test_what_is_no_command_line_says_so(box: Toolbox, command: str):
    assert "the command line h" in (await failed(box, "shell", command=command)).text
    assert await said(box, "shell", command="echo 'ünï\tcode'\n\necho two") == "ünï\tcode\ntwo\n"


async def test_what_a_command_leaves_running_ends_with_it(box: Toolbox):
    name = f"{os.getpid()}.5"
    await said(box, "shell", command=f"sleep 10{name} & setsid sleep 20{name} & nohup sleep 30{name} & echo begun")

    def running() -> list[str]:
        found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [line[1] for line in found if len(line) == 2 and line[0] == "sleep" and line[1].endswith(name)]

    await until(lambda: not running(), LONG)


@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'print(6 * 7)'",
        "/usr/bin/python3 -c 'print(6 * 7)'",
        "PATH=/usr/bin:/bin; python3 -c 'print(6 * 7)'",
        "PATH=/usr/bin:/bin python3 -c 'print(6 * 7)'",
        "export PATH=/usr/bin:/bin; python3 -c 'print(6 * 7)'",
        "f() { local PATH=/usr/bin:/bin; python3 -c 'print(6 * 7)'; }; f",
        "set +r; /usr/bin/python3 -c 'print(6 * 7)'",
        "exec /usr/bin/python3 -c 'print(6 * 7)'",
        "builtin exec python3 -c 'print(6 * 7)'",
        "command -p python3 -c 'print(6 * 7)'",
        "hash -p /usr/bin/python3 ls; ls -c 'print(6 * 7)'",
        "BASH_CMDS[ls]=/usr/bin/python3; ls -c 'print(6 * 7)'",
        "cd /usr/bin; ./python3 -c 'print(6 * 7)'",
        "echo 'print(6 * 7)' > x.py; bash -c 'python3 x.py'",
        "enable -f /usr/lib/x.so x; /bin/sh -c 'echo $((6 * 7))'",
        "( unset PATH; python3 -c 'print(6 * 7)' )",
        "eval '/usr/bin/python3 -c \"print(6 * 7)\"'",
        ". /etc/profile; sh -c 'echo $((6 * 7))'",
    ],
)
async def test_only_programs_of_the_list_are_called(box: Toolbox, command: str):
    result = await box.call("limited", {"command": command})
    assert "42" not in result.text.replace("print(6 * 7)", ""), result.text


async def test_programs_of_the_list_are_called_by_their_names(box: Toolbox):
    await said(box, "files", action="write", path="a.txt", content="one\n")
    assert (
        await said(box, "limited", command="cat a.txt | cat; ls; echo $(ls) && ls *.txt")
        == "one\na.txt\na.txt\na.txt\n"
    )


# Files between tools


async def test_tools_see_the_files_of_each_other(box: Toolbox, tmp_path: Path):
    await said(box, "files", action="write", path="lib/tool.py", content="VALUE = 5\n")
    assert await said(box, "python", code="from lib import tool; tool.VALUE") == "5\n"
    await said(box, "python", code="import os; os.makedirs('empty'); open('lib/data.bin', 'wb').write(bytes(3)); None")
    assert await said(box, "shell", command="wc -c < lib/data.bin; ls; printf x >> lib/data.bin; rm lib/tool.py") == (
        "3\nempty\nlib\n"
    )
    assert await said(box, "python", code="len(open('lib/data.bin', 'rb').read()), os.listdir('lib')") == (
        "(4, ['data.bin'])\n"
    )
    assert await said(box, "files", action="list") == "empty/\nlib/\nlib/data.bin (4 bytes)"
    assert (tmp_path / "episode/lib/data.bin").read_bytes() == bytes(3) + b"x"
    await said(
        box, "shell", command="rm -r lib empty; mkdir lib2; printf '#!/bin/sh\necho run' > lib2/go; chmod +x lib2/go"
    )
    assert await said(box, "shell", command="lib2/go") == "run\n"
    assert await said(box, "python", code="sorted(os.listdir())") == "['lib2']\n"


async def test_a_file_may_become_a_folder_and_a_folder_a_file(box: Toolbox, tmp_path: Path):
    await said(box, "shell", command="mkdir -p a/b; echo x > a/b/c; echo y > d")
    await said(box, "python", code="1")
    await said(box, "shell", command="rm -r a d; echo z > a; mkdir d; echo w > d/e")
    assert (tmp_path / "episode/a").read_text() == "z\n"
    assert (tmp_path / "episode/d/e").read_text() == "w\n"
    assert await said(box, "python", code="open('a').read() + open('d/e').read()") == "'z\\nw\\n'\n"


async def test_a_change_a_moment_later_of_the_same_size_is_seen(box: Toolbox, tmp_path: Path):
    for number in range(20):
        await said(box, "python", code=f"with open('n', 'w') as file: file.write('{number % 10}')")
        assert (tmp_path / "episode/n").read_text() == str(number % 10)


def test_a_change_within_a_tick_of_the_clock_is_reported(tmp_path: Path):
    folder, file = supervisor.Folder(str(tmp_path)), tmp_path / "n"
    file.write_text("1")
    folder.take({"removed": [], "folders": [], "files": []}, b"")
    file.write_text("2")
    changed = time.time_ns()
    os.utime(file, ns=(changed, changed))
    assert folder.changes(10, 10)[1] == b"2"
    file.write_text("3")
    os.utime(file, ns=(changed, changed))
    assert folder.changes(10, 10)[1] == b"3"


async def test_links_stay_in_the_sandbox(box: Toolbox, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    text = await said(
        box, "shell", command="ln -s /etc/passwd link; ln -s ../../secret up; mkfifo pipe; echo made > plain"
    )
    assert "3 files are not kept" in text
    assert sorted(path.name for path in (tmp_path / "episode").iterdir()) == ["plain"]


# Hostile programs

HOSTILE = {
    "endless output": "while True: print('x' * 1000)",
    "endless output to the descriptor": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "sleep": "import time; time.sleep(1000)",
    "a loop that ignores signals": """
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except Exception: pass
while True: pass
""",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(10_000_000))",
    "memory of children": """
import os, time
for _ in range(6):
    if not os.fork(): break
x = b'x' * 90_000_000
time.sleep(1000)
""",
    "disk": "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(bytes(1_000_000)); n += 1",
    "many files": "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1",
    "deep folders": "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "ending what runs it": "import os; os.kill(os.getppid(), 9)",
    "closing everything": "import os; os.closerange(0, 100)\nwhile True: pass",
    "a recursion": "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
    "a traceback that fails": "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
    "an answer of its own": "import os\nos.write(4, b'\\0' * 10)",
    "descriptors of what runs it": """
import os
for n in range(20):
    try: os.write(os.open(f'/proc/{os.getppid()}/fd/{n}', os.O_WRONLY), b'\\xff' * 100)
    except OSError: pass
while True: pass
""",
    "names that are no text": "open(b'\\xff\\xfe', 'w').close(); open('\\n', 'w').close()\nraise ValueError",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_python_is_bounded_and_the_next_call_is_right(
    resources: ToolResources, box: Toolbox, tmp_path: Path, name: str
):
    if name in ("fork bomb", "memory of children", "disk", "many files", "deep folders"):
        walled(resources)
    began = time.monotonic()
    result = await box.call("short", {"code": HOSTILE[name]})
    assert time.monotonic() - began < LONG
    assert len(result.text) < 9_000
    sizes = [path.stat().st_size for path in (tmp_path / "episode").rglob("*")]
    assert sum(sizes) <= SHORT["disk_mb"] * 2**20
    assert len(sizes) <= 4_001
    for path in sorted((tmp_path / "episode").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    # Files that were not kept are named as long as the interpreter has them.
    assert (await said(box, "short", code="print(6 * 7)")).startswith("42\n")


OUTSIDE = {
    "the network": "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2); print('{secret}')",
    "a name": "import socket; print('{secret}', socket.getaddrinfo('example.com', 80))",
    "a file outside": "print(open('{file}').read())",
    "the environment of others": """
import os
for name in os.listdir('/proc'):
    if name.isdigit():
        try: print(open(f'/proc/{{name}}/environ').read())
        except OSError: pass
""",
    "its own environment": "import os; print(dict(os.environ))",
    "a signal to the caller": "import os; os.kill({pid}, 0); print('{secret}')",
}


@pytest.mark.parametrize("name", OUTSIDE)
async def test_nothing_outside_is_reached(
    resources: ToolResources, box: Toolbox, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    walled(resources)
    secret = "tell-nobody-3711"
    monkeypatch.setenv("ROLLOUT_SECRET_TEST", secret)
    (tmp_path / "file").write_text(secret)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code = OUTSIDE[name].format(port=port, secret=secret, file=tmp_path / "file", pid=os.getpid())
        for tool in ("python", "fresh"):
            result = await box.call(tool, {"code": code})
            # A traceback may show the code itself.
            assert secret not in "\n".join(line for line in result.text.splitlines() if line.strip() not in code)
        if name in ("the network", "a name", "a file outside", "a signal to the caller"):
            assert result.is_error


async def test_a_hostile_shell_is_bounded(resources: ToolResources, box: Toolbox):
    walled(resources)
    for command in ("yes", ":(){ :|:& };:; wait", "sleep 1000", "cat /dev/zero | tail", "dd if=/dev/zero of=big bs=1M"):
        began = time.monotonic()
        result = await box.call("short_shell", {"command": command})
        assert time.monotonic() - began < LONG
        assert len(result.text) < 9_000
    assert await said(box, "short_shell", command="echo fine") == "fine\n"


async def test_a_folder_that_is_too_large_is_the_models_to_shrink(box: Toolbox):
    await said(box, "shell", command="head -c 5000000 /dev/zero > big")
    result = await failed(box, "short", code="1")
    assert "more than the 4,000 with 4,194,304 bytes that programs can be given; remove some" in result.text


# Around them


async def test_a_call_that_is_cancelled_leaves_nothing_and_the_next_is_right(box: Toolbox):
    await said(box, "python", code="x = 1")
    name = f"1234{os.getpid()}"
    call = asyncio.create_task(box.call("python", {"code": f"import os; os.system('sleep {name}')"}))

    def sleeping() -> bool:
        return any(p.info["cmdline"] == ["sleep", name] for p in psutil.process_iter(["cmdline"]))

    while not sleeping():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "NameError" in (await failed(box, "python", code="x")).text
    await until(lambda: not sleeping(), LONG)


async def test_fifty_episodes_at_once(resources: ToolResources, tmp_path: Path):
    async def episode(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        async with Toolbox(resources.tools, folder, resources=resources) as box:
            await said(box, "python", code=f"n = {number}\nopen('n', 'w').write(str(n)); None")
            found = await asyncio.gather(
                said(box, "shell", command="cat n"),
                said(box, "python", code="n * 2"),
                said(box, "files", action="read", path="n"),
            )
            assert found == [str(number), f"{number * 2}\n", str(number)]

    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*map(episode, range(50)))
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8, LONG)


async def test_a_machine_without_the_sandbox_refuses(tmp_path: Path):
    missing = CodeSandbox(kind="command", command=("no-such-program-here", "{script}"))
    spec = PythonTool(keeps_state=False, sandbox=missing)
    with pytest.raises(ConfigError, match=r"tool python: this machine has no sandbox .* write sandbox = .none."):
        check_tools([spec])
    with shared(spec, base=tmp_path) as resources:
        async with Toolbox(resources.tools, tmp_path, resources=resources) as box:
            with pytest.raises(ConfigError, match="this machine has no sandbox"):
                await box.call("python", {"code": "1"})


async def test_a_sandbox_of_another_machine_runs_calls_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_SECRETS", "SANDBOX_KEY")
    monkeypatch.setenv("ROLLOUT_SECRET_SANDBOX_KEY", "k")
    folder = tmp_path / "episode"
    folder.mkdir()
    (folder / "a").write_text("given")
    with Sandbox() as served:
        service = SandboxService(served, api_key="k").start()
        place = CodeSandbox(kind="http", url=service.url, api_key="SANDBOX_KEY")
        specs = (
            PythonTool(keeps_state=False, sandbox=place, **PATIENT),
            ShellTool(commands="any", sandbox=place, **SHORT),
        )
        check_tools(specs)
        with shared(*specs, base=tmp_path) as resources:
            async with Toolbox(specs, folder, resources=resources) as box:
                code = "open('b', 'w').write(open('a').read()[::-1]); print('done')"
                assert await said(box, "python", code=code) == "done\n"
                assert await said(box, "shell", command="ls; cat b") == "a\nb\nnevig"
                assert "took longer than 1 s" in (await failed(box, "shell", command="sleep 100")).text
        service.close()
    assert (folder / "b").read_text() == "nevig"


def test_what_a_plan_says_of_programs_that_are_not_there():
    spec = ShellTool(commands=("ls", "no-such-program"))
    with pytest.raises(ConfigError) as raised:
        check_tools([spec, PythonTool()])
    (line,) = raised.value.violations
    assert line.startswith("tool shell: the sandbox has no program no-such-program; install it")
    check_tools([ShellTool(commands=("ls", "echo", "[")), ShellTool(name="any", commands="any")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PythonTool(sandbox=CodeSandbox(kind="docker")), "keeps_state talks with an interpreter"),
        (lambda: ShellTool(commands=()), "commands"),
        (lambda: ShellTool(commands=("ls -l",)), "commands"),
        (lambda: ShellTool(commands=("/bin/ls",)), "commands"),
        (lambda: PythonTool(name="a b"), "name"),
        (lambda: PythonTool(seconds=0), "seconds"),
        (lambda: PythonTool(memory_mb=255), "disk_mb is 64, and memory_mb 255"),
    ],
)
def test_settings_that_cannot_be(make, message: str):
    with pytest.raises(ValidationError, match=message):
        make()


def test_where_programs_run_is_no_part_of_the_identity():
    assert identity(PythonTool()) == identity(PythonTool(sandbox="none"))
    assert identity(PythonTool()) != identity(PythonTool(seconds=11))
    assert identity(PythonTool()) != identity(PythonTool(keeps_state=False))
