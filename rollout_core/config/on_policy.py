"""Settings of the learners that train on completions of the policy itself. Each algorithm is a class that has the keys
which it knows: PPO, and the family of GRPO, whose members ``kind`` tells apart.

Flows, plans and stages ask a class what it does and never which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator, model_validator

from rollout_core.config.base import DatasetSource, ModelSource, Settings, identity
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
from rollout_core.config.own_loss import PAIR_LOSS, POLICY_LOSS, OwnLoss
from rollout_core.config.variants import Variant, reading


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

    identity_without_default = LearnerSettings.identity_without_default | {"guards", "curriculum", "partial_rollouts"}

    variant: ClassVar[str]
    """The algorithm by its ``kind``."""

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
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut at max_tokens are trained on like others, or only count where completions are compared: in
    their group's mean, in whitening, in the figures."""
    failed: Literal["stop", "leave_out"] = "stop"
    """A completion that fails for good ends the run, or is left out (with GRPO its whole group) and counted in
    ``completions/num_left_out``. `--resume` counts an iteration by its steps, of which fewer completions may make
    fewer."""
    guards: StopGuards = StopGuards()
    """Bounds that end the run."""
    curriculum: PromptCurriculum | None = None
    """Draw completions of easy prompts first."""
    partial_rollouts: PartialRollouts | None = None
    """Cut long completions at the end of an iteration and go on with them in the next."""
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
    def places_per_iteration(self) -> int:
        """Of the order of prompts: those from which an iteration may draw."""
        return self.prompts_per_iteration * (1 if self.redrawing is None else self.redrawing.max_rounds)

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
    def redrawing(self) -> DynamicSampling | None:
        """How groups that teach nothing are replaced, if they are."""
        return None

    @property
    def replaying(self) -> Replay | None:
        """How completions of earlier iterations are learned from again, if they are."""
        return None

    @property
    def turn_credit(self) -> Literal["turn"] | None:
        """Whether samples of episodes say what each turn earned."""
        return None

    @property
    def discounts_turns(self) -> bool:
        """Whether what an episode earned counts less in earlier turns."""
        return False

    @property
    def value_function(self) -> Literal["head", "model"] | None:
        """What values are learned by, if they are."""
        return None

    @property
    def scores_parts(self) -> bool:
        """Whether the parts of a composite reward are compared, each by itself."""
        return False

    @property
    def trained_models(self) -> int:
        """Models of the policy's size whose weights are trained."""
        return 1

    @property
    def rows_per_item(self) -> int:
        """Completions that ``minibatch_size`` counts as one."""
        return 1

    @property
    def _drawn_before(self) -> bool:
        """Whether earlier weights than those that learn have drawn some of what is learned from."""
        return bool(self.async_depth) or self.partial_rollouts is not None

    @property
    def stores_all_models(self) -> bool:
        return self.store_models == "each"

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
    def _parts_that_join(self) -> OnPolicySettings:
        if self.partial_rollouts is not None:
            _check_parts_join(self, self.partial_rollouts.max_tokens_per_iteration)
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


class RewardedSettings(OnPolicySettings):
    """What learners share whose loss rewards decide."""

    identity_without_default = OnPolicySettings.identity_without_default | {"overlong"}

    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a completion cut at max_tokens."""
    overlong: OverlongPenalty | None = None
    """Lower the reward of completions that come near the length limit."""

    @model_validator(mode="after")
    def _penalty_within_the_limit(self) -> RewardedSettings:
        if self.overlong is not None:
            limit = self.overlong.max_length or self.sampling.max_tokens
            if self.overlong.cache > limit:
                raise ValueError(
                    f"overlong.cache is {self.overlong.cache}, more than the {limit} tokens of a completion; "
                    "lower it, or raise sampling.max_tokens (or overlong.max_length)"
                )
        return self


class AdvantageSettings(RewardedSettings):
    """What learners share whose loss weighs log-probabilities by advantages."""

    identity_without_default = RewardedSettings.identity_without_default | {"replay", "credit"}
    loss_arguments = POLICY_LOSS

    credit: Literal["outcome", "turn"] = "outcome"
    """What the tokens of an episode are credited with: what the whole of it earned; or by turn, what the turn that
    wrote them and those after it did, the last one with what the whole earned. By turn only in an `[environment]`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The most that the ratio counts where the advantage is negative, which has no other bound there: 3 in
    arXiv:1912.09729. Must be above the clip range."""
    replay: Replay | None = None
    """Learn from completions of earlier iterations again."""
    correction: ImportanceCorrection | None = None
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them. On by
    default where samples are drawn ahead of training, replayed or carried over, or the learner's weights are of four
    bits."""

    @property
    def turn_credit(self) -> Literal["turn"] | None:
        return "turn" if self.credit == "turn" else None

    @property
    def replaying(self) -> Replay | None:
        return self.replay

    @property
    def _drawn_before(self) -> bool:
        return super()._drawn_before or self.replay is not None

    @model_validator(mode="after")
    def _default_correction(self) -> AdvantageSettings:
        # The engine draws by weights that are whole, the learner computes with those of four bits.
        is_quantized = self.lora is not None and self.lora.quantization != "none"
        if "correction" not in self.model_fields_set and (self._drawn_before or is_quantized):
            # Without `model_fields_set`: it stays a default, which another key may change (`as_given`).
            vars(self)["correction"] = ImportanceCorrection()
        return self

    @model_validator(mode="after")
    def _replayed_with_a_correction(self) -> AdvantageSettings:
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
    def _parts_with_a_correction(self) -> AdvantageSettings:
        if self.partial_rollouts is not None and self.correction is None:
            raise ValueError(
                "partial_rollouts need a correction, for earlier weights drew the first parts; give one, or none of "
                "both"
            )
        if self.partial_rollouts is not None and self.replay is not None:
            raise ValueError(
                "partial_rollouts and replay: the buffer knows one id of weights for all completions of an iteration; "
                "choose one"
            )
        return self


