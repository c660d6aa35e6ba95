"""The stages of agents: tasks become rollouts of the store, runners work on them, and their outcomes are filed."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack

import orjson

from rollout_core.agents.adapters.ended import ended_rollouts, look_up
from rollout_core.agents.adapters.samples import adapt_ended
from rollout_core.agents.adapters.tokens import SampleForm
from rollout_core.agents.code import AgentCode
from rollout_core.agents.live import AGENT_KIND
from rollout_core.agents.queue import INTERRUPTIONS
from rollout_core.agents.session import POLICY, AgentSession, ServedPolicy, Setting
from rollout_core.base.errors import in_words
from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.loops import LoopThread
from rollout_core.base.stopping import run_async
from rollout_core.config import AgentConfig, EngineConfig, RunnersConfig, SamplingParams, identity
from rollout_core.data.datasets import TaskRow, parse_rows
from rollout_core.data.examples import positions_between
from rollout_core.inference.base import ModelRef
from rollout_core.inference.training_samples import Adapted, Failed, file_experience
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import AgentPrompt, AgentRollouts, AgentSource, AgentTasks, Experience
from rollout_core.objects.retention.unstored import local_model
from rollout_core.store import EnqueueRolloutRequest, NamedResources, PromptTemplate, RolloutConfig
from rollout_core.store.types import RolloutMode
from tasks.runtime import artifacts, connections
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, refresh_name, stage

log = logging.getLogger(__name__)

_CHUNK = 1_000


@stage(version=1, cached=False, imports=True, time="importing")
def import_agent(agent: AgentConfig) -> AgentSource:
    """File the code of an agent, with what of the user's own it imports. What runs from then on is this code."""
    objects, code = current_stage().objects, AgentCode.read(agent.function, connections.working_folder())
    return AgentSource(id=code.id, function=agent.function, code=code.file(objects))


@stage(version=1, optional=("seed", "prompt", "limit"))
def enqueue_tasks(
    tasks: ContentId,
    model: ContentId,
    source: AgentSource,
    agent: AgentConfig,
    sampling: SamplingParams,
    backend: EngineConfig,
    *,
    first: int = 0,
    count: int | None = None,
    rollouts_per_task: int = 1,
    seed: int | None = None,
    draws: int = 0,
    mode: RolloutMode = "train",
    prompt: AgentPrompt | None = None,
    limit: int | None = None,
    label: str = "",
) -> AgentTasks:
    """Turn task rows into rollouts of an agent. Enqueueing one twice is one rollout.

    ``first`` and ``count`` choose rows, going around the end of the file; with a ``seed`` each time around is in an
    order of its own, which follows from it. Runs of other ``draws`` have rollouts of their own, and so have those of
    another ``limit``, the longest sequence that the engine takes: an agent is refused calls beyond it. With a
    ``prompt`` the agent is to get that template.
    """
    objects = current_stage().objects
    rows = parse_rows(objects.get_bytes(tasks), f"tasks {tasks.short}", TaskRow)
    last = len(rows) if count is None else first + count
    chosen = (
        [position % len(rows) for position in range(first, last)]
        if seed is None
        else positions_between(first, last, num_items=len(rows), seed=seed)
    )
    decides = [model, source.id, *map(identity, (agent, sampling, backend)), mode, draws]
    if prompt is not None:
        decides.append(identity(prompt))
    if limit is not None:
        decides.append({"limit": limit})
    lines = []
    for place, row in enumerate(chosen, start=first):
        task = rows[row].task
        ids = (content_id("agent-rollout/1", [*decides, task, place, n]) for n in range(rollouts_per_task))
        lines += [orjson.dumps({"rollout_id": rollout_id, "task": task}) + b"\n" for rollout_id in ids]
    record = AgentTasks(
        rollouts=objects.put_bytes(b"".join(lines)),
        model=model,
        num_tasks=len(chosen),
        num_rollouts=len(lines),
    )
    run_async(_enqueue(objects, record, source, agent, mode))
    stage_logger().info("%d tasks enqueued as %d rollouts for model %s", len(chosen), len(lines), model.short)
    return record


