"""A stop signal ends a process in time, wherever it falls; each case is a process of its own. An interruption ends one
call, and its process goes on."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rollout_core.base import process_tree, stopping
from rollout_core.base.errors import ConfigError, Recoverable, Stopped
from rollout_core.base.locks import exclusive, try_exclusive
from rollout_core.base.settings import stop_seconds
from rollout_core.base.stopping import Interruption

LONG = 60.0
"""Seconds; what takes that long did not stop by itself."""

RAISES = "signal.signal(signal.SIGTERM, raise_interrupted)"
IS_LOST = "signal.signal(signal.SIGTERM, lambda *_: None)"
"""What a handler raises inside a destructor is dropped; to the waiting thread that is as if it had not raised."""

PROGRAM = """
import ctypes, signal, subprocess, sys, threading, time
from rollout_core.base import stopping
from rollout_core.base.errors import Stopped

class Interrupted(BaseException):
    pass

def raise_interrupted(*_):
    raise Interrupted

def say(text):
    print(text, flush=True)

{handler}
with stopping.watching(ends_process=True):
    try:
        {body}
    except (Interrupted, Stopped) as error:
        say(f"ended by {{type(error).__name__}}")
        {after}
"""

HEEDS = """
def work():
    say("ready")
    while not stopping.is_stopping():
        time.sleep(0.01)
    say("kept")
    stopping.raise_if_stopping("work")
stopping.run_interruptibly(work, Interrupted)
"""
HANGS = """
def work():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(f"ready {child.pid}")
    ctypes.CDLL(None).sleep(600)
stopping.run_interruptibly(work, Interrupted)
"""
HOLDS_THE_INTERPRETER = """
def work():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(f"ready {child.pid}")
    ctypes.PyDLL(None).sleep(600)
stopping.run_interruptibly(work, Interrupted)
"""
AWAITS = """
async def work():
    import asyncio
    say("ready")
    try:
        await asyncio.sleep(600)
    finally:
        say("given back")
