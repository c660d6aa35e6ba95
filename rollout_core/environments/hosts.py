"""The caller's side of environments: processes in which their objects are, and the calls of their methods.

A process that ends takes its episodes along. Those of which a method was under way may be to blame; the others are
not, and begin again for nothing. Which one of several was to blame shows when each is played in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, Fatal, Recoverable
from rollout_core.base.isolation.child import Child, Ended, Interrupted
from rollout_core.base.isolation.warden import FRAME_LENGTH, BadFrame, decode_frame, encode_frame, frame_size
from rollout_core.base.locks import scratch_folder
from rollout_core.base.socket_paths import short_address
from rollout_core.base.stopping import in_thread
from rollout_core.config.base import EnvironmentRows
from rollout_core.config.environments import EnvironmentConfig, PluginEnvironment
from rollout_core.environments.adapters import handler_of, host_keys
from rollout_core.environments.code import EnvironmentCode
from rollout_core.environments.protocol import EnvironmentFailed, HostEnded
from rollout_core.plugins.host import start_request
from rollout_core.plugins.identity import PluginCode

log = logging.getLogger(__name__)

HANDLER = "rollout_core.environments.host_process:handle"
PLUGIN_HANDLER = "rollout_core.environments.plugin_process:handle"
SOCKET = "calls"
NO_MEMORY = "null"
"""The memory of an environment that remembers nothing yet, as JSON."""
HELD_UP_SECONDS = 10.0
"""At least, for a method that holds up its whole process, as one that never awaits does, until this is ended."""
GIVING_UP_SECONDS = 10.0
"""For a process to say that it gave an episode up."""


@dataclass(frozen=True)
class Offer:
    """What an environment has for a model."""

    tools: list[dict[str, Any]]
    """As OpenAI's API describes them."""
    has_step: bool
    has_turn_reward: bool = False
    has_call_tools: bool = False
    """Whether it takes answers with tool calls as they are."""
    note: str | None = None
    """What its author may not have meant."""


def look_at(code: EnvironmentCode, settings: EnvironmentConfig) -> Offer:
    """Load an environment and make an object, in a process of its own. Raises ConfigError where that fails."""
    return Offer(**_asked(code, settings, _given(code, settings)))


def rows_of(code: EnvironmentCode, settings: EnvironmentConfig, source: EnvironmentRows) -> list[dict[str, Any]]:
    """The rows that an environment makes itself, in a process of its own. Raises ConfigError where it makes none."""
    asked = {"split": source.split, "size": source.size, "seed": source.seed}
    rows = _asked(code, settings, _given(code, settings, rows=asked))["rows"]
    if not rows:
        raise ConfigError(f"environment {code.path} made no rows for {asked}")
    return rows


def merged_memory(code: EnvironmentCode, settings: EnvironmentConfig, memory: str, notes: list[Any]) -> str:
    """What an environment makes of its memory and of what episodes left, as canonical JSON, in a process of its own.
    Raises ConfigError where it makes nothing of them."""
    return _asked(code, settings, _given(code, settings, memory=memory, notes=notes))["memory"]


def _asked(code: EnvironmentCode, settings: EnvironmentConfig, given: dict[str, Any]) -> dict[str, Any]:
    with scratch_folder("environment") as folder, _child(code, settings, folder) as child:
        try:
            return child.call(given)
        except Ended as error:
            raise ConfigError(f"environment {code.path} cannot be loaded: it {error}") from error
        except Fatal as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _child(code: EnvironmentCode, settings: EnvironmentConfig, folder: Path) -> Child:
    """``folder``: for a plugin's files, while it runs."""
    limits, name = settings.limits(), code.path

    def on_line(line: str) -> None:
        log.info("environment %s: %s", name, line)

    if not isinstance(code.code, PluginCode):
        handler, python = handler_of(settings, _folder(code)) or (HANDLER, None)
        return Child(handler, limits, python=python, on_line=on_line)
    assert isinstance(settings, PluginEnvironment), "its code is a plugin's"
    plugin, config = code.code, settings.config
    own, memory_mib = plugin.manifest.limits, plugin.manifest.runtime.memory_mib
    allowed = [limits.memory_bytes, None if memory_mib is None else memory_mib * 2**20]
    memory = min((each for each in allowed if each is not None), default=None)

    def prepare(ask: Callable[[Any], Any]) -> None:
        began = time.monotonic()
        ask({"start": start_request(plugin, config, plugin.write(folder)), "answer_bytes": own.answer_bytes})
        mode, seconds = plugin.manifest.mode.replace("_", " "), time.monotonic() - began
        on_line(f"plugin_loaded {plugin.manifest.title} ({plugin.id.short}), {mode}, in {seconds:.2f} s")

    limits = replace(limits, memory_bytes=memory, processes=own.processes)
    return Child(PLUGIN_HANDLER, limits, on_line=on_line, prepare=prepare, prepare_seconds=own.start_seconds)


