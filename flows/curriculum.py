"""A curriculum of prompts: they are ordered once, and each iteration draws from the share that is open by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_core.base.ids import ContentId
from rollout_core.config import BackendConfig, OnPolicySettings, PromptCurriculum
from rollout_core.config.rewards import RewardSpec
from rollout_core.data.curriculum import num_open
from rollout_core.plans.plan import context_limit
from tasks.curriculum import OpenPrompts, PromptOrder, order_prompts
from tasks.generate import batch_inference, enqueue_prompts
from tasks.score import score_rewards

Opening = Callable[[int], OpenPrompts | None]
"""What is open in iteration number ... (from 0); None: all prompts, in passes over them."""
LABEL = "difficulty"


def all_prompts(number: int) -> None:
    """Without a curriculum."""


@dataclass(frozen=True)
class ScheduleByDifficulty:
    """What ``settings.curriculum`` opens."""

    curriculum: PromptCurriculum
    settings: OnPolicySettings
    ordered: PromptOrder

    def __call__(self, number: int) -> OpenPrompts:
        """Up to iteration ``number``, from 0."""
        settings, total = self.settings, self.ordered.num_prompts
        rounds = 1 if settings.redrawing is None else settings.redrawing.max_rounds
        opened = [num_open(each, settings.iterations, total, self.curriculum) for each in range(number + 1)]
        places = settings.prompts_per_iteration * rounds
        return OpenPrompts(order=self.ordered.order, places=places, num_open=tuple(opened))


def prompt_schedule(
    settings: OnPolicySettings,
    prompts: ContentId,
    model: ContentId,
    backend: BackendConfig,
    reward: RewardSpec,
    reward_source: ContentId,
) -> Opening:
    """What ``settings`` open of ``prompts``, which are ordered now. By reward, ``model`` completes all of them first;
    where training draws the same prompts from it, these completions are taken again."""
    curriculum = settings.curriculum
    if curriculum is None:
        return all_prompts
    scores = None
    if curriculum.by == "reward":
        sampling, limit = settings.sampling, context_limit(backend)
        options = {"samples_per_prompt": curriculum.samples, "max_model_len": limit, "label": LABEL}
        prompt_set = enqueue_prompts(prompts, model, sampling, **options)
        completions = batch_inference(prompt_set, sampling, backend, label=LABEL)
        scores = score_rewards(completions, reward, reward_source, label=LABEL)
    ordered = order_prompts(prompts, model, by=curriculum.by, key=curriculum.key, scores=scores, label=LABEL)
    return ScheduleByDifficulty(curriculum, settings, ordered)
