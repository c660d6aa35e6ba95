"""The first process of a container that holds a single run: it passes on the signal to end, and the run hands itself
back.

``python -m deployments.container``, the command of the templates for Kubernetes and Docker, which send SIGTERM to the
first process alone. That of Prefect, ``prefect flow-run execute``, dies of it, and with it the run, which has kept
nothing of what it was doing. It is started from here, and only the run that it starts is told.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

LOOK_SECONDS = 0.2


def main() -> None:
    is_told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_told.set())
    run = subprocess.Popen([sys.executable, "-m", "prefect", "flow-run", "execute"], start_new_session=True)
    asked: set[int] = set()
    while run.poll() is None:
        if is_told.is_set():
            _ask(run.pid, asked)
        with suppress(subprocess.TimeoutExpired):
            run.wait(LOOK_SECONDS)
    sys.exit(run.returncode)


def _ask(pid: int, asked: set[int]) -> None:
    """Tell what a process has started to end, each once; its flow's process may come late."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if child.pid not in asked:
                asked.add(child.pid)
                child.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
