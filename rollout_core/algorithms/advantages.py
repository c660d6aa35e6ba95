"""Advantages: how much better each token, or each completion, was than expected.

A mask says True where a token is real; whatever a tensor holds elsewhere changes nothing, and results are 0 there.
B counts sequences, T tokens, G the completions of one prompt, N = groups * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rollout_core.algorithms.losses import ShapeError
from rollout_core.base.errors import ConfigError

WHITEN_EPS = 1e-8
"""Added to the variance by `masked_whiten`."""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over completions that end: the value after the last real token is 0.

    A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V_{t+1} - V_t; returns_t = A_t + V_t;
    arXiv:1506.02438, eq. 16.
    rewards, values: [B,T] float32; mask: [B,T] bool, True = real token, one unbroken run a row (padding on the right,
    a prompt may be on the left). Returns (advantages, returns), both [B,T] and 0 outside the mask; no denominator.
    Raises ShapeError if the shapes differ or a row's real tokens have a gap.
    """
    if not (rewards.dim() == 2 and rewards.shape == values.shape == mask.shape):
        shapes = f"rewards {list(rewards.shape)}, values {list(values.shape)}, mask {list(mask.shape)}"
        raise ShapeError(f"gae: {shapes}; expected one shape of 2 axes")
    mask = mask.bool()
    _require_unbroken(mask)
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    next_value = next_advantage = torch.zeros_like(values.sum(1))
    reversed_advantages: list[Tensor] = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0.0)
        next_value = values[:, t]
        reversed_advantages.append(next_advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1) if reversed_advantages else torch.zeros_like(values)
    return advantages, advantages + values


def _require_unbroken(mask: Tensor) -> None:
    starts = mask[:, 1:] & ~mask[:, :-1]
    runs = starts.sum(1) + mask[:, :1].sum(1)
    broken = (runs > 1).nonzero().flatten().tolist()
    if broken:
        raise ShapeError(f"gae: the real tokens of row {broken[0]} have a gap; expected one unbroken run of True a row")


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    counted: Tensor | None = None,
    normalize: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-4,
) -> Tensor:
    """Each completion's reward against those of the other completions of its prompt.

    A = (r - mean) / (std + eps) over its group, arXiv:2402.03300, section 4.1.2; without ``normalize`` A = r - mean,
    arXiv:2503.20783, section 3.2. With ``leave_one_out`` the mean is that of the others, so r - mean is
    group_size / (group_size - 1) times as large: RLOO, arXiv:2402.14740. Where all rewards of a group are equal, its
    advantages are exactly 0.
    rewards: [N] float32, the completions of one prompt side by side; counted: [N] bool, True = has a reward (default:
    all). What is not counted is left out of its group and gets 0, as does one that no other is left to compare with.
    Returns [N].
    Denominator: the group's standard deviation with ddof 1, plus ``eps``.
    Raises ShapeError if N is not a multiple of ``group_size``, ConfigError for groups of fewer than 2.
    """
    if group_size < 2:
        raise ConfigError(f"group_advantages: group_size is {group_size}; a completion needs others to compare with")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ShapeError(
            f"group_advantages: rewards {list(rewards.shape)}; expected [N] with N a multiple of {group_size}"
        )
    options = {"normalize": normalize, "leave_one_out": leave_one_out, "eps": eps}
    rewards_PG = rewards.view(-1, group_size)
    if counted is None or counted.all():
        return _compared(rewards_PG, **options).flatten()
    advantages_PG = torch.zeros_like(rewards_PG)
    for group, counts_G in enumerate(counted.view(-1, group_size)):
        if counts_G.sum() > 1:
            advantages_PG[group, counts_G] = _compared(rewards_PG[group, counts_G][None], **options)[0]
    return advantages_PG.flatten()


def _compared(rewards_PG: Tensor, *, normalize: bool, leave_one_out: bool, eps: float) -> Tensor:
    size, (low, high) = rewards_PG.shape[1], rewards_PG.aminmax(dim=1, keepdim=True)
    # The rounded mean of equal rewards need not be what each of them is.
    advantages_PG = rewards_PG - torch.where(low == high, high, rewards_PG.mean(1, keepdim=True))
    if leave_one_out:
        advantages_PG = advantages_PG * (size / (size - 1))
    if normalize:
        advantages_PG = advantages_PG / (rewards_PG.std(1, correction=1, keepdim=True) + eps)
    return advantages_PG


def deviation(values: Tensor) -> Tensor:
    """Standard deviation of [N] with ddof 1, exactly 0 for equal values; 1 for a single one, which is compared with
    none."""
    if len(values) < 2:
        return torch.ones_like(values.sum())
    low, high = values.aminmax()
    return torch.where(low == high, 0.0, values.std(correction=1))


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``x`` scaled to unit variance over its real entries, and shifted to mean 0 unless ``shift_mean`` is False.

    (x - mean) / sqrt(var + 1e-8), plus mean without the shift; as PPO whitens advantages, arXiv:2005.12729, section 3.
    Of equal entries x - mean is exactly 0.
    x: any shape, float32; mask: the same shape, bool, True = real. Returns that shape, 0 outside the mask.
    Denominator: number of real entries for the mean, one less for the variance (unbiased).
    Raises ShapeError if the shapes differ.
    """
    if x.shape != mask.shape:
        raise ShapeError(f"masked_whiten: x {list(x.shape)}, mask {list(mask.shape)}; expected one shape")
    mask = mask.bool()
    x = x.masked_fill(~mask, 0.0)
    if not mask.any():
        return x
    count = mask.sum()
    low, high = x.masked_fill(~mask, torch.inf).min(), x.masked_fill(~mask, -torch.inf).max()
    mean = torch.where(low == high, high, x.sum() / count)
    centred = (x - mean).masked_fill(~mask, 0.0)
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + WHITEN_EPS)
    return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class Groups:
    """N trajectories of R rollouts; rollouts r with the same r // size are compared with each other.

    A rollout has one score. Completed in one go it is one trajectory; a rollout of several turns gives a trajectory for
    each, and all of them have its score and its advantage.
    """

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

    def summed(self, values: Tensor) -> Tensor:
        """[N] to [R]: the sum over each rollout's trajectories."""
        sums = values.new_zeros(max(self.rollouts) + 1)
        return sums.scatter_add(0, torch.as_tensor(self.rollouts), values)

    def of_trajectories(self, values: Tensor) -> Tensor:
        """[R] to [N]: each trajectory has what its rollout has."""
        return values[torch.as_tensor(self.rollouts)]
