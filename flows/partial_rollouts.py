"""Completions that are cut at an iteration's end and go on in the next."""

from __future__ import annotations

from collections.abc import Callable

from rollout_core.base.ids import ContentId
from rollout_core.config import OnPolicySettings
from rollout_core.objects.records import Completions, PromptSet
from tasks.generate import continue_samples, join_completions
from tasks.runtime.dry_run import dry_run_remark, is_placeholder
from tasks.runtime.journal import stage_logger


class Carrying:
    """What ``settings.partial_rollouts`` makes of each iteration's completions; nothing where there is no such table.

    ``carried`` is what the last iteration of an earlier run left.
    """

    def __init__(self, settings: OnPolicySettings, carried: ContentId | None) -> None:
        self._settings = settings
        self._carried = carried
        self._num_groups = 0

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
                dry_run_remark("which completions an iteration carries over to the next shows when it runs")
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
