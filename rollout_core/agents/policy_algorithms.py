"""GRPO and PPO as a trainer's algorithms: agents work on tasks with a policy, which learns from what they did.

``Trainer(algorithm=GRPO("path/to/model", iterations=20)).fit(agent, tasks)`` trains. The algorithm serves the weights
itself, behind a proxy that records agents' calls token by token, and gives agents the resource ``llm``.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rollout_core.agents.algorithm import Dataset
from rollout_core.agents.policy_session import (
    Evaluation,
    PolicyAlgorithm,
    PolicyOptions,
    PolicySession,
    policy_settings,
)
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import content_id
from rollout_core.config import ModelSource, SamplingParams, identity
from rollout_core.config.agents import AgentGRPO, AgentPPO
from rollout_core.data.examples import positions_between
from rollout_core.inference.training_samples import Adapted
from rollout_core.objects import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IterationReport:
    """What an iteration has come to."""

    number: int
    """From 0."""
    mean_reward: float
    """Of its rollouts, under the weights before its update."""
    num_rollouts: int
    """Those that are learnt from, and those left out."""
    left_out: Mapping[str, int]
    """Rollouts by why nothing is learnt from them."""
    checkpoint: Checkpoint
    evaluation: Evaluation | None = None
    """Of the new weights."""


class _OnPolicy(PolicyAlgorithm):
    """Iterations of: agents work on tasks, the policy learns from all of them."""

    kind: ClassVar[type[AgentGRPO] | type[AgentPPO]]

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        settings: AgentGRPO | AgentPPO | None = None,
        iterations: int = 10,
        tasks_per_iteration: int = 8,
        rollouts_per_task: int = 8,
        lr: float = 1e-6,
        temperature: float = 1.0,
        max_tokens: int = 256,
        learner: Mapping[str, Any] | None = None,
        evaluate_every: int | None = None,
        evaluation_sampling: SamplingParams | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        settings = policy_settings(
            self.kind,
            model,
            settings,
            num_rollouts=tasks_per_iteration * rollouts_per_task,
            lr=lr,
            temperature=temperature,
            max_tokens=max_tokens,
            learner=learner,
            iterations=iterations,
            prompts_per_iteration=tasks_per_iteration,
            samples_per_prompt=rollouts_per_task,
        )
        if evaluate_every is not None and evaluate_every < 1:
            raise ConfigError(f"evaluate_every is {evaluate_every}; expected 1 or more iterations, or None")
        super().__init__(settings, PolicyOptions(name=name or settings.kind, **options))
        self._evaluate_every = evaluate_every
        self._evaluation_sampling = evaluation_sampling or SamplingParams(
            temperature=0.0, max_tokens=settings.sampling.max_tokens
        )
        self.history: list[IterationReport] = []
        """What each iteration has come to."""

    async def run(self, train_dataset: Dataset | None = None, val_dataset: Dataset | None = None) -> None:
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("there are no tasks to learn from; give fit a train_dataset")
        if self._evaluate_every is not None and val_dataset is None:
            raise ConfigError("evaluate_every is set, but there is nothing to evaluate on; give fit a val_dataset")
        self.history, self.checkpoint = [], None
        async with self.session() as session:
            resources_id = await session.publish()
            for number in range(self.settings.iterations):
                ids = await session.run_tasks(
                    self._tasks(train_dataset, session, number),
                    resources_id,
                    "train",
                    {"run": self._options.name, "iteration": number, "model": session.serving},
                )
                adapted = await session.adapt(ids)
                self.checkpoint = await session.learn(adapted, number)
                await session.load(self.checkpoint.model, session.sampling)
                resources_id = await session.publish()
                evaluation = None
                if self._evaluate_every is not None and (number + 1) % self._evaluate_every == 0:
                    assert val_dataset is not None, "checked above"
                    evaluation = await session.evaluate(val_dataset, resources_id, self._evaluation_sampling)
                self._note(number, len(ids), adapted, evaluation)

    def _tasks(self, dataset: Dataset, session: PolicySession, number: int) -> list[tuple[str, Any]]:
        """The iteration's tasks, those of a group side by side, with ids that follow from what is asked of which
        weights."""
        settings = self.settings
        per_iteration = settings.prompts_per_iteration
        places = positions_between(
            number * per_iteration,
            (number + 1) * per_iteration,
            num_items=len(dataset),
            seed=self._options.seed,
        )
        made_from = [self._options.name, session.serving, identity(settings.sampling), self._options.seed, number]
        return [
            (content_id("agent-rollout/1", [*made_from, group, sample, dataset[place]]), dataset[place])
            for group, place in enumerate(places)
            for sample in range(settings.samples_per_prompt)
        ]

    def _note(self, number: int, num_rollouts: int, adapted: Adapted, evaluation: Evaluation | None) -> None:
        rewards = {sample.rollout_id: sample.reward for sample in adapted.samples}
        assert self.checkpoint is not None, "the iteration has ended"
        report = IterationReport(
            number=number,
            mean_reward=statistics.fmean(rewards.values()),
            num_rollouts=num_rollouts,
            left_out={reason: len(ids) for reason, ids in adapted.left_out.items()},
            checkpoint=self.checkpoint,
            evaluation=evaluation,
        )
        self.history.append(report)
        held_out = "" if evaluation is None else f", held out {evaluation.mean_reward:.4f}"
        logger.info(
            "%s, iteration %d of %d: mean reward %.4f of %d rollouts%s, model %s",
            self._options.name,
            number + 1,
            self.settings.iterations,
            report.mean_reward,
            len(rewards),
            held_out,
            self.checkpoint.model.short,
        )


class GRPO(_OnPolicy):
    """Group relative policy optimization of the policy that agents use: rollouts of a task are compared with each
    other.

    Args:
        model: a folder, a hub id or a content id; or give ``settings`` whole.
        iterations: rounds of work and update.
        tasks_per_iteration: in an order that follows from the seed.
        rollouts_per_task: size of a group.
        lr: the learning rate.
        temperature: with which tokens are drawn.
        max_tokens: most tokens of an answer.
        learner: further fields of AgentGRPO by name, such as ``{"kl_coef": 0.01}``.
        settings: all of it, in place of the above; its ``prompts`` are not read.
        evaluate_every: iterations after which the new weights work on val_dataset.
        evaluation_sampling: how they draw then; default: greedily.
        name, seed, backend, storage, ...: see ``PolicyOptions``.

    After ``fit`` its ``checkpoint`` is the outcome and its ``history`` says what each iteration came to. Raises
    ConfigError for settings that cannot be meant, and for an iteration of which nothing can be learnt.
    """

    kind = AgentGRPO


class PPO(_OnPolicy):
    """Proximal policy optimization of the policy that agents use, with learned values. Arguments as those of GRPO, and
    ``learner`` has further fields of AgentPPO."""

    kind = AgentPPO
