"""A small real HTTP server with vLLM's dialect of OpenAI's API, which misbehaves when told to.

It completes a prompt of token ids with the same ids in reverse, each of log-probability -1, and remembers every
request. ``mishaps`` are done in turn, one a request, before it answers properly.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from batches import PARAMS

from rollout_core.config import OpenAIBackend, SamplingParams
from rollout_core.data.samples import Outcome
from rollout_core.inference.backend import Request
from rollout_core.inference.openai_http import OpenAIEngine
from tests.support.json_server import JsonServer

PROMPTS = ["sort 3 1 2 =", "sort 9 9 0 4 4 1 =", "0", "hello world", "sort 5 5 5 ="]
MAX_MODEL_LEN = 77
CHAT_TOKENS = (7, 8, 9)
"""Of every answer in a chat."""


@dataclass
class Seen:
    """One request."""

    path: str
    body: dict[str, Any]
    key: str | None
    """Of the Authorization header."""
    moment: float
    headers: dict[str, str] = field(default_factory=dict)
    """By their lower-case names."""


@dataclass
class FaultyServer:
    """Settings may be changed while it runs."""

    models: list[str] = field(default_factory=lambda: ["served"])
    key: str | None = None
    """Expected bearer token."""
    mishaps: deque[Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=deque)
    refused_token: int | None = None
    """Prompts with this token get HTTP 400."""
    slow_seconds: float = 0.0
    held: threading.Event | None = None
    """No completion is answered before it."""
    plain: bool = False
    """Answers without token ids and log-probabilities, as other servers than vLLM's do."""
    max_model_len: Any = MAX_MODEL_LEN
    finish_reason: str = "stop"
    text: str = "unused"
    """Of each completion that comes with token ids."""
    change: Callable[[dict[str, Any]], Any] | None = None
    """What is made of each completion before it is sent: other JSON, or the bytes of a body."""
    seen: list[Seen] = field(default_factory=list)
    most_at_once: int = 0
    """Completions that it worked on at a time."""
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        self._server = JsonServer(self.answer)
        self.url = self._server.url

    def stop(self) -> None:
        if self.held is not None:
            self.held.set()
        self._server.close()

    @property
    def asked(self) -> list[Seen]:
        """Requests for completions."""
        return [seen for seen in self.seen if seen.path != "/v1/models"]

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            self.seen.append(Seen(handler.path, body, headers.get("authorization"), time.monotonic(), headers))
            mishap = self.mishaps.popleft() if self.mishaps and handler.path != "/v1/models" else None
        if self.key is not None and handler.headers.get("authorization") != f"Bearer {self.key}":
            status(401)(handler)
        elif handler.path == "/v1/models":
            send(handler, 200, {"data": [{"id": name, "max_model_len": self.max_model_len} for name in self.models]})
        elif mishap is not None:
            mishap(handler)
        else:
            self._complete(handler, body)

    def _work(self) -> None:
        """What takes its time; it is over before anything is answered, after which more may come."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.slow_seconds)
        if self.held is not None:
            self.held.wait()
        with self._lock:
            self._at_once -= 1

    def _complete(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self._work()
        if body["model"] not in self.models:
            return send(handler, 404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        if handler.path == "/v1/chat/completions":
            return self._send_choice(handler, self._chat(body))
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return self._send_choice(handler, {"text": prompt[::-1]})
        if self.refused_token in prompt:
            return send(handler, 400, {"error": {"message": "too long by far\nand worse"}})
        choice: dict[str, Any] = {"text": self.text}
        if not self.plain:
            ids = prompt[::-1]
            top = [{name: p for name, p in _likely(token)} for token in ids]
            names = [f"token_id:{token}" for token in ids]
            logprobs = {"tokens": names, "token_logprobs": [-1.0] * len(ids), "top_logprobs": top}
            choice |= {"token_ids": ids, "logprobs": logprobs}
        self._send_choice(handler, choice)

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body["messages"][-1]["content"][::-1]
        choice: dict[str, Any] = {"message": {"content": text}}
        if "return_token_ids" in body and not self.plain:
            content = [
                {
                    "token": f"token_id:{token}",
                    "logprob": -1.0,
                    "top_logprobs": [{"token": name, "logprob": p} for name, p in _likely(token)],
                }
                for token in CHAT_TOKENS
            ]
            choice |= {"token_ids": list(CHAT_TOKENS), "logprobs": {"content": content}}
        return choice

    def _send_choice(self, handler: BaseHTTPRequestHandler, choice: dict[str, Any]) -> None:
        choice = {"index": 0, "finish_reason": self.finish_reason, **choice}
        answer = {"choices": [choice], "usage": {"completion_tokens": len(choice.get("token_ids", "?"))}}
        send(handler, 200, answer if self.change is None else self.change(answer))


def _likely(token: int) -> list[tuple[str, float]]:
    return [(f"token_id:{token}", -1.0), ("token_id:0", -0.5), ("token_id:1", -9999.0)]


def config_of(server: FaultyServer, **config: Any) -> OpenAIBackend:
    return OpenAIBackend(**{"url": server.url, "backoff_seconds": 0.001, "max_retries": 3, **config})


def requests(tokenizer: Any, params: SamplingParams = PARAMS, prompts: Sequence[str] = PROMPTS) -> list[Request]:
    return [
        Request(f"r{number}", tokenizer(prompt)["input_ids"], params, 100 + number, prompt)
        for number, prompt in enumerate(prompts)
    ]


def outcomes(engine: OpenAIEngine, asked: Iterable[Request | None]) -> dict[str, Outcome]:
    return {outcome.key: outcome for outcome in engine.stream(asked)}


def send(handler: BaseHTTPRequestHandler, code: int, value: Any, headers: dict[str, str] | None = None) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(code)
    for name, content in (headers or {}).items():
        handler.send_header(name, content)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """A mishap: this status; underscores in headers' names are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: send(handler, code, {"error": {"message": f"status {code}"}}, named)


def drop_midway(handler: BaseHTTPRequestHandler) -> None:
    """Half an answer, and then the connection is reset."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"tex')
    handler.wfile.flush()
    reset(handler)


def reset(handler: BaseHTTPRequestHandler) -> None:
    """No answer at all."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def no_object(handler: BaseHTTPRequestHandler) -> None:
    """JSON, but no object, as a gateway may answer."""
    send(handler, 503, b'"overloaded"')


def no_json(handler: BaseHTTPRequestHandler) -> None:
    """What a proxy says while the server behind it starts."""
    send(handler, 200, b"<html>starting</html>")
