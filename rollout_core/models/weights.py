"""Weights of a model folder: files that are whole, and in them every tensor that the configuration asks for.

transformers draws what is missing at random and goes on; here that is an error, before any work and when a model is
loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError
from rollout_core.models.pretrained import load_model, read_object

MOST_TENSORS = 300_000
"""In one file: twice what the largest mixtures of experts have in all."""


def check_weights(folder: Path) -> None:
    """Raises ConfigError unless the safetensors files are whole, and the index's shards all there.

    Of the files only the headers are read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no *.safetensors weights (pickled weights are not read)")
    for file in files:
        _check_file(file)
    _check_shards(folder)


def check_tensors(folder: Path) -> None:
    """Raises ConfigError naming a tensor that the configuration asks for and the folder lacks, or has in another shape.

    The model is built without memory for its parameters; a reward model as such, any other as a language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = read_object(folder / "config.json")
    kinds = config.get("architectures") or [""]
    rewards = kinds[0].endswith("ForSequenceClassification")
    # The one device on which transformers matches names and shapes, but reads no tensor.
    load_whole(AutoModelForSequenceClassification if rewards else AutoModelForCausalLM, folder, device_map="meta")


def load_causal_lm(folder: Path, dtype: str = "float32") -> Any:
    """The causal language model of a Hugging Face folder, on the CPU; ``auto`` is its own type of numbers.

    Raises ConfigError as `load_whole` does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    return load_whole(AutoModelForCausalLM, folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype))


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """The model of ``folder`` by a transformers class, from the folder's weights alone.

    Raises ConfigError when it cannot be loaded, or a tensor is missing or of another shape. Tied tensors need to be
    there once.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with _without_load_report():
            # Shapes that do not fit come back in the report; else the error would only point to it.
            model, found = load_model(kind, folder, ignore_mismatched_sizes=True, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model in {folder} cannot be loaded: {' '.join(str(error).split())}") from error
    missing = {name: "is missing" for name in found["missing_keys"]}
    misshapen = {
        name: f"has shape {list(there)}, not {list(wanted)}" for name, there, wanted in found["mismatched_keys"]
    }
    lacking = sorted((missing | misshapen).items())
    if lacking:
        name, problem = lacking[0]
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(f"weights in {folder} do not fit its config.json: {name} {problem}{more}")
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """transformers would log at length what is said here in a line."""
    reports = logging.getLogger("transformers")
    level = reports.level
    reports.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reports.setLevel(level)


def _check_file(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:  # reads the header, and compares it with the file's size
            count = len(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is no whole safetensors file ({error}); was it downloaded to the end, not as a pointer of Git LFS?"
        ) from error
    if count > MOST_TENSORS:
        raise ConfigError(f"{file} names {count} tensors; no model has more than {MOST_TENSORS} in a file")


def _check_shards(folder: Path) -> None:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not an index of weights: {error!r}") from error
        absent = sorted(name for name in named if not (folder / name).is_file())
        if absent:
            raise ConfigError(f"{index} names {absent[0]}, which is not there; was the model downloaded to the end?")
