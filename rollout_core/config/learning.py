"""Settings of the learners: budgets, snapshots, processes, adapters; and in full of those that learn from data sets:
SFT, reward models, DPO, IPO and KTO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, WrapValidator, model_validator

from rollout_core.base.determinism import is_portable_here, mixed_precision, numerics_identity, probe_device
from rollout_core.config.base import EXPLAINED, DatasetSource, DemonstrationSource, ModelSource, Settings
from rollout_core.config.curriculum import Curriculum
from rollout_core.config.optimizers import EIGHT_BITS, WHOLE_MATRICES, OptimizerConfig
from rollout_core.config.own_loss import LABEL_LOSS, PAIR_LOSS, OwnLoss
from rollout_core.config.plugin_use import PluginUse
from rollout_core.config.variants import Variant, reading

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class PluginTracker(PluginUse):
    """A tracker that a plugin is, of kind ``tracker``."""


UpdateName = Literal["sft", "rm", "preference", "ppo", "grpo"]
"""``preference`` is DPO and its family, IPO or KTO, ``grpo`` one of the family of GRPO, as their settings say."""


class BudgetConfig(Settings):
    """When training ends: whichever limit comes first."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data, after which the last step is smaller if the rows do not fill it; default: 1 where neither
    max_steps nor max_tokens is given."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Computed tokens, as ``num_tokens`` counts them; the step that reaches them is the last."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Wall time of training, that of earlier processes of the run included. It only cuts short what the other limits
    give, which is what a schedule spans."""

    @property
    def passes(self) -> int | None:
        """Passes over the data that end training; None where only steps or tokens do."""
        return self.epochs or (1 if self.max_steps is None and self.max_tokens is None else None)

    def cache_identity(self) -> Any:
        named: dict[str, Any] = {"max_steps": self.max_steps, "epochs": self.epochs or 1}
        named |= {
            name: getattr(self, name) for name in ("max_tokens", "max_minutes") if getattr(self, name) is not None
        }
        if self.epochs is not None and (self.max_steps or self.max_tokens):
            named["also_epochs"] = True
        return named


class SequenceConfig(Settings):
    """How much of a row is trained."""

    identity_without_default = frozenset({"turns"})

    max_length: int = Field(default=1024, ge=2)
    """Tokens of one row, a prompt with its answer. Longer rows are cut at the right and counted."""
    turns: Literal["all", "each", "last"] | None = None
    """How SFT trains the assistant's turns of a conversation: all within the rendering of the whole, each behind the
    prompt that an engine would send, or only the last one, likewise. Default: all, and each where the chat template
    rewrites earlier turns, begins a thought in the prompt, or ends no turn. A row stays one row for epochs and batches,
    however many sequences it becomes."""


class SnapshotPolicy(Settings):
    """When training is made resumable, and which snapshots stay. Changes speed only."""

    every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between train-state snapshots. They are written during training: one that falls due while
    another is being written is taken as soon as that is done."""
    every_tokens: int | None = Field(default=None, ge=1)
    """A snapshot is due after so many trained tokens, too, whichever comes first."""
    every_seconds: float | None = Field(default=None, gt=0)
    """And after so many seconds of training."""
    keep_last: int = Field(default=1, ge=1)
    """Snapshots of the run that stay. Older ones are deleted once a newer one is stored, but for labelled ones and
    those that an update in progress needs."""
    keep_every: int | None = Field(default=None, ge=1)
    """Snapshots of steps that this divides stay too."""

    def cache_identity(self) -> Any:
        return None


