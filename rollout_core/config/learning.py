"""Settings of the learners: what enters the key of an update."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rollout_core.config.base import Settings
from rollout_core.config.datasets import DatasetSource
from rollout_core.config.sampling import SamplingParams
from rollout_core.devices import mixed_precision, probe_device
from rollout_core.numerics import numerics_identity
from rollout_core.optimizers import ADAM_KEYS, OWN_KEYS, check_optimizer, optimizer_arguments, optimizer_class

PLAIN_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Known without asking torch."""
WHOLE_MATRICES = ("Adafactor",)
"""Optimizers whose state does not have the shape of its parameter."""
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
AveragingRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    identity_without_default = frozenset({"options"})

    kind: str = "adamw"
    """``adamw``, ``adam`` or ``sgd``, or a class of torch.optim by its name, such as ``Adafactor``."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[AveragingRate, AveragingRate] = (0.9, 0.999)
    """Of adam and adamw; others have theirs among the options."""
    eps: float = Field(default=1e-8, gt=0)
    """Of adam and adamw; others have theirs among the options."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the optimizer's class, such as ``{momentum = 0.9}`` of sgd."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall towards 0, which the step after the last would have."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer's class."""
        return optimizer_arguments(self.kind, **self._own())

    def _own(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*OWN_KEYS, *ADAM_KEYS, "options")}

    @field_validator("kind")
    @classmethod
    def _known_to_torch(cls, kind: str) -> str:
        if kind not in PLAIN_OPTIMIZERS:
            optimizer_class(kind)
        return kind

    @model_validator(mode="after")
    def _taken_by_torch(self) -> OptimizerConfig:
        if self.kind in PLAIN_OPTIMIZERS and not self.options:
            return self
        for name in ADAM_KEYS:
            default = type(self).model_fields[name].default
            if self.kind not in PLAIN_OPTIMIZERS and getattr(self, name) != default:
                raise ValueError(f"{name} is of adam and adamw; what {self.kind} takes belongs into its options")
        check_optimizer(self.kind, **self._own())
        return self


class BudgetConfig(Settings):
    """When training ends: whichever limit comes first."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; default: 1 where neither max_steps nor max_tokens is given."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Computed tokens, as ``num_tokens`` counts them; the step that reaches them is the last."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Wall time of training, that of earlier processes of the run included. It only cuts short what the other limits
    give, which is what a schedule spans."""

    def cache_identity(self) -> Any:
        named: dict[str, Any] = {"max_steps": self.max_steps, "epochs": self.epochs or 1}
        named |= {
            name: getattr(self, name) for name in ("max_tokens", "max_minutes") if getattr(self, name) is not None
        }
        if self.epochs is not None and (self.max_steps or self.max_tokens):
            named["also_epochs"] = True
        return named


class Padded(Settings):
    """One row a sequence, right-padded to the longest of its minibatch."""

    kind: Literal["off"] = "off"
    max_seq_len: int = Field(default=1024, ge=2)
    """Longer rows are cut at the right and counted."""


class SnapshotPolicy(Settings):
    """When training is made resumable, and which snapshots stay. Changes speed only."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between train-state snapshots. They are written beside training: one that falls due while
    another is being written is taken as soon as that is done."""
    keep_last: int = Field(default=3, ge=1)
    """Of the run. Older ones are dropped from the list, but for labelled ones and those an update in progress needs."""
    keep_every: int | None = Field(default=None, ge=1)
    """Snapshots of steps that this divides stay too."""

    def cache_identity(self) -> Any:
        return None


