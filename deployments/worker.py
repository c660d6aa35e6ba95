"""A Prefect worker of process pools that ends in order: it takes no run more, has its runs end, and hands them back.

`deployments.supervision` starts it as ``python -m deployments.worker``, and again when it dies. Prefect's own ends its
runs one after the other, 30 s each, and reports them Crashed.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from prefect.settings import PREFECT_WORKER_HEARTBEAT_SECONDS
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments.supervision import give_back, runs_of
from rollout_core.base.collector import collect_seldom
from rollout_core.base.logs import require_form
from tasks.runtime import prefect_logs

if TYPE_CHECKING:
    from uuid import UUID

    import anyio.abc
    from prefect.client.schemas.objects import FlowRun

LOOK_SECONDS = 0.2
CHECK_SECONDS = 60.0
"""A check of parameters that takes longer is killed, and its run is proposed as any other."""
FORGET_SECONDS = 3600.0
"""What was found of a run that nobody has asked for so long is forgotten; one that waits comes twice a minute."""
SERVER_ERROR = 500
REFUSED = 3
"""Exit status of `deployments.parameters` where a run's are wrong."""


@dataclass
class Check:
    """Of the parameters of a run that the server let wait."""

    task: asyncio.Task[bool]
    seen: float
    """When its run was last to be proposed."""

    @property
    def has_refused(self) -> bool:
        return self.task.done() and not self.task.cancelled() and self.task.result()


