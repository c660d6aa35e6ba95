"""One engine behind a server: a child process that listens on a Unix socket, watched, and started anew when it dies.

The socket lies in a folder that only this user can enter, a new one each time, so no connection leads to an engine that
is no more. The first start has to succeed; an engine that served and died comes back, after longer and longer waits
where it dies again soon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from rollout_core.base.errors import ConfigError, Fatal, Recoverable, RetryHint
from rollout_core.base.processes import exit_reason, search_path
from rollout_core.inference.engine_process import engine_environment, engine_failure, engine_files

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

Program = Callable[[Path], Sequence[str]]
"""The command of an engine's server that listens on a Unix socket."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """An engine that answers, until it dies."""

    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    since: float
    """Of the monotonic clock."""

    async def is_well(self) -> bool:
        """Whether it says that it can answer."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self.session.get("/health") as response:
                return response.status == 200
        except (TimeoutError, *LOST):
            return False


class Replica:
    """The engine, and whoever waits for it. To be used on one event loop.

    Args:
        program: the command that serves on a socket.
        start_seconds: longest time that a start may take.
    """

    def __init__(self, program: Program, *, start_seconds: float) -> None:
        self._program = program
        self._start_seconds = start_seconds
        self._running: Running | None = None
        self._changed = asyncio.Event()
        self.why = "the engine is starting"
        """Why it does not answer, while it does not."""
        self.fields: dict[str, frozenset[str]] = {}
        """Fields of a request's body that the engine knows, by path; none before its first start, nor of a path that it
        does not describe."""
        self.num_starts = 0
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it answers for the first time, or with the error that ends the first start."""
        self._task = asyncio.create_task(self._keep())

    @property
    def running(self) -> Running | None:
        """The engine, while it answers."""
        return self._running

    async def wait(self, seconds: float) -> Running:
        """The engine, as soon as it answers. Raises Recoverable if that takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self._running is None:
                    await self._changed.wait()
                return self._running
        except TimeoutError:
            raise Recoverable(
                f"the model does not answer: {self.why}; try again later", RetryHint(delay_seconds=10)
            ) from None

    async def suspect(self, running: Running) -> bool:
        """Look at an engine that failed a request. One that is not well is ended, and started anew; returns whether it
        was."""
        if running is not self._running:
            return True
        if await running.is_well():
            return False
        if running is self._running:
            self._set(None, "the engine died, and is started anew")
            with suppress(ProcessLookupError):
                running.process.kill()
        return True

    async def stop(self) -> None:
        """End the engine."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _set(self, running: Running | None, why: str = "") -> None:
        self._running, self.why = running, why
        if running is None:
            self._changed.clear()
        else:
            self._changed.set()

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
            backoff = FIRST_BACKOFF if served > SETTLED_SECONDS else min(2 * backoff, LONGEST_BACKOFF)
            await asyncio.sleep(backoff)

    async def _run_once(self) -> float:
        """Start an engine and wait for its end; returns for how many seconds it served. Raises ConfigError, Fatal where
        it does not start."""
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
                    *self._program(socket),
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
                running = await self._until_it_answers(process, session, folder)
                self._set(running)
                if not self.started.done():
                    self.started.set_result(None)
                code = await process.wait()
                self._set(None, "the engine died, and is started anew")
                reason = engine_failure(folder) or f"it ended with {exit_reason(code)}"
                logger.error("The engine died and is started anew: %s", reason)
                return time.monotonic() - running.since
            finally:
                await _end(process)
                await session.close()

    async def _until_it_answers(
        self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession, folder: Path
    ) -> Running:
        ends = time.monotonic() + self._start_seconds
        running = Running(process, session, 0.0)
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
        self.fields, running.since = await _fields_of(session), time.monotonic()
        return running


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