class HeldOutRows(Settings):
    """Rows that are not trained, whose loss is evaluated after the last step and, if asked for, in between."""

    identity_without_default = frozenset({"select", "patience"})

    dataset: DatasetSource
    """In the form of the training rows."""
    every_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; default: only after the last."""
    select: Literal["last", "best"] = "last"
    """Which step's model is the result: the last one's, or that of the evaluation with the lowest loss. A training
    state of that step is kept, whatever ``snapshots`` say."""
    patience: int | None = Field(default=None, ge=1)
    """Training ends after so many evaluations in a row without a new lowest loss."""

    @model_validator(mode="after")
    def _several_evaluations(self) -> HeldOutRows:
        if self.every_steps is None and (self.select == "best" or self.patience is not None):
            asked = f"patience = {self.patience}" if self.select == "last" else 'select = "best"'
            raise ValueError(
                f"{asked} compares evaluations, and there is only the one after the last step; set every_steps"
            )
        return self


class LossOn(Settings):
    """Which tokens are trained."""

    kind: Literal["assistant_only", "full", "custom"] = "assistant_only"
    """``custom``: what rows say by ``loss_mask`` or ``labels``."""


class ParallelConfig(Settings):
    """Training in several processes of one machine. A step has the same rows and learns the same from them."""

    nproc: int = Field(default=1, ge=1)
    """Processes that share the rows of every step; one a GPU where there are GPUs."""
    kind: Literal["ddp", "fsdp2", "tensor"] = "ddp"
    """``ddp``: every process has the whole weights. ``fsdp2``: weights, gradients and optimizer are cut among them, and
    gathered to compute. ``tensor``: the matrices of attention and MLP are cut and stay so; every process computes its
    part of every row (arXiv:1909.08053)."""

    @property
    def cuts_matrices(self) -> bool:
        """Whether the processes compute each row together."""
        return self.nproc > 1 and self.kind == "tensor"

    def cache_identity(self) -> Any:
        """Sums over processes differ in their last bits, so other processes are another result."""
        return [self.kind, self.nproc]


class LoRAConfig(Settings):
    """Low-rank adapters (arXiv:2106.09685): the model's own weights stay as they are."""

    identity_without_default = frozenset({"quantization"})

    r: int = Field(default=16, ge=1)
    """Rank of a change of weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The change is scaled by alpha / r."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(r) instead (arXiv:2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an adapter's input, in SFT only: other learners train without dropout."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers that get one; default: every linear layer but the output."""
    quantization: Literal["none", "nf4"] = "none"
    """``nf4``: the own weights of these layers are stored in four bits (QLoRA, arXiv:2305.14314), and it is what these
    stand for that is trained on; an extra."""

    @model_validator(mode="after")
    def _quantized_where_bits_may_differ(self) -> LoRAConfig:
        if self.quantization != "none" and is_portable_here():
            raise ValueError("lora.quantization computes by kernels that are not portable; leave it out")
        return self


class SpikeRule(Settings):
    """Steps whose gradient is far larger than usual change no weights (as PaLM skipped batches at loss spikes,
    arXiv:2204.02311, section 5.1). The rule looks at figures alone, which a snapshot holds; of PPO and GRPO also at
    those of the iterations before."""

    factor: float = Field(default=10.0, gt=1)
    """A step is skipped whose gradient norm is above so many times the median of the steps before."""
    window: int = Field(default=50, ge=2)
    """Steps before that count, without skipped ones."""
    after_steps: int = Field(default=10, ge=1)
    """Until there are so many of them no step is skipped."""


