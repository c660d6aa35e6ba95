"""What on-policy learners learn from: prompts, the engine's completions with its log-probabilities, and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rollout_core.algorithms.advantages import Groups, deviation
from rollout_core.algorithms.context import OwnLossFunction
from rollout_core.algorithms.loop import MinibatchLoss
from rollout_core.algorithms.parallel import all_reduce_sum, data_ranks, split_across_ranks, token_microbatches
from rollout_core.algorithms.policy import Policy
from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.config import ImportanceCorrection, OnPolicySettings
from rollout_core.config.on_policy import RewardedSettings
from rollout_core.data.advantage_rows import encode_advantages
from rollout_core.data.examples import epoch_order
from rollout_core.data.packing import pack_completions

SettingsT = TypeVar("SettingsT", bound=OnPolicySettings)
REPLAY_WEIGHTS = "replay_weights"
"""Column of a batch: what advantages count, where some are replayed."""


@dataclass(frozen=True)
class Trajectory:
    """A prompt, what the engine made of it, and its score."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each generated token under the distribution it was drawn from, nats."""
    score: float | None
    """None where the reward abstained: it is not learned from, nor compared with others."""
    truncated: bool
    """Cut at the length limit instead of ended by the policy."""
    written: Sequence[Sequence[int]] | None = None
    """First token and one past the last of each part of ``token_ids`` that the policy wrote; None: all of it. Between
    them stands what it was given: later turns of a conversation."""
    weight: float = 1.0
    """What its advantages count; below 1 where it is replayed more often than others."""


@dataclass(frozen=True)
class PolicyBatch:
    """N trajectories; tensors are right-padded to C, the longest completion."""

    prompts: tuple[Sequence[int], ...]
    completions: tuple[Sequence[int], ...]
    mask: Tensor
    """[N,C] bool, True = completion token that the policy wrote."""
    scores: Tensor
    """[N] float32: what the policy is rewarded for the whole completion; 0 where it has no score."""
    scored: Tensor
    """[N] bool, True = has a score. The others count in no mean and no loss."""
    truncated: Tensor
    """[N] bool, True = cut at the length limit."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N,C] float32 by name, 0 outside the mask: ``old_logprobs`` and what a learner adds."""
    learned: Tensor | None = None
    """[N] bool, True = the loss may have a gradient through this trajectory; None: through all. The others are computed
    without one."""

    def rows(self, index: Sequence[int], *, width: int | None = None) -> PolicyBatch:
        """The given trajectories, padded to ``width`` or as little as they need."""
        chosen = torch.as_tensor(index)
        width = width or max(len(self.completions[row]) for row in index)
        return PolicyBatch(
            tuple(self.prompts[row] for row in index),
            tuple(self.completions[row] for row in index),
            self.mask[chosen, :width],
            self.scores[chosen],
            self.scored[chosen],
            self.truncated[chosen],
            {name: column[chosen, :width] for name, column in self.columns.items()},
            None if self.learned is None else self.learned[chosen],
        )

    def with_columns(self, **columns: Tensor) -> PolicyBatch:
        """The same with further columns, [N,C] each."""
        return replace(self, columns={**self.columns, **columns})

    def column(self, name: str, device: torch.device) -> Tensor:
        """One column, where it is computed with."""
        return self.columns[name].to(device)

    def weighed(self, advantages: Tensor) -> Tensor:
        """[N,C]: advantages with what they count in a batch that holds replayed completions."""
        weights = self.columns.get(REPLAY_WEIGHTS)
        return advantages if weights is None else advantages * weights

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))

    @property
    def num_actions(self) -> int:
        """Completion tokens that the policy wrote."""
        return int(self.mask.sum())

    def figures(self) -> dict[str, float]:
        """Means over the batch by the usual names; those of rewards over completions that have one."""
        lengths, scores = self.mask.sum(1).float(), self.scores[self.scored]
        return {
            "reward": float(scores.mean()) if len(scores) else 0.0,
            "reward_std": float(deviation(scores)) if len(scores) > 1 else 0.0,
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(self.truncated.float().mean()),
        }


