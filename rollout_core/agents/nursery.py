"""The process that runner processes are forked from.

A fresh interpreter of one thread, which holds the packages that every runner needs and nothing of the program that
started it: no connection, no lock, no thread. What the runners work with comes over a pipe as bytes, and each of them
reads it for itself (`rollout_core.agents.handover`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rollout_core.agents.handover import CannotBeImported, unpacked
from rollout_core.base import process_tree
from rollout_core.base.errors import in_words

GIVEN_UP = 75
"""Exit code of a runner that says that to start it again would not help."""
CANNOT_IMPORT = 97
"""Exit code of one that cannot import what it works with."""
_MOST_WORDS = 4000
"""Characters that a runner may say at its end. They are read once it has ended, so the pipe must hold them."""
_fork = multiprocessing.get_context("fork")


class GivenUp(Exception):
    """Raised by a runner's main to say that to start it again would not help."""


def send(connection: Connection, what: Any) -> None:
    """``what`` as JSON."""
    connection.send_bytes(json.dumps(what).encode())


def receive(connection: Connection) -> Any:
    """Inverse of `send`. Raises EOFError."""
    return json.loads(connection.recv_bytes())


def serve(descriptor: int, parent: int) -> None:
    """Start runners as the process ``parent`` says over the pipe ``descriptor``, until that ends."""
    connection = Connection(descriptor)
    # A terminal sends these to all; the parent says what is to be done. Blocked, not ignored: so they wait for a runner
    # that is being forked.
    signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STOP_SIGNALS)
    process_tree.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return
    begin = receive(connection)
    work = connection.recv_bytes()
    if begin["logging"] is not None:
        logging.basicConfig(**begin["logging"])
    for module in begin["imports"]:
        with contextlib.suppress(ImportError):  # a runner that needs it says so
            importlib.import_module(module)
    runners: dict[int, tuple[BaseProcess, Connection]] = {}
    while True:
        wait([connection, *(process.sentinel for process, _ in runners.values())])
        for number, (process, said) in list(runners.items()):
            if not process.is_alive():
                process.join()
                send(connection, (number, process.exitcode, _last_words(said)))
                said.close()
                del runners[number]
        while connection.poll():
            try:
                command, *arguments = receive(connection)
            except EOFError:
                command, arguments = "end", []
            if command == "start":
                runners[arguments[0]] = _begin(work, *arguments)
            elif command == "signal":
                for process, _ in runners.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid or 0, arguments[0])
            else:
                for process, _ in runners.values():
                    process.kill()
                    process.join()
                return


def _last_words(said: Connection) -> str:
    try:
        return receive(said) if said.poll() else ""
    except EOFError:
        return ""


def _begin(work: bytes, number: int, url: str) -> tuple[BaseProcess, Connection]:
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(
        target=_runner, args=[theirs, work, number, url, os.getpid()], name=f"rollout-runner-{number}"
    )
    process.start()
    theirs.close()
    return process, ours


def _runner(said: Connection, work: bytes, number: int, url: str, parent: int) -> None:
    """Body of a runner process."""
    for signal_number in process_tree.STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)  # until it has a handler; it holds no rollout before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process_tree.STOP_SIGNALS)
    process_tree.signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return
    code = 1
    try:
        main = unpacked(work)
        main(number, url)
        code = 0
    except CannotBeImported as error:
        send(said, str(error)[:_MOST_WORDS])
        code = CANNOT_IMPORT
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