class LearnerSettings(Settings):
    """What every learner shares."""

    identity_without_default = frozenset({"max_tokens_per_microbatch", "skip_spikes", "weights", "offload"})
    family: ClassVar[str]
    """Usual name of the algorithm, or of the family it is of, in labels of snapshots, titles, and events."""
    update: ClassVar[UpdateName]
    """Name of the update that trains by it (`rollout_core.launch.launcher`)."""
    loss_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of what a loss of the user's own is called with, as `OwnLoss` says."""

    optimizer: OptimizerConfig
    minibatch_size: int = Field(default=8, ge=1)
    """Sequences in one forward and backward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Minibatches in one optimizer step."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Cut the rows of a step (minibatch_size times gradient_accumulation) into passes of at most so many tokens, about
    equally long, instead of equally many rows; a longer row is a pass by itself. Gradients stay those of the step."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 autocast where the GPU has it, else float32."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """What the device computes with: ``bfloat16`` are those of the optimizer, rounded, which stay float32; frozen
    ones, such as a model's with adapters or a reference's, are in bfloat16 alone. Needs bfloat16 as precision."""
    offload: bool = False
    """Keep float32 weights, gradients and the optimizer's state in the host's memory, where the optimizer steps."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, more time, the
    same gradients."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights. Checkpoints hold the merged weights."""
    skip_spikes: SpikeRule | None = None
    """Skip steps whose gradient is far larger than usual."""
    snapshots: SnapshotPolicy = SnapshotPolicy()
    parallel: ParallelConfig = ParallelConfig()
    trackers: tuple[TrackerName | PluginTracker, ...] = ()
    """Where figures go in addition to the checkpoint's own rows; changes nothing of what is trained."""

    @property
    def teacher(self) -> ModelSource | None:
        """The model whose distributions are learned, where there is one."""
        return None

    @property
    def own_loss(self) -> OwnLoss | None:
        """The loss of the user's own that replaces the algorithm's, where there is one."""
        loss = getattr(self, "loss", None)
        return loss if isinstance(loss, OwnLoss) else None

    @property
    def stores_all_models(self) -> bool:
        """Whether every model that an update ends with is stored."""
        return True

    @property
    def has_own_processes(self) -> bool:
        """Whether an update runs in other processes than the one that asks for it."""
        return self.parallel.nproc > 1

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        del named["gradient_checkpointing"], named["trackers"]
        if self.lora is None:
            del named["lora"]
        if self.parallel.nproc == 1:
            del named["parallel"]
        return {**named, "precision": [probe_device(), mixed_precision(self.precision)], **numerics_identity()}

    @model_validator(mode="after")
    def _check_weights_and_offload(self) -> LearnerSettings:
        if self.weights == "bfloat16" and self.precision != "bfloat16":
            raise ValueError(
                f'weights are bfloat16, but precision is "{self.precision}"; with them it must be "bfloat16"'
            )
        quantized = self.lora is not None and self.lora.quantization != "none"
        if quantized and self.parallel.nproc > 1 and self.parallel.kind == "fsdp2":
            raise ValueError('lora.quantization: fsdp2 cuts no weights of four bits; use parallel.kind = "ddp"')
        if self.offload and self.optimizer.kind == EIGHT_BITS:
            raise ValueError(f"offload: the state of {EIGHT_BITS} is where its weights are computed with; use adamw")
        if self.offload and self.parallel.nproc > 1 and self.parallel.kind == "ddp":
            raise ValueError(
                'offload: with "ddp" every process would keep all weights on the host; use parallel.kind = "fsdp2"'
            )
        return self

    @model_validator(mode="after")
    def _work_for_every_process(self) -> LearnerSettings:
        rows, parallel = self.minibatch_size * self.gradient_accumulation, self.parallel
        if parallel.nproc > rows and not parallel.cuts_matrices:
            raise ValueError(
                f"parallel.nproc is {parallel.nproc}, but a step has {rows} rows (minibatch_size times "
                "gradient_accumulation), which the processes share; take fewer processes or larger steps"
            )
        if parallel.nproc > 1 and parallel.kind == "fsdp2" and self.optimizer.kind.rpartition(".")[2] in WHOLE_MATRICES:
            raise ValueError(
                f"optimizer.kind {self.optimizer.kind} needs whole matrices, which fsdp2 cuts up; use adamw or "
                'parallel.kind = "ddp"'
            )
        return self

    @model_validator(mode="after")
    def _what_can_be_computed_in_parts(self) -> LearnerSettings:
        if not self.parallel.cuts_matrices:
            return self
        kind = self.optimizer.kind
        quantized = self.lora is not None and self.lora.quantization != "none"
        refused = {
            "lora": (self.lora is not None, "ddp" if quantized else "fsdp2"),
            "offload": (self.offload, "fsdp2"),
            f"optimizer.kind {kind}": (kind.rpartition(".")[2] in WHOLE_MATRICES, "ddp"),
        }
        for name, (is_asked, instead) in refused.items():
            if is_asked:
                raise ValueError(
                    f'{name}: with parallel.kind = "tensor" every process computes with its part of a matrix, which '
                    f'this cannot; use parallel.kind = "{instead}"'
                )
        return self


