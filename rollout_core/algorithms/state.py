"""The whole state of a training run, to disk and back, bit for bit and without pickle; the snapshots of one update,
written beside training, and how the update resumes from the last of them.

A state folder holds ``model/`` (a Hugging Face folder, usable as it is), ``modules.safetensors`` (modules beside the
model, such as a value head), ``adapter.safetensors`` (low-rank adapters, which ``model/`` has merged),
``optimizer.safetensors``, ``metrics.jsonl`` and ``state.json`` (step, RNG of every library, the algorithm's own
figures).

A step waits only while the state is copied in memory; a thread then writes the copy, files it and moves the update's
ref to it, which is the last thing it does: killed at any moment, the update resumes from the snapshot before.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollout_core.algorithms.context import UpdateContext
from rollout_core.algorithms.parallel import (
    all_ranks_equal,
    broadcast_from_rank0,
    broadcast_text_from_rank0,
    host_copies,
    is_first,
    laid_out_like,
)
from rollout_core.base.determinism import RngState, arithmetic, capture_rng, differing, is_portable_here, restore_rng
from rollout_core.base.errors import ConfigError, CorruptObject, NotFound, Recoverable
from rollout_core.base.ids import ContentId, canonical_json
from rollout_core.base.locks import scratch_folder
from rollout_core.config import LearnerSettings
from rollout_core.models.architecture import adapter_weights, has_lora, merged_weights
from rollout_core.models.pretrained import copy_tokenizer, load_whole
from rollout_core.objects.records import Checkpoint
from rollout_core.objects.snapshots import FINISHED, MODEL_FOLDER, PROGRESS_REFS, RUN_NAME, Snapshot, SnapshotStore

log = logging.getLogger(__name__)

STATE_VERSION = 2
METRICS_FILE = "metrics.jsonl"
ADAPTER_FILE = "adapter.safetensors"
_REMEDY = "Go on with what made it, or train from the start: run.refresh = true"


@dataclass
class TrainState:
    """What training changes. ``extras`` holds the algorithm's own JSON values (a KL coefficient, running figures)."""

    model: nn.Module
    """A transformers model: a causal language model, or a reward model."""
    optimizer: torch.optim.Optimizer
    modules: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    """Trained modules beside the model."""
    step: int = 0
    """Optimizer steps done."""
    seed: int = 0
    """Of the run; with the step it seeds the generators of random and numpy that a saved state carries."""
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall time of the steps done, in all processes. No part of the files of a saved state."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One row an optimizer step."""

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of what is trained."""
        return [
            (name, parameter)
            for prefix, module in (("model", self.model), ("modules", self.modules))
            for name, parameter in module.named_parameters(prefix=prefix)
            if parameter.requires_grad
        ]


@dataclass(frozen=True)
class StateCopy:
    """A train state at one moment, in host memory; training may continue while it is written."""

    model: nn.Module
    """Whose weights these are; only its configuration is read."""
    weights: Mapping[str, Tensor]
    modules: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    metrics: tuple[Mapping[str, float], ...]
    document: Mapping[str, Any]
    """All the rest, as JSON."""
    step: int
    seconds: float


def device_of(state: TrainState) -> torch.device:
    """Where the state is trained."""
    return next(state.model.parameters()).device


def copy_state(state: TrainState) -> StateCopy:
    """Copy ``state`` and the RNGs. Rewinds the generators of random and numpy to where they will be after `load_state`.

    Of several processes only the first one gets a copy, of whole tensors whoever holds their parts. Collective.
    """
    moments, scalars = _flatten_optimizer(state)
    rng = capture_rng(host_seed=state.seed * 1_000_003 + state.step)
    restore_rng(rng)
    document = {
        "version": STATE_VERSION,
        "step": state.step,
        "extras": copy.deepcopy(state.extras),
        "optimizer": {"kind": type(state.optimizer).__name__, "scalars": scalars},
        "rng": rng.to_json(),
    }
    return StateCopy(
        model=state.model,
        weights=host_copies(state.model.state_dict(keep_vars=True)),
        modules=host_copies(state.modules.state_dict(keep_vars=True)),
        moments=host_copies(moments),
        metrics=tuple(dict(row) for row in state.metrics),
        document=document,
        step=state.step,
        seconds=state.seconds,
    )


def write_state(state: StateCopy, folder: Path, *, tokenizer_from: Path) -> None:
    """Write a copy into the empty ``folder``. Equal states give equal files, byte for byte."""
    model_folder = folder / MODEL_FOLDER
    model_folder.mkdir(parents=True)
    weights = dict(state.weights)
    if has_lora(state.model):
        save_file(adapter_weights(weights), folder / ADAPTER_FILE)
        weights = merged_weights(state.model, weights)
    state.model.save_pretrained(model_folder, state_dict=weights)  # pyright: ignore[reportCallIssue]
    copy_tokenizer(tokenizer_from, model_folder)
    if state.modules:
        save_file(dict(state.modules), folder / "modules.safetensors")
    save_file(dict(state.moments), folder / "optimizer.safetensors")
    (folder / METRICS_FILE).write_bytes(b"".join(canonical_json(row) + b"\n" for row in state.metrics))
    (folder / "state.json").write_bytes(canonical_json(state.document))


def load_state(state: TrainState, folder: Path) -> None:
    """Bring ``state`` (built for the same model and optimizer) and the RNGs to what `write_state` wrote.

    Raises ConfigError for a state of another version, model or optimizer; ``state`` is then as it was.
    """
    document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if document["version"] != STATE_VERSION:
        raise ConfigError(
            f"train state has version {document['version']}; this software reads {STATE_VERSION}. {_REMEDY}"
        )
    kind, wanted = document["optimizer"]["kind"], type(state.optimizer).__name__
    if kind != wanted:
        raise ConfigError(f"train state is of the optimizer {kind}, this run has {wanted}. {_REMEDY}")
    weights = _saved_weights(state.model, folder)
    modules_file = folder / "modules.safetensors"
    modules = load_file(modules_file) if modules_file.exists() else {}
    _check_tensors("model", weights, state.model)
    _check_tensors("modules", modules, state.modules)
    moments = {**load_file(folder / "optimizer.safetensors"), **document["optimizer"]["scalars"]}
    _check_trained(state, moments)
    _load(state.model, weights)
    _load(state.modules, modules)
    _unflatten_optimizer(state, moments)
    state.step = document["step"]
    state.extras = document["extras"]
    state.metrics = [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    restore_rng(RngState.from_json(document["rng"]))


def _saved_weights(model: Any, folder: Path) -> Mapping[str, Tensor]:
    """Read by the model's own class: a reward model saves another head than a language model.

    Of a model with adapters only what is trained was saved apart; all else is as ``model`` has it.
    """
    adapter_file = folder / ADAPTER_FILE
    if adapter_file.exists() != has_lora(model):
        there, here = ("with" if found else "without" for found in (adapter_file.exists(), has_lora(model)))
        raise ConfigError(f"train state is of a run {there} lora, this one is {here}. {_REMEDY}")
    model_folder = folder / MODEL_FOLDER
    kinds = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    if kinds != [type(model).__name__]:
        raise ConfigError(f"train state is of a {kinds[0]}, this run trains a {type(model).__name__}. {_REMEDY}")
    if adapter_file.exists():
        return {**model.state_dict(), **load_file(adapter_file)}
    return load_whole(type(model), model_folder, dtype=torch.float32).state_dict()


def _check_tensors(what: str, saved: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raises ConfigError naming the first tensor of another shape, or that only one side has."""
    there, here = (
        {name: f"of shape {list(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (saved, module.state_dict())
    )
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"train state is of another run: {what} tensor {name} is {there.get(name, 'missing')} there, "
                f"{here.get(name, 'missing')} here. {_REMEDY}"
            )


