"""Tools that a model may call in the episodes of an environment: Python, a shell, files, HTTP, search, SQL, and those
of MCP servers.

Each table is what one tool may do and take. What a tool reads from this machine is named by its ``files``, whose
content enters ids where the tool does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollout_core.base.processes import holds_a_secret
from rollout_core.config.base import SECRET_NAME, Address, Settings
from rollout_core.config.plugin_use import PluginUse
from rollout_core.config.verifiers import CodeSandbox

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
"""As APIs of chats take names of functions."""
Seconds = Annotated[float, Field(gt=0, le=36_000, allow_inf_nan=False)]


class ToolSettings(Settings):
    """What the settings of all tools share."""

    name: ToolName
    """As the model calls it."""
    output_characters: int = Field(default=8_000, ge=200, le=10_000_000)
    """Characters of a result at most. Of a longer one the model gets the beginning and the end, and how many are
    missing between them."""
    seconds: Seconds = 10.0
    """Longest time of a call."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of what the tool reads from this machine, relative to the working folder."""
        return ()


class SandboxedTool(ToolSettings):
    """What tools share that run programs of the model's, in a sandbox (`docs/sandbox.md`)."""

    cpu_seconds: Seconds = 60.0
    """Processor time of a call, or where the interpreter is kept, of an episode's calls together."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory of a program's processes together, in MiB."""
    max_processes: int = Field(default=32, ge=2)
    """At the same time, threads among them."""
    disk_mb: int = Field(default=64, ge=1)
    """Of all files of the episode's folder, in MiB; in the sandbox they lie in memory."""
    sandbox: CodeSandbox | Literal["none"] = CodeSandbox()
    """Where programs run. ``"none"``, written out, runs them without any wall, as this user."""

    @model_validator(mode="after")
    def _files_fit_into_memory(self) -> SandboxedTool:
        if 4 * self.disk_mb > self.memory_mb:
            raise ValueError(
                f"disk_mb is {self.disk_mb}, and memory_mb {self.memory_mb}; expected at least four times as much "
                "memory, through which the files pass"
            )
        return self

    @property
    def sandbox_kind(self) -> str:
        """Of the sandbox, by its name."""
        return "none" if isinstance(self.sandbox, str) else self.sandbox.kind

    def cache_identity(self) -> Any:
        """Where programs run decides no result, and what they find there does."""
        place = CodeSandbox() if isinstance(self.sandbox, str) else self.sandbox
        return {**super().cache_identity(), "sandbox": place.cache_identity()}


class PythonTool(SandboxedTool):
    """Python code, run in a sandbox in the episode's folder."""

    kind: Literal["python"] = "python"
    name: ToolName = "python"
    keeps_state: bool = True
    """One interpreter for each episode, which keeps variables and imports between calls. Else each call has its own."""

    @model_validator(mode="after")
    def _can_be_talked_to(self) -> PythonTool:
        if self.keeps_state and self.sandbox_kind in ("docker", "gvisor", "command", "http"):
            raise ValueError(
                f'keeps_state talks with an interpreter, which a sandbox of kind "{self.sandbox_kind}" cannot; use '
                "namespaces or bubblewrap, or keeps_state = false"
            )
        return self


class ShellTool(SandboxedTool):
    """Commands of a shell, run in a sandbox in the episode's folder, each in a shell of its own."""

    kind: Literal["shell"] = "shell"
    name: ToolName = "shell"
    commands: Literal["any"] | tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+\[-]+$")], ...] = Field(min_length=1)
    """Names of programs that may be called, such as ``["ls", "cat", "grep"]``: bash runs restricted then, so it takes
    no path in the place of a name, and ``>`` and ``cd`` are refused. A program of the list that starts others, such as
    xargs, is held to no list. ``"any"``: every program that the sandbox has, by a shell with nothing left out."""


class FilesTool(ToolSettings):
    """Reading, writing and listing files of the episode's folder."""

    kind: Literal["files"] = "files"
    name: ToolName = "files"
    writable: bool = True
    """Whether the model may write, too."""
    file_bytes: int = Field(default=2**20, ge=1)
    """Of a file, at most."""
    folder_bytes: int = Field(default=64 * 2**20, ge=1)
    """Of all files of the folder together, at most."""
    max_files: int = Field(default=1_000, ge=1, le=100_000)
    """Files and folders in the folder, at most."""


def _is_pattern(host: str) -> str:
    plain = host.removeprefix("*.")
    if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[?[0-9a-f:.]+\]?", plain) or "*" in plain:
        raise ValueError(f"{host!r} is no host; expected a name in lower case such as example.org, or *.example.org")
    return host


class HttpTool(ToolSettings):
    """Requests over HTTP, to hosts of a list. Addresses of private networks and of this machine are refused, also where
    a name of the list, or a redirect, leads to them."""

    kind: Literal["http"] = "http"
    name: ToolName = "http"
    seconds: Seconds = 20.0
    """Longest time of a call, redirects included."""
    hosts: tuple[Annotated[str, AfterValidator(_is_pattern)], ...] = Field(min_length=1)
    """Hosts that may be asked: exact names, or ``*.example.org`` for all names below one."""
    methods: tuple[Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"], ...] = Field(
        default=("GET",), min_length=1
    )
    """Methods that may be used. What they do elsewhere is not undone when an episode is run again."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(default=(80, 443), min_length=1)
    """Ports that may be asked."""
    response_bytes: int = Field(default=2**20, ge=1, le=2**30)
    """Of an answer's body, at most; the rest is not read."""
    request_bytes: int = Field(default=2**16, ge=0, le=2**30)
    """Of a request's body, at most."""
    redirects: int = Field(default=5, ge=0, le=20)
    """That are followed, at most, each held to the same rules."""
    allow_private: bool = False
    """Ask addresses of private networks and of this machine, too. Dangerous: the model can then reach what trusts this
    machine, such as a cloud's metadata service with its keys, so name only hosts that are meant to be asked."""


