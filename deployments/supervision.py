"""A Prefect worker that is kept at work: started again when it dies, and when the server it was connected with did.

What a dead worker leaves behind is ended and handed back: its runs are tried again under their ids by the next worker,
and go on with what they have stored.

When this process is asked to stop, or the cloud is about to take the machine back, the worker drains: it takes no run
more, its runs keep what they have and are handed back, all within the time that is left.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from getpass import getuser
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

from rollout_core.base.errors import RolloutError
from rollout_core.base.machine import look_at_machine, written_folders
from rollout_core.base.process_tree import signal_at_parents_end
from rollout_core.base.processes import ProcessName, exit_reason
from rollout_core.base.settings import locations, stop_seconds
from rollout_core.base.spot import LEAD_SECONDS, NO_ANSWER, Kind, Metadata, Notice, SpotWatch, look_at_spot, metadata

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

    from deployments.presence import Presence

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before a worker that ended is started again; doubled each time until one lives for a while."""
STEADY_SECONDS = 120.0
MAX_TRIES = 3
"""How often a run is started, in all, before it is left Crashed for a person."""
GRACE_SECONDS = 15.0
"""For a run that is asked to end, besides the time that it takes for its last snapshot."""
RESERVE_SECONDS = 5.0
"""Of the time to drain, for handing back what has not ended by then; at most a third of it."""
HEALTH_SECONDS = 2.0
"""The longest wait for a server's health check."""
AGAIN_SECONDS = 1.0
"""Between tries to hand a run back."""
ASK_SECONDS = 10.0
"""Between two looks at what the server says of this pool's runs."""
LEFT_SECONDS = {"CRASHED": 20.0, "PENDING": 300.0, "RUNNING": 20.0, "CANCELLING": 20.0}
"""For which runs are in a state before they are handed back. Crashed: in that time an automation tries them again. It
may not: a Prefect server that was started again holds back events that follow on those from before, for a quarter of an
hour. Pending: a worker took them and began nothing, since it died at that moment; no automation sees that. Running and
Cancelling: a run of this worker that has no process here, as after a supervisor was killed; or one of a machine that
has vanished, which its lease says (`deployments.presence`)."""
_RUN_ID = "PREFECT__FLOW_RUN_ID"
_WORKER = "prefect.worker.name"
"""Label of a run that a worker has taken."""
_SERVER_ERROR = 500
_SUPERVISOR = "ROLLOUT_SUPERVISOR"
"""Environment variable by which all that a worker starts is known, also when the worker is no more."""


