"""What tests leave behind: processes, segments of shared memory, files and folders for temporary things.

Each pytest process has a folder of its own for temporary files, so what lies there in the end is its tests'. A process
that a test started carries that test's name: pytest keeps it in the environment, which children inherit.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollout_core.base.locks import SCRATCH_PREFIX, SHARED_MEMORY, lock, sweep
from tests.support import forked

OWNER = "PYTEST_PROCESS_FOLDER"
"""Environment variable of all that a pytest process starts: the folder of that process's temporary files."""
PREFIX, MARKER = "rt-", "of-a-test-session"
"""Short: paths of sockets have 107 characters at most, and vLLM's and PostgreSQL's are below this folder."""
EXPECTED = re.compile(
    r"torchinductor_\w+|pymp-\w+|matplotlib-\w+"  # kept for the next use, or until their process ends
    r"|vllm_dist_\w+|torchelastic_\w+|dask-scratch-space|tmp\w+prefect|runner_storage"  # of processes that are killed
)
"""Names of temporary files that libraries leave. They go with the session's folder."""
KEPT = (
    "rollout_core.models.bounded.inspecting",
    "rollout_core.models.bounded.tokenizing",
    "rollout_core.evaluation.lm_eval_tasks",
)
"""Modules of which each keeps a child for the next question, which ends with this process; so do rewards."""
SEGMENTS = "psm_*"
"""Names of segments of shared memory, as Python makes them. A session within a test looks for its own alone."""
MOST_FILES = 300
"""That a test may leave open, as a server for all may. With a thousand, libraries that use `select` begin to fail."""
GRACE_SECONDS = 120.0
"""In which processes that were told to end may do so."""


class TemporaryFolder:
    """The place of a whole session's temporary files, of each pytest process in a folder of its own.

    It is gone with the session, unless a test failed: then it stays for a look, until the next session.
    """

    def __init__(self, config: pytest.Config) -> None:
        place = Path(tempfile.gettempdir())
        for folder in place.glob(f"{PREFIX}????????"):
            if (folder / MARKER).exists():
                sweep(place, folder.name)
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.keep = False
        self._lock = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        lock(self._lock)
        (self.root / MARKER).touch()
        self.root.chmod(0o711)  # PostgreSQL's server runs as another user where the tests run as root
        if config.option.basetemp is None:
            config.option.basetemp = str(self.root / "t")
        self.use(self.root, "main")

    @staticmethod
    def use(root: Path, process: str) -> None:
        """Have this process, and all that it starts, put temporary files into a folder of this name."""
        folder = root / process
        folder.mkdir()
        folder.chmod(0o711)
        os.environ["TMPDIR"] = os.environ[OWNER] = str(folder)
        tempfile.tempdir = None

    def end(self) -> None:
        """Remove it, unless it is to be kept."""
        os.close(self._lock)
        if not self.keep:
            shutil.rmtree(self.root, ignore_errors=True)


class Leftovers:
    """Looks after each test for new files and segments, and in the end for what is still there."""

    def __init__(self, root: Path) -> None:
        self._folder, self._notes = Path(os.environ[OWNER]), root / "segments"
        self._before = {*_paths(self._folder), *SHARED_MEMORY.glob(SEGMENTS)}
        self._test_of: dict[Path, str] = {}
        """Of each new path the test after which it was first seen. Other processes make segments at the same time."""
        self._test = ""
        self._open: list[str] = []
        """A line for each test that left too many files open."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, before = item.nodeid, _num_open_files()
        result = yield
        self._look()
        if _num_open_files() > before + MOST_FILES:
            gc.collect()
            if (more := _num_open_files() - before) > MOST_FILES:
                self._open.append(f"{more} open files and sockets, after {item.nodeid}")
        return result

    def _look(self) -> None:
        for path in (*_paths(self._folder), *SHARED_MEMORY.glob(SEGMENTS)):
            if path not in self._before:
                self._test_of.setdefault(path, self._test)

    def found(self) -> list[str]:
        """A line for each process and path that this pytest process's tests have left. Ends the processes."""
        self._look()  # the last test has not ended yet
        gc.collect()  # what stands in cycles, such as a reward with its process, ends where nobody has it any more
        for name in KEPT:
            if name in sys.modules:
                sys.modules[name]._child.close()
        if "rollout_core.rewards.kept" in sys.modules:
            sys.modules["rollout_core.rewards.kept"].close_rewards()
        # What killed processes leave for the next one to remove.
        sweep(self._folder, f"{SCRATCH_PREFIX}*")
        deadline = time.monotonic() + GRACE_SECONDS
        while (lines := [*self._open, *self._processes(), *self._files()])[
            len(self._open) :
        ] and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in self._started():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with self._notes.open("a", encoding="utf-8") as file:
            for path, test in self._test_of.items():
                if path.parent == SHARED_MEMORY:
                    file.write(f"{path}\t{test}\n")
        return [*self._open, *lines]

    def segments(self) -> list[str]:
        """A line for each segment of shared memory that the session has left; comes when its processes have ended."""
        tests: dict[str, list[str]] = {}
        with suppress(FileNotFoundError):
            for line in self._notes.read_text(encoding="utf-8").splitlines():
                path, _, test = line.partition("\t")
                tests.setdefault(path, []).append(test)
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := unused(tests)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [f"{path}, first seen after {' or '.join(tests[path])}" for path in left]

    def _started(self) -> list[psutil.Process]:
        """Processes that this one started, and theirs, also those whose parents have ended."""
        mark = f"{OWNER}={self._folder}"
        this = psutil.Process()
        found = {process.pid: process for process in this.children(recursive=True)}
        for process in psutil.process_iter():
            if process.pid != this.pid and mark in _environment(process.pid):
                found[process.pid] = process
        return [process for process in found.values() if not _is_expected(process)]

    def _processes(self) -> Iterator[str]:
        for process in self._started():
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())[:160]
                yield f"process {process.pid} ({command}) of {_test_of(process.pid)}"

    def _files(self) -> Iterator[str]:
        for path in _paths(self._folder):
            if path not in self._before and not EXPECTED.fullmatch(path.name):
                test = self._test_of.get(path, "the last test, by a fixture of the session")
                yield f"temporary {path}, first seen after {test}"


def unused(segments: Iterable[str]) -> list[str]:
    """Those of this user that are there and that no process uses: another program's are in use."""
    there = [path for path in segments if Path(path).exists() and Path(path).stat().st_uid == os.geteuid()]
    mapped = "".join(_read(pid, "maps") for pid in psutil.pids()) if there else ""
    return [path for path in there if path not in mapped and Path(path).exists()]


def _paths(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return []


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # ended, or another user's


def _environment(pid: int) -> list[str]:
    return _read(pid, "environ").split("\0")


def _test_of(pid: int) -> str:
    named = [line.partition("=")[2] for line in _environment(pid) if line.startswith("PYTEST_CURRENT_TEST=")]
    named.append(forked.tests.get(pid, ""))
    return re.sub(r" \((setup|call|teardown)\)$", "", max(named, key=len)) or "no test that is known"


def _is_expected(process: psutil.Process) -> bool:
    """Python's own helper, which ends with the pytest process, and what has ended and waits for its parent to look."""
    try:
        helps = process.ppid() == os.getpid() and "multiprocessing.resource_tracker" in " ".join(process.cmdline())
        return helps or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
