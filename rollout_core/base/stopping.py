"""A stop signal ends the run in time, wherever it falls; an `Interruption` ends one call, and the process continues.

Python runs the handler of a signal in the main thread, between two bytecodes: one that arrives in a long native call is
noticed late, and what the handler raises inside a destructor or a weak reference's callback is dropped. So the signal
is also read from the wake-up descriptor, by a thread of its own. That thread sets the flag that long work looks at,
cancels what waits, and ends the process when the time is up or a second signal comes.

Long work asks one question for both, `is_stopping`. Its answer may differ from thread to thread: an interruption is
known in the context of its call, which `in_thread` and `asyncio` hand on and ``threading.Thread`` does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rollout_core.base import process_tree
from rollout_core.base.errors import Stopped
from rollout_core.base.settings import stop_seconds

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_SIGNALS = process_tree.STOP_SIGNALS
SAME_SIGNAL_SECONDS = process_tree.SAME_SIGNAL_SECONDS
"""A terminal and a supervisor may both pass on one wish to stop; what comes later than this after the first is a second
signal."""
RESERVE_SECONDS = 2.0
"""Of the time to stop, for what follows once work has ended: saying so to the Prefect server, closing the store."""
_POLL_SECONDS = 0.2

_flag = threading.Event()
_lock = threading.Lock()
_idle: list[queue.SimpleQueue[Callable[[], None]]] = []
"""Of the threads of `in_thread` that have nothing to do."""
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads
_watched = False


class _Callbacks:
    """What is called, once each, when something has happened; at once, if it has happened before."""

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        self._has_happened = has_happened
        self._calls: dict[object, Callable[[], None]] = {}

    @contextmanager
    def added(self, call: Callable[[], None]) -> Iterator[None]:
        name = object()
        with _lock:
            self._calls[name] = call
        if self._has_happened():
            call()
        try:
            yield
        finally:
            with _lock:
                del self._calls[name]

    def run(self) -> None:
        with _lock:
            calls = list(self._calls.values())
        for call in calls:
            call()


_callbacks = _Callbacks(_flag.is_set)


class Interruption:
    """A wish that one call ends, for a reason that another thread knows: a lease was lost, or the time is up.

    `run_interruptibly` runs a call under one. Of several wishes the first counts.
    """

    def __init__(self) -> None:
        self._outer = current_interruption()
        self._reason: Exception | None = None
        self._leave_at: float | None = None
        self._is_abandoned = False
        self._requested = _Callbacks(lambda: self._reason is not None)
        self._abandoned = _Callbacks(lambda: self._is_abandoned)

    def request(self, reason: Exception, *, within_seconds: float | None = None) -> None:
        """Ask the call to end, from any thread. Its caller then gets ``reason``, whatever the call raised.

        After ``within_seconds`` (None: any time) the caller continues without it: see `raise_if_abandoned`.
        """
        with _lock:
            if self._reason is not None:
                return
            self._leave_at = None if within_seconds is None else _now() + within_seconds
            self._reason = reason
        self._requested.run()

    @property
    def reason(self) -> Exception | None:
        """Why the call is to end; None while nobody asked."""
        return self._reason

    @property
    def is_overdue(self) -> bool:
        """Whether the time in which the call was to end has passed."""
        return self._leave_at is not None and _now() >= self._leave_at

    def abandon(self) -> None:
        """Have the call write nothing from here on, and release the locks that it holds."""
        with _lock:
            self._is_abandoned = True
        self._abandoned.run()

    def _and_outer(self) -> Iterator[Interruption]:
        found: Interruption | None = self
        while found is not None:
            yield found
            found = found._outer


_current: contextvars.ContextVar[Interruption | None] = contextvars.ContextVar("rollout_interruption", default=None)


def current_interruption() -> Interruption | None:
    """That of the call that runs here; None outside of any."""
    return _current.get()


def _interruptions() -> Iterator[Interruption]:
    current = _current.get()
    return iter(()) if current is None else current._and_outer()


def is_stopping() -> bool:
    """Whether this process, or the call that runs here, was asked to stop. Long work asks after each step."""
    return _flag.is_set() or any(interruption.reason is not None for interruption in _interruptions())


def raise_if_stopping(what: str) -> None:
    """Raises Stopped, naming the work that does not begin or continue and the reason, if this process or the call that
    runs here was asked to stop."""
    for interruption in _interruptions():
        if interruption.reason is not None:
            raise Stopped(f"{what} was interrupted: {interruption.reason}")
    if _flag.is_set():
        raise Stopped(f"{what} was interrupted because the process was asked to stop; run again to continue from there")


def raise_if_abandoned(what: str) -> None:
    """Raises Stopped if the call that runs here did not end when it was to, so that its caller went on without it.
    Asked directly before a result is written: another may be at work on it."""
    for interruption in _interruptions():
        if interruption._is_abandoned:
            raise Stopped(f"{what} is not written, because its stage was given up: {interruption.reason}")


def request_stop() -> None:
    """Do what a stop signal does, but for the end of the process."""
    _flag.set()
    _callbacks.run()


@contextmanager
def on_stop(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block a request to stop this process, or the call that runs here, calls ``call``, from any thread; at
    once if it was made before. Of both requests each calls."""
    with ExitStack() as stack:
        for callbacks in (_callbacks, *(interruption._requested for interruption in _interruptions())):
            stack.enter_context(callbacks.added(call))
        yield