def _load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = module.state_dict()
    module.load_state_dict({name: laid_out_like(tensor, own[name]) for name, tensor in tensors.items()})


def _flatten_optimizer(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by ``parameter name|quantity``; everything else as JSON."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in state.trained_parameters():
        for quantity, value in sorted(state.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"{name}|{quantity}"] = value
            else:
                scalars[f"{name}|{quantity}"] = value
    return tensors, scalars


def _check_trained(state: TrainState, moments: Mapping[str, Any]) -> None:
    trained = {name for name, _ in state.trained_parameters()}
    unknown = sorted({key.split("|")[0] for key in moments} - trained)
    if unknown:
        raise ConfigError(f"train state is of another run: {unknown[0]} was trained there, not here. {_REMEDY}")


def _unflatten_optimizer(state: TrainState, moments: Mapping[str, Any]) -> None:
    in_order = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(in_order)}
    places = {name: (numbers[parameter], parameter) for name, parameter in state.trained_parameters()}
    found: dict[int, dict[str, Any]] = {}
    for key, value in moments.items():
        name, quantity = key.split("|")
        position, parameter = places[name]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = laid_out_like(value, parameter)
        found.setdefault(position, {})[quantity] = value
    # Torch knows which quantities live beside their parameter and which, such as a step counter, may not.
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": found, "param_groups": groups})


