"""Settings of the learners: what enters the key of an update."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollout_core.config.base import SamplingParams, Settings

AveragingRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[AveragingRate, AveragingRate] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall towards 0, which the step after the last would have."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


class BudgetConfig(Settings):
    """When training ends: whichever limit comes first."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; default: as many as ``epochs`` gives."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data when max_steps is not given."""


class JsonlDataset(Settings):
    """A JSONL file of rows."""

    kind: Literal["jsonl_path"] = "jsonl_path"
    path: str = Field(min_length=1)

    def cache_identity(self) -> Any:
        return None  # the content id of the file enters instead


class Padded(Settings):
    """One row a sequence, right-padded to the longest of its minibatch."""

    kind: Literal["off"] = "off"
    max_seq_len: int = Field(default=1024, ge=2)
    """Longer rows are cut at the right and counted."""


class SnapshotPolicy(Settings):
    """When training is made resumable. Changes speed only."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between train-state snapshots."""
    keep_last: int = Field(default=3, ge=1)
    """Older unlabelled snapshots of the run are dropped from the list."""

    def cache_identity(self) -> Any:
        return None


class LossOn(Settings):
    """Which tokens are trained."""

    kind: Literal["assistant_only", "full"] = "assistant_only"


class LearnerSettings(Settings):
    """What every learner shares."""

    optimizer: OptimizerConfig
    minibatch_size: int = Field(default=8, ge=1)
    """Sequences in one forward and backward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Minibatches in one optimizer step."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 autocast where the GPU has it, else float32."""
    snapshots: SnapshotPolicy = SnapshotPolicy()


class SFTSettings(LearnerSettings):
    """Supervised fine-tuning."""

    dataset: JsonlDataset
    """Rows ``{prompt, completion}`` or ``{messages: [...]}``."""
    packing: Padded = Padded()
    loss_on: LossOn = LossOn()
    budget: BudgetConfig = BudgetConfig()


class AdaptiveKL(Settings):
    """Controller of the KL coefficient (arXiv:1909.08593, section 2.2)."""

    init_coef: float = Field(default=0.05, ge=0)
    target: float = Field(default=0.1, gt=0)
    """Wished-for KL to the reference policy, nats per sequence."""
    horizon: int = Field(default=10_000, ge=1)
    """Sequences over which the coefficient reacts."""
    adaptive: bool = True
    """False keeps the coefficient at init_coef."""


class PPOSettings(LearnerSettings):
    """Proximal policy optimization (arXiv:1707.06347) with a value head, GAE and a KL penalty to a reference policy."""

    prompts: JsonlDataset
    """Training prompts: ``{prompt}`` or ``{messages}`` a line; other keys reach the reward."""
    iterations: int = Field(default=10, ge=1)
    """Rounds of generate, score, update."""
    prompts_per_iteration: int = Field(default=128, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    sampling: SamplingParams = SamplingParams()
    epochs: int = Field(default=2, ge=1)
    """Passes over each iteration's samples."""
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
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a completion cut at max_tokens."""

    @model_validator(mode="after")
    def _samples_from_the_policy_itself(self) -> PPOSettings:
        if self.sampling.temperature == 0 or self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                "PPO needs samples of the policy itself: sampling.temperature above 0, top_p 1 and top_k -1; got "
                f"temperature {self.sampling.temperature}, top_p {self.sampling.top_p}, top_k {self.sampling.top_k}"
            )
        return self
