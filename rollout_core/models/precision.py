"""A trained model in the precision of the model that its training began with.

Training keeps float32 weights, whatever it began with, and stages hand these on. A model that leaves, promoted or
exported, has the dtype that its base's config.json names, in which transformers and vLLM load that base: half the size
where that is bfloat16 or float16.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.base.locks import scratch_folder
from rollout_core.objects import ObjectStore
from rollout_core.objects.trees import files_of
from rollout_core.objects.unstored import local_model

log = logging.getLogger(__name__)

ROUNDS = "round_weights"
"""Name of the stage that gives a trained model the dtype of the one that its training began with."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of weights, by the names that config.json and torch have for them."""


def stored_dtype(objects: ObjectStore, model: ContentId) -> str | None:
    """The dtype that a stored model's config.json names, of `DTYPES`; None where it names none of them, or the weights
    are quantized. Its weights need not be there."""
    for file in objects.manifest(model).files:
        if file.path == "config.json":
            return _named_dtype(objects.get_json(file.content_id))
    return None


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    named = config.get("dtype", config.get("torch_dtype"))
    return named if named in DTYPES and not config.get("quantization_config") else None


def in_precision_of(model: ContentId, base: ContentId, objects: ObjectStore, cache: Path) -> ContentId:
    """File ``model`` with its weights in the dtype of ``base``; its content id, which is ``model`` where nothing is to
    be done, or where float16 does not reach as far as its weights.

    Raises MissingObject where the weights of ``model`` are neither stored nor in ``cache``.
    """
    wanted = stored_dtype(objects, base)
    if wanted is None or stored_dtype(objects, model) in (None, wanted):
        return model
    with scratch_folder("precision") as folder:
        try:
            cast_model(local_model(objects, model, cache), folder, wanted)
        except OutOfRange as error:
            log.warning("model %s stays in %s: %s", model.short, stored_dtype(objects, model), error)
            return model
        return objects.put_tree(folder)


class OutOfRange(ConfigError):
    """A weight is finite, and would not be."""


def cast_model(source: Path, target: Path, dtype: str) -> None:
    """Write the model folder ``source`` into ``target``, which may be the same, with every floating tensor in
    ``dtype``, of `DTYPES`. Holds one file of weights in memory at a time; equal folders give equal files.

    Raises OutOfRange for a weight beyond what ``dtype`` can hold, before anything of its file is written.
    """
    for name, path in files_of(source).items():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            _cast_file(path, file, dtype)
        elif file != path:
            shutil.copyfile(path, file)
    config = json.loads((source / "config.json").read_bytes())
    config.pop("torch_dtype", None)  # the key's name in older files
    _write_json(target / "config.json", config | {"dtype": dtype})
    for index in target.glob("*.safetensors.index.json"):
        document = json.loads(index.read_bytes())
        held = sum(_tensor_bytes(file) for file in target.glob("*.safetensors"))
        _write_json(index, document | {"metadata": document.get("metadata", {}) | {"total_size": held}})


def _cast_file(source: Path, target: Path, dtype: str) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    with safe_open(source, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no mapping
            tensor = stored.get_tensor(name)
            tensors[name] = cast = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            if not torch.equal(tensor.isfinite(), cast.isfinite()):
                raise OutOfRange(f"{dtype} cannot hold {tensor.abs().max():g}, which tensor {name} has")
        metadata = stored.metadata()
    beside = target.with_name(f"{target.name}.new")
    save_file(tensors, beside, metadata)
    os.replace(beside, target)  # which may be what was read


def _tensor_bytes(file: Path) -> int:
    """Of all tensors of a safetensors file: what follows its header."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
