"""What a model folder or an adapter says, read in a child process under limits of time and memory: the caller's side,
then the child's, which builds what is described, without its weights. A folder that went through once may be read
anywhere: it holds the same then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, RolloutError, in_words
from rollout_core.base.isolation.child import Ended, KeptChild
from rollout_core.base.processes import Limits, gibibytes
from rollout_core.models.facts import ModelFacts, blank_model, describe_model, inspect_model
from rollout_core.models.pretrained import is_generic_tokenizer, load_identified_tokenizer, prepare_transformers

log = logging.getLogger(__name__)

LIMITS = Limits(seconds=300.0, memory_bytes=4 * 2**30)
"""The largest models known are built in a tenth of it."""
SMALL_BYTES = 2**24
"""A tokenizer's settings that are larger are read under limits first."""
_child = KeptChild("rollout_core.models.bounded.inspecting:handle", LIMITS)


def prepare() -> None:
    """Let the child import what it needs while the caller does something else."""
    threading.Thread(target=_import_ahead, daemon=True).start()


def _import_ahead() -> None:
    try:
        _child.call({"operation": "prepare"})
    except RolloutError as error:  # a wish to stop among them; the next call meets it, too
        log.debug("could not get ready to inspect models: %s", error)


def check_adapter_fit(folder: Path, model_folder: Path, *, whole: bool) -> None:
    """`rollout_core.models.architecture.check_fit`."""
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


def handle(request: dict[str, Any], step: Callable[[int], None]) -> Any:
    """Answer one request. Raises ConfigError for whatever is wrong with the folder, in one line."""
    operation = {"prepare": _prepare, "inspect": _inspect, "adapter": _adapter, "training": _training}
    try:
        return operation[request.pop("operation")](**request)
    except ConfigError:
        raise
    except Exception as error:
        # Whatever transformers does with values that nobody has tried.
        reason = " ".join(in_words(error).split())[:500]
        raise ConfigError(f"{request.get('folder')}: its configuration cannot be built: {reason}") from error


def _prepare() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare_transformers()


def _inspect(folder: str, has_weights: bool) -> dict[str, Any]:
    facts = inspect_model(Path(folder)) if has_weights else describe_model(Path(folder))
    _try_decoder(facts.tokenizer, folder)
    return facts.document()


def _try_decoder(tokenizer: Any, folder: str) -> None:
    """Decoding every token must not make much more text than the tokens are: elsewhere it has no limits."""
    ids = list(range(len(tokenizer)))
    text = tokenizer.decode(ids)
    longest = 2**20 + 64 * len(ids)
    if len(text) > longest:
        raise ConfigError(f"the tokenizer in {folder} makes {len(text)} characters of its {len(ids)} tokens")


def _adapter(folder: str, model_folder: str, whole: bool) -> None:
    _architecture().check_fit(Path(folder), Path(model_folder), whole=whole)


def _training(folder: str, is_reward_model: bool) -> None:
    _architecture().check_trainable(blank_model(Path(folder), is_reward_model=is_reward_model))


def _architecture():
    """The module that builds models. It imports torch, which looks for GPUs: after `_prepare`."""
    from rollout_core.models import architecture

    return architecture