class PPOSettings(AdvantageSettings):
    """Proximal policy optimization (arXiv:1707.06347) with learned values, GAE and a KL penalty to a reference.

    An iteration's defaults are those of InstructGPT (arXiv:2203.02155, appendix C.4): a completion of each of 512
    prompts, in one pass of 8 optimizer steps of 64.
    """

    identity_without_default = AdvantageSettings.identity_without_default | {"loss"}
    family = update = variant = "ppo"

    loss: Literal["ppo"] | OwnLoss = "ppo"
    """What a token adds to the policy's loss; a table: a loss of your own."""

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

    @property
    def value_function(self) -> Literal["head", "model"]:
        return self.values

    @property
    def trained_models(self) -> int:
        return 2 if self.values == "model" else 1

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> PPOSettings:
        _check_dual_clip(self.dual_clip, "clip", self.clip)
        _check_own_loss_clips(self)
        return self


class GroupSettings(OnPolicySettings, Variant):
    """What learners share from several completions of each prompt: the family of GRPO.

    An iteration's defaults are those of GRPO's paper (arXiv:2402.03300, section 4.2): 1,024 completions and one
    optimizer step of all of them. They are of 128 prompts, in groups of 8 as in TRL, where the paper has 16 in groups
    of 64.
    """

    family = update = "grpo"

    samples_per_prompt: int = Field(default=8, ge=1)
    """Size of a group: completions of one prompt, or rollouts of one task, that are learned from together."""
    gradient_accumulation: int = Field(default=128, ge=1)
    """Minibatches in one optimizer step."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[Variant]]:
        return GROUP_KINDS

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt

    @property
    def steps_per_iteration(self) -> int:
        items = self.prompts_per_iteration * self.samples_per_prompt // self.rows_per_item
        return self.epochs * self.steps_per_epoch(items)


class GRPOSettings(GroupSettings, AdvantageSettings):
    """Group relative policy optimization (arXiv:2402.03300) and its kin."""

    variant = "grpo"
    identity_without_default = AdvantageSettings.identity_without_default | {
        "loss",
        "baseline",
        "kl_in",
        "entropy_coef",
        "dynamic_sampling",
        "reward_normalization",
        "gamma",
        "turn_baseline",
    }

    samples_per_prompt: int = Field(default=8, ge=1)
    """Size of a group: completions of one prompt, or rollouts of one task, compared with each other; 1 only where
    ``baseline`` compares none."""
    loss: Literal["grpo", "gspo", "cispo", "reinforce"] | OwnLoss = "grpo"
    """What a token adds to the loss: the clipped ratio times its advantage; the same with the ratio of its whole
    sequence (arXiv:2507.18071, whose clip ranges are 3e-4 and 4e-4); its log-probability weighed by the clipped ratio
    (arXiv:2506.13585); or that without a ratio, as RLOO has it. A table: a loss of your own."""
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
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn of what later turns earn, with ``credit = "turn"``."""
    turn_baseline: Literal["turn", "episodes"] = "turn"
    """What a turn's return is compared with, with ``credit = "turn"``: the returns of the same turn in the group's
    other episodes; or those of all their turns, of which every episode counts alike."""
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

    @property
    def discounts_turns(self) -> bool:
        return self.gamma < 1

    @property
    def loads_reference(self) -> bool:
        return bool(self.kl_coef)

    @property
    def redrawing(self) -> DynamicSampling | None:
        return self.dynamic_sampling

    @property
    def scores_parts(self) -> bool:
        return self.reward_normalization == "each"

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        # Elsewhere than in rewards the KL of whole completions is measured for a guard only, whatever its bound.
        return {**named, "guards": None} if self.guards.max_kl is not None else named

    @model_validator(mode="after")
    def _dual_clip_above_the_clip_range(self) -> GRPOSettings:
        _check_dual_clip(self.dual_clip, "clip_high", self.clip_high)
        _check_own_loss_clips(self)
        if self.dual_clip is not None and self.loss in ("cispo", "reinforce"):
            raise ValueError(f'dual_clip bounds a clipped surrogate, which loss = "{self.loss}" has not; leave it out')
        return self

    @model_validator(mode="after")
    def _a_kl_to_guard(self) -> GRPOSettings:
        if self.guards.max_kl is not None and not self.kl_coef:
            raise ValueError("guards.max_kl needs the starting policy, which kl_coef = 0 does not load; set kl_coef")
        return self

    @model_validator(mode="after")
    def _something_to_compare_with(self) -> GRPOSettings:
        if self.samples_per_prompt < 2 and self.baseline != "none":
            _refuse_single(self.samples_per_prompt, ', or baseline = "none"')
        _check_redrawn_whole(self)
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
        return self

    @model_validator(mode="after")
    def _credited_by_turn(self) -> GRPOSettings:
        given = [name for name in ("gamma", "turn_baseline") if getattr(self, name) != _default_of_grpo(name)]
        if self.credit != "turn":
            if given:
                raise ValueError(f'{given[0]} is of credit = "turn", and credit is "{self.credit}"; leave it out')
            return self
        if self.turn_baseline == "episodes" and self.baseline == "none":
            raise ValueError(
                'turn_baseline is "episodes", but with baseline = "none" nothing is compared; leave it out'
            )
        if self.kl_coef and self.kl_in == "reward":
            raise ValueError(
                'kl_in = "reward" takes the KL of a whole completion off its reward, and credit = "turn" gives each '
                'turn its own; take kl_in = "loss", or kl_coef = 0'
            )
        return self

    @model_validator(mode="after")
    def _a_kl_to_take_off(self) -> GRPOSettings:
        if self.kl_in == "reward" and not self.kl_coef:
            raise ValueError('kl_in is "reward", but kl_coef is 0; set kl_coef, or leave kl_in out')
        return self


