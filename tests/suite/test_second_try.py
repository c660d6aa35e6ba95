"""CI's second try: which failures get one, what is printed of those that pass then, and that others stay red."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.second_try import MAX_FAILED, Failure, NoSecondTry, failures, report_of
from tests.suite.test_leftovers import CONFTEST, FEW_PLUGINS

PROJECT = Path(__file__).resolve().parents[2]
FLAKY = """
import os, pathlib, pytest, unittest
tries = pathlib.Path(__file__).with_name("tries")
class TestIn:
    @pytest.mark.parametrize("text", ["a[b]::c", "\\u00e9 \\x00"])
    def test_class(self, text):
        with tries.open("a") as file:
            file.write("x")
        assert tries.stat().st_size > 2, "only at the second try"
@pytest.fixture
def ends_badly():
    yield
    assert tries.stat().st_size > 2, "in the teardown"
def test_teardown(ends_badly): pass
def test_right(): pass
def of_a_library(name):
    # As hypothesis makes them of its machines: their functions stand in its own file.
    made = {}
    exec(compile("def runTest(self): assert OTHER or TRIES.stat().st_size > 2", unittest.__file__, "exec"),
         {"TRIES": tries, "OTHER": name == "One"}, made)
    return type(name, (unittest.TestCase,), made)
TestOne, TestOther = of_a_library("One"), of_a_library("Other")
def test_often():
    assert "BROKEN" not in os.environ
"""
DYING = "import os\ndef test_one(): pass\ndef test_two(): os._exit(3)\n"


def first_try(folder: Path, tests: str, *options: str, **environment: str) -> Path:
    """The report of a first run."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\njunit_family = "xunit1"\n')
    (folder / "conftest.py").write_text(CONFTEST)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--junitxml=report.xml", *options, "test_it.py"]
    run(folder, *command, **environment)
    return folder / "report.xml"


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=400,
        env={**kept, **FEW_PLUGINS, "PYTHONPATH": str(PROJECT), "TMPDIR": str(folder), **environment},
    )  # fmt: skip


def test_what_passes_at_the_second_try_is_named_with_its_first_failure(tmp_path: Path):
    report = first_try(tmp_path, FLAKY)
    done = run(tmp_path, "-m", "tests.second_try", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    block = done.stdout.split("passed at the second try:")[1]
    assert "* test_it.py::TestIn::test_class[a[b]::c]" in block and "only at the second try" in block
    assert "* test_it.py::test_teardown" in block and "in the teardown" in block
    assert "* test_it.py::TestOther::runTest" in block
    assert "test_right" not in done.stdout
    assert "a second try of 4 tests" in done.stdout and "4 passed" in done.stdout


@pytest.mark.parametrize("options", [(), ("--numprocesses=2",)], ids=["alone", "two processes"])
def test_a_file_that_skips_itself_whole_takes_nobody_the_second_try(options: tuple[str, ...], tmp_path: Path):
    (tmp_path / "test_other.py").write_text("import pytest\npytest.importorskip('nothing_of_this_name')\n")
    report = first_try(tmp_path, FLAKY, "test_other.py", *options)
    assert len(ElementTree.parse(report).getroot().findall(".//skipped")) == 1
    assert len(read(report)) == 4


def test_what_fails_twice_is_red(tmp_path: Path):
    done = run(tmp_path, "-m", "tests.second_try", str(first_try(tmp_path, FLAKY, BROKEN="1")), BROKEN="1")
    assert done.returncode == 1
    assert "passed at the second try" not in done.stdout


def test_a_process_that_died_gets_no_second_try(tmp_path: Path):
    with pytest.raises(NoSecondTry, match="a pytest process died"):
        read(first_try(tmp_path, DYING, "--numprocesses=1"))


def read(report: Path) -> list[Failure]:
    return failures(report.read_text(), json.loads(report.with_suffix(".json").read_text()))


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("import pytest\ndef test_one(): assert False\ndef test_two(): pytest.exit('enough')\n", "ended otherwise"),
        ("import tempfile\ndef test_one(): tempfile.mkdtemp()\n", "a check of several tests failed"),
    ],
    ids=["interrupted", "something is left"],
)
def test_a_session_that_fails_otherwise_gets_no_second_try(tests: str, reason: str, tmp_path: Path):
    with pytest.raises(NoSecondTry, match=reason):
        read(first_try(tmp_path, tests))


def test_what_is_skipped_at_the_second_try_has_not_passed(tmp_path: Path):
    tests = "import os, pytest\ndef test_one():\n    if 'AGAIN' in os.environ: pytest.skip()\n    assert False\n"
    done = run(tmp_path, "-m", "tests.second_try", str(first_try(tmp_path, tests)), AGAIN="1")
    assert done.returncode == 1 and "passed at the second try" not in done.stdout


def test_a_file_that_cannot_be_collected_gets_no_second_try(tmp_path: Path):
    done = run(tmp_path, "-m", "tests.second_try", str(first_try(tmp_path, "import nothing_of_this_name")))
    assert done.returncode == 1 and "no second try" in done.stdout


def test_too_many_failures_are_no_accident(tmp_path: Path):
    tests = "import pytest\n@pytest.mark.parametrize('n', range({}))\ndef test_n(n): assert False\n"
    assert len(read(first_try(tmp_path, tests.format(MAX_FAILED)))) == MAX_FAILED
    with pytest.raises(NoSecondTry, match=f"{MAX_FAILED + 1} tests failed"):
        read(first_try(tmp_path, tests.format(MAX_FAILED + 1)))


def test_without_a_report_or_a_failure_it_is_red(tmp_path: Path):
    done = run(tmp_path, "-m", "tests.second_try", "missing.xml")
    assert done.returncode == 1 and "no second try: there is no missing.xml" in done.stdout
    done = run(tmp_path, "-m", "tests.second_try", str(first_try(tmp_path, "def test_right(): pass")))
    assert done.returncode == 1 and "no second try" in done.stdout


def test_a_name_that_is_listed_already_is_to_be_mended():
    once, again = Failure("tests/test_a.py::test_one", "E  slow"), Failure("tests/test_a.py::test_two", "E  late")
    text = report_of([once, again], "| `tests/test_a.py::test_two` | 2026-01-01 | late |")
    assert "stand there already, so mend their fault in this change: tests/test_a.py::test_two" in text
    assert "stand there already" not in report_of([once], "")
