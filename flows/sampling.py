"""What an iteration learns from: completions of its prompts, by a curriculum where there is one, drawn by one model and
scored; and completions of earlier iterations again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.evaluation import Judge
from flows.partial_rollouts import Carrying
from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, DynamicSampling, OnPolicySettings
from rollout_core.data.curriculum import PromptOrder
from rollout_core.data.first_iteration import FirstIteration
from rollout_core.objects.records import Completions, PromptSet, Scores
from rollout_core.plans.plan import context_limit
from rollout_core.rewards.scores import num_to_draw
from tasks.generate import batch_inference, enqueue_prompts, order_prompts
from tasks.runtime.dry_run import dry_run_remark, is_placeholder
from tasks.score import replay_groups, score_rewards, select_groups

_DIFFICULTY = "difficulty"
"""Label of the stages by which prompts are ordered."""


def curriculum_order(
    settings: OnPolicySettings, prompts: ContentId, model: ContentId, backend: BackendConfig, judge: Judge
) -> PromptOrder | None:
    """The order in which ``settings`` open ``prompts``; None without a curriculum. By reward, ``model`` completes all
    of them first; where training draws the same prompts from it, these completions are taken again."""
    curriculum = settings.curriculum
    if curriculum is None:
        return None
    scores = None
    if curriculum.by == "reward":
        sampling, limit = settings.sampling, context_limit(backend)
        options = {"samples_per_prompt": curriculum.samples, "max_model_len": limit, "label": _DIFFICULTY}
        prompt_set = enqueue_prompts(prompts, model, sampling, **options)
        completions = batch_inference(prompt_set, sampling, backend, label=_DIFFICULTY)
        scores = score_rewards(completions, judge.reward, judge.source, label=_DIFFICULTY)
    return order_prompts(prompts, model, by=curriculum.by, key=curriculum.key, scores=scores, label=_DIFFICULTY)


@dataclass(frozen=True)
class Sampled:
    """Scored completions that an update learns from."""

    scores: Scores
    samples: ContentId
    mean_reward: float
    """Of all completions that were drawn."""
    model: ContentId
    """The weights that drew them."""


@dataclass(frozen=True)
class Sampler:
    """Draws and scores completions of prompts, in stages."""

    prompts: ContentId
    settings: OnPolicySettings
    backend: BackendConfig
    judge: Judge
    seed: int
    order: PromptOrder | None
    """By difficulty; None: all prompts are drawn from, in passes over them."""
    start: FirstIteration
    carrying: Carrying

    def experience(self, number: int, model: ContentId) -> Sampled:
        """That of iteration ``number`` (from 0), drawn by ``model``."""
        settings, label = self.settings, f"iteration {number + 1}"
        first, count = number * settings.places_per_iteration, self.start.num_fresh(number, settings)
        if settings.redrawing is not None:
            return self._differing_groups(model, number, first, count, settings.redrawing, label)
        scores, samples = self._draw(model, number, first, count, label)
        return Sampled(scores, samples, scores.mean, model)

    def _differing_groups(
        self, model: ContentId, number: int, first: int, wanted: int, dynamic: DynamicSampling, label: str
    ) -> Sampled:
        """Groups whose rewards differ, in as few rounds as the share of such groups so far lets expect."""
        rounds: list[tuple[Scores, ContentId]] = []
        count = wanted
        while True:
            rounds.append(self._draw(model, number, first, count, f"{label}, round {len(rounds) + 1}"))
            options = {"group_size": self.settings.samples_per_prompt, "min_spread": dynamic.min_spread}
            selected = select_groups(*zip(*rounds, strict=True), wanted=wanted, label=label, **options)
            first += count
            if is_placeholder(selected.scores):
                dry_run_remark("how many rounds of drawing an iteration needs shows when it runs; one is counted")
                count = 0
            else:
                count = num_to_draw(selected, wanted, dynamic, num_rounds=len(rounds), label=label)
            if not count:
                return Sampled(selected.as_scores(), selected.samples, selected.mean_drawn, model)

    def _draw(self, model: ContentId, number: int, first: int, count: int, label: str) -> tuple[Scores, ContentId]:
        settings = self.settings
        sampling = settings.part_sampling
        prompt_set = enqueue_prompts(
            self.prompts,
            model,
            sampling,
            first=first,
            count=count,
            samples_per_prompt=settings.samples_per_prompt,
            seed=self.seed,
            max_model_len=context_limit(self.backend),
            opened=None if self.order is None else self.order.opened(number, settings),
            label=label,
        )

        def draw(prompts: PromptSet, label: str) -> Completions:
            options = {"failed": settings.failed, "group_size": settings.group_size, "label": label}
            return batch_inference(prompts, sampling, self.backend, **options)

        completions = self.carrying.complete(number, prompt_set, draw, label)
        options = {"by_part": True if settings.scores_parts else None, "label": label}
        scores = score_rewards(completions, self.judge.reward, self.judge.source, **options)
        return scores, completions.samples


class Replaying:
    """Mixes groups of ``buffer`` into each iteration, and each into the buffer, where ``settings`` replay."""

    def __init__(self, settings: OnPolicySettings, *, seed: int, buffer: ContentId | None) -> None:
        self._settings, self._seed, self._buffer = settings, seed, buffer

    def mixed(self, number: int, fresh: Sampled) -> tuple[Scores, ContentId, dict[str, Any]]:
        """Scores, samples and further inputs of the update of iteration ``number`` (from 0)."""
        settings = self._settings
        if settings.replaying is None:
            return fresh.scores, fresh.samples, {}
        found = replay_groups(
            fresh.scores,
            fresh.samples,
            fresh.model,
            settings.replaying,
            buffer=self._buffer,
            number=number,
            group_size=settings.samples_per_prompt,
            seed=self._seed,
            algorithm=settings.family,
            label=f"iteration {number + 1}",
        )
        self._buffer = found.buffer
        return found.as_scores(), found.samples, {"replayed": found.replayed}
