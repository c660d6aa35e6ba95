"""Credit by turn: what the turns of an episode earned, and what follows from it for the tokens that each of them wrote.

Each turn of an episode has a reward, the last one with what the whole episode earned. GRPO compares returns, the
rewards of a turn and of those after it, as turn-level credit does in arXiv:2505.11821 (Zeng et al. 2025) and, by states
instead of turns, GiGPO (arXiv:2505.10978); PPO gives a turn's reward to the last token that it wrote, and estimates
advantages over all tokens of the episode, as the token level of RAGEN does (arXiv:2504.20073).

N trajectories of C tokens are of R episodes with up to K turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_core.algorithms.advantages import Groups, gae
from rollout_core.algorithms.experience import Trajectory, written_parts
from rollout_core.base.errors import ConfigError


@dataclass(frozen=True)
class EpisodeTurns:
    """Turns of episodes, and the tokens that they wrote."""

    groups: Groups
    """Which episode each trajectory is part of. Each has a score."""
    turns: Tensor
    """[N,C] int64: the turn of its episode, from 0, that wrote a token; 0 where none did."""
    rewards: Tensor
    """[R,K] float32: what each turn earned by itself, 0 where nothing was given."""
    lengths: Tensor
    """[R] int64: turns of each episode."""

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        groups: Groups,
        turns: Sequence[Sequence[int]],
        rewards: Sequence[Sequence[float | None]],
    ) -> EpisodeTurns:
        """Of N trajectories: ``turns``, which turn each of its written parts is; ``rewards``, of all turns of its
        episode. Raises ConfigError where these do not fit its parts."""
        count = max(groups.rollouts) + 1
        lengths = torch.zeros(count, dtype=torch.long)
        of_turns = torch.zeros(count, max(map(len, rewards)))
        of_tokens = torch.zeros(len(trajectories), max(len(item.token_ids) for item in trajectories), dtype=torch.long)
        for row, (item, numbers, earned) in enumerate(zip(trajectories, turns, rewards, strict=True)):
            parts = written_parts(item)
            if len(parts) != len(numbers) or not all(0 <= number < len(earned) for number in numbers):
                raise ConfigError(
                    f"a sample of {len(parts)} written parts is of the turns {list(numbers)}, and its episode has "
                    f"{len(earned)} turns; expected a turn for each part"
                )
            lengths[groups.rollouts[row]] = len(earned)
            of_turns[groups.rollouts[row], : len(earned)] = torch.tensor([value or 0.0 for value in earned])
            for (start, stop), number in zip(parts, numbers, strict=True):
                of_tokens[row, start:stop] = number
        return cls(groups, of_tokens, of_turns, lengths)

    @property
    def rollouts(self) -> Tensor:
        """[N] int64: the episode of each trajectory."""
        return torch.as_tensor(self.groups.rollouts)

    @property
    def reached(self) -> Tensor:
        """[R,K] bool: whether an episode has this turn."""
        return torch.arange(self.rewards.shape[1]) < self.lengths[:, None]

    def earned(self, outcomes: Tensor) -> Tensor:
        """[R,K]: rewards of turns, the last of which also has its episode's outcome, [R]."""
        last = (self.lengths - 1)[:, None]
        return self.rewards.scatter_add(1, last, outcomes[:, None])

    def returns(self, outcomes: Tensor, *, gamma: float) -> Tensor:
        """[R,K]: G_k = r_k + gamma G_{k+1}, with the outcomes [R] among the last turns' rewards; 0 behind them."""
        found = self.earned(outcomes)
        for turn in reversed(range(found.shape[1] - 1)):
            found[:, turn] += gamma * found[:, turn + 1]
        return found.masked_fill(~self.reached, 0.0)

    def of_tokens(self, values: Tensor, mask: Tensor) -> Tensor:
        """[R,K] to [N,C]: each token has what the turn has that wrote it; 0 outside the mask."""
        return values[self.rollouts[:, None], self.turns].masked_fill(~mask, 0.0)

    def figures(self) -> dict[str, float]:
        """What turns earned by themselves, summed over an episode, and how many turns there are; means."""
        sums = self.rewards.sum(1)
        return {"turn_rewards": float(sums.mean()), "num_turns": float(self.lengths.float().mean())}