def soft_overlong(length: int, max_length: int, cache: int) -> float:
    """Reward for the length of a completion, between 0 and -1.

    0 up to max_length - cache tokens, then (max_length - cache - length) / cache, which is -1 at ``max_length`` and
    stays so beyond; DAPO, arXiv:2503.14476, eq. 13.
    """
    return min(0.0, max(-1.0, (max_length - cache - length) / cache))


def punish_overlong(trajectories: Sequence[Trajectory], settings: RewardedSettings) -> list[Trajectory]:
    """The same, with what ``settings.overlong`` takes off the score of those that come near the length limit."""
    overlong = settings.overlong
    if overlong is None:
        return list(trajectories)
    limit = overlong.max_length or settings.sampling.max_tokens

    def penalty(item: Trajectory) -> float:
        length = sum(stop - start for start, stop in written_parts(item))
        return overlong.penalty * soft_overlong(length, limit, overlong.cache)

    return [item if item.score is None else replace(item, score=item.score + penalty(item)) for item in trajectories]


def build_batch(trajectories: Sequence[Trajectory], *, missing_eos_penalty: float = 0.0) -> PolicyBatch:
    """Trajectories as tensors; a truncated one's score is lowered by ``missing_eos_penalty``, where it has one.

    Raises ConfigError for written parts that are empty, overlap or lie outside a completion.
    """
    mask = torch.zeros(len(trajectories), max(len(item.token_ids) for item in trajectories), dtype=torch.bool)
    old_logprobs = torch.zeros(mask.shape)
    for row, item in enumerate(trajectories):
        for start, stop in written_parts(item):
            mask[row, start:stop] = True
            old_logprobs[row, start:stop] = torch.tensor(item.logprobs[start:stop], dtype=torch.float32)
    columns = {"old_logprobs": old_logprobs}
    if any(item.weight != 1.0 for item in trajectories):
        columns[REPLAY_WEIGHTS] = torch.tensor([item.weight for item in trajectories])[:, None] * mask
    return PolicyBatch(
        tuple(item.prompt_token_ids for item in trajectories),
        tuple(item.token_ids for item in trajectories),
        mask,
        torch.tensor([_score(item, missing_eos_penalty) for item in trajectories]).float(),
        torch.tensor([item.score is not None for item in trajectories]),
        torch.tensor([item.truncated for item in trajectories]),
        columns,
    )


def _score(item: Trajectory, missing_eos_penalty: float) -> float:
    return 0.0 if item.score is None else item.score - missing_eos_penalty * item.truncated


def written_parts(item: Trajectory) -> Sequence[Sequence[int]]:
    """First token and one past the last of each part that the policy wrote. Raises as `build_batch` does."""
    length = len(item.token_ids)
    if item.written is None:
        return [(0, length)]
    places = [place for part in item.written for place in part]
    is_rising = all(start < stop for start, stop in item.written) and places == sorted(places)
    if not places or not is_rising or places[0] < 0 or places[-1] > length:
        raise ConfigError(
            f"a completion of {length} tokens has the written parts {list(item.written)}; expected ranges in order, "
            f"from a first token to one past the last, within 0 and {length}"
        )
    return item.written


@dataclass(frozen=True)
class CompletionOutput:
    """What one forward pass says of a batch's completion tokens; all [N,C] float32, 0 where no token stands."""

    logprobs: Tensor
    entropy: Tensor
    """Zeros unless asked for: it takes another pass over all logits."""
    values: Tensor | None = None


def completion_forward(
    policy: nn.Module, batch: PolicyBatch, *, temperature: float, device: torch.device, entropy: bool = False
) -> CompletionOutput:
    """Log-probabilities and, where asked for, entropies (after temperature, nats) and state values of every completion
    token; without gradient for those trajectories of which nothing is learned."""
    if batch.learned is not None and not batch.learned.all():
        return _two_forwards(policy, batch, batch.learned, temperature=temperature, device=device, entropy=entropy)
    tokens = pack_completions(batch.prompts, batch.completions).to(device)
    found = policy(tokens, temperature=temperature, entropy=entropy)
    values = None if found.values is None else tokens.padded(found.values)
    return CompletionOutput(tokens.padded(found.logprobs), tokens.padded(found.entropy), values)


