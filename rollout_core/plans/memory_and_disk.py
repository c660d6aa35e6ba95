"""What training will take, an estimate of memory and disk against what this machine has.

Weights, gradients and optimizer state follow from the configuration. Activations are an estimate: what a layer with
a gated MLP keeps of a token for the backward pass, 14 vectors of the hidden size and 4 of the MLP's, without attention
matrices; half of it in half precision, a sixteenth with gradient checkpointing. Against SFT passes measured on a CPU it
was 0.95 of the truth with rows of 26 to 256 tokens and 0.8 with 1,024. The engine of on-policy runs comes on top.

Several processes of one CPU are counted together, for they share its memory; of several GPUs it is the fullest.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_core.base.determinism import mixed_precision, probe_device
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import sweep_scratch
from rollout_core.base.machine import free_disk, machine_memory, nearest_folder
from rollout_core.base.settings import checks_disk, stop_seconds
from rollout_core.config import DatasetSettings, LearnerSettings
from rollout_core.config.optimizers import EIGHT_BITS
from rollout_core.models.facts import FLOAT32_BYTES, ModelSize
from rollout_core.objects import ObjectStore, SnapshotStore
from rollout_core.objects.files import IMPORT_REFS, PRUNED_REFS

if TYPE_CHECKING:
    from rollout_core.data.tokenized import DataReport

_HIDDEN_VECTORS = 14
_MLP_VECTORS = 4
_HEADS_VECTORS = 5
"""Of the hidden ones: queries, keys, values and what attention makes of them, which tensor parallelism cuts."""
_CHECKPOINTED_SHARE = 1 / 16
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in four bits, with a scale of a byte for 64 and one of four bytes for 256 of these."""
_STATES_OF_OPTIMIZERS = {"sgd": 0, "adam": 2, "adamw": 2, EIGHT_BITS: 0.5}


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
    """In memory together with the trained ones, such as a reference."""
    frozen_bytes: int = 0
    """Of other frozen models, such as a teacher."""
    trained_parameters: int | None = None
    """Of a model with adapters, theirs; default: all."""
    quantized_parameters: int = 0
    """Of a model with adapters, own weights that are stored in four bits."""
    averaged: bool = False
    """A moving average of the trained weights is kept."""
    processes: int = 1
    sharded: bool = False
    """Weights, gradients and optimizer state are cut among the processes."""
    cut_parameters: int = 0
    """With tensor parallelism, those of which each process has its part; each computes with all tokens."""
    rounded: bool = False
    """What is computed with is bfloat16: of trained weights, which are also kept in float32."""
    offloaded: bool = False
    """Float32 weights, gradients and optimizer state are in the host's memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that trains, and of a GPU's host what is offloaded to it."""

    fixed: int
    """Weights, gradients, optimizer state."""
    activations: int
    copy: int = 0
    """Of weights and optimizer state, while a snapshot is written from it; where training is on a GPU, it is elsewhere.
    """
    host: int = 0
    """What is offloaded, of all processes of the machine."""

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.copy


def _adapter_bytes(model: ModelSize, training: Training) -> int:
    """Trained weights in addition to the model's own."""
    return 0 if training.trained_parameters is None else training.trained_parameters * FLOAT32_BYTES


def _trained_bytes(model: ModelSize, training: Training) -> int:
    """Of one quantity of each trained weight."""
    return model.weight_bytes if training.trained_parameters is None else _adapter_bytes(model, training)


def state_bytes(model: ModelSize, training: Training) -> int:
    """Weights, their average, and optimizer state: what a snapshot holds."""
    states = _STATES_OF_OPTIMIZERS.get(training.optimizer.lower(), 2) + training.averaged
    one = model.weight_bytes + _adapter_bytes(model, training) + int(states * _trained_bytes(model, training))
    return training.trained_models * one


def _fixed_bytes(model: ModelSize, training: Training) -> tuple[int, int]:
    """Weights, gradients and optimizer state: what is computed with, and what the optimizer works on, which may be the
    same weights. Cut among processes the shards are the optimizer's, and what is gathered of them comes and goes."""
    computed = model.weight_bytes // (2 if training.rounded and not training.sharded else 1)
    shrunk = training.quantized_parameters * computed // model.num_parameters
    computed += int(_NF4_BYTES * training.quantized_parameters) - shrunk
    frozen = training.frozen_models * computed + training.frozen_bytes // (model.weight_bytes // computed)
    one = _trained_bytes(model, training)
    states = _STATES_OF_OPTIMIZERS.get(training.optimizer.lower(), 2) + training.averaged
    optimized = one + int(states * one)  # gradients, and the optimizer's state
    adapters = 0 if training.trained_parameters is None else one  # which are trained as they are
    is_apart = training.offloaded or (training.rounded and not adapters and not training.sharded)
    computed, optimized = training.trained_models * (computed + adapters), training.trained_models * optimized
    if training.sharded and training.offloaded:
        return 0, computed + frozen + optimized
    masters = training.trained_models * one if is_apart else 0
    return computed + frozen, optimized + masters


