"""The processes below one, from the kernel's table: found, measured, guarded, ended.

It needs the standard library alone and little of it: every isolated child starts with it, and
``python -I -S process_tree.py PID SECONDS`` is the guard that `rollout_core.base.stopping` starts;
``python -I -S process_tree.py tie CONTROL CALLER PROGRAM...`` is what `tie` says.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
END_SECONDS = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL_SECONDS = 1.0
"""A second stop signal within this time is the first one again, sent to the process and to its group."""
SLACK_SECONDS = 2.0
"""For the guarded process itself, which can say where it hangs and end its children, if it can do anything."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def signal_at_parents_end(number: signal.Signals | None) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends, also by ``kill -9``; none with
    None."""
    _prctl(_PR_SET_PDEATHSIG, number or 0)


def adopt_orphans() -> None:
    """Become the parent of what processes below this one leave behind when they end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # the guard does without, and a run waits for its start

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def newest() -> str:
    """Differs after a process or thread was started anywhere, so that there may be new ones below ours."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return file.read().rpartition(" ")[2]
    except OSError:  # a container may hide it
        return str(time.monotonic())


def below(root: int, *, same_session: bool = False) -> list[int]:
    """Processes that ``root`` started, and those that they did, without ``root``; zombies are left out.

    ``same_session``: only those of root's own session; servers that are shared with other commands have their own.
    """
    children: dict[int, list[int]] = {}
    sessions: dict[int, int] = {}
    dead: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                # After the program's name in brackets, which may hold spaces and brackets itself.
                state, parent, _, session = file.read().rpartition(b")")[2].split(None, 4)[:4]
            children.setdefault(int(parent), []).append(int(name))
            sessions[int(name)] = int(session)
            if state in (b"Z", b"X"):
                dead.add(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            waiting.append(process)
            if process not in dead and not (same_session and sessions[process] != sessions.get(root)):
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


def guard(guarded: int, stop_seconds: float) -> None:
    """Kill a process that does not end in time after a stop signal, even one that is stuck in a native call.

    Standard input is the wake-up descriptor of the guarded process; what is read there is passed on to standard output,
    after a first byte that says that the guard runs.
    Returns when the guarded process has ended.
    """
    first = deadline = None
    _pass_on(b"\0")
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], wait)[0]:
            for process in [guarded, *below(guarded, same_session=True)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return
        numbers = os.read(0, 64)
        if not numbers:
            return
        _pass_on(numbers)
        if not set(numbers) & set(STOP_SIGNALS):
            continue
        now = time.monotonic()
        if first is None:
            first, deadline = now, now + stop_seconds + SLACK_SECONDS
        elif now > first + SAME_SIGNAL_SECONDS:
            deadline = now + SLACK_SECONDS


def _pass_on(numbers: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the guarded process is ending, which standard input tells as well
        os.write(1, numbers)


TIED_SECONDS = 1.0
"""Between looks whether the caller is there: the end of its pipe says so, unless another process has a copy of it."""


def tie(control: int, caller: int, program: list[str]) -> None:
    """Run a program with this process's input and output, and end it, with all that it started, when something comes
    over the pipe ``control``, when that ends, or when the process ``caller`` does. Never returns: ends as the program
    did, with 128 more than the number of the signal that ended it."""
    adopt_orphans()
    heard, caught = os.pipe()
    os.set_blocking(caught, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(caught, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        _become(program, control)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # so that they end where the program's do
        os.dup2(nowhere, descriptor)
    status = None
    poll = select.poll()  # not select(): a caller with a thousand open files gives higher numbers than that takes
    for descriptor in (control, heard):
        poll.register(descriptor, select.POLLIN)
    while status is None:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * TIED_SECONDS)}
        if control in ready or os.getppid() != caller:
            break
        if heard in ready:
            os.read(heard, 4096)
        status = reap().get(child)
    end_all(os.getpid(), child if status is None else None)
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _become(program: list[str], *own: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_at_parents_end(signal.SIGKILL)
        os.setsid()
        for descriptor in own:
            os.close(descriptor)
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    if sys.argv[1] == "tie":
        tie(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    guard(int(sys.argv[1]), float(sys.argv[2]))
