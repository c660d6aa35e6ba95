"""Tools of plugins, of kind ``tool-harness``: what a call asks them, and what of their answers counts.

A call's payload has ``method``: ``describe``, whose result has ``tools``, each with name, description and parameters;
``tool`` with ``episode``, ``name`` and ``arguments``, whose result has ``text``, and ``is_error`` where it is true; and
``close`` with ``episode``, which is over. In a Python plugin an object for each episode has tools as its methods.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from uuid import uuid4

from pydantic import Field

from rollout_core.base.errors import ConfigError, Fatal, shown
from rollout_core.config.base import Settings
from rollout_core.config.tools import PluginTools
from rollout_core.environments.protocol import (
    EnvironmentFailed,
    HostEnded,
    Tool as Described,
    clean_text,
    described_tools,
    method_function,
    tool_text,
    tools_of,
)
from rollout_core.environments.schemas import checked_arguments, function_schema
from rollout_core.environments.tools.results import Output, ToolError
from rollout_core.plugins.cases import TEST_CASES, Case
from rollout_core.plugins.host import PluginProcess
from rollout_core.plugins.identity import PluginCode

log = logging.getLogger(__name__)

ADAPTER = f"{__name__}:adapt"


class PluginToolProcesses:
    """The processes of a plugin, which episodes share, and what it says that it has."""

    def __init__(self, spec: PluginTools, code: PluginCode, on_line: Callable[[str], None] = log.info) -> None:
        """Raises ConfigError for a configuration that the plugin refuses. Starts nothing."""
        self.spec, self.code = spec, code
        # Attempts of episodes count what fails; so no number of failures is one too many.
        self._processes = [
            _Process(PluginProcess(code, spec.config, adapter=ADAPTER, on_line=on_line, most_failures=None))
            for _ in range(spec.processes)
        ]
        self._numbers = count()
        self._lock = threading.Lock()
        self._described: dict[str, Described] | None = None

    def described(self) -> dict[str, Described]:
        """Its tools, by name; the plugin is started to be asked for them, once. Raises ConfigError."""
        with self._lock:
            if self._described is None:
                self._described = self._asked_for_tools()
            return self._described

    def _asked_for_tools(self) -> dict[str, Described]:
        begin = f"plugin {self.code.name}: at describe"
        process = self._processes[0].plugin
        process.start()
        try:
            given = process.call({"method": "describe"}, _problem_with_result).get("tools")
        except Fatal as error:
            raise ConfigError(f"{error}, at describe") from error
        return described_tools(given, begin)

    def tools(self) -> list[PluginTool]:
        """Those of one episode."""
        session = _Session(self._processes[next(self._numbers) % len(self._processes)])
        return [PluginTool(self.spec, tool, session) for tool in self.described().values()]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.plugin.close()


class _Process:
    """One of the plugin's, where an episode's calls all go."""

    def __init__(self, plugin: PluginProcess) -> None:
        self.plugin = plugin
        self.turn = asyncio.Lock()


class _Session:
    """The calls of one episode."""

    def __init__(self, process: _Process) -> None:
        self._process = process
        self._name = uuid4().hex
        self._start: int | None = None
        """The start of the process that has what is kept of the episode; None before its first answer."""
        self._has_asked = False

    async def ask(self, method: str, **about: Any) -> dict[str, Any]:
        """The result of a call. Raises EnvironmentFailed for one that failed, HostEnded where what the plugin kept of
        the episode is lost, and Recoverable."""
        plugin, asked = self._process.plugin, {"method": method, "episode": self._name, **about}
        async with self._process.turn:
            self._check(plugin)
            self._has_asked = True
            try:
                found = await asyncio.to_thread(plugin.call, asked, _problem_with_result)
            except Fatal as error:
                raise EnvironmentFailed(str(error)) from error
            self._check(plugin)
            self._start = plugin.num_starts
        return found

    def _check(self, plugin: PluginProcess) -> None:
        if self._start is not None and self._start != plugin.num_starts:
            reason = "was started again, and what it kept of the episode is lost"
            raise HostEnded(reason, is_suspect=False, process=f"plugin {plugin.code.name}")

    async def close(self) -> None:
        """Say that the episode is over, where that is still of interest."""
        plugin, has_asked = self._process.plugin, self._has_asked
        self._has_asked = False
        async with self._process.turn:
            if has_asked and self._start in (None, plugin.num_starts) and plugin.is_running:
                with suppress(Fatal):
                    await asyncio.to_thread(plugin.call, {"method": "close", "episode": self._name})


class PluginTool:
    """One tool of one episode."""

    def __init__(self, spec: PluginTools, described: Described, session: _Session) -> None:
        self.name = described.name
        self.schema: Mapping[str, Any] = described.schema()
        self.output_characters = spec.output_characters
        self._plugin, self._described, self._session = spec.name, described, session

    async def call(self, arguments: Mapping[str, Any]) -> Output:
        checked = self._described.checked(arguments)
        found = await self._session.ask("tool", name=self.name, arguments=checked)
        text, is_error = found.get("text"), found.get("is_error", False)
        if not isinstance(text, str) or not isinstance(is_error, bool):
            expected = "expected text, and is_error, true or false"
            raise EnvironmentFailed(
                f"tool {self.name} of plugin {self._plugin} answered with {shown(found)}; {expected}"
            )
        return Output(clean_text(text), is_error=is_error)

    async def close(self) -> None:
        await self._session.close()


def _problem_with_result(result: Any) -> str | None:
    return None if isinstance(result, dict) else f"answered with {shown(result)}; expected an object"


class CalledTool(Settings):
    """A call of a test case."""

    tool: str
    """Its name."""
    arguments: dict[str, Any] = Field(default={})
    """By their names."""
    text: str
    """What the model reads."""
    is_error: bool = False
    """Whether it is what came of a fault of the model's."""


