"""The whole state of a training run, to disk and back, bit for bit and without pickle.

A state folder holds ``model/`` (a Hugging Face folder, usable as it is), ``modules.safetensors`` (modules outside the
model, such as a value head), ``adapter.safetensors`` (low-rank adapters, which ``model/`` has merged),
``optimizer.safetensors``, ``metrics.jsonl`` and ``state.json`` (step, RNG of every library, the algorithm's own
figures). With a moving average of the weights it is the average that ``model/`` holds, and ``adapter.safetensors``;
``trained.safetensors`` then has the weights that training continues from. Of more than 4 GiB there are several files
(`MOST_FILE_BYTES`), such as ``optimizer-00001-of-00003.safetensors``.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from rollout_core.algorithms.parallel import (
    differing_replicas,
    laid_out_like,
    on_host,
    own_part,
    world_size,
)
from rollout_core.base.determinism import RngState, capture_rng, restore_rng
from rollout_core.base.errors import ConfigError, Recoverable
from rollout_core.base.ids import canonical_json
from rollout_core.models.architecture import adapter_weights, has_lora, merged_weights
from rollout_core.models.deferred import named_tensors, save_tensors, stored_tensors
from rollout_core.models.pretrained import MOST_FILE_BYTES, copy_tokenizer, load_whole
from rollout_core.objects.snapshots import MODEL_FOLDER

STATE_VERSION = 2
METRICS_FILE = "metrics.jsonl"
ADAPTER, TRAINED, MODULES, OPTIMIZER = "adapter", "trained", "modules", "optimizer"
MASTER = "_rollout_master"
"""Attribute of a parameter: its master (`masters`)."""
_REMEDY = "Go on with what made it, or train from the start: run.refresh = true"

TensorT = TypeVar("TensorT", bound=Tensor)


@dataclass
class TrainState:
    """What training changes. ``extras`` holds the algorithm's own JSON values (a KL coefficient, running figures)."""

    model: nn.Module
    """A transformers model: a causal language model, or a reward model."""
    optimizer: torch.optim.Optimizer
    modules: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    """Trained modules outside the model."""
    device: torch.device | None = None
    """Where it is trained; default: where its model is, which may be elsewhere between passes."""
    step: int = 0
    """Optimizer steps done."""
    seed: int = 0
    """Of the run; with the step it seeds the generators of random and numpy that a saved state carries."""
    extras: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall time of the steps done, in all processes. No part of the files of a saved state."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One row an optimizer step."""
    ema_decay: float | None = None
    """Keep a moving average of the model's trained weights."""
    averages: dict[str, Tensor] = field(init=False)
    """That average, float32, by the names of `trained_parameters`, laid out as these are."""

    def __post_init__(self) -> None:
        trained = {} if self.ema_decay is None else self._trained_of_model()
        self.averages = {name: parameter.detach().clone() for name, parameter in trained.items()}

    def average(self) -> None:
        """Take the weights of the step that was just done into their average: average = d average + (1 - d) weights
        (Polyak and Juditsky 1992, with d = ``ema_decay`` constant)."""
        if self.ema_decay is None:
            return
        averages = [own_part(tensor) for tensor in self.averages.values()]
        weights = [own_part(parameter) for parameter in self._trained_of_model().values()]
        get_ema_multi_avg_fn(self.ema_decay)(averages, weights, 0)

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """The model with its average, where there is one, in place of its weights."""
        trained = self._trained_of_model() if self.averages else {}
        kept = [own_part(parameter).clone() for parameter in trained.values()]
        for name, parameter in trained.items():
            own_part(parameter).copy_(own_part(self.averages[name]))
        self.round_masters()
        try:
            yield
        finally:
            for parameter, weights in zip(trained.values(), kept, strict=True):
                own_part(parameter).copy_(weights)
            self.round_masters()

    def _trained_of_model(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.trained_parameters() if name.startswith("model.")}

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of what is trained; of one with a master, that."""
        return [
            (name, master_of(parameter))
            for prefix, module in (("model", self.model), ("modules", self.modules))
            for name, parameter in module.named_parameters(prefix=prefix)
            if parameter.requires_grad
        ]

    def round_masters(self) -> None:
        """Every parameter that has a master becomes it as it is now, rounded to the parameter's dtype."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                master = master_of(parameter)
                if master is not parameter:
                    parameter.copy_(master)


