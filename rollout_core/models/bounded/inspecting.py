"""What a model folder or an adapter says, read under limits of time and memory. A folder that went through once may be
read anywhere: it holds the same then."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, RolloutError
from rollout_core.base.isolation.child import Ended
from rollout_core.base.isolation.limits import Limits, gibibytes
from rollout_core.models.bounded.keeper import KeptChild
from rollout_core.models.facts import ModelFacts
from rollout_core.models.tokenizers import is_generic_tokenizer, load_identified_tokenizer, prepare_transformers

log = logging.getLogger(__name__)

LIMITS = Limits(seconds=300.0, memory_bytes=4 * 2**30)
"""The largest models known are built in a tenth of it."""
SMALL_BYTES = 2**24
"""A tokenizer's settings that are larger are read under limits first."""
_child = KeptChild("rollout_core.models.bounded.inspection:handle", LIMITS)


def prepare() -> None:
    """Let the child import what it needs while the caller does something else."""
    threading.Thread(target=_prepare, daemon=True).start()


def _prepare() -> None:
    try:
        _child.call({"operation": "prepare"})
    except RolloutError as error:  # a wish to stop among them; the next call meets it, too
        log.debug("could not get ready to inspect models: %s", error)


def check_adapter_fit(folder: Path, model_folder: Path, *, whole: bool) -> None:
    """`rollout_core.models.model_import.check_fit`."""
    _ask(folder, "adapter", model_folder=str(model_folder.absolute()), whole=whole)


def check_training(folder: Path, *, is_reward_model: bool) -> None:
    """`rollout_core.models.architecture.check_trainable` of the model that a folder describes."""
    _ask(folder, "training", is_reward_model=is_reward_model)


def _ask(folder: Path, operation: str, **arguments: Any) -> Any:
    try:
        return _child.call({"operation": operation, "folder": str(folder.absolute()), **arguments})
    except Ended as error:
        allowed = f"{LIMITS.seconds:g} s and {gibibytes(LIMITS.memory_bytes or 0)} of memory"
        raise ConfigError(f"{folder} cannot be inspected: it {error}; the limits are {allowed}") from error


def inspect_bounded(folder: Path, *, has_weights: bool) -> ModelFacts:
    """`inspect_model`, or `describe_model` of a folder without weights, under limits of time and memory; the tokenizer
    is loaded here, once it was found sound."""
    prepare()
    settings = folder / "tokenizer_config.json"
    is_small = settings.is_file() and settings.stat().st_size <= SMALL_BYTES  # nothing of the folder is checked so far
    prepare_transformers(generic=is_small and is_generic_tokenizer(folder))
    document = _ask(folder, "inspect", has_weights=has_weights)
    tokenizer, its_id = load_identified_tokenizer(folder)
    return ModelFacts.from_document(document | {"tokenizer_id": str(its_id)}, tokenizer)
