"""Where the iterations of a run on policy begin: from the run's base model, or behind those of an earlier run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import OnPolicySettings, RunInfo
from rollout_core.data.partial_rollouts import resume_partial
from rollout_core.data.replay import buffer_behind, num_fresh
from rollout_core.objects import ObjectStore
from rollout_core.objects.snapshots import MODEL_FOLDER, SnapshotStore, find_start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstIteration:
    """What the first iteration of a run has from those before it."""

    model: ContentId
    """That it trains."""
    train_state: ContentId | None = None
    number: int = 0
    """Iterations that are done."""
    carried: ContentId | None = None
    """Completions that it continues, see `rollout_core.data.partial_rollouts`."""
    buffer: ContentId | None = None
    """Completions that may be replayed, with those of the iteration before."""

    def num_fresh(self, number: int, settings: OnPolicySettings) -> int:
        """Prompts of iteration ``number`` (from 0) whose completions are drawn anew, not replayed."""
        first = self.number if self.buffer is None else 0
        return num_fresh(number, settings.prompts_per_iteration, settings.replaying, first=first)


def first_iteration(
    objects: ObjectStore,
    run: RunInfo,
    settings: OnPolicySettings,
    base_model: ContentId,
    prompts: ContentId | None,
    warn: Callable[..., None] = log.warning,
) -> FirstIteration:
    """Of a run that trains ``base_model``, or resumes where its configuration says so; raises as `find_start` and
    `resume_iterations`."""
    if run.resume is None:
        return FirstIteration(base_model)
    steps = settings.known_steps_per_iteration
    found = find_start(objects, run.resume, algorithm=settings.family, run_name=run.name, steps_per_iteration=steps)
    return resume_iterations(objects, found.id, settings, prompts, warn)


def resume_iterations(
    objects: ObjectStore,
    train_state: ContentId,
    settings: OnPolicySettings,
    prompts: ContentId | None,
    warn: Callable[..., None] = log.warning,
) -> FirstIteration:
    """What a run of ``settings`` begins with that continues from ``train_state``; ``prompts`` are its own, where they
    are known. Raises ConfigError where no iteration is left, and as `resume_partial`."""
    snapshots = SnapshotStore(objects)
    if settings.partial_rollouts is None:
        carried, number = None, snapshots.get(train_state).step // settings.steps_per_iteration
    else:
        size = settings.group_size
        found = resume_partial(objects, train_state, group_size=size, prompts=prompts, warn=warn)
        carried, number = found.partials, found.number + 1
    if number >= settings.iterations:
        raise ConfigError(
            f"snapshot {train_state.short} has {number} iterations behind it; raise algorithm.iterations above that"
        )
    buffer = None if settings.replaying is None else buffer_behind(objects, train_state)
    return FirstIteration(snapshots.subtree(train_state, MODEL_FOLDER), train_state, number, carried, buffer)
