"""The processes below one, from /proc: found, measured, ended. Imports little, as every child starts with it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
END_SECONDS = 10.0


def newest() -> str:
    """Differs after a process or thread was started anywhere, so that there may be new ones below ours."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return file.read().rpartition(" ")[2]
    except OSError:  # a container may hide it
        return str(time.monotonic())


def below(root: int) -> list[int]:
    """Processes that ``root`` started, and those that they did, without ``root``; zombies are left out."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split(None, 2)[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X"):
                dead.add(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            waiting.append(process)
            if process not in dead:
                found.append(process)
    return found


def resident_bytes(processes: list[int]) -> int:
    """Memory in use; what processes share is counted once for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/statm", "rb") as file:
            total += int(file.read().split()[1]) * PAGE_BYTES
    return total


def own_bytes(processes: list[int]) -> int:
    """Memory in use; what processes share is counted once. Expensive: it walks the pages."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/smaps_rollup", "rb") as file:
            total += next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
    return total


def end_all(root: int, group: int | None) -> None:
    """Kill what is below ``root``, which adopts orphans; ``group`` first: it dies as one, however fast it forks."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        if group is not None:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
            group = None
        alive = below(root)
        for process in alive:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        reap()
        if not alive:
            return
        time.sleep(0.001)


def reap() -> dict[int, int]:
    """Wait statuses of children that have ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            ended[process] = status
    return ended
