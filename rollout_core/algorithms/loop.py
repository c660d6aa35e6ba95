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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from rollout_core.algorithms.layers import RATE_SCALE, LayerRate
from rollout_core.algorithms.parallel import (
    GradientSum,
    all_reduce_sum,
    arrange_ranks,
    broadcast_from_rank0,
    clip_gradients,
    data_ranks,
    is_sharded,
    replicated_and_sharded,
    seed_step,
    split_across_ranks,
    world_size,
)
from rollout_core.algorithms.state import TrainState, master_of
from rollout_core.base.determinism import check_numerics, mixed_precision, probe_device
from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, canonical_json, hash_bytes
from rollout_core.config import LearnerSettings, OptimizerConfig, ParallelConfig, SnapshotPolicy, SpikeRule
from rollout_core.config.optimizers import EIGHT_BITS, OTHER_KERNELS, optimizer_class

log = logging.getLogger(__name__)
BatchT = TypeVar("BatchT")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_FROM_HEAP = 2**25
"""Bytes; glibc takes no more. Larger tensors come from and go to the kernel by themselves."""
_MAPPED_APART = 2**20
KEPT_BYTES = 2**28
"""Of free memory at the top of the heap."""


@dataclass(frozen=True)
class MinibatchLoss:
    """Loss of one minibatch and the figures it adds to the step's."""

    loss: Tensor
    """Scalar; the sum over the minibatches of a step is the loss of the step."""
    metrics: dict[str, tuple[Any, float]]
    """Name -> (mean over the minibatch, weight). A step logs the weighted mean."""
    learned: bool = True
    """False: nothing is learned from this minibatch, and its loss has no gradient. Others of the step have one."""


class Algorithm(Protocol, Generic[BatchT]):
    """What the loop needs of an algorithm."""

    name: str
    num_steps: int
    """Optimizer steps of the whole run; training ends at this step."""

    def minibatches(self, step: int) -> Sequence[BatchT]:
        """Minibatches of optimizer step ``step`` (from 0). Which rows they have must depend on nothing but ``step``.
        Collective."""
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
    is_over: Callable[[TrainState], bool] = lambda state: False
    """Whether training has come to its end before its last step."""
    on_step: Callable[[dict[str, float]], None] = lambda row: None
    """After each optimizer step, with its row of figures."""
    on_snapshot: Callable[[TrainState], None] = lambda state: None
    """When ``snapshots`` says that one is due, not after the last step."""
    on_failure: Callable[[TrainState], None] = lambda state: None
    """When a step is not finite, with the state before it."""
    keep_batch: Callable[[list[list[int]]], ContentId] = lambda sequences: hash_bytes(canonical_json(sequences))
    """Then also with the token ids of each minibatch; gives the content id by which they can be looked at."""


def build_accelerator(precision: str, parallel: ParallelConfig | None = None) -> Accelerator:
    """An accelerator for one update; ``auto`` means bfloat16 where a GPU has it, else float32."""
    check_numerics(mixed_precision(precision))
    arrange_ranks(parallel)
    if probe_device() == "cpu":
        if parallel is not None and is_sharded(parallel):
            use_mmap_for_large_tensors()
        else:
            keep_freed_memory()
    # accelerate refuses another precision than that of the first update of the process.
    AcceleratorState._reset_state()
    return Accelerator(
        mixed_precision="bf16" if mixed_precision(precision) == "bfloat16" else "no",
        cpu=world_size() > 1 and probe_device() == "cpu",  # or accelerate would look for GPUs to divide
    )