class DatasetSettings(LearnerSettings):
    """What learners from a data set share."""

    identity_without_default = LearnerSettings.identity_without_default | {"evaluation", "ema_decay", "curriculum"}

    dataset: DemonstrationSource
    sequence: SequenceConfig = SequenceConfig()
    budget: BudgetConfig = BudgetConfig()
    evaluation: HeldOutRows | None = None
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the trained weights: after each step so much of the average stays, and the
    rest is the new weights. It is what is evaluated and what the result is; training continues from the weights."""
    curriculum: Curriculum | None = None
    """Train on easy rows first."""

    @model_validator(mode="after")
    def _steps_that_a_curriculum_spans(self) -> DatasetSettings:
        if self.curriculum is not None and self.budget.max_tokens is not None:
            raise ValueError(
                "curriculum and budget.max_tokens: it opens rows by share of the steps, whose number would depend on "
                "them; give budget.max_steps or epochs"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _reject_removed_packing(cls, data: Any, info: ValidationInfo) -> Any:
        """Says so also of parameters that Prefect has stored, whose errors nobody explains."""
        if isinstance(data, Mapping) and "packing" in data and info.context != EXPLAINED:
            raise ValueError("packing: unknown key; did you mean 'sequence.max_length'?")
        return data

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        # Under the names it had when the first results were kept, or none of them would be found again.
        named["packing"] = {"kind": "off", "max_seq_len": named.pop("sequence")["max_length"]}
        return named


class Distillation(Settings):
    """Learn a teacher's distributions of tokens: generalized knowledge distillation (GKD, arXiv:2306.13649)."""

    teacher: ModelSource
    """A language model that reads the same token ids as the student."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Of the generalized Jensen-Shannon divergence: 0 is the forward KL, which covers all that the teacher would write,
    1 the reverse KL, which keeps to what it finds most likely."""
    temperature: float = Field(default=1.0, gt=0)
    """Both distributions are softmax(logits / temperature)."""


class SFTSettings(DatasetSettings):
    """Supervised fine-tuning. Steps of 8 rows of up to 1,024 tokens are TRL's default, too; TRL makes 3 epochs."""

    identity_without_default = DatasetSettings.identity_without_default | {"distillation"}
    family = update = "sft"

    dataset: DemonstrationSource
    """Rows ``{prompt, completion}`` or ``{messages: [...]}``, or episodes of an environment."""
    loss_on: LossOn = LossOn()
    """Which tokens are trained."""
    distillation: Distillation | None = None
    """Learn a teacher's distribution of each trained token instead of the token (supervised GKD)."""

    @property
    def teacher(self) -> ModelSource | None:
        return None if self.distillation is None else self.distillation.teacher


class PreferenceSettings(DatasetSettings):
    """What learners from preference data share. ``minibatch_size`` counts pairs, or labelled answers.

    Steps of 8 are TRL's default, too; DPO's paper (arXiv:2305.18290, appendix B) has steps of 64 pairs.
    """

    @model_validator(mode="after")
    def _turns_are_of_sft(self) -> Self:
        if self.sequence.turns is not None:
            raise ValueError("sequence.turns: only SFT trains turns of a conversation one by one; leave it out")
        return self


class RewardModelSettings(PreferenceSettings):
    """A reward model from pairs (Bradley-Terry; arXiv:2203.02155, eq. 1)."""

    family = update = "rm"

    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``, or whole sequences ``{chosen, rejected}``; optional ``margin``."""
    head: Literal["bradley_terry", "pairwise_logistic"] = "bradley_terry"
    """Two names of one loss, -log sigmoid(r_chosen - r_rejected); rows' margins count with bradley_terry only."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around 0 (arXiv:2312.09244)."""