class SupervisedWorker:
    """A worker, until Ctrl-C, SIGTERM or a notice that the machine is taken away.

    Args:
        command: that starts it.
        environment: of its process.
        pool: the work pool whose runs it takes.
        keep_server: called every second; whether the server has died since the last time and is there again. Raises
            RolloutError while it cannot be brought back.
        say: receives a line for all that happens.
        worker_name: the worker's, by which the server knows whose a run is; no other machine's is called like it.
        drain_seconds: from a signal to the end of this, at the latest.
        notice: the notice once it has come.
        presence: by which machines know of each other, where they share a database.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pool: str,
        *,
        keep_server: Callable[[], bool],
        say: Callable[[str], None],
        worker_name: str | None = None,
        drain_seconds: float | None = None,
        notice: Callable[[], Notice | None] = lambda: None,
        presence: Presence | None = None,
    ) -> None:
        self._name = str(ProcessName.of_this_process())
        self._command, self._environment = command, {**environment, _SUPERVISOR: self._name}
        self._keep_server, self._say, self._notice = keep_server, say, notice
        self._worker_name, self._presence = worker_name, presence
        self._drain_seconds = default_drain_seconds() if drain_seconds is None else drain_seconds
        self._pool, self._since = pool, datetime.now(UTC)
        self._runs: dict[str, psutil.Process] = {}
        """Flow runs that the worker had under way when it was looked at last, and their processes."""
        self._left: dict[UUID, float] = {}
        """By the ids of states, monotonic seconds at which runs were first seen left in them."""
        self._asked = time.monotonic()
        self._is_stale = False
        self._trouble: str | None = None

    def run(self) -> Notice:
        """Work until a notice comes, or an exception ends this, as KeyboardInterrupt and SystemExit do. Then nothing is
        left of it."""
        pause = FIRST_PAUSE_SECONDS
        while (notice := self._notice()) is None:
            began, worker = time.monotonic(), self._start()
            try:
                reason = self._watch(worker)
                if self._notice() is None:
                    self._end(worker, time.monotonic() + self._drain_seconds)
                    self._say(f"the worker {reason}")
                    self._take_back_runs("its worker died")
            except BaseException:
                self._drain(worker, self._drain_seconds)
                raise
            if (notice := self._notice()) is not None:
                self._say(f"{notice.reason}, in {notice.seconds_left:.0f} s: the worker is draining")
                self._drain(worker, notice.seconds_left)
                return notice
            if time.monotonic() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            self._say(f"another worker starts in {pause:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._say(f"{notice.reason}: no worker starts")
        return notice

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
        """Why another one is to be started, or that none is."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return f"ended ({exit_reason(worker.wait(LOOK_SECONDS))})"
            self._look_at_runs(worker)
            if self._notice() is not None:
                return "has to end"
            self._look_after_server()
            self._hand_back_left()
            # Its connection by which runs are cancelled does not come back. What it has under way, ends first.
            if self._is_stale and not self._runs:
                return "has lost its server, which was started again"

    def _look_at_runs(self, worker: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.Error):  # it has just died
            self._runs = runs_of(psutil.Process(worker.pid).children())

    def _drain(self, worker: subprocess.Popen[bytes], seconds: float) -> None:
        """Have the worker take nothing more, its runs stop, and what it leaves handed back, within the time.

        A second signal meanwhile ends all of it at once.
        """
        deadline = time.monotonic() + seconds - min(RESERVE_SECONDS, seconds / 3)
        self._look_at_runs(worker)
        try:
            self._end(worker, deadline)
            if worker.returncode == 0:
                self._runs = {}  # it has handed back what it had
            self._take_back_runs("its worker stopped", deadline)
        except BaseException:
            for process in [worker, *self._descendants()]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            worker.wait()
            raise

    def _end(self, worker: subprocess.Popen[bytes], deadline: float) -> None:
        worker.terminate()
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say("the worker did not end in time and is killed")
            worker.kill()
            worker.wait()

    def _hand_back_left(self) -> None:
        """Have runs of the pool started again that have been left Crashed, or taken and not begun."""
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS:
            return
        self._asked = now
        try:
            left = self._left_runs()
            self._left = {state.id: self._left.get(state.id, now) for _, state, _ in left}
            for run, state, reason in left:
                if now - self._left[state.id] > LEFT_SECONDS[state.type.value]:
                    worker = run.labels.get(_WORKER)
                    done = give_back(
                        str(run.id), reason, is_drained=False, worker=worker if isinstance(worker, str) else None
                    )
                    self._say(f"flow run {run.id} {done}")
        except Exception as error:  # noqa: BLE001 - any of the client's; the server may be away
            log.debug("what the server says of the runs of pool %s is not known: %s", self._pool, error)

    def _left_runs(self) -> list[tuple[FlowRun, State, str]]:
        """Runs of the pool that nobody works on, as far as is known now, their states, and why."""
        left: list[tuple[FlowRun, State, str]] = []
        under_way: list[tuple[FlowRun, State]] = []
        for run, state in _runs_of_pool(self._pool):
            if state.is_running() or state.is_cancelling():
                under_way.append((run, state))
            elif state.timestamp >= self._since and (state.is_pending() or run.run_count < MAX_TRIES):
                left.append((run, state, "its worker died"))
        own = [(run, state) for run, state in under_way if run.labels.get(_WORKER) == self._worker_name]
        is_alone = self._worker_name is not None and (self._presence is None or self._presence.is_held)
        if is_alone and any(str(run.id) not in self._runs for run, _ in own):
            here = runs_of(psutil.process_iter())
            left += [(run, state, "its worker died") for run, state in own if str(run.id) not in here]
        if self._presence is not None:
            gone = self._presence.gone({str(run.labels[_WORKER]) for run, _ in under_way if _WORKER in run.labels})
            for run, state in under_way:
                if (worker := run.labels.get(_WORKER)) in gone:
                    left.append((run, state, f"nothing is heard of its worker {worker}"))
        return left

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

    def _take_back_runs(self, reason: str, deadline: float | None = None) -> None:
        """End what the worker left behind, and have the server give it to the next one.

        With a ``deadline``, of a worker that was drained, a run's start is not counted as one of its tries.
        """
        # Runs that died with their worker are among the first only, those begun since the last look among the others.
        runs = self._runs = self._runs | runs_of(self._descendants())
        for process in runs.values():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        patience = stop_seconds() + GRACE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        _, alive = psutil.wait_procs(list(runs.values()), timeout=patience)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if runs and deadline is None:
            self._look_after_server()  # it may have died with the worker
        for run_id in list(runs):
            self._say(f"flow run {run_id} {self._give_back(run_id, reason, deadline)}")
            del runs[run_id]

    def _give_back(self, run_id: str, reason: str, deadline: float | None) -> str:
        while True:
            try:
                return give_back(run_id, reason, is_drained=deadline is not None, worker=self._worker_name)
            except Exception as error:  # noqa: BLE001 - any of the client's; the next worker must start whatever it is
                if deadline is None or time.monotonic() + AGAIN_SECONDS > deadline:
                    return f"could not be handed back ({error}); retry it by hand"
            time.sleep(AGAIN_SECONDS)


