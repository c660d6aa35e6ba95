"""Settings of the learners that train on completions of the policy itself: PPO and GRPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from rollout_core.config.base import DatasetSource, Settings
from rollout_core.config.inference import SamplingParams
from rollout_core.config.learning import LearnerSettings


class AdaptiveKL(Settings):
    """Controller of the KL coefficient (arXiv:1909.08593, section 2.2)."""

    init_coef: float = Field(default=0.05, ge=0)
    target: float = Field(default=6.0, gt=0)
    """Wished-for KL to the reference policy, nats per sequence; the default is that of the paper's code and of TRL."""
    horizon: int = Field(default=10_000, ge=1)
    """Sequences over which the coefficient reacts."""
    adaptive: bool = True
    """False keeps the coefficient at init_coef."""


class ImportanceCorrection(Settings):
    """Truncated importance sampling for the difference between the distribution that drew the tokens (the engine's, or
    that of earlier weights) and the trainer's."""

    identity_without_default = frozenset({"floor"})

    level: Literal["token", "sequence"] = "token"
    """Whose probability ratio weighs a token: its own, or that of its whole completion."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Ratios above the cap are lowered to it and those below the floor raised to it, or their tokens left out."""
    cap: float = Field(default=2.0, ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)


class OverlongPenalty(Settings):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): a reward falls with each token of the last
    ``cache`` ones before the limit, and by ``penalty`` in all."""

    cache: int = Field(ge=1)
    """Tokens before the limit in which the penalty grows from 0."""
    max_length: int | None = Field(default=None, ge=1)
    """The limit, in tokens that the policy wrote; default: sampling.max_tokens."""
    penalty: float = Field(default=1.0, gt=0)
    """Taken off the reward at the limit and beyond."""


class DynamicSampling(Settings):
    """Groups in which all rewards are alike teach nothing; others are drawn in their place (DAPO, arXiv:2503.14476,
    eq. 11), in further rounds of generation that are stages of their own."""

    max_rounds: int = Field(default=10, ge=1)
    """Rounds of generation in an iteration, the first included. An iteration has so many times
    ``prompts_per_iteration`` places in the order of prompts, and takes as many as it needs."""
    min_spread: float = Field(default=0.0, ge=0)
    """Groups count whose largest reward is above the smallest by more than this."""
    when_short: Literal["stop", "fewer"] = "stop"
    """Where max_rounds are not enough, the run ends, or learns from fewer groups. Without any it ends."""


class StopGuards(Settings):
    """Bounds of what a policy may come to. They are looked at before each update, on the completions that it would
    learn from; where one is passed the run ends, and says what it saw."""

    max_kl: float | None = Field(default=None, gt=0)
    """Mean KL to the starting policy, nats per completion; with GRPO it needs a ``kl_coef``."""
    max_mean_length: float | None = Field(default=None, gt=0)
    """Mean length of completions, tokens."""

    def cache_identity(self) -> Any:
        """They let an update be, or end the run."""
        return None


class OnPolicySettings(LearnerSettings):
    """What learners share that train on completions of the policy itself."""

    identity_without_default = LearnerSettings.identity_without_default | {"overlong", "guards"}

    prompts: DatasetSource
    """Training prompts: ``{prompt}`` or ``{messages}`` a line; other keys reach the reward."""
    iterations: int = Field(default=10, ge=1)
    """Rounds of generate, score, update."""
    prompts_per_iteration: int = Field(default=128, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    sampling: SamplingParams = SamplingParams()
    epochs: int = Field(default=1, ge=1)
    """Passes over each iteration's samples."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a completion cut at max_tokens."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut at max_tokens are trained on like others, or only count where completions are compared: in
    their group's mean, in whitening, in the figures."""
    failed: Literal["stop", "leave_out"] = "stop"
    """A completion that fails for good ends the run, or is left out (with GRPO its whole group) and counted in
    ``completions/num_left_out``. `--resume` counts an iteration by its steps, of which fewer completions may make
    fewer."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The most that the ratio counts where the advantage is negative, which has no other bound there: 3 in
    arXiv:1912.09729. Must be above the clip range."""
    overlong: OverlongPenalty | None = None
    """Lower the reward of completions that come near the length limit."""
    guards: StopGuards = StopGuards()
    """Bounds that end the run."""
    correction: ImportanceCorrection | None = None
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them. On by
    default where samples are drawn ahead of training."""
    async_depth: int = Field(default=0, ge=0)
    """Iterations that samples are drawn ahead of training: those of iteration i are drawn by the weights that iteration
    i - 1 - async_depth ended with, the first ones by the starting weights, while the iterations between are trained."""

    def steps_per_epoch(self, num_trajectories: int) -> int:
        """Optimizer steps of one pass over an iteration's completions."""
        return math.ceil(num_trajectories / (self.minibatch_size * self.gradient_accumulation))

    @property
    def has_own_processes(self) -> bool:
        """Samples are drawn meanwhile: two at work in one process would share its threads, random numbers and lock."""
        return self.async_depth > 0 or super().has_own_processes

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs * self.steps_per_epoch(self.prompts_per_iteration * self.samples_per_prompt)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all iterations."""
        return self.iterations * self.steps_per_iteration

    def cache_identity(self) -> Any:
        """Without the number of iterations, where no schedule spans them: one more leaves those before as they are."""
        named = super().cache_identity()
        if self.optimizer.schedule == "constant" and not self.optimizer.warmup_ratio:
            del named["iterations"]
        del named["async_depth"]  # which weights drew the samples is in the samples' own identity
        return named

    @model_validator(mode="before")
    @classmethod
    def _corrected_where_drawn_ahead(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("async_depth") and "correction" not in data:
            return {**data, "correction": {}}
        return data

    @model_validator(mode="after")
    def _penalty_within_the_limit(self) -> OnPolicySettings:
        if self.overlong is not None:
            limit = self.overlong.max_length or self.sampling.max_tokens
            if self.overlong.cache > limit:
                raise ValueError(
                    f"overlong.cache is {self.overlong.cache}, more than the {limit} tokens of a completion; "
                    "lower it, or raise sampling.max_tokens (or overlong.max_length)"
                )
        return self

    @model_validator(mode="after")
    def _samples_from_the_policy_itself(self) -> OnPolicySettings:
        if self.sampling.temperature == 0 or self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                "on-policy training needs samples of the policy itself: sampling.temperature above 0, top_p 1 and "
                f"top_k -1; got temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, "
                f"top_k {self.sampling.top_k}"
            )
        if bent := self.sampling.bending:
            raise ValueError(
                "on-policy training needs samples of the policy itself: leave out "
                + ", ".join(f"sampling.{name}" for name in bent)
            )
        return self


class PPOSettings(OnPolicySettings):
    """Proximal policy optimization (arXiv:1707.06347) with learned values, GAE and a KL penalty to a reference.

    An iteration's defaults are those of InstructGPT (arXiv:2203.02155, appendix C.4): a completion of each of 512
    prompts, in one pass of 8 optimizer steps of 64.
    """

    prompts_per_iteration: int = Field(default=512, ge=1)
    gradient_accumulation: int = Field(default=8, ge=1)
    """Minibatches in one optimizer step."""
    values: Literal["head", "model"] = "head"
    """A linear head on the policy's trunk, or a model of its own that starts as a copy of the policy."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    clip: float = Field(default=0.2, gt=0)
    """Clip range of the policy ratio."""
    value_clip: float = Field(default=0.2, gt=0)
    value_coef: float = Field(default=0.5, ge=0)
    entropy_coef: float = Field(default=0.0, ge=0)
    kl: AdaptiveKL = AdaptiveKL()
    whiten_advantages: bool = True

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> PPOSettings:
        _check_dual_clip(self.dual_clip, "clip", self.clip)
        return self


