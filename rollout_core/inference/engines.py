"""One engine a process: built when a sample first needs it, shared by all that run there, its weights swapped.

An engine starts within its time, and its start is given up at once when the process is to stop. Several sets of
requests go through it at once, so that it never runs dry between two of them: each caller opens a lane, waits for its
turn, submits requests as it has them ready, and takes outcomes as they come. One thread feeds the engine from all
lanes, the oldest first. A lane's turn comes when the engine has taken the last request of those before it: while these
are generated, the engine already works on the next set.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from rollout_core.base.errors import Fatal
from rollout_core.base.ids import ContentId, hash_bytes
from rollout_core.base.stopping import children, in_thread, is_stopping, kill_children, raise_if_stopping
from rollout_core.config import BackendConfig, OpenAIBackend, ScriptedBackend, TransformersBackend, VLLMBackend
from rollout_core.data.samples import Outcome
from rollout_core.inference.base import InferenceBackend, ModelRef, Request, ScriptedEngine
from rollout_core.models.pretrained import tokenizer_files


class Lanes:
    """The open lanes of one backend. Thread-safe; nothing else uses the backend's ``stream`` while a lane is open."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend
        self._lanes: list[Lane] = []
        self._owners: dict[str, Lane] = {}
        self._changed = threading.Condition()
        self._pump: threading.Thread | None = None
        self._was_left = False
        """The last lane was closed, so the stream ends."""

    @property
    def max_model_len(self) -> int | None:
        """See `InferenceBackend`."""
        return self._backend.max_model_len

    def open(self, *, few: int = 0, keeps_turn: bool = True) -> Lane:
        """A new lane, for the event loop that calls; close it when done. Its ``outcomes`` returns, without any if need
        be, when the engine has taken enough requests that fewer than ``few`` wait. Later lanes need not wait until it
        ends unless it ``keeps_turn``."""
        lane = Lane(self, asyncio.get_running_loop(), few)
        lane.ended = not keeps_turn
        with self._changed:
            self._lanes.append(lane)
            self._give_turn()
            if self._pump is None:
                self._pump = threading.Thread(target=self._run, name="rollout-engine-lanes", daemon=True)
                self._pump.start()
        return lane

    def submit(self, lane: Lane, requests: Sequence[Request]) -> None:
        """Append requests to a lane."""
        with self._changed:
            lane.queue.extend(requests)
            self._changed.notify()

    def withdraw(self, lane: Lane, keys: Collection[str]) -> None:
        """Take back those requests of a lane that the engine has not taken."""
        with self._changed:
            lane.queue = deque(request for request in lane.queue if request.key not in keys)
            self._give_turn()

    def end(self, lane: Lane) -> None:
        """No more requests are submitted to a lane."""
        with self._changed:
            lane.ended = True
            self._give_turn()

    def _give_turn(self) -> None:
        """Let the oldest lane begin that the engine has not yet taken everything of; called under the lock."""
        for lane in self._lanes:
            lane.begin()
            if lane.queue or not lane.ended:
                return

    def close(self, lane: Lane) -> None:
        """Forget a lane; outcomes of what it has under way are dropped. The last one waits until the engine rests."""
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)
                self._give_turn()
            last, pump = not self._lanes, self._pump
            self._changed.notify()
        if last and pump is not None and pump is not threading.current_thread():
            pump.join()

    def _run(self) -> None:
        error: BaseException | None = None
        self._was_left = False
        stream = self._backend.stream(self._requests())
        try:
            for outcome in stream:
                with self._changed:
                    lane = self._owners.pop(outcome.key)
                    self._was_left = self._was_left or not self._lanes
                    if self._was_left:
                        break
                lane.deliver(outcome)
        except BaseException as raised:  # noqa: BLE001 - handed over to the lanes, which raise it
            error = raised
        close = getattr(stream, "close", None)
        if close is not None:
            with suppress(Exception):
                close()
        with self._changed:
            self._owners.clear()
            self._pump = None
            lanes, restart = list(self._lanes), error is None and self._was_left and bool(self._lanes)
            if not restart:
                self._lanes.clear()  # what they still have queued is nobody's any more
            else:
                # A lane was opened while the thread was on its way out.
                self._pump = threading.Thread(target=self._run, name="rollout-engine-lanes", daemon=True)
                self._pump.start()
        for lane in () if restart else lanes:
            lane.fail(error or RuntimeError("the backend's stream ended early"))

    def _requests(self) -> Iterator[Request | None]:
        while True:
            with self._changed:
                if not self._lanes:
                    self._was_left = True
                    return
                request = self._next()
                if request is None and not self._owners:
                    self._changed.wait()
                    continue
            yield request

    def _next(self) -> Request | None:
        for lane in self._lanes:
            # The same request may be under way for another lane; an engine knows requests by their key.
            if lane.queue and lane.queue[0].key not in self._owners:
                request = lane.queue.popleft()
                self._owners[request.key] = lane
                lane.started[request.key] = time.monotonic()
                lane.note_taken()
                if not lane.queue and lane.ended:
                    self._give_turn()
                return request
        return None


