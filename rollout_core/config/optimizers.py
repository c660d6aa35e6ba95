"""Optimizers by name: sgd, adam and adamw, and whatever else `torch.optim` has.

Torch is imported only for what is asked of it, so that reading a configuration stays quick.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout_core.base.numerics import is_portable_here

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