class RLOOSettings(GRPOSettings):
    """REINFORCE leave-one-out (RLOO, arXiv:2402.14740): GRPO's keys with that paper's loss and baseline, and its KL,
    which is taken off a completion's reward before completions are compared."""

    variant = "rloo"
    identity_without_default = GRPOSettings.identity_without_default - {"loss", "baseline", "kl_in"}

    kind: Literal["rloo"] = "rloo"
    loss: Literal["reinforce"] | OwnLoss = "reinforce"
    """What a token adds to the loss: its log-probability. A table: a loss of your own."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dr_grpo"
    """What the loss of a step is divided by; by default a constant, so that a completion counts by its sum."""
    baseline: Literal["leave_one_out"] = "leave_one_out"
    """What is taken off a completion's reward: the mean of the others of its prompt."""
    advantage_scaling: Literal["group", "batch", "none", "whiten"] = "none"
    """Whose standard deviation divides a completion's advantage."""
    kl_coef: float = Field(default=0.05, ge=0)
    """Weight of the KL to the starting policy; 0 loads no reference. The default is that of TRL's RLOO."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where that KL counts."""

    def cache_identity(self) -> Any:
        """That of GRPO with the same keys, which computes the same."""
        named = super().cache_identity()
        if named["kind"] != self.family:
            del named["kind"]
        same = [name for name in ("loss", "baseline", "kl_in") if getattr(self, name) == _default_of_grpo(name)]
        return {name: value for name, value in named.items() if name not in same}

    def _a_kl_to_take_off(self) -> RLOOSettings:
        return self  # kl_coef = 0 says that there is none


def _default_of_grpo(name: str) -> Any:
    return GRPOSettings.model_fields[name].default


class FormerLoss(GroupSettings):
    """What algorithms share that were losses of GRPO before they were kinds. Cache keys are those of such a table, with
    every key that GRPO had by then."""

    @classmethod
    def never_counted(cls, data: Mapping[str, Any]) -> tuple[str, ...]:
        return ("correction",) if data.get("async_depth") or data.get("partial_rollouts") else ()

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        if named["kind"] != self.family:  # a table [grpo] had none, and [algorithm] that of its family
            del named["kind"]
        own, later = type(self).model_fields, GRPOSettings.identity_without_default
        lacking = {name: field for name, field in GRPOSettings.model_fields.items() if name not in (*own, *later)}
        of_grpo = {name: identity(field.default) for name, field in lacking.items()}
        if self._drawn_before:
            of_grpo["correction"] = identity(ImportanceCorrection())
        return {**of_grpo, **named, "loss": self.variant if self.own_loss is None else self.own_loss.cache_identity()}

    @model_validator(mode="after")
    def _no_kl_to_guard(self) -> FormerLoss:
        if self.guards.max_kl is not None:
            raise ValueError(
                f'guards.max_kl looks at a KL that kind = "{self.variant}" does not compute; leave it out, or bound it '
                'by a guard of [promotion] (kind = "kl")'
            )
        return self


