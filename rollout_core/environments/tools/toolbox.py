"""The tools of one episode, and what those of many episodes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_core.base.errors import ConfigError, Recoverable, near
from rollout_core.config.tools import (
    AnyTool,
    FilesTool,
    HttpTool,
    McpTool,
    PluginTools,
    PythonTool,
    SandboxedTool,
    SearchTool,
    ShellTool,
    SqlTool,
)
from rollout_core.environments.tools.files import Files
from rollout_core.environments.tools.folder import EpisodeFolder
from rollout_core.environments.tools.http import Http, Resolve, resolved
from rollout_core.environments.tools.mcp import McpServer, Served
from rollout_core.environments.tools.plugin_tools import PluginToolProcesses
from rollout_core.environments.tools.python import Python
from rollout_core.environments.tools.results import Output, Tool, ToolError, ToolResult, shortened
from rollout_core.environments.tools.sandboxed import sandbox_of
from rollout_core.environments.tools.search import Search, SearchIndex, check_corpus
from rollout_core.environments.tools.shell import Shell
from rollout_core.environments.tools.sql import Sql, SqlProcesses, check_database
from rollout_core.plugins.discovery import find_plugin
from rollout_core.plugins.identity import PluginCode
from rollout_core.sandbox import Program, Sandbox


class ToolResources:
    """What the tools of many episodes share: sandboxes' launchers, indexes, processes that query. Made once by whoever
    runs episodes, and closed when the last of them is."""

    def __init__(
        self,
        tools: Sequence[AnyTool],
        *,
        index_folder: Path,
        base: Path = Path(),
        served: Served = MappingProxyType({}),
        plugins: Mapping[str, PluginCode] = MappingProxyType({}),
        resolve: Resolve = resolved,
    ) -> None:
        """``index_folder``: where indexes of corpora are kept. ``base``: the working folder of the paths that tools
        name. ``served``: what MCP servers among them have (`ask_servers`). ``plugins``: those that give tools, by name,
        as they were read; others are found as they are now. ``resolve``: what finds the addresses of a name. Nothing
        is started before it is used."""
        _check_names(tools)
        for spec in tools:
            if isinstance(spec, McpTool) and spec.name not in served:
                raise ConfigError(f"MCP server {spec.name} was not asked; pass served=ask_servers(tools, base)")
        self.tools = tuple(tools)
        self.base = base
        self._served = served
        self.resolve = resolve
        self._sandboxes: dict[Any, Sandbox] = {}
        self._indexes = {
            spec.name: SearchIndex(spec, base, index_folder) for spec in tools if isinstance(spec, SearchTool)
        }
        self._queries = {spec.name: SqlProcesses(spec) for spec in tools if isinstance(spec, SqlTool)}
        self.plugins = {
            spec.name: PluginToolProcesses(
                spec, plugins.get(spec.name) or find_plugin(spec.name, base, spec.path, kind="tool-harness")
            )
            for spec in tools
            if isinstance(spec, PluginTools)
        }
        """By their names."""

    def made(self, spec: AnyTool, folder: EpisodeFolder) -> Sequence[Tool]:
        """What a table gives one episode: a tool, or those of a server or a plugin."""
        match spec:
            case PythonTool():
                return [Python(spec, self._sandbox(spec), folder)]
            case ShellTool():
                return [Shell(spec, self._sandbox(spec), folder)]
            case FilesTool():
                return [Files(spec, folder)]
            case HttpTool():
                return [Http(spec, self.resolve)]
            case SearchTool():
                return [Search(spec, self._indexes[spec.name])]
            case SqlTool():
                return [Sql(spec, self.base / spec.database, self._queries[spec.name])]
            case McpTool():
                return McpServer(spec, self._served[spec.name], self.base, folder).tools
            case PluginTools():
                return self.plugins[spec.name].tools()

    def start(self) -> None:
        """Start plugins and ask them for their tools, which episodes then find done. Raises ConfigError."""
        for plugin in self.plugins.values():
            plugin.described()

    def _sandbox(self, spec: SandboxedTool) -> Sandbox:
        """Tools with the same one share it."""
        if spec.sandbox not in self._sandboxes:
            self._sandboxes[spec.sandbox] = sandbox_of(spec)
        return self._sandboxes[spec.sandbox]

    def prepare(self) -> None:
        """Do now what the first calls would wait for: make indexes, try the sandboxes' walls, ask plugins what they
        have. Raises ConfigError where something is missing, and Recoverable."""
        self.start()
        for index in self._indexes.values():
            index.path()
        for spec in self.tools:
            if isinstance(spec, SandboxedTool):
                self._sandbox(spec).run(Program(source="pass"))

    def close(self) -> None:
        """End what is held. Episodes' tools are closed before."""
        for sandbox in self._sandboxes.values():
            sandbox.close()
        for processes in (*self._queries.values(), *self.plugins.values()):
            processes.close()