class ToolsCase(Case):
    """A case of tools: the calls of one episode, in order."""

    calls: tuple[CalledTool, ...] = Field(min_length=1)
    """What is called, and what comes of it."""


def failed_cases(code: PluginCode, cases: Sequence[tuple[int, ToolsCase]], on_line: Callable[[str], None]) -> list[str]:
    """Put test cases to a plugin, which is started for each; what is wrong, a line for each."""
    failures: list[str] = []
    for number, case in cases:
        spec = PluginTools(kind="plugin", name=code.name, config=case.config)
        processes = PluginToolProcesses(spec, code, on_line)
        try:
            problem = asyncio.run(_wrong(processes, case))
        except (ConfigError, EnvironmentFailed, HostEnded) as error:
            problem = f"got {error}; expected {case.calls[0].text!r}"
        finally:
            processes.close()
        if problem is not None:
            failures.append(f"{TEST_CASES}:{number}: {problem}")
    return failures


async def _wrong(processes: PluginToolProcesses, case: ToolsCase) -> str | None:
    tools = {tool.name: tool for tool in processes.tools()}
    for called in case.calls:
        if called.tool not in tools:
            return f"got the tool {called.tool!r}; expected one of {', '.join(map(repr, tools))}"
        try:
            output = await tools[called.tool].call(called.arguments)
        except ToolError as error:
            output = Output(str(error), is_error=True)
        if (output.head, output.is_error) != (called.text, called.is_error):
            return f"got {output.head!r} of {called.tool} (is_error {output.is_error}); expected {called.text!r}"
    return None


async def _awaited(found: Any) -> Any:
    return await found


def adapt(name: str, made: Any) -> Callable[[Any], Any]:
    """In a Python plugin's process: its factory made what makes an object for each episode, whose public methods are
    tools."""
    if not callable(made):
        raise ConfigError(
            f"plugin {name}: its factory returned {shown(made)}; expected a class, or a function without arguments, "
            "that makes an object with a method for each tool"
        )
    loop = asyncio.Runner()
    objects: dict[str, Any] = {}

    def awaited(found: Any) -> Any:
        return loop.run(_awaited(found)) if inspect.isawaitable(found) else found

    def answer(payload: Any) -> Any:
        match payload["method"]:
            case "describe":
                tools = tools_of(made()).values()
                described = [function_schema(method_function(tool)).schema()["function"] for tool in tools]
                return {"tools": described}
            case "close":
                ended = objects.pop(payload["episode"], None)
                if callable(closing := getattr(ended, "close", None)):
                    awaited(closing())
                return {}
        if (owner := objects.get(payload["episode"])) is None:
            owner = objects[payload["episode"]] = made()
        try:
            tool = tools_of(owner)[payload["name"]]
            found = awaited(tool(**checked_arguments(method_function(tool), payload["arguments"])))
        except ToolError as error:
            return {"text": clean_text(str(error)), "is_error": True}
        return {"text": clean_text(tool_text(found))}

    return answer