def master_of(tensor: TensorT) -> TensorT:
    """What the optimizer changes: a parameter's master, or itself."""
    return getattr(tensor, MASTER, tensor)


@dataclass(frozen=True)
class StateCopy:
    """A train state at one moment, in host memory. Where it is a copy, training may continue while it is written."""

    model: nn.Module
    """Whose weights these are; only its configuration is read."""
    weights: Mapping[str, Tensor]
    """Of the model; their average where there is one."""
    trained: Mapping[str, Tensor]
    """Then the trained weights themselves, by the names of `TrainState.trained_parameters`."""
    modules: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    metrics: tuple[Mapping[str, float], ...]
    document: Mapping[str, Any]
    """All the rest, as JSON."""
    step: int
    seconds: float


def device_of(state: TrainState) -> torch.device:
    """Where the state is trained."""
    return state.device or next(state.model.parameters()).device


def copy_state(state: TrainState, *, copy: bool = True) -> StateCopy:
    """Take ``state`` and the RNGs as they are; without ``copy`` tensors that are on the host stay those of ``state``,
    so nobody may train until they are written. Rewinds the generators of random and numpy to where they will be after
    `load_state`.

    Of several processes only the first one gets a copy, of whole tensors whoever holds their parts. Raises Recoverable
    where what all of them have whole, trained weights, their averages and what the optimizer keeps of them, is not the
    same in all: what would be saved is then not what was trained. Collective.
    """
    moments, scalars = _flatten_optimizer(state)
    averages_by_name = {f"average of {name}": average for name, average in state.averages.items()}
    differing = differing_replicas({**dict(state.trained_parameters()), **averages_by_name, **moments})
    if differing:
        raise Recoverable(
            f"after step {state.step} {len(differing)} tensors, {differing[0]} first, are not the same in all "
            f"{world_size()} processes, as they have to be to the last bit; nothing of this step is saved. The update "
            "resumes from its last snapshot; where it happens again, look for a faulty device or for devices of "
            "different kinds, or train in one process"
        )
    rng = capture_rng(host_seed=state.seed * 1_000_003 + state.step)
    restore_rng(rng)
    document = {
        "version": STATE_VERSION,
        "step": state.step,
        "extras": deepcopy(state.extras),
        "optimizer": {"kind": type(state.optimizer).__name__, "scalars": scalars},
        "rng": rng.to_json(),
    }
    trained = {name: parameter for name, parameter in state.trained_parameters() if name in state.averages}
    averages = {id(parameter): state.averages[name] for name, parameter in trained.items()}
    weights: dict[str, Tensor] = {}
    for name, tensor in state.model.state_dict(keep_vars=True).items():
        master = master_of(tensor)
        average = averages.get(id(master))
        weights[name] = master if average is None else average
    copies = on_host(weights, copy=copy)
    plain = {id(tensor): tensor.float() for tensor in copies.values()}  # also what is frozen and rounded
    return StateCopy(
        model=state.model,
        weights={name: plain[id(tensor)] if tensor.is_floating_point() else tensor for name, tensor in copies.items()},
        trained=on_host(trained, copy=copy),
        modules=on_host(state.modules.state_dict(keep_vars=True), copy=copy),
        moments=on_host({name: tensor.view_as(tensor) for name, tensor in moments.items()}, copy=copy),
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
        save_tensors(adapter_weights(weights), folder, ADAPTER)
        weights = merged_weights(state.model, weights)
    state.model.save_pretrained(  # pyright: ignore[reportCallIssue]
        model_folder, state_dict=weights, max_shard_size=MOST_FILE_BYTES
    )
    copy_tokenizer(tokenizer_from, model_folder)
    if state.trained:
        save_tensors(state.trained, folder, TRAINED)
    if state.modules:
        save_tensors(state.modules, folder, MODULES)
    save_tensors(state.moments, folder, OPTIMIZER)
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
    modules = stored_tensors(folder, MODULES)
    _check_tensors("model", weights, state.model)
    _check_tensors("modules", modules, state.modules)
    moments = stored_tensors(folder, OPTIMIZER)
    _check_trained(state, chain(moments, document["optimizer"]["scalars"]))
    trained = _saved_trained(state, folder)
    _load(state.model, weights)
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if (master := master_of(parameter)) is not parameter:
                master.copy_(laid_out_like(weights[name], master))
    for name, parameter in state.trained_parameters():
        if name in state.averages:
            state.averages[name] = parameter.detach().clone()
            own_part(parameter).copy_(own_part(laid_out_like(trained[name], parameter)))
    _load(state.modules, modules)
    state.round_masters()
    _unflatten_optimizer(state, moments, document["optimizer"]["scalars"])
    _load_rest(state, folder, document)


def load_all_but_tensors(state: TrainState, folder: Path) -> None:
    """`load_state` of what `write_state` wrote of this very ``state``, whose tensors nobody has changed since."""
    _load_rest(state, folder, json.loads((folder / "state.json").read_text(encoding="utf-8")))


def _load_rest(state: TrainState, folder: Path, document: Mapping[str, Any]) -> None:
    state.step = document["step"]
    state.extras = document["extras"]
    state.metrics = [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    restore_rng(RngState.from_json(document["rng"]))


def _saved_weights(model: Any, folder: Path) -> Mapping[str, Tensor]:
    """Read by the model's own class: a reward model saves another head than a language model.

    Of a model with adapters only what is trained was saved apart; all else is as ``model`` has it.
    """
    adapter = stored_tensors(folder, ADAPTER)
    if bool(adapter) != has_lora(model):
        there, here = ("with" if found else "without" for found in (adapter, has_lora(model)))
        raise ConfigError(f"train state is of a run {there} lora, this one is {here}. {_REMEDY}")
    model_folder = folder / MODEL_FOLDER
    kinds = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    if kinds != [type(model).__name__]:
        raise ConfigError(f"train state is of a {kinds[0]}, this run trains a {type(model).__name__}. {_REMEDY}")
    if adapter:
        return ChainMap({}, adapter, model.state_dict())  # pyright: ignore[reportArgumentType]
    found = named_tensors(model, model_folder)
    return load_whole(type(model), model_folder, dtype=torch.float32).state_dict() if found is None else found


def _saved_trained(state: TrainState, folder: Path) -> Mapping[str, Tensor]:
    """The trained weights where ``model/`` has their average; nothing where there is none."""
    trained = stored_tensors(folder, TRAINED)
    if bool(trained) != bool(state.averages):
        there, here = ("with" if found else "without" for found in (trained, state.averages))
        raise ConfigError(f"train state is of a run {there} ema_decay, this one is {here}. {_REMEDY}")
    return trained


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
    with torch.no_grad():
        for name, own in module.state_dict().items():
            own.copy_(laid_out_like(tensors[name], own))


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


def _check_trained(state: TrainState, moments: Iterable[str]) -> None:
    trained = {name for name, _ in state.trained_parameters()}
    unknown = sorted({key.split("|")[0] for key in moments} - trained)
    if unknown:
        raise ConfigError(f"train state is of another run: {unknown[0]} was trained there, not here. {_REMEDY}")


def _unflatten_optimizer(state: TrainState, moments: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
    in_order = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(in_order)}
    places = {name: (numbers[parameter], parameter) for name, parameter in state.trained_parameters()}
    found: dict[int, dict[str, Any]] = {}
    for key, value in chain(moments.items(), scalars.items()):
        name, quantity = key.split("|")
        position, parameter = places[name]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = laid_out_like(value, parameter)
        if isinstance(value, Tensor) and parameter.device.type == "cpu" and not isinstance(value, DTensor):
            # Not a view of the file, whose pages the first step would copy one by one. A device gets its copy anyway.
            value = value.clone()
        found.setdefault(position, {})[quantity] = value
    # Torch knows which quantities live next to their parameter and which, such as a step counter, may not.
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": found, "param_groups": groups})
