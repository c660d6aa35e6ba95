"""Other people's code in a child process: whatever it does, its call fails with the reason and nothing else does."""

from __future__ import annotations

import copy
import math
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.isolation import child as isolation_child
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.processes import Limits

TESTS = str(Path(__file__).parent)
MIB = 2**20


@pytest.fixture(autouse=True)
def handlers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)


@contextmanager
def child(name: str = "misbehave", **limits: Any) -> Iterator[Child]:
    with Child(f"isolated_handlers:{name}", Limits(**limits)) as made:
        yield made


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def test_values_cross_exactly():
    floats = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, 1e22]
    values = {"text": "\ud800 ü \x00", "large": 2**80, "nested": [None, True, {"a": []}], "floats": floats}
    with child("echo") as running:
        got = running.call(values)
    assert got == values
    assert [struct.pack("d", value) for value in got["floats"]] == [struct.pack("d", value) for value in floats]


def test_large_values_do_not_block_a_child_that_writes_output_at_the_same_time():
    with child("echo") as running:
        large = "x" * (8 * MIB)
        assert running.call(large) == large


@pytest.mark.parametrize(
    ("way", "limits", "reason"),
    [
        ("exit", {}, "ended its process with exit code 0"),
        ("exit from a thread", {}, "ended its process with exit code 4"),
        ("crash", {}, "was killed by SIGSEGV"),
        ("hang", {"seconds": 1.0}, "took longer than 1 s; its last output: about to hang"),
        ("flood", {"output_bytes": MIB}, "wrote more than 1 MiB of output"),
        ("memory", {"memory_bytes": 200 * MIB}, "MiB of memory; 200 MiB are allowed"),
        ("fork", {"processes": 16}, "processes at once; 16 are allowed"),
        ("fork away", {"processes": 16}, "processes at once; 16 are allowed"),
    ],
)
def test_a_call_that_does_not_come_to_its_end_says_why_and_where(way: str, limits: dict[str, Any], reason: str):
    with child(**limits) as running:
        with pytest.raises(Ended) as caught:
            running.call(way)
        assert reason in str(caught.value) and caught.value.place == 7
        assert not running.is_running
        assert is_alive(running.call("place")), "the next call has a new process"


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("kill", "was killed by SIGKILL (the machine may have run out of memory)"),
        ("kill the warden", "lost the process that watches it"),
    ],
)
def test_an_end_that_the_machine_may_have_caused_is_worth_another_try(way: str, reason: str):
    with child() as running:
        with pytest.raises(Recoverable) as caught:
            running.call(way)
        told = copy.copy(caught.value)
        assert isinstance(told, Interrupted) and (told.reason, told.place) == (reason, 7)
        assert str(told) == f"a child process {reason}"
        assert is_alive(running.call("place")), "the next call has a new process"


def test_a_warden_that_fails_says_of_what(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation_child, "allowed_memory", lambda limits: str(MIB))
    with child() as running, pytest.raises(Interrupted, match=r"lost the process that watches it \(TypeError: '>' not"):
        running.call("hang")


def test_a_caller_with_more_than_a_thousand_open_files_has_children():
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull, "rb"))
        with child("echo") as running:
            assert running.call("yes") == "yes"
            assert running._process is not None and running._process.pipes.control > 1024


