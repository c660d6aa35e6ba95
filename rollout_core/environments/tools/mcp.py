"""The tools of MCP servers, as tools of an episode.

What a server has is found once, before a model is loaded, and is part of ids; so is the content of the files that its
command names. An episode that calls one of its tools has a server, or a session with one, of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError, near
from rollout_core.base.locks import scratch_folder
from rollout_core.base.settings import Redaction, require_secret
from rollout_core.base.stopping import run_async
from rollout_core.config.tools import AnyTool, McpTool
from rollout_core.environments.protocol import EnvironmentFailed, checked_by_schema
from rollout_core.environments.tools.folder import EpisodeFolder
from rollout_core.environments.tools.mcp_process import ServerLost, TooMuch, local_path
from rollout_core.environments.tools.results import ToolError
from rollout_core.objects.trees import hash_file
from rollout_core.rewards.user_code import read_code

if TYPE_CHECKING:
    from rollout_core.environments.tools.mcp_client import McpSession

Served = Mapping[str, Mapping[str, Any]]
"""By the name of a server in the settings: what it says of itself, its ``tools``, and the ``files`` of its command."""
log = logging.getLogger(__name__)

NAME_CHARACTERS = 64
_SEPARATOR = re.compile(r"[^A-Za-z0-9_-]")


def ask_servers(tools: Sequence[AnyTool], base: Path) -> Served:
    """What the MCP servers among these tools have. Each is started or reached, asked, and left. Raises ConfigError
    where one has nothing, or what a model cannot call."""
    specs = [spec for spec in tools if isinstance(spec, McpTool)]
    if not specs:
        return {}
    try:
        version("mcp")
    except PackageNotFoundError:
        raise ConfigError(
            f"tools of kind = \"mcp\" need the package mcp, which is not installed: pip install '{DISTRIBUTION}[mcp]'"
        ) from None
    return run_async(_ask(specs, base))


async def _ask(specs: Sequence[McpTool], base: Path) -> Served:
    served: dict[str, Mapping[str, Any]] = {}
    for spec in specs:
        try:
            served[spec.name] = await _served(spec, base)
        except (ServerLost, ToolError) as error:
            raise ConfigError(_hidden(f"{_title(spec)} {error}", _secrets(spec))) from None
        except TimeoutError as error:
            late = f"did not say within {spec.start_seconds:g} s (start_seconds) which tools it has{error}"
            raise ConfigError(_hidden(f"{_title(spec)} {late}", _secrets(spec))) from None
    return served


async def _served(spec: McpTool, base: Path) -> dict[str, Any]:
    # Late, as the package is imported where there is such a tool, and not with every command.
    from rollout_core.environments.tools.mcp_client import McpSession

    with scratch_folder("mcp") as folder:
        session = await McpSession.open(spec, base, folder, _secrets(spec))
        try:
            about, listed = await session.tools()
        finally:
            await session.close()
    names = [tool.name for tool in listed]
    for name in spec.only or ():
        if name not in names:
            raise ConfigError(f"{_title(spec)} has no tool {name!r} (only); {near(name, names)}")
    tools = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in sorted(listed, key=lambda tool: tool.name)
        if spec.only is None or tool.name in spec.only
    ]
    # They are stored with the run, and a default of an argument may be what a variable held.
    tools = _hidden_within(tools, _secrets(spec))
    if not tools:
        raise ConfigError(f"{_title(spec)} has no tools; expected at least one")
    for tool in tools:
        _check(spec, tool)
    called = [_called(spec, tool["name"]) for tool in tools]
    if twice := sorted({name for name in called if called.count(name) > 1}):
        raise ConfigError(f"{_title(spec)} has two tools that a model would call {twice[0]!r}; leave one out (only)")
    said = None if about is None else {"name": about.name, "version": about.version}
    return {"server": said, "tools": tools, "files": _files(spec, base)}


def _check(spec: McpTool, tool: Mapping[str, Any]) -> None:
    """Raise ConfigError where a model cannot call a tool."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    name, schema = tool["name"], tool["parameters"]
    if len(_called(spec, name)) > NAME_CHARACTERS:
        raise ConfigError(
            f"{_title(spec)}: a model would call {name!r} {_called(spec, name)!r}, which has more than "
            f"{NAME_CHARACTERS} characters; give the server a shorter name, or leave the tool out (only)"
        )
    try:
        Draft202012Validator.check_schema(schema)
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        resolver = Registry().with_resource("", resource).resolver()
        for reference in _references(schema):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                lacking = f"refers to {reference!r:.200}, which it does not have"
                raise ConfigError(f"{_title(spec)}: the schema of {name!r} {lacking}") from None
    except SchemaError as error:
        raise ConfigError(f"{_title(spec)}: the schema of {name!r} is none: {error.message:.200}") from None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _files(spec: McpTool, base: Path) -> dict[str, Any]:
    """Contents of the files that a command names. Of a Python file what it imports of the user's own, too."""
    found: dict[str, Any] = {}
    for place, argument in enumerate(spec.command):
        path = local_path(argument, base)
        # The program itself is most often an interpreter, which differs between machines.
        if path is None or not path.is_file() or (place == 0 and Path(argument).is_absolute()):
            continue
        if place == 0 and not path.resolve().is_relative_to(base.resolve()):
            continue
        try:
            is_python = path.suffix == ".py"
            found[argument] = (
                read_code(f"{path}:server", base, what="MCP server").identity()
                if is_python
                else hash_file(path).content_id
            )
        except OSError as error:
            raise ConfigError(f"{_title(spec)}: {argument} cannot be read: {error.strerror}") from error
    return found


