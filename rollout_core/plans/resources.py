"""What training will take, before it starts: an estimate of memory and disk beside what this machine has.

Weights, gradients and optimizer state follow from the configuration. Activations are an estimate: what a layer with a
gated MLP keeps of a token for the backward pass, 14 vectors of the hidden size and 4 of the MLP's, without attention
matrices; half of it in half precision, a sixteenth with gradient checkpointing. Beside SFT passes measured on a CPU it
was 0.95 of the truth with rows of 26 to 256 tokens and 0.8 with 1,024. The engine of on-policy runs comes on top.

Several processes of one CPU are counted together, for they share its memory; of several GPUs it is the fullest.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_core.base.determinism import machine_memory, mixed_precision, probe_device
from rollout_core.config import LearnerSettings
from rollout_core.models.facts import FLOAT32_BYTES, ModelSize

if TYPE_CHECKING:
    from rollout_core.data.tokenized import DataReport


_HIDDEN_VECTORS = 14
_MLP_VECTORS = 4
_CHECKPOINTED_SHARE = 1 / 16
_STATES_OF_OPTIMIZERS = {"sgd": 0, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Training:
    """What the estimate needs of the settings."""

    tokens_per_pass: int
    """In one forward and backward pass, at most."""
    optimizer: str
    precision: str = "auto"
    gradient_checkpointing: bool = False
    trained_models: int = 1
    """2 with a value model of its own."""
    frozen_models: int = 0
    """Beside the trained ones at the same time, such as a reference."""
    trained_parameters: int | None = None
    """Of a model with adapters, theirs; default: all."""
    processes: int = 1
    sharded: bool = False
    """Weights, gradients and optimizer state are cut among the processes."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that trains."""

    fixed: int
    """Weights, gradients, optimizer state."""
    activations: int
    copy: int = 0
    """Of weights and optimizer state, while a snapshot is written from it; where training is on a GPU, it is elsewhere.
    """

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.copy


def _adapter_bytes(model: ModelSize, training: Training) -> int:
    """Trained weights beside the model's own."""
    return 0 if training.trained_parameters is None else training.trained_parameters * FLOAT32_BYTES


def _trained_bytes(model: ModelSize, training: Training) -> int:
    """Of one quantity of each trained weight."""
    return model.weight_bytes if training.trained_parameters is None else _adapter_bytes(model, training)


def state_bytes(model: ModelSize, training: Training) -> int:
    """Weights and optimizer state: what a snapshot holds."""
    states = _STATES_OF_OPTIMIZERS.get(training.optimizer.lower(), 2)
    one = model.weight_bytes + _adapter_bytes(model, training) + states * _trained_bytes(model, training)
    return training.trained_models * one


def estimate_memory(model: ModelSize, training: Training, device: str = "cpu") -> Memory:
    """What a run will need: all processes of a CPU together, or the one process of a GPU."""
    state = state_bytes(model, training)
    gradients = training.trained_models * _trained_bytes(model, training)
    fixed = state + gradients + training.frozen_models * model.weight_bytes
    numbers = _HIDDEN_VECTORS * model.hidden_size + _MLP_VECTORS * model.intermediate_size
    share = _CHECKPOINTED_SHARE if training.gradient_checkpointing else 1.0
    if mixed_precision(training.precision) == "bfloat16":
        share /= 2
    activations = int(training.tokens_per_pass * model.num_layers * numbers * FLOAT32_BYTES * share)
    if device == "cpu":
        replicas = 1 if training.sharded else training.processes
        return Memory(replicas * fixed, training.processes * activations, copy=state)
    return Memory(fixed // (training.processes if training.sharded else 1), activations)


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU, or of the machine (as far as its control group lets us): available now, and in total."""
    if probe_device() == "cuda":
        import torch

        return torch.cuda.mem_get_info()
    return machine_memory()


def free_disk(folder: Path) -> int:
    """Free bytes where ``folder`` is, or is to be made."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(place))
    return shutil.disk_usage(nearest).free


@dataclass(frozen=True)
class Need:
    """One resource that a run will take."""

    what: str
    text: str
    problem: str | None = None
    """Why the run cannot succeed, where that is certain."""


def memory_needs(model: ModelSize, training: Training) -> list[Need]:
    """Memory of a run beside what there is."""
    device = probe_device()
    needed, (available, total) = estimate_memory(model, training, device), device_memory()
    text = (
        f"{readable(needed.total)}: weights, gradients and optimizer {readable(needed.fixed)}, activations of "
        f"{training.tokens_per_pass} tokens {readable(needed.activations)}"
    )
    text += f", the copy a snapshot is written from {readable(needed.copy)}" if needed.copy else ""
    text += f"; available {readable(available)}"
    if training.processes > 1:
        text = f"{training.processes} processes {'together' if device == 'cpu' else 'with each'} {text}"
    problem = (
        f"weights, gradients and optimizer state take {readable(needed.fixed)}, but the {device} here has "
        f"{readable(total)}; choose a smaller model or an optimizer with less state"
    )
    text += " (may not fit)" if needed.total > available else ""
    return [Need("memory", text, problem if needed.fixed > total else None)]


def disk_needs(model: ModelSize, training: Training, folder: Path, keep_last: int) -> list[Need]:
    """Disk of a run that keeps so many snapshots in ``folder``, beside what is free."""
    state, free = state_bytes(model, training), free_disk(folder)
    kept = (keep_last + 1) * state + model.weight_bytes
    text = (
        f"up to {readable(kept)} for {keep_last} snapshots of {readable(state)}, the last state and the model; "
        f"free {readable(free)}"
    )
    text += " (may not fit)" if kept > free else ""
    least = state + model.weight_bytes
    problem = (
        f"a snapshot and the model take {readable(least)}, but the object store in {folder} has {readable(free)} free; "
        "make room or choose another place"
    )
    return [Need("disk", text, problem if least > free else None)]


def training_of(
    settings: LearnerSettings,
    sequence_tokens: int,
    *,
    rows: int = 1,
    trained_parameters: int | None = None,
    **models: int,
) -> Training:
    """What an estimate needs of the settings; a minibatch has ``rows`` sequences for each of its items."""
    parallel = settings.parallel
    items = settings.minibatch_size
    if parallel.nproc > 1:  # a minibatch that cannot be dealt out evenly is cut into parts
        steps_items = items * settings.gradient_accumulation
        items = min(items, math.ceil(steps_items / parallel.nproc))
    return Training(
        tokens_per_pass=items * rows * sequence_tokens,
        optimizer=settings.optimizer.kind,
        precision=settings.precision,
        gradient_checkpointing=getattr(settings, "gradient_checkpointing", False),
        trained_parameters=trained_parameters,
        processes=parallel.nproc,
        sharded=parallel.kind == "fsdp2",
        **models,
    )


def row_tokens(report: DataReport | None, max_seq_len: int) -> int:
    """Tokens of the longest row as it is trained."""
    longest = max((tokens for _, tokens in report.longest), default=0) if report else max_seq_len
    return min(longest, max_seq_len)


def readable(num_bytes: int) -> str:
    """Such as ``1.5 GiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