def test_the_end_of_a_child_that_was_closed_writes_to_no_other_file(tmp_path: Path):
    with child("echo") as running:
        assert running.call(1) == 1
        process = running._process
        assert process is not None
        process.pipes.close()
        with (tmp_path / "other").open("wb", buffering=0) as other:
            os.dup2(other.fileno(), process.pipes.control)  # the number is another file's now
            running.end()
        os.close(process.pipes.control)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_machine_that_is_too_busy_to_start_a_child_is_worth_another_try(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation_child, "START_SECONDS", 0.0)
    with child() as running:
        with pytest.raises(Recoverable, match=r"^a child process took longer than 0 s to start \(the machine may be"):
            running.call("place")


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("sys.exit", "SystemExit: 0"),
        ("interrupt", "KeyboardInterrupt: KeyboardInterrupt"),
        ("unshowable", "Unshowable: (its message cannot be shown: __str__ raises RuntimeError)"),
        ("no JSON", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_what_the_code_raises_is_told_and_its_process_goes_on(way: str, message: str):
    with child() as running:
        before = running.call("place")
        with pytest.raises(Fatal) as caught:
            running.call(way)
        assert str(caught.value) == message and running.call("place") == before


def test_a_copy_that_runs_on_does_not_answer_a_second_time():
    with child() as running:
        assert [running.call(way) for way in ("copy", "copy", "copy")] == ["done"] * 3
        assert isinstance(running.call("place"), int), "no answer of a copy is taken for this one"


@pytest.mark.parametrize(
    ("way", "reason"),
    [("close", "ended its process"), ("nonsense", "wrote into the pipe that its results go through")],
)
def test_code_that_gets_at_its_pipes_fails_its_own_call(way: str, reason: str):
    with child(seconds=60.0) as running:
        with pytest.raises(Ended, match=reason):
            running.call(way)
        assert running.call("copy") == "done"


def test_a_daemon_that_the_code_leaves_behind_ends_with_the_child():
    with child() as running:
        daemon = running.call("daemon")
        assert is_alive(daemon)
    assert not is_alive(daemon)


def test_lines_of_output_are_bounded_and_the_rest_is_counted():
    lines: list[str] = []
    with Child("isolated_handlers:misbehave", Limits(output_bytes=3 * MIB), on_line=lines.append) as running:
        with pytest.raises(Ended):
            running.call("flood")
    assert (
        len(lines) == 201 and max(map(len, lines)) == 1000 and lines[-1].endswith("more lines of output are not shown)")
    )


def test_all_processes_end_with_their_caller(start_process: Callable[..., Any]):
    """Also by ``kill -9``, and those that left their session and their parent."""
    code = (
        "from rollout_core.base.isolation.child import Child\n"
        "import sys, time\n"
        f"sys.path.insert(0, {TESTS!r})\n"
        "running = Child('isolated_handlers:misbehave')\n"
        "print(running.call('daemon'), running.call('place'), flush=True)\n"
        "time.sleep(60)\n"
    )
    caller = start_process("-c", code)
    processes = [int(word) for word in caller.stdout.readline().split()]
    assert len(processes) == 2 and all(map(is_alive, processes))
    os.kill(caller.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, processes)))


def test_a_child_outlives_the_thread_that_started_it():
    """A parent-death signal comes when that thread ends, not the process."""
    with child() as running:
        places: list[int] = []
        thread = threading.Thread(target=lambda: places.append(running.call("place")))
        thread.start()
        thread.join()
        time.sleep(0.7)
        assert [running.call("place")] == places


def test_a_copy_of_the_caller_that_ends_leaves_the_child_to_the_caller():
    with child() as running:
        before = running.call("place")
        copy = os.fork()
        if copy == 0:
            try:
                running.close()
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        assert running.call("place") == before


def test_an_interrupted_call_leaves_no_answer_for_the_next():
    class Stop(BaseException):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with child() as running:
            first = running.call("place")
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Stop):
                running.call("hang")
            assert not is_alive(first) and running.call("copy") == "done"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_child_starts_without_heavy_imports():
    with child("modules") as running:
        imported = set(running.call(None))
    assert not imported & {"torch", "vllm", "prefect", "pydantic", "numpy", "psutil", "blake3"}


def test_secrets_stay_with_the_caller_unless_the_worker_allows_them(monkeypatch: pytest.MonkeyPatch):
    kept = {
        "PREFECT_API_KEY": "a",
        "PREFECT_API_AUTH_STRING": "a:b",
        "ROLLOUT_DATABASE": "postgresql://u:p@host/db",
        "ROLLOUT_SECRET_OTHER": "a",
        "AWS_SECRET_ACCESS_KEY": "a",
        "AWS_ACCESS_KEY_ID": "a",
        "ANTHROPIC_API_KEY": "a",
        "GH_TOKEN": "a",
        "PGPASSWORD": "a",
        "SOME_URL": "https://user:word@host/",
    }
    passed = {
        "ROLLOUT_SECRETS": "OPENAI_API_KEY",
        "OPENAI_API_KEY": "a",
        "ROLLOUT_SECRET_OPENAI_API_KEY": "a",
        "HF_TOKEN": "a",
        "HTTPS_PROXY": "http://user:word@proxy:3128",
        "KEYBOARD": "us",
        "TOKENIZERS_PARALLELISM": "false",
        "MY_JUDGE": "http://judge:8000",
    }
    for name, value in {**kept, **passed}.items():
        monkeypatch.setenv(name, value)
    with child("environment") as running:
        found = running.call(None)
    assert not set(kept) & set(found)
    assert passed.items() <= found.items()