class HeldOutRows(Settings):
    """Rows that are not trained, whose loss is looked at after the last step and perhaps between."""

    dataset: DatasetSource
    """In the form of the training rows."""
    every_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; default: only after the last."""


class LossOn(Settings):
    """Which tokens are trained."""

    kind: Literal["assistant_only", "full", "custom"] = "assistant_only"
    """``custom``: what rows say by ``loss_mask`` or ``labels``."""


class ParallelConfig(Settings):
    """Training in several processes of one machine. The rows of a step, and what is learnt from them, stay the same."""

    nproc: int = Field(default=1, ge=1)
    """Processes that share the rows of every step; one a GPU where there are GPUs."""
    kind: Literal["ddp", "fsdp2"] = "ddp"
    """``ddp``: every process has the whole weights. ``fsdp2``: weights, gradients and optimizer are cut among them."""

    def cache_identity(self) -> Any:
        """Sums over processes differ in their last bits, so other processes are another result."""
        return [self.kind, self.nproc]


class LoRAConfig(Settings):
    """Low-rank adapters (arXiv:2106.09685): the model's own weights stay as they are."""

    r: int = Field(default=16, ge=1)
    """Rank of a change of weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The change is scaled by alpha / r."""
    rank_stabilized: bool = False
    """By alpha / sqrt(r) instead (arXiv:2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of an adapter's input, in SFT only: other learners train without dropout."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers that get one; default: every linear layer but the output."""


class LearnerSettings(Settings):
    """What every learner shares."""

    optimizer: OptimizerConfig
    minibatch_size: int = Field(default=8, ge=1)
    """Sequences in one forward and backward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Minibatches in one optimizer step."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 autocast where the GPU has it, else float32."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, more time, the
    same gradients."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights. Checkpoints hold the merged weights."""
    snapshots: SnapshotPolicy = SnapshotPolicy()
    parallel: ParallelConfig = ParallelConfig()
    trackers: tuple[TrackerName, ...] = ()
    """Where figures go beside the checkpoint's own rows; changes nothing of what is trained."""

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        del named["gradient_checkpointing"], named["trackers"]
        if self.lora is None:
            del named["lora"]
        if self.parallel.nproc == 1:
            del named["parallel"]
        return {**named, "precision": [probe_device(), mixed_precision(self.precision)], **numerics_identity()}

    @model_validator(mode="after")
    def _work_for_every_process(self) -> LearnerSettings:
        rows, parallel = self.minibatch_size * self.gradient_accumulation, self.parallel
        if parallel.nproc > rows:
            raise ValueError(
                f"parallel.nproc is {parallel.nproc}, but a step has {rows} rows (minibatch_size times "
                "gradient_accumulation), which are dealt out among the processes; take fewer processes or larger steps"
            )
        if parallel.nproc > 1 and parallel.kind == "fsdp2" and self.lora is not None:
            raise ValueError('adapters are not sharded: with lora, set parallel.kind = "ddp"')
        if parallel.nproc > 1 and parallel.kind == "fsdp2" and self.optimizer.kind.rpartition(".")[2] in WHOLE_MATRICES:
            raise ValueError(
                f"optimizer.kind {self.optimizer.kind} needs whole matrices, which fsdp2 cuts up; use adamw or "
                'parallel.kind = "ddp"'
            )
        return self


class SFTSettings(LearnerSettings):
    """Supervised fine-tuning."""

    identity_without_default = frozenset({"evaluation"})

    dataset: DatasetSource
    """Rows ``{prompt, completion}`` or ``{messages: [...]}``."""
    packing: Padded = Padded()
    loss_on: LossOn = LossOn()
    budget: BudgetConfig = BudgetConfig()
    evaluation: HeldOutRows | None = None


class AdaptiveKL(Settings):
    """Controller of the KL coefficient (arXiv:1909.08593, section 2.2)."""

    init_coef: float = Field(default=0.05, ge=0)
    target: float = Field(default=0.1, gt=0)
    """Wished-for KL to the reference policy, nats per sequence."""
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
    epochs: int = Field(default=2, ge=1)
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
    correction: ImportanceCorrection | None = None
    """Old log-probabilities are then the trainer's own, and tokens weighed by how likely the engine drew them."""

    def steps_per_epoch(self, num_trajectories: int) -> int:
        """Optimizer steps of one pass over an iteration's completions."""
        return math.ceil(num_trajectories / (self.minibatch_size * self.gradient_accumulation))

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs * self.steps_per_epoch(self.prompts_per_iteration * self.samples_per_prompt)

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
    """Proximal policy optimization (arXiv:1707.06347) with learnt values, GAE and a KL penalty to a reference."""

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


class GRPOSettings(OnPolicySettings):
    """Group relative policy optimization (arXiv:2402.03300) and its kin."""

    samples_per_prompt: int = Field(default=8, ge=2)
    """Size of a group: completions of one prompt, compared with each other."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each iteration's samples."""
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
