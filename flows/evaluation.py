"""What a model earns on held-out prompts, and what guards measure besides, as the nightly flow and the canary ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig
from rollout_core.config.base import DatasetSource
from rollout_core.config.promotion import Guard
from rollout_core.config.rewards import RewardSpec
from rollout_core.objects.records import Divergence, EvalReport
from rollout_core.plans.plan import context_limit
from rollout_core.promotion.guards import GuardReports, subject_of
from rollout_core.rewards.source_ids import source_id
from tasks.generate import enqueue_prompts
from tasks.imports import import_prompts, import_reward
from tasks.runtime import connections
from tasks.score import evaluate, evaluate_by, measure_kl


@dataclass(frozen=True)
class Judge:
    """A reward, and `source_id` of its code."""

    reward: RewardSpec
    source: ContentId


def judge_of(reward: RewardSpec) -> Judge:
    """The reward with its models filed, and the id of its code as it is now."""
    filed = import_reward(reward)
    return Judge(filed, source_id(filed, base=connections.working_folder()))


def evaluate_held_out(
    config: NightlyConfig, prompts: ContentId, judge: Judge, model: ContentId, label: str, *, drawing: str | None = None
) -> EvalReport:
    """Reward of ``model`` on the held-out ``prompts``. With a ``drawing`` all completions are generated again, for it
    alone."""
    sampling, backend = config.evaluation.sampling, config.backend
    limit = context_limit(backend)
    prompt_set = enqueue_prompts(
        prompts, model, sampling, max_model_len=limit, mode="test", drawing=drawing, label=label
    )
    return evaluate(prompt_set, sampling, backend, judge.reward, judge.source, label=label)


def guard_reports(
    config: NightlyConfig, judge: Judge, before: EvalReport, latest: EvalReport | None, after: EvalReport
) -> tuple[GuardReports, ...]:
    """Evaluations for those guards that look at another reward or at other prompts."""
    found = []
    for number, guard in enumerate(config.promotion.guards):
        if subject_of(guard) in ("own reward", "own prompts"):
            measure = _measure(config, judge, guard, f"guard {number + 1}")
            found.append(
                GuardReports(
                    guard=number,
                    before=measure(before, "before"),
                    latest=None if latest is None else measure(latest, "latest"),
                    after=measure(after, "after"),
                )
            )
    return tuple(found)


def _measure(config: NightlyConfig, judge: Judge, guard: Guard, label: str) -> Callable[[EvalReport, str], EvalReport]:
    """How a guard with a reward or prompts of its own evaluates the model of a report."""
    reward: RewardSpec | None = getattr(guard, "reward", None)
    source: DatasetSource | None = getattr(guard, "prompts", None)
    own = judge if reward is None else judge_of(reward)
    if source is None:
        return lambda of, moment: evaluate_by(of, own.reward, own.source, label=f"{label}, {moment}")
    prompts = import_prompts(source, label=label).data
    return lambda of, moment: evaluate_held_out(config, prompts, own, of.model, f"{label}, {moment}")


def divergences(
    config: NightlyConfig, before: EvalReport, latest: EvalReport | None, after: EvalReport
) -> tuple[Divergence, ...]:
    """Of the new model from each that it is compared with, where a guard asks for it."""
    if not any(subject_of(guard) == "divergence" for guard in config.promotion.guards):
        return ()
    rivals = {"before": before} if latest is None else {"before": before, "latest": latest}
    temperature = config.evaluation.sampling.temperature
    return tuple(
        measure_kl(after, rival.model, temperature, num_threads=config.num_threads, label=f"from {moment}")
        for moment, rival in rivals.items()
    )
