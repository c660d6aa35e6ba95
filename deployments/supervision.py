"""A Prefect worker that is kept at work: started again when it dies, and when the server it was connected with did.

What a dead worker leaves behind is ended and handed back: its runs are tried again under their ids by the next worker,
and go on with what they have stored.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

from rollout_core.base.errors import RolloutError
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.base.processes import ProcessName, exit_reason
from rollout_core.base.settings import stop_seconds

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before a worker that ended is started again; doubled each time until one lives for a while."""
STEADY_SECONDS = 120.0
MAX_TRIES = 3
"""How often a run is started, in all, before it is left Crashed for a person."""
GRACE_SECONDS = 15.0
"""For a run that is asked to end, beside the time that it takes for its last snapshot."""
ASK_SECONDS = 10.0
"""Between two looks at what the server says of this pool's runs."""
LEFT_SECONDS = {"CRASHED": 20.0, "PENDING": 300.0}
"""For which runs are in a state before they are handed back. Crashed: in that time an automation tries them again. It
may not: a Prefect server that was started again holds back events that follow on those from before, for a quarter of an
hour. Pending: a worker took them and began nothing, since it died at that moment; no automation sees that."""
_RUN_ID = "PREFECT__FLOW_RUN_ID"
_SUPERVISOR = "ROLLOUT_SUPERVISOR"
"""Environment variable by which all that a worker starts is known, also when the worker is no more."""


class SupervisedWorker:
    """A worker, until Ctrl-C or SIGTERM.

    Args:
        command: that starts it.
        environment: of its process.
        pool: the work pool whose runs it takes.
        keep_server: called every second; whether the server has died since the last time and is there again. Raises
            RolloutError while it cannot be brought back.
        say: receives a line for all that happens.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pool: str,
        *,
        keep_server: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._name = str(ProcessName.of_this_process())
        self._command, self._environment = command, {**environment, _SUPERVISOR: self._name}
        self._keep_server, self._say = keep_server, say
        self._pool, self._since = pool, datetime.now(UTC)
        self._runs: dict[str, psutil.Process] = {}
        """Flow runs that the worker had under way when it was looked at last, and their processes."""
        self._left: dict[UUID, float] = {}
        """By the ids of states, monotonic seconds at which runs were first seen left in them."""
        self._asked = time.monotonic()
        self._is_stale = False
        self._trouble: str | None = None

    def run(self) -> None:
        """Work until an exception ends this, as KeyboardInterrupt and SystemExit do; then nothing is left of it."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            began, worker = time.monotonic(), self._start()
            try:
                reason = self._watch(worker)
            finally:
                worker.terminate()
                worker.wait()
            if time.monotonic() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            self._say(f"the worker {reason}; another one starts in {pause:g} s")
            self._take_back_runs()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _start(self) -> subprocess.Popen[bytes]:
        self._is_stale = False
        return subprocess.Popen(
            self._command,
            env=self._environment,
            # Ctrl-C comes to this process first, and the server lives until the worker has ended.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def _watch(self, worker: subprocess.Popen[bytes]) -> str:
        """Why another one is to be started."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return f"ended ({exit_reason(worker.wait(LOOK_SECONDS))})"
            with suppress(psutil.Error):  # it has just died
                self._runs = _runs(psutil.Process(worker.pid).children())
            self._look_after_server()
            self._hand_back_left()
            # Its connection by which runs are cancelled does not come back. What it has under way, ends first.
            if self._is_stale and not self._runs:
                return "has lost its server, which was started again"

    def _hand_back_left(self) -> None:
        """Have runs of the pool started again that have been left Crashed, or taken and not begun."""
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS:
            return
        self._asked = now
        try:
            left = _left_runs(self._pool, self._since)
            self._left = {state.id: self._left.get(state.id, now) for _, state in left}
            for run_id, state in left:
                if now - self._left[state.id] > LEFT_SECONDS[state.type.value]:
                    self._say(f"flow run {run_id} {_hand_back(run_id)}")
        except Exception as error:  # noqa: BLE001 - any of the client's; the server may be away
            log.debug("what the server says of the runs of pool %s is not known: %s", self._pool, error)

    def _look_after_server(self) -> None:
        try:
            self._is_stale = self._keep_server() or self._is_stale
            self._trouble = None
        except RolloutError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(self._trouble)

    def _descendants(self) -> Iterator[psutil.Process]:
        """All that workers of this supervisor have started, and what those did."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_SUPERVISOR) == self._name:
                    yield process

    def _take_back_runs(self) -> None:
        """End what the worker left behind, and have the server give it to the next one."""
        # Runs that died with their worker are among the first only, those begun since the last look among the others.
        runs = self._runs | _runs(self._descendants())
        self._runs = {}
        for process in runs.values():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(list(runs.values()), timeout=stop_seconds() + GRACE_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if runs:
            self._look_after_server()  # it may have died with the worker
        for run_id in runs:
            try:
                self._say(f"flow run {run_id} {_hand_back(run_id)}")
            except Exception as error:  # noqa: BLE001 - any of the client's; the next worker must start whatever it is
                self._say(f"flow run {run_id} could not be handed back ({error}); retry it by hand")


def _runs(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """Flow runs by their ids, and of the processes of each the one that began it."""
    found: dict[str, psutil.Process] = {}
    for process in sorted(processes, key=lambda process: process.pid):
        with suppress(psutil.Error):
            if run_id := process.environ().get(_RUN_ID):
                found.setdefault(run_id, process)
    return found


def _left_runs(pool: str, since: datetime) -> list[tuple[str, State]]:
    """Runs of a pool that are Crashed and have a try left, or Pending, and came to be so after ``since``."""
    from prefect import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    kinds = FlowRunFilterStateType(any_=[StateType(name) for name in LEFT_SECONDS])
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=kinds)),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )
    return [
        (str(run.id), run.state)
        for run in runs
        if run.state is not None
        and run.state.timestamp >= since
        and (run.state.is_pending() or run.run_count < MAX_TRIES)
    ]


def _hand_back(run_id: str) -> str:
    """Have a run that nobody works on started again; what was done."""
    from prefect import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import AwaitingRetry, Cancelled, Crashed

    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(UUID(run_id))
        except ObjectNotFound:
            return "was deleted"
        state = run.state
        if state is None or (state.is_final() and not state.is_crashed()):
            return f"ended {state.name if state is not None else 'without a state'}"
        if state.is_scheduled():
            return "is tried again by an automation"
        if state.is_cancelling():
            state, done = Cancelled(message="its worker died"), "was being cancelled, and is"
        elif run.run_count < MAX_TRIES:
            lost = "its process died" if state.is_crashed() else "its worker died"
            state, done = AwaitingRetry(message=lost), f"is tried again, as {lost}"
        else:
            state, done = Crashed(message="its worker died"), f"was tried {run.run_count} times; it is Crashed"
        client.set_flow_run_state(run.id, state, force=True)
    return done


def _end_with_parent() -> None:
    """In the worker's process, before it begins."""
    signal_at_parents_end(signal.SIGTERM)
    # Prefect turns SIGTERM into SIGINT, which what a shell starts in the background has inherited to ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