def _two_forwards(policy: nn.Module, batch: PolicyBatch, learned: Tensor, **options: Any) -> CompletionOutput:
    """`completion_forward` of trajectories with a gradient and of those without, as of one batch."""
    learns = torch.is_grad_enabled()
    places, outputs = [], []
    for of_part, with_gradient in ((learned, learns), (~learned, False)):
        rows = of_part.nonzero().flatten().tolist()
        if rows:
            with torch.set_grad_enabled(with_gradient):
                outputs.append(completion_forward(policy, replace(batch.rows(rows), learned=None), **options))
            places += rows
    order, width = torch.tensor(places).argsort().to(options["device"]), batch.mask.shape[1]

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])[order]

    values = [output.values for output in outputs if output.values is not None]
    return CompletionOutput(
        joined([output.logprobs for output in outputs]),
        joined([output.entropy for output in outputs]),
        joined(values) if values else None,
    )


class CompletionScores(NamedTuple):
    """What a policy says of all completions of a batch; [N,C] float32, 0 where no token stands, on the CPU."""

    logprobs: Tensor
    values: Tensor | None


@torch.no_grad()
def score_completions(
    policy: nn.Module,
    batch: PolicyBatch,
    minibatches: Sequence[Sequence[int]],
    *,
    temperature: float,
    device: torch.device,
) -> CompletionScores:
    """`completion_forward` of every row, in ``minibatches`` of rows, without gradient. Collective.

    Last bits of a number depend on what it is computed with, in bfloat16 its third digit. So old log-probabilities
    and values, which a loss is to compare with its own, are wanted in the minibatches and the autocast of that loss.
    """
    parts: dict[str, Tensor] = {}
    for rows, counts in split_across_ranks(minibatches):
        found = completion_forward(policy, batch.rows(rows), temperature=temperature, device=device)
        for name, values in (("logprobs", found.logprobs), ("values", found.values)):
            if values is not None:
                whole = parts.setdefault(name, torch.zeros(batch.mask.shape))
                if counts:
                    whole[torch.as_tensor(rows), : values.shape[1]] = values.float().cpu()
    summed = {name: all_reduce_sum(whole.to(device)).cpu() for name, whole in parts.items()}
    return CompletionScores(summed["logprobs"], summed.get("values"))


def drawn_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean of -log pi over drawn tokens, nats: without bias the entropy of a policy that drew them; both [N,C]."""
    return -logprobs.detach().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def logprob_differences(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities of the same weights lie from the engine's, nats; all [N,C]."""
    drift = (logprobs - old_logprobs).abs().masked_fill(~mask, 0.0)
    worst = float(drift.max())
    if not math.isfinite(worst):
        raise Fatal("log-probabilities of the engine or the trainer are not finite; nothing can be learned from them")
    return {
        "sampling/logprob_difference_mean": float(drift.sum() / mask.sum()),
        "sampling/logprob_difference_max": worst,
    }


def importance_weights(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, correction: ImportanceCorrection
) -> Tensor:
    """Weights that make up for tokens that another distribution than the trainer's drew: that of the engine, which
    computes in its own way, or of earlier weights; all [N,C] float32.

    w = pi_trainer / pi_engine of each token, or of the whole sequence; ``truncate``: max(floor, min(w, cap)); ``mask``:
    0 where w exceeds cap or falls below floor. Truncated importance sampling as in arXiv:1802.01561, section 4.1, for
    rollout engines; with a correction the trainer's own weights are the centre of the clip range, as in the decoupled
    objective of arXiv:2505.24298, eq. 5.
    """
    log_ratio = (trainer_logprobs - engine_logprobs).masked_fill(~mask, 0.0)
    if correction.level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(-20.0, 20.0).exp()
    if correction.mode == "truncate":
        weights = weights.clamp(min=correction.floor, max=correction.cap)
    else:
        weights = weights.masked_fill((weights > correction.cap) | (weights < correction.floor), 0.0)
    return weights.masked_fill(~mask, 0.0)


def correct(batch: PolicyBatch, own: Tensor, correction: ImportanceCorrection) -> tuple[PolicyBatch, Tensor]:
    """``batch``, whose advantages count as they stand, with the trainer's ``own`` log-probabilities as its old ones and
    advantages that make up for the engine's; and the `importance_weights`; all [N,C] float32."""
    weights = importance_weights(own, batch.columns["old_logprobs"], batch.mask, correction)
    advantages = batch.weighed(batch.columns["advantages"] * weights)
    return batch.with_columns(old_logprobs=own, advantages=advantages), weights


