"""Models that act in an environment: the episodes that an iteration learns from, and held-out ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.sampling import Sampled
from rollout_core.base.ids import ContentId
from rollout_core.config import EngineConfig, EnvironmentRows, FunctionRows, OnPolicySettings, SamplingParams
from rollout_core.config.environments import EnvironmentConfig
from rollout_core.config.evaluation import SuiteRows
from rollout_core.environments.memory import find_memory
from rollout_core.objects.records import AgentRollouts, AgentTasks, EnvironmentSource, EvalReport
from rollout_core.plans.plan import context_limit
from rollout_core.store.types import RolloutMode
from tasks.collect import collect_samples
from tasks.environments import enqueue_episodes, import_environment, import_environment_rows, merge_memory, play
from tasks.imports import import_tasks
from tasks.runtime.connections import objects
from tasks.score import evaluate_episodes
from tasks.suites import import_rows


def starts(rows: SuiteRows, source: EnvironmentSource, settings: EnvironmentConfig, label: str = "") -> ContentId:
    """Rows with which episodes begin, read in a stage."""
    if isinstance(rows, EnvironmentRows):
        return import_environment_rows(rows, source, settings, label=label).data
    if isinstance(rows, FunctionRows):
        return import_rows(rows, form="tasks", label=label).data
    return import_tasks(rows, label=label).data


@dataclass(frozen=True)
class Environment:
    """An environment with its code as it is when a run begins, and the engine behind the models that act in it."""

    source: EnvironmentSource
    settings: EnvironmentConfig
    backend: EngineConfig
    seed: int
    """Of the run: another one plays other episodes."""

    @classmethod
    def of(cls, settings: EnvironmentConfig, backend: EngineConfig, seed: int) -> Environment:
        """Read its code, in a stage."""
        return cls(import_environment(settings), settings, backend, seed)

    def rows(self, rows: SuiteRows, label: str = "") -> ContentId:
        """Starts of episodes, read in a stage."""
        return starts(rows, self.source, self.settings, label)

    def play(
        self,
        model: ContentId,
        rows: ContentId,
        sampling: SamplingParams,
        *,
        mode: RolloutMode,
        label: str,
        memory: ContentId | None = None,
        **chosen: Any,
    ) -> tuple[AgentTasks, AgentRollouts]:
        """Episodes of ``model`` that begin with ``memory``, in stages; ``chosen`` as `enqueue_episodes` takes it,
        default: one of each row."""
        known = self.source, self.settings, sampling, self.backend
        options = {"mode": mode, "limit": context_limit(self.backend), "memory": memory, "label": label}
        episodes = enqueue_episodes(rows, model, *known, draws=self.seed, **chosen, **options)
        return episodes, play(episodes, *known, **options)


@dataclass
class Playing:
    """What iterations learn from: episodes that begin with rows."""

    environment: Environment
    settings: OnPolicySettings
    rows: ContentId
    memory: ContentId | None = None
    """What the environment remembers before the next iteration, where it does."""

    @classmethod
    def of(cls, environment: Environment, settings: OnPolicySettings, rows: ContentId) -> Playing:
        """The episodes of a run, from its first iteration on. Raises NotFound or ConfigError for a memory to begin with
        that is none."""
        wanted = environment.settings.start_memory
        return cls(environment, settings, rows, None if wanted is None else find_memory(objects(), wanted))

    def experience(self, number: int, model: ContentId) -> Sampled:
        """That of iteration ``number`` (from 0), played by ``model``."""
        settings, label = self.settings, f"iteration {number + 1}"
        _, played = self.environment.play(
            model,
            self.rows,
            settings.sampling,
            mode="train",
            first=number * settings.prompts_per_iteration,
            count=settings.prompts_per_iteration,
            episodes_per_row=settings.samples_per_prompt,
            seed=self.environment.seed,
            memory=self.memory,
            label=label,
        )
        if self.environment.settings.episodic_memory:
            about = {"memory": self.memory, "number": number, "algorithm": settings.family, "label": label}
            self.memory = merge_memory(played, self.environment.source, self.environment.settings, **about).memory
        form = {"group_size": settings.group_size, "form": self.environment.settings.form, "served": None}
        found = collect_samples(played, failed=settings.failed, **form, credit=settings.turn_credit, label=label)
        return Sampled(found.as_scores(), found.samples, found.mean, model)


@dataclass(frozen=True)
class HeldOutEpisodes:
    """Rows whose episodes say how good a model is."""

    environment: Environment
    sampling: SamplingParams
    rows: ContentId
    judge: None = None
    """The environment rewards them."""

    def evaluate(self, model: ContentId, label: str) -> EvalReport:
        """Reward of ``model`` in an episode of each."""
        episodes, played = self.environment.play(model, self.rows, self.sampling, mode="test", label=label)
        return evaluate_episodes(episodes, played, label=label)