def compared_episodes(
    returns: Tensor, reached: Tensor, group_size: int, *, normalize: bool, leave_one_out: bool, eps: float
) -> Tensor:
    """Each turn's return against those of all turns of its group, of which every episode counts alike, however many
    turns it has.

    A_rk = G_rk - mean, of a group's episodes, of what an episode's turns have on average; with ``normalize`` over
    (sqrt(sum over the group's episodes of (mean over turns of (G - mean)^2) / (group_size - 1)) + eps). With
    ``leave_one_out`` the mean is that of the other episodes. Where an episode's returns are all its outcome, this is
    `group_advantages` of outcomes. Where all returns of a group are equal, its advantages are exactly 0.
    returns: [R,K] float32; reached: [R,K] bool, at least one turn an episode. Returns [R,K], 0 where not reached.
    """
    counts = reached.sum(1, keepdim=True)

    def mean_of_turns(values: Tensor) -> Tensor:
        return (values.masked_fill(~reached, 0.0).sum(1, keepdim=True) / counts).view(-1, group_size)

    means_PG = mean_of_turns(returns)
    centre_P1 = means_PG.mean(1, keepdim=True)
    baseline_PG = centre_P1.expand_as(means_PG)
    if leave_one_out:
        baseline_PG = (group_size * centre_P1 - means_PG) / (group_size - 1)
    advantages = returns - baseline_PG.reshape(-1, 1)
    if normalize:
        centred = returns - centre_P1.expand_as(means_PG).reshape(-1, 1)
        deviations_P1 = (mean_of_turns(centred**2).sum(1, keepdim=True) / (group_size - 1)).sqrt()
        advantages = advantages / (deviations_P1.expand_as(means_PG).reshape(-1, 1) + eps)
    low = returns.masked_fill(~reached, torch.inf).view(-1, group_size * returns.shape[1]).amin(1)
    high = returns.masked_fill(~reached, -torch.inf).view(-1, group_size * returns.shape[1]).amax(1)
    # The rounded mean of equal returns need not be what each of them is.
    return advantages.masked_fill(~reached | (low == high).repeat_interleave(group_size)[:, None], 0.0)


def episode_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turns: EpisodeTurns,
    outcomes: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """`gae` over all written tokens of an episode in the order of its turns, whether they stand in one trajectory or in
    several; what each turn earned is the reward of the last token that it wrote.

    rewards, values: [N,C] float32, of tokens; mask: [N,C] bool, True = written; outcomes: [R], of episodes. Returns
    (advantages, returns), both [N,C] and 0 outside the mask.
    """
    rows, columns = mask.nonzero(as_tuple=True)
    count, most = turns.rewards.shape
    keys = turns.rollouts[rows] * most + turns.turns[rows, columns]
    order = keys.argsort(stable=True)
    rows, columns, keys = rows[order], columns[order], keys[order]
    episodes = keys // most
    written = torch.bincount(episodes, minlength=count)
    places = torch.arange(len(keys)) - (written.cumsum(0) - written)[episodes]
    real = torch.arange(int(written.max())) < written[:, None]
    # Of a turn that wrote nothing it goes to the last token before it.
    last = torch.bincount(keys, minlength=count * most).view(count, most).cumsum(1) - 1
    earned = turns.earned(outcomes).masked_fill(last < 0, 0.0)

    def in_order(of_tokens: Tensor) -> Tensor:
        found = torch.zeros(real.shape)
        found[episodes, places] = of_tokens[rows, columns]
        return found

    advantages, returns = gae(
        in_order(rewards).scatter_add(1, last.clamp(min=0), earned), in_order(values), real, gamma=gamma, lam=lam
    )
    back = [torch.zeros(mask.shape), torch.zeros(mask.shape)]
    for found, of_episodes in zip(back, (advantages, returns), strict=True):
        found[rows, columns] = of_episodes[episodes, places]
    return back[0], back[1]
