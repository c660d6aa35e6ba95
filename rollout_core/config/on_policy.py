"""Settings of the learners that train on completions of the policy itself: PPO and GRPO."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from rollout_core.config.base import DatasetSource, Settings
from rollout_core.config.curriculum import PromptCurriculum
from rollout_core.config.experience import (
    DynamicSampling,
    ImportanceCorrection,
    OverlongPenalty,
    PartialRollouts,
    Replay,
    StopGuards,
)
from rollout_core.config.inference import SamplingParams
from rollout_core.config.learning import Distillation, LearnerSettings


class AdaptiveKL(Settings):
    """Controller of the KL coefficient (arXiv:1909.08593, section 2.2)."""

    init_coef: float = Field(default=0.05, ge=0)
    """The coefficient at the start."""
    target: float = Field(default=6.0, gt=0)
    """Wished-for KL to the reference policy, nats per sequence; the default is that of the paper's code and of TRL."""
    horizon: int = Field(default=10_000, ge=1)
    """Sequences over which the coefficient reacts."""
    adaptive: bool = True
    """False keeps the coefficient at init_coef."""


class OnPolicySettings(LearnerSettings):
    """What learners share that train on completions of the policy itself."""

    identity_without_default = LearnerSettings.identity_without_default | {
        "overlong",
        "guards",
        "curriculum",
        "replay",
        "partial_rollouts",
    }

    prompts: DatasetSource
    """Training prompts: ``{prompt}`` or ``{messages}`` a line; other keys reach the reward."""
    iterations: int = Field(default=10, ge=1)
    """Rounds of generate, score, update."""
    prompts_per_iteration: int = Field(default=128, ge=1)
    """Prompts drawn in each iteration."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    sampling: SamplingParams = SamplingParams()
    """How training prompts are completed."""
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
    curriculum: PromptCurriculum | None = None
    """Draw completions of easy prompts first."""
    replay: Replay | None = None
    """Learn from completions of earlier iterations again."""
    partial_rollouts: PartialRollouts | None = None
    """Cut long completions at the end of an iteration and go on with them in the next."""
    correction: ImportanceCorrection | None = None
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them. On by
    default where samples are drawn ahead of training, replayed or carried over, or the learner's weights are of four
    bits."""
    async_depth: int = Field(default=0, ge=0)
    """Iterations that samples are drawn ahead of training: those of iteration i are drawn by the weights that iteration
    i - 1 - async_depth ended with, the first ones by the starting weights, while the iterations between are trained."""

    state_every: int = Field(default=1, ge=1)
    """Iterations from one training state that is stored to the next; the last one's is, too, and that of a run that is
    stopped. Others are in temporary files until the next iteration has ended, and computed again where a run resumes
    without them. Changes no result."""
    store_models: Literal["each", "with_states"] = "each"
    """Which models that iterations end with are stored: each, or those whose training states are. Others are in this
    machine's cache, from where its engine loads them, and computed again where they are needed and gone. Changes no
    result."""

    def stores_state(self, number: int) -> bool:
        """Whether the training state of iteration ``number`` (from 0) is stored."""
        return (number + 1) % self.state_every == 0 or number + 1 == self.iterations

    @property
    def stored_states(self) -> int:
        """Iterations whose training states are stored."""
        return sum(map(self.stores_state, range(self.iterations)))

    @property
    def stored_models(self) -> int:
        """Iterations whose models are stored."""
        return self.iterations if self.store_models == "each" else self.stored_states

    @property
    def loads_reference(self) -> bool:
        """Whether an update compares the policy with its start."""
        return True

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

    @property
    def group_size(self) -> int:
        """Completions of a prompt that are scored and learned from together."""
        return 1

    @property
    def part_sampling(self) -> SamplingParams:
        """What an iteration draws of a completion."""
        partial = self.partial_rollouts
        if partial is None:
            return self.sampling
        return self.sampling.model_copy(update={"max_tokens": partial.max_tokens_per_iteration})

    @property
    def parts_per_completion(self) -> int:
        """The most iterations that draw a completion."""
        return self.sampling.max_tokens // self.part_sampling.max_tokens

    @property
    def parts_in_words(self) -> str:
        """For people, where completions are cut."""
        tokens, most = self.part_sampling.max_tokens, self.parts_per_completion
        return f"{tokens} tokens of a completion in an iteration, so that it takes up to {most}"

    @property
    def weighs_advantages(self) -> bool:
        """Whether the loss weighs log-probabilities by advantages."""
        return True

    @property
    def _drawn_before(self) -> bool:
        """Whether earlier weights than those that learn have drawn some of what is learned from."""
        return bool(self.async_depth) or self.replay is not None or self.partial_rollouts is not None

    @property
    def known_steps_per_iteration(self) -> int | None:
        """As `steps_per_iteration`, but None where iterations have as many as there are whole groups."""
        return self.steps_per_iteration if self.partial_rollouts is None else None

    def cache_identity(self) -> Any:
        """Without the number of iterations, where no schedule spans them: one more leaves those before as they are."""
        named = super().cache_identity()
        if self.optimizer.schedule == "constant" and not self.optimizer.warmup_ratio:
            del named["iterations"]
        del named["state_every"], named["store_models"]
        del named["async_depth"]  # which weights drew the samples is in the samples' own identity
        # So are prompts, what is drawn again, parts, groups that were replaced, and samples that were left out. Guards
        # let an update be, or end the run.
        for name in ("curriculum", "replay", "partial_rollouts", "dynamic_sampling", "guards"):
            named.pop(name, None)
        if self.skip_spikes is not None:
            named["skip_spikes"]["of"] = "all iterations"  # before, steps of one were compared with each other
        named["failed"] = type(self).model_fields["failed"].default  # which keys have had in them
        return named

    @model_validator(mode="after")
    def _default_correction(self) -> OnPolicySettings:
        # The engine draws by weights that are whole, the learner computes with those of four bits.
        is_quantized = self.lora is not None and self.lora.quantization != "none"
        is_other = self._drawn_before or (is_quantized and self.weighs_advantages)
        if "correction" not in self.model_fields_set and is_other:
            # Without `model_fields_set`: it stays a default, which another key may change (`as_given`).
            vars(self)["correction"] = ImportanceCorrection()
        return self

    @model_validator(mode="after")
    def _replayed_with_a_correction(self) -> OnPolicySettings:
        if self.replay is not None and self.replay.groups >= self.prompts_per_iteration:
            raise ValueError(
                f"replay.groups is {self.replay.groups} of {self.prompts_per_iteration} prompts_per_iteration; at "
                "least one must be fresh"
            )
        if self.replay is not None and self.correction is None:
            raise ValueError(
                "replay needs a correction, for older weights drew what is replayed; give one, or none of both"
            )
        return self

    @model_validator(mode="after")
    def _parts_that_join(self) -> OnPolicySettings:
        if self.partial_rollouts is not None:
            _check_parts_join(self, self.partial_rollouts.max_tokens_per_iteration)
        return self

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
    def _evaluated_between_iterations(self) -> OnPolicySettings:
        if self.guards.reward_hacking is not None and self.async_depth:
            raise ValueError(
                "guards.reward_hacking and async_depth: the engine that completes held-out prompts draws samples ahead "
                "at the same time; leave out one of them"
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
    """Prompts drawn in each iteration."""
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
    """Clip range of the value loss, on the scale of the returns."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the value loss."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: AdaptiveKL = AdaptiveKL()
    whiten_advantages: bool = True
    """Bring the advantages of an iteration to mean 0 and variance 1."""

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> PPOSettings:
        _check_dual_clip(self.dual_clip, "clip", self.clip)
        return self


_OF_SURROGATES = (
    "baseline", "advantage_scaling", "reward_normalization", "kl_coef", "entropy_coef", "dual_clip", "loss_type",
    "clip_low", "clip_high", "correction",
)  # fmt: skip
"""Keys of losses that weigh log-probabilities by advantages."""


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
        "distillation",
        "beta",
    }

    samples_per_prompt: int = Field(default=8, ge=1)
    """Size of a group: completions of one prompt, or rollouts of one task, compared with each other; 1 only where
    ``baseline`` compares none."""
    gradient_accumulation: int = Field(default=128, ge=1)
    """Minibatches in one optimizer step."""
    loss: Literal["grpo", "gspo", "cispo", "reinforce", "gkd", "online_dpo"] = "grpo"
    """What a token adds to the loss: the clipped ratio times its advantage; the same with the ratio of its whole
    sequence (arXiv:2507.18071, whose clip ranges are 3e-4 and 4e-4); its log-probability weighed by the clipped ratio
    (arXiv:2506.13585); or that without a ratio, as RLOO has it. ``gkd``: how far its distribution is from a teacher's;
    rewards are looked at only (on-policy GKD, arXiv:2306.13649). ``online_dpo``: DPO on the best and the worst
    completion of each prompt (arXiv:2402.04792); ``minibatch_size`` then counts these pairs."""
    beta: float = Field(default=0.1, gt=0)
    """Of ``online_dpo``: how closely the policy keeps to the starting one, as in DPO."""
    distillation: Distillation | None = None
    """The teacher of ``gkd``."""
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
    def _a_teacher_or_rewards(self) -> GRPOSettings:
        if (self.loss == "gkd") != (self.distillation is not None):
            raise ValueError(
                'distillation and loss = "gkd" belong together: give a table distillation with a teacher, or neither'
            )
        return self

    @model_validator(mode="after")
    def _keys_of_its_loss(self) -> GRPOSettings:
        foreign = {"beta"} if self.weighs_advantages else {*_OF_SURROGATES, "replay"}
        if self.loss == "gkd":
            foreign |= {"overlong", "dynamic_sampling", "missing_eos_penalty", "beta"}
        if self.loss == "online_dpo":
            foreign |= {"max_tokens_per_microbatch"}
        if self._drawn_before:
            foreign -= {"correction"}  # which is on by default there, and in the keys of such updates
        fields = type(self).model_fields
        asked = [name for name in fields if name in foreign and getattr(self, name) != fields[name].default]
        if asked:
            raise ValueError(f'loss = "{self.loss}" has no use for {", ".join(asked)}; leave out what it does not know')
        return self

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        # Elsewhere than in rewards the KL of whole completions is measured for a guard only, whatever its bound.
        return {**named, "guards": None} if self.guards.max_kl is not None else named

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt

    @property
    def weighs_advantages(self) -> bool:
        return self.loss not in ("gkd", "online_dpo")

    @property
    def loads_reference(self) -> bool:
        return bool(self.kl_coef) or self.loss == "online_dpo"

    @property
    def steps_per_iteration(self) -> int:
        items = self.prompts_per_iteration * (1 if self.loss == "online_dpo" else self.samples_per_prompt)
        return self.epochs * self.steps_per_epoch(items)

    @model_validator(mode="after")
    def _a_kl_to_guard(self) -> GRPOSettings:
        if self.guards.max_kl is not None and not self.weighs_advantages:
            raise ValueError(
                f'guards.max_kl looks at a KL that loss = "{self.loss}" does not compute; leave it out, or bound it by '
                'a guard of [promotion] (kind = "kl")'
            )
        if self.guards.max_kl is not None and not self.kl_coef:
            raise ValueError("guards.max_kl needs the starting policy, which kl_coef = 0 does not load; set kl_coef")
        return self

    @model_validator(mode="after")
    def _something_to_compare_with(self) -> GRPOSettings:
        if self.loss == "gkd":
            return self
        if self.samples_per_prompt < 2 and self.baseline != "none":
            without = "" if self.loss == "online_dpo" else ', or baseline = "none"'
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but a completion is compared with others of its "
                f"prompt; take 2 or more{without}"
            )
        if self.dynamic_sampling is not None and self.partial_rollouts is not None:
            raise ValueError(
                "partial_rollouts and dynamic_sampling: which groups are replaced shows once they are whole, "
                "iterations later; choose one"
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
        if self.reward_normalization == "each" and self.replay is not None:
            raise ValueError('replay and reward_normalization = "each": replayed completions have no parts; choose one')
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError('kl_in is "reward", but kl_coef is 0; set kl_coef, or leave kl_in out')
        return self


def _check_parts_join(settings: OnPolicySettings, max_tokens: int) -> None:
    """Raises ValueError where completions cannot be drawn in parts of ``max_tokens``."""
    sampling, name = settings.sampling, "partial_rollouts.max_tokens_per_iteration"
    if max_tokens >= sampling.max_tokens or sampling.max_tokens % max_tokens:
        raise ValueError(
            f"{name} is {max_tokens}, and sampling.max_tokens {sampling.max_tokens}; expected a half, a third or "
            "another whole part of it"
        )
    if settings.correction is None:
        raise ValueError(
            "partial_rollouts need a correction, for earlier weights drew the first parts; give one, or none of both"
        )
    if sampling.stop:
        raise ValueError(
            "partial_rollouts and sampling.stop: a stop string may begin in one part and end in the next, where no "
            "engine finds it; take sampling.stop_token_ids, or leave out one of them"
        )
    if settings.failed != "stop":
        raise ValueError(
            'partial_rollouts and failed = "leave_out": of a resumed completion, parts are there that others are '
            'compared with; take failed = "stop"'
        )
    for key in ("schedule", "warmup_ratio"):
        value, default = getattr(settings.optimizer, key), type(settings.optimizer).model_fields[key].default
        if value != default:
            raise ValueError(
                f"partial_rollouts and optimizer.{key} = {value!r}: nobody knows how many steps iterations of whole "
                f"groups have; leave it out (the default is {default!r})"
                + (", or take optimizer.warmup_steps" if key == "warmup_ratio" else "")
            )
    if settings.replay is not None:
        raise ValueError(
            "partial_rollouts and replay: the buffer knows one id of weights for all completions of an iteration; "
            "choose one"
        )


def _check_dual_clip(dual_clip: float | None, name: str, clip: float) -> None:
    if dual_clip is not None and dual_clip <= 1 + clip:
        raise ValueError(f"dual_clip is {dual_clip}, within the clip range; expected more than 1 + {name} = {1 + clip}")
