"""One engine behind a server: a child process that listens on a Unix socket, watched, and started anew when it dies;
and the weights that it answers with, which are changed between requests.

The socket lies in a folder that only this user can enter, a new one each time, so no connection leads to an engine that
is no more. The first start has to succeed; an engine that served and died comes back, after longer and longer waits
where it dies again soon.

Weights change while nothing is under way: requests that have begun finish with those that they began with, and new ones
wait. An engine answers nobody before it agrees with the trainer about its weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RetryHint
from rollout_core.base.ids import ContentId
from rollout_core.base.processes import exit_reason, search_path
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.engine_process import engine_environment, engine_failure, engine_files
from rollout_core.serving.weights import Canary, Weights

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
"""Seconds before an engine that died is started anew: doubled each time it dies early, up to the longest."""
SETTLED_SECONDS = 60.0
"""An engine that served for so long has not died early."""
END_SECONDS = 10.0
"""How long an engine may take to end after SIGTERM."""
HEALTH_SECONDS = 5.0
"""Longest wait for an engine's word that it is well."""
_LOOK_SECONDS = 0.1
_LONGEST_SOCKET = 107
"""Characters of a Unix socket's path, as the kernel has it."""
_IDLE_SECONDS = 4.0
"""How long an unused connection stays open: less than at vLLM's server, which closes its own after five."""
LOST = (aiohttp.ClientError, ConnectionError, OSError, asyncio.IncompleteReadError)
"""What is raised where an engine goes away."""

LOOK_AGAIN_SECONDS = 0.1
"""While requests under way are waited for: how often those are looked for whose client is slow."""
_EMPTYING_TRIES = 100
"""A request whose client left holds its place in the cache for a step or two."""

Program = Callable[[Path, Path], Sequence[str]]
"""The command of an engine's server, given the Unix socket that it listens on and the folder of a model."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Running:
    """An engine that answers, until it dies or has other weights."""

    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    model: ModelRef
    since: float
    """When it began to serve, of the monotonic clock."""

    async def is_well(self) -> bool:
        """Whether it says that it can answer."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self.session.get("/health") as response:
                return response.status == 200
        except (TimeoutError, *LOST):
            return False


class Visit:
    """A request's time at an engine. Its weights stay what they are until `leave`, which may be called twice."""

    def __init__(self, running: Running, left: Callable[[Visit], None]) -> None:
        self.running = running
        self.read_ahead: Callable[[], None] | None = None
        """Called while the weights are to change: takes what the engine has, where a slow client holds that up."""
        self._left = left

    def leave(self) -> None:
        """The engine has nothing more to do for the request."""
        self._left(self)


