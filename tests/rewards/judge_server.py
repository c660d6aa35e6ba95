"""A small real HTTP server that judges, in OpenAI's and Anthropic's form; it counts questions and misbehaves when told.

By itself it gives each completion its number of ``x`` as the score, up to 10, and prefers the answer with more of them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from rollout_core.config.judges import JudgeEndpoint
from rollout_core.inference.spending import Account
from rollout_core.rewards.judges.engine import body_of
from rollout_core.rewards.judges.questions import Question
from tests.support.json_server import JsonServer

ANSWER = re.compile(r"<answer-[0-9a-f]{16}>\n(.*?)\n</answer-[0-9a-f]{16}>", re.S)
TOKENS = 30, 20
"""Of each question and answer, by the server's count."""


@dataclass
class JudgeServer:
    """Settings may be changed while it runs."""

    models: list[str] | None = field(default_factory=lambda: ["wise"])
    """That it lists; None: it has no list."""
    key: str | None = None
    say: Callable[[dict[str, Any]], str] | None = None
    """Text of the answer to a body; default: an honest judge's."""
    mishaps: deque[Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=deque)
    """Done in turn, one a question, in place of an answer."""
    refuse: Callable[[dict[str, Any]], int | None] = lambda body: None
    """HTTP status with which a body is refused, if it is."""
    is_down: bool = False
    slow_seconds: float = 0.0
    usage: dict[str, Any] | None = None
    """In place of its count."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    """How often each question was answered, by its messages."""
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> JudgeServer:
        self._server = JsonServer(self._answer)
        self.url = self._server.url
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.command == "GET" and self.models is None:
            status(404)(handler)
        elif handler.command == "GET":
            send(handler, 200, {"data": [{"id": name} for name in self.models or ()]})
        else:
            self.judge(handler, body)

    def judge(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.moments.append(time.monotonic())
            mishap = self.mishaps.popleft() if self.mishaps else None
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.slow_seconds)
        with self._lock:
            self._at_once -= 1
        if self.is_down:
            send(handler, 503, {"error": {"message": "down"}})
            return
        if mishap is not None:
            mishap(handler)
            return
        if (code := self.refuse(body)) is not None:
            status(code)(handler)
            return
        text = (self.say or honest)(body)
        if handler.path == "/v1/messages":
            usage = {"input_tokens": TOKENS[0], "output_tokens": TOKENS[1]}
            answer = {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}
        else:
            usage = {"prompt_tokens": TOKENS[0], "completion_tokens": TOKENS[1]}
            answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        if send(handler, 200, {**answer, "usage": self.usage or usage}):
            with self._lock:
                self.answered[json.dumps(body["messages"])] += 1


def most_taken(judge: JudgeEndpoint, question: Question) -> int:
    """Tokens that are reserved for a question."""
    return Account(judge).most(body_of(judge, question), judge.longest_answer).tokens


def answers_in(body: dict[str, Any]) -> list[str]:
    """The completions that a question shows, without those of earlier questions."""
    return ANSWER.findall(next(each["content"] for each in body["messages"] if each["role"] == "user"))


def honest(body: dict[str, Any]) -> str:
    """By the number of ``x``."""
    counts = [min(10, text.count("x")) for text in answers_in(body)]
    system = body.get("system") or body["messages"][0]["content"]
    reasoning = f"it has {counts} x"
    if '"winner"' in system:
        winner = "tie" if counts[0] == counts[1] else "A" if counts[0] > counts[1] else "B"
        return json.dumps({"reasoning": reasoning, "winner": winner})
    if '"scores"' in system:
        scores = {str(number): count for number, count in enumerate(counts, start=1)}
        return json.dumps({"reasoning": reasoning, "scores": scores})
    return json.dumps({"reasoning": reasoning, "score": counts[0]})


def send(handler: BaseHTTPRequestHandler, code: int, value: Any, headers: dict[str, str] | None = None) -> bool:
    """Whether it was sent."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        handler.send_response(code)
        for name, content in (headers or {}).items():
            handler.send_header(name, content)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
        handler.wfile.flush()
    except OSError:
        return False
    return True


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """A mishap: this status; underscores in headers' names are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, code, {"error": {"message": f"status {code}"}}, named)

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """The connection ends without an answer."""
    handler.close_connection = True
    handler.connection.close()
