"""The child that reads what a model folder or an adapter says and builds what it describes, without its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, in_words
from rollout_core.models.facts import blank_model, describe_model, inspect_model
from rollout_core.models.tokenizers import prepare_transformers


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
    from rollout_core.models.model_import import check_fit

    check_fit(Path(folder), Path(model_folder), whole=whole)


def _training(folder: str, is_reward_model: bool) -> None:
    from rollout_core.models.architecture import check_trainable

    check_trainable(blank_model(Path(folder), is_reward_model=is_reward_model))