class GKDSettings(FormerLoss):
    """On-policy distillation (GKD, arXiv:2306.13649): how far each token's distribution is from a teacher's. Rewards
    are looked at only."""

    variant = "gkd"

    kind: Literal["gkd"] = "gkd"
    distillation: Distillation
    """The teacher."""

    @property
    def teacher(self) -> ModelSource | None:
        return self.distillation.teacher

    @property
    def loads_reference(self) -> bool:
        return False


class OnlineDPOSettings(FormerLoss, RewardedSettings):
    """Online DPO (arXiv:2402.04792): DPO on the best and the worst completion of each prompt, by reward.
    ``minibatch_size`` counts these pairs."""

    variant = "online_dpo"
    identity_without_default = RewardedSettings.identity_without_default | {"beta", "dynamic_sampling"}

    loss_arguments = PAIR_LOSS

    kind: Literal["online_dpo"] = "online_dpo"
    loss: Literal["online_dpo"] | OwnLoss = "online_dpo"
    """What a pair adds to the loss; a table: a loss of your own."""
    beta: float = Field(default=0.1, gt=0)
    """How closely the policy keeps to the starting one, as in DPO."""
    dynamic_sampling: DynamicSampling | None = None
    """Draw other groups in place of those whose rewards are all alike."""

    @property
    def redrawing(self) -> DynamicSampling | None:
        return self.dynamic_sampling

    @property
    def rows_per_item(self) -> int:
        return 2

    @property
    def steps_per_iteration(self) -> int:
        return self.epochs * self.steps_per_epoch(self.prompts_per_iteration)

    @model_validator(mode="after")
    def _a_best_and_a_worst(self) -> OnlineDPOSettings:
        if self.max_tokens_per_microbatch is not None:
            raise ValueError('kind = "online_dpo" has no use for max_tokens_per_microbatch: no pair is cut by tokens')
        if self.samples_per_prompt < 2:
            _refuse_single(self.samples_per_prompt)
        _check_redrawn_whole(self)
        return self


_OF_GROUPS = (GRPOSettings, RLOOSettings, GKDSettings, OnlineDPOSettings)
GROUP_KINDS: dict[str, type[Variant]] = {one.variant: one for one in _OF_GROUPS}
"""The family of GRPO by ``kind``."""
AnyGroupSettings = Annotated[
    GRPOSettings | RLOOSettings | GKDSettings | OnlineDPOSettings, WrapValidator(reading(*_OF_GROUPS))
]
"""Settings of an algorithm of that family."""


def _refuse_single(samples_per_prompt: int, otherwise: str = "") -> None:
    raise ValueError(
        f"samples_per_prompt is {samples_per_prompt}, but a completion is compared with others of its prompt; take 2 "
        f"or more{otherwise}"
    )


def _check_redrawn_whole(settings: OnPolicySettings) -> None:
    if settings.redrawing is not None and settings.partial_rollouts is not None:
        raise ValueError(
            "partial_rollouts and dynamic_sampling: which groups are replaced shows once they are whole, iterations "
            "later; choose one"
        )


def _check_parts_join(settings: OnPolicySettings, max_tokens: int) -> None:
    """Raises ValueError where completions cannot be drawn in parts of ``max_tokens``."""
    sampling, name = settings.sampling, "partial_rollouts.max_tokens_per_iteration"
    if max_tokens >= sampling.max_tokens or sampling.max_tokens % max_tokens:
        raise ValueError(
            f"{name} is {max_tokens}, and sampling.max_tokens {sampling.max_tokens}; expected a half, a third or "
            "another whole part of it"
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


def _check_own_loss_clips(settings: AdvantageSettings) -> None:
    if settings.dual_clip is not None and settings.own_loss is not None:
        raise ValueError("dual_clip bounds the built-in surrogate, which a loss of your own replaces; leave it out")


def _check_dual_clip(dual_clip: float | None, name: str, clip: float) -> None:
    if dual_clip is not None and dual_clip <= 1 + clip:
        raise ValueError(f"dual_clip is {dual_clip}, within the clip range; expected more than 1 + {name} = {1 + clip}")
