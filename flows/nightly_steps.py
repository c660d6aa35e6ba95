"""The steps of the nightly flow: evaluation on held-out prompts, and learning on by PPO, GRPO or DPO."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flows.learning import learn_from_rows, policy_iterations
from rollout_core.base.ids import ContentId
from rollout_core.config import KLGuard, NightlyConfig, PromptsGuard, RewardGuard
from rollout_core.config.rewards import ModelReward, RewardSpec
from rollout_core.objects.records import Checkpoint, EvalReport
from rollout_core.plans.plan import context_limit
from rollout_core.promotion.guards import Divergence, GuardReports
from rollout_core.rewards.source_ids import source_id
from tasks.generate import enqueue_prompts
from tasks.imports import import_prompts, import_reward
from tasks.runtime import connections
from tasks.runtime.nightly_report import Progress
from tasks.runtime.report import (
    Curve,
    curves_of_iterations,
    figure_of_steps,
)
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


@dataclass(frozen=True)
class Learned:
    """What came of the part after SFT."""

    checkpoint: Checkpoint
    progress: Progress


def algorithm_of(config: NightlyConfig) -> str:
    """The algorithm of the part after SFT, as people write it."""
    return next(name.upper() for name in ("ppo", "grpo", "dpo") if getattr(config, name) is not None)


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


def learn(config: NightlyConfig, start: ContentId, judge: Judge) -> Learned:
    """The part after SFT, from the model ``start``."""
    return _learn_from_pairs(config, start) if config.dpo is not None else _learn_on_policy(config, start, judge)


def _learn_on_policy(config: NightlyConfig, start: ContentId, judge: Judge) -> Learned:
    """PPO or GRPO iterations, rewarded by ``judge`` or by a reward model that is trained first."""
    settings = config.ppo or config.grpo
    assert settings is not None, "validated"
    objects = connections.objects()
    curves: list[Curve] = []
    if config.rm is not None:
        checkpoint = learn_from_rows(config, "rm", config.rm, start, snapshot_label="reward model")
        reward = ModelReward(model=checkpoint.model)
        judge = Judge(reward, source_id(reward))
        accuracies = figure_of_steps(objects, checkpoint, "rewards/accuracies")
        curves.append(Curve("accuracy of the reward model", accuracies, "RM step"))
    iterations = policy_iterations(
        start,
        start,
        import_prompts(settings.prompts, label="training").data,
        settings,
        config.backend,
        judge.reward,
        judge.source,
        seed=config.seed,
        num_threads=config.num_threads,
        run_name=config.run.name,
    )
    is_reward = config.rm is None
    what = "mean training reward" if is_reward else "mean score of the reward model"
    x_label = f"{algorithm_of(config)} iteration"
    checkpoints = [iteration.checkpoint for iteration in iterations]
    progress = Progress(
        Curve(what, [iteration.mean_reward for iteration in iterations], x_label),
        temperature=settings.sampling.temperature if is_reward else None,
        others=[*curves, *curves_of_iterations(objects, checkpoints, x_label)],
    )
    return Learned(checkpoints[-1], progress)


def _learn_from_pairs(config: NightlyConfig, start: ContentId) -> Learned:
    """DPO."""
    assert config.dpo is not None, "validated"
    checkpoint = learn_from_rows(config, "dpo", config.dpo, start, start, snapshot_label="after DPO")
    margins, accuracies, losses = (
        Curve(what, figure_of_steps(connections.objects(), checkpoint, name), "DPO step")
        for what, name in (
            ("margin of chosen over rejected", "rewards/margins"),
            ("accuracy of the implicit reward", "rewards/accuracies"),
            ("DPO loss", "loss"),
        )
    )
    return Learned(checkpoint, Progress(margins, others=(accuracies, losses)))


def guard_reports(
    config: NightlyConfig, judge: Judge, before: EvalReport, latest: EvalReport | None, after: EvalReport
) -> tuple[GuardReports, ...]:
    """Evaluations for those guards of the promotion that look at another reward or at other prompts."""
    found = []
    for number, guard in enumerate(config.promotion.guards):
        if not isinstance(guard, RewardGuard | PromptsGuard):
            continue
        own = judge if guard.reward is None else judge_of(guard.reward)
        label = f"guard {number + 1}"
        if isinstance(guard, PromptsGuard):
            prompts = import_prompts(guard.prompts, label=label).data
            look = partial(_regression, config, prompts, own)
        else:
            look = partial(_by_reward, own)
        found.append(
            GuardReports(
                guard=number,
                before=look(before, f"{label}, before"),
                latest=None if latest is None else look(latest, f"{label}, latest"),
                after=look(after, f"{label}, after"),
            )
        )
    return tuple(found)


def divergences(
    config: NightlyConfig, before: EvalReport, latest: EvalReport | None, after: EvalReport
) -> tuple[Divergence, ...]:
    """Of the new model from each that it is compared with, where a guard of the promotion asks for it."""
    if not any(isinstance(guard, KLGuard) for guard in config.promotion.guards):
        return ()
    rivals = {"before": before} if latest is None else {"before": before, "latest": latest}
    temperature = config.evaluation.sampling.temperature
    return tuple(
        measure_kl(after, rival.model, temperature, num_threads=config.num_threads, label=f"from {moment}")
        for moment, rival in rivals.items()
    )


def _regression(config: NightlyConfig, prompts: ContentId, judge: Judge, of: EvalReport, label: str) -> EvalReport:
    return evaluate_held_out(config, prompts, judge, of.model, label)


def _by_reward(judge: Judge, of: EvalReport, label: str) -> EvalReport:
    return evaluate_by(of, judge.reward, judge.source, label=label)
