"""A process of runners: claims tasks of a run from its store over HTTP and has the agent work on them.

Started for a `Fleet` on its own machine and on Dask's workers (`processes_for`), or by people on others
(`rollout agent work`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollout_core.agents import agent_calls as running
from rollout_core.agents.code import AgentCode
from rollout_core.agents.lit_agent import LitAgent
from rollout_core.agents.otel import OtelTracer
from rollout_core.agents.runner import LitAgentRunner
from rollout_core.agents.runner_processes import RunnerProcesses
from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.logs import configure
from rollout_core.base.processes import ProcessName
from rollout_core.store import LightningStore, LightningStoreClient
from rollout_core.store.resources import ClaimedTask

POLL_SECONDS = 1.0
"""Longest pause after a claim that found nothing; work that is queued ends it."""
PATIENCE_SECONDS = 120.0
HEARTBEAT_SECONDS = 10.0
END_SECONDS = 8.0
"""For what is under way when the process is to end; then it is cancelled, and stored as failed."""
START_SECONDS, RELOAD_SECONDS = 120.0, 600.0
"""Longest time that a worker process may take to load the agent."""


@dataclass(frozen=True)
class WorkOrder:
    """What a worker process is given."""

    url: str
    api_key: str | None
    code: dict[str, Any]
    """`AgentCode.document`."""
    concurrency: int
    number: int = 0
    """Of the process among those of its fleet."""
    patience_seconds: float = PATIENCE_SECONDS
    """How long the store may be away."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    """Between signs of life."""


class OtherAgent(ConfigError):
    """The tasks are for another agent than this worker has."""


class FleetRunner(LitAgentRunner[Any]):
    """A runner of a fleet: known by its process, so that others see whether it still lives."""

    cancelled_status = "unresponsive"

    def __init__(self, number: int, agent_id: str, patience_seconds: float, heartbeat_seconds: float) -> None:
        super().__init__(
            OtelTracer(),
            poll_interval=POLL_SECONDS,
            heartbeat_interval=heartbeat_seconds,
            store_patience_seconds=patience_seconds,
        )
        self._name = f"agent-{number}:{ProcessName.of_this_process()}"
        self._agent_id = agent_id

    @property
    def worker_name(self) -> str:
        return self._name

    async def _take(self, store: LightningStore, event: running.ExecutionEvent | None) -> ClaimedTask | None:
        claimed = await super()._take(store, event)
        wanted = None if claimed is None else (claimed.rollout.metadata or {}).get("agent_id", self._agent_id)
        if claimed is None or wanted == self._agent_id:
            return claimed
        await store.release_rollouts([claimed.rollout])
        raise OtherAgent(
            f"the run's agent has the id {str(wanted)[:12]}, and the one here {self._agent_id[:12]}: the code differs. "
            "Bring the same files to this machine, and start again"
        )


async def run_runners(
    agent: LitAgent[Any],
    agent_id: str,
    store: LightningStore,
    first: int,
    count: int,
    event: threading.Event,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> None:
    """Have ``count`` runners, numbered from ``first``, work until ``event`` is set. Raises what ends one of them."""
    runners = [FleetRunner(first + place, agent_id, patience_seconds, heartbeat_seconds) for place in range(count)]
    with ExitStack() as ready:
        for place, runner in enumerate(runners):
            ready.enter_context(runner.run_context(agent=agent, store=store, worker_id=first + place))
        work = [asyncio.ensure_future(runner.iter(event=event)) for runner in runners]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            event.set()
            for future in work:
                future.cancel()
            await asyncio.wait(work)


async def serve(agent: LitAgent[Any], agent_id: str, order: WorkOrder) -> None:
    """Work on the tasks of the store at ``order.url`` until SIGTERM or SIGINT. Raises Recoverable when the store is
    gone for too long, OtherAgent for tasks of another agent."""
    event, loop = threading.Event(), asyncio.get_running_loop()
    client = LightningStoreClient(order.url, api_key=order.api_key)
    first = order.number * order.concurrency
    runners = run_runners(
        agent,
        agent_id,
        client,
        first,
        order.concurrency,
        event,
        patience_seconds=order.patience_seconds,
        heartbeat_seconds=order.heartbeat_seconds,
    )
    work = asyncio.ensure_future(runners)

    def stop() -> None:
        event.set()
        loop.call_later(END_SECONDS, work.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not event.is_set():
            raise
    finally:
        await client.close()


def processes_for(order: WorkOrder, numbers: Sequence[int], **options: Any) -> RunnerProcesses:
    """A process for each of the numbers, which carries out ``order`` under that number; ``options`` as of
    `RunnerProcesses`. They return only when they are asked to end: one that does so unasked is started again."""
    return RunnerProcesses(
        partial(_carry_out, order),
        numbers,
        allowed_exit_codes=(),
        imports=[__name__, *OtelTracer().imports()],
        start_seconds=START_SECONDS,
        reload_seconds=RELOAD_SECONDS,
        **options,
    )


def _carry_out(order: WorkOrder, number: int, url: str, is_ready: Callable[[], None]) -> None:
    """A process of runners, from start to end."""
    configure(logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    running.owns_process = True
    code = AgentCode.from_document(order.code)
    try:
        agent = code.load(alone=True)
    except RolloutError as error:
        raise ConfigError(str(error)) from error
    is_ready()
    asyncio.run(serve(agent, code.id, replace(order, url=url, number=number)))
