"""The first process of a container that holds a single run: it passes on the signal to end, and the run hands itself
back.

``python -m deployments.container``, the command of the templates for Kubernetes and Docker, which send SIGTERM to the
first process alone. That of Prefect, ``prefect flow-run execute``, dies of it, or on Kubernetes has the run tried again
and ends without waiting for it: either way nothing is kept. It is started from here, and only the run's own process is
signalled. A run that had not begun, or did not end in time, is handed back from here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from uuid import UUID

LOOK_SECONDS = 0.2
ENGINES = ("prefect.engine", "prefect.flow_engine")
"""Modules that run a flow. Before them Prefect starts one that fetches the code, which must not be cut."""


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
    if is_told.is_set():
        _give_back_if_crashed(os.environ["PREFECT__FLOW_RUN_ID"])
    sys.exit(run.returncode if run.returncode >= 0 else 128 - run.returncode)


def _ask(pid: int, asked: set[int]) -> None:
    """Tell the run that a process has started to end, once; it may come late."""
    import psutil  # as late as may be: signals are lost until `main` listens

    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if child.pid not in asked and any(module in child.cmdline() for module in ENGINES):
                asked.add(child.pid)
                child.send_signal(signal.SIGTERM)


def _give_back_if_crashed(run_id: str) -> None:
    """Hand a run back that did not do so itself. One in any other state may be another container's by now."""
    from prefect import get_client

    from deployments.supervision import give_back

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
        if state is not None and state.is_crashed():
            done = give_back(run_id, reason="its container stops")
            sys.stderr.write(f"rollout: flow run {run_id} {done}\n")
    except Exception as error:  # noqa: BLE001 - any of the client's; an automation tries a crashed run again
        sys.stderr.write(f"rollout: flow run {run_id} could not be handed back: {error}\n")


if __name__ == "__main__":
    main()
