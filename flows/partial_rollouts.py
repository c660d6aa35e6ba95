"""Completions that are cut at an iteration's end and go on in the next."""

from __future__ import annotations

from collections.abc import Callable

from rollout_core.base.ids import ContentId
from rollout_core.config import OnPolicySettings
from rollout_core.data.datasets import PromptRow, parse_rows
from rollout_core.data.partial_rollouts import Carried, carried_over, decode_carried, num_foreign
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions, PromptSet
from tasks.partial_rollouts import continue_samples, join_completions
from tasks.runtime.dry_run import dry_run_remark, is_placeholder
from tasks.runtime.journal import stage_logger


class Carrying:
    """What ``settings.partial_rollouts`` makes of each iteration's completions; nothing where there is no such table.

    ``before`` is what the last iteration of an earlier run left.
    """

    def __init__(self, settings: OnPolicySettings, before: Carried | None = None) -> None:
        self._settings = settings
        self._carried = None if before is None else before.partials
        self._num_groups = 0
        self._has_told = False
        """A dry run, what it cannot know."""

    def complete(
        self, number: int, prompts: PromptSet, draw: Callable[[PromptSet, str], Completions], label: str
    ) -> Completions:
        """Completions of whole groups, once ``prompts`` of iteration ``number`` (from 0), and what was carried into it,
        have been drawn one part further. Where no group is whole by then, they are drawn another one."""
        if self._settings.partial_rollouts is None:
            return draw(prompts, label)
        model, fresh, own = prompts.model, prompts, label
        for part in range(self._settings.parts_per_completion):
            if self._carried is not None:
                own = label if not part else f"{label}, part {part + 1}"
                sampling = self._settings.part_sampling
                fresh = continue_samples(self._carried, model, sampling, fresh=fresh, label=own)
            assert fresh is not None, "there are prompts, or something that continues"
            joined = join_completions(
                draw(fresh, own),
                self._settings.sampling,
                carried=self._carried,
                number=number,
                group_size=self._settings.group_size,
                label=own,
            )
            self._carried, self._num_groups, fresh = joined.carried, joined.num_groups_carried, None
            if is_placeholder(joined.completions):
                if not self._has_told:
                    dry_run_remark("which completions an iteration carries over to the next shows when it runs")
                self._has_told = True
                return joined.as_completions()
            if joined.num_samples:
                return joined.as_completions()
        raise AssertionError("all completions have ended by then")

    def end(self) -> None:
        """Say what the last iteration has left."""
        if self._num_groups:
            stage_logger().info(
                "%d groups of completions are not whole at the end of the last iteration, and teach nothing; a run "
                "with more iterations continues them",
                self._num_groups,
            )


def resume_partial(
    objects: ObjectStore, train_state: ContentId, settings: OnPolicySettings, prompts: ContentId
) -> Carried:
    """What a run of ``settings`` that resumes from ``train_state`` carries over; raises as `carried_over`.

    Two runs whose prompts differ may come to one state, as long as no group of those that do was whole. What the later
    one carried over is then all that is known, so that prompts which are not this run's are logged.
    """
    carried = carried_over(objects, train_state, group_size=settings.group_size)
    if carried.partials is not None and not is_placeholder(prompts):
        partials = decode_carried(objects.get_bytes(carried.partials))
        foreign = num_foreign(partials, parse_rows(objects.get_bytes(prompts), f"prompts {prompts.short}", PromptRow))
        if foreign:
            stage_logger().warning(
                "%d of %d completions carried over from training state %s have prompts that are not among this run's: "
                "these were changed since, or another run came to that state, too",
                foreign,
                len(partials),
                train_state.short,
            )
    return carried