class Lane:
    """One caller's requests and their outcomes."""

    def __init__(self, lanes: Lanes, loop: asyncio.AbstractEventLoop, few: int) -> None:
        self._lanes = lanes
        self._loop = loop
        self._few = few
        self._ready = asyncio.Event()
        self._turn = asyncio.Event()
        self._has_turn = False
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self.queue: deque[Request] = deque()
        """Not yet taken by the engine; changed under the lanes' lock."""
        self.ended = False
        """Nothing more is submitted, or later lanes do not wait for it."""
        self.started: dict[str, float] = {}
        """Monotonic seconds at which the engine took each request whose outcome was not yet looked at."""

    @property
    def waiting(self) -> int:
        """Requests that the engine has not yet taken."""
        return len(self.queue)

    async def turn(self) -> None:
        """Wait until the engine has taken all requests of the lanes that were opened before."""
        await self._turn.wait()

    def begin(self) -> None:
        """Called by the lanes: it is this lane's turn."""
        if not self._has_turn:
            self._has_turn = True
            self._call(self._turn.set)

    def note_taken(self) -> None:
        """Called by the lanes: the engine took one of the requests."""
        if len(self.queue) == self._few - 1:
            self._call(self.wake)

    def submit(self, requests: Sequence[Request]) -> None:
        """Append requests; their keys are unique in this lane."""
        self._lanes.submit(self, requests)

    def withdraw(self, keys: Collection[str]) -> None:
        """Take back requests; the outcomes of those that the engine already has are still delivered."""
        self._lanes.withdraw(self, keys)

    def end(self) -> None:
        """Say that nothing more is submitted."""
        self._lanes.end(self)

    async def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """All outcomes that are known and were not taken yet; waits for one, or until ``timeout`` seconds passed.

        Raises what the backend raised, after the outcomes from before.
        """
        if timeout is None:
            await self._ready.wait()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), timeout)
        with self._lock:
            self._ready.clear()
            outcomes, self._outcomes = self._outcomes, []
            if not outcomes and self._error is not None:
                raise self._error
            if self._error is not None:
                self._ready.set()
        return outcomes

    def wake(self) -> None:
        """Called in the lane's event loop: let ``outcomes`` return, though there may be none."""
        self._ready.set()

    def deliver(self, outcome: Outcome) -> None:
        """Called by the thread of the lanes."""
        with self._lock:
            self._outcomes.append(outcome)
            first = len(self._outcomes) == 1
        if first:
            self._call(self._ready.set)

    def fail(self, error: BaseException) -> None:
        """Called by the thread of the lanes: no more outcomes come."""
        with self._lock:
            self._error = error
        self._call(self._ready.set)
        # Who waits for a turn learns of the error by asking for outcomes.
        self._call(self._turn.set)

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Take no more outcomes. Blocks until the engine rests if this was the last lane."""
        self._lanes.close(self)


T = TypeVar("T")

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2


def build_backend(config: BackendConfig, model: ModelRef) -> InferenceBackend:
    """A new backend with ``model`` loaded."""
    if isinstance(config, ScriptedBackend):
        return ScriptedEngine(config, model)
    if isinstance(config, TransformersBackend):
        from rollout_core.inference.hf import TransformersEngine

        return TransformersEngine(config, model)
    if isinstance(config, OpenAIBackend):
        from rollout_core.inference.openai_http import OpenAIEngine

        return OpenAIEngine(config, model)
    from rollout_core.inference.vllm_backend import VLLMEngine

    return VLLMEngine(config, model)


@dataclass
class _Resident:
    """The engine of a pool."""

    config: BackendConfig
    architecture: str
    backend: InferenceBackend
    lanes: Lanes
    users: int = 0
    suspect: bool = False
    """A failure during its use may have left it in any state: nobody else joins, and its last user drops it."""

    def suits(self, config: BackendConfig, architecture: str) -> bool:
        """Whether it needs other weights at most."""
        return not self.suspect and self.config == config and self.architecture == architecture


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

    @contextmanager
    def use(self, config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> Iterator[_Resident]:
        """The engine with ``model`` in it, which stays when the block ends. ``say`` receives lines about its start."""
        resident = self._enter(config, model, say)
        try:
            yield resident
        except BaseException:
            resident.suspect = True
            raise
        finally:
            self._leave(resident)

    def close(self) -> None:
        """Stop the engine, if there is one; waits for its users.

        Does nothing when the process is to stop and the engine is in use: it ends with the process.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_unused, timeout=0.0 if is_stopping() else None):
                return
            self._is_preparing = True
        with self._preparation():
            self._drop()

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

    def _enter(self, config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> _Resident:
        architecture = _architecture(model)
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
        self, config: BackendConfig, model: ModelRef, architecture: str, say: Callable[[str], None]
    ) -> _Resident:
        if self._resident is not None and not self._resident.suits(config, architecture):
            self._drop()
        if self._resident is None:
            backend = _start(config, model, say)
            self._resident = _Resident(config, architecture, backend, Lanes(backend))
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
def engine(config: BackendConfig, model: ModelRef, say: Callable[[str], None] = log.info) -> Iterator[InferenceBackend]:
    """This process's engine with ``model`` in it, as `EnginePool.use` gives it."""
    with _pool.use(config, model, say) as resident:
        yield resident.backend


