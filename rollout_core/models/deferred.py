"""Tensors in safetensors files: read one at a time, so that nobody holds a whole model who needs a part of it, and
written in files that any object store takes.

A deferred model is on its device with placeholders instead of weights: one number, seen in the shape of the weight. It
can be asked for shapes, get adapters and be called, as models are for trying things out; its numbers come with
`read_deferred`, a module at a time (as torch's documentation of `fully_shard` does it by the meta device, on which
neither a call nor drawing adapters is possible).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from rollout_core.models.pretrained import MOST_FILE_BYTES, load_causal_lm, load_whole

log = logging.getLogger(__name__)

_SOURCE = "_rollout_deferred_from"
"""Attribute of a placeholder: the tensors to read it from, and its name among them."""


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by their names, each read when it is asked for."""

    def __init__(self, *files: Path) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            tensors = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(tensors.keys(), tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> list[int]:
        """Of a tensor, which is not read for it."""
        return self._files[name].get_slice(name).get_shape()


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """Write ``tensors`` to ``name.safetensors`` in ``folder``, or to ``name-00001-of-00002.safetensors`` and so on.

    They share no memory. `stored_tensors` reads them.
    """
    split = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern=name + "{suffix}.safetensors", max_shard_size=MOST_FILE_BYTES
    )
    for file, names in (split.filename_to_tensors or {f"{name}.safetensors": []}).items():
        save_file({inside: tensors[inside] for inside in names}, folder / file)


def stored_tensors(folder: Path, name: str) -> StoredTensors:
    """What `save_tensors` wrote by ``name``; no tensors where it was not called."""
    return StoredTensors(*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors"))


def load_deferred(folder: Path, device: torch.device) -> Any:
    """`load_causal_lm` in float32 on ``device``, with weights that are still to be read; the whole model where
    transformers has to put its tensors together from others.

    Move it nowhere: that would fill the placeholders.

    Raises ConfigError as `load_whole` does.
    """
    blank = load_whole(AutoModelForCausalLM, folder, device_map="meta", dtype=torch.float32)
    found = defer(blank, folder, device)
    return load_causal_lm(folder).to(device) if found is None else found


def defer(blank: Any, folder: Path, device: torch.device, *, new: Collection[str] = ()) -> Any:
    """``blank``, a model of ``folder`` on the meta device as transformers makes it, put on ``device`` deferred.

    Parameters ``new``, which the folder lacks, are drawn as transformers would, from torch's generator. None where the
    files hold other tensors than the model has, which transformers puts together as it loads them.
    """
    stored = StoredTensors(*sorted(folder.glob("*.safetensors")))
    names = _stored_names(blank, stored, new)
    if names is None:
        log.info("%s is loaded whole: its files hold other tensors than the model has", folder)
        return None
    placeholders: dict[int, nn.Parameter] = {}
    for path, module in blank.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{own}".lstrip(".")
            if name in new:
                placeholders[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            elif id(parameter) not in placeholders:
                placeholders[id(parameter)] = _placeholder(parameter, device, (stored, names[name]))
            setattr(module, own, placeholders[id(parameter)])
    for owner in {name.rpartition(".")[0] for name in new}:
        head = blank.get_submodule(owner)
        blank._init_weights(head)
        head.to(device)
    _take_buffers(blank, stored, names, device)
    return blank


def read_deferred(module: nn.Module) -> None:
    """Read the weights that ``module`` still has placeholders of, each whole and to where its placeholder is."""
    for parameter in module.parameters():
        source = getattr(parameter, _SOURCE, None)
        if source is not None:
            stored, name = source
            # Not a view of the file: who takes it changes it.
            parameter.data = stored[name].to(parameter.device, parameter.dtype, copy=True)
            delattr(parameter, _SOURCE)


def named_tensors(model: Any, folder: Path) -> Mapping[str, Tensor] | None:
    """The state of ``model`` in the safetensors files of ``folder`` by its own names, each tensor read when it is asked
    for. None as of `defer`."""
    stored = StoredTensors(*sorted(folder.glob("*.safetensors")))
    names = _stored_names(model, stored)
    return None if names is None else _Renamed(stored, names)


class _Renamed(Mapping[str, Tensor]):
    def __init__(self, stored: StoredTensors, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _placeholder(parameter: nn.Parameter, device: torch.device, source: tuple[StoredTensors, str]) -> nn.Parameter:
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    made = nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
    setattr(made, _SOURCE, source)
    return made


def _stored_names(model: Any, stored: StoredTensors, new: Collection[str] = ()) -> dict[str, str] | None:
    """For each tensor of the model's state, but ``new`` ones, its name among ``stored``; tied ones are there once."""
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    if any(isinstance(item, WeightConverter) for item in get_model_conversion_mapping(model)):
        return None
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in new}
    there = {id(tensor): name for name, tensor in state.items() if name in stored}
    names = {name: there[id(tensor)] for name, tensor in state.items() if id(tensor) in there}
    fits = len(names) == len(state) and all(stored.shape(name) == list(state[own].shape) for own, name in names.items())
    return names if fits else None


def _take_buffers(blank: Any, stored: StoredTensors, names: Mapping[str, str], device: torch.device) -> None:
    """Buffers follow from the configuration, as far as files do not hold them."""
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        made = type(blank)(blank.config)
    for name, buffer in made.named_buffers():
        owner, _, own = name.rpartition(".")
        value = stored[names[name]] if name in names else buffer
        setattr(blank.get_submodule(owner), own, value.to(device))
