"""One engine a process: built when a sample first needs it, shared by all that run there, its weights swapped.

An engine starts within its time, and its start is given up at once when the process is to stop.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.base.stopping import children, in_thread, is_stopping, kill_children, raise_if_stopping
from rollout_core.config import (
    AnyBackend,
    EndpointModel,
    OpenAIBackend,
    ScriptedBackend,
    TransformersBackend,
    VLLMBackend,
)
from rollout_core.inference.backend import InferenceBackend, ModelRef, ScriptedEngine
from rollout_core.inference.lanes import Lanes
from rollout_core.models.pretrained import tokenizer_files, with_defaults

T = TypeVar("T")

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2


def build_backend(config: AnyBackend, model: ModelRef) -> InferenceBackend:
    """A new backend with ``model`` loaded."""
    if isinstance(config, ScriptedBackend):
        return ScriptedEngine(config, model)
    if isinstance(config, EndpointModel):
        from rollout_core.inference.endpoint_model import EndpointEngine

        return EndpointEngine(config, model)
    if isinstance(config, TransformersBackend):
        from rollout_core.inference.hf import TransformersEngine

        return TransformersEngine(config, model)
    if isinstance(config, OpenAIBackend):
        from rollout_core.inference.openai_http import OpenAIEngine

        return OpenAIEngine(config, model)
    from rollout_core.inference.vllm_backend import VLLMEngine

    return VLLMEngine(config, model)


_UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class Architecture:
    """What two models must share for one's weights to fit the other's engine, which also decodes and knows its ends."""

    config: Mapping[str, Any]
    """As the model's folder has it."""
    rest: str
    """Everything else that counts."""

    def suits(self, other: Architecture) -> bool:
        """Whether they are the same. A checkpoint's file has all keys; its base's may lack those at their defaults."""
        return self.rest == other.rest and (
            self._compared(self.config) == self._compared(other.config)
            or self._compared(with_defaults(self.config)) == self._compared(with_defaults(other.config))
        )

    @staticmethod
    def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in _UNIMPORTANT}


@dataclass
class _Resident:
    """The engine of a pool."""

    config: AnyBackend
    architecture: Architecture
    backend: InferenceBackend
    lanes: Lanes
    users: int = 0
    suspect: bool = False
    """A failure during its use may have left it in any state: nobody else joins, and its last user drops it."""

    def suits(self, config: AnyBackend, architecture: Architecture) -> bool:
        """Whether it needs other weights at most."""
        return not self.suspect and self.config == config and self.architecture.suits(architecture)


class EnginePool:
    """Holds at most one engine. Thread-safe.

    Another configuration or architecture replaces it; another model of the same architecture only replaces its weights.
    Callers with the same configuration and model share it, others wait for their turn. A failure during its use drops
    it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._resident: _Resident | None = None
        self._is_preparing = False
        """A thread is starting, changing or closing the engine, outside the lock: a start takes half a minute."""
        self._closes_at_exit = False

    @contextmanager
    def use(self, config: AnyBackend, model: ModelRef, say: Callable[[str], None]) -> Iterator[_Resident]:
        """The engine with ``model`` in it, which stays when the block ends. ``say`` receives lines about its start."""
        resident = self._enter(config, model, say)
        try:
            yield resident
        except BaseException:
            resident.suspect = True
            raise
        finally:
            self._leave(resident)

    def close(self, *, waits: bool = True) -> None:
        """Stop the engine, if there is one.

        While it is in use this waits for its users, but not where ``waits`` is false or the process is to stop: then it
        does nothing, and the engine ends with the process.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_unused, timeout=None if waits and not is_stopping() else 0.0):
                return
            self._is_preparing = True
        with self._preparation():
            self._drop()

    def sleep(self) -> None:
        """Have the engine give its memory back until it is used next, where it can; not while it is in use.

        An engine that fails in this is dropped, and started anew when it is used next.
        """
        with self._changed:
            if not self._is_unused() or self._resident is None:
                return
            self._is_preparing, resident = True, self._resident
        with self._preparation():
            try:
                resident.backend.sleep()
            except Recoverable as error:
                log.warning("%s", error)
                self._drop()

    def load_ahead(self, model: ModelRef) -> None:
        """Have the engine take the weights of ``model``, if nobody uses it and they fit it.

        Who asks for the engine meanwhile waits. One that fails in this is dropped, and started anew when it is used
        next, which then tells the reason.
        """
        with self._changed:
            if not self._is_unused() or self._resident is None or self._resident.suspect:
                return
            self._is_preparing, resident = True, self._resident
        with self._preparation():
            try:
                if resident.suits(resident.config, architecture_of(model, resident.config)):
                    resident.backend.update_weights(model)
            except Exception as error:  # noqa: BLE001 - whatever it was, the engine is in doubt
                log.warning("the engine is started anew, as it did not take the next weights: %s", error)
                self._drop()

    def _close_at_exit(self) -> None:
        """Have this process stop its engine when it ends by itself: vLLM's own end leaves the engine's files behind."""
        if not self._closes_at_exit:
            self._closes_at_exit, owner = True, os.getpid()
            # Comes after vLLM's and multiprocessing's own, so it runs before them.
            atexit.register(lambda: self.close(waits=False) if os.getpid() == owner else None)

    def _is_unused(self) -> bool:
        return not self._is_preparing and (self._resident is None or not self._resident.users)

    @contextmanager
    def _preparation(self) -> Iterator[None]:
        """Ends, with the block, what began with ``_is_preparing``."""
        try:
            yield
        finally:
            with self._changed:
                self._is_preparing = False
                self._changed.notify_all()

    def _enter(self, config: AnyBackend, model: ModelRef, say: Callable[[str], None]) -> _Resident:
        architecture = architecture_of(model, config)
        with self._changed:
            while not self._is_unused():
                if not self._is_preparing and (resident := self._resident) is not None:
                    holds_model = resident.backend.model_id == model.content_id
                    if holds_model and resident.suits(config, architecture):
                        resident.users += 1
                        return resident
                self._changed.wait()
            self._is_preparing = True
        with self._preparation():
            resident = self._prepare(config, model, architecture, say)
            resident.users = 1
        return resident

    def _prepare(
        self, config: AnyBackend, model: ModelRef, architecture: Architecture, say: Callable[[str], None]
    ) -> _Resident:
        if self._resident is not None and not self._resident.suits(config, architecture):
            self._drop()
        if self._resident is None:
            backend = _start(config, model, say)
            self._resident = _Resident(config, architecture, backend, Lanes(backend))
            self._close_at_exit()
        try:
            self._resident.backend.update_weights(model)
        except BaseException:
            self._drop()
            raise
        return self._resident

    def _leave(self, resident: _Resident) -> None:
        with self._changed:
            resident.users -= 1
            is_dropped = resident.suspect and not resident.users
            self._is_preparing = self._is_preparing or is_dropped
            self._changed.notify_all()
        if is_dropped:
            with self._preparation():
                self._drop()

    def _drop(self) -> None:
        if self._resident is not None:
            dropped, self._resident = self._resident, None
            dropped.backend.close()


