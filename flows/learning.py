"""What training and nightly flows share: an update from rows, and on-policy iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flows.curriculum import Opening, prompt_schedule
from flows.partial_rollouts import Carrying
from flows.replay import Replaying
from rollout_core.algorithms.reward_hacking import PolicyRewards, reward_hacking
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    BackendConfig,
    DatasetSettings,
    DatasetSource,
    DynamicSampling,
    LearnerSettings,
    OnPolicySettings,
    RewardHackingGuard,
)
from rollout_core.config.rewards import RewardSpec
from rollout_core.config.runs import TrainingRun
from rollout_core.data.partial_rollouts import Carried
from rollout_core.launch import kept_process
from rollout_core.launch.launcher import import_updates
from rollout_core.objects.records import Checkpoint, Completions, Dataset, PromptSet, Scores
from rollout_core.plans.plan import context_limit
from rollout_core.rewards.source_ids import source_id
from tasks.checkpoints import file_state, label_state
from tasks.generate import batch_inference, enqueue_prompts
from tasks.imports import (
    import_held_out,
    import_model,
    import_pairs,
    import_prompts,
    import_reward,
    import_sft,
    import_unpaired,
)
from tasks.learn import UPDATES, check_guards
from tasks.runtime.connections import objects, working_folder
from tasks.runtime.dry_run import dry_run_remark, is_placeholder
from tasks.runtime.generation import load_ahead
from tasks.runtime.iterations import SamplesAhead, TrainingStates
from tasks.runtime.journal import log_iteration
from tasks.runtime.kept_states import current_keeping
from tasks.score import evaluate, score_rewards, select_groups


@dataclass(frozen=True)
class Iteration:
    """What one round of generate, score, update gave."""

    mean_reward: float
    """Of all completions that were drawn."""
    checkpoint: Checkpoint


@dataclass(frozen=True)
class _Experience:
    """Scored completions that an update learns from."""

    scores: Scores
    samples: ContentId
    mean_reward: float
    model: ContentId
    """The weights that drew them."""


@dataclass(frozen=True)
class _Sampler:
    """Draws and scores completions of prompts, in stages."""

    prompts: ContentId
    settings: OnPolicySettings
    backend: BackendConfig
    reward: RewardSpec
    reward_source: ContentId
    seed: int
    opening: Opening
    num_fresh: Callable[[int], int]
    """Prompts of an iteration whose completions are drawn."""
    carrying: Carrying

    def experience(self, number: int, model: ContentId) -> _Experience:
        """That of iteration ``number`` (from 0), drawn by ``model``."""
        label, per_iteration = _label(number), self.settings.prompts_per_iteration
        if self.settings.redrawing is not None:
            return self._differing_groups(model, number, self.settings.redrawing, label)
        scores, samples = self._draw(model, number, number * per_iteration, self.num_fresh(number), label)
        return _Experience(scores, samples, scores.mean, model)

    def _differing_groups(self, model: ContentId, number: int, dynamic: DynamicSampling, label: str) -> _Experience:
        """Groups whose rewards differ, in as few rounds as the share of such groups so far lets expect."""
        wanted, group_size = self.num_fresh(number), self.settings.samples_per_prompt
        first, count = number * self.settings.prompts_per_iteration * dynamic.max_rounds, wanted
        rounds: list[Scores] = []
        samples: list[ContentId] = []
        while True:
            scores, own = self._draw(model, number, first, count, f"{label}, round {len(rounds) + 1}")
            rounds.append(scores)
            samples.append(own)
            selected = select_groups(
                tuple(rounds),
                tuple(samples),
                group_size=group_size,
                wanted=wanted,
                min_spread=dynamic.min_spread,
                label=label,
            )
            if is_placeholder(selected.scores):
                dry_run_remark("how many rounds of drawing an iteration needs shows when it runs; one is counted")
                return _Experience(selected.as_scores(), selected.samples, selected.mean_drawn, model)
            if selected.num_groups >= wanted or len(rounds) == dynamic.max_rounds:
                break
            first += count
            missing = wanted - selected.num_groups
            count = min(wanted, math.ceil(missing * selected.num_drawn / max(1, selected.num_groups)))
        if selected.num_groups < wanted and (dynamic.when_short == "stop" or not selected.num_groups):
            raise Fatal(
                f"{label}: in {len(rounds)} rounds {selected.num_groups} of {selected.num_drawn} groups have rewards "
                f"that differ, and the iteration needs {wanted}; take prompts of other difficulty, raise "
                "algorithm.samples_per_prompt or dynamic_sampling.max_rounds"
                + (', or set when_short = "fewer"' if selected.num_groups else "")
            )
        return _Experience(selected.as_scores(), selected.samples, selected.mean_drawn, model)

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
            opened=self.opening(number),
            label=label,
        )

        def draw(prompts: PromptSet, label: str) -> Completions:
            options = {"failed": settings.failed, "group_size": settings.group_size, "label": label}
            return batch_inference(prompts, sampling, self.backend, **options)

        completions = self.carrying.complete(number, prompt_set, draw, label)
        by_part = True if settings.scores_parts else None
        scores = score_rewards(completions, self.reward, self.reward_source, by_part=by_part, label=label)
        return scores, completions.samples


def _teacher_of(settings: LearnerSettings) -> dict[str, Any]:
    """The argument of an update that names its teacher, where it has one."""
    return {} if settings.teacher is None else {"teacher": import_model(settings.teacher).model}


class _HackingWatch:
    """Has the models that draw an iteration's completions complete held-out prompts, as ``guard`` asks."""

    def __init__(self, guard: RewardHackingGuard | None, sampler: _Sampler) -> None:
        self._guard = guard
        self._sampler = sampler
        self._found: list[PolicyRewards] = []
        if guard is not None:
            self._prompts = import_prompts(guard.prompts, label="held out").data
            self._reward, self._source = sampler.reward, sampler.reward_source
            if guard.reward is not None:
                self._reward = import_reward(guard.reward)
                self._source = source_id(self._reward, base=working_folder())

    @property
    def best(self) -> ContentId | None:
        """The model with the highest held-out reward so far, if any was evaluated."""
        return max(self._found, key=lambda found: found.held_out).model if self._found else None

    def look(self, number: int, model: ContentId, drawn: _Experience) -> None:
        """At iteration ``number`` (from 0), which is to train ``model`` on what was drawn. Raises Fatal with the
        evidence where the training reward is hacked."""
        guard, label = self._guard, f"held out, {_label(number)}"
        if guard is None or number % guard.every:
            return
        sampling = self._sampler.settings.sampling.model_copy(update={"temperature": 0.0})
        backend = self._sampler.backend
        limit = context_limit(backend)
        prompts = enqueue_prompts(self._prompts, model, sampling, max_model_len=limit, mode="test", label=label)
        report = evaluate(prompts, sampling, backend, self._reward, self._source, label=label)
        if is_placeholder(report.scores) or is_placeholder(drawn.scores.scores):  # their zeros are evidence of nothing
            return
        self._found.append(PolicyRewards(number + 1, model, drawn.mean_reward, report.mean_reward))
        evidence = reward_hacking(self._found, max_fall=guard.max_fall, evaluations=guard.evaluations)
        if evidence is not None:
            is_stored = self._sampler.settings.stores_all_models and current_keeping() is None
            raise Fatal(
                f"guards.reward_hacking: {evidence}. This iteration trained nothing, and checkpoints before it stay. "
                "Mend what the reward pays for, hold the policy closer to its start, or end with the best model"
                + ("" if is_stored else ", by `rollout reproduce` where it is not stored")
            )