class Outages:
    """Of a server that others look after: tells when it is there again.

    Args:
        url: of its API.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/health"
        self._was_away = False

    def is_over(self) -> bool:
        """Whether the server was away since the last time and answers now. Raises RolloutError while it is away."""
        try:
            urllib.request.urlopen(self._url, timeout=HEALTH_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code < _SERVER_ERROR:
                return self._answers()
            reason: object = f"it answers {error.code}"
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return False  # it is slow, and connections to it stay
        else:
            return self._answers()
        self._was_away = True
        raise RolloutError(f"the Prefect server is away ({reason}); runs go on, and none starts until it is back")

    def _answers(self) -> bool:
        was_away, self._was_away = self._was_away, False
        return was_away


def default_drain_seconds() -> float:
    """What runs may take to stop by this process's settings, and time to hand them back."""
    return stop_seconds() + GRACE_SECONDS


def worker_name(pool: str) -> str:
    """Of this user's worker of a pool on this machine. Users see no runs of others among their processes."""
    try:
        user = getuser()
    except (KeyError, OSError):  # a container's, of which it knows the number alone
        user = str(os.getuid())
    return f"{socket.gethostname()}-{user}-{pool}"


def work(
    pool: str,
    name: str,
    environment: Mapping[str, str],
    *,
    keep_server: Callable[[], bool],
    say: Callable[[str], None],
    spot: Kind = "none",
    drain_seconds: float | None = None,
    limit: int | None = None,
) -> Notice:
    """Take runs of a process pool until a notice comes, or Ctrl-C or SIGTERM raises KeyboardInterrupt or SystemExit.

    Unless the environment says how long a run may take to stop, it is what the time to drain leaves. Raises ConfigError
    for a cloud that this machine is not of.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    service = metadata(spot)
    if spot != "none":
        say(f"notices of {service.kind} are watched for" if service is not None else "this is no spot machine")
    _tell_inventory(service)
    if drain_seconds is None and service is not None:
        drain_seconds = LEAD_SECONDS[service.kind]
    stop = {}
    if drain_seconds is not None:
        stop = {"ROLLOUT_STOP_SECONDS": f"{max(drain_seconds - 2 * RESERVE_SECONDS, drain_seconds / 2):g}"}
    limits = [] if limit is None else ["--limit", str(limit)]
    # -P: the folder it runs in may have `deployments` of its own.
    command = [sys.executable, "-P", "-m", "deployments.worker", "--pool", pool, "--name", name, *limits]
    presence = _presence(pool, name)
    try:
        return SupervisedWorker(
            command,
            {**stop, **environment},
            pool,
            keep_server=keep_server,
            say=say,
            worker_name=name,
            drain_seconds=drain_seconds,
            notice=(lambda: None) if service is None else SpotWatch(service, say).notice,
            presence=presence,
        ).run()
    finally:
        if presence is not None:
            presence.end()


def _tell_inventory(service: Metadata | None) -> None:
    from tasks.runtime.events import Inventory, emit

    try:
        spot = None if service is None else look_at_spot(service)
    except NO_ANSWER:  # the watch for notices says so
        spot = None
    emit(Inventory(machine=look_at_machine(written_folders(locations().storage), spot)))


def _presence(pool: str, name: str) -> Presence | None:
    """None where the database is a file of this machine."""
    from tasks.runtime.connections import machines_meet

    if not machines_meet():
        return None
    from deployments.presence import Presence

    return Presence(pool, name)


def runs_of(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """Flow runs by their ids, and of the processes of each the one that began it: whose parent is not of the run. Of
    several, as where that one has died, the oldest. Pids say nothing, as they wrap around."""
    of_runs: dict[str, dict[int, tuple[psutil.Process, int, float]]] = defaultdict(dict)
    for process in processes:
        with suppress(psutil.Error):
            if run_id := process.environ().get(_RUN_ID):
                of_runs[run_id][process.pid] = (process, process.ppid(), process.create_time())
    found: dict[str, psutil.Process] = {}
    for run_id, known in of_runs.items():
        outside = [item for item in known.values() if item[1] not in known]
        found[run_id], _, _ = min(outside or known.values(), key=lambda item: item[2])
    return found


def _runs_of_pool(pool: str) -> list[tuple[FlowRun, State]]:
    """Those in a state of `LEFT_SECONDS`."""
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
    return [(run, run.state) for run in runs if run.state is not None]


def give_back(run_id: str, reason: str, *, is_drained: bool = True, worker: str | None = None) -> str:
    """Have a run that nobody works on started again; what was done.

    Args:
        run_id: of the flow run, whose process has ended.
        reason: why.
        is_drained: its next start does not count as a further try.
        worker: name of the one that had it; another one may have taken it already.
    """
    from prefect import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import AwaitingRetry, Cancelled, Crashed

    from tasks.runtime.flow_run import end_task_runs, hand_back

    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(UUID(run_id))
        except ObjectNotFound:
            return "was deleted"
        state = run.state
        if state is None or (state.is_final() and not state.is_crashed()):
            return f"ended {state.name if state is not None else 'without a state'}"
        if state.is_scheduled():
            return f"is {state.name}: {state.message or 'it starts again'}"
        if worker is not None and run.labels.get(_WORKER, worker) != worker and not state.is_cancelling():
            return "is another worker's by now"
        end_task_runs(run.id)
        if state.is_cancelling():
            client.set_flow_run_state(run.id, Cancelled(message=reason), force=True)
            return "was being cancelled, and is"
        if is_drained and hand_back(client, run, reason):
            return f"is handed back, as {reason}"
        if run.run_count < MAX_TRIES:
            lost = "its process died" if state.is_crashed() else reason
            client.set_flow_run_state(run.id, AwaitingRetry(message=lost), force=True)
            return f"is tried again, as {lost}"
        client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
        return f"was tried {run.run_count} times; it is Crashed"


def _end_with_parent() -> None:
    """In the worker's process, before it begins."""
    signal_at_parents_end(signal.SIGTERM)
    # Prefect turns SIGTERM into SIGINT, which what a shell starts in the background has inherited to ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
