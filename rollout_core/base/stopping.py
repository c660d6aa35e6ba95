"""A stop signal ends the run in time, wherever it falls.

Python runs the handler of a signal in the main thread, between two bytecodes: one that arrives in a long native call is
noticed late, and what the handler raises inside a destructor or a weak reference's callback is dropped. So the signal
is also read from the wake-up descriptor, by a thread of its own. That thread sets the flag that long work looks at,
cancels what waits, and ends the process when the time is up or a second signal comes.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, wait as wait_for
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.base import process_tree
from rollout_core.base.errors import Stopped
from rollout_core.base.settings import stop_seconds

T = TypeVar("T")

STOP_SIGNALS = process_tree.STOP_SIGNALS
SAME_SIGNAL_SECONDS = process_tree.SAME_SIGNAL_SECONDS
"""A terminal and a supervisor may both pass on one wish to stop; what comes later than this after the first is a second
signal."""
RESERVE_SECONDS = 2.0
"""Of the time to stop, for what follows once work has ended: saying so to the Prefect server, closing the store."""
_POLL_SECONDS = 0.2

_flag = threading.Event()
_callbacks: dict[object, Callable[[], None]] = {}
_lock = threading.Lock()
_idle: list[queue.SimpleQueue[Callable[[], None]]] = []
"""Of the threads of `in_thread` that have nothing to do."""
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads
_watched = False


def is_stopping() -> bool:
    """Whether this process was asked to stop. Long work asks after each step."""
    return _flag.is_set()


def raise_if_stopping(what: str) -> None:
    """Raises Stopped, naming the work that does not begin or continue, if this process was asked to stop."""
    if _flag.is_set():
        raise Stopped(f"{what} was interrupted because the process was asked to stop; run again to continue from there")


def request_stop() -> None:
    """Do what a stop signal does, but for the end of the process."""
    _flag.set()
    with _lock:
        callbacks = list(_callbacks.values())
    for call in callbacks:
        call()


@contextmanager
def on_stop(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block a request to stop calls ``call``, from any thread; at once if it was made before."""
    name = object()
    with _lock:
        _callbacks[name] = call
    if _flag.is_set():
        call()
    try:
        yield
    finally:
        with _lock:
            del _callbacks[name]


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in any thread, whose work is cancelled when the process is to stop. Raises Stopped then."""

    async def run() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "asyncio.run makes one"

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed: the work has ended
                loop.call_soon_threadsafe(task.cancel)

        with on_stop(cancel):
            return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise_if_stopping("asynchronous work")
        raise


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Start ``call`` in another thread, in a copy of this context. The process does not wait for it at its end.

    Threads are kept for later calls and never end, because a child process may be tied to the thread that started it.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=[jobs], name="rollout-work", daemon=True).start()
    jobs.put(job)
    return future


def _work(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
        _idle.append(jobs)


def run_interruptibly(call: Callable[[], T], stopped: Callable[[], BaseException]) -> T:
    """The result of ``call``, which runs in another thread when this is the main one, so that a signal finds the main
    thread waiting, never in a native call.

    When the main thread is interrupted (a signal's handler raised), ``call`` is asked to stop, given time to keep what
    it has done, and then the interruption is raised. Where the interruption was lost on its way, ``stopped`` makes one.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future = in_thread(call)
    try:
        while not wait_for([future], timeout=_POLL_SECONDS).done:
            if is_stopping():
                # The signal's handler runs in this thread as soon as it wakes; only if it did not raise, we do.
                time.sleep(_POLL_SECONDS)
                raise stopped()
    except BaseException:
        _let_end(future)
        raise
    if is_stopping() and isinstance(future.exception(), Stopped):
        raise stopped() from future.exception()
    return future.result()


def _let_end(future: Future[Any]) -> None:
    """Wait until interrupted work has kept what it has done, for no longer than a stop may take."""
    first = _now()
    while True:
        try:
            # The watcher may be a moment behind the handler. What interrupts without a signal is no wish to stop.
            if _flag.wait(_POLL_SECONDS):
                wait_for([future], timeout=max(0.0, first + stop_seconds() - RESERVE_SECONDS - _now()))
            return
        except BaseException:
            if _now() > first + SAME_SIGNAL_SECONDS:
                raise
            # The same wish, passed on by another, whose handler has raised here again.


@contextmanager
def watching(*, ends_process: bool) -> Iterator[None]:
    """Watch for stop signals inside the block. Only the outermost block of the main thread does.

    With ``ends_process`` the process is gone when ``ROLLOUT_STOP_SECONDS`` have passed since the first signal, or a
    second one came, also after the block. Without, as in a notebook, only the flag is set, and the end of the block
    takes that back.
    """
    global _watched
    if _watched or threading.current_thread() is not threading.main_thread():
        yield
        return
    receiving, sending = _guarded_pair() if ends_process else socket.socketpair()
    sending.setblocking(False)
    before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(receiving, ends_process), name="rollout-signals", daemon=True)
    watcher.start()
    _watched = True
    try:
        yield
    finally:
        if ends_process and _flag.is_set():
            # The watcher stays, so that nothing on the way out takes longer than the time to stop.
            kill_children()
        else:
            _watched = False
            signal.set_wakeup_fd(before)
            sending.close()
            watcher.join()
            receiving.close()
            _flag.clear()


def _guarded_pair() -> tuple[socket.socket, socket.socket]:
    """What is sent into the second socket comes out of the first by way of a guard, which can end this process where
    no thread of its interpreter gets to run."""
    receiving, passing_on = socket.socketpair()
    guarded, sending = socket.socketpair()
    with passing_on, guarded:
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(process_tree.__file__)), str(os.getpid()), str(stop_seconds())],
            stdin=guarded.fileno(),
            stdout=passing_on.fileno(),
            # The terminal's Ctrl-C is for the process that it guards.
            start_new_session=True,
        )
    # Until it runs, signals would be known to their handlers alone, and the work would not be given time to stop.
    receiving.recv(1)
    return receiving, sending


def _watch(receiving: socket.socket, ends_process: bool) -> None:
    first: float | None = None
    while True:
        receiving.settimeout(None if first is None or not ends_process else max(0.0, first + stop_seconds() - _now()))
        try:
            numbers = receiving.recv(64)
        except (TimeoutError, BlockingIOError):
            _end_process(signal.SIGTERM, f"did not stop within {stop_seconds():g} s (ROLLOUT_STOP_SECONDS)")
        if not numbers:
            return
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue
            if first is None:
                first = _now()
                request_stop()
            elif ends_process and _now() > first + SAME_SIGNAL_SECONDS:
                _end_process(signal.Signals(number), "got a second signal to stop")


def _now() -> float:
    return time.monotonic()


def _end_process(number: signal.Signals, reason: str) -> None:
    """End this process and its children at once. Logging may be what hangs, so the reason goes to stderr itself."""
    with suppress(OSError, ValueError):
        os.write(2, f"rollout: the process {reason} and ends now; what was committed is kept\n".encode())
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    kill_children()
    os._exit(128 + number)


def children() -> set[int]:
    """Process ids of what this process started in its own session, and of what those did. Servers that are shared with
    other commands have sessions of their own."""
    return set(process_tree.below(os.getpid(), same_session=True))


def kill_children(but: Collection[int] = ()) -> None:
    """End all `children` but those listed."""
    for child in children().difference(but):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
