"""Starting an engine: within its time, and given up at once when the process is to stop."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from rollout_core.base.errors import Fatal
from rollout_core.base.stopping import children, in_thread, is_stopping, kill_children, raise_if_stopping

T = TypeVar("T")

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2


def start_in_time(start: Callable[[], T], timeout_seconds: float) -> T:
    """The engine that ``start`` gives, from a thread of its own: nothing ends a start that hangs.

    Raises Stopped when the process is to stop meanwhile, and Fatal, with the stacks of all threads in the log, when
    the time is up. What the start began is then left behind, without its child processes.
    """
    before = children()
    future = in_thread(start)
    deadline = time.monotonic() + timeout_seconds
    while not wait([future], timeout=POLL_SECONDS).done:
        if is_stopping():
            kill_children(but=before)
            raise_if_stopping("the start of the engine")
        if time.monotonic() > deadline:
            _show_stacks(timeout_seconds)
            kill_children(but=before)
            raise Fatal(
                f"the engine did not start within {timeout_seconds:g} s; stacks are in the log and on stderr. "
                "A large model on a slow disk may need longer: raise backend.start_timeout_seconds. Otherwise run "
                "again; what is finished is kept"
            )
    return future.result()


def _show_stacks(timeout_seconds: float) -> None:
    """To stderr first: the start may hang with the lock of logging in its hands."""
    with tempfile.TemporaryFile(mode="w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = f"the engine did not start within {timeout_seconds:g} s; all threads:\n{file.read()}"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    wait([in_thread(lambda: log.error(text))], timeout=1.0)
