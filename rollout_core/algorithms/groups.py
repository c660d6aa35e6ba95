"""Which rollouts are compared with each other, and which trajectories are parts of one rollout.

A rollout has one score. Completed in one go it is one trajectory; a rollout of several turns gives a trajectory for
each, and all of them have its score and its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rollout_core.base.errors import ConfigError


@dataclass(frozen=True)
class Groups:
    """N trajectories of R rollouts; rollouts r with the same r // size are compared with each other."""

    rollouts: Sequence[int]
    """[N]: the rollout that each trajectory is part of, from 0. Trajectories of one group follow each other."""
    size: int
    """Rollouts in a group."""

    def __post_init__(self) -> None:
        count = max(self.rollouts, default=-1) + 1
        if not count or count % self.size:
            raise ConfigError(
                f"{count} rollouts cannot be compared in groups of samples_per_prompt = {self.size}; "
                "give whole groups of that size"
            )

    @classmethod
    def of_neighbours(cls, count: int, size: int) -> Groups:
        """``count`` rollouts of one trajectory each, of which ``size`` that follow each other make a group."""
        return cls(range(count), size)

    @cached_property
    def rows(self) -> list[list[int]]:
        """Trajectories of each group."""
        rows: list[list[int]] = [[] for _ in range((max(self.rollouts) + 1) // self.size)]
        for row, rollout in enumerate(self.rollouts):
            rows[rollout // self.size].append(row)
        return rows

    def of_rollouts(self, scores: Tensor) -> Tensor:
        """[N] to [R]: the least of each rollout's trajectories, which differ where one was cut and pays for it."""
        worst = scores.new_full((max(self.rollouts) + 1,), torch.inf)
        return worst.scatter_reduce(0, torch.as_tensor(self.rollouts), scores, "amin")

    def of_trajectories(self, values: Tensor) -> Tensor:
        """[R] to [N]: each trajectory has what its rollout has."""
        return values[torch.as_tensor(self.rollouts)]