class GRPOSettings(OnPolicySettings):
    """Group relative policy optimization (arXiv:2402.03300) and its kin.

    An iteration's defaults are those of the paper (section 4.2): 1,024 completions and one optimizer step of all of
    them. They are of 128 prompts, in groups of 8 as in TRL, where the paper has 16 in groups of 64.
    """

    identity_without_default = OnPolicySettings.identity_without_default | {
        "loss",
        "baseline",
        "kl_in",
        "entropy_coef",
        "dynamic_sampling",
        "reward_normalization",
    }

    samples_per_prompt: int = Field(default=8, ge=1)
    """Size of a group: completions of one prompt, or rollouts of one task, compared with each other; 1 only where
    ``baseline`` compares none."""
    gradient_accumulation: int = Field(default=128, ge=1)
    """Minibatches in one optimizer step."""
    loss: Literal["grpo", "gspo", "cispo", "reinforce"] = "grpo"
    """What a token adds to the loss: the clipped ratio times its advantage; the same with the ratio of its whole
    sequence (arXiv:2507.18071, whose clip ranges are 3e-4 and 4e-4); its log-probability weighed by the clipped ratio
    (arXiv:2506.13585); or that without a ratio, as RLOO has it."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """What the loss of a step is divided by: sequence by sequence, the minibatch's tokens, a constant, all tokens."""
    baseline: Literal["group", "leave_one_out", "none"] = "group"
    """What is taken off a completion's reward: the mean of its group, of the group without it (RLOO,
    arXiv:2402.14740), or nothing (REINFORCE++, arXiv:2501.03262)."""
    advantage_scaling: Literal["group", "batch", "none", "whiten"] = "group"
    """Whose standard deviation divides a completion's advantage; ``whiten``: advantages have mean 0 and variance 1 over
    all tokens of an iteration (REINFORCE++)."""
    reward_normalization: Literal["sum", "each"] = "sum"
    """What is compared in a group: the sum of a composite reward's parts, or each part by itself, over its own
    deviation there, before they are weighed and summed (GDPO, arXiv:2601.05242; with ``batch`` or ``whiten``)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio counts down to 1 - clip_low; with 1 it has no lower bound, as CISPO has it."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio counts up to 1 + clip_high; above clip_low it is clip-higher of arXiv:2503.14476."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting policy in the loss; 0 loads no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that KL counts: as a term of the loss, or taken off the reward: of the completion before it is compared,
    or without a baseline of each token with all that follow it."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which the loss rewards; above 0 it takes another pass over the logits."""
    dynamic_sampling: DynamicSampling | None = None
    """Draw other groups in place of those whose rewards are all alike."""

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> GRPOSettings:
        _check_dual_clip(self.dual_clip, "clip_high", self.clip_high)
        if self.dual_clip is not None and self.loss in ("cispo", "reinforce"):
            raise ValueError(f'dual_clip bounds a clipped surrogate, which loss = "{self.loss}" has not; leave it out')
        return self

    @model_validator(mode="after")
    def _something_to_compare_with(self) -> GRPOSettings:
        if self.samples_per_prompt < 2 and self.baseline != "none":
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but a completion is compared with others of its "
                'prompt; take 2 or more, or baseline = "none"'
            )
        if self.baseline == "none" and self.advantage_scaling == "group":
            raise ValueError(
                'advantage_scaling is "group", but with baseline = "none" no groups are compared; set it to "whiten" '
                '(REINFORCE++), "batch" or "none"'
            )
        if self.dynamic_sampling is not None and self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling looks for groups whose rewards differ; take samples_per_prompt of 2 or more"
            )
        if self.loss_type == "bnpo" and self.max_tokens_per_microbatch is not None:
            raise ValueError(
                'loss_type = "bnpo" is a mean over minibatches of equally many rows; with max_tokens_per_microbatch '
                'take "dapo", which divides by the tokens of the whole step'
            )
        if self.reward_normalization == "each" and self.baseline == "none":
            raise ValueError('reward_normalization = "each" compares parts of a reward in groups; baseline is "none"')
        if self.guards.max_kl is not None and not self.kl_coef:
            raise ValueError("guards.max_kl needs the starting policy, which kl_coef = 0 does not load; set kl_coef")
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError('kl_in is "reward", but kl_coef is 0; set kl_coef, or leave kl_in out')
        return self


def check_parts(settings: GRPOSettings, reward_kind: str) -> None:
    """Raises ValueError where parts of a reward are to be compared and it has none."""
    if settings.reward_normalization == "each" and reward_kind != "composite":
        raise ValueError(
            f'reward_normalization = "each" needs the parts of a "composite" reward; this one is "{reward_kind}"'
        )


def _check_dual_clip(dual_clip: float | None, name: str, clip: float) -> None:
    if dual_clip is not None and dual_clip <= 1 + clip:
        raise ValueError(f"dual_clip is {dual_clip}, within the clip range; expected more than 1 + {name} = {1 + clip}")