def close_engine() -> None:
    """Stop this process's engine, as `EnginePool.close` does."""
    _pool.close()


@dataclass(frozen=True)
class EngineOf:
    """A model on a backend, started when it is opened: the engine that batch inference is given."""

    config: BackendConfig
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


def _start(config: BackendConfig, model: ModelRef, say: Callable[[str], None]) -> InferenceBackend:
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
    while not wait([future], timeout=POLL_SECONDS).done:
        if is_stopping():
            kill_children(but=before)
            raise_if_stopping("the start of the engine")
        if time.monotonic() > deadline:
            _show_stacks(timeout_seconds)
            kill_children(but=before)
            raise Fatal(
                f"the engine did not start within {timeout_seconds:g} s; stacks are in the log and on stderr. "
                "A large model on a slow disk may need longer: raise backend.start_timeout_seconds. Otherwise run "
                "again; what is finished is kept"
            )
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


def _architecture(model: ModelRef) -> str:
    """What two models must share for one's weights to fit the other's engine, which also decodes and knows its ends."""
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    for unimportant in ("_name_or_path", "transformers_version"):
        config.pop(unimportant, None)
    generation = model.folder / "generation_config.json"
    ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.is_file() else None
    tokenizer = {file.name: hash_bytes(file.read_bytes()) for file in tokenizer_files(model.folder)}
    return json.dumps([config, ends, tokenizer], sort_keys=True)
