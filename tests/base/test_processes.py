"""Which process is meant: told apart from all others, whatever happens to process ids and to the clock."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from rollout_core.base import processes
from rollout_core.base.processes import ProcessName, this_machine
from rollout_core.inference.ledger import is_gone, this_worker

SAY_WORKER = "from rollout_core.inference.ledger import this_worker; print(this_worker(), flush=True); input()"


@pytest.fixture
def worker(start_process):
    """A worker's process and its name."""
    child = start_process("-c", SAY_WORKER, stdin=-1)
    return child, child.stdout.readline().strip()


def test_a_worker_is_gone_once_its_process_was_killed_and_while_nobody_has_asked_for_its_exit_code(worker):
    child, name = worker
    assert not is_gone(name)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
    assert is_gone(name)
    child.wait()
    assert is_gone(name)


def test_a_step_of_the_wall_clock_makes_no_living_worker_a_dead_one(
    worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the clock the kernel's time of boot is set, from which creation times in seconds are computed."""
    _, name = worker
    after_step = tmp_path / "proc"
    after_step.mkdir()
    for entry in Path("/proc").iterdir():
        if entry.name != "stat":
            (after_step / entry.name).symlink_to(entry)
    boot = re.sub(r"btime (\d+)", lambda found: f"btime {int(found[1]) + 3600}", Path("/proc/stat").read_text())
    (after_step / "stat").write_text(boot)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(after_step))
    monkeypatch.setattr(processes, "PROC", after_step, raising=False)
    assert not is_gone(name)


def test_another_process_of_the_same_id_is_not_the_worker(worker):
    _, name = worker
    host, machine, pid, ticks = name.split(":")
    assert is_gone(f"{host}:{machine}:{pid}:{int(ticks) - 1}")


def test_workers_of_other_machines_and_of_other_boots_are_never_called_gone(worker):
    host, machine, pid, ticks = worker[1].split(":")
    assert not is_gone(f"{host}:{machine[::-1]}:{pid}:{int(ticks) - 1}")


@pytest.mark.parametrize("name", [None, "", "w1", "a:b", "a:b:c:d", "host:{machine}:1e3:5", "host:{machine}:-1:5"])
def test_names_of_another_form_are_never_called_gone(name: str | None):
    assert not is_gone(name and name.replace("{machine}", this_machine()))


def test_this_worker_lives_and_its_name_says_which_process_it_is():
    assert not is_gone(this_worker())
    named = ProcessName.parse(str(ProcessName.of_this_process()))
    assert named == ProcessName.of_this_process() and named.pid == os.getpid() and named.start_ticks > 0


def test_a_process_whose_program_has_brackets_in_its_name_is_read_right(tmp_path: Path, start_process):
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    child = start_process("-c", f"import os; os.execv({str(program)!r}, ['sleep', '60'])")
    while "sleep" not in Path(f"/proc/{child.pid}/cmdline").read_text():
        pass
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert not ProcessName(this_machine(), child.pid, int(fields[19])).has_ended()
