"""Completions of earlier iterations in the updates of later ones."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from rollout_core.base.errors import NotFound
from rollout_core.base.ids import ContentId
from rollout_core.config import OnPolicySettings
from rollout_core.data.replay import num_fresh
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import lineage_of, maker_for, makers_of
from rollout_core.objects.records import Scores
from rollout_core.objects.snapshots import SnapshotStore
from tasks.replay import replay_groups

log = logging.getLogger(__name__)


class Replaying:
    """What ``settings.replaying`` adds to each iteration; nothing where there is no such table.

    A run that resumes after ``num_done`` iterations takes up the buffer with which the last of them, that left
    ``train_state``, was trained.
    """

    def __init__(
        self,
        settings: OnPolicySettings,
        objects: ObjectStore,
        *,
        seed: int,
        train_state: ContentId | None = None,
        num_done: int = 0,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._first, self._buffer = num_done, None
        if settings.replaying is not None and train_state is not None:
            self._buffer = buffer_behind(objects, train_state)
            self._first = num_done if self._buffer is None else 0

    def num_fresh(self, number: int) -> int:
        """Prompts of iteration ``number`` (from 0) whose completions are drawn anew."""
        return num_fresh(number, self._settings.prompts_per_iteration, self._settings.replaying, first=self._first)

    def mixed(
        self, number: int, scores: Scores, samples: ContentId, model: ContentId, *, label: str
    ) -> tuple[Scores, ContentId, dict[str, Any]]:
        """Scores, samples and further inputs of the update of iteration ``number``, which ``model`` drew."""
        settings = self._settings
        if settings.replaying is None:
            return scores, samples, {}
        found = replay_groups(
            scores,
            samples,
            model,
            settings.replaying,
            buffer=self._buffer,
            number=number,
            group_size=settings.samples_per_prompt,
            seed=self._seed,
            algorithm=settings.family,
            label=label,
        )
        self._buffer = found.buffer
        return found.as_scores(), found.samples, {"replayed": found.replayed}


def buffer_behind(objects: ObjectStore, train_state: ContentId) -> ContentId | None:
    """The buffer, with its own groups in it, of the iteration that left ``train_state``; None where that replayed
    nothing, or what it was made of is not known any more."""
    update = lineage_of(objects, train_state)
    replayed = None if update is None else update.inputs.get("replayed")
    mixed = None
    if update is not None and replayed is not None:
        mixed = maker_for(update, replayed, makers_of(objects, ContentId(replayed)))
    for output in () if mixed is None else mixed.outputs:
        with suppress(NotFound):
            if SnapshotStore(objects).get(output).kind == "buffer":
                return output
    log.warning(
        "no buffer of the iteration that left training state %s is there; replay begins with an empty one",
        train_state.short,
    )
    return None
