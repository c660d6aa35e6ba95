"""Settings of the learners that train on completions of the policy itself: PPO and GRPO."""

from __future__ import annotations

import math
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
    """Truncated importance sampling for the difference between the engine's distribution and the trainer's."""

    level: Literal["token", "sequence"] = "token"
    """Whose probability ratio weighs a token: its own, or that of its whole completion."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Ratios above the cap are lowered to it, or their tokens left out."""
    cap: float = Field(default=2.0, ge=1)


_BENDING = SamplingParams.identity_without_default - {"logprobs", "stop_token_ids"}
"""Fields of sampling under which tokens are drawn from another distribution than the policy's."""


class OnPolicySettings(LearnerSettings):
    """What learners share that train on completions of the policy itself."""

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
    correction: ImportanceCorrection | None = None
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them."""

    def steps_per_epoch(self, num_trajectories: int) -> int:
        """Optimizer steps of one pass over an iteration's completions."""
        return math.ceil(num_trajectories / (self.minibatch_size * self.gradient_accumulation))

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
        if self.optimizer.schedule == "constant":
            del named["iterations"]
        return named

    @model_validator(mode="after")
    def _samples_from_the_policy_itself(self) -> OnPolicySettings:
        if self.sampling.temperature == 0 or self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                "on-policy training needs samples of the policy itself: sampling.temperature above 0, top_p 1 and "
                f"top_k -1; got temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, "
                f"top_k {self.sampling.top_k}"
            )
        bent = sorted(name for name in _BENDING if getattr(self.sampling, name) != getattr(SamplingParams(), name))
        if bent:
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

    samples_per_prompt: int = Field(default=8, ge=2)
    """Size of a group: completions of one prompt, or rollouts of one task, compared with each other."""
    gradient_accumulation: int = Field(default=128, ge=1)
    """Minibatches in one optimizer step."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """What the loss of a step is divided by: sequence by sequence, the minibatch's tokens, a constant, all tokens."""
    advantage_scaling: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides a completion's advantage."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio counts up to 1 + clip_high; above clip_low it is clip-higher of arXiv:2503.14476."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting policy in the loss; 0 loads no reference."""

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> GRPOSettings:
        _check_dual_clip(self.dual_clip, "clip_high", self.clip_high)
        return self


def _check_dual_clip(dual_clip: float | None, name: str, clip: float) -> None:
    if dual_clip is not None and dual_clip <= 1 + clip:
        raise ValueError(f"dual_clip is {dual_clip}, within the clip range; expected more than 1 + {name} = {1 + clip}")
