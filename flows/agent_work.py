"""What flows of agents share: work on tasks, and an update by what came of it."""

from __future__ import annotations

from typing import Any

from flows.evaluation import check_guards
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    AgentGRPO,
    AgentPPO,
    LearnOnlineConfig,
    SamplingParams,
    TrainAgentConfig,
    TunePromptConfig,
)
from rollout_core.objects.records import AgentPrompt, AgentRollouts, AgentSource, Checkpoint, Experience
from rollout_core.plans.plan import context_limit
from rollout_core.store.types import RolloutMode
from tasks.agents import enqueue_tasks, run_agents
from tasks.learn import UPDATES
from tasks.runtime.journal import log_iteration


def work_on(
    config: TrainAgentConfig | TunePromptConfig | LearnOnlineConfig,
    source: AgentSource,
    tasks: ContentId,
    model: ContentId,
    sampling: SamplingParams,
    *,
    label: str,
    mode: RolloutMode = "val",
    prompt: AgentPrompt | None = None,
    **chosen: Any,
) -> AgentRollouts:
    """Have agents work on ``tasks`` with ``model`` behind them; ``chosen`` as `enqueue_tasks` takes it, default: each
    task once, as held-out ones are."""
    assert config.agent is not None, "the configuration says so"
    known = source, config.agent, sampling, config.backend
    options: dict[str, Any] = {"mode": mode, "label": label} | ({} if prompt is None else {"prompt": prompt})
    limit = context_limit(config.backend)
    enqueued = enqueue_tasks(tasks, model, *known, **chosen, **options, draws=config.seed, limit=limit)
    return run_agents(enqueued, *known, config.runners, seed=config.seed, **options)


def learn_from(
    experience: Experience,
    settings: AgentGRPO | AgentPPO,
    model: ContentId,
    train_state: ContentId | None,
    reference: ContentId,
    *,
    seed: int,
    num_threads: int | None,
    label: str,
    of: str = "",
) -> Checkpoint:
    """An update by what agents did; ``of`` ends its line in the log. Raises Fatal for one past a guard's bound."""
    inputs = model, train_state, reference, experience.as_scores(), experience.samples
    options = {"seed": seed, "num_threads": num_threads, "label": label}
    checkpoint = UPDATES[settings.family](*inputs, settings, **options)
    check_guards(settings, checkpoint, label)
    log_iteration(f"{settings.kind.upper()} {label}{of}", checkpoint.summary)
    return checkpoint
