"""Worker processes of a server: watched by the process that started them, and replaced when they end or hang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from rollout_core.base.errors import Fatal
from rollout_core.base.processes import signal_name

START_SECONDS = 300
"""From a worker's start to its first answer; on a busy machine the imports alone take long."""
HANG_SECONDS = 60.0
"""A worker that has answered before and is silent for longer is replaced."""

logger = logging.getLogger(__name__)


@dataclass
class _Watch:
    """What is known of one worker."""

    asked: float
    """Since when an answer is waited for, in seconds of the monotonic clock."""
    waits: bool = False
    """Whether it has been asked and has not answered yet."""
    answered: bool = False
    serves: bool = False


class Supervisor(Multiprocess):
    """uvicorn's, which gives a worker five seconds for its first answer and kills it without a word.

    Workers are asked without waiting for them, so that signals are heeded meanwhile. ``on_serving`` is called once,
    when all workers serve.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket], on_serving: Callable[[], None]) -> None:
        config.timeout_worker_healthcheck = START_SECONDS  # of workers that SIGHUP replaces
        super().__init__(config, sockets)
        self._on_serving = on_serving
        self._has_served = False
        self._failure: str | None = None
        self._watches: dict[Process, _Watch] = {}

    def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises Fatal when workers cannot start."""
        super().run()
        if self._failure is not None:
            raise Fatal(f"{self._failure} before it served; the lines above say why")

    def keep_subprocess_alive(self) -> None:
        for place, process in enumerate(self.processes):
            if self.should_exit.is_set():
                return
            fault = self._fault(process)
            if fault is not None:
                self._replace(place, fault)
        if not self._has_served and all(self._watch(process).serves for process in self.processes):
            self._has_served = True
            self._on_serving()

    def _watch(self, process: Process) -> _Watch:
        return self._watches.setdefault(process, _Watch(time.monotonic()))

    def _fault(self, process: Process) -> str | None:
        """What is wrong with a worker; asks it how it is."""
        watch = self._watch(process)
        if not process.process.is_alive():
            return f"worker process {process.pid} {_end(process.exitcode)}"
        try:
            if not watch.waits:
                process.parent_conn.send(b"ping")
                watch.waits, watch.asked = True, time.monotonic()
            elif process.parent_conn.poll():
                watch.serves = process.parent_conn.recv()
                watch.waits, watch.answered = False, True
        except (OSError, EOFError):
            return None  # it is ending, which the next look shows
        limit = HANG_SECONDS if watch.answered else START_SECONDS
        silent = time.monotonic() - watch.asked
        return f"worker process {process.pid} did not answer for {silent:.0f} s" if silent > limit else None

    def _replace(self, place: int, fault: str) -> None:
        process = self.processes[place]
        served = self._watches.pop(process).serves
        process.kill()
        process.join()
        if process.exitcode == STARTUP_FAILURE or not (served or self._has_served):
            # It would fail the same way again.
            self._failure = fault
            self.should_exit.set()
            return
        logger.warning("%s; another is started", fault)
        self.processes[place] = Process(self.config, self.sockets)
        self.processes[place].start()


def _end(code: int | None) -> str:
    return f"was killed by {signal_name(-code)}" if code and code < 0 else f"ended with exit code {code}"
