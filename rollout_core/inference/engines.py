"""One engine a process: built once, shared by all stages that run there, its weights swapped between models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollout_core.config import BackendConfig, ScriptedBackend, TransformersBackend
from rollout_core.ids import hash_bytes
from rollout_core.inference.base import InferenceBackend, ModelRef
from rollout_core.models import tokenizer_files


@dataclass
class _Resident:
    config: BackendConfig
    architecture: str
    backend: InferenceBackend


_lock = threading.Lock()
_resident: _Resident | None = None


def build_backend(config: BackendConfig, model: ModelRef) -> InferenceBackend:
    """A new backend with ``model`` loaded."""
    if isinstance(config, ScriptedBackend):
        from rollout_core.inference.scripted import ScriptedEngine

        return ScriptedEngine(config, model)
    if isinstance(config, TransformersBackend):
        from rollout_core.inference.hf import TransformersEngine

        return TransformersEngine(config, model)
    from rollout_core.inference.vllm_backend import VLLMEngine

    return VLLMEngine(config, model)


@contextmanager
def engine(config: BackendConfig, model: ModelRef) -> Iterator[InferenceBackend]:
    """This process's engine with ``model`` in it, for one caller at a time.

    The engine stays when the block ends. Another configuration or architecture replaces it; another model of the same
    architecture only replaces its weights. A failure inside the block may leave an engine in doubt, so it is dropped.
    """
    global _resident
    with _lock:
        architecture = _architecture(model)
        if _resident and (_resident.config != config or _resident.architecture != architecture):
            _drop()
        if _resident is None:
            _resident = _Resident(config, architecture, build_backend(config, model))
        try:
            _resident.backend.update_weights(model)
            yield _resident.backend
        except BaseException:
            _drop()
            raise


def close_engine() -> None:
    """Stop this process's engine, if there is one."""
    with _lock:
        _drop()


def _drop() -> None:
    global _resident
    if _resident is not None:
        dropped, _resident = _resident, None
        dropped.backend.close()


def _architecture(model: ModelRef) -> str:
    """What two models must share for one's weights to fit the other's engine, which also decodes and knows its ends."""
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    for unimportant in ("_name_or_path", "transformers_version"):
        config.pop(unimportant, None)
    generation = model.folder / "generation_config.json"
    ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    tokenizer = {file.name: hash_bytes(file.read_bytes()) for file in tokenizer_files(model.folder)}
    return json.dumps([config, ends, tokenizer], sort_keys=True)