class Replica:
    """The engine, and whoever waits for it. To be used on one event loop.

    Args:
        program: the command that serves on a socket.
        weights: how models are had.
        model_id: the model that it serves at first.
        name: what the engine's server calls its model.
        reload: what to call in the engine's workers so that they have the weights of a folder, as vLLM's server takes
            it at ``/collective_rpc``.
        start_seconds: longest time that a start, or a change of weights, may take.
        tolerance: of the canary, in nats.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        model_id: ContentId,
        *,
        name: str,
        reload: Callable[[Path], dict[str, Any]],
        start_seconds: float,
        tolerance: float = 0.0,
    ) -> None:
        self._program, self._weights, self._model_id, self._name = program, weights, model_id, name
        self._reload, self._start_seconds, self._tolerance = reload, start_seconds, tolerance
        self._running: Running | None = None
        self._is_there, self._is_open, self._is_idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_idle.set()
        self._visits: set[Visit] = set()
        self._changing = asyncio.Lock()
        self._next_start: asyncio.Future[None] | None = None
        """Of an engine that is started with other weights."""
        self.why = "the engine is starting"
        """Why it does not answer, while it does not."""
        self.fields: dict[str, frozenset[str]] = {}
        """Fields of a request's body that the engine knows, by path; none before its first start, nor of a path that it
        does not describe."""
        self.num_starts = self.num_changes = 0
        self.changed_at = time.time()
        """When the model that is served became that, in seconds since the epoch."""
        self.held_seconds = 0.0
        """How long requests waited for the last change of weights at the longest."""
        self.loading_seconds = 0.0
        """Of these, how long the engine took the weights, or its new start."""
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it answers for the first time, or with the error that ends the first start."""
        self._task = asyncio.create_task(self._keep())

    @property
    def running(self) -> Running | None:
        """The engine, while it answers."""
        return self._running

    @property
    def model_id(self) -> ContentId:
        """Of the weights that answer, or do so when the engine is there."""
        return self._model_id

    @property
    def holds_requests(self) -> bool:
        """Whether new requests wait for other weights."""
        return not self._is_open.is_set()

    async def wait(self, seconds: float) -> Running:
        """The engine, as soon as it answers. Raises Recoverable if that takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self._running is None:
                    await self._is_there.wait()
                return self._running
        except TimeoutError:
            raise Recoverable(
                f"the model does not answer: {self.why}; try again later", RetryHint(delay_seconds=10)
            ) from None

    async def admit(self, seconds: float) -> Visit:
        """The engine for a request, as soon as it answers and its weights are not about to change. Raises as `wait`."""
        ends = time.monotonic() + seconds
        while True:
            running = await self.wait(max(0.0, ends - time.monotonic()))
            if self._is_open.is_set():
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    await self._is_open.wait()
            if not self._is_open.is_set():
                raise Recoverable(
                    "other weights are to answer, and requests that began before have not finished; try again later",
                    RetryHint(delay_seconds=10),
                )
        visit = Visit(running, self._left)
        self._visits.add(visit)
        self._is_idle.clear()
        return visit

    def _left(self, visit: Visit) -> None:
        self._visits.discard(visit)
        if not self._visits:
            self._is_idle.set()

    async def suspect(self, running: Running) -> bool:
        """Look at an engine that failed a request. One that is not well is ended, and started anew; returns whether it
        was."""
        if not self._is_same(running):
            return True
        if await running.is_well():
            return False
        if self._is_same(running):
            self._end_now(running)
        return True

    def _is_same(self, running: Running) -> bool:
        return self._running is not None and self._running.process is running.process

    def _end_now(self, running: Running) -> None:
        self._set(None, "the engine died, and is started anew")
        with suppress(ProcessLookupError):
            running.process.kill()

    async def stop(self) -> None:
        """End the engine."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _set(self, running: Running | None, why: str = "") -> None:
        self._running, self.why = running, why
        if running is None:
            self._is_there.clear()
        else:
            self._is_there.set()

    # Other weights

    async def change(self, model_id: ContentId) -> None:
        """Answer with other weights. Returns when they answer.

        They are fetched, verified and scored by the trainer while the old ones answer. Then new requests wait, those
        under way finish, and the engine takes the weights in place, or is started anew where the two models differ
        in more. Raises NotFound, CorruptObject, ConfigError, Fatal where the weights cannot be served, and Recoverable
        where the engine died meanwhile: the old ones answer then.
        """
        async with self._changing:
            old = (await self.wait(self._start_seconds)).model
            new = ModelRef(model_id, await asyncio.to_thread(self._weights.fetch, model_id))
            # Others may have removed the old one from the cache; then nobody can tell how the two differ.
            is_there = await asyncio.to_thread((old.folder / "config.json").exists)
            examined = await self._weights.examine(new, old if is_there else None)
            began = time.monotonic()
            self._is_open.clear()
            try:
                await self._until_idle()
                running = await self.wait(self._start_seconds)
                loads = time.monotonic()
                if examined.fits:
                    await self._take_in_place(running, new, examined.canary)
                else:
                    await self._start_with(running, new)
            finally:
                self._is_open.set()
            self.num_changes += 1
            self.changed_at = time.time()
            self.held_seconds, self.loading_seconds = time.monotonic() - began, time.monotonic() - loads
            logger.warning(
                "Model %s answers instead of %s; requests waited at most %.1f s for it",
                model_id,
                old.content_id,
                self.held_seconds,
            )

    async def _until_idle(self) -> None:
        """Until the engine has done what requests under way ask for."""
        while self._visits:
            for visit in list(self._visits):
                if visit.read_ahead is not None:
                    visit.read_ahead()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await self._is_idle.wait()

    async def _take_in_place(self, running: Running, new: ModelRef, canary: Canary | None) -> None:
        try:
            await self._load(running, new, canary)
        except (TimeoutError, *LOST) as error:
            # It may be anywhere between the two.
            if self._is_same(running):
                self._end_now(running)
            raise Recoverable(
                f"the engine died, or did not answer within {self._start_seconds:g} s, as it took model "
                f"{new.content_id.short}; it is started anew with {self._model_id.short}"
            ) from error
        except Exception:
            try:
                await self._load(running, running.model, await self._examine(running.model))
            except Exception as error:  # noqa: BLE001 - an engine in an unknown state answers nobody
                logger.error("The engine did not take back its former weights, and is started anew: %s", error)
                if self._is_same(running):
                    self._end_now(running)
            raise
        if not self._is_same(running):
            raise Recoverable(f"the engine died when it had taken model {new.content_id.short}; it comes back without")
        self._model_id = new.content_id
        self._set(replace(running, model=new))

    async def _load(self, running: Running, model: ModelRef, canary: Canary | None) -> None:
        """Have the engine take the weights of a folder. Raises Fatal where it does not, or disagrees with the trainer
        about them."""
        async with asyncio.timeout(self._start_seconds):
            await _post(running.session, "/collective_rpc", self._reload(model.folder))
            for tried in range(1, _EMPTYING_TRIES + 1):
                # Keys and values of the old weights would spoil answers of the new ones.
                if (await _post(running.session, "/reset_prefix_cache", {}))["success"]:
                    break
                if tried == _EMPTYING_TRIES:
                    raise Fatal("the engine does not give up keys and values that it computed with the old weights")
                await asyncio.sleep(_LOOK_SECONDS)
        await self._check(running.session, canary)

    async def _check(self, session: aiohttp.ClientSession, canary: Canary | None) -> None:
        """Raises Fatal where the engine disagrees with the trainer about the weights that it has."""
        if canary is None:
            return
        asked = {"model": self._name, "prompt": canary.token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        async with asyncio.timeout(self._start_seconds):
            answered = await _post(session, "/v1/completions", asked)
        rows: list[Any] = answered["choices"][0]["prompt_logprobs"][1:]
        found = [row[str(token)]["logprob"] for token, row in zip(canary.token_ids[1:], rows, strict=True)]
        canary.check(found, self._tolerance)

    async def _start_with(self, running: Running, new: ModelRef) -> None:
        """End the engine and have one with another model, or with the old one again where that does not start."""
        former, self._model_id = self._model_id, new.content_id
        self._next_start = asyncio.get_running_loop().create_future()
        logger.warning(
            "Model %s differs from %s in more than its weights: the engine is started anew", new.content_id, former
        )
        self._set(None, "the engine is started anew, with another model")
        with suppress(ProcessLookupError):
            running.process.terminate()
        try:
            await self._next_start
        except BaseException:
            self._model_id = former
            raise
        finally:
            self._next_start = None

    # Processes

    async def _keep(self) -> None:
        """Have an engine, from the first start to `stop`."""
        backoff = FIRST_BACKOFF
        while True:
            served = 0.0
            try:
                served = await self._run_once()
            except Exception as error:  # noqa: BLE001 - whoever waits for the first start gets it; later ones are tried again
                if not self.started.done():
                    self.started.set_exception(error)
                    return
                logger.error("The engine could not be started anew: %s", error)
                self.why = f"the engine died, and could not be started anew: {error}"
                if self._next_start is not None and not self._next_start.done():
                    self._next_start.set_exception(error)
            if self._next_start is not None and not self._next_start.done():
                continue
            backoff = FIRST_BACKOFF if served > SETTLED_SECONDS else min(2 * backoff, LONGEST_BACKOFF)
            await asyncio.sleep(backoff)

    async def _run_once(self) -> float:
        """Start an engine and wait for its end; returns for how many seconds it served. Raises ConfigError, Fatal where
        it does not start."""
        model = ModelRef(self._model_id, await asyncio.to_thread(self._weights.fetch, self._model_id))
        examining = asyncio.create_task(self._examine(model))  # while the engine starts
        try:
            return await self._run_with(model, examining)
        finally:
            examining.cancel()
            await asyncio.gather(examining, return_exceptions=True)

    async def _examine(self, model: ModelRef) -> Canary | None:
        return (await self._weights.examine(model, None)).canary

    async def _run_with(self, model: ModelRef, examining: asyncio.Task[Canary | None]) -> float:
        with ExitStack() as stack:
            folder = stack.enter_context(engine_files())
            socket = folder / "engine.sock"
            if len(str(socket)) > _LONGEST_SOCKET:
                raise ConfigError(
                    f"the place for temporary files is too deep for a Unix socket ({socket} has more than "
                    f"{_LONGEST_SOCKET} characters); set TMPDIR to a shorter path"
                )
            self.num_starts += 1
            with engine_environment(folder):
                process = await asyncio.create_subprocess_exec(
                    *self._program(socket, model.folder),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # what it prints is for the log
                    env=os.environ | {"PYTHONPATH": search_path()},
                )
            session = aiohttp.ClientSession(
                "http://engine",
                connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=_IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=False,
            )
            try:
                running = await self._until_it_answers(process, session, folder, model)
                canary = await examining
                try:
                    await self._check(session, canary)
                except LOST as error:
                    raise Fatal("the engine died at its first tokens; the lines above say why") from error
                running = replace(running, since=time.monotonic())
                self._set(running)
                for waiting in (self.started, self._next_start):
                    if waiting is not None and not waiting.done():
                        waiting.set_result(None)
                code = await process.wait()
                if self._next_start is None:
                    self._set(None, "the engine died, and is started anew")
                    reason = engine_failure(folder) or f"it ended with {exit_reason(code)}"
                    logger.error("The engine died and is started anew: %s", reason)
                return time.monotonic() - running.since
            finally:
                await _end(process)
                await session.close()

    async def _until_it_answers(
        self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession, folder: Path, model: ModelRef
    ) -> Running:
        ends = time.monotonic() + self._start_seconds
        running = Running(process, session, model, 0.0)
        while not await running.is_well():
            if process.returncode is not None:
                reason = engine_failure(folder) or "the lines above say why"
                raise Fatal(f"the engine ended with {exit_reason(process.returncode)} before it served: {reason}")
            if time.monotonic() > ends:
                raise Fatal(
                    f"the engine did not start within {self._start_seconds:g} s; set backend.start_timeout_seconds "
                    "higher, or choose a smaller model"
                )
            await asyncio.sleep(_LOOK_SECONDS)
        self.fields = await _fields_of(session)
        return running


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    """An engine's answer. Raises Fatal where it refuses."""
    async with session.post(path, json=body) as response:
        data = await response.read()
        if response.status != 200:
            raise Fatal(f"the engine answered {path} with HTTP {response.status}: {data.decode(errors='replace'):.500}")
        try:
            return orjson.loads(data) if data else None
        except orjson.JSONDecodeError as error:  # as where a log-probability is no number
            raise Fatal(f"the engine answered {path} with what is not JSON: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    for ask in (process.terminate, process.kill):
        with suppress(ProcessLookupError):
            ask()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
            return


async def _fields_of(session: aiohttp.ClientSession) -> dict[str, frozenset[str]]:
    """What an engine says of the bodies that its paths take."""
    async with session.get("/openapi.json") as response:
        described = orjson.loads(await response.read())
    schemas = described.get("components", {}).get("schemas", {})
    found: dict[str, frozenset[str]] = {}
    for path, methods in described.get("paths", {}).items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        if name in schemas:
            found[path] = frozenset(schemas[name].get("properties", {}))
    return found
