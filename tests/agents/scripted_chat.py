"""A small OpenAI-compatible server whose answers are scripted, to be called by the real client."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def completion(number: int, message: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    """The body of an answer with the response id ``chatcmpl-<number>``."""
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


@contextmanager
def scripted_chat(
    answers: Sequence[dict[str, Any]] | Callable[[dict[str, Any]], dict[str, Any] | int | str],
) -> Iterator[str]:
    """The base URL of a server that gives ``answers`` in turn, as events where a stream is asked for; then errors. A
    function answers each request, or gives the status of an error, or the text of a gateway."""
    left = [] if callable(answers) else list(answers)
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                answer = answers(request) if callable(answers) else left.pop(0) if left else 400
            if isinstance(answer, int):
                return self._send(answer, "application/json", json.dumps({"error": {"message": "no more answers"}}))
            if isinstance(answer, str):
                return self._send(200, "text/html" if answer.startswith("<") else "application/json", answer)
            if not request.get("stream"):
                return self._send(200, "application/json", json.dumps(answer))
            return self._send(200, "text/event-stream", "".join(_events(answer)))

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _events(answer: dict[str, Any]) -> Iterator[str]:
    [choice] = answer["choices"]
    for delta, reason in (({"role": "assistant"}, None), (choice["message"], None), ({}, choice["finish_reason"])):
        chunk = {**answer, "object": "chat.completion.chunk", "usage": None}
        chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