def _label(number: int) -> str:
    return f"iteration {number + 1}"


def policy_iterations(
    start: ContentId,
    reference: ContentId,
    prompts: ContentId,
    settings: OnPolicySettings,
    backend: BackendConfig,
    reward: RewardSpec,
    reward_source: ContentId,
    *,
    seed: int,
    num_threads: int | None,
    run_name: str,
    train_state: ContentId | None = None,
    num_done: int = 0,
    carried: Carried | None = None,
) -> list[Iteration]:
    """Rounds of enqueue, generate, score, update, snapshot; each on the policy of the round before, or with
    ``settings.async_depth`` on that of an earlier one, while those between are trained.

    ``reward_source`` is the `source_id` of ``reward``. ``num_done`` rounds were done before, and led to ``start`` and
    ``train_state``, and left ``carried``. A round takes up the prompts where the one before ended, also where that was
    in another run; the samples of the first rounds are then those of ``start``.
    """
    model = start
    opening = prompt_schedule(settings, prompts, reference, backend, reward, reward_source)
    replaying = Replaying(settings, objects(), seed=seed, train_state=train_state, num_done=num_done)
    carrying = Carrying(settings, carried)
    sampler = _Sampler(prompts, settings, backend, reward, reward_source, seed, opening, replaying.num_fresh, carrying)
    taught = _teacher_of(settings)
    iterations = []
    numbers = range(num_done, settings.iterations)
    watch = _HackingWatch(settings.guards.reward_hacking, sampler)
    if settings.async_depth:
        import_updates()
    with (
        SamplesAhead(sampler.experience, numbers, depth=settings.async_depth, start=start) as ahead,
        kept_process(),
        TrainingStates(settings, objects()) as states,
    ):
        for number in numbers:
            label = _label(number)
            drawn = ahead.take(number)
            watch.look(number, model, drawn)
            scores, samples, again = replaying.mixed(number, drawn.scores, drawn.samples, drawn.model, label=label)
            inputs = model, train_state, reference, scores, samples
            options = {"seed": seed + number, "num_threads": num_threads, "label": label, **again}
            update = UPDATES[settings.family]
            states.best = watch.best
            checkpoint = states.update(number, update, *inputs, settings, **options, **taught)
            check_guards(settings, checkpoint, label)
            if not settings.async_depth and states.holds(checkpoint):  # after a cached one, samples may be cached, too
                load_ahead(checkpoint.model)
            ahead.learned(number, checkpoint.model)
            kind = settings.family
            if settings.stores_state(number):
                label_state(checkpoint, f"{run_name}/{kind}-{number + 1}", label=label)
            log_iteration(f"{kind.upper()} {label} of {settings.iterations}", checkpoint.summary)
            iterations.append(Iteration(drawn.mean_reward, checkpoint))
            model, train_state = checkpoint.model, checkpoint.train_state
    carrying.end()
    return iterations


_IMPORTS: dict[str, Callable[[DatasetSource], Dataset]] = {
    "sft": import_sft,
    "rm": import_pairs,
    "dpo": import_pairs,
    "ipo": import_pairs,
    "kto": import_unpaired,
}
"""What files the rows of an algorithm, by the family of its settings."""


def learn_from_rows(
    config: TrainingRun,
    kind: str,
    settings: DatasetSettings,
    *models: ContentId,
    rows: ContentId | None = None,
    start_from: ContentId | None = None,
    label: str = "",
    snapshot_label: str = "",
) -> Checkpoint:
    """Train on ``rows``, or else those of ``settings``, by the algorithm ``kind``; verify and label the outcome.

    ``models``: the one to train, and the reference where there is one. The labels are for people.
    """
    import_rows = _IMPORTS[settings.family]
    checkpoint = UPDATES[settings.family](
        *models,
        rows or import_rows(settings.dataset).data,
        settings,
        seed=config.seed,
        num_threads=config.num_threads,
        held_out=import_held_out(settings.evaluation, import_rows),
        start_from=start_from,
        label=label,
        **_teacher_of(settings),
    )
    file_state(checkpoint, f"{config.run.name}/{kind}", label=snapshot_label)
    return checkpoint
