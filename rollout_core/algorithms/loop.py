"""The one training loop: accumulate, clip, step, log, snapshot.

An algorithm supplies the minibatches of a step, as a pure function of the step's number, and the loss of one of them.
So a run is resumed by its step alone, and what a minibatch contains never depends on what was trained before.
"""

from __future__ import annotations

import ctypes
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollout_core.algorithms.parallel import (
    GradientSum,
    all_reduce_sum,
    broadcast_from_rank0,
    clip_gradients,
    seed_step,
    split_across_ranks,
    world_size,
)
from rollout_core.algorithms.state import TrainState
from rollout_core.base.determinism import check_numerics, mixed_precision, probe_device
from rollout_core.base.errors import ConfigError, Fatal
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import LearnerSettings, OptimizerConfig, SpikeRule
from rollout_core.config.learning import OTHER_KERNELS, optimizer_class

log = logging.getLogger(__name__)
BatchT = TypeVar("BatchT")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_FROM_HEAP = 2**25
"""Bytes; glibc takes no more. Larger tensors come from and go to the kernel by themselves."""
KEPT_BYTES = 2**28
"""Of free memory at the top of the heap."""


@dataclass(frozen=True)
class MinibatchLoss:
    """Loss of one minibatch and the figures it adds to the step's."""

    loss: Tensor
    """Scalar; the sum over the minibatches of a step is the loss of the step."""
    metrics: dict[str, tuple[Any, float]]
    """Name -> (mean over the minibatch, weight). A step logs the weighted mean."""


class Algorithm(Protocol, Generic[BatchT]):
    """What the loop needs of an algorithm."""

    name: str
    num_steps: int
    """Optimizer steps of the whole run; training ends at this step."""

    def minibatches(self, step: int) -> Sequence[BatchT]:
        """Minibatches of optimizer step ``step`` (from 0). Must depend on nothing but ``step``."""
        ...

    def loss(self, batch: BatchT, step_batches: Sequence[BatchT]) -> MinibatchLoss:
        """Forward pass of one minibatch; ``step_batches`` are all of its step, for the denominator."""
        ...

    def num_tokens(self, batch: BatchT) -> int:
        """Real tokens of a minibatch."""
        ...

    def sequences(self, batch: BatchT) -> list[list[int]]:
        """Token ids of a minibatch, for people to look at."""
        ...


@dataclass(frozen=True)
class LoopHooks:
    """What surrounds training. All are optional."""

    evaluate: Callable[[TrainState, bool], dict[str, float]] = lambda state, is_last: {}
    """After each optimizer step, with whether it was the last; gives further figures for its row."""
    on_step: Callable[[dict[str, float]], None] = lambda row: None
    """After each optimizer step, with its row of figures."""
    on_snapshot: Callable[[TrainState], None] = lambda state: None
    """Every ``snapshots.every_steps`` steps, not after the last."""
    on_failure: Callable[[TrainState], None] = lambda state: None
    """When a step is not finite, with the state before it."""
    keep_batch: Callable[[list[list[int]]], ContentId] = lambda sequences: hash_bytes(canonical_json(sequences))
    """Then also with the token ids of each minibatch; gives the content id by which they can be looked at."""


def build_accelerator(precision: str) -> Accelerator:
    """An accelerator for one update; ``auto`` means bfloat16 where a GPU has it, else float32."""
    check_numerics(mixed_precision(precision))
    if probe_device() == "cpu":
        keep_freed_memory()
    # accelerate refuses another precision than that of the first update of the process.
    AcceleratorState._reset_state()
    return Accelerator(
        mixed_precision="bf16" if mixed_precision(precision) == "bfloat16" else "no",
        cpu=world_size() > 1 and probe_device() == "cpu",  # or accelerate would look for GPUs to divide
    )