def _folder(code: EnvironmentCode) -> Path:
    """The working folder that a user's own code was read in."""
    folders = () if isinstance(code.code, PluginCode) else code.code.folders
    return Path(folders[0]) if folders else Path()


def _given(
    code: EnvironmentCode,
    settings: EnvironmentConfig,
    socket: Path | None = None,
    *,
    rows: dict[str, Any] | None = None,
    memory: str = NO_MEMORY,
    notes: list[Any] | None = None,
) -> dict[str, Any]:
    return {
        "code": None if isinstance(code.code, PluginCode) else code.code.document(),
        "name": code.path,
        "config": host_keys(settings, _folder(code)),
        "expected": None if code.adapted is None else code.adapted.get("hosted"),
        "rows": rows,
        "memory": memory if settings.episodic_memory else None,
        "notes": notes,
        # Methods that are given up keep their threads for as long as they like.
        "threads": 2 * settings.episodes_at_once + 8,
        "socket": None if socket is None else str(socket),
    }


class _Host:
    """One process, from its start to its end."""

    def __init__(self, code: EnvironmentCode, settings: EnvironmentConfig, memory: str) -> None:
        self._code, self._settings, self._memory = code, settings, memory
        self._scratch = ExitStack()
        self._folder = self._scratch.enter_context(scratch_folder("environment"))
        self._child = _child(code, settings, self._folder)
        self._numbers = count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connected: asyncio.Future[None] | None = None
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reason: str | None = None
        """Why it ended."""
        self._heard = time.monotonic()
        """When it last showed that it is not held up."""
        self._held_up_seconds = max(HELD_UP_SECONDS, settings.turn_seconds)
        self.episodes: set[str] = set()
        self.is_worn = False
        """A method that was given up is still at work there: no more episodes come."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be called any more."""
        return self._reason is not None

    async def start(self) -> None:
        """Start it. Raises ConfigError where the environment cannot be loaded, Recoverable where the machine is to
        blame."""
        self._connected = asyncio.get_running_loop().create_future()
        with short_address(self._folder / SOCKET) as address:
            self._server = await asyncio.start_unix_server(self._serve, address)
        given = _given(self._code, self._settings, self._folder / SOCKET, memory=self._memory)
        self._call = in_thread(lambda: self._child.call(given))
        self._watching = asyncio.create_task(self._watch())
        await self._connected

    async def _watch(self) -> None:
        """Until the process has ended."""
        assert self._connected is not None
        error: BaseException | None = None
        try:
            await asyncio.shield(asyncio.wrap_future(self._call))
            self._reason = "was closed"
        except (Ended, Interrupted) as raised:
            error, self._reason = raised, str(getattr(raised, "reason", raised))
        except Exception as raised:  # noqa: BLE001 - raised where it is started
            error, self._reason = raised, str(raised)
        if not self._connected.done():
            if isinstance(error, Ended):
                error = ConfigError(f"environment {self._code.path} cannot be loaded: it {error}")
            self._connected.set_exception(error or Recoverable("the environment's process ended as it began"))
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(HostEnded(str(self._reason), is_suspect=True))
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._connected is not None
        self._writer, self._heard = writer, time.monotonic()
        if not self._connected.done():
            self._connected.set_result(None)
        try:
            while True:
                size = frame_size(await reader.readexactly(FRAME_LENGTH.size))
                answer = decode_frame(await reader.readexactly(size))
                self._heard, self.is_worn = time.monotonic(), self.is_worn or answer["lost"] > 0
                future = self._open.pop(answer["id"], None) if "id" in answer else None
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (BadFrame, LookupError, TypeError) as error:
            log.warning("the process of environment %s wrote what is no answer: %s", self._code.path, error)
        # Nothing that is asked there would be answered any more. Most often it has ended, and says why.
        assert self._watching is not None
        await asyncio.wait([self._watching], timeout=GIVING_UP_SECONDS)
        self._child.end()

    async def call(self, episode: str, method: str, arguments: list[Any], seconds: float) -> dict[str, Any]:
        """The answer to a call, which has so many seconds there. Raises HostEnded, also where the process answers
        nothing any more."""
        if self._reason is not None:
            raise HostEnded(self._reason, is_suspect=False)
        assert self._writer is not None
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answer
        asked = {"id": number, "episode": episode, "method": method, "arguments": arguments, "seconds": seconds}
        self._writer.write(encode_frame(asked))
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=1.0)
                if not answer.done() and time.monotonic() - self._heard > self._held_up_seconds:
                    self._child.end()
                    raise HostEnded(f"was held up for {self._held_up_seconds:g} s by a method", is_suspect=True)
            return answer.result()
        finally:
            self._open.pop(number, None)

    async def give_up(self, episode: str) -> None:
        """Forget an episode, whatever it is at."""
        with suppress(HostEnded):
            self.is_worn = self.is_worn or "late" in await self.call(episode, "give_up", [], GIVING_UP_SECONDS)

    async def close(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        if self._watching is not None and self._writer is not None and not self.has_ended:
            await asyncio.wait([self._watching], timeout=1.0 if self.is_worn else GIVING_UP_SECONDS)
        self._child.end()
        if self._watching is not None:
            await asyncio.wait([self._watching])
            await asyncio.to_thread(self._child.close)
        self._scratch.close()


@dataclass
class Place:
    """An episode's place in a process: where its methods are called."""

    _host: _Host
    _episode: str
    _turn_seconds: float
    _seconds_left: float
    seconds: float = 0.0
    """That its methods took so far."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method gives, see `host_process`. Raises EnvironmentFailed, HostEnded."""
        limit = min(self._turn_seconds, self._seconds_left)
        if limit <= 0:
            raise EnvironmentFailed(f"the episode's calls took longer than episode_seconds, before {method}")
        began = time.monotonic()
        try:
            answer = await self._host.call(self._episode, method, list(arguments), limit)
        finally:
            self.spend(time.monotonic() - began)
        if "late" in answer:
            is_turns = limit == self._turn_seconds
            which = f"{limit:g} s (turn_seconds)" if is_turns else "what is left of episode_seconds"
            raise EnvironmentFailed(f"{method} took longer than {which}")
        if "error" in answer:
            raise EnvironmentFailed(answer["error"])
        if "ended" in answer:
            raise HostEnded(answer["ended"], is_suspect=False)
        return answer["value"]

    def spend(self, seconds: float) -> None:
        """Count what a call of the episode took, wherever it was at work."""
        self.seconds += seconds
        self._seconds_left -= seconds

    async def give_up(self) -> None:
        """Forget the episode, whatever it is at."""
        await self._host.give_up(self._episode)


class Hosts:
    """The processes of an environment, started as they are needed; in one event loop. ``memory``, as JSON: what its
    episodes begin with, where it has one."""

    def __init__(self, code: EnvironmentCode, settings: EnvironmentConfig, memory: str = NO_MEMORY) -> None:
        self._code, self._settings, self._memory = code, settings, memory
        self._hosts: list[_Host] = []
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def place(self, episode: str, *, alone: bool = False) -> AsyncIterator[Place]:
        """Inside the block the episode has an object's place. ``alone``: in a process of its own."""
        host = await self._host(alone=alone)
        host.episodes.add(episode)
        place = Place(host, episode, self._settings.turn_seconds, self._settings.episode_seconds)
        try:
            yield place
        except BaseException:
            if not host.has_ended:
                await asyncio.shield(asyncio.create_task(host.give_up(episode)))
            raise
        finally:
            host.episodes.discard(episode)
            if not host.episodes and (alone or host.is_worn or host.has_ended):
                await self._drop(host)

    async def _host(self, *, alone: bool) -> _Host:
        async with self._starting:
            for host in [host for host in self._hosts if host.has_ended and not host.episodes]:
                await self._drop(host)
            fit = [host for host in self._hosts if not (host.has_ended or host.is_worn)]
            if alone or len(fit) < self._settings.processes:
                host = _Host(self._code, self._settings, self._memory)
                try:
                    await host.start()
                except BaseException:
                    await host.close()
                    raise
                if not alone:
                    self._hosts.append(host)
                return host
            return min(fit, key=lambda host: len(host.episodes))

    async def _drop(self, host: _Host) -> None:
        if host in self._hosts:
            self._hosts.remove(host)
        await host.close()

    async def close(self) -> None:
        """End all processes."""
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(host.close() for host in hosts))
