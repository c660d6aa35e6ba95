"""A session fails with whatever its tests leave, and names them; a clean one leaves no folder either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.alive import lives
from tests.support.machine import TOOLS, Tool, missing, require

PROJECT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.support import leftovers
from tests.conftest import (
    nothing_is_left, pytest_addoption, pytest_collection_finish, pytest_collection_modifyitems, pytest_configure,
    pytest_configure_node, pytest_report_header, pytest_sessionfinish, pytest_unconfigure,
)
leftovers.GRACE_SECONDS = 0.5
leftovers.SEGMENTS = "psm_within-a-test-*"  # tests of other processes make some meanwhile
"""
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""For sessions within a test: those of other packages take two seconds to load."""
LEAVING = """
import multiprocessing.resource_tracker, multiprocessing.shared_memory, os, subprocess, sys, tempfile
kept = []
def test_process():
    # Nobody's child any more, as what a killed process has started.
    code = "from subprocess import *; print(Popen(['sleep', '600'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    print("left", subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
def test_segment():
    segment = multiprocessing.shared_memory.SharedMemory(f"psm_within-a-test-{os.getpid()}", create=True, size=8)
    multiprocessing.resource_tracker.unregister(segment._name, "shared_memory")
    segment.close()
    print("segment", segment.name)
def test_folder():
    tempfile.mkdtemp(prefix="mine-")
def test_open_files():
    kept.extend(open(os.devnull) for _ in range(301))
def test_nothing():
    with tempfile.TemporaryDirectory():
        subprocess.run(["true"])
"""


def run_pytest(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A session of its own, with the hooks of this one."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_own.py").write_text(tests)
    (folder / "temporary").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments, str(folder)],
        env={**kept, **FEW_PLUGINS, "TMPDIR": str(folder / "temporary"), "PYTHONPATH": str(PROJECT)},
        cwd=folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_tests_leave_fails_the_session_by_name(processes: str, tmp_path: Path):
    done = run_pytest(tmp_path, LEAVING, "-rA", "--numprocesses", processes)
    pid, segment = (done.stdout.split(f"\n{word} ")[1].split()[0] for word in ("left", "segment"))
    Path("/dev/shm", segment).unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "5 passed" in done.stdout and "things are left by tests" in done.stdout
    assert "(sleep 600) of test_own.py::test_process" in done.stdout
    assert "301 open files and sockets, after test_own.py::test_open_files" in done.stdout
    assert "/mine-" in done.stdout and "first seen after test_own.py::test_folder" in done.stdout
    assert "1 segments of shared memory are left by tests" in done.stderr
    assert f"/dev/shm/{segment}, first seen after test_own.py::test_" in done.stderr
    assert not lives(int(pid)), "what is left is ended, too"
    assert len(list((tmp_path / "temporary").iterdir())) == 1, "files of a failed session stay for a look"
    again = run_pytest(tmp_path, "def test_passes(tmp_path): (tmp_path / 'file').write_text('x')")
    assert again.returncode == 0, again.stdout + again.stderr
    assert list((tmp_path / "temporary").iterdir()) == [], "and go with the next one"


def test_files_come_in_the_order_of_a_seed(tmp_path: Path):
    for name in "abcdefgh":
        (tmp_path / f"test_{name}.py").write_text("def test_1(): pass\ndef test_2(): pass")
    orders = []
    for seed in ("1", "1", "2", "new"):
        done = run_pytest(tmp_path, "def test_own(): pass", "--mix", seed, "-v")
        lines = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("%]")]
        assert len(lines) == 17
        assert all(one.split("::")[0] == two.split("::")[0] for one, two in zip(*pairs(lines), strict=True))
        orders.append(lines)
        assert f"files in the order of --mix {seed if seed != 'new' else ''}" in done.stdout
    assert orders[0] == orders[1] != orders[2]
    done = run_pytest(tmp_path, "def test_own(): pass", "--mix", "new", "--numprocesses", "2")
    assert "17 passed" in done.stdout, "the processes do not agree on the seed"


def pairs(lines: list[str]) -> tuple[list[str], list[str]]:
    """First and second tests of the files that have two."""
    files = [line for line in lines if "test_own.py" not in line]
    return files[::2], files[1::2]


def test_a_machine_that_lacks_programs_is_told_what_is_not_tested(monkeypatch: pytest.MonkeyPatch):
    lacking = Tool("jq", lambda: None, "lines of JSON", "apt-get install jq")
    monkeypatch.setattr("tests.support.machine.TOOLS", (*TOOLS, lacking))
    assert missing()[-1] == "  jq: lines of JSON (apt-get install jq)"
    with pytest.raises(pytest.skip.Exception, match=r"no jq on this machine \(apt-get install jq\)"):
        require(lacking)