_pool = EnginePool()
"""Of this process."""


@contextmanager
def engine(config: AnyBackend, model: ModelRef, say: Callable[[str], None] = log.info) -> Iterator[InferenceBackend]:
    """This process's engine with ``model`` in it, as `EnginePool.use` gives it."""
    with _pool.use(config, model, say) as resident:
        yield resident.backend


def sleep_engine() -> None:
    """Have this process's engine give its memory back, as `EnginePool.sleep` does."""
    _pool.sleep()


def load_ahead(model: ModelRef) -> Future[None]:
    """`EnginePool.load_ahead` of this process's engine, in a thread of its own."""
    return in_thread(lambda: _pool.load_ahead(model))


def close_engine() -> None:
    """Stop this process's engine, as `EnginePool.close` does."""
    _pool.close()


@dataclass(frozen=True)
class EngineOf:
    """A model on a backend, started when it is opened: the engine that batch inference is given."""

    config: AnyBackend
    model: ModelRef
    say: Callable[[str], None] = log.info
    """Receives a line when the engine starts, which may take long, and one when it is ready."""

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
        return self._lanes()

    @contextmanager
    def _lanes(self) -> Iterator[Lanes]:
        with _pool.use(self.config, self.model, self.say) as resident:
            yield resident.lanes


def _start(config: AnyBackend, model: ModelRef, say: Callable[[str], None]) -> InferenceBackend:
    """A new backend; ``say`` receives lines about the start of those that take long."""
    if not isinstance(config, VLLMBackend | TransformersBackend):
        return build_backend(config, model)
    say(f"starting the {config.kind} engine ...")
    began = time.monotonic()
    backend = start_in_time(lambda: build_backend(config, model), config.start_timeout_seconds)
    say(f"{config.kind} engine ready in {time.monotonic() - began:.0f} s")
    return backend


def start_in_time(start: Callable[[], T], timeout_seconds: float) -> T:
    """The engine that ``start`` gives, from a thread of its own: nothing ends a start that hangs.

    Raises Stopped when the process is to stop meanwhile, and Fatal, with the stacks of all threads in the log, when
    the time is up. What the start began is then left behind, without its child processes.
    """
    before = children()
    future = in_thread(start)
    deadline = time.monotonic() + timeout_seconds
    try:
        while not wait([future], timeout=POLL_SECONDS).done:
            raise_if_stopping("the start of the engine")
            if time.monotonic() > deadline:
                _show_stacks(timeout_seconds)
                raise Fatal(
                    f"the engine did not start within {timeout_seconds:g} s; stacks are in the log and on stderr. "
                    "A large model on a slow disk may need longer: raise backend.start_timeout_seconds. Otherwise run "
                    "again; what is finished is kept"
                )
    except BaseException:  # Ctrl-C as well, in a program that does not use rollout's signal handlers
        kill_children(but=before)
        raise
    return future.result()


def _show_stacks(timeout_seconds: float) -> None:
    """To stderr first: the start may hang with the lock of logging in its hands."""
    with tempfile.TemporaryFile(mode="w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = f"the engine did not start within {timeout_seconds:g} s; all threads:\n{file.read()}"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    wait([in_thread(lambda: log.error(text))], timeout=1.0)


def computed_dtype(backend: AnyBackend, stored: str | None) -> str | None:
    """What the engine of ``backend`` computes in, of weights that are stored as ``stored``; None where that is unknown,
    as of an endpoint."""
    dtype = getattr(backend, "concrete_dtype", getattr(backend, "dtype", None))
    if dtype == "auto":
        # vLLM takes the model's own then, and bfloat16 for float32.
        return "bfloat16" if stored == "float32" else stored
    return dtype


def architecture_of(model: ModelRef, backend: AnyBackend) -> Architecture:
    """The dtype of a model's files is no part of it where the engine has its own, to which it brings whatever it loads:
    a run's base may be stored in bfloat16 and its checkpoints in float32. Of a model at an endpoint there is none."""
    if isinstance(backend, EndpointModel):
        return Architecture({}, "")
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    dtype = computed_dtype(backend, config.get("dtype", config.get("torch_dtype")))
    generation = model.folder / "generation_config.json"
    ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    tokenizer = {file.name: hash_bytes(file.read_bytes()) for file in tokenizer_files(model.folder)}
    return Architecture(config, json.dumps([dtype, ends, tokenizer], sort_keys=True))
