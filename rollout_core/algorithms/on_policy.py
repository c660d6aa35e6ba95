"""Learning on completions of the policy itself: proximal policy optimization (PPO; arXiv:1707.06347, for language
models arXiv:1909.08593) and group relative policy optimization (GRPO, arXiv:2402.03300) with its kin: dr_grpo
(arXiv:2503.20783), dapo (arXiv:2503.14476), GSPO (arXiv:2507.18071), CISPO (arXiv:2506.13585), RLOO (arXiv:2402.14740),
REINFORCE++ (arXiv:2501.03262); online DPO (arXiv:2402.04792) and on-policy distillation (GKD, arXiv:2306.13649).

PPO: an action is a token, a state its prefix. The reward of token t is -kl_coef * (log pi_old - log pi_ref); the last
token also gets the score of the completion. Values come from a linear head on the policy's trunk or from a model of
their own, advantages from GAE.

GRPO: several rollouts of one task are each other's baseline, so there are no values to learn.

Old log-probabilities are the engine's, which belong to the distribution the tokens were drawn from, or with a
correction for the difference between engine and trainer the trainer's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rollout_core.algorithms.advantages import Groups, deviation, gae, group_advantages, masked_whiten
from rollout_core.algorithms.context import OwnLossFunction
from rollout_core.algorithms.experience import (
    FirstStep,
    OnPolicyUpdate,
    PolicyBatch,
    completion_forward,
    correct,
    correction_figures,
    drawn_entropy,
    importance_weights,
    logprob_differences,
    pass_steps,
    place_among,
    score_completions,
    trained_tokens,
)
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.losses import dpo_loss, mean_of
from rollout_core.algorithms.parallel import world_size
from rollout_core.algorithms.policy import Policy, Teacher
from rollout_core.algorithms.policy_losses import grpo_loss, ppo_policy_loss, ppo_value_loss
from rollout_core.algorithms.turn_credit import EpisodeTurns, compared_episodes, episode_gae
from rollout_core.base.errors import Fatal
from rollout_core.config import AdaptiveKL, GKDSettings, GRPOSettings, OnlineDPOSettings, PPOSettings
from rollout_core.data.packing import pack_completions


class KLController:
    """Adaptive KL coefficient: ``coef *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon`` (arXiv:1909.08593, 2.2)."""

    def __init__(self, config: AdaptiveKL, coef: float | None = None) -> None:
        self._config = config
        self.coef = config.init_coef if coef is None else coef

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """React to the mean KL (nats per sequence) of ``num_sequences`` fresh sequences."""
        if self._config.adaptive:
            error = min(max(mean_kl / self._config.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * num_sequences / self._config.horizon


def assign_credit(
    policy: nn.Module,
    reference: nn.Module,
    batch: PolicyBatch,
    settings: PPOSettings,
    *,
    kl_coef: float,
    device: torch.device,
    first_step: int = 0,
    seed: int = 0,
    turns: EpisodeTurns | None = None,
) -> tuple[PolicyBatch, dict[str, float], float]:
    """Score, penalise and discount: ``batch`` with columns advantages, returns, old_values. No gradient.

    Also returns the batch's figures by the usual names, and its KL to the reference in nats per sequence.
    ``first_step`` and ``seed`` are the update's: it is scored in the minibatches of its first pass. ``turns``: where
    credit goes by turn, of the episodes that the trajectories are.
    """
    groups = Groups.of_neighbours(len(batch.mask), 1)
    minibatches = list(chain(*pass_steps(batch, groups, settings, seed=seed, epoch=first_step)))
    options = {"temperature": settings.sampling.temperature, "device": device}
    own = score_completions(policy, batch, minibatches, **options)
    ref_logprobs = score_completions(reference, batch, minibatches, **options).logprobs
    assert own.values is not None, "a PPO policy has a value head"
    mask, engine_logprobs = batch.mask, batch.columns["old_logprobs"]
    old_logprobs = engine_logprobs if settings.correction is None else own.logprobs
    log_ratio = (old_logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    mean_kl = float(log_ratio.sum(1).mean())
    if not math.isfinite(mean_kl):
        raise Fatal(f"KL to the reference policy is {mean_kl}; log-probabilities of one of the two are not finite")
    old_values = own.values.masked_fill(~mask, 0.0)
    if turns is None:
        advantages, returns = _written_token_gae(-kl_coef * log_ratio, old_values, mask, batch.scores, settings)
    else:
        outcomes = turns.groups.of_rollouts(batch.scores)
        discount = {"gamma": settings.gamma, "lam": settings.lam}
        advantages, returns = episode_gae(-kl_coef * log_ratio, old_values, mask, turns, outcomes, **discount)
    if settings.whiten_advantages:
        advantages = masked_whiten(advantages, mask & batch.scored[:, None])
    columns = {"returns": returns, "old_values": old_values, "old_logprobs": old_logprobs}
    if settings.own_loss is not None:
        columns["ref_logprobs"] = ref_logprobs
    if settings.correction is not None:
        advantages = advantages * importance_weights(own.logprobs, engine_logprobs, mask, settings.correction)
    advantages = batch.weighed(advantages)
    figures = {
        **batch.figures(),
        **({} if turns is None else turns.figures()),
        **logprob_differences(own.logprobs, engine_logprobs, mask),
        "objective/kl": mean_kl,
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": float((-kl_coef * log_ratio).sum(1).mean()),
        "entropy": float(drawn_entropy(own.logprobs, mask)),
    }
    return batch.with_columns(advantages=advantages, **columns), figures, mean_kl


def _written_token_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, scores: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor]:
    """`gae` over the written tokens alone, the last of which also earns the score; [N,C], scores [N].

    What an agent's model was given between its turns is the environment's answer: no action, and so no step.
    """
    order = mask.sort(dim=1, descending=True, stable=True).indices
    rewards, values, mask = (tensor.gather(1, order) for tensor in (rewards, values, mask))
    rewards[torch.arange(len(rewards)), mask.sum(1) - 1] += scores
    advantages, returns = gae(rewards, values, mask, gamma=settings.gamma, lam=settings.lam)
    back = order.argsort(dim=1)
    return advantages.gather(1, back), returns.gather(1, back)


class PPO(OnPolicyUpdate[PPOSettings]):
    """`Algorithm` of one update, over a batch that `assign_credit` has completed."""

    name = "ppo"

    def loss(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> MinibatchLoss:
        settings, device = self._settings, self._device
        output = completion_forward(
            self._policy,
            batch,
            temperature=settings.sampling.temperature,
            device=device,
            entropy=bool(settings.entropy_coef),
        )
        assert output.values is not None, "a PPO policy has a value head"
        mask = self._trained(batch).to(device)
        policy = ppo_policy_loss(
            output.logprobs,
            batch.column("old_logprobs", device),
            batch.column("advantages", device),
            mask,
            clip=settings.clip,
            dual_clip=settings.dual_clip,
            loss=self._own_loss,
            ref_logprobs=None if self._own_loss is None else batch.column("ref_logprobs", device),
        )
        value = ppo_value_loss(
            output.values,
            batch.column("old_values", device),
            batch.column("returns", device),
            mask,
            clip=settings.value_clip,
        )
        tokens = int(mask.sum())
        total = policy.loss + settings.value_coef * value.loss
        if settings.entropy_coef:
            total = total - settings.entropy_coef * (output.entropy * mask).sum() / max(1, tokens)
        return MinibatchLoss(
            # The losses are means over this minibatch; the step's denominator is its tokens over all minibatches.
            self._token_share(batch, step_batches) * total,
            {
                "policy_loss": (policy.loss, tokens),
                "value_loss": (value.loss, tokens),
                "clip_ratio/policy": (policy.clip_fraction, tokens),
                **({"clip_ratio/dual": (policy.clip_fraction_dual, tokens)} if settings.dual_clip else {}),
                "clip_ratio/value": (value.clip_fraction, tokens),
                "approx_kl": (policy.approx_kl, tokens),
            },
        )


class GKD(OnPolicyUpdate[GKDSettings]):
    """`Algorithm` of one update by on-policy distillation: the divergence from a teacher at the tokens that the student
    wrote, a mean over those of a step (arXiv:2306.13649, algorithm 1 with lambda = 1)."""

    name = "grpo"

    def __init__(
        self, policy: Policy, teacher: Teacher, batch: PolicyBatch, settings: GKDSettings, **options: Any
    ) -> None:
        # Rewards are looked at only: one that abstains keeps nothing from being learned.
        batch = replace(batch, scored=torch.ones_like(batch.scored))
        super().__init__(policy, batch, settings, **options)
        self._teacher = teacher

    def loss(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> MinibatchLoss:
        packed = pack_completions(batch.prompts, batch.completions).to(self._device)
        trained = self._trained(batch).to(self._device)[packed.rows, packed.columns].float()
        tokens, total = int(trained.sum()), sum(int(self._trained(other).sum()) for other in step_batches)
        found = self._policy(packed, distill=self._teacher.target(packed, trained / max(1, total)))

        def mean(values: Tensor) -> tuple[Tensor, float]:
            return (trained * values).sum() / max(1, tokens), tokens

        return MinibatchLoss(
            found.loss,
            {
                "divergence": mean(found.divergence),
                "entropy": mean(-found.logprobs),
                "mean_token_accuracy": mean(found.is_best),
            },
        )


_EPS = 1e-4


@dataclass(frozen=True)
class RewardParts:
    """Rewards of R rollouts before they are summed."""

    names: Sequence[str]
    weights: Tensor
    """[K] float32."""
    values: Tensor
    """[R,K] float32; NaN where a part abstained."""

    def figures(self) -> dict[str, float]:
        """Mean and deviation of each part, before it is weighed, over the rollouts that it answered for."""
        answers = {name: values[~values.isnan()] for name, values in zip(self.names, self.values.T, strict=True)}
        answers = {name: values for name, values in answers.items() if len(values)}
        means = {f"rewards/{name}/mean": float(values.mean()) for name, values in answers.items()}
        stds = {name: float(deviation(values)) if len(values) > 1 else 0.0 for name, values in answers.items()}
        return means | {f"rewards/{name}/std": std for name, std in stds.items()}

    def summed(self, columns: Tensor) -> Tensor:
        """[R,K], such as ``values``, to [R]: the weighted sum. Where parts abstained the others count so much more that
        the weights, by their absolute values, sum to what they all do."""
        answered = ~self.values.isnan()
        if answered.all():
            return columns @ self.weights
        sizes = self.weights.abs()
        share = (sizes * answered).sum(1) / sizes.sum()
        sums = (columns * self.weights).masked_fill(~answered, 0.0).sum(1)
        return torch.where(share > 0, sums / share, 0.0)


def scaled_advantages(
    scores: Tensor, settings: GRPOSettings, parts: RewardParts | None = None, counted: Tensor | None = None
) -> Tensor:
    """[R] to [R]: each score less its baseline, over the deviation (ddof 1) of the group, the batch or none.
    ``counted``: [R] bool, True = has a score (default: all); the others are compared with none and get 0.

    With ``parts`` each of them is compared by itself, over its own deviation in the group, and their weighted sum is
    the advantage: GDPO, arXiv:2601.05242. What the scores hold besides, such as penalties of length, is added as it is,
    less its group's mean; ``batch`` then divides by the deviation of these advantages.
    """
    scaling = settings.advantage_scaling
    counted = torch.ones_like(scores, dtype=torch.bool) if counted is None else counted
    options: dict[str, Any] = {"leave_one_out": settings.baseline == "leave_one_out", "eps": _EPS}
    size = settings.samples_per_prompt
    advantages = scores
    if parts is not None:
        columns = parts.values.T
        each = [group_advantages(values, size, counted=counted & ~values.isnan(), **options) for values in columns]
        rest = scores - parts.summed(parts.values)
        advantages = parts.summed(torch.stack(each, 1))
        advantages = advantages + group_advantages(rest, size, counted=counted, normalize=False, **options)
        # What is left of equal rewards is but how their sum was rounded.
        alike = torch.stack([_are_alike(values, size, counted) for values in (scores, *columns)]).all(0)
        advantages = advantages.masked_fill(alike.repeat_interleave(size), 0.0)
    elif settings.baseline != "none":
        advantages = group_advantages(scores, size, counted=counted, normalize=scaling == "group", **options)
    if scaling == "batch":
        advantages = advantages / (deviation((scores if parts is None else advantages)[counted]) + _EPS)
    return advantages.masked_fill(~counted, 0.0)


def _are_alike(values: Tensor, group_size: int, counted: Tensor) -> Tensor:
    """[R] to [R / group_size] bool: whether what is counted of a group, and is not NaN, is all equal."""
    out = ~counted | values.isnan()
    low, high = values.masked_fill(out, torch.inf), values.masked_fill(out, -torch.inf)
    return low.view(-1, group_size).amin(1) >= high.view(-1, group_size).amax(1)


def turn_advantages(returns: Tensor, reached: Tensor, settings: GRPOSettings) -> Tensor:
    """[R,K] to [R,K]: of each turn that an episode has ``reached`` its return less its baseline, scaled; else 0.

    With ``turn_baseline = "turn"`` a turn is compared with the same turn of the group's other episodes that have one,
    as `scaled_advantages` compares scores; one that no other episode has gets 0. With ``"episodes"``:
    `compared_episodes`; ``batch`` then divides by the deviation of the returns of the whole batch, of which every
    episode counts alike.
    """
    if settings.turn_baseline == "turn":
        columns = zip(returns.T, reached.T, strict=True)
        return torch.stack([scaled_advantages(found, settings, None, counted) for found, counted in columns], 1)
    advantages = compared_episodes(
        returns,
        reached,
        settings.samples_per_prompt,
        normalize=settings.advantage_scaling == "group",
        leave_one_out=settings.baseline == "leave_one_out",
        eps=_EPS,
    )
    if settings.advantage_scaling == "batch":
        counts = reached.sum(1)
        mean = (returns.sum(1) / counts).mean()
        squares = ((returns - mean) ** 2).masked_fill(~reached, 0.0).sum(1) / counts
        advantages = advantages / ((squares.sum() / max(1, len(returns) - 1)).sqrt() + _EPS)
    return advantages


def _token_advantages(
    scores: Tensor,
    groups: Groups,
    mask: Tensor,
    settings: GRPOSettings,
    penalty: Tensor | None,
    parts: RewardParts | None = None,
    counted: Tensor | None = None,
    turns: EpisodeTurns | None = None,
) -> Tensor:
    """[R] scores of rollouts, of those that are ``counted`` [R], to [N,C]; ``penalty`` [N,C] is taken off the reward of
    the token it belongs to. With ``turns`` a token has its turn's advantage, and scores are what whole episodes earned
    besides.

    Where completions are compared, a completion is one action with the sum of its penalties (RLOO, arXiv:2402.14740);
    without a baseline a token has its own and those of the tokens after it (REINFORCE++, arXiv:2501.03262).
    """
    compared = settings.baseline != "none"
    if penalty is not None and compared:
        scores = scores - groups.summed(penalty.sum(1))
    if counted is not None:
        mask = mask & groups.of_trajectories(counted)[:, None]
    if turns is None:
        of_rows = groups.of_trajectories(scaled_advantages(scores, settings, parts, counted))
        advantages = of_rows[:, None].expand(mask.shape)
    else:
        returns = turns.returns(scores, gamma=settings.gamma)
        advantages = turns.of_tokens(turn_advantages(returns, turns.reached, settings), mask)
    if penalty is not None and not compared:
        advantages = advantages - penalty.flip(1).cumsum(1).flip(1)
    advantages = advantages.masked_fill(~mask, 0.0)
    return masked_whiten(advantages, mask) if settings.advantage_scaling == "whiten" else advantages


def compare_groups(
    policy: nn.Module,
    reference: nn.Module | None,
    batch: PolicyBatch,
    settings: GRPOSettings,
    *,
    device: torch.device,
    groups: Groups | None = None,
    parts: RewardParts | None = None,
    corrects: bool = True,
    first_step: int = 0,
    seed: int = 0,
    turns: EpisodeTurns | None = None,
) -> tuple[PolicyBatch, dict[str, float]]:
    """``batch`` with the columns GRPO needs, and its figures by the usual names. No gradient.

    The policy itself is run only for the importance correction, which is left to a `FirstStep` unless ``corrects``; the
    reference only for a KL term.
    ``first_step`` and ``seed`` are the update's: it is scored in the minibatches of its first pass. By default every
    row is a rollout, and ``samples_per_prompt`` neighbours are a group. ``turns``: of these rollouts, where credit goes
    by turn.
    """
    groups = groups or Groups.of_neighbours(len(batch.mask), settings.samples_per_prompt)
    minibatches = list(chain(*pass_steps(batch, groups, settings, seed=seed, epoch=first_step)))
    options = {"temperature": settings.sampling.temperature, "device": device}
    mask, engine_logprobs = batch.mask, batch.columns["old_logprobs"]
    scores, counted = groups.of_rollouts(batch.scores), groups.of_rollouts(batch.scored.float()) > 0
    figures = batch.figures() | ({"reward": float(scores[counted].mean())} if counted.any() else {})
    columns, own, penalty = {}, None, None
    known = parts, counted, turns
    batch = replace(batch, learned=_learned(batch, groups, settings, scores, *known))
    if settings.correction is not None and corrects:
        own = score_completions(policy, batch, minibatches, **options).logprobs
    if reference is not None:
        columns["ref_logprobs"] = score_completions(reference, batch, minibatches, **options).logprobs
    if reference is not None and (settings.kl_in == "reward" or settings.guards.max_kl is not None):
        old_logprobs = engine_logprobs if own is None else own
        log_ratio = (old_logprobs - columns["ref_logprobs"]).masked_fill(~mask, 0.0)
        figures["objective/kl"] = float(log_ratio.sum(1).mean())
        penalty = settings.kl_coef * log_ratio if settings.kl_in == "reward" else None
    advantages = _token_advantages(scores, groups, mask, settings, penalty, *known)
    figures |= {} if turns is None else turns.figures()
    figures |= (parts.figures() if parts is not None else {}) | _spread(scores, counted, settings)
    compared = batch.with_columns(advantages=advantages, **columns)
    if own is not None and settings.correction is not None:
        corrected, weights = correct(compared, own, settings.correction)
        return corrected, figures | correction_figures(batch, own, weights)
    return (compared.with_columns(advantages=batch.weighed(advantages)) if corrects else compared), figures


def _learned(
    batch: PolicyBatch,
    groups: Groups,
    settings: GRPOSettings,
    scores: Tensor,
    parts: RewardParts | None,
    counted: Tensor,
    turns: EpisodeTurns | None,
) -> Tensor | None:
    """[N] bool, True = something of the trajectory's group is learned: an advantage is not 0, at a token that counts in
    the loss. None: of all, as divergence from a reference and entropy are there for every token, and a loss of the
    user's own may be.

    Groups stay whole, for a prompt is computed once for all its completions. Several processes run the same passes, so
    these compute all with a gradient, which is then 0 for some.
    """
    if settings.kl_coef or settings.entropy_coef or settings.own_loss is not None or world_size() > 1:
        return None
    advantages = _token_advantages(scores, groups, batch.mask, settings, None, parts, counted, turns)
    counts = (trained_tokens(batch, settings) & (advantages != 0)).any(1)
    learned = torch.zeros_like(counts)
    for rows in groups.rows:
        learned[rows] = counts[rows].any()
    return learned


def _spread(scores: Tensor, counted: Tensor, settings: GRPOSettings | OnlineDPOSettings) -> dict[str, float]:
    """How far the scores of a group are apart, and the share of groups that teach nothing: all their scores are equal,
    or fewer than two are counted."""
    size = settings.samples_per_prompt
    if size < 2:
        return {}
    alike = _are_alike(scores, size, counted)
    groups = zip(scores.view(-1, size), counted.view(-1, size), strict=True)
    deviations = [deviation(scores_G[counts_G]) for scores_G, counts_G in groups if counts_G.sum() > 1]
    mean = float(torch.stack(deviations).mean()) if deviations else 0.0
    return {"reward_std": mean, "frac_reward_zero_std": float(alike.float().mean())}


def best_and_worst(
    reference: nn.Module, batch: PolicyBatch, settings: OnlineDPOSettings, *, device: torch.device, **options: Any
) -> tuple[PolicyBatch, dict[str, float]]:
    """Of each group the completion of the highest score and that of the lowest, as neighbours, with the column
    ``ref_logprobs``; and the figures of the whole batch. Of equal scores the first counts, of completions without a
    score none. No gradient.

    ``options``: ``first_step`` and ``seed`` of the update.
    """
    size = settings.samples_per_prompt
    low, high = (batch.scores.masked_fill(~batch.scored, worst).view(-1, size) for worst in (torch.inf, -torch.inf))
    ends = torch.stack([high.argmax(1), low.argmin(1)], 1) + size * torch.arange(len(low))[:, None]
    pairs = batch.rows(ends.flatten().tolist())
    algorithm = OnlineDPO(None, pairs, settings, device=device, **options)
    temperature = settings.sampling.temperature
    ref_logprobs = score_completions(
        reference, pairs, algorithm.first_pass(), temperature=temperature, device=device
    ).logprobs
    figures = batch.figures() | _spread(batch.scores, batch.scored, settings)
    return pairs.with_columns(ref_logprobs=ref_logprobs), figures


class OnlineDPO(OnPolicyUpdate[OnlineDPOSettings]):
    """`Algorithm` of one update by online DPO (arXiv:2402.04792): DPO on the best and the worst completion of each
    prompt, over a batch that `best_and_worst` has made. The loss of a step is the mean over its pairs.

    Pairs of equal scores do not count, nor those with a completion that has no score, nor with ``truncated = "mask"``
    those with one that was cut.
    """

    name = "grpo"

    def __init__(self, policy: Any, batch: PolicyBatch, settings: OnlineDPOSettings, **options: Any) -> None:
        self._beta = settings.beta
        # A minibatch of so many pairs has twice as many rows.
        settings = settings.model_copy(update={"minibatch_size": 2 * settings.minibatch_size})
        super().__init__(policy, batch, settings, groups=Groups.of_neighbours(len(batch.mask), 2), **options)

    def first_pass(self) -> list[list[int]]:
        """Rows of every minibatch of the first pass, in which a reference is best computed."""
        steps = pass_steps(self._batch, self._groups, self._settings, seed=self._seed, epoch=self._first_step)
        return list(chain(*steps))

    def _counted(self, batch: PolicyBatch) -> Tensor:
        """[P] bool."""
        chosen, rejected = batch.scores.view(-1, 2).T
        return (chosen > rejected) & self._trained(batch).any(1).view(-1, 2).all(1)

    def loss(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> MinibatchLoss:
        temperature = self._settings.sampling.temperature
        output = completion_forward(self._policy, batch, temperature=temperature, device=self._device)
        mask, counted = batch.mask.to(self._device), self._counted(batch).to(self._device)
        policy, ref = (
            (logprobs * mask).sum(1).view(-1, 2)[counted]
            for logprobs in (output.logprobs, batch.column("ref_logprobs", self._device))
        )
        pairs, total = len(policy), sum(int(self._counted(other).sum()) for other in step_batches)
        if self._own_loss is None:
            loss = dpo_loss(*policy.T, *ref.T, beta=self._beta)
        else:
            loss = mean_of(self._own_loss(*policy.T, *ref.T))
        chosen, rejected = (self._beta * (policy - ref)).detach().T
        figures = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": policy[:, 0].detach(),
            "logps/rejected": policy[:, 1].detach(),
        }
        means: dict[str, Any] = {name: (mean_of(values), pairs) for name, values in figures.items()}
        means["entropy"] = drawn_entropy(output.logprobs, mask), batch.num_actions
        return MinibatchLoss(pairs / max(1, total) * loss, means)


class GRPO(OnPolicyUpdate[GRPOSettings]):
    """`Algorithm` of one update, over a batch that `compare_groups` has completed."""

    name = "grpo"

    def __init__(
        self,
        policy: Policy,
        batch: PolicyBatch,
        settings: GRPOSettings,
        *,
        first_step: int,
        seed: int,
        device: torch.device,
        groups: Groups | None = None,
        parts: int = 1,
        corrects: bool = False,
        own_loss: OwnLossFunction | None = None,
    ) -> None:
        """parts: so many minibatches that follow each other were one before several processes shared them. corrects:
        whether the first step makes up for what `compare_groups` has not (see `FirstStep`); collective then."""
        groups = groups or Groups.of_neighbours(len(batch.mask), settings.samples_per_prompt)
        options = {"first_step": first_step, "seed": seed, "device": device, "own_loss": own_loss}
        super().__init__(policy, batch, settings, groups=groups, **options)
        self._parts = parts
        self._correcting: FirstStep | None = None
        self._figures: dict[str, float] = {}
        if corrects and settings.correction is not None:
            steps = pass_steps(batch, self._groups, settings, seed=seed, epoch=first_step)
            options = {"temperature": settings.sampling.temperature, "device": device}
            self._correcting = FirstStep(policy, batch, steps, settings.correction, **options)

    def minibatches(self, step: int) -> list[PolicyBatch]:
        if step > self._first_step:
            self.end_first_step()
        batches = super().minibatches(step)
        if any(batch.learned is None or batch.learned.any() for batch in batches):
            return batches
        # The optimizer's moments move weights in such a step too, which takes gradients, all 0.
        return [replace(batch, learned=None) for batch in batches]

    def end_first_step(self) -> dict[str, float]:
        """Correct the whole batch by what the first step found, if it was to, and give `correction_figures`."""
        if self._correcting is not None:
            self._batch, self._figures = self._correcting.end()
            self._correcting = None
        return self._figures

    def loss(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> MinibatchLoss:
        settings, device = self._settings, self._device
        output = completion_forward(
            self._policy,
            batch,
            temperature=settings.sampling.temperature,
            device=device,
            entropy=bool(settings.entropy_coef),
        )
        share = self._share(batch, step_batches)
        if self._correcting is not None:
            batch = self._correcting.corrected(place_among(step_batches, batch), batch, output.logprobs)
        mask = self._trained(batch).to(device)
        old_logprobs = batch.column("old_logprobs", device)
        loss: Any = self._own_loss or settings.loss
        found = grpo_loss(
            output.logprobs,
            old_logprobs,
            batch.column("advantages", device),
            mask,
            ref_logprobs=batch.column("ref_logprobs", device) if settings.kl_coef else None,
            beta=settings.kl_coef if settings.kl_in == "loss" else 0.0,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            loss=loss,
            loss_type=settings.loss_type,
            entropy=output.entropy if settings.entropy_coef else None,
            entropy_coef=settings.entropy_coef,
            dual_clip=settings.dual_clip,
            max_completion_length=settings.sampling.max_tokens,
        )
        tokens = int(mask.sum())
        differences = (output.logprobs.detach() - old_logprobs).abs().masked_fill(~mask, 0.0)
        return MinibatchLoss(
            share * found.loss,
            {
                "clip_ratio/low_mean": (found.clip_fraction_low, tokens),
                "clip_ratio/high_mean": (found.clip_fraction_high, tokens),
                "clip_ratio/region_mean": (found.clip_fraction, tokens),
                **({"clip_ratio/dual_mean": (found.clip_fraction_dual, tokens)} if settings.dual_clip else {}),
                **({"kl": (found.kl, tokens)} if settings.kl_coef else {}),
                "approx_kl": (found.approx_kl, tokens),
                "entropy": (drawn_entropy(output.logprobs, batch.mask.to(device)), batch.num_actions),
                # On a batch's first step the weights are the engine's, so there this is what the two disagree by.
                "sampling/logprob_difference": (differences.sum() / max(1, tokens), tokens),
            },
            learned=batch.learned is None or bool(batch.learned.any()),
        )

    def _share(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> float:
        """Weight of a minibatch's own mean, so that the sum over a step is the loss of the whole (bnpo: the mean)."""
        if self._settings.loss_type == "bnpo":
            place = place_among(step_batches, batch)
            first = place - place % self._parts
            minibatches = math.ceil(len(step_batches) / self._parts)
            return self._token_share(batch, step_batches[first : first + self._parts]) / minibatches
        if self._settings.loss_type == "dapo":
            return self._token_share(batch, step_batches)
        return len(batch.mask) / sum(len(other.mask) for other in step_batches)