async def _enqueue(
    objects: ObjectStore, tasks: AgentTasks, source: AgentSource, agent: AgentConfig, mode: RolloutMode
) -> list[str]:
    """Make sure that the store has the rollouts of ``tasks``; their ids."""
    config = RolloutConfig(
        timeout_seconds=agent.timeout_seconds,
        max_attempts=agent.max_attempts + INTERRUPTIONS,
        retry_condition=["failed", "timeout", "unresponsive"],
    )
    metadata = {"kind": AGENT_KIND, "agent": source.function, "agent_id": source.id, "model": tasks.model}
    rows = [orjson.loads(line) for line in objects.get_bytes(tasks.rollouts).splitlines()]
    async with connections.open_store() as store:
        for start in range(0, len(rows), _CHUNK):
            await store.enqueue_many_rollouts(
                [
                    EnqueueRolloutRequest(
                        input=row["task"], mode=mode, config=config, metadata=metadata, rollout_id=row["rollout_id"]
                    )
                    for row in rows[start : start + _CHUNK]
                ]
            )
    return [row["rollout_id"] for row in rows]


@stage(version=1, concurrency="engine", optional=("prompt",), time="agents")
def run_agents(
    tasks: AgentTasks,
    source: AgentSource,
    agent: AgentConfig,
    sampling: SamplingParams,
    backend: EngineConfig,
    runners: RunnersConfig,
    *,
    seed: int = 0,
    mode: RolloutMode = "train",
    prompt: AgentPrompt | None = None,
    label: str = "",
) -> AgentRollouts:
    """Have agents work on every task until it has ended, with the engine behind them, and with the template that
    the tasks were enqueued with. A rollout that has finished is never run again, so an interrupted run resumes with
    what is left."""
    objects = current_stage().objects
    model = ModelRef(tasks.model, local_model(objects, tasks.model, connections.cache_folder()))
    code = AgentCode.from_document(json.loads(objects.get_bytes(source.code)))
    setting = Setting(code, agent, backend, runners, seed)
    resources: NamedResources = {} if prompt is None else {prompt.name: template_of(objects, prompt)}

    async def work() -> AgentRollouts:
        rollout_ids = await _enqueue(objects, tasks, source, agent, mode)
        await sessions.run(setting, model, sampling, rollout_ids, resources, bar)
        async with connections.open_store() as store:
            return await look_up(store, objects, rollout_ids, tasks.model)

    with artifacts.ProgressBar("agents-progress", "Rollouts of the agent") as bar:
        record = run_async(work())
    stage_logger().info(
        "%d rollouts of %s ended (%s), mean reward %.4f",
        record.num_rollouts,
        source.function,
        ", ".join(f"{count} {status}" for status, count in record.statuses.items()),
        record.mean_reward,
    )
    rows = [
        {"figure": "mean reward", "value": round(record.mean_reward, 4)},
        {"figure": "rollouts with a reward", "value": record.num_rewards},
        {"figure": "spans", "value": record.num_spans},
        *({"figure": f"status: {status}", "value": count} for status, count in record.statuses.items()),
    ]
    artifacts.table("agent-rollouts", rows, f"Rollouts of {source.function} {label}".strip())
    return record


def template_of(objects: ObjectStore, prompt: AgentPrompt) -> PromptTemplate:
    """The template itself, as agents get it."""
    return PromptTemplate(template=objects.get_bytes(prompt.text).decode(), engine=prompt.engine)


@stage(version=1, cached=False)
def look_up_rollouts(rollout_ids: Sequence[str], model: ContentId, *, label: str = "") -> AgentRollouts:
    """The outcome of stored rollouts, whoever ran them."""

    async def look() -> AgentRollouts:
        async with connections.open_store() as store:
            return await look_up(store, current_stage().objects, rollout_ids, model)

    return run_async(look())