SECONDS = "training_seconds"
"""Key of a snapshot's record; the snapshot itself does not depend on the clock."""
ARITHMETIC = "arithmetic"
"""The same: what decided over last bits, of each part of the update that was computed in another way, in order."""


class Origin(Enum):
    """Which snapshot an update resumes from."""

    NONE = "none"
    OWN = "its own last one"
    GIVEN = "the one given to start from"


class Resumption:
    """The snapshots of one update in progress. As a context manager it waits at the end for what is being written.

    Of several processes all read them, and the first one writes them. What concerns a state is collective.
    """

    def __init__(self, context: UpdateContext, algorithm: str, settings: LearnerSettings, tokenizer_from: Path) -> None:
        self._context = context
        self._algorithm = algorithm
        self._settings = settings
        self._tokenizer_from = tokenizer_from
        self._snapshots = SnapshotStore(context.objects)
        self._ref = f"{PROGRESS_REFS}/{context.key}"
        self._arithmetic = [arithmetic()]
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self._is_due = False

    def __enter__(self) -> Resumption:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._writer.shutdown(wait=True)

    def restore(self, state: TrainState) -> Origin:
        """Bring ``state`` to the last snapshot of this update, else to the one it is to start from, if there is one.

        Of its own one that cannot be read counts as none. Raises ConfigError where the other is not of this model, or
        where its own was made by other arithmetic and this is to be portable; Recoverable where only some of several
        processes could read their own.
        """
        found = self._restore_own(state)
        if not all_ranks_equal(float(found), device_of(state)):
            raise Recoverable(
                f"{self._algorithm}: only some of the processes could read the last snapshot, this one "
                f"{'among them' if found else 'not'}. The next try finds a damaged one set aside"
            )
        if found:
            return Origin.OWN
        if self._context.start_from is None:
            return Origin.NONE
        self._restore_from(self._context.start_from, state)
        return Origin.GIVEN

    def _restore_own(self, state: TrainState) -> bool:
        snapshot_id = self._context.objects.cached_ref(self._ref)
        if snapshot_id is None:
            return False
        try:
            self._restore_from(snapshot_id, state, same_arithmetic=is_portable_here())
        except (CorruptObject, NotFound) as error:
            log.warning("%s update starts over: its last snapshot cannot be read (%s)", self._algorithm, error)
            return False
        return True

    def _arithmetic_with(self, snapshot_id: ContentId, *, same: bool) -> list[dict[str, Any]]:
        """That of the parts so far and this process's. A difference is logged, or refused if ``same``."""
        before = self._snapshots.get(snapshot_id).meta.get(ARITHMETIC, [])
        here = arithmetic()
        differences = differing(before[-1], here) if before else ""
        if differences and same:
            raise ConfigError(
                f"the {self._algorithm} update was started with {differences}. Continuing would give other bytes than "
                'an uninterrupted run, and numerics = "portable" promises the same. Run it with what it was started '
                "with, or from its start by run.refresh = true, or train on as another result by run.resume = "
                f'"{snapshot_id.short}"'
            )
        if differences:
            log.warning(
                "%s update continues with other arithmetic: started with %s. The result is sound, but its last bits "
                "differ from those of an uninterrupted run on either machine; its snapshots name both",
                self._algorithm,
                differences,
            )
        return [*before, here] if differences else before or [here]

    def _restore_from(self, snapshot_id: ContentId, state: TrainState, *, same_arithmetic: bool = False) -> None:
        computed = self._arithmetic_with(snapshot_id, same=same_arithmetic)
        with scratch_folder("restore") as scratch:
            folder = scratch / "state"
            snapshot = self._snapshots.restore(snapshot_id, folder)
            load_state(state, folder)
            state.seconds = snapshot.meta.get(SECONDS, 0.0)
        self._arithmetic = computed
        log.info("%s update resumes at step %d from snapshot %s", self._algorithm, state.step, snapshot_id.short)

    def save(self, state: TrainState) -> None:
        """Have the current step made resumable, or the next one that finds no other snapshot being written."""
        self._is_due = True
        self.after_step(state)

    def after_step(self, state: TrainState) -> None:
        """Start what is due, if nothing else is being written. Raises what went wrong with an earlier snapshot."""
        if self._writing is not None and self._writing.done():
            self._wait()
        # The first process writes, so it knows whether a copy would have to wait; all take part in making one.
        if self._is_due and broadcast_from_rank0(self._writing is None, device_of(state)):
            self._is_due = False
            copied = copy_state(state)
            if is_first():
                self._writing = self._writer.submit(copy_context().run, self._write, copied)

    def save_now(self, state: TrainState) -> None:
        """Make the current step resumable; when this returns, a kill loses nothing before it."""
        self._wait()
        copied = copy_state(state)
        if is_first():
            self._write(copied)
        # Nobody fails before it is there: who started the processes would end the first one, too.
        broadcast_from_rank0(state.step, device_of(state))

    def finish(self, state: TrainState) -> Checkpoint:
        """File the outcome: the model by itself, and the state training can resume from."""
        self._wait()
        copied = copy_state(state)
        filed = self._filed(state, copied).model_dump_json() if is_first() else ""
        return Checkpoint.model_validate_json(broadcast_text_from_rank0(filed, device_of(state)))

    def _filed(self, state: TrainState, copied: StateCopy) -> Checkpoint:
        objects = self._context.objects
        with self._written(copied) as folder:
            model = objects.put_tree(folder / MODEL_FOLDER)
            metrics = objects.put_file(folder / METRICS_FILE)
            # Labelled, or a later update of the same run would prune what its own training resumes from.
            snapshot = self._file(copied, folder, label=FINISHED)
        # Until the caller has filed this outcome, a retry finds the finished state here and need not train again.
        objects.set_ref(self._ref, snapshot.id)
        last = state.metrics[-1] if state.metrics else {}
        return Checkpoint(
            model=model,
            train_state=snapshot.id,
            metrics=metrics,
            algorithm=self._algorithm,
            step=state.step,
            summary={name: value for name, value in last.items() if name != "step"},
        )

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, copied: StateCopy) -> None:
        with self._written(copied) as folder:
            snapshot = self._file(copied, folder)
        self._context.check()
        self._context.objects.set_ref(self._ref, snapshot.id)
        policy = self._settings.snapshots
        in_use = {snapshot_id for _, snapshot_id in self._context.objects.list_refs(PROGRESS_REFS)}
        self._snapshots.prune(
            self._context.run_id, keep_last=policy.keep_last, keep_every=policy.keep_every, keep=in_use
        )

    def _file(self, copied: StateCopy, folder: Path, *, label: str | None = None) -> Snapshot:
        return self._snapshots.save(
            folder,
            run_id=self._context.run_id,
            step=copied.step,
            algorithm=self._algorithm,
            label=label,
            meta={
                SECONDS: round(copied.seconds, 3),
                RUN_NAME: self._context.run_name,
                ARITHMETIC: self._arithmetic,
            },
        )

    @contextmanager
    def _written(self, copied: StateCopy) -> Iterator[Path]:
        """A temporary folder holding a state."""
        with scratch_folder("state") as scratch:
            write_state(copied, scratch / "state", tokenizer_from=self._tokenizer_from)
            yield scratch / "state"