def build_optimizer(config: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer ``config`` names, over what of ``parameters`` is trained, in order; Adam in one fused kernel.

    Weights decay, embeddings included; norms and biases, which are vectors, do not: as transformers' Trainer has it.
    """
    cls, arguments = optimizer_class(config.kind), config.arguments()
    if cls in (torch.optim.Adam, torch.optim.AdamW) and not OTHER_KERNELS & arguments.keys():
        arguments["fused"] = True
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not arguments.get("weight_decay"):
        return cls(trained, **arguments)
    weights = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return cls([group for group in groups if group["params"]], **arguments)


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then constant, or linear or cosine decay to ``min_lr``
    at step ``num_steps``, which is never taken."""
    warmup_steps = config.warmup_steps or math.ceil(config.warmup_ratio * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    falling = config.lr - config.min_lr
    if config.schedule == "linear":
        return config.min_lr + falling * (1.0 - progress)
    return config.min_lr + falling * 0.5 * (1.0 + math.cos(math.pi * progress))


def is_spike(grad_norm: float, rows: Sequence[Mapping[str, float]], rule: SpikeRule) -> bool:
    """Whether ``grad_norm`` is above ``rule.factor`` times the median of the last steps, of which ``rows`` tell."""
    before = [row["grad_norm"] for row in rows if not row.get("skipped")][-rule.window :]
    return len(before) >= rule.after_steps and grad_norm > rule.factor * statistics.median(before)


def train(
    algorithm: Algorithm[BatchT],
    state: TrainState,
    settings: LearnerSettings,
    accelerator: Accelerator,
    *,
    total_steps: int | None = None,
    max_seconds: float | None = None,
    hooks: LoopHooks | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run ``algorithm`` from ``state.step`` to its last step, changing ``state``.

    ``total_steps`` is what the learning-rate schedule spans; default: the algorithm's own number of steps. The step in
    which ``state.seconds`` reach ``max_seconds`` is the last one.
    Several processes share the minibatches of each step; the figures are those of all. Collective.
    Raises Fatal when a loss or gradient is not finite; the state is then still that of the last good step.
    """
    hooks = hooks or LoopHooks()
    total_steps = total_steps or algorithm.num_steps
    parameters = [parameter for _, parameter in state.trained_parameters()]
    gradients = GradientSum(parameters)
    started = clock() - state.seconds

    def is_over() -> bool:
        return state.step >= algorithm.num_steps or (max_seconds is not None and state.seconds >= max_seconds)

    over = is_over()
    while not over:
        step = state.step
        rate = learning_rate(settings.optimizer, step, total_steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate

        seed_step(state.seed, step)
        batches = algorithm.minibatches(step)
        row = _accumulate(algorithm, batches, accelerator, gradients)
        row["grad_norm"] = clip_gradients(parameters, settings.optimizer.max_grad_norm)
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            state.optimizer.zero_grad(set_to_none=True)
            hooks.on_failure(state)
            kept = [hooks.keep_batch(algorithm.sequences(batch)) for batch in batches]
            raise _not_finite(f"{algorithm.name} step {step + 1}", row, kept)
        if not _skips(f"{algorithm.name} step {step + 1}", row, state, settings.skip_spikes):
            state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.seconds = broadcast_from_rank0(clock() - started, accelerator.device)
        over = is_over()

        row |= {"step": state.step, "learning_rate": rate}
        row["num_tokens"] = sum(algorithm.num_tokens(batch) for batch in batches)
        row |= hooks.evaluate(state, over)
        state.metrics.append(row)
        hooks.on_step(row)
        if state.step % settings.snapshots.every_steps == 0 and not over:
            hooks.on_snapshot(state)
    if state.step < algorithm.num_steps:
        log.info("%s: wall time is used up at step %d of %d", algorithm.name, state.step, algorithm.num_steps)


def _skips(step: str, row: dict[str, float], state: TrainState, rule: SpikeRule | None) -> bool:
    """Whether ``rule`` skips the step that ``row`` tells of, which then says so."""
    if rule is None:
        return False
    row["skipped"] = float(is_spike(row["grad_norm"], state.metrics, rule))
    if row["skipped"]:
        log.warning(
            "%s is skipped: its gradient norm %.4g is far above that of the steps before", step, row["grad_norm"]
        )
    return bool(row["skipped"])


def _not_finite(step: str, row: Mapping[str, float], kept: Sequence[ContentId]) -> Fatal:
    return Fatal(
        f"{step}: loss {row['loss']}, gradient norm {row['grad_norm']}; both must be finite. The last snapshot is from "
        "before this step; lower optimizer.lr or look at the token ids of its minibatches, JSON in the object store: "
        + ", ".join(kept)
    )


def _accumulate(
    algorithm: Algorithm[BatchT], batches: Sequence[BatchT], accelerator: Accelerator, gradients: GradientSum
) -> dict[str, float]:
    """Forward and backward passes of a step's minibatches; leaves the gradients of all ranks, gives the step's figures.
    Collective."""
    own = list(split_across_ranks(batches))
    figures = StepFigures()
    for number, (batch, counts) in enumerate(own, start=1):
        with accelerator.autocast():
            result = algorithm.loss(batch, batches)
        if number == len(own):
            gradients.before_last_backward()
        accelerator.backward(result.loss if counts else 0.0 * result.loss)
        figures.add(result, counts=counts)
    gradients.finish()
    return figures.row()


class StepFigures:
    """Sums a step's figures on the device and reads them once."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._loss: Any = 0.0
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, result: MinibatchLoss, *, counts: bool = True) -> None:
        """Those of one minibatch; of one that does not count, only the names."""
        self._device = result.loss.device
        if counts:
            self._loss = self._loss + result.loss.detach()
        for name, (value, weight) in result.metrics.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + (value * weight if counts else 0.0)
            self._weights[name] = self._weights.get(name, 0.0) + (weight if counts else 0.0)

    def row(self) -> dict[str, float]:
        """The loss, and the weighted mean of every other figure, of all processes. Collective."""
        if world_size() > 1:
            self._reduce_over_ranks()
        means = {
            name: float(total) / self._weights[name] if self._weights[name] else 0.0
            for name, total in self._sums.items()
        }
        return {"loss": float(self._loss), **means}

    def _reduce_over_ranks(self) -> None:
        own = [self._loss, *self._sums.values(), *self._weights.values()]
        sums = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in own])
        self._loss, *rest = all_reduce_sum(sums).tolist()
        self._sums = dict(zip(self._sums, rest, strict=False))
        self._weights = dict(zip(self._weights, rest[len(self._sums) :], strict=True))


def keep_freed_memory() -> bool:
    """Have glibc keep up to KEPT_BYTES of freed memory; whether it will.

    Every step on a CPU frees and takes the same tens of megabytes. glibc gives what lies at the top of its heap back to
    the kernel each time, and the next step then waits for the kernel to map and clear the pages again: 4 to 6 % of a
    small model's step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    # Naming one threshold stops glibc from adapting the other, so both are named.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def checkpoint_layers(model: nn.Module, *others: nn.Module) -> None:
    """Trade time for memory in every layer of ``model``, and of modules beside it (arXiv:1604.06174): only a layer's
    input is kept, the rest is computed again in the backward pass. Gradients stay as they are.

    transformers' own switch works in training mode only, while most learners here switch dropout off by evaluation
    mode. So the layers that transformers marks for it are wrapped here, whatever the mode.
    Raises ConfigError for a model without layers that transformers marks for this.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    own, *more = (
        [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
        for root in (model, *others)
    )
    if not own:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be checkpointed; set gradient_checkpointing = false"
        )
    for layer in chain(own, *more):
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