def estimate_memory(model: ModelSize, training: Training, device: str = "cpu") -> Memory:
    """What a run will need: all processes of a CPU together, or the one process of a GPU."""
    state = state_bytes(model, training)
    computed, optimized = _fixed_bytes(model, training)
    others = training.cut_parameters * (training.processes - 1) // training.processes
    fixed = (computed + optimized) * (model.num_parameters - others) // model.num_parameters
    # With checkpointing what is kept are inputs of layers, which are whole.
    parts = training.processes if training.cut_parameters and not training.gradient_checkpointing else 1
    whole = (_HIDDEN_VECTORS - _HEADS_VECTORS) * model.hidden_size
    numbers = whole + (_HEADS_VECTORS * model.hidden_size + _MLP_VECTORS * model.intermediate_size) // parts
    share = _CHECKPOINTED_SHARE if training.gradient_checkpointing else 1.0
    if mixed_precision(training.precision) == "bfloat16":
        share /= 2
    activations = int(training.tokens_per_pass * model.num_layers * numbers * FLOAT32_BYTES * share)
    if device == "cpu":
        replicas = 1 if training.sharded else training.processes
        merged = 0 if training.trained_parameters is None else model.weight_bytes  # with the adapters, to be written
        merged += training.quantized_parameters * FLOAT32_BYTES  # what four bits stand for
        return Memory(replicas * fixed, training.processes * activations, copy=state + merged)
    shares = training.processes if training.sharded else 1
    if training.offloaded:
        gathered = 2 * model.weight_bytes // max(1, model.num_layers) if training.sharded else 0
        return Memory(computed + gathered, activations, host=optimized)
    return Memory(fixed // shares, activations)


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU, or of the machine (as far as its control group lets us): available now, and in total."""
    if probe_device() == "cuda":
        import torch

        return torch.cuda.mem_get_info()
    return machine_memory()


def _device(folder: Path) -> int:
    """The file system that ``folder`` is on, or is to be made on."""
    return os.stat(nearest_folder(folder)).st_dev


@dataclass(frozen=True)
class Need:
    """One resource that a run will take."""

    what: str
    text: str
    problem: str | None = None
    """Why the run cannot succeed, where that is certain."""


def memory_needs(model: ModelSize, training: Training) -> list[Need]:
    """Memory that a run needs, against what there is."""
    device = probe_device()
    needed, (available, total) = estimate_memory(model, training, device), device_memory()
    text = (
        f"{readable(needed.total)}: weights, gradients and optimizer {readable(needed.fixed)}, activations of "
        f"{training.tokens_per_pass} tokens {readable(needed.activations)}"
    )
    text += f", the copy a snapshot is written from {readable(needed.copy)}" if needed.copy else ""
    text += f"; available {readable(available)}"
    text += f"; in the host's memory {readable(needed.host)}" if needed.host else ""
    if training.processes > 1:
        text = f"{training.processes} processes {'together' if device == 'cpu' else 'with each'} {text}"
    problem = (
        f"weights, gradients and optimizer state take {readable(needed.fixed)}, but the {device} here has "
        f"{readable(total)}; choose a smaller model or an optimizer with less state"
    )
    text += " (may not fit)" if needed.total > available else ""
    return [Need("memory", text, problem if needed.fixed > total else None)]


@dataclass(frozen=True)
class Stored:
    """Bytes of the object store that are, or may be, of a run already. What is there takes no room again, and a run
    that fits is never refused: so what nobody can know counts as there."""

    own: int = 0
    """States that the run has stored. With any, it may have stored all that it needs, its models as well."""
    others: int = 0
    """At most what other runs may have stored of it, where updates of theirs are the same."""


@dataclass(frozen=True)
class States:
    """Training states that a run writes."""

    ends: int
    """Those that are there when the run has ended: of each update, or the last one alone (``run.keep_states``)."""
    most: int
    """At the same time, with those on the way."""
    more_by: str | None = None
    """The settings by which there may be more than ``most``, where nobody knows how many."""
    models: int = 1
    """Stored by themselves: of updates whose state is not stored, and the one to begin with."""
    held: int = 0
    """In temporary files at the same time, where not all are stored: one that is gone on from, and the next."""
    stored: Stored = Stored()
    """What there is of them, and of what stays of the run, already."""


def states_of(
    settings: LearnerSettings,
    steps: int | None,
    updates: int = 1,
    *,
    stored: int | None = None,
    models: int | None = None,
    keeps_last: bool = True,
) -> States:
    """Those of so many updates of so many optimizer steps each; None: nobody knows how many. ``stored``: updates whose
    states are stored, and ``models``: whose models are; default: all. ``keeps_last``: each is deleted once there is a
    later one."""
    stored = updates if stored is None else stored
    apart = (updates if models is None else models) - stored
    policy = settings.snapshots
    each = policy.keep_last + 1 if steps is None else math.ceil(steps / policy.every_steps)
    evaluation = settings.evaluation if isinstance(settings, DatasetSettings) else None
    best = int(evaluation is not None and evaluation.select == "best")
    asked = {"every_tokens": policy.every_tokens, "every_seconds": policy.every_seconds}
    more_by = " and ".join(f"snapshots.{key}" for key, value in asked.items() if value is not None)
    if steps is not None and each >= steps:  # one after each step already
        more_by = ""
    most = stored * max(1, each) + best
    held = 2 if stored < updates else 0
    if keeps_last:
        on_the_way = policy.keep_last if more_by or steps is None or policy.every_steps < steps else 0
        at_once = 1 + max(on_the_way, int(stored > 1)) + best
        most = at_once if more_by else min(most, at_once)
        stored, apart, more_by = min(stored, 1), min(apart, 2), ""
    return States(ends=stored, most=most, more_by=more_by or None, models=1 + apart, held=held)


@dataclass(frozen=True)
class Left:
    """Bytes that the earlier updates of a run leave in its object store."""

    certain: int = 0
    """That are there whatever comes."""
    most: int = 0
    """That may be there while the next update runs."""


def left_behind(model: ModelSize, training: Training, states: States, before: Left, *, keeps_last: bool) -> Left:
    """What an update adds to what was there before it. With ``keeps_last`` only the model that it began with is
    sure to stay. Not counted is its own model: it is part of its state, or the next update's to count."""
    state = state_bytes(model, training)
    most, apart = states.most * state, (states.models - 1) * model.weight_bytes
    if not keeps_last:
        return Left(before.certain + states.ends * state + apart, before.most + most + apart)
    return Left(before.certain + model.weight_bytes, before.certain + most + apart + model.weight_bytes)


def disk_needs(
    model: ModelSize, training: Training, folder: Path | None, states: States, before: Left = Left()
) -> list[Need]:
    """Disk that an update takes in ``folder``, that of its object store if it has one, and for states that are not
    stored, together with what those ``before`` it leave, against what is free. A problem where what stays for certain
    does not fit."""
    needs = [] if folder is None else [_stored_need(model, training, folder, states, before)]
    return [*needs, _held_need(model, training, folder, states, before)] if states.held else needs


def _held_need(model: ModelSize, training: Training, folder: Path | None, states: States, before: Left) -> Need:
    sweep_scratch()  # what a killed run has held is no longer in the way
    place, state = Path(tempfile.gettempdir()), state_bytes(model, training)
    held, free = states.held * state, free_disk(place)
    most = least = 0
    text = f"{readable(held)} in {place} (TMPDIR) for {states.held} training states that are not stored"
    if folder is not None and _device(folder) == _device(place):
        models = states.models * model.weight_bytes
        most, least = states.most * state + models + before.most, states.ends * state + models + before.certain
        free += states.stored.own
        text += f", plus {readable(most)} of the object store"
    text += f"; free {readable(free)}" + (" (may not fit)" if most + held > free else "")
    seconds = stop_seconds()
    text += (
        f"; a run that is stopped stores one within {seconds:g} s (ROLLOUT_STOP_SECONDS) where it writes "
        f"{readable(int(state / seconds))} a second, otherwise the next run computes it again"
    )
    also = f", plus {readable(least)} of the object store on the same disk" if least else ""
    problem = (
        f"{states.held} training states that are not stored (state_every) take {readable(held)}{also}, but {place} "
        f"has {readable(free)} free; make room, choose another TMPDIR or state_every = 1, or set ROLLOUT_DISK_CHECK=off"
    )
    certain = held
    if least and not states.stored.own:
        free += states.stored.others
        certain += least if least <= free else 0  # otherwise the object store's own problem says so
    return Need("temporary disk", text, problem if certain > free and checks_disk() else None)


def _stored_need(model: ModelSize, training: Training, folder: Path, states: States, before: Left) -> Need:
    state, free = state_bytes(model, training), free_disk(folder) + states.stored.own
    models = states.models * model.weight_bytes
    most, least = states.most * state + models, states.ends * state + models
    named = "the model" if states.models == 1 else f"{states.models} models of {readable(model.weight_bytes)}"
    size = f"{readable(most)} for {states.most} training states of {readable(state)} and {named}"
    text = f"up to {size}" if states.more_by is None else f"{size}, and more as {states.more_by} asks for more states"
    text += f", plus {readable(before.most)} of the updates before" if before.most else ""
    text += f", of which {readable(states.stored.own)} are there" if states.stored.own else ""
    text += f"; free {readable(free)}" + (" (may not fit)" if most + before.most > free else "")
    kept = "a training state" if states.ends == 1 else f"{states.ends} training states"
    also = f", plus {readable(before.certain)} that the updates before it leave" if before.certain else ""
    problem = (
        f"the model and {kept} take {readable(least)}{also}, but the object store in {folder} has "
        f"{readable(free)} free; make room (`rollout storage gc`), choose another place, or set ROLLOUT_DISK_CHECK=off"
    )
    certain = least + (before.certain if before.certain <= free else 0)  # otherwise an earlier problem says so
    is_refused = not states.stored.own and certain > free + states.stored.others
    return Need("disk", text, problem if is_refused and checks_disk() else None)


def training_of(
    settings: LearnerSettings,
    sequence_tokens: int,
    *,
    rows: int = 1,
    trained_parameters: int | None = None,
    quantized_parameters: int = 0,
    **models: int,
) -> Training:
    """What an estimate needs of the settings; a minibatch has ``rows`` sequences for each of its items."""
    parallel = settings.parallel
    items = settings.minibatch_size
    if parallel.nproc > 1 and not parallel.cuts_matrices:  # what cannot be dealt out evenly is cut into parts
        steps_items = items * settings.gradient_accumulation
        items = min(items, math.ceil(steps_items / parallel.nproc))
    tokens_per_pass = items * rows * sequence_tokens
    if settings.max_tokens_per_microbatch is not None:
        step_tokens = settings.minibatch_size * settings.gradient_accumulation * rows * sequence_tokens
        tokens_per_pass = min(step_tokens, max(settings.max_tokens_per_microbatch, rows * sequence_tokens))
    return Training(
        tokens_per_pass=tokens_per_pass,
        optimizer=settings.optimizer.kind,
        precision=settings.precision,
        gradient_checkpointing=getattr(settings, "gradient_checkpointing", False),
        trained_parameters=trained_parameters,
        quantized_parameters=quantized_parameters,
        averaged=getattr(settings, "ema_decay", None) is not None,
        processes=parallel.nproc,
        sharded=parallel.kind == "fsdp2" and parallel.nproc > 1,
        rounded=settings.weights == "bfloat16",
        offloaded=settings.offload,
        **models,
    )


@dataclass(frozen=True)
class Outcome:
    """What stays of an update, which an update of another run may have stored."""

    ends: int
    """Training states."""
    state: int
    """Bytes of each."""
    models: int
    """Bytes of models that are stored without a state."""


def stored_of(objects: ObjectStore, run_name: str, outcomes: Mapping[str, Outcome], model: ModelSize) -> Stored:
    """What there may be of a run with updates of these algorithms. One that was killed is not to be held up for what it
    has stored, nor another for what is cached."""
    snapshots = SnapshotStore(objects)
    found = {each.id: each for each in snapshots.list(kind="train_state")}
    noted = objects.ref_names(PRUNED_REFS)
    others = model.weight_bytes if found or noted or objects.ref_names(IMPORT_REFS) else 0  # what it begins with
    gone = [snapshots.find_pruned(ContentId(name.rpartition("/")[2])) for name in noted]
    for algorithm, outcome in outcomes.items():
        sizes = [each.size_bytes for each in found.values() if each.algorithm == algorithm]
        # The update is cached all the same, and takes no state.
        sizes += [outcome.state for each in gone if each is not None and each.algorithm == algorithm]
        others += sum(sorted(sizes, reverse=True)[: outcome.ends]) + (outcome.models if sizes else 0)
    return Stored(sum(each.size_bytes for each in found.values() if run_name in each.runs), others)


def steps_of_rows(settings: DatasetSettings, report: DataReport | None) -> int | None:
    """Optimizer steps over a data set, as far as the budget tells beforehand."""
    budget, per_step = settings.budget, settings.minibatch_size * settings.gradient_accumulation
    limits = [] if budget.max_steps is None else [budget.max_steps]
    if report is not None and budget.passes is not None:
        limits.append(math.ceil(report.num_examples * budget.passes / per_step))
    return min(limits, default=None)


def row_tokens(report: DataReport | None, max_seq_len: int) -> int:
    """Tokens of the longest row as it is trained, all its sequences together."""
    if report is None:
        return max_seq_len
    longest = max((tokens for _, tokens in report.longest), default=0)
    return max(min(longest, max_seq_len), report.num_longest_by_turn)


def readable(num_bytes: int) -> str:
    """Such as ``1.5 GiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