class DrainingWorker(ProcessWorker):
    """Takes runs of a pool until the first SIGTERM or SIGINT, and then ends what it has under way.

    A second signal kills what has not ended.
    """

    @classmethod
    def __dispatch_key__(cls) -> str:
        # Next to Prefect's own of the same type, which Prefect looks up by this name.
        return "rollout-process"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_draining = False
        self._in_hand = 0
        """Runs whose `run` has not returned."""
        self._checks: dict[UUID, Check] = {}
        """Once for each run that waits, until its turn comes or it is retried."""
        self._is_server_away = False
        self.has_left_runs = False
        """Some could not be handed back; the supervisor, which knows them, tries again."""

    async def work(self) -> None:
        """Take runs, until a signal."""
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        assert this is not None, "asyncio.run makes one"
        ending: list[asyncio.Task[None]] = []

        def on_signal() -> None:
            if not ending:
                ending.append(loop.create_task(self._drain(this)))
            else:
                _signal(runs_of(psutil.Process().children()).values(), signal.SIGKILL)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        with suppress(asyncio.CancelledError):
            await self.start()

    async def _drain(self, work: asyncio.Task[Any]) -> None:
        """Have all runs stop, also one that was taken at this moment, and then end the work."""
        self._is_draining = True
        self._logger.info("the worker is draining; runs asked to stop: %d", self._in_hand)
        asked: set[str] = set()
        while self._in_hand or self._submitting_flow_run_ids:
            runs = runs_of(psutil.Process().children())
            _signal((process for run, process in runs.items() if run not in asked), signal.SIGTERM)
            asked |= runs.keys()
            await asyncio.sleep(LOOK_SECONDS)
        work.cancel()

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        if self._is_draining:
            return []
        with self._without_server():
            taken = await super().get_and_submit_flow_runs()
            if self._is_server_away:
                self._logger.info("the server answers again")
            self._is_server_away = False
            return taken
        return []

    async def sync_with_backend(self) -> None:
        with self._without_server():
            await super().sync_with_backend()

    async def _submit_run(self, flow_run: FlowRun) -> None:
        with self._without_server():
            return await super()._submit_run(flow_run)
        # It has not begun, and comes with a later poll.
        self._release_limit_slot(flow_run.id)
        self._submitting_flow_run_ids.discard(flow_run.id)
        if self._cancelling_observer is not None:
            self._cancelling_observer.remove_in_flight_flow_run_id(flow_run.id)

    @contextmanager
    def _without_server(self) -> Iterator[None]:
        """Leave the block where the server is away. Prefect ends a worker whose server is away for minutes, and with it
        all runs, which do not need the server."""
        try:
            yield
        except httpx.HTTPError as error:
            is_away = not isinstance(error, httpx.HTTPStatusError) or error.response.status_code >= SERVER_ERROR
            if not is_away or self._work_pool is None:  # before its start it has no runs, and cannot begin
                raise
            if not self._is_server_away:
                why = " ".join(str(error).split()) or type(error).__name__
                shown = why[: prefect_logs.MOST_OF_AN_ERROR]
                self._logger.warning("the server is away, the runs of this worker go on: %s", shown)
            self._is_server_away = True

    async def _propose_pending_state(self, flow_run: FlowRun) -> bool:
        """Where the server has a run wait for its place, its parameters are checked meanwhile."""
        check = self._checks.get(flow_run.id)
        if check is not None:
            check.seen = monotonic()
            if not check.task.done():
                return False
            if check.has_refused:
                if not await self._is_scheduled(flow_run.id):
                    return False  # a proposal would have a run wait again that has just failed
                del self._checks[flow_run.id]  # it is retried, maybe with other parameters
                check = None
        is_its_turn = await super()._propose_pending_state(flow_run)
        if is_its_turn:
            self._checks.pop(flow_run.id, None)
        elif check is None:
            self._forget_checks()
            self._checks[flow_run.id] = Check(asyncio.create_task(self._refuses(flow_run.id)), monotonic())
        return is_its_turn

    async def _is_scheduled(self, run_id: UUID) -> bool:
        """Whether a run still waits, or again. What a worker was given may have changed since."""
        try:
            state = (await self.client.read_flow_run(run_id)).state
        except Exception as error:  # noqa: BLE001 - any of the client's would end the worker; the next look asks again
            self._logger.warning("flow run %s could not be read: %s", run_id, error)
            return False
        return state is not None and state.is_scheduled()

    def _forget_checks(self) -> None:
        """Of runs that were cancelled while they waited, or are never retried."""
        since = monotonic() - FORGET_SECONDS
        self._checks = {id: each for id, each in self._checks.items() if not each.task.done() or each.seen > since}

    async def _refuses(self, run_id: UUID) -> bool:
        """Have a run fail whose parameters are wrong; whether they are. Where nobody can tell they count as right."""
        try:
            status, said = await self._look_at_parameters(run_id)
        except Exception as error:  # noqa: BLE001 - such as a machine that has no process left
            status, said = None, f"{type(error).__name__}: {error}".removesuffix(": ")
        if status not in (0, REFUSED):
            last = said.strip().rpartition("\n")[2]
            self._logger.info("the parameters of flow run %s could not be checked: %s", run_id, last)
        return status == REFUSED

    async def _look_at_parameters(self, run_id: UUID) -> tuple[int | None, str]:
        """Exit status and standard error of `deployments.parameters`."""
        # In a process of its own: what flows import would stay in this one.
        command = [sys.executable, "-P", "-m", "deployments.parameters", str(run_id)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                _, said = await process.communicate()
        except TimeoutError:
            return None, f"it took longer than {CHECK_SECONDS:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode, said.decode(errors="replace")

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        self._in_hand += 1
        try:
            if self._is_draining:
                # It came with the last answer of the server, and has no process yet.
                if task_status is not None:
                    task_status.started(0)
                result = ProcessWorkerResult(status_code=0, identifier="none")
            else:
                result = await super().run(flow_run, configuration, task_status)
            if self._is_draining and (result.status_code or result.identifier == "none"):
                # One that ended by itself has handed itself back, and may be another worker's by now.
                await self._give_back(str(flow_run.id))
                return ProcessWorkerResult(status_code=0, identifier=result.identifier)
            return result
        finally:
            self._in_hand -= 1

    async def _give_back(self, run_id: str) -> None:
        try:
            done = await asyncio.to_thread(give_back, run_id, reason="its worker stops")
        except Exception as error:  # noqa: BLE001 - any of the client's
            self.has_left_runs = True
            self._logger.warning("flow run %s could not be handed back: %s", run_id, error)
        else:
            self._logger.info("flow run %s %s", run_id, done)


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser(description="A Prefect worker that hands its runs back when it is asked to end.")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    require_form()
    prefect_logs.shorten()
    worker = DrainingWorker(
        name=arguments.name,
        work_pool_name=arguments.pool,
        limit=arguments.limit,
        heartbeat_interval_seconds=int(PREFECT_WORKER_HEARTBEAT_SECONDS.value()),
    )
    asyncio.run(worker.work())
    if worker.has_left_runs:
        sys.exit(1)


if __name__ == "__main__":
    collect_seldom()
    main()
