"""Kills a process that does not end in time after a stop signal, even one whose interpreter is stuck in a native call.

A process of its own, started by `rollout_core.base.stopping` as a plain script with the standard library alone: its
standard input is the wake-up descriptor of the process it guards, and it passes on to its standard output what it reads
there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SLACK_SECONDS = 2.0
"""For the guarded process itself, which can say where it hangs and end its children, if it can do anything."""
SAME_SIGNAL_SECONDS = 1.0


def guard(guarded: int, stop_seconds: float) -> None:
    """Until the guarded process has ended, or had to be."""
    first = deadline = None
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], wait)[0]:
            for process in [guarded, *descendants(guarded)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return
        numbers = os.read(0, 64)
        if not numbers:
            return
        os.write(1, numbers)
        if not set(numbers) & set(STOP_SIGNALS):
            continue
        now = time.monotonic()
        if first is None:
            first, deadline = now, now + stop_seconds + SLACK_SECONDS
        elif now > first + SAME_SIGNAL_SECONDS:
            deadline = now + SLACK_SECONDS


def descendants(ancestor: int) -> list[int]:
    """Process ids of what a process started in its own session, and of what those did."""
    parents, sessions = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            # After the program's name in brackets: state, parent, process group, session.
            _, parent, _, session = file.read().rpartition(")")[2].split()[:4]
            parents[int(name)], sessions[int(name)] = int(parent), session
    found, waiting = [], [ancestor]
    while waiting:
        parent = waiting.pop()
        waiting += [child for child, its_parent in parents.items() if its_parent == parent]
        found += [parent] if parent != ancestor and sessions[parent] == sessions.get(ancestor) else []
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), float(sys.argv[2]))
