"""Settings of the learners: optimizers by name, budgets, snapshots, processes, adapters; and in full of those that
learn from data sets: SFT, reward models, DPO, IPO and KTO.

Torch is imported only for what is asked of it, so that reading a configuration stays quick.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rollout_core.base.determinism import is_portable_here, mixed_precision, numerics_identity, probe_device
from rollout_core.config.base import EXPLAINED, DatasetSource, Settings

if TYPE_CHECKING:
    import torch


OWN_KEYS = ("lr", "weight_decay")
"""Arguments of every optimizer that have a key of their own in a configuration."""
ADAM_KEYS = ("betas", "eps")
"""Those that adam and adamw have besides."""
_KNOWN = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
_UNFIT = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it takes matrices only, and models have vectors too",
}
_SQUARE_ROOTS = ("Adadelta", "Adagrad", "NAdam", "RAdam", "RMSprop")
"""They take them by MKL, whose portable branch rounds them as the CPU's maker does; Adam and AdamW only where they are
not fused."""
FUSED = ("Adam", "AdamW")
OTHER_KERNELS = {"fused", "foreach", "differentiable"}
"""Options by which Adam is not one fused kernel."""


def optimizer_class(kind: str) -> type[torch.optim.Optimizer]:
    """The class that ``kind`` names: ``adamw``, ``Adafactor``, ``torch.optim.RAdam``. Raises ValueError for another."""
    import torch

    name = _KNOWN.get(kind, kind.removeprefix("torch.optim."))
    found = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name in _UNFIT:
        raise ValueError(f"torch.optim.{name} cannot train here: {_UNFIT[name]}")
    if name not in found:
        fit = [*_KNOWN, *sorted(found.keys() - _UNFIT.keys())]
        near = difflib.get_close_matches(name, fit, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(fit)}"
        raise ValueError(f"no optimizer {kind!r} in torch.optim; {hint}")
    return found[name]


def optimizer_arguments(
    kind: str, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of the optimizer's class.

    ``betas`` and ``eps`` are those of adam and adamw; for others they are left out. Raises ValueError for an option
    that the class does not have, or that has a key of its own.
    """
    cls = optimizer_class(kind)
    parameters = inspect.signature(cls.__init__).parameters
    arguments: dict[str, Any] = {"lr": lr}
    if "weight_decay" in parameters:
        arguments["weight_decay"] = weight_decay
    elif weight_decay:
        raise ValueError(f"{cls.__name__} has no weight_decay; leave it out")
    own = OWN_KEYS
    if cls.__name__ in ("Adam", "AdamW"):
        arguments |= {"betas": betas, "eps": eps}
        own = (*OWN_KEYS, *ADAM_KEYS)
    for name in options:
        if name in own:
            raise ValueError(f"options.{name}: write optimizer.{name} instead")
        if name not in parameters or name in ("self", "params"):
            names = [other for other in parameters if other not in ("self", "params", *own)]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
            raise ValueError(f"options.{name}: {cls.__name__} has no such argument; {hint}")
    _refuse_unportable(cls.__name__, options)
    return arguments | dict(options)


def _refuse_unportable(name: str, options: Mapping[str, Any]) -> None:
    if is_portable_here() and (name in _SQUARE_ROOTS or (name in FUSED and OTHER_KERNELS & options.keys())):
        raise ValueError(
            f"torch.optim.{name}{f' with options {dict(options)}' if name in FUSED else ''} takes square roots that "
            "differ from one make of CPU to another; with portable numerics use adamw, adam, sgd or Adafactor"
        )


