"""The steps of the nightly flow: evaluation on held-out prompts, and learning on by PPO, GRPO or DPO."""

from __future__ import annotations

from dataclasses import dataclass

from flows.report import Curve, Progress, curves_of_iterations, figure_of_steps
from flows.train import learn_from_rows, policy_iterations
from rollout_core.base.ids import ContentId
from rollout_core.config import NightlyConfig
from rollout_core.config.rewards import ModelReward, RewardSpec
from rollout_core.objects.records import Checkpoint, EvalReport
from rollout_core.plans.plan import context_limit
from rollout_core.rewards.source_ids import source_id
from tasks import connections
from tasks.generate import enqueue_prompts
from tasks.imports import import_prompts
from tasks.score import evaluate


@dataclass(frozen=True)
class Judge:
    """A reward, and `source_id` of its code."""

    reward: RewardSpec
    source: ContentId


@dataclass(frozen=True)
class Learned:
    """What came of the part after SFT."""

    checkpoint: Checkpoint
    progress: Progress


def algorithm_of(config: NightlyConfig) -> str:
    """The algorithm of the part after SFT, as people write it."""
    return next(name.upper() for name in ("ppo", "grpo", "dpo") if getattr(config, name) is not None)


def evaluate_held_out(
    config: NightlyConfig, prompts: ContentId, judge: Judge, model: ContentId, label: str
) -> EvalReport:
    """Reward of ``model`` on the held-out ``prompts``."""
    sampling, backend = config.evaluation.sampling, config.backend
    limit = context_limit(backend)
    prompt_set = enqueue_prompts(prompts, model, sampling, max_model_len=limit, mode="test", label=label)
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
        import_prompts(settings.prompts).data,
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
        Curve(what, [iteration.scores.mean for iteration in iterations], x_label),
        temperature=settings.sampling.temperature if is_reward else None,
        others=[*curves, *curves_of_iterations(objects, checkpoints, x_label)],
    )
    return Learned(checkpoints[-1], progress)


def _learn_from_pairs(config: NightlyConfig, start: ContentId) -> Learned:
    """DPO."""
    assert config.dpo is not None, "validated"
    checkpoint = learn_from_rows(config, "dpo", config.dpo, start, start, label="nightly", snapshot_label="after DPO")
    margins, accuracies, losses = (
        Curve(what, figure_of_steps(connections.objects(), checkpoint, name), "DPO step")
        for what, name in (
            ("margin of chosen over rejected", "rewards/margins"),
            ("accuracy of the implicit reward", "rewards/accuracies"),
            ("DPO loss", "loss"),
        )
    )
    return Learned(checkpoint, Progress(margins, others=(accuracies, losses)))
