"""A trained model in the precision of the model that its training began with.

Training keeps float32 weights, whatever it began with, and stages hand these on. A model that leaves, served or
exported, has the dtype of its base's weights: half the size where that is bfloat16 or float16. What a model has is read
in its weights' files. A config.json may name another dtype, as of a model that was computed in it, or none.

What training changed is rounded up or down by chance, each with the probability that makes the mean exact (stochastic
rounding; arXiv:1502.02551, section 3). Fine-tuning moves a weight by less than half the distance of two numbers of
bfloat16, as a rule, so the nearest one is where training began: of SmolLM2-135M after 3 steps of SFT and 12 of GRPO
88 % of the weights went back there, and with them a quarter of the held-out reward (docs/promotion.md).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, content_id, hash_bytes
from rollout_core.base.locks import scratch_folder
from rollout_core.objects import ObjectStore
from rollout_core.objects.retention.unstored import local_model
from rollout_core.objects.trees import files_of

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
"""Of weights, by the names that config.json and torch have for them."""
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": None}
"""By the names that safetensors files have for them."""
_KEYS = ("dtype", "torch_dtype")
_MOST_HEADER_BYTES = 1 << 27
_DRAWN_AT_ONCE = 1 << 22


def stored_dtype(objects: ObjectStore, model: ContentId) -> str | None:
    """The dtype of a stored model's weights, of `DTYPES`: that of most numbers in their first file; where that is gone,
    the one that its config.json names. None where it is none of them, or the weights are quantized."""
    files = {file.path: file.content_id for file in objects.manifest(model).files}
    config = objects.get_json(files["config.json"]) if "config.json" in files else {}
    if config.get("quantization_config"):
        return None
    weights = next((content for path, content in sorted(files.items()) if path.endswith(".safetensors")), None)
    if weights is not None and objects.exists(weights):
        return _most_common(_header(objects, weights))
    return next((named for named in map(config.get, _KEYS) if named in DTYPES), None)


def _header(objects: ObjectStore, weights: ContentId) -> Mapping[str, Any]:
    """What a safetensors file says of its tensors, by their names. Raises ConfigError where it says nothing."""
    read, size = b"", 8
    for chunk in objects.stream(weights):
        read += chunk
        if len(read) >= 8:
            size = 8 + int.from_bytes(read[:8], "little")
        if len(read) >= size or size > _MOST_HEADER_BYTES:
            break
    try:
        return json.loads(read[8:size])
    except ValueError as error:
        raise ConfigError(f"{weights.short} is no safetensors file: its header cannot be read") from error


def _most_common(header: Mapping[str, Any]) -> str | None:
    counts: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] in _FLOATS:
            counts[tensor["dtype"]] += math.prod(tensor["shape"])
    return _FLOATS[counts.most_common(1)[0][0]] if counts else None


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
            cast_model(local_model(objects, model, cache), folder, wanted, stochastic=True)
        except OutOfRange as error:
            log.warning("model %s stays in %s: %s", model.short, stored_dtype(objects, model), error)
            return model
        return objects.put_tree(folder)


class OutOfRange(ConfigError):
    """A weight is finite, and would not be."""


def cast_model(source: Path, target: Path, dtype: str, *, stochastic: bool = False) -> None:
    """Write the model folder ``source`` into ``target``, which may be the same, with every floating tensor in
    ``dtype``, of `DTYPES`. Holds one file of weights in memory at a time; equal folders give equal files.

    Numbers become the nearest ones, or with ``stochastic`` those below or above, with the mean that they had: for
    trained weights. What ``dtype`` has stays as it is.

    Raises OutOfRange for a weight beyond what ``dtype`` can hold, before anything of its file is written.
    """
    for name, path in files_of(source).items():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            _cast_file(path, file, dtype, stochastic)
        elif file != path:
            shutil.copyfile(path, file)
    config = json.loads((source / "config.json").read_bytes())
    parts = [part for part in config.values() if isinstance(part, dict) and not {*_KEYS}.isdisjoint(part)]
    for settings in (config, *parts):  # also of parts of a model that say so for themselves
        settings.pop("torch_dtype", None)  # the key's name in older files
        settings["dtype"] = dtype
    _write_json(target / "config.json", config)
    for index in target.glob("*.safetensors.index.json"):
        document = json.loads(index.read_bytes())
        held = sum(_tensor_bytes(file) for file in target.glob("*.safetensors"))
        _write_json(index, document | {"metadata": document.get("metadata", {}) | {"total_size": held}})


def _cast_file(source: Path, target: Path, dtype: str, stochastic: bool) -> None:
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
            if stochastic and tensor.dtype == torch.float32 and cast.element_size() == 2:
                _round_by_chance(tensor.flatten(), cast.flatten(), name)
        metadata = stored.metadata()
    temporary = target.with_name(f"{target.name}.new")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, target)  # which may be what was read


def _round_by_chance(numbers: Any, nearest: Any, name: str) -> None:
    """Move some of ``nearest`` [K], which ``numbers`` [K] float32 are rounded to in a float type of 16 bits, to the
    number at the other side, so that the mean over all draws is ``numbers``. What is drawn follows from the tensor.

    From its numbers too: drawn by ``name`` alone, the same weights would be moved every night, and others never.
    """
    import numpy as np
    import torch

    drawn_by = content_id("rounding/1", [name, hash_bytes(numbers.numpy().tobytes())])
    draws = np.random.Philox(key=int(drawn_by[:32], 16))
    for start in range(0, len(numbers), _DRAWN_AT_ONCE):
        wanted, found = (tensor[start : start + _DRAWN_AT_ONCE] for tensor in (numbers, nearest))
        raw = draws.random_raw(-(-len(wanted) // 4)).view(np.uint16)[: len(wanted)]
        drawn = torch.from_numpy(raw.astype(np.float32)).add_(0.5).div_(1 << 16)
        held = found.float()
        error = wanted - held
        # Of both types the neighbour that is further from 0 has the next larger bits; that of 0 has the error's sign.
        bits = found.view(torch.int16)
        outwards = (error < 0) == (held < 0)
        moved = torch.where(outwards, bits + 1, bits - 1)
        moved = torch.where(held == 0, torch.where(error < 0, -(1 << 15) + 1, 1).to(torch.int16), moved)
        other = moved.view(found.dtype).float()
        # Not a number, and so never chosen, where the number is none or infinite; 0 where there is no neighbour.
        share = error / (other - held)
        found.copy_(torch.where(drawn < share, moved, bits).view(found.dtype))


def _tensor_bytes(file: Path) -> int:
    """Of all tensors of a safetensors file: what follows its header."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
