"""In a process of its own: the objects of the environment, one for each episode, whose methods are called as they are
asked for over a socket.

It runs by any Python that has an environment, so nothing is imported here that such a Python may lack.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_core.base.errors import ConfigError, RolloutError, in_words
from rollout_core.base.isolation.warden import FRAME_LENGTH, decode_frame, encode_frame, frame_size
from rollout_core.base.socket_paths import short_address
from rollout_core.environments.protocol import (
    MEMORY_METHODS,
    Done,
    EnvironmentFailed,
    Tool,
    canonical,
    clean_text,
    further_tools_of,
    messages_of,
    method_function,
    note_of,
    reward_of,
    tool_text,
    tools_of,
    turn_reward_of,
)
from rollout_core.environments.schemas import checked_arguments, function_schema
from rollout_core.environments.tools.results import ToolError

BEAT_SECONDS = 1.0
STEP_SECONDS = 0.25
"""After which it is seen how much of the time a method itself has had."""
CLOSING_SECONDS = 5.0
"""For a method that is given up to end, before its thread counts as lost."""
LINES_OF_TRACEBACK = 6
ONE_TURN = "it has neither tools nor a step, so that every episode has one turn"


def answer(
    given: Mapping[str, Any], make: Callable[[], Any], report: Callable[[int], None], answer_bytes: int | None = None
) -> dict[str, Any]:
    """What an environment, whose objects ``make`` makes, offers; where ``given`` has ``rows``, the rows that it makes;
    where it has ``notes``, what its memory is with them; where it has a ``socket``, once all calls that come over it
    have been answered, each by at most ``answer_bytes``. Raises ConfigError where no object can be made."""
    if given["rows"] is not None:
        return asyncio.run(_rows(given["name"], make, **given["rows"]))
    if given["notes"] is not None:
        return asyncio.run(_merge(given["name"], make, json.loads(given["memory"]), given["notes"]))
    if given["socket"] is None:
        return asyncio.run(_look(given["name"], make, has_memory=given["memory"] is not None))
    asyncio.run(_Objects(make, given["threads"], given["memory"], report, answer_bytes).serve(given["socket"]))
    return {}


async def _look(name: str, make: Callable[[], Any], *, has_memory: bool) -> dict[str, Any]:
    made = _made(name, make)
    for method in ("reset", "reward", *(MEMORY_METHODS if has_memory else ())):
        if not callable(getattr(made, method, None)):
            why = ", which environment.episodic_memory = true asks for" if method in MEMORY_METHODS else ""
            raise ConfigError(f"environment {name} makes a {type(made).__name__} without a method {method}{why}")
    parameters = inspect.signature(made.reset).parameters
    try:
        inspect.signature(made.reset).bind({}, 0)
    except TypeError:
        listed = ", ".join(parameters)
        raise ConfigError(f"environment {name}: reset({listed}) is called as reset(row, seed)") from None
    tools = [function_schema(method_function(tool)).schema() for tool in tools_of(made, has_memory=has_memory).values()]
    further = getattr(made, "further_tools", None)
    if callable(further):
        try:
            tools += [tool.schema() for tool in further_tools_of(await _awaited(further())).values()]
        except Exception as error:
            raise ConfigError(f"environment {name}: {_raised('further_tools', error)}") from error
    optional = ("step", "call_tools", "turn_reward")
    has = {f"has_{method}": callable(getattr(made, method, None)) for method in optional}
    found = {"tools": tools, **has}
    if not tools and not found["has_step"]:
        found["note"] = ONE_TURN
    await _closed(made)
    return found


async def _rows(name: str, make: Callable[[], Any], split: str, size: int | None, seed: int) -> dict[str, Any]:
    made = _made(name, make)
    making = getattr(made, "make_rows", None)
    if not callable(making):
        raise ConfigError(
            f'environment {name} has no rows of its own (a method make_rows), and kind = "environment" asks for them; '
            "give a file of rows"
        )
    try:
        rows = list(await _awaited(making(split, size, seed)))
    except Exception as error:
        raise ConfigError(f"environment {name}: {_raised('make_rows', error)}") from error
    await _closed(made)
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise ConfigError(f"environment {name}: make_rows gave {wrong[0]!r:.80} for a row; expected a mapping")
    return {"rows": [dict(row) for row in rows]}


async def _merge(name: str, make: Callable[[], Any], memory: Any, notes: list[Any]) -> dict[str, Any]:
    made = _made(name, make)
    try:
        merged = await _awaited(made.merge_memory(memory, notes))
    except Exception as error:
        raise ConfigError(f"environment {name}: {_raised('merge_memory', error)}") from error
    await _closed(made)
    try:
        return {"memory": canonical(merged)}
    except ConfigError as error:
        raise ConfigError(f"environment {name}: merge_memory gave what JSON cannot hold: {error}") from error


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"environment {name} cannot be made: {in_words(error)}") from error


async def _closed(made: Any) -> None:
    closing = getattr(made, "close", None)
    if callable(closing):
        await _awaited(closing())


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


class Unattended:
    """Base of objects that have something at work between calls of their methods."""

    def _abandon(self) -> None:
        """The episode was given up: end it."""
        raise NotImplementedError


@dataclass
class _Episode:
    """An object under way; None while it is made."""

    made: Any = None
    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)
    further: dict[str, Tool] = field(default_factory=dict)
    running: asyncio.Task[Any] | None = None
    """The method that is at work."""


class Serving:
    """Answers calls that come over a socket, each within its time."""

    def __init__(self, report: Callable[[int], None], answer_bytes: int | None = None) -> None:
        self._report, self._answer_bytes = report, answer_bytes
        self._lost = 0
        """Methods that were given up and have not ended."""

    @property
    def is_busy(self) -> bool:
        """Whether something would be waited for that may never end."""
        return self._lost > 0

    async def serve(self, socket: str) -> None:
        """Answer what comes over ``socket`` until it is closed."""
        with short_address(Path(socket)) as address:
            reader, writer = await asyncio.open_unix_connection(address)
        beating = asyncio.create_task(self._beat(writer))
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    text = await reader.readexactly(frame_size(await reader.readexactly(FRAME_LENGTH.size)))
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                task = asyncio.create_task(self._handle(decode_frame(text), writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            beating.cancel()
            for task in tasks:
                task.cancel()
            writer.close()
            if self.is_busy:
                os._exit(0)  # threads that hang would be waited for

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """Show to the caller, and to what limits this process, that it is not held up."""
        number = 0
        while True:
            self._report(number := number + 1)
            with suppress(ConnectionError):
                writer.write(encode_frame({"lost": self._lost}))
                await writer.drain()
            await asyncio.sleep(BEAT_SECONDS)

    async def _handle(self, asked: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        await self._write(asked, await self._answered(asked), writer)

    async def _answered(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """With ``value``, ``error``, or ``late``."""
        answer: dict[str, Any] = {}
        try:
            working = asyncio.ensure_future(self._call(asked["episode"], asked["method"], asked["arguments"]))
            if await self._ends_within(working, asked["seconds"]):
                answer = {"value": working.result()}
            else:
                answer = {"late": True}
                working.cancel()
        except EnvironmentFailed as error:
            answer = {"error": str(error)}
        except asyncio.CancelledError:
            answer = {"error": "was given up"}
        except BaseException as error:  # noqa: BLE001 - whatever the environment raised, its episode's attempt fails
            answer = {"error": _raised(asked["method"], error)}
        return answer

    async def _write(self, asked: Mapping[str, Any], answer: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        about = {"id": asked["id"], "lost": self._lost}
        try:
            frame = encode_frame(answer | about)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"{asked['method']} gave something that JSON does not know: {error}"
            frame = encode_frame({"error": what, **about})
        if self._answer_bytes is not None and len(frame) > self._answer_bytes:
            allowed = f"{self._answer_bytes} are allowed (limits.answer_bytes)"
            frame = encode_frame({"error": f"{asked['method']} gave {len(frame)} bytes; {allowed}", **about})
        with suppress(ConnectionError):
            writer.write(frame)
            await writer.drain()

    async def _ends_within(self, working: asyncio.Future[Any], seconds: float) -> bool:
        """Whether it ends in that time. What another method takes that holds up the whole process does not count."""
        left = seconds
        while left > 0 and not working.done():
            step, began = min(left, STEP_SECONDS), time.monotonic()
            await asyncio.wait([working], timeout=step)
            left -= min(time.monotonic() - began, step)
        return working.done()

    async def _call(self, key: str, method: str, arguments: list[Any]) -> Any:
        """What a method gives for an episode, whatever the episode is then at for ``give_up``."""
        raise NotImplementedError


class _Objects(Serving):
    """By the methods of an object for each episode."""

    def __init__(
        self,
        make: Callable[[], Any],
        threads: int,
        memory: str | None,
        report: Callable[[int], None],
        answer_bytes: int | None,
    ) -> None:
        super().__init__(report, answer_bytes)
        self._make, self._memory = make, memory
        self._episodes: dict[str, _Episode] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="environment")

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self._episodes)

    async def _call(self, key: str, method: str, arguments: list[Any]) -> Any:
        if method == "give_up":
            return await self._give_up(key)
        if method == "reset":
            episode = self._episodes[key] = _Episode()
            made = await self._run(episode, self._make)
            episode.made, episode.tools = made, tools_of(made, has_memory=self._memory is not None)
            if self._memory is not None:  # a value of its own, which it may change
                await self._run(episode, made.load_memory, json.loads(self._memory))
            if callable(further := getattr(made, "further_tools", None)):
                episode.further = further_tools_of(await self._run(episode, further))
        episode = self._episodes[key]
        match method:
            case "reset":
                return messages_of(await self._run(episode, episode.made.reset, *arguments), "reset")
            case "step" | "call_tools":
                return _next(await self._run(episode, getattr(episode.made, method), *arguments), method)
            case "turn_reward":
                return turn_reward_of(await self._run(episode, episode.made.turn_reward))
            case "reward":
                return reward_of(await self._run(episode, episode.made.reward))
            case "save_memory":
                return note_of(await self._run(episode, episode.made.save_memory))
            case "close":
                closing = getattr(episode.made, "close", None)
                if closing is not None:
                    await self._run(episode, closing)
                del self._episodes[key]
                return None
            case _:
                return await self._use_tool(episode, method.removeprefix("tool:"), arguments[0])

    async def _use_tool(self, episode: _Episode, name: str, arguments: Any) -> dict[str, Any]:
        """What a tool answers to a model, which may call it wrongly."""
        try:
            if (further := episode.further.get(name)) is not None:
                found = await self._run(episode, further.function, **further.checked(arguments))
            else:
                tool = episode.tools[name]
                found = await self._run(episode, tool, **checked_arguments(method_function(tool), arguments))
        except ToolError as error:
            return {"text": clean_text(str(error)), "is_error": True, "done": False}
        is_done = isinstance(found, Done)
        return {"text": clean_text(tool_text(found.text if is_done else found)), "is_error": False, "done": is_done}

    # Others name the arguments of tools, and may do so as we do.
    async def _run(self, episode: _Episode, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The outcome of a method, async or not, which may be given up."""
        episode.running = asyncio.ensure_future(self._outcome(method, *arguments, **named))
        return await episode.running

    async def _outcome(self, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **named)
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._threads, lambda: method(*arguments, **named))
        try:
            found = await asyncio.shield(working)
        except asyncio.CancelledError:
            self._lost += 1
            working.add_done_callback(self._found_again)
            raise
        return await _awaited(found)

    def _found_again(self, working: asyncio.Future[Any]) -> None:
        self._lost -= 1
        working.exception()  # nobody waits for it any more

    async def _give_up(self, key: str) -> None:
        """Forget an episode, whatever it is at."""
        episode = self._episodes.pop(key, None)
        if episode is not None and episode.running is not None and not episode.running.done():
            episode.running.cancel()
            await asyncio.wait([episode.running], timeout=CLOSING_SECONDS)
            if not episode.running.done():  # it does not let itself be cancelled
                self._lost += 1
        if episode is not None and isinstance(episode.made, Unattended):
            episode.made._abandon()


def _next(given: Any, method: str) -> list[dict[str, Any]] | None:
    """What follows an answer; None where nothing does."""
    return None if given is None or isinstance(given, Done) else messages_of(given, method)


def _raised(method: str, error: BaseException) -> str:
    """What an environment raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)[-LINES_OF_TRACEBACK:]
    own = [frame for frame in frames if "rollout_core/environments" not in frame.filename]
    where = f" (line {own[-1].lineno} of {os.path.basename(own[-1].filename)})" if own else ""
    said = str(error) if isinstance(error, RolloutError) else in_words(error)
    return f"{method} raised {said}{where}"