class SearchTool(ToolSettings):
    """Search in a corpus of this machine, by words, ranked by BM25 (SQLite's FTS5)."""

    kind: Literal["search"] = "search"
    name: ToolName = "search"
    corpus: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Files, relative to the working folder: text (``.txt``, ``.md``), of which each paragraph is a passage; or files
    of rows (``.jsonl``, ``.csv``, ``.parquet`` and so on) with a passage in each."""
    text_key: str = Field(default="text", min_length=1)
    """Key of a row that holds its passage."""
    title_key: str = Field(default="title", min_length=1)
    """Key of a row that holds its passage's title, where it has one. Of text the title is the file's name."""
    top_k: int = Field(default=5, ge=1, le=100)
    """Passages of a result, at most."""
    hit_characters: int = Field(default=600, ge=20, le=1_000_000)
    """Characters of a passage, at most, around the first word that was found."""

    @property
    def files(self) -> tuple[str, ...]:
        return self.corpus


class SqlTool(ToolSettings):
    """Queries on an SQLite file, in a process of their own."""

    kind: Literal["sql"] = "sql"
    name: ToolName = "sql"
    database: str = Field(min_length=1)
    """An SQLite file, relative to the working folder."""
    access: Literal["read", "copy"] = "read"
    """``read``: nothing changes the file. ``copy``: each episode has a copy of its own, which the model may change."""
    max_rows: int = Field(default=100, ge=1, le=100_000)
    """Rows of a result, at most."""
    memory_mb: int = Field(default=512, ge=128)
    """Memory of the process that queries, in MiB."""
    disk_mb: int = Field(default=256, ge=1)
    """Size that a copy may grow to, in MiB."""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.database,)


def _is_no_secret(name: str) -> str:
    if holds_a_secret(name):
        raise ValueError(f"{name} is called as what holds a secret is; name it in secrets, which hides it")
    return name


class McpTool(ToolSettings):
    """The tools of a server that speaks the Model Context Protocol: a program that talks over its input and output, or
    an address of streamable HTTP. The model calls them ``NAME_TOOL``."""

    kind: Literal["mcp"]
    name: ToolName = "mcp"
    """Of the server; the names of its tools begin with it."""
    seconds: Seconds = 30.0
    """Longest time of a call. One that takes longer ends the episode's server; the next call starts it anew."""
    start_seconds: Seconds = 60.0
    """For the server to start and to say what it has."""
    command: tuple[str, ...] = ()
    """Program and arguments of a server that is started for each episode, in the episode's folder. Arguments with a
    ``/`` or a ``.`` that name a file or a folder, such as ``server.py`` or ``./data``, are relative to the working
    folder; the content of files is part of ids."""
    url: Address | None = Field(default=None, pattern=r"^https?://")
    """Where a server listens, such as ``http://127.0.0.1:8000/mcp``; each episode has a session of its own. Part of no
    id; what the server says of itself is, and ``revision``."""
    only: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of tools, as the server has them, that the model may call. Default: all."""
    env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$"), AfterValidator(_is_no_secret)], ...] = ()
    """Names of variables of this process that the program gets besides PATH, HOME, language and the like."""
    secrets: tuple[Annotated[str, Field(pattern=SECRET_NAME)], ...] = ()
    """NAMES of secrets that the program gets as variables of these names: ``ROLLOUT_SECRET_<NAME>`` in the worker's
    environment, where ``ROLLOUT_SECRETS`` lists the name. They are hidden in what the server answers."""
    api_key: str | None = Field(default=None, pattern=SECRET_NAME)
    """NAME of the secret that is sent to ``url`` as a bearer token."""
    revision: str = ""
    """Changed by you where the server answers otherwise and its tools look the same, so that episodes are played
    anew."""

    @model_validator(mode="after")
    def _is_a_program_or_an_address(self) -> McpTool:
        if bool(self.command) == (self.url is not None):
            raise ValueError('expected either command, such as ["python", "server.py"], or url')
        if self.url is not None and (self.env or self.secrets):
            raise ValueError("env and secrets are for a server that command starts; a server at url has api_key")
        if self.url is None and self.api_key is not None:
            raise ValueError("api_key is sent to url; a server that command starts gets secrets as variables")
        return self

    def cache_identity(self) -> Any:
        """Not where the server is, how long it takes to start, and by which key it is asked."""
        elsewhere = ("url", "start_seconds", "secrets", "api_key")
        return {name: value for name, value in super().cache_identity().items() if name not in elsewhere}


class PluginTools(PluginUse, Settings):
    """The tools of a plugin, of kind ``tool-harness``. A row that names its tools has all of these by the plugin's
    name."""

    output_characters: int = Field(default=8_000, ge=200, le=10_000_000)
    """Characters of a result at most, as of every tool."""
    processes: int = Field(default=1, ge=1, le=64)
    """Of the plugin, which episodes share. Each has a call at a time. Changes speed only."""

    @property
    def files(self) -> tuple[str, ...]:
        """None: those of the plugin enter ids by themselves."""
        return ()

    def cache_identity(self) -> Any:
        """Where the plugin lies does not count; its files do, by the environment's id."""
        named = super().cache_identity()
        return {name: value for name, value in named.items() if name not in ("path", "processes")}


AnyTool = PythonTool | ShellTool | FilesTool | HttpTool | SearchTool | SqlTool | McpTool | PluginTools
"""Every kind of tool, by its ``kind``."""
