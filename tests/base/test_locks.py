"""One process at a time: the lock waits, says so, and dies with its holder."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from rollout_core.base.errors import Recoverable
from rollout_core.base.locks import exclusive

HOLD = """
import sys, time
from pathlib import Path
from rollout_core.base.locks import exclusive
with exclusive(Path(sys.argv[1]), on_wait=lambda: print("waiting", flush=True)):
    print("holding", flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


def test_a_free_lock_is_taken_at_once_and_again(tmp_path):
    waited = []
    for _ in range(2):
        with exclusive(tmp_path / "locks" / "a.lock", on_wait=lambda: waited.append(1)):
            pass
    assert not waited


def test_another_process_waits_and_says_so_once(tmp_path, start_process):
    path = tmp_path / "a.lock"
    with exclusive(path):
        child = start_process("-c", HOLD, str(path), stdin=-1)
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        assert child.poll() is None
    assert child.stdout.readline() == "holding\n"
    assert child.communicate("\n", timeout=120)[0] == "left\n"


def test_a_killed_holder_leaves_the_lock_free(tmp_path, start_process):
    path = tmp_path / "a.lock"
    child = start_process("-c", HOLD, str(path), stdin=-1)
    assert child.stdout.readline() == "holding\n"
    child.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with exclusive(path):
        assert time.monotonic() - started < 5


def test_threads_of_one_process_exclude_each_other_too(tmp_path):
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with exclusive(tmp_path / "a.lock", on_wait=waiting.set):
            order.append("second")

    with exclusive(tmp_path / "a.lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(120)
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]


def test_different_locks_do_not_wait_for_each_other(tmp_path):
    with exclusive(tmp_path / "a.lock"), exclusive(tmp_path / "b.lock", on_wait=lambda: 1 / 0):
        pass


def test_an_error_inside_frees_the_lock(tmp_path):
    try:
        with exclusive(tmp_path / "a.lock"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with exclusive(tmp_path / "a.lock", on_wait=lambda: 1 / 0):
        pass


def test_a_lock_file_that_cannot_be_made_is_a_passing_fault(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(Recoverable, match=r"lock file .*a\.lock cannot be made"),
        exclusive(tmp_path / "file" / "a.lock"),
    ):
        pass


def test_a_child_forked_inside_does_not_keep_the_lock(tmp_path):
    """An engine started by fork while a stage holds its lock lives on when the stage is done."""
    path = tmp_path / "a.lock"
    wait, release = os.pipe()
    with exclusive(path):
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(wait, 1)
            os._exit(0)
    try:
        with exclusive(path, on_wait=lambda: 1 / 0):
            pass
    finally:
        os.close(release)
        os.close(wait)
        os.waitpid(child, 0)
