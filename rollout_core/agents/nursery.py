"""The process that runner processes are forked from.

A fresh interpreter of one thread, which holds the packages that every runner needs and nothing of the program that
started it: no connection, no lock, no thread. What the runners work with comes over a pipe as bytes, and each of them
reads it for itself (`rollout_core.agents.handover`). It has a session of its own, as each runner has, so that it
outlives whatever kills the program, and ends each runner's process group: the runner, and what its agents have started
that has made no group of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from rollout_core.agents.handover import unpacked
from rollout_core.base import process_tree
from rollout_core.base.collector import collect_seldom
from rollout_core.base.errors import ConfigError, in_words
from rollout_core.base.logs import configure

GIVEN_UP = 75
"""Exit code of a runner that says that to start it again would not help."""
MISCONFIGURED = 97
"""Exit code of one that raised ConfigError, such as for an agent that cannot be imported."""
READY, ENDED = "ready", "ended"
"""What is said of a runner: that it can work now; its exit code and its reason."""
_MOST_WORDS = 4000
"""Characters that a runner may say at its end: the pipe must hold them."""
_LOOK_SECONDS = 0.5
"""Between looks at what is else known at once, unless a process that was forked holds the other end of a pipe."""
_fork = multiprocessing.get_context("fork")


class GivenUp(Exception):
    """Raised by a runner's main to say that to start it again would not help."""


def send(connection: Connection, what: Any) -> None:
    """``what`` as JSON."""
    connection.send_bytes(json.dumps(what).encode())


def receive(connection: Connection) -> Any:
    """Inverse of `send`. Raises EOFError."""
    return json.loads(connection.recv_bytes())


class _Runner:
    """A runner process, and what it has said so far."""

    def __init__(self, work: bytes, number: int, url: str, output: str | None) -> None:
        self.said, theirs = _fork.Pipe(duplex=False)
        self.reason = ""
        """For its end."""
        arguments = [theirs, work, number, url, output, os.getpid()]
        self.process = _fork.Process(target=_runner, args=arguments, name=f"rollout-runner-{number}")
        self.process.start()
        theirs.close()

    def has_become_ready(self) -> bool:
        """Whether it has said so since it was last asked."""
        is_ready = False
        while not self.said.closed and self.said.poll():
            try:
                message = receive(self.said)
            except (EOFError, OSError):  # OSError: it was killed in the middle of a message
                self.said.close()
            else:
                is_ready = is_ready or message == READY
                self.reason = message if message != READY else ""
        return is_ready

    def kill(self, reason: str) -> None:
        """Kill its process group: it, unless it has ended, and what its agents have started."""
        self.reason = reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet

    def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self.kill(self.reason)
        self.process.join()
        self.said.close()


def serve(descriptor: int, parent: int) -> None:
    """Start runners as the process ``parent`` says over the pipe ``descriptor``, until that ends."""
    connection = Connection(descriptor)
    # A service manager sends these to all; the parent says what is to be done. Blocked, not ignored: so they wait for a
    # runner that is being forked.
    signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
    collect_seldom()
    runners: dict[int, _Runner] = {}
    try:
        _serve(connection, parent, runners)
    except (EOFError, ConnectionError):
        pass  # the parent has ended
    finally:
        for runner in runners.values():
            runner.end()


def _serve(connection: Connection, parent: int, runners: dict[int, _Runner]) -> None:
    begin = receive(connection)
    work = connection.recv_bytes()
    if begin["logging"] is not None:
        configure(**begin["logging"])
    for module in begin["imports"]:
        with contextlib.suppress(ImportError):  # a runner that needs it says so
            importlib.import_module(module)
    while os.getppid() == parent:
        said = [runner.said for runner in runners.values() if not runner.said.closed]
        wait([connection, *said, *(runner.process.sentinel for runner in runners.values())], _LOOK_SECONDS)
        for number, runner in list(runners.items()):
            has_ended = not runner.process.is_alive()
            if runner.has_become_ready():
                send(connection, [READY, number])
            if has_ended:
                runner.end()
                del runners[number]
                send(connection, [ENDED, number, runner.process.exitcode, runner.reason])
        while connection.poll():
            command, *arguments = receive(connection)
            if command == "start":
                runners[arguments[0]] = _Runner(work, *arguments)
            elif command == "kill":
                number, reason = arguments
                if number in runners:
                    runners[number].kill(reason)
            elif command == "signal":
                for runner in runners.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(runner.process.pid or 0, arguments[0])
            else:
                return


def _runner(said: Connection, work: bytes, number: int, url: str, output: str | None, parent: int) -> None:
    """Body of a runner process."""
    os.setsid()
    for signal_number in process_tree.STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)  # until it has a handler; it holds no rollout before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process_tree.STOP_SIGNALS)
    process_tree.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return
    code = 1
    try:
        if output is not None:
            with open(output, "ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        main = unpacked(work)
        main(number, url, lambda: send(said, READY))
        code = 0
    except ConfigError as error:
        send(said, str(error)[:_MOST_WORDS])
        code = MISCONFIGURED
    except GivenUp as error:
        send(said, str(error)[:_MOST_WORDS])
        code = GIVEN_UP
    except BaseException as error:  # noqa: BLE001 - said, shown, and the end
        send(said, in_words(error)[:_MOST_WORDS])
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        else:
            traceback.print_exception(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads of agents that were given up would keep the process