def _title(spec: McpTool) -> str:
    return f"MCP server {spec.name} ({spec.url or ' '.join(spec.command)})"


def _called(spec: McpTool, tool: str) -> str:
    """What the model calls a tool."""
    return f"{spec.name}_{_SEPARATOR.sub('_', tool)}"


def _secrets(spec: McpTool) -> dict[str, str]:
    """Values by name. Raises ConfigError where one is not set, or not allowed."""
    names = [*spec.secrets, *([] if spec.api_key is None else [spec.api_key])]
    return {name: require_secret(name) for name in names}


def _hidden(text: str, secrets: Mapping[str, str]) -> str:
    """All of a text, without the secrets."""
    for secret in secrets.values():
        text = Redaction(secret).hide(text, most=None)
    return text


def _hidden_within(document: Any, secrets: Mapping[str, str]) -> Any:
    """A document of JSON whose texts are without the secrets."""
    if isinstance(document, Mapping):
        return {_hidden(key, secrets): _hidden_within(value, secrets) for key, value in document.items()}
    if isinstance(document, list):
        return [_hidden_within(item, secrets) for item in document]
    return _hidden(document, secrets) if isinstance(document, str) else document


class McpServer:
    """One server, for one episode: started at the first call, and again after a call that ended it."""

    def __init__(self, spec: McpTool, served: Mapping[str, Any], base: Path, folder: EpisodeFolder) -> None:
        """``served``: what `ask_servers` found. ``folder`` is where a program works."""
        self.spec = spec
        self._base, self._folder = base, folder
        self._session: McpSession | None = None
        self._lock = asyncio.Lock()
        self.tools = [McpFunction(self, tool) for tool in served["tools"]]

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What a tool answers. Raises ToolError with the reason for which there is no answer, and EnvironmentFailed
        where the server cannot be started or reached."""
        secrets = _secrets(self.spec)
        title, is_ours = f"MCP server {self.spec.name}", self.spec.url is None
        try:
            session = await self._started(secrets)
        except ServerLost as error:
            raise EnvironmentFailed(_hidden(f"{title} {error}", secrets)) from None
        try:
            # A long answer takes a while, in which other episodes go on.
            return await asyncio.to_thread(_hidden, await session.call(tool, arguments), secrets)
        except ToolError as error:
            raise ToolError(_hidden(str(error), secrets)) from None
        except TimeoutError as error:
            await self._drop(session, at_once=True)
            late = f"{tool} took longer than {self.spec.seconds:g} s"
            log.warning("%s", _hidden(f"{title}: {late}{error}", secrets))
            lost = "the server was ended, and what it kept is gone" if is_ours else "the session with it was ended"
            raise ToolError(f"{late}; {lost}") from None
        except ServerLost as error:
            await self._drop(session, at_once=True)
            said = _hidden(f"{title} {error}, in a call of {tool}", secrets)
            if not is_ours and not isinstance(error, TooMuch):
                # A network, or another machine, is no fault of the model's.
                raise EnvironmentFailed(said) from None
            log.warning("%s", said)
            raise ToolError(_hidden(f"{title} {error.reason}; what it kept is gone", secrets)) from None

    async def _started(self, secrets: Mapping[str, str]) -> McpSession:
        from rollout_core.environments.tools.mcp_client import McpSession

        async with self._lock:
            if self._session is None:
                self._session = await McpSession.open(self.spec, self._base, self._folder.path, secrets)
            return self._session

    async def _drop(self, session: McpSession, *, at_once: bool = False) -> None:
        if self._session is session:
            self._session = None
        await session.close(at_once=at_once)

    async def close(self) -> None:
        """End it."""
        if self._session is not None:
            await self._drop(self._session)


class McpFunction:
    """One tool of a server."""

    def __init__(self, server: McpServer, tool: Mapping[str, Any]) -> None:
        self.name = _called(server.spec, tool["name"])
        self.output_characters = server.spec.output_characters
        self._server, self._tool = server, tool
        function = {"name": self.name, "description": tool["description"], "parameters": tool["parameters"]}
        self.schema: Mapping[str, Any] = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(
            self._tool["name"], checked_by_schema(self.name, self._tool["parameters"], arguments)
        )

    async def close(self) -> None:
        await self._server.close()
