"""Optimizers by name, their arguments, and schedules of learning rates.

Torch is imported only for what is asked of it, so that reading a configuration stays quick.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rollout_core.base.determinism import is_portable_here
from rollout_core.config.base import Settings

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


EIGHT_BITS = "adamw8bit"
"""AdamW of bitsandbytes, an extra: both moments in a byte each, by blocks (arXiv:2110.02861)."""
PLAIN_OPTIMIZERS = ("adamw", "adam", "sgd", EIGHT_BITS)
"""Known without asking torch."""
WHOLE_MATRICES = ("Adafactor", EIGHT_BITS)
"""Optimizers whose state does not have the shape of its parameter."""
AveragingRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """Optimizer and learning-rate schedule."""

    identity_without_default = frozenset({"options", "warmup_ratio", "min_lr", "layer_decay"})

    kind: str = "adamw"
    """``adamw``, ``adam``, ``sgd`` or ``adamw8bit`` (an extra), or a class of torch.optim by its name, such as
    ``Adafactor``."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled from the gradient with adamw."""
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
    """Learning rate at which the schedule ends."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Rates by depth (arXiv:1801.06146, section 3.1): that of a layer is so many times that of the next one, down to
    the embeddings. The output, with the last norm and heads, has ``lr`` itself; 0.75 to 0.95 are usual."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer's class."""
        if self.kind == EIGHT_BITS:
            return {name: getattr(self, name) for name in (*OWN_KEYS, *ADAM_KEYS)}
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
        if self.kind == EIGHT_BITS and self.options:
            raise ValueError(f"options: {EIGHT_BITS} takes none; leave them out")
        if self.kind == EIGHT_BITS and is_portable_here():
            raise ValueError(f"{EIGHT_BITS} computes by kernels of its own, which are not portable; use adamw")
        if self.kind in PLAIN_OPTIMIZERS and not self.options:
            return self
        for name in ADAM_KEYS:
            default = type(self).model_fields[name].default
            if self.kind not in PLAIN_OPTIMIZERS and getattr(self, name) != default:
                raise ValueError(f"{name} is of adam and adamw; what {self.kind} takes belongs into its options")
        check_optimizer(self.kind, **self._own())
        return self
