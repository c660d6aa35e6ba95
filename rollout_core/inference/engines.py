"""One engine a process: built when a sample first needs it, shared by all that run there, its weights swapped."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.base.stopping import is_stopping
from rollout_core.config import BackendConfig, OpenAIBackend, ScriptedBackend, TransformersBackend, VLLMBackend
from rollout_core.inference.base import InferenceBackend, ModelRef
from rollout_core.inference.engine_start import start_in_time
from rollout_core.inference.lanes import Lanes
from rollout_core.models.tokenizers import tokenizer_files

log = logging.getLogger(__name__)


@dataclass
class _Resident:
    config: BackendConfig
    architecture: str
    backend: InferenceBackend
    lanes: Lanes
    users: int = 0
    suspect: bool = False
    """A failure inside a block may have left it in any state: nobody else joins, and the last one drops it."""


_changed = threading.Condition()
_resident: _Resident | None = None
_preparing = False


def build_backend(config: BackendConfig, model: ModelRef) -> InferenceBackend:
    """A new backend with ``model`` loaded."""
    if isinstance(config, ScriptedBackend):
        from rollout_core.inference.scripted import ScriptedEngine

        return ScriptedEngine(config, model)
    if isinstance(config, TransformersBackend):
        from rollout_core.inference.hf import TransformersEngine

        return TransformersEngine(config, model)
    if isinstance(config, OpenAIBackend):
        from rollout_core.inference.openai_http import OpenAIEngine

        return OpenAIEngine(config, model)
    from rollout_core.inference.vllm_backend import VLLMEngine

    return VLLMEngine(config, model)


@dataclass(frozen=True)
class EngineOf:
    """A model on a backend, started when it is opened: the engine that batch inference is given."""

    config: BackendConfig
    model: ModelRef
    say: Callable[[str], None] = log.info
    """Told when the engine starts, which takes long, and when it is ready."""

    @property
    def model_id(self) -> ContentId:
        """Content of the weights."""
        return self.model.content_id

    @property
    def batch_invariant(self) -> bool:
        """See `InferenceBackend`."""
        return self.config.batch_invariant

    def open(self) -> AbstractContextManager[Lanes]:
        """The lanes of this process's engine; entering may take as long as an engine's start."""
        return _lanes(self.config, self.model, self.say)


@contextmanager
def engine(config: BackendConfig, model: ModelRef, say: Callable[[str], None] = log.info) -> Iterator[InferenceBackend]:
    """This process's engine with ``model`` in it.

    The engine stays when the block ends. Another configuration or architecture replaces it; another model of the same
    architecture only replaces its weights. Callers with the same configuration and model share it, others wait for its
    turn. A failure inside the block drops it. ``say`` is told of its start.
    """
    with _shared(config, model, say) as resident:
        yield resident.backend


@contextmanager
def _lanes(config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> Iterator[Lanes]:
    with _shared(config, model, say) as resident:
        yield resident.lanes


@contextmanager
def _shared(config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> Iterator[_Resident]:
    resident = _enter(config, model, say)
    try:
        yield resident
    except BaseException:
        resident.suspect = True
        raise
    finally:
        _leave(resident)


def close_engine() -> None:
    """Stop this process's engine, if there is one; waits for those who use it.

    Not when the process is to stop, and someone holds on to it: it ends with the process.
    """
    global _preparing
    with _changed:
        patience = 0.0 if is_stopping() else None
        if not _changed.wait_for(lambda: not _preparing and (_resident is None or not _resident.users), patience):
            return
        _preparing = True
    try:
        _drop()
    finally:
        _prepared()


def _enter(config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> _Resident:
    global _preparing
    architecture = _architecture(model)
    with _changed:
        while True:
            if not _preparing and (_resident is None or not _resident.users):
                _preparing = True
                break
            if not _preparing and _resident is not None and _fits(_resident, config, model, architecture):
                _resident.users += 1
                return _resident
            _changed.wait()
    # Outside the lock: a start takes half a minute.
    try:
        resident = _prepare(config, model, architecture, say)
        resident.users = 1
    finally:
        _prepared()
    return resident


def _prepare(config: BackendConfig, model: ModelRef, architecture: str, say: Callable[[str], None]) -> _Resident:
    global _resident
    if _resident and (_resident.config != config or _resident.architecture != architecture or _resident.suspect):
        _drop()
    if _resident is None:
        backend = _start(config, model, say)
        _resident = _Resident(config, architecture, backend, Lanes(backend))
    try:
        _resident.backend.update_weights(model)
    except BaseException:
        _drop()
        raise
    return _resident


def _start(config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> InferenceBackend:
    """A new backend; tells of the start of those that take long."""
    if not isinstance(config, VLLMBackend | TransformersBackend):
        return build_backend(config, model)
    say(f"starting the {config.kind} engine ...")
    began = time.monotonic()
    backend = start_in_time(lambda: build_backend(config, model), config.start_timeout_seconds)
    say(f"{config.kind} engine ready in {time.monotonic() - began:.0f} s")
    return backend


def _prepared() -> None:
    global _preparing
    with _changed:
        _preparing = False
        _changed.notify_all()


def _leave(resident: _Resident) -> None:
    global _preparing
    with _changed:
        resident.users -= 1
        drop = resident.suspect and not resident.users
        _preparing = _preparing or drop
        _changed.notify_all()
    if drop:
        try:
            _drop()
        finally:
            _prepared()


def _fits(resident: _Resident, config: BackendConfig, model: ModelRef, architecture: str) -> bool:
    return (
        not resident.suspect
        and resident.config == config
        and resident.architecture == architecture
        and resident.backend.model_id == model.content_id
    )


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