@contextmanager
def on_abandoned(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block ``call`` is called, from another thread, when the caller of the work that runs here continues
    without it."""
    with ExitStack() as stack:
        for interruption in _interruptions():
            stack.enter_context(interruption._abandoned.added(call))
        yield


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in any thread, whose work is cancelled when the process, or the call that runs here, is to stop.
    Raises Stopped then."""

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
        except StopIteration as error:
            # No future of asyncio takes it, and who waits for one would wait for ever. Generators do the same.
            raised = RuntimeError("StopIteration was raised, such as by next() of something without a next item")
            raised.__cause__ = error
            future.set_exception(raised)
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


def run_interruptibly(
    call: Callable[[], T], stopped: Callable[[], BaseException], interruption: Interruption | None = None
) -> T:
    """The result of ``call``, which runs in another thread, so that a signal finds the main thread waiting, never in a
    native call, and so that the caller can go on without it.

    When the main thread is interrupted (a signal's handler raised), ``call`` is asked to stop, given time to keep what
    it has done, and then what the handler raised is raised. Where that was lost on its way, ``stopped`` makes one.

    When ``interruption`` is requested, ``call`` is asked to stop too. Unless it ends with a result all the same, its
    reason is raised: when it has ended, or when the request's time is up.
    """
    interruption = interruption or Interruption()
    is_main = threading.current_thread() is threading.main_thread()
    thread_id: list[int] = []

    def interruptible() -> T:
        thread_id.append(threading.get_ident())
        token = _current.set(interruption)
        try:
            return call()
        finally:
            _current.reset(token)

    future = in_thread(interruptible)
    try:
        while not wait_for([future], timeout=_POLL_SECONDS).done and not interruption.is_overdue:
            if is_main and _flag.is_set():
                # The signal's handler runs in this thread as soon as it wakes; only if it did not raise, we do.
                time.sleep(_POLL_SECONDS)
                raise stopped()
    except BaseException:
        _let_end(future)
        raise
    if not future.done():
        interruption.abandon()
        _show_stack(thread_id, str(interruption.reason))
        raise _reason(interruption)
    error = future.exception()
    if error is not None and interruption.reason is not None:
        raise _reason(interruption) from error
    if is_main and _flag.is_set() and isinstance(error, Stopped):
        raise stopped() from error
    return future.result()


def _reason(interruption: Interruption) -> Exception:
    assert interruption.reason is not None, "it was requested"
    return interruption.reason


def _show_stack(thread_id: list[int], reason: str) -> None:
    frame = sys._current_frames().get(thread_id[0]) if thread_id else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "it had not begun"
    log.warning("work that did not end in time is left behind (%s); it was at\n%s", reason, stack)


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
