"""Signs that a policy exploits its reward: the reward that it is trained on rises while another one falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId
from rollout_core.config import RewardHackingGuard


@dataclass(frozen=True)
class PolicyRewards:
    """What one model of a run on policy earned."""

    iteration: int
    """From 1: the one whose completions it drew."""
    model: ContentId
    training: float
    """Mean reward of these completions."""
    held_out: float
    """Mean reward of its completions of held-out prompts."""


def reward_hacking(found: Sequence[PolicyRewards], *, max_fall: float, evaluations: int) -> str | None:
    """What speaks for reward hacking: the last ``evaluations`` of ``found`` have each, against the best held-out reward
    before them, a higher training reward and a held-out reward lower by more than ``max_fall``. None where they have
    not. As in Gao, Schulman and Hilton, arXiv:2210.10760, figure 1: the proxy rises on while the gold reward falls.
    """
    in_a_row = 0
    best = found[0]
    for point in found:
        hacks = point.training > best.training and point.held_out < best.held_out - max_fall
        in_a_row = in_a_row + 1 if hacks else 0
        if point.held_out > best.held_out:
            best = point
    if in_a_row < evaluations:
        return None
    seen = "; ".join(f"{point.iteration}: {point.training:.4g}, {point.held_out:.4g}" for point in found)
    return (
        f"in the last {in_a_row} evaluations the training reward is above that of iteration {best.iteration} "
        f"({best.training:.4g}), whose held-out reward was the best ({best.held_out:.4g}, model {best.model}), and the "
        f"held-out reward is lower than that by more than {max_fall:g}. Training and held-out reward by iteration: "
        f"{seen}"
    )


class HackingWatch:
    """What the models of a run have earned so far, as ``guard`` has them evaluated."""

    def __init__(self, guard: RewardHackingGuard) -> None:
        self._guard = guard
        self._found: list[PolicyRewards] = []

    @property
    def best(self) -> ContentId | None:
        """The model with the highest held-out reward so far, if any was evaluated."""
        return max(self._found, key=lambda found: found.held_out).model if self._found else None

    def note(self, rewards: PolicyRewards, *, is_stored: bool) -> None:
        """Take what a model earned that is to be trained now; ``is_stored``: whether all models are. Raises Fatal with
        the evidence where the training reward is hacked."""
        self._found.append(rewards)
        guard = self._guard
        evidence = reward_hacking(self._found, max_fall=guard.max_fall, evaluations=guard.evaluations)
        if evidence is not None:
            raise Fatal(
                f"guards.reward_hacking: {evidence}. This iteration trained nothing, and checkpoints before it stay. "
                "Mend what the reward pays for, hold the policy closer to its start, or end with the best model"
                + ("" if is_stored else ", by `rollout reproduce` where it is not stored")
            )