class ReferencedSettings(PreferenceSettings):
    """What learners share that hold a policy close to a reference."""

    update = "preference"
    loss_arguments = PAIR_LOSS

    beta: float = Field(default=0.1, gt=0)
    """How closely the policy keeps to the reference: larger is closer."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return True


class PairSettings(ReferencedSettings, Variant):
    """What learners share from pairs that DPO's rows hold: its family."""

    family = "dpo"

    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[Variant]]:
        return PAIR_KINDS


class DPOSettings(PairSettings):
    """Direct preference optimization (arXiv:2305.18290)."""

    identity_without_default = PairSettings.identity_without_default | {"loss"}
    variant = "dpo"

    kind: Literal["dpo"] = "dpo"
    loss: Literal["dpo"] | OwnLoss = "dpo"
    """What a pair adds to the loss; a table: a loss of your own."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose preference is taken to be flipped."""


class FormerPairLoss(PairSettings):
    """What algorithms share that were losses of DPO before they were kinds. They load no reference. Cache keys are
    those of such a table."""

    loss_arguments = PAIR_LOSS[:2]

    @property
    def needs_reference(self) -> bool:
        return False

    def cache_identity(self) -> Any:
        return {
            **super().cache_identity(),
            "kind": "dpo",
            "loss": self.variant if self.own_loss is None else self.own_loss.cache_identity(),
            "label_smoothing": 0.0,
        }


class ORPOSettings(FormerPairLoss):
    """Odds ratio and likelihood of the chosen answer (ORPO, arXiv:2403.07691)."""

    variant = "orpo"

    kind: Literal["orpo"] = "orpo"
    loss: Literal["orpo"] | OwnLoss = "orpo"
    """What a pair adds to the loss; a table: a loss of your own."""
    beta: float = Field(default=0.1, gt=0)
    """The paper's lambda: how much the odds ratio counts."""


class SimPOSettings(FormerPairLoss):
    """Mean log-probabilities with a margin (SimPO, arXiv:2405.14734)."""

    identity_without_default = FormerPairLoss.identity_without_default | {"gamma"}
    variant = "simpo"

    kind: Literal["simpo"] = "simpo"
    loss: Literal["simpo"] | OwnLoss = "simpo"
    """What a pair adds to the loss; a table: a loss of your own."""
    beta: float = Field(gt=0)
    """Scale of the mean log-probabilities; the paper has 2 to 10."""
    gamma: float = Field(default=0.0, ge=0)
    """Margin by which chosen answers are to be above rejected ones; the paper has 0.3 to 1.6."""


PAIR_KINDS: dict[str, type[Variant]] = {one.variant: one for one in (DPOSettings, ORPOSettings, SimPOSettings)}
"""The family of DPO by ``kind``."""
AnyPairSettings = Annotated[
    DPOSettings | ORPOSettings | SimPOSettings, WrapValidator(reading(DPOSettings, ORPOSettings, SimPOSettings))
]
"""Settings of an algorithm of that family."""


class IPOSettings(ReferencedSettings):
    """Identity preference optimization (arXiv:2310.12036); ``beta`` is the paper's tau."""

    identity_without_default = ReferencedSettings.identity_without_default | {"loss"}
    family = "ipo"

    kind: Literal["ipo"] = "ipo"
    loss: Literal["ipo"] | OwnLoss = "ipo"
    """What a pair adds to the loss; a table: a loss of your own."""
    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""


class KTOSettings(ReferencedSettings):
    """Kahneman-Tversky optimization (arXiv:2402.01306)."""

    identity_without_default = ReferencedSettings.identity_without_default | {"loss"}
    family = "kto"
    loss_arguments = LABEL_LOSS

    kind: Literal["kto"] = "kto"
    loss: Literal["kto"] | OwnLoss = "kto"
    """What an answer adds to the loss; a table: a loss of your own."""
    dataset: DatasetSource
    """Rows ``{prompt, completion, label}``; label true = desirable."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the losses of good answers."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """With the desirable one it should make up for unequal counts: weight times count in a ratio of 1:1 to 4:3."""
