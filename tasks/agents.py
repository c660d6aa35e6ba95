"""The stages of agents: tasks become rollouts of the store, runners work on them, and their outcomes are filed."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_core.agents.adapters.ended import look_up
from rollout_core.agents.code import AgentCode
from rollout_core.agents.session import Sessions, Setting
from rollout_core.agents.task_rollouts import enqueue, file_rollouts, template_of, what_decides
from rollout_core.base.ids import ContentId
from rollout_core.base.stopping import run_async
from rollout_core.config import AgentConfig, EngineConfig, RunnersConfig, SamplingParams
from rollout_core.inference.backend import ModelRef
from rollout_core.objects.records import AgentPrompt, AgentRollouts, AgentSource, AgentTasks
from rollout_core.objects.retention.unstored import local_model
from rollout_core.store import NamedResources
from rollout_core.store.types import RolloutMode
from tasks.collect import collect_samples as collect_samples
from tasks.runtime import artifacts, connections
from tasks.runtime.journal import stage_logger
from tasks.runtime.stage import current_stage, refresh_name, stage

sessions = Sessions(
    connections.open_store, lambda: connections.cache_folder() / connections.AGENT_LOGS, logger=stage_logger
)
"""The session of this process, kept from stage to stage."""


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
    decides = what_decides(model, source, (agent, sampling, backend), mode, draws, prompt, limit)
    rows = {"first": first, "count": count, "rollouts_per_task": rollouts_per_task, "seed": seed}
    record = file_rollouts(objects, tasks, model, decides, **rows)
    run_async(_enqueue(record, source, agent, mode))
    stage_logger().info(
        "%d tasks enqueued as %d rollouts for model %s", record.num_tasks, record.num_rollouts, model.short
    )
    return record


async def _enqueue(tasks: AgentTasks, source: AgentSource, agent: AgentConfig, mode: RolloutMode) -> list[str]:
    async with connections.open_store() as store:
        return await enqueue(store, current_stage().objects, tasks, source, agent, mode)


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
    served = ModelRef(tasks.model, local_model(objects, tasks.model, connections.cache_folder()))
    setting = Setting(AgentCode.filed(objects, source), agent, backend, runners, seed)
    resources: NamedResources = {} if prompt is None else {prompt.name: template_of(objects, prompt)}

    async def work() -> AgentRollouts:
        rollout_ids = await _enqueue(tasks, source, agent, mode)
        # A refresh is asked for to have what failed tried again, too.
        options = {"resources": resources, "retry_failed": refresh_name() is not None, "on_progress": bar.show}
        await sessions.run(setting, served, sampling, rollout_ids, **options)
        return await _look_up(rollout_ids, tasks.model)

    with artifacts.ProgressBar("agents-progress", "Rollouts of the agent") as bar:
        record = run_async(work())
    _show_rollouts(record, source, label)
    return record


async def _look_up(rollout_ids: Sequence[str], model: ContentId) -> AgentRollouts:
    async with connections.open_store() as store:
        return await look_up(store, current_stage().objects, rollout_ids, model)


def _show_rollouts(record: AgentRollouts, source: AgentSource, label: str) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in record.statuses.items())
    stage_logger().info(
        "%d rollouts of %s ended (%s), mean reward %.4f",
        record.num_rollouts,
        source.function,
        statuses,
        record.mean_reward,
    )
    figures = {
        "mean reward": round(record.mean_reward, 4),
        "rollouts with a reward": record.num_rewards,
        "spans": record.num_spans,
        **{f"status: {status}": count for status, count in record.statuses.items()},
    }
    artifacts.figures("agent-rollouts", figures, f"Rollouts of {source.function} {label}")


@stage(version=1, cached=False)
def look_up_rollouts(rollout_ids: Sequence[str], model: ContentId, *, label: str = "") -> AgentRollouts:
    """The outcome of stored rollouts, whoever ran them."""
    return run_async(_look_up(rollout_ids, model))


def close_agents() -> None:
    """End this process's runners, proxy and engine server; stages that come later start their own."""
    sessions.close()