class Toolbox:
    """The tools of one episode. Calls may overlap; those that share the folder take turns."""

    def __init__(
        self,
        tools: Sequence[AnyTool],
        folder: Path,
        *,
        resources: ToolResources | None = None,
        index_folder: Path | None = None,
        base: Path = Path(),
        only: Collection[str] | None = None,
    ) -> None:
        """``folder``: the episode's own, which the caller makes and removes; Python, shell and files all work in it.
        ``resources``: what the episodes of these tools share; None: this one has its own, with ``index_folder`` and
        ``base``. ``only``: names of those that this episode has; None: all. Nothing is started before a tool is
        called."""
        self._own = None
        if resources is None:
            if index_folder is None and any(isinstance(spec, SearchTool) for spec in tools):
                raise ConfigError("a toolbox with a search tool needs index_folder, the folder where its index is kept")
            resources = self._own = ToolResources(tools, index_folder=index_folder or folder, base=base)
        elif resources.tools != tuple(tools):
            raise ConfigError("the resources of a toolbox are those of other tools; make them of the same ones")
        shared, chosen = EpisodeFolder(folder), [spec for spec in tools if only is None or spec.name in only]
        made = [tool for spec in chosen for tool in resources.made(spec, shared)]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            names = [tool.name for tool in made]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two tools are called {twice!r}; rename one, or leave it out")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The description of each tool, as a chat API takes it."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """The result of a call, for the model. ``arguments``: those that it gave, parsed from JSON.

        What the model did wrong, or what came of it, is a result that says so. Raises ConfigError and Recoverable for
        what the configuration or the machine did.
        """
        begun = time.monotonic()
        tool = self._tools.get(name) if isinstance(name, str) else None
        most, is_error = 8_000, True
        try:
            if tool is None:
                raise ToolError(f"there is no tool {str(name)[:80]!r}; {near(str(name)[:80], self._tools)}")
            most = tool.output_characters
            found = await tool.call(arguments)
            output = found if isinstance(found, Output) else Output(found)
            is_error = output.is_error
        except ToolError as error:
            output = Output(f"error: {error}")
        text, is_truncated = shortened(output, most)
        return ToolResult(text, is_error, time.monotonic() - begun, is_truncated)

    async def close(self) -> None:
        """End all that the tools hold. The folder stays."""
        async with AsyncExitStack() as stack:
            if self._own is not None:
                stack.push_async_callback(asyncio.to_thread, self._own.close)
            for tool in self._tools.values():
                stack.push_async_callback(tool.close)

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def check_tools(tools: Sequence[AnyTool], base: Path = Path()) -> None:
    """Raise ConfigError with a line for each thing that tools need and this machine does not have: walls, programs,
    files of corpora, databases. Raises Recoverable where a sandbox service does not answer."""
    _check_names(tools)
    lines: list[str] = []
    for spec in tools:
        if isinstance(spec, SandboxedTool):
            lines += _lacking(spec)
        elif isinstance(spec, SearchTool):
            lines += check_corpus(spec, base)
        elif isinstance(spec, SqlTool):
            lines += check_database(spec.name, base / spec.database)
    if lines:
        raise ConfigError("\n".join(lines), lines)


def _check_names(tools: Sequence[AnyTool]) -> None:
    names = [spec.name for spec in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} tools are called {name!r}; give each a name of its own")


def _lacking(spec: SandboxedTool) -> list[str]:
    """What a tool that runs programs does not have here."""
    programs: Sequence[str] = ()
    if isinstance(spec, ShellTool):
        programs = ("sh",) if spec.commands == "any" else ("bash", *spec.commands)
    with sandbox_of(spec) as sandbox:
        try:
            found = sandbox.run(Program(source=_MISSING, argv=programs))
        except ConfigError as error:
            return [f"tool {spec.name}: {error}"]
    if not found.ok:
        raise Recoverable(f"tool {spec.name}: what looks for its programs {found.reason}; try again")
    return [
        f"tool {spec.name}: the sandbox has no program {name}; install it on the machine that runs episodes, or leave "
        "it out of commands"
        for name in found.stdout.decode(errors="replace").split()
    ]


_MISSING = """
import os, sys
folders = os.environ["PATH"].split(":")
for name in sys.argv[1:]:
    if not any(os.access(os.path.join(folder, name), os.X_OK) for folder in folders):
        print(name)
"""
"""Prints those of its arguments that are no programs on the search path."""


__all__ = ["Tool", "ToolError", "ToolResources", "ToolResult", "Toolbox", "check_tools"]
