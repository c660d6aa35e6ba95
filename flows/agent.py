"""Training an agent: its tasks become rollouts, what it did becomes token samples, the model behind it is updated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from prefect import flow

from flows.agent_work import learn_from, work_on
from rollout_core.base.ids import ContentId
from rollout_core.config import TrainAgentConfig
from rollout_core.inference.engines import close_engine
from rollout_core.objects.records import AgentRollouts, AgentSource, Checkpoint, Experience
from rollout_core.plans.agent_plan import plan_agent
from rollout_core.promotion.decision import Promotion, precision_of
from tasks.agents import close_agents, import_agent
from tasks.approval import reason_of
from tasks.checkpoints import file_state, in_base_precision
from tasks.collect import collect_samples
from tasks.imports import import_model, import_tasks
from tasks.promotion import latest_model, promote
from tasks.runtime.agent_report import report_training
from tasks.runtime.connections import objects
from tasks.runtime.dry_run import end_of_stages
from tasks.runtime.flow_run import pipeline
from tasks.runtime.journal import Journal
from tasks.runtime.kept_states import keeping
from tasks.runtime.run_record import record_refusal
from tasks.runtime.stage import retry


class TrainedAgent(TypedDict):
    """What training an agent returns, as JSON has it."""

    model: ContentId
    train_state: ContentId
    step: int
    rewards: list[float]
    """Mean reward of each iteration's rollouts; one without a reward counts as 0."""
    held_out: dict[str, float]
    """The same of the held-out tasks, by moment."""
    promoted: bool
    report: str
    """Folder of the report."""


@dataclass(frozen=True)
class AgentIteration:
    """What one round of tasks and update gave."""

    rollouts: AgentRollouts
    experience: Experience
    checkpoint: Checkpoint


@flow(name="train-agent", flow_run_name="{config.run.name}", persist_result=False, on_failure=[record_refusal])
def train_agent(config: TrainAgentConfig) -> TrainedAgent:
    """Train the model behind an agent by GRPO or PPO on what the agent does, and evaluate it on held-out tasks."""
    return _train(config)


@pipeline(plan_agent, closes=(close_agents, close_engine))
@keeping
def _train(config: TrainAgentConfig, journal: Journal) -> TrainedAgent:
    source = import_agent(config.agent)
    model = import_model(config.algorithm.base_model).model
    tasks = import_tasks(config.algorithm.prompts).data
    held_out = None if config.evaluation is None else import_tasks(config.evaluation.tasks, label="held out").data

    def evaluate(of: ContentId, label: str) -> AgentRollouts | None:
        if held_out is None or config.evaluation is None:
            return None
        return work_on(config, source, held_out, of, config.evaluation.sampling, label=label)

    before = evaluate(model, "held out before")
    iterations = agent_iterations(config, source, tasks, model)
    last = iterations[-1].checkpoint
    final = in_base_precision(last.model, model)
    after = evaluate(final, "held out after")
    promotion: Promotion | None = None
    if before is not None and after is not None and config.promotion.enabled:
        seen = latest_model(config.promotion.resource)
        latest = seen.model
        rival = evaluate(latest, "latest") if latest is not None and latest not in (model, final) else None
        promotion = promote(before, rival, after, config.promotion, instead_of=seen.served, backend=config.backend)
        end_of_stages()
        reason = reason_of(promotion, seen.served, config.run.name, config.promotion)
        promotion = promotion.model_copy(update={"reason": reason})
    end_of_stages()
    evaluated = {moment: each for moment, each in (("before", before), ("after", after)) if each is not None}
    folder = report_training(
        config,
        final,
        [(iteration.rollouts, iteration.checkpoint) for iteration in iterations],
        evaluated,
        _precision(config, evaluated),
        promotion,
        journal,
    )
    return TrainedAgent(
        model=final,
        train_state=last.train_state,
        step=last.step,
        rewards=[iteration.rollouts.mean_reward for iteration in iterations],
        held_out={moment: each.mean_reward for moment, each in evaluated.items()},
        promoted=promotion is not None and promotion.promoted,
        report=str(folder),
    )


def _precision(config: TrainAgentConfig, evaluated: Mapping[str, AgentRollouts]) -> dict[str, str | None]:
    return {
        moment: retry(lambda of=rollouts.model: precision_of(objects(), of, config.backend))
        for moment, rollouts in evaluated.items()
    }


def agent_iterations(
    config: TrainAgentConfig, source: AgentSource, tasks: ContentId, start: ContentId
) -> list[AgentIteration]:
    """Rounds of tasks and update, each on the policy of the round before."""
    settings, per_iteration = config.algorithm, config.algorithm.prompts_per_iteration
    model, train_state = start, None
    iterations: list[AgentIteration] = []
    for number in range(settings.iterations):
        label = f"iteration {number + 1}"
        rows = {"first": number * per_iteration, "count": per_iteration, "seed": config.seed}
        drawn = {**rows, "rollouts_per_task": settings.samples_per_prompt, "mode": "train", "label": label}
        ended = work_on(config, source, tasks, model, settings.sampling, **drawn)
        form = {"group_size": settings.group_size, "form": config.agent.form}
        experience = collect_samples(ended, failed=settings.failed, label=label, **form)
        options = {"seed": config.seed + number, "num_threads": config.num_threads, "label": label}
        of = f" of {settings.iterations}"
        checkpoint = learn_from(experience, settings, model, train_state, start, **options, of=of)
        file_state(checkpoint, f"{config.run.name}/{settings.kind}-{number + 1}", label=label)
        iterations.append(AgentIteration(ended, experience, checkpoint))
        model, train_state = checkpoint.model, checkpoint.train_state
    return iterations
