"""Runner processes, forked by a process that was itself forked before this one started threads.

A runner that dies is replaced, so processes are forked in the midst of a run, when this process has threads of the
store's server, of the proxy and of an engine. To fork then would copy locks in whatever state they are. The nursery has
one thread, and the agent as it was when the run began, so that no agent must be picklable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from rollout_core.base import process_tree
from rollout_core.base.errors import Fatal, in_words

logger = logging.getLogger(__name__)

RunnerMain = Callable[[int, str], None]
"""What a runner process does: its number and the store's URL; ends by returning or by an exception."""

_fork = multiprocessing.get_context("fork")
_POLL_SECONDS = 0.05
_LASTING_SECONDS = 60.0
"""A runner that lived so long did not die of what it was started with; its restarts are counted anew."""


class GivenUp(Exception):
    """Raised by a runner's main to say that to start it again would not help."""


_GIVEN_UP = 75
"""Exit code of such a runner."""
_MOST_WORDS = 4000
"""Characters that a runner may say at its end. They are read once it has ended, so the pipe must hold them."""


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
    row; ``on_death`` is awaited with its number before that.
    """

    def __init__(
        self,
        main: RunnerMain,
        numbers: Sequence[int],
        *,
        max_restarts: int,
        allowed_exit_codes: Sequence[int] = (0,),
    ) -> None:
        self._numbers = list(numbers)
        self._max_restarts = max_restarts
        self._allowed = frozenset(allowed_exit_codes)
        self._restarts = dict.fromkeys(self._numbers, 0)
        self._started: dict[int, float] = {}
        self._alive: set[int] = set()
        self._stopping = False
        self._connection, theirs = _fork.Pipe()
        self._nursery: BaseProcess = _fork.Process(
            target=_nursery, args=[theirs, main, os.getpid()], name="rollout-runners"
        )
        self._nursery.start()
        theirs.close()

    async def run(self, url: str, on_death: Callable[[int], Any]) -> None:
        """Start all runners on the store at ``url`` and return when they have returned. Raises Fatal when one has died
        too often, or the nursery itself."""
        for number in () if self._stopping else self._numbers:
            self._start(number, url)
        while self._alive:
            if not self._connection.poll():
                if not self._nursery.is_alive() and not self._connection.poll():
                    raise Fatal(f"the process that starts the runners has died (exit code {self._nursery.exitcode})")
                await asyncio.sleep(_POLL_SECONDS)
                continue
            try:
                death: Death = Death(*_receive(self._connection))
            except EOFError:
                raise Fatal("the process that starts the runners has died") from None
            self._alive.discard(death.number)
            if death.exit_code in self._allowed or self._stopping:
                continue
            logger.error("%s", death)
            await on_death(death.number)
            if death.exit_code == _GIVEN_UP:
                raise Fatal(str(death))
            if not self._stopping:
                self._count(death)
                self._start(death.number, url)

    def _start(self, number: int, url: str) -> None:
        self._alive.add(number)
        self._started[number] = time.monotonic()
        self._send("start", number, url)

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
            self._send("signal", number)

    def end(self) -> None:
        """Kill whatever still runs."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._send("signal", signal.SIGKILL)
            self._send("end")
        self._nursery.join(process_tree.END_SECONDS)
        if self._nursery.is_alive():
            self._nursery.kill()
            self._nursery.join()
        self._connection.close()

    def _send(self, *command: Any) -> None:
        _send(self._connection, command)


def _nursery(connection: Connection, main: RunnerMain, parent: int) -> None:
    """Body of the process that forks the runners."""
    # A terminal sends these to all; the parent says what is to be done. Blocked, not ignored: so they wait for a runner
    # that is being forked.
    signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
    process_tree.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return
    runners: dict[int, tuple[BaseProcess, Connection]] = {}
    while True:
        wait([connection, *(process.sentinel for process, _ in runners.values())])
        for number, (process, said) in list(runners.items()):
            if not process.is_alive():
                process.join()
                _send(connection, (number, process.exitcode, _last_words(said)))
                said.close()
                del runners[number]
        while connection.poll():
            try:
                command, *arguments = _receive(connection)
            except EOFError:
                command, arguments = "end", []
            if command == "start":
                runners[arguments[0]] = _begin(main, *arguments)
            elif command == "signal":
                for process, _ in runners.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid or 0, arguments[0])
            else:
                for process, _ in runners.values():
                    process.kill()
                    process.join()
                return


def _send(connection: Connection, what: Any) -> None:
    connection.send_bytes(json.dumps(what).encode())


def _receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


def _last_words(said: Connection) -> str:
    try:
        return _receive(said) if said.poll() else ""
    except EOFError:
        return ""


def _begin(main: RunnerMain, number: int, url: str) -> tuple[BaseProcess, Connection]:
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(
        target=_runner, args=[theirs, main, number, url, os.getpid()], name=f"rollout-runner-{number}"
    )
    process.start()
    theirs.close()
    return process, ours


def _runner(said: Connection, main: RunnerMain, number: int, url: str, parent: int) -> None:
    """Body of a runner process."""
    for signal_number in process_tree.STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)  # until it has a handler; it holds no rollout before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process_tree.STOP_SIGNALS)
    process_tree.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return
    code = 1
    try:
        main(number, url)
        code = 0
    except GivenUp as error:
        _send(said, str(error)[:_MOST_WORDS])
        code = _GIVEN_UP
    except BaseException as error:  # noqa: BLE001 - said, shown, and the end
        _send(said, in_words(error)[:_MOST_WORDS])
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        else:
            traceback.print_exception(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # Python's own way out of a process that a thread forked fails, and would hide the code