stopping.run_interruptibly(lambda: stopping.run_async(work()), Interrupted)
"""


@pytest.fixture
def program(start_process) -> Callable[..., subprocess.Popen[str]]:
    def start(body: str, *, handler: str = RAISES, after: str = "pass", stop_seconds: str = "20"):
        indented = textwrap.indent(body.strip(), 8 * " ").strip()
        text = PROGRAM.format(handler=handler, body=indented, after=after)
        return start_process("-c", text, env={"ROLLOUT_STOP_SECONDS": stop_seconds})

    return start


def assert_gone(child: psutil.Process) -> None:
    """A killed process needs a moment to be gone, on a busy machine a long one."""
    psutil.wait_procs([child], timeout=LONG)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("handler", [RAISES, IS_LOST])
def test_work_that_heeds_the_signal_keeps_what_it_has_done_also_where_the_handlers_exception_is_lost(program, handler):
    process = program(HEEDS, handler=handler)
    assert first_line(process) == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert output == "kept\nended by Interrupted\n"
    assert process.returncode == 0


def test_asynchronous_work_is_cancelled_and_cleans_up(program):
    process = program(AWAITS)
    assert first_line(process) == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert output == "given back\nended by Interrupted\n"


def test_a_native_call_that_does_not_return_is_ended_with_its_children_when_the_time_is_up(program):
    process = program(HANGS, stop_seconds="3", after="time.sleep(600)")
    child = psutil.Process(int(first_line(process).split()[1]))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGTERM
    assert "did not stop within 3 s (ROLLOUT_STOP_SECONDS)" in output
    assert "most recent call first" in output, "where it hung is shown"
    assert_gone(child)


def test_a_native_call_that_lets_no_thread_run_is_ended_too(program):
    process = program(HOLDS_THE_INTERPRETER, stop_seconds="2")
    child = psutil.Process(int(first_line(process).split()[1]))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONG)
    assert process.returncode == -signal.SIGKILL
    assert_gone(child)


def test_a_second_signal_ends_the_process_at_once(program):
    process = program(HANGS, stop_seconds="600", handler=IS_LOST)
    child = psutil.Process(int(first_line(process).split()[1]))
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGTERM
    assert "got a second signal to stop" in output
    assert_gone(child)


def test_no_child_is_left_where_the_main_thread_does_not_wait_for_the_work(program):
    process = program(HANGS, stop_seconds="600", handler=RAISES)
    child = psutil.Process(int(first_line(process).split()[1]))
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)  # its handler raises in the main thread, which waits for the work
    process.communicate(timeout=LONG)
    assert process.returncode != 0
    assert_gone(child)


def test_one_wish_that_two_pass_on_is_no_second_signal(program):
    process = program(HEEDS)
    assert first_line(process) == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert "kept" in output and process.returncode == 0


def test_without_its_own_process_only_the_flag_is_set_and_taken_back():
    def noted(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, noted)
    try:
        with stopping.watching(ends_process=False):
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + LONG
            while not stopping.is_stopping() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stopping.is_stopping()
        assert not stopping.is_stopping()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_the_time_to_stop_is_a_positive_number(monkeypatch, value):
    monkeypatch.setenv("ROLLOUT_STOP_SECONDS", value)
    with pytest.raises(ConfigError, match="ROLLOUT_STOP_SECONDS"):
        stop_seconds()


def test_threads_for_work_are_kept_and_carry_the_context():
    import contextvars

    name = contextvars.ContextVar("name", default="none")
    name.set("caller's")
    first, context = stopping.in_thread(lambda: (threading.get_ident(), name.get())).result()
    assert context == "caller's"
    time.sleep(0.1)
    assert stopping.in_thread(threading.get_ident).result() == first


THREADS = ["the main thread", "another thread"]


@pytest.fixture(params=THREADS)
def interrupted(request):
    """Runs a call that is asked to end as soon as it has begun, from either kind of thread; returns what that raises
    or gives."""

    def run(work: Callable[[], object], reason: Exception, within_seconds: float | None = None) -> object:
        interruption, begun = Interruption(), threading.Event()

        def call() -> object:
            begun.set()
            return work()

        def ask() -> None:
            assert begun.wait(LONG)
            interruption.request(reason, within_seconds=within_seconds)

        def caller() -> object:
            asking = threading.Thread(target=ask)
            asking.start()
            try:
                return stopping.run_interruptibly(call, KeyboardInterrupt, interruption)
            finally:
                asking.join()

        if request.param == THREADS[0]:
            return caller()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(caller).result(LONG)

    return run


def until_stopping(what: str) -> None:
    while not stopping.is_stopping():
        time.sleep(0.01)
    stopping.raise_if_stopping(what)


def test_one_call_is_interrupted_for_a_reason_and_the_process_goes_on(interrupted):
    ended = []

    def work() -> None:
        try:
            until_stopping("the work")
        except Stopped as error:
            ended.append(str(error))
            raise

    with pytest.raises(Recoverable, match=r"^the lease of x was taken by b$") as raised:
        interrupted(work, Recoverable("the lease of x was taken by b"))
    assert ended == ["the work was interrupted: the lease of x was taken by b"]
    assert str(raised.value.__cause__) == ended[0]
    assert not stopping.is_stopping() and stopping.current_interruption() is None
    assert stopping.run_interruptibly(lambda: 1, KeyboardInterrupt) == 1


def test_what_an_interrupted_call_raises_gives_way_to_the_reason_and_a_result_does_not(interrupted):
    def breaks() -> None:
        with pytest.raises(Stopped):
            until_stopping("the work")
        raise RuntimeError("its engine was killed")

    def ends() -> int:
        with pytest.raises(Stopped):
            until_stopping("the work")
        return 7

    with pytest.raises(TimeoutError, match=r"^too slow$"):
        interrupted(breaks, TimeoutError("too slow"))
    assert interrupted(ends, TimeoutError("too slow")) == 7


def test_what_waits_is_interrupted_too_and_in_threads_that_it_starts(interrupted, tmp_path):
    async def asleep() -> None:
        await asyncio.sleep(LONG)

    def waits_for_a_lock() -> None:
        descriptor = try_exclusive(tmp_path / "lock")
        assert descriptor is not None
        try:
            with exclusive(tmp_path / "lock"):
                raise AssertionError("it is held")
        finally:
            os.close(descriptor)

    for work in (
        lambda: stopping.run_async(asleep()),
        lambda: stopping.in_thread(lambda: until_stopping("a part")).result(),
        lambda: asyncio.run(asyncio.to_thread(until_stopping, "a part")),
        # Interrupted within, for another's reason.
        lambda: stopping.run_interruptibly(lambda: until_stopping("a part"), KeyboardInterrupt),
        waits_for_a_lock,
    ):
        with pytest.raises(TimeoutError, match="too slow"):
            interrupted(work, TimeoutError("too slow"))


def test_the_caller_goes_on_without_a_call_that_does_not_end_which_writes_nothing_after(interrupted, tmp_path, caplog):
    go_on, found = threading.Event(), queue.SimpleQueue()

    def hangs() -> None:
        with exclusive(tmp_path / "lock"):
            stopping.raise_if_abandoned("a result")
            assert go_on.wait(LONG)
            try:
                stopping.raise_if_abandoned("a result")
            except Stopped as error:
                found.put(str(error))

    with pytest.raises(TimeoutError, match="too slow"):
        interrupted(hangs, TimeoutError("too slow"), within_seconds=0.3)
    assert "is left behind (too slow); it was at" in caplog.text and "go_on.wait(LONG)" in caplog.text
    # It has let go of its locks, so that its work can be done by another.
    with exclusive(tmp_path / "lock"):
        go_on.set()
        assert found.get(timeout=LONG) == "a result is not written, because its stage was given up: too slow"


def test_of_several_wishes_the_first_counts_and_an_early_one_too():
    interruption = Interruption()
    interruption.request(TimeoutError("first"))
    interruption.request(TimeoutError("second"), within_seconds=0.0)
    called = []

    def work() -> None:
        with stopping.on_stop(lambda: called.append("stop")):
            until_stopping("the work")

    with pytest.raises(TimeoutError, match="first"):
        stopping.run_interruptibly(work, KeyboardInterrupt, interruption)
    assert called == ["stop"] and not interruption.is_overdue


def test_a_guard_whose_process_has_ended_says_nothing():
    """It reads the end of that process, and has nobody to write to; the log of a worker that was killed had a trace."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, process_tree.__file__, str(os.getpid()), "10"]
    guard = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (guard.returncode, guard.stderr) == (0, b"")
