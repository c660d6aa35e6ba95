"""A session with an MCP server, by the client of the package ``mcp``: over the pipes of a process, or over HTTP.

The client lives in a task of its own, which ends when the session does. Whatever a server does, a call ends in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import httpx2
import orjson
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from rollout_core import __version__
from rollout_core.base.errors import in_words
from rollout_core.config.tools import McpTool
from rollout_core.environments.protocol import clean_text
from rollout_core.environments.tools.mcp_process import MESSAGE_BYTES, ServerLost, ServerProcess, TooMuch, command_line
from rollout_core.environments.tools.results import ToolError

MOST_TOOLS = 1_000
MOST_PAGES = 100
CLOSING_SECONDS = 10.0
CONNECT_SECONDS = 30.0
TEXT_CHARACTERS = 200
"""Of an error, at most."""
Streams = tuple[Any, Any]


class McpSession:
    """A server that answers; made by `open`."""

    def __init__(self, spec: McpTool) -> None:
        self._spec = spec
        self._process: ServerProcess | None = None
        self._web = _Bounded()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, spec: McpTool, base: Path, folder: Path, secrets: Mapping[str, str]) -> McpSession:
        """Start the server, or reach it. Raises ServerLost where it is not ready in time."""
        session = cls(spec)
        try:
            await session._start(base, folder, secrets)
        except BaseException:
            await session.close()
            raise
        return session

    async def _start(self, base: Path, folder: Path, secrets: Mapping[str, str]) -> None:
        spec = self._spec
        if spec.url is None:
            variables = {name: os.environ[name] for name in spec.env if name in os.environ} | dict(secrets)
            try:
                self._process = await ServerProcess.start(command_line(spec.command, base), folder, variables)
            except OSError as error:
                raise ServerLost(f"cannot be started: {error}") from None
            transport = _over_pipes(self._process)
        else:
            transport = _over_http(spec.url, self._web, None if spec.api_key is None else secrets[spec.api_key])
        self._running = asyncio.create_task(self._run(transport))
        await asyncio.wait(
            [self._running, self._client], timeout=spec.start_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._client.done():
            late = f"did not answer within {spec.start_seconds:g} s (start_seconds)"
            await self._explain("cannot be talked to" if self._running.done() else late)

    async def _run(self, transport: Any) -> None:
        about = Implementation(name="rollout", version=__version__)
        async with Client(transport, cache=None, client_info=about) as client:
            self._client.set_result(client)
            await self._over.wait()

    async def tools(self) -> tuple[Implementation | None, list[Tool]]:
        """What the server says of itself, and its tools. Raises ServerLost."""

        async def listed() -> list[Tool]:
            found, cursor = [], None
            for _ in range(MOST_PAGES):
                page = await self._client.result().list_tools(cursor=cursor)
                found += page.tools
                if len(found) > MOST_TOOLS:
                    raise ServerLost(f"has more than {MOST_TOOLS:,} tools; expected fewer")
                if (cursor := page.next_cursor) is None:
                    return found
            raise ServerLost(f"lists its tools on more than {MOST_PAGES} pages")

        found = await self._answered(listed(), self._spec.start_seconds)
        return self._client.result().server_info, found

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool answers. Raises ToolError with the error that it answers, TimeoutError, and ServerLost."""
        self._web.problem = self._web.excess = None
        if self._process is not None:
            self._process.begin_call()
        result = await self._answered(self._client.result().call_tool(name, arguments), self._spec.seconds)
        text = _text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed, and said nothing")
        return text

    async def _answered(self, asking: Any, seconds: float) -> Any:
        """What comes of a request within that time, unless the session ends before."""
        assert self._running is not None
        request = asyncio.ensure_future(asking)
        try:
            await asyncio.wait([request, self._running], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and not self._running.done():
                raise TimeoutError("" if self._process is None else self._process.said())
            if not request.done():
                await self._explain("ended the session")
            return request.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and self._process is not None:
                raise await self._ended(self._process) from None
            if error.code == CONNECTION_CLOSED or self._web.problem is not None or self._web.excess is not None:
                await self._explain("ended the session")
            raise ToolError(f"{error.message} ({error.code})") from None
        except (ServerLost, ToolError, TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the client makes of what the server wrote
            raise ServerLost(f"answered what the protocol does not have: {_reason(error)}") from None
        finally:
            request.cancel()
            await asyncio.wait([request], timeout=CLOSING_SECONDS)

    async def _ended(self, process: ServerProcess) -> ServerLost:
        """What ended a server whose output has: what it wrote, or how its process ended."""
        return process.excess or await process.ended()

    async def _explain(self, what: str) -> NoReturn:
        """Raise ServerLost with what is known of the end."""
        assert self._running is not None
        error = None
        if self._running.done() and not self._running.cancelled():
            error = _innermost(self._running.exception())
        if self._web.excess is not None:
            raise self._web.excess from None
        if self._process is None:
            problem = self._web.problem or (None if error is None else _reason(error))
            raise ServerLost(what if problem is None else f"{what}: {problem}") from None
        if error is None:
            raise ServerLost(what, self._process.said())
        if _is_end(error):
            raise await self._ended(self._process) from None
        raise ServerLost(f"{what}: {_reason(error)}", self._process.said()) from None

    async def close(self, *, at_once: bool = False) -> None:
        """End the session, and the server where it was started for it: ``at_once``, or by itself."""
        self._over.set()
        if self._running is not None:
            if at_once or not self._client.done():
                self._running.cancel()
            await asyncio.wait([self._running], timeout=CLOSING_SECONDS)
            self._running.cancel()
            await asyncio.wait([self._running], timeout=CLOSING_SECONDS)
            if self._running.done() and not self._running.cancelled():
                self._running.exception()  # raised where it mattered
        if self._process is not None:
            await self._process.close(at_once=at_once)


@asynccontextmanager
async def _over_pipes(process: ServerProcess) -> AsyncIterator[Streams]:
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_session:
            async for line in process.lines():
                if (message := _message(line)) is None:
                    process.note_stray(line)  # many programs print to their output; other clients leave it out, too
                else:
                    await to_session.send(SessionMessage(message))

    async def write() -> None:
        async with from_session:
            with contextlib.suppress(OSError):  # it reads no more, and so its output ends
                async for item in from_session:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.write(text.encode("utf-8", "replace") + b"\n")

    async with from_server, to_server, anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(write)
        try:
            yield from_server, to_server
        finally:
            group.cancel_scope.cancel()


def _message(line: bytes) -> Any:
    """Of the protocol; None where the line is none. Lone surrogates are replaced."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        try:
            text = json.dumps(json.loads(line), ensure_ascii=False)
            return jsonrpc_message_adapter.validate_json(clean_text(text), by_name=False)
        except (ValueError, RecursionError):
            return None


@asynccontextmanager
async def _over_http(url: str, web: _Bounded, api_key: str | None) -> AsyncIterator[Streams]:
    # The user names the address, so it may be of this machine or of a private network. Nothing else is asked: the
    # client follows redirects within it alone, and no proxy of the environment is used. Without compression, so that as
    # many bytes come as are counted.
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    async with (
        httpx2.AsyncClient(
            transport=web, trust_env=False, headers=headers, timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS)
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    """Reads so many bytes of an answer and no more."""

    problem: str | None = None
    """Of the latest request that the server, or what is before it, did not answer by the protocol."""
    excess: TooMuch | None = None
    """An answer was longer than it may be."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx2.TransportError as error:
            self.problem = _reason(error)
            raise
        is_protocol = response.headers.get("content-type", "").lower().startswith("application/json")
        if response.status_code >= 500 or (response.status_code >= 400 and not is_protocol):
            self.problem = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream, self)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, web: _Bounded) -> None:
        self._stream, self._web = stream, web

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > MESSAGE_BYTES:
                self._web.excess = TooMuch(f"gave an answer of more than {MESSAGE_BYTES // 2**20} MiB")
                raise httpx2.ReadError("the answer is too long")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _text(result: CallToolResult) -> str:
    """A result, as the model reads it."""
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [orjson.dumps(result.structured_content).decode()]
    return "\n".join(parts)


def _part(content: Any) -> str:
    match content:
        case TextContent():
            return content.text
        case ImageContent() | AudioContent():
            return f"({content.mime_type}, {len(content.data):,} characters of base64, not shown)"
        case EmbeddedResource(resource=BlobResourceContents() as blob):
            return f"({blob.mime_type or 'a file'}, {len(blob.blob):,} characters of base64, not shown)"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case ResourceLink():
            return f"(resource {content.uri})"
        case _:
            return f"({type(content).__name__}, not shown)"


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_end(error: BaseException) -> bool:
    """Whether all that it says is that the server reads or writes no more."""
    return isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | anyio.EndOfStream | OSError) or (
        isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
    )


def _reason(error: BaseException | None) -> str:
    error = _innermost(error)
    assert error is not None
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        text = f"{error.title} {'.'.join(map(str, first['loc']))}: {first['msg']}"
    else:
        text = error.message if isinstance(error, MCPError) else in_words(error)
    return " ".join(text.split())[:TEXT_CHARACTERS]
