"""Hostile programs beside honest ones: each scores 0 in bounded time and changes nothing; the next one is right."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rollout_core.base.locks import scratch_folder
from rollout_core.rewards.verifiers.code import CodeGrade, IoCase, grade_output, grade_tests
from rollout_core.sandbox import Limits, Sandbox
from rollout_core.sandbox.modes import _is_open_to_all
from tests.sandbox.conftest import KINDS, opened
from tests.sandbox.hostile import PYTHON, SECRET, SHELL, TESTS, UNIT_TESTED, Outside, Server, filled, start_process
from tests.store.patience import LONG, wait_until
from tests.support import machine

LIMITS = Limits(
    wall_seconds=1, cpu_seconds=0.6, memory_bytes=96 * 2**20, processes=12, output_bytes=2**16, disk_bytes=4 * 2**20
)
HONEST = Limits(wall_seconds=60, cpu_seconds=20)
BOUND_SECONDS = LONG
"""For one hostile program, however busy the machine; its own limit is one."""
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def outside() -> Iterator[Outside]:
    """In a folder of its own: folders above pytest's are closed to other users."""
    with scratch_folder("outside") as folder:
        folder.chmod(0o755)  # so that only the walls keep anybody out
        (folder / "cases.json").write_text(f"{SECRET}\n")
        (folder / "id_rsa").write_text("a key")
        for name in ("cases.json", "id_rsa"):
            (folder / name).chmod(0o666)
        server, process = Server(folder), start_process()
        yield Outside(folder, process, server)
        process.kill()
        process.wait()
        server.close()


def honest(sandbox: Sandbox, number: int) -> bool:
    grade = grade_output(sandbox, "print(int(input()) + 1)", [IoCase(f"{number}\n", f"{number + 1}\n")], limits=HONEST)
    return grade.all_passed


def scores(kind: str, python: str | None, outside: Outside) -> dict[str, float]:
    """What each program scores, by name; honest ones run beside them, and after each."""
    jobs: dict[str, Callable[[Sandbox], CodeGrade]] = {}
    case = [IoCase("some input\n", SECRET)]
    for language, programs in (("python", PYTHON), ("bash", SHELL)):
        for name, text in programs.items():
            source = filled(text, outside)
            jobs[name] = lambda sandbox, source=source, language=language: grade_output(
                sandbox, source, case, language=language, limits=LIMITS
            )
    for name, text in UNIT_TESTED.items():
        jobs[f"tests: {name}"] = lambda sandbox, text=text: grade_tests(sandbox, text, TESTS, limits=LIMITS)
    count = itertools.count()

    def graded(sandbox: Sandbox, name: str) -> float:
        begun = time.monotonic()
        grade = jobs[name](sandbox)
        if time.monotonic() - begun > BOUND_SECONDS:
            return -1.0
        return grade.share if honest(sandbox, next(count)) else -2.0

    with Sandbox(kind=kind, python=python, parallel=8) as sandbox, ThreadPoolExecutor(8) as pool:
        found = {name: pool.submit(graded, sandbox, name) for name in jobs}
        found["an honest program"] = pool.submit(
            lambda: float(grade_tests(sandbox, "def f(x): return x and 831415", TESTS, limits=HONEST).all_passed)
        )
        return {name: future.result() for name, future in found.items()}


def expected() -> dict[str, float]:
    names = [*PYTHON, *SHELL, *(f"tests: {name}" for name in UNIT_TESTED)]
    return {**dict.fromkeys(names, 0.0), "an honest program": 1.0}


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_there_are_enough_of_them():
    assert len(PYTHON) + len(SHELL) + len(UNIT_TESTED) > 80


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_programs_score_nothing_and_change_nothing(kind: str, outside: Outside):
    opened(kind).close()
    before, processes = outside.state(), children()
    assert scores(kind, None, outside) == expected()
    assert outside.state() == before
    wait_until(lambda: children() <= processes)


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_for_an_unprivileged_user(kind: str, outside: Outside):
    if os.geteuid() != 0:
        pytest.skip("this is an unprivileged user already, as the test before has it")
    if kind == "bubblewrap":
        machine.require(machine.BUBBLEWRAP)
    python = usable_python()
    (outside.folder / "temporary").mkdir()
    (outside.folder / "temporary").chmod(0o777)
    before, processes = outside.state(), children()
    found = as_nobody(outside.folder / "temporary", lambda: nobodys_scores(kind, python, outside))
    if isinstance(found, str):
        pytest.skip(found)
    assert found == expected()
    assert list((outside.folder / "temporary").iterdir()) == []
    assert outside.state() == before
    wait_until(lambda: children() <= processes)


def nobodys_scores(kind: str, python: str | None, outside: Outside) -> dict[str, float] | str:
    with Sandbox(kind=kind, python=python) as sandbox:
        walls = sandbox.walls()
    if not walls.stand:
        return f"no sandbox of kind {kind} for an unprivileged user: {'; '.join(walls.missing())}"
    return scores(kind, python, outside)


def usable_python() -> str | None:
    """An interpreter that an unprivileged user may start: this one may lie in root's own folder."""
    if _is_open_to_all(sys.base_prefix):
        return None
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip("no interpreter on this machine that an unprivileged user may start")
    return SYSTEM_PYTHON


def as_nobody(temporary: Path, call: Callable[[], object]) -> object:
    """What ``call`` returns, as JSON, in a process of an unprivileged user with this place for temporary files."""
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(readable)
            tempfile.tempdir = str(temporary)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with os.fdopen(writable, "w") as file:
                file.write(json.dumps(call()))
        except BaseException as error:  # noqa: BLE001 - nothing of pytest's goes on in this process
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(process, 0)
    assert text, "the process of the unprivileged user failed; see standard error"
    return json.loads(text)


def test_they_are_hostile_without_walls(outside: Outside):
    """A few that harm nothing: what keeps them from a score is the walls."""
    case = [IoCase("", SECRET)]
    with Sandbox(kind="none") as sandbox:
        for name in ("reading the grader's cases", "connecting out", "connecting to an abstract socket outside"):
            text = filled(PYTHON[name], outside)
            with_walls_gone = grade_output(sandbox, text, case, limits=HONEST)
            assert with_walls_gone.all_passed, (name, with_walls_gone)