def build_optimizer(
    config: OptimizerConfig,
    parameters: Sequence[torch.nn.Parameter],
    rates: Mapping[torch.nn.Parameter, LayerRate] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer ``config`` names, over what of ``parameters`` is trained, in order; Adam in one fused kernel.

    Weights decay, embeddings included; norms and biases, which are vectors, do not: as transformers' Trainer has it.
    ``rates`` are those of `layer_rates`: parameters of one rate are a group of their own, with its name. Where a
    parameter has a master, that is what is optimized.
    """
    cls, arguments = _eight_bits() if config.kind == EIGHT_BITS else optimizer_class(config.kind), config.arguments()
    if cls in (torch.optim.Adam, torch.optim.AdamW) and not OTHER_KERNELS & arguments.keys():
        arguments["fused"] = True
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if rates:
        return cls(_groups_by_rate(trained, rates, decays=bool(arguments.get("weight_decay"))), **arguments)
    if not arguments.get("weight_decay"):
        return cls(_of_one_kind([{"params": list(map(master_of, trained))}]), **arguments)
    weights = [master_of(parameter) for parameter in trained if parameter.dim() > 1]
    vectors = [master_of(parameter) for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return cls(_of_one_kind(groups), **arguments)


def _of_one_kind(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups, each with parameters that one kernel can step together."""
    return [{**group, "params": part} for group in groups for part in replicated_and_sharded(group["params"])]


def _groups_by_rate(
    trained: Sequence[torch.nn.Parameter], rates: Mapping[torch.nn.Parameter, LayerRate], *, decays: bool
) -> list[dict[str, Any]]:
    groups: dict[tuple[LayerRate, bool], dict[str, Any]] = {}
    for parameter in trained:
        rate, spared = rates[parameter], decays and parameter.dim() <= 1
        name = f"{rate.name}, without decay" if spared else rate.name
        group = {"params": [], "name": name, RATE_SCALE: rate.scale, **({"weight_decay": 0.0} if spared else {})}
        groups.setdefault((rate, spared), group)["params"].append(master_of(parameter))
    return _of_one_kind(groups.values())


def _eight_bits() -> type[torch.optim.Optimizer]:
    from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then constant, or linear or cosine decay to ``min_lr``
    at step ``num_steps``, where it stays; a run of so many steps never takes that one."""
    warmup_steps = config.warmup_steps or math.ceil(config.warmup_ratio * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    falling = config.lr - config.min_lr
    if config.schedule == "linear":
        return config.min_lr + falling * (1.0 - progress)
    return config.min_lr + falling * 0.5 * (1.0 + math.cos(math.pi * progress))


NORMS_BEFORE = "grad_norms"
"""Of a state's extras, where `SpikeRule` holds: those of steps before the rows of figures."""


def norms_before(state: TrainState, rule: SpikeRule) -> list[float]:
    """Gradient norms of the last steps, without those that were skipped."""
    rows = (row["grad_norm"] for row in state.metrics if not row.get("skipped"))
    return [*state.extras.get(NORMS_BEFORE, ()), *rows][-rule.window :]


def is_spike(grad_norm: float, before: Sequence[float], rule: SpikeRule) -> bool:
    """Whether ``grad_norm`` is above ``rule.factor`` times the median of the norms ``before``."""
    return len(before) >= rule.after_steps and grad_norm > rule.factor * statistics.median(before)


class SnapshotDue:
    """Whether steps, tokens or seconds since the last snapshot make one due; the same on all ranks, whose figures are
    those of all."""

    def __init__(self, policy: SnapshotPolicy, seconds: float) -> None:
        self._policy, self._tokens, self._since = policy, 0, seconds

    def after_step(self, state: TrainState, num_tokens: int) -> bool:
        """Asked once after each step, with its trained tokens."""
        policy = self._policy
        self._tokens += num_tokens
        is_due = (
            state.step % policy.every_steps == 0
            or (policy.every_tokens is not None and self._tokens >= policy.every_tokens)
            or (policy.every_seconds is not None and state.seconds - self._since >= policy.every_seconds)
        )
        if is_due:
            self._tokens, self._since = 0, state.seconds
        return is_due


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
    due = SnapshotDue(settings.snapshots, state.seconds)

    def is_over() -> bool:
        is_late = max_seconds is not None and state.seconds >= max_seconds
        return is_late or state.step >= algorithm.num_steps or hooks.is_over(state)

    over = is_over()
    while not over:
        step = state.step
        rate = learning_rate(settings.optimizer, step, total_steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_SCALE, 1.0)

        seed_step(state.seed, step)
        batches = algorithm.minibatches(step)
        row = _accumulate(algorithm, batches, accelerator, gradients)
        row["grad_norm"] = clip_gradients(parameters, settings.optimizer.max_grad_norm)
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            raise _not_finite(algorithm, batches, row, state, hooks)
        if not _skips(f"{algorithm.name} step {step + 1}", row, state, settings.skip_spikes):
            _change_weights(state)
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.seconds = broadcast_from_rank0(clock() - started, accelerator.device)
        over = is_over()

        row |= {"step": state.step, "learning_rate": rate}
        row["num_tokens"] = sum(algorithm.num_tokens(batch) for batch in batches)
        row |= hooks.evaluate(state, over)
        over = is_over()
        state.metrics.append(row)
        hooks.on_step(row)
        if due.after_step(state, int(row["num_tokens"])) and not over:
            hooks.on_snapshot(state)
    if state.step < algorithm.num_steps:
        _tell_end(algorithm, state, hooks)


def _change_weights(state: TrainState) -> None:
    """By the optimizer, and then what is kept with the weights."""
    state.optimizer.step()
    state.average()
    state.round_masters()


def _tell_end(algorithm: Algorithm[Any], state: TrainState, hooks: LoopHooks) -> None:
    why = "no lower held-out loss for long enough" if hooks.is_over(state) else "wall time is used up"
    log.info("%s: %s at step %d of %d", algorithm.name, why, state.step, algorithm.num_steps)


def _skips(step: str, row: dict[str, float], state: TrainState, rule: SpikeRule | None) -> bool:
    """Whether ``rule`` skips the step that ``row`` tells of, which then says so."""
    if rule is None:
        return False
    row["skipped"] = float(is_spike(row["grad_norm"], norms_before(state, rule), rule))
    if row["skipped"]:
        log.warning(
            "%s is skipped: its gradient norm %.4g is far above that of the steps before", step, row["grad_norm"]
        )
    return bool(row["skipped"])


def _not_finite(
    algorithm: Algorithm[BatchT],
    batches: Sequence[BatchT],
    row: Mapping[str, float],
    state: TrainState,
    hooks: LoopHooks,
) -> Fatal:
    """The error of a step, once the state before it and its minibatches are kept."""
    state.optimizer.zero_grad(set_to_none=True)
    hooks.on_failure(state)
    kept = [hooks.keep_batch(algorithm.sequences(batch)) for batch in batches]
    return Fatal(
        f"{algorithm.name} step {state.step + 1}: loss {row['loss']}, gradient norm {row['grad_norm']}; both must be "
        "finite. The last snapshot is from before this step; lower optimizer.lr or look at the token ids of its "
        "minibatches, JSON in the object store: " + ", ".join(kept)
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
        if result.learned:
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
        if data_ranks() > 1:
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
    # Naming one threshold stops glibc from adapting the other, so both are named.
    return _mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and _mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def use_mmap_for_large_tensors() -> bool:
    """Have glibc take tensors of a MiB or more from the kernel one by one, and give each back; whether it will.

    Where weights are sharded, those of a layer come and go between activations that stay, and so do, where matrices are
    cut, the sums of their parts; a heap of both was twice as large as what was in use.
    """
    return _mallopt(_M_MMAP_THRESHOLD, _MAPPED_APART)


def _mallopt(option: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and bool(mallopt(option, value))  # other C libraries have none
