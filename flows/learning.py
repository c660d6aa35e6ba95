"""What training and nightly flows share: an update from rows, and iterations on policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flows.evaluation import HackingGuard, Judge, check_guards
from flows.partial_rollouts import Carrying
from flows.playing import Playing
from flows.sampling import Replaying, Sampler, curriculum_order
from flows.suites import RunSuites
from rollout_core.base.ids import ContentId
from rollout_core.config import (
    DatasetSettings,
    LearnerSettings,
    NightlyConfig,
    OnPolicySettings,
    TrainGRPOConfig,
    TrainPPOConfig,
)
from rollout_core.config.runs import TrainingRun
from rollout_core.data.first_iteration import FirstIteration
from rollout_core.launch import kept_process
from rollout_core.launch.launcher import import_updates
from rollout_core.objects.records import Checkpoint, Dataset
from tasks.checkpoints import file_state, label_state
from tasks.imports import import_model, import_pairs, import_sft, import_unpaired
from tasks.learn import UPDATES
from tasks.runtime.connections import objects
from tasks.runtime.generation import load_ahead
from tasks.runtime.iterations import SamplesAhead, TrainingStates
from tasks.runtime.journal import log_iteration, stage_logger


@dataclass(frozen=True)
class Iterations:
    """What rounds of generate, score, update came to."""

    rewards: list[float]
    """Of each, the mean of all completions that were drawn."""
    checkpoints: list[Checkpoint]
    outcome: Checkpoint
    """The last one, or the one that a suite selects."""


def _teacher_of(settings: LearnerSettings) -> dict[str, Any]:
    """The argument of an update that names its teacher, where it has one."""
    return {} if settings.teacher is None else {"teacher": import_model(settings.teacher).model}


def policy_iterations(
    config: NightlyConfig | TrainPPOConfig | TrainGRPOConfig,
    settings: OnPolicySettings,
    judge: Judge | None,
    prompts: ContentId,
    start: FirstIteration,
    suites: RunSuites,
    *,
    reference: ContentId,
    playing: Playing | None = None,
) -> Iterations:
    """Rounds of enqueue, generate, score, update, snapshot; each on the policy of the round before, or with
    ``settings.async_depth`` on that of an earlier one, while those between are trained.

    A round takes up the prompts where the one before ended, also where that was in another run; the samples of the
    first rounds are then those of ``start.model``. They end before the last one where ``suites`` say so. Either
    ``judge`` rewards completions, or a round is one of ``playing`` episodes.
    """
    seed, backend, kind = config.seed, config.backend, settings.family
    model, train_state = start.model, start.train_state
    replaying = Replaying(settings, seed=seed, buffer=start.buffer)
    carrying = Carrying(settings, start.carried)
    guard = None
    if playing is not None:
        experience = playing.experience
    else:
        assert judge is not None, "something rewards completions"
        order = curriculum_order(settings, prompts, reference, backend, judge)
        experience = Sampler(prompts, settings, backend, judge, seed, order, start, carrying).experience
        guard = HackingGuard(settings, backend, judge)
    taught = _teacher_of(settings)
    rewards, checkpoints = [], []
    numbers = range(start.number, settings.iterations)
    if settings.async_depth:
        import_updates()
    with (
        SamplesAhead(experience, numbers, depth=settings.async_depth, start=model) as ahead,
        kept_process(),
        TrainingStates(settings, objects()) as states,
    ):
        for number in numbers:
            label = f"iteration {number + 1}"
            drawn = ahead.take(number)
            if guard is not None:
                guard.look(number, model, drawn.scores, drawn.mean_reward)
            scores, samples, again = replaying.mixed(number, drawn)
            inputs = model, train_state, reference, scores, samples
            options = {"seed": seed + number, "num_threads": config.num_threads, "label": label, **again, **taught}
            states.best = {None if guard is None else guard.best, suites.selected}
            checkpoint = states.update(number, UPDATES[kind], *inputs, settings, **options)
            check_guards(settings, checkpoint, label)
            if not settings.async_depth and states.holds(checkpoint):  # after a cached one, samples may be cached, too
                load_ahead(checkpoint.model)
            ahead.learned(number, checkpoint.model)
            if settings.stores_state(number):
                label_state(checkpoint, f"{config.run.name}/{kind}-{number + 1}", label=label)
            log_iteration(f"{kind.upper()} {label} of {settings.iterations}", checkpoint.summary)
            rewards.append(drawn.mean_reward)
            checkpoints.append(checkpoint)
            model, train_state = checkpoint.model, checkpoint.train_state
            suites.after_iteration(number, settings.iterations, model)
            if suites.end is not None:
                stage_logger().info("training ends %s", suites.end)
                break
        outcome = next((each for each in checkpoints if each.model == suites.selected), checkpoints[-1])
        states.require(outcome)
    carrying.end()
    return Iterations(rewards, checkpoints, outcome)


_IMPORTS: dict[str, Callable[[Any], Dataset]] = {
    "sft": import_sft,
    "rm": import_pairs,
    "dpo": import_pairs,
    "ipo": import_pairs,
    "kto": import_unpaired,
}
"""What files the rows of an algorithm, by the family of its settings."""


def learn_from_rows(
    config: TrainingRun,
    settings: DatasetSettings,
    *models: ContentId,
    rows: ContentId | None = None,
    start_from: ContentId | None = None,
    snapshot_label: str = "",
) -> Checkpoint:
    """Train on ``rows``, or else those of ``settings``; verify and label the outcome.

    ``models``: the one to train, and the reference where there is one. The label is for people.
    """
    import_rows = _IMPORTS[settings.family]
    checkpoint = UPDATES[settings.family](
        *models,
        rows or import_rows(settings.dataset).data,
        settings,
        seed=config.seed,
        num_threads=config.num_threads,
        held_out=None if settings.evaluation is None else import_rows(settings.evaluation.dataset).data,
        start_from=start_from,
        **_teacher_of(settings),
    )
    file_state(checkpoint, f"{config.run.name}/{settings.family}", label=snapshot_label)
    return checkpoint