def correction_figures(batch: PolicyBatch, own: Tensor, weights: Tensor) -> dict[str, float]:
    """What a correction of ``batch`` says of engine and trainer; ``own`` and ``weights`` as of `correct`."""
    return {
        **logprob_differences(own, batch.columns["old_logprobs"], batch.mask),
        "sampling/importance_weight_mean": float(weights.sum() / batch.mask.sum()),
    }


class FirstStep:
    """Corrects a batch by the log-probabilities that the update's starting weights give it, without a pass of its own
    over the rows of the first optimizer step: that step's forward passes are by these very weights. Rows of later
    steps, which meet other weights, are scored beforehand.
    """

    def __init__(
        self,
        policy: nn.Module,
        batch: PolicyBatch,
        steps: Sequence[Sequence[Sequence[int]]],
        correction: ImportanceCorrection,
        *,
        temperature: float,
        device: torch.device,
    ) -> None:
        """``steps``: as of `pass_steps`, those of the first pass over ``batch``. Collective."""
        self._batch = batch
        self._correction = correction
        self._device = device
        self._first, *rest = steps
        later = [rows for step in rest for rows in step]
        options = {"temperature": temperature, "device": device}
        self._later = torch.zeros(batch.mask.shape)
        if later:
            self._later = score_completions(policy, batch, later, **options).logprobs
        logprob_differences(self._later, batch.columns["old_logprobs"], batch.mask)  # all ranks see what is not finite
        self._found: dict[int, Tensor] = {}

    def corrected(self, place: int, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """Minibatch ``place`` of the first step, `correct` by what its own forward pass says. Raises Fatal where that
        is not finite."""
        width, whole = logprobs.shape[1], self._batch.mask.shape[1]
        self._found[place] = own = logprobs.detach().float().cpu()
        # As wide as the whole batch: the last bits of a sum over a row depend on how much padding it has.
        rows = self._batch.rows(self._first[place], width=whole)
        logprob_differences(own, batch.columns["old_logprobs"], batch.mask)
        wide = correct(rows, nn.functional.pad(own, (0, whole - width)), self._correction)[0]
        return batch.with_columns(old_logprobs=own, advantages=wide.columns["advantages"][:, :width])

    def end(self) -> tuple[PolicyBatch, dict[str, float]]:
        """After the step: the whole batch, corrected, and the `correction_figures`. Raises Recoverable where the step
        was not taken. Collective."""
        if not self._found:
            raise Recoverable("another process took this update's first step while this one began it; try again")
        own = torch.zeros(self._batch.mask.shape)
        for place, counts in split_across_ranks(range(len(self._first))):
            if counts:
                found = self._found[place]
                own[torch.as_tensor(self._first[place]), : found.shape[1]] = found
        own = all_reduce_sum(own.to(self._device)).cpu() + self._later
        batch, weights = correct(self._batch, own, self._correction)
        return batch, correction_figures(self._batch, own, weights)


def pass_minibatches(groups: Groups, minibatch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Rows of every minibatch of one pass over a batch: groups in an order that follows from seed and epoch.

    Rows of a minibatch that have one prompt stand side by side, so that it is computed once.
    """
    order = [row for group in epoch_order(len(groups.rows), seed=seed, epoch=epoch) for row in groups.rows[group]]
    return [sorted(order[start : start + minibatch_size]) for start in range(0, len(order), minibatch_size)]


def pass_steps(
    batch: PolicyBatch, groups: Groups, settings: OnPolicySettings, *, seed: int, epoch: int
) -> list[list[list[int]]]:
    """Rows of every minibatch of every optimizer step of one pass over ``batch``, cut as ``settings`` say."""
    count = settings.gradient_accumulation
    parts = pass_minibatches(groups, settings.minibatch_size, seed=seed, epoch=epoch)
    steps = [parts[start : start + count] for start in range(0, len(parts), count)]
    max_tokens = settings.max_tokens_per_microbatch
    return steps if max_tokens is None else [_cut_by_tokens(batch, step, max_tokens) for step in steps]


def _cut_by_tokens(batch: PolicyBatch, step: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Rows of one prompt stay together as far as they fit, for the prompt is computed once for all of them."""
    units: list[list[int]] = []
    sizes: list[int] = []
    for row in sorted(row for part in step for row in part):
        prompt, length = batch.prompts[row], len(batch.completions[row])
        if units and batch.prompts[units[-1][-1]] == prompt and sizes[-1] + length <= max_tokens:
            units[-1].append(row)
            sizes[-1] += length
        else:
            units.append([row])
            sizes.append(len(prompt) + length)
    parts = token_microbatches(sizes, max_tokens, data_ranks())
    return [[row for number in part for row in units[number]] for part in parts]


def place_among(batches: Sequence[PolicyBatch], batch: PolicyBatch) -> int:
    """Which of the minibatches of a step this very one is."""
    return next(number for number, other in enumerate(batches) if other is batch)


def trained_tokens(batch: PolicyBatch, settings: OnPolicySettings) -> Tensor:
    """[N,C] bool: completion tokens that count in the loss."""
    counts = batch.scored & ~batch.truncated if settings.truncated == "mask" else batch.scored
    return batch.mask & counts[:, None]


class OnPolicyUpdate(Generic[SettingsT]):
    """The part that algorithms on policy share of `Algorithm`: ``epochs`` passes over one iteration's trajectories.

    The shuffling never tears groups apart.
    """

    def __init__(
        self,
        policy: Policy,
        batch: PolicyBatch,
        settings: SettingsT,
        *,
        first_step: int,
        seed: int,
        device: torch.device,
        groups: Groups | None = None,
        own_loss: OwnLossFunction | None = None,
    ) -> None:
        """own_loss: replaces the algorithm's, as of `UpdateContext`."""
        self._own_loss = own_loss
        self._policy = policy
        self._batch = batch
        self._first_step = first_step
        self._seed = seed
        self._device = device
        self._groups = groups or Groups.of_neighbours(len(batch.mask), 1)
        self._settings = settings
        self._steps_per_epoch = settings.steps_per_epoch(len(batch.mask))
        self.num_steps = first_step + settings.epochs * self._steps_per_epoch

    name: str

    def loss(self, batch: PolicyBatch, step_batches: Sequence[PolicyBatch]) -> MinibatchLoss:
        """As of `Algorithm`."""
        raise NotImplementedError

    def minibatches(self, step: int) -> list[PolicyBatch]:
        epoch, offset = divmod(step - self._first_step, self._steps_per_epoch)
        steps = pass_steps(self._batch, self._groups, self._settings, seed=self._seed, epoch=self._first_step + epoch)
        return [self._batch.rows(part) for part in steps[offset]]

    def _trained(self, batch: PolicyBatch) -> Tensor:
        """[N,C] bool: completion tokens that count in the loss."""
        return trained_tokens(batch, self._settings)

    def end_first_step(self) -> dict[str, float]:
        """Figures that are known once the first optimizer step is done; may be called again. Collective."""
        return {}

    def kept_advantages(self) -> bytes | None:
        """`encode_advantages` of all trajectories, as the loss has them: whitened, with importance weights and what
        replayed ones count. None where it learns without advantages."""
        if "advantages" not in self._batch.columns:
            return None
        advantages, mask = self._batch.columns["advantages"].numpy(), self._batch.mask.numpy()
        trained, lengths = self._trained(self._batch).any(1).tolist(), map(len, self._batch.completions)
        return encode_advantages(
            (advantages[row, :length], mask[row, :length]) if trained[row] else None
            for row, length in enumerate(lengths)
        )

    def _token_share(self, batch: PolicyBatch, batches: Sequence[PolicyBatch]) -> float:
        """Share of ``batch`` in the trained tokens of all ``batches``."""
        total = sum(int(self._trained(other).sum()) for other in batches)
        return int(self._trained(batch).sum()) / max(1, total)

    def num_tokens(self, batch: PolicyBatch) -> int:
        return batch.num_tokens

    def sequences(self, batch: PolicyBatch) -> list[list[int]]:
        return [[*prompt, *rest] for prompt, rest in zip(batch.prompts, batch.completions, strict=True)]
