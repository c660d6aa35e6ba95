"""What tests have a child process do. Everything dangerous is bounded: at most 64 processes, 400 MB, 20 seconds."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SECONDS = 20.0


class Unshowable(Exception):
    """Has no message."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def echo(request: Any, tell: Callable[[int], None]) -> Any:
    """The request."""
    return request


def misbehave(request: str, tell: Callable[[int], None]) -> Any:
    """Goes wrong at its seventh step, as the request says."""
    tell(7)
    return _WAYS[request]()


def modules(request: Any, tell: Callable[[int], None]) -> list[str]:
    """Names of what has been imported."""
    return sorted(sys.modules)


def environment(request: Any, tell: Callable[[int], None]) -> dict[str, str]:
    """All variables."""
    return dict(os.environ)


def _sleep() -> None:
    time.sleep(SECONDS)


def _hang() -> None:
    os.write(1, b"about to hang\n")
    _sleep()


def _flood() -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        os.write(1, b"x" * 10_000 + b"\n")


def _eat_memory() -> None:
    eaten = []
    for _ in range(8):
        eaten.append(b"x" * 50_000_000)
    _sleep()


def _fork() -> None:
    for _ in range(6):
        os.fork()
    _sleep()


def _fork_away() -> None:
    for _ in range(40):
        if os.fork() == 0:
            os.setsid()
            _sleep()
            os._exit(0)
    _sleep()


def _leave_a_daemon() -> int:
    """The process id of one that nobody waits for."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            _sleep()
        os._exit(0)
    return int(os.read(reading, 20))


def _run_on_in_a_copy() -> str:
    os.fork()
    return "done"


def _exit_from_a_thread() -> None:
    threading.Thread(target=lambda: os._exit(4)).start()
    _sleep()


def _close_everything() -> str:
    os.closerange(3, 65_536)
    return "done"


def _write_nonsense() -> None:
    # All that are open: a pipe keeps the number that it has in the caller, which may be any.
    for descriptor in [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]:
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 64)
    _sleep()


def _raise(error: BaseException) -> None:
    raise error


_WAYS: dict[str, Callable[[], Any]] = {
    "exit": lambda: os._exit(0),
    "exit from a thread": _exit_from_a_thread,
    "sys.exit": lambda: sys.exit(0),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "unshowable": lambda: _raise(Unshowable()),
    "crash": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill the warden": lambda: (os.kill(os.getppid(), signal.SIGKILL), _sleep()),
    "hang": _hang,
    "flood": _flood,
    "memory": _eat_memory,
    "fork": _fork,
    "fork away": _fork_away,
    "daemon": _leave_a_daemon,
    "copy": _run_on_in_a_copy,
    "close": _close_everything,
    "nonsense": _write_nonsense,
    "nan": lambda: float("nan"),
    "no JSON": lambda: object(),
    "place": lambda: os.getpid(),
}


def log_failure(request: str, tell: Callable[[int], None]) -> None:
    """Logs an exception with the request."""
    try:
        raise ValueError(request)
    except ValueError:
        logging.getLogger("mine").exception(request)
