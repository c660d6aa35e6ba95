"""Runner processes, forked by a fresh interpreter (`rollout_core.agents.nursery`), which replaces those that die.

To fork this process would copy locks of its threads in whatever state they are, and share its open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout_core.agents.handover import packed
from rollout_core.agents.nursery import CANNOT_IMPORT, GIVEN_UP, receive, send
from rollout_core.base import process_tree
from rollout_core.base.errors import ConfigError, Fatal

logger = logging.getLogger(__name__)

RunnerMain = Callable[[int, str], None]
"""What a runner process does: its number and the store's URL; ends by returning or by an exception."""

_POLL_SECONDS = 0.05
_LASTING_SECONDS = 60.0
"""A runner that lived so long did not die of what it was started with; its restarts are counted anew."""


class Death(NamedTuple):
    """A runner process that ended otherwise than by returning."""

    number: int
    exit_code: int
    reason: str
    """Empty if it could not say."""

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.exit_code).name}" if self.exit_code < 0 else "failed"
        return f"runner {self.number} {how}{': ' if self.reason else ''}{self.reason}"


class RunnerProcesses:
    """``numbers`` of runners, each a process, kept alive until they return.

    ``allowed_exit_codes`` count as a return. A runner that dies is started again at most ``max_restarts`` times in a
    row; ``on_death`` is awaited with its number before that. ``imports`` are modules that they share, see
    `Tracer.imports`.

    Raises CannotBeImported where ``main`` cannot be handed to another process.
    """

    def __init__(
        self,
        main: RunnerMain,
        numbers: Sequence[int],
        *,
        max_restarts: int,
        allowed_exit_codes: Sequence[int] = (0,),
        imports: Sequence[str] = (),
    ) -> None:
        work = packed(main)
        self._numbers = list(numbers)
        self._max_restarts = max_restarts
        self._allowed = frozenset(allowed_exit_codes)
        self._restarts = dict.fromkeys(self._numbers, 0)
        self._started: dict[int, float] = {}
        self._alive: set[int] = set()
        self._stopping = False
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, _blocked_stop_signals():
            # By its own path, not by PYTHONPATH: agents start processes too, of which this is not to be seen.
            path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
            serve = f"from rollout_core.agents.nursery import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{path}; {serve}"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            send(self._connection, {"logging": _logging(), "imports": list(imports)})
            self._connection.send_bytes(work)
        except OSError:
            pass  # it has died, which `run` says
        except BaseException:
            self.end()
            raise

    async def run(self, url: str, on_death: Callable[[int], Any]) -> None:
        """Start all runners on the store at ``url`` and return when they have returned. Raises Fatal when one has died
        too often, or the nursery itself."""
        for number in () if self._stopping else self._numbers:
            self._start(number, url)
        while self._alive:
            if not self._connection.poll():
                if self._nursery.poll() is not None and not self._connection.poll():
                    raise Fatal(f"the process that starts the runners has died (exit code {self._nursery.returncode})")
                await asyncio.sleep(_POLL_SECONDS)
                continue
            try:
                death: Death = Death(*receive(self._connection))
            except (EOFError, OSError):
                raise Fatal("the process that starts the runners has died") from None
            self._alive.discard(death.number)
            if death.exit_code in self._allowed or self._stopping:
                continue
            if death.exit_code == CANNOT_IMPORT:
                raise ConfigError(death.reason)
            logger.error("%s", death)
            await on_death(death.number)
            if death.exit_code == GIVEN_UP:
                raise Fatal(str(death))
            if not self._stopping:
                self._count(death)
                self._start(death.number, url)

    def _start(self, number: int, url: str) -> None:
        self._alive.add(number)
        self._started[number] = time.monotonic()
        with contextlib.suppress(OSError):  # it has died, which `run` sees
            send(self._connection, ["start", number, url])

    def _count(self, death: Death) -> None:
        number = death.number
        if time.monotonic() - self._started[number] > _LASTING_SECONDS:
            self._restarts[number] = 0
        if self._restarts[number] >= self._max_restarts:
            raise Fatal(f"{death}; it was started again {self._max_restarts} times in a row, the limit (max_restarts)")
        self._restarts[number] += 1

    def stop(self, number: signal.Signals) -> None:
        """Send all runners a signal: SIGTERM lets the rollout under way end, SIGINT cancels it."""
        self._stopping = True
        with contextlib.suppress(OSError):
            send(self._connection, ["signal", number])

    def end(self) -> None:
        """Kill whatever still runs."""
        self._stopping = True
        with contextlib.suppress(OSError):
            send(self._connection, ["signal", signal.SIGKILL])
            send(self._connection, ["end"])
        try:
            self._nursery.wait(process_tree.END_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._connection.close()


@contextlib.contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """A process that is started meanwhile has them blocked until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _logging() -> dict[str, Any] | None:
    """What of this program's logging its runners do alike: the level and form of the root logger's lines, to stderr.
    None: it has configured none."""
    root = logging.getLogger()
    streams = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    if not streams:
        return None
    formatter = streams[0].formatter
    if type(formatter) is not logging.Formatter or type(formatter._style) is not logging.PercentStyle:
        return {"level": root.level}
    try:
        formatter.format(logging.makeLogRecord({}))
    except Exception:  # noqa: BLE001 - of fields that only this program's filters add
        return {"level": root.level}
    return {"level": root.level, "format": formatter._fmt, "datefmt": formatter.datefmt}
