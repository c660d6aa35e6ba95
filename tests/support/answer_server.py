"""A small real HTTP server with OpenAI's and Anthropic's APIs that answers by a table, scores what it repeats, and
remembers what it was asked."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.json_server import JsonServer

WORD = re.compile(r"\s*\S+|\s+$")


@dataclass
class AnswerServer:
    """``answers`` by what the last message, or a prompt, ends with; ``scores`` are log-probabilities of single words
    behind a prompt that ends so, those of others are -9."""

    answers: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    """Further counts of each message of Anthropic's."""
    refusal: str | None = None
    """What each answer of a chat has in place of a content."""
    refused: frozenset[str] = frozenset()
    """Questions that are answered 400."""
    key: str | None = None
    scores_prompts: bool = True
    tokens: Callable[[str], list[str]] = WORD.findall
    """Texts of a text's tokens; offsets are the sums of their ``width``, as vLLM's server has them."""
    width: Callable[[str], int] = len
    drawn: tuple[str, ...] = (" drawn",)
    """Tokens behind a text that is scored."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    on_answer: Callable[[int], object] = lambda count: None
    """Gets the number of answers so far, before each."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> AnswerServer:
        self._server = JsonServer(self._answer)
        self.url = self._server.url
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        if handler.command == "GET":
            return _send(handler, 200, {"data": [{"id": "wise"}]})
        with self._lock:
            self.asked.append(body)
            self.headers.append(headers)
            count = len(self.asked)
        self.on_answer(count)
        if self.key not in (None, headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer ")):
            return _send(handler, 401, {"error": {"message": "wrong key"}})
        if body.get("echo"):
            return _send(handler, 200, {"choices": [self._scored(body["prompt"])]})
        question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        known = next((end for end in self.answers if question.endswith(end)), None)
        if known is None or known in self.refused:
            return _send(handler, 400, {"error": {"message": "that is not answered"}})
        text = self.answers[known]
        if handler.path == "/v1/messages":
            usage = {"input_tokens": 7, "output_tokens": 3, **self.usage}
            content = [{"type": "text", "text": text}]
            return _send(handler, 200, {"content": content, "stop_reason": "end_turn", "usage": usage})
        message = {"content": text if self.refusal is None else None, "refusal": self.refusal}
        told = {"text": text} if "prompt" in body else {"message": message}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        return _send(handler, 200, {"choices": [{**told, "finish_reason": "stop"}], "usage": usage})

    def _scored(self, text: str) -> dict[str, Any]:
        if not self.scores_prompts:
            return {"text": "x", "finish_reason": "length", "logprobs": None}
        words = [*self.tokens(text), *self.drawn]
        offsets = [sum(map(self.width, words[:place])) for place in range(len(words))]
        logprobs = [self._logprob("".join(words[:place]), word) for place, word in enumerate(words)]
        logprobs[0] = None
        tops = [None if p is None else {word: p, " likelier": -0.5} for word, p in zip(words, logprobs, strict=True)]
        found = {"tokens": words, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
        return {"text": text + "".join(self.drawn), "finish_reason": "length", "logprobs": found}

    def _logprob(self, before: str, word: str) -> float | None:
        for end, scores in self.scores.items():
            if before.endswith(end):
                return scores.get(word, -9.0)
        return -9.0


def _send(handler: BaseHTTPRequestHandler, code: int, value: Any) -> None:
    data = json.dumps(value).encode()
    handler.send_response(code)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