def check_optimizer(kind: str, **settings: Any) -> None:
    """Raises ValueError where no such optimizer can be made; torch's own words say why a value is refused."""
    import torch

    cls, arguments = optimizer_class(kind), optimizer_arguments(kind, **settings)
    try:
        cls([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{cls.__name__} refuses its settings: {error}") from error


PLAIN_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Known without asking torch."""
WHOLE_MATRICES = ("Adafactor",)
"""Optimizers whose state does not have the shape of its parameter."""
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
AveragingRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    identity_without_default = frozenset({"options", "warmup_ratio", "min_lr"})

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
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Those steps as a share of all that the schedule spans, rounded up; instead of their number."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall towards ``min_lr``, which the step after the last would have."""
    min_lr: float = Field(default=0.0, ge=0)
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
    def _one_warm_up_and_a_rate_to_fall_to(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio are two ways to say one thing; give one of them")
        if self.min_lr and self.schedule == "constant":
            raise ValueError("min_lr is what linear and cosine schedules fall towards, and schedule is constant")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr}, above lr {self.lr}; the schedule falls from lr towards min_lr")
        return self

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


class SequenceConfig(Settings):
    """How much of a row is trained."""

    max_length: int = Field(default=1024, ge=2)
    """Tokens of one row, a prompt with its answer. Longer rows are cut at the right and counted."""


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
    """Rows that are not trained, whose loss is evaluated after the last step and, if asked for, in between."""

    dataset: DatasetSource
    """In the form of the training rows."""
    every_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; default: only after the last."""


class LossOn(Settings):
    """Which tokens are trained."""

    kind: Literal["assistant_only", "full", "custom"] = "assistant_only"
    """``custom``: what rows say by ``loss_mask`` or ``labels``."""


class ParallelConfig(Settings):
    """Training in several processes of one machine. A step has the same rows and learns the same from them."""

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


class SpikeRule(Settings):
    """Steps whose gradient is far larger than usual change no weights (as PaLM skipped batches at loss spikes,
    arXiv:2204.02311, section 5.1). The rule looks at the rows of figures alone, which a snapshot holds."""

    factor: float = Field(default=10.0, gt=1)
    """A step is skipped whose gradient norm is above so many times the median of the steps before."""
    window: int = Field(default=50, ge=2)
    """Steps before that count, without skipped ones."""
    after_steps: int = Field(default=10, ge=1)
    """Until there are so many of them no step is skipped."""


class LearnerSettings(Settings):
    """What every learner shares."""

    identity_without_default = frozenset({"max_tokens_per_microbatch", "skip_spikes"})

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
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, more time, the
    same gradients."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights. Checkpoints hold the merged weights."""
    skip_spikes: SpikeRule | None = None
    """Skip steps whose gradient is far larger than usual."""
    snapshots: SnapshotPolicy = SnapshotPolicy()
    parallel: ParallelConfig = ParallelConfig()
    trackers: tuple[TrackerName, ...] = ()
    """Where figures go beside the checkpoint's own rows; changes nothing of what is trained."""

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
    def _work_for_every_process(self) -> LearnerSettings:
        rows, parallel = self.minibatch_size * self.gradient_accumulation, self.parallel
        if parallel.nproc > rows:
            raise ValueError(
                f"parallel.nproc is {parallel.nproc}, but a step has {rows} rows (minibatch_size times "
                "gradient_accumulation), which the processes share; take fewer processes or larger steps"
            )
        if parallel.nproc > 1 and parallel.kind == "fsdp2" and self.lora is not None:
            raise ValueError('adapters are not sharded: with lora, set parallel.kind = "ddp"')
        if parallel.nproc > 1 and parallel.kind == "fsdp2" and self.optimizer.kind.rpartition(".")[2] in WHOLE_MATRICES:
            raise ValueError(
                f"optimizer.kind {self.optimizer.kind} needs whole matrices, which fsdp2 cuts up; use adamw or "
                'parallel.kind = "ddp"'
            )
        return self


class DatasetSettings(LearnerSettings):
    """What learners from a data set share."""

    identity_without_default = LearnerSettings.identity_without_default | {"evaluation"}

    dataset: DatasetSource
    sequence: SequenceConfig = SequenceConfig()
    budget: BudgetConfig = BudgetConfig()
    evaluation: HeldOutRows | None = None

    @model_validator(mode="before")
    @classmethod
    def _packing_is_gone(cls, data: Any, info: ValidationInfo) -> Any:
        """Says so also of parameters that Prefect has stored, whose errors nobody explains."""
        if isinstance(data, Mapping) and "packing" in data and info.context != EXPLAINED:
            raise ValueError("packing: unknown key; did you mean 'sequence.max_length'?")
        return data

    def cache_identity(self) -> Any:
        named = super().cache_identity()
        # Under the names it had when the first results were kept, or none of them would be found again.
        named["packing"] = {"kind": "off", "max_seq_len": named.pop("sequence")["max_length"]}
        return named


class SFTSettings(DatasetSettings):
    """Supervised fine-tuning. Steps of 8 rows of up to 1,024 tokens are TRL's default, too; TRL makes 3 epochs."""

    dataset: DatasetSource
    """Rows ``{prompt, completion}`` or ``{messages: [...]}``."""
    loss_on: LossOn = LossOn()


class PreferenceSettings(DatasetSettings):
    """What learners from preference data share. ``minibatch_size`` counts pairs, or labelled answers.

    Steps of 8 are TRL's default, too; DPO's paper (arXiv:2305.18290, appendix B) has steps of 64 pairs.
    """


class RewardModelSettings(PreferenceSettings):
    """A reward model from pairs (Bradley-Terry; arXiv:2203.02155, eq. 1)."""

    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``, or whole sequences ``{chosen, rejected}``; optional ``margin``."""
    head: Literal["bradley_terry", "pairwise_logistic"] = "bradley_terry"
    """Two names of one loss, -log sigmoid(r_chosen - r_rejected); rows' margins count with bradley_terry only."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around 0 (arXiv:2312.09244)."""


class ReferencedSettings(PreferenceSettings):
    """What learners share that hold a policy close to a reference."""

    beta: float = Field(default=0.1, gt=0)
    """How closely the policy keeps to the reference: larger is closer."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return True


class DPOSettings(ReferencedSettings):
    """Direct preference optimization (arXiv:2305.18290), and losses of pairs that need no reference."""

    identity_without_default = ReferencedSettings.identity_without_default | {"loss", "gamma"}

    kind: Literal["dpo"] = "dpo"
    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""
    loss: Literal["dpo", "orpo", "simpo"] = "dpo"
    """``orpo``: odds ratio and likelihood of the chosen answer (arXiv:2403.07691), ``beta`` is its lambda; ``simpo``:
    mean log-probabilities with a margin (arXiv:2405.14734). Neither loads a reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose preference is taken to be flipped; of ``dpo``."""
    gamma: float = Field(default=0.0, ge=0)
    """By how much chosen answers are to be above rejected ones, of ``simpo``; its paper has 0.3 to 1.6."""

    @property
    def needs_reference(self) -> bool:
        return self.loss == "dpo"

    @model_validator(mode="after")
    def _keys_of_its_loss(self) -> DPOSettings:
        if self.gamma and self.loss != "simpo":
            raise ValueError(f'gamma is a margin of loss = "simpo", and loss is "{self.loss}"; leave it out')
        if self.label_smoothing and self.loss != "dpo":
            raise ValueError(f'label_smoothing is of loss = "dpo", and loss is "{self.loss}"; leave it out')
        if self.loss == "simpo" and "beta" not in self.model_fields_set:
            raise ValueError(
                'beta: give it with loss = "simpo", which scales mean log-probabilities; its paper has 2 to 10'
            )
        return self


class IPOSettings(ReferencedSettings):
    """Identity preference optimization (arXiv:2310.12036); ``beta`` is the paper's tau."""

    kind: Literal["ipo"] = "ipo"
    dataset: DatasetSource
    """Rows ``{prompt, chosen, rejected}``."""


class KTOSettings(ReferencedSettings):
    """Kahneman-Tversky optimization (arXiv:2402.01306)."""

    kind: Literal["kto"] = "kto"
    dataset: DatasetSource
    """Rows ``{prompt, completion, label}``; label true = desirable."""
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)
    """With the desirable one it should make up for unequal counts: weight times count in a ratio of 1:1 to 4:3."""
