"""A small real server with vLLM's dialect of OpenAI's API, which answers by script and remembers what it was asked.

It answers a chat with its last message backwards, one token a letter: the token's id is the letter's code, its
log-probability minus a thousandth of that. ``mishaps`` are done in turn, one a request, before it answers properly.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Mishap = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Seen:
    """One request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    was_cancelled: bool = False


@dataclass
class ScriptedUpstream:
    """Settings may be changed while it runs."""

    name: str = "weights"
    """Begins every answer's id."""
    delay: float = 0.0
    """Seconds before each answer, and before each streamed token."""
    mishaps: deque[Mishap] = field(default_factory=deque)
    tool_call: tuple[str, str] | None = None
    """Name and arguments of the call that every answer is."""
    is_vllm: bool = True
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    hold_after: tuple[int, asyncio.Event] | None = None
    """Streams wait for the event when they have sent so many tokens."""
    port: int = 0
    """0: any free one."""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Without this, a handler would not notice that its client has gone.
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, shutdown_timeout=0.1)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_json = request.content_type == "application/json" and raw
        seen = Seen(request.path_qs, json.loads(raw) if is_json else {}, dict(request.headers))
        self.seen.append(seen)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            if self.mishaps and (answer := await self.mishaps.popleft()(request)) is not None:
                return answer
            await asyncio.sleep(self.delay)
            if request.path == "/v1/embeddings":
                return web.json_response({"data": [{"embedding": [0.5]}], "model": seen.body["model"]})
            return await self._answer(request, seen.body)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.was_cancelled = True
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_chat = request.path.endswith("/chat/completions")
        asked = body["messages"][-1]["content"] if is_chat else body["prompt"]
        letters = asked[::-1]
        head: dict[str, Any] = {"id": f"{self.name}-{len(self.seen)}", "created": 1, "model": body["model"]}
        head["object"] = "chat.completion" if is_chat else "text_completion"
        prompt_ids = [ord(letter) for letter in asked]
        gives_ids = self.is_vllm and body.get("return_token_ids")
        if body.get("stream"):
            return await self._stream(request, body, head, letters, prompt_ids if gives_ids else None)
        choices = []
        for index in range(body.get("n", 1)):
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop", "logprobs": None}
            if is_chat:
                choice["message"] = {"role": "assistant", "content": letters}
                if self.tool_call is not None:
                    choice["message"] = {"role": "assistant", "content": None, "tool_calls": [self._call()]}
                    choice["finish_reason"] = "tool_calls"
            else:
                choice["text"] = letters
            choice["logprobs"] = logprobs_of(letters, is_chat) if wants_logprobs(body, is_chat) else None
            if gives_ids:
                choice["token_ids"] = [ord(letter) for letter in letters]
            choices.append(choice)
        extra = {"prompt_token_ids": prompt_ids} if gives_ids else {}
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(letters), "total_tokens": 2 * len(asked)}
        return web.json_response({**head, "choices": choices, "usage": usage, **extra})

    def _call(self) -> dict[str, Any]:
        assert self.tool_call is not None
        name, arguments = self.tool_call
        return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        head: dict[str, Any],
        letters: str,
        prompt_ids: list[int] | None,
    ) -> web.StreamResponse:
        is_chat = request.path.endswith("/chat/completions")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def send(choice: dict[str, Any], **extra: Any) -> None:
            chunk = {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}], **extra}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

        extra = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
        if is_chat:
            await send({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, **extra)
            extra = {}
        for place, letter in enumerate(letters):
            if self.hold_after is not None and place == self.hold_after[0]:
                await self.hold_after[1].wait()
            choice: dict[str, Any] = {"delta": {"content": letter}} if is_chat else {"text": letter}
            if is_chat and self.tool_call is not None:
                choice = {"delta": {"tool_calls": [self._piece(place, letters)]}}
            choice["finish_reason"] = None if place < len(letters) - 1 else "stop"
            choice["logprobs"] = logprobs_of(letter, is_chat) if wants_logprobs(body, is_chat) else None
            if prompt_ids is not None:
                choice["token_ids"] = [ord(letter)]
            await send(choice, **extra)
            extra = {}
            await asyncio.sleep(self.delay)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _piece(self, place: int, letters: str) -> dict[str, Any]:
        """Of the tool call: its head with the first token, then its arguments in as many parts as there are tokens."""
        assert self.tool_call is not None
        name, arguments = self.tool_call
        size = -(-len(arguments) // len(letters))
        part = arguments[place * size : (place + 1) * size]
        if place == 0:
            return {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": part}}
        return {"index": 0, "function": {"arguments": part}}


def wants_logprobs(body: dict[str, Any], is_chat: bool) -> bool:
    return bool(body.get("logprobs")) if is_chat else body.get("logprobs") is not None


def logprobs_of(letters: str, is_chat: bool) -> dict[str, Any]:
    if is_chat:
        return {"content": [{"token": one, "logprob": -ord(one) / 1000, "top_logprobs": []} for one in letters]}
    return {"tokens": list(letters), "token_logprobs": [-ord(one) / 1000 for one in letters], "top_logprobs": []}


def status(code: int, message: str = "by script", **headers: str) -> Mishap:
    """This status; underscores in headers' names are dashes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"message": message, "type": "t", "code": code}}, status=code, headers=named)

    return answer


async def no_answer(request: web.Request) -> web.StreamResponse | None:
    """The connection is cut before a byte."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(0.01)
    return None


async def hang(request: web.Request) -> web.StreamResponse | None:
    """Nothing, until the client has had enough."""
    await asyncio.Event().wait()
    return None


def held(until: asyncio.Event) -> Mishap:
    """Nothing before this event; then the answer."""

    async def wait(request: web.Request) -> web.StreamResponse | None:
        await until.wait()
        return None

    return wait


async def cut_stream(request: web.Request) -> web.StreamResponse:
    """Two tokens of a stream, and then the connection is cut."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for letter in "ab":
        delta = {"role": "assistant", "content": letter}
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [ord(letter)]}
        chunk = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0.02)
    assert request.transport is not None
    request.transport.abort()
    return response