@stage(version=3)
def collect_samples(
    rollouts: AgentRollouts,
    *,
    failed: Failed = "stop",
    group_size: int = 1,
    form: SampleForm = "transition",
    served: str | None = POLICY,
    label: str = "",
) -> Experience:
    """Token-level samples and rewards of rollouts, from the spans they ended with, for `ppo_update` and `grpo_update`:
    one for each turn of an agent, or with ``form = "trajectory"`` one for turns that continue each other. With
    ``served`` only calls count that asked for the model of this name. What cannot be learnt from is counted in the
    result, or with ``failed = "stop"`` an error."""
    objects = current_stage().objects

    async def adapt() -> Adapted:
        async with connections.open_store() as store:
            return await adapt_ended(store, objects, ended_rollouts(objects, rollouts), form=form, model=served)

    adapted = run_async(adapt())
    experience = file_experience(objects, adapted, failed=failed, group_size=group_size)
    rows = [
        {"figure": "samples", "value": experience.num_samples},
        {"figure": "turns, merged or not", "value": adapted.num_turns},
        {"figure": "truncated", "value": experience.num_truncated},
        {"figure": "mean reward", "value": experience.mean},
        *({"figure": f"left out: {reason}", "value": count} for reason, count in experience.left_out.items()),
    ]
    artifacts.table("experience", rows, f"Samples of stored rollouts {label}".strip())
    return experience


class Sessions:
    """The session of this process: kept from stage to stage, replaced where another is asked for. Stages that run at
    the same time have it in turn, for there is one engine."""

    policy: ServedPolicy | None = None
    """What sessions that begin work with, where it is served already; default: each serves its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._setting: Setting | None = None
        self._session: AgentSession | None = None
        self._exits = AsyncExitStack()
        self._turn, self._changing = asyncio.Lock(), asyncio.Lock()
        """Held while a stage uses the session, and while it is replaced or ended; of the thread's loop."""

    @property
    def thread(self) -> LoopThread:
        """Whose loop all sessions live on."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("rollout-agents")
                self._turn, self._changing = asyncio.Lock(), asyncio.Lock()
            return self._thread

    async def run(
        self,
        setting: Setting,
        model: ModelRef,
        sampling: SamplingParams,
        rollout_ids: Sequence[str],
        resources: NamedResources,
        bar: artifacts.ProgressBar,
    ) -> None:
        """`AgentSession.run` of the session for ``setting``, on the loop that it lives on."""
        here, context = asyncio.get_running_loop(), contextvars.copy_context()

        def show(done: int, total: int) -> None:
            # Prefect finds its run in the context of the stage's own thread.
            here.call_soon_threadsafe(bar.show, done, total, context=context)

        async def work() -> None:
            async with self._turn:
                try:
                    session = await self.open(setting)
                    # A refresh is asked for to have what failed tried again, too.
                    options = {"resources": resources, "retry_failed": refresh_name() is not None, "on_progress": show}
                    await session.run(model, sampling, rollout_ids, **options)
                except BaseException:
                    # What state it is in is not known; the next try starts afresh.
                    try:
                        await self.end()
                    except Exception as error:  # noqa: BLE001 - whatever it is, the stage fails by the first error
                        log.error("The session of agents did not end as it should: %s", in_words(error))
                    raise

        await self.thread.run(work())

    async def open(self, setting: Setting) -> AgentSession:
        """The session for ``setting``, begun where there is another or none; on the loop of the sessions."""
        async with self._changing:
            if self._session is None or self._setting != setting:
                await self._end()
                store = await self._exits.enter_async_context(connections.open_store())
                logs, say = connections.cache_folder() / connections.AGENT_LOGS, stage_logger().info
                session = AgentSession(store, setting, policy=self.policy, log_folder=logs, say=say)
                self._session = await self._exits.enter_async_context(session)
                self._setting = setting
            return self._session

    async def end(self) -> None:
        """End the session, if there is one; on the loop of the sessions."""
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        self._session = None
        exits, self._exits = self._exits, AsyncExitStack()
        await exits.aclose()

    def close(self) -> None:
        """End the session and its loop, if there are any."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return

        async def end() -> None:
            async with self._turn:
                await self.end()

        try:
            asyncio.run(thread.run(end()))
        finally:
            thread.stop()


sessions = Sessions()


def close_agents() -> None:
    """End this process's runners, proxy and engine server; stages that come later start their own."""
    sessions.close()
