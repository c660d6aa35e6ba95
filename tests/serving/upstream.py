"""An engine's server for tests, as a program: ``python upstream.py SOCKET FOLDER MODEL``. It answers on a Unix socket
as vLLM's does, writes each request and each client that left into ``FOLDER/log``, and does what a prompt says:

``say N``: N tokens. ``who N``: N tokens, each of which is the name of the weights that made it. ``pour N``: N tokens of
64 KB. ``hold``: one token, and then none until the file ``FOLDER/go`` is there. ``die``: end by SIGKILL before an
answer, as often as the file ``FOLDER/deaths`` says. ``half``: two tokens and half an event, then SIGKILL. ``flood``:
tokens of 64 KB without end.

A token's id is that of its last letter, a prompt's ids those of its letters. As vLLM, it gives them, and
log-probabilities, to those who ask.

Weights are a folder with a file ``weights``: the name, the log-probability of any token, and what becomes of an engine
that takes them: ``fine``, ``die`` or ``refuse``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_core.base.process_tree import signal_at_parents_end

SOCKET, FOLDER = sys.argv[1], Path(sys.argv[2])
FIELDS = ("model", "prompt", "messages", "input", "stream", "max_tokens", "store", "previous_response_id")
FIELDS += ("return_token_ids", "logprobs", "n", "request_id")
weights = (Path(sys.argv[3]) / "weights").read_text().split()
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def note(line: str) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(line + "\n")


numbers = itertools.count()


class Writer:
    """Says texts as answers to one request: each text is a token."""

    def __init__(self, path: str, prompt: str, body: dict[str, Any]) -> None:
        self.kind = "chatcmpl" if "chat" in path else "cmpl"
        self.prompt, self.body = prompt, body
        self.id = f"{self.kind}-{body.get('request_id') or f'{os.getpid()}-{next(numbers)}'}"

    def said(self, text: str, *, is_piece: bool = False, is_first: bool = True, is_last: bool = True) -> dict[str, Any]:
        key, is_chat = "delta" if is_piece else "message", self.kind == "chatcmpl"
        choice: dict[str, Any] = {"index": 0, **({key: {"content": text}} if is_chat else {"text": text})}
        answer: dict[str, Any] = {"id": self.id, "choices": [choice]}
        if is_last:
            choice["finish_reason"] = "stop"
        asked = self.body.get("logprobs")
        if asked or (asked is not None and not is_chat):
            logprob = -ord(text[-1]) / 1000
            choice["logprobs"] = {"content": [{"logprob": logprob}]} if is_chat else {"token_logprobs": [logprob]}
        if self.body.get("return_token_ids"):
            choice["token_ids"] = [ord(text[-1])]
            if is_first:
                (answer if is_chat else choice)["prompt_token_ids"] = [ord(letter) for letter in self.prompt]
        return answer

    def event(self, text: str, **place: bool) -> bytes:
        return b"data: " + json.dumps(self.said(text, is_piece=True, **place)).encode() + b"\n\n"


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    prompt = str(body.get("prompt") or body.get("input") or (body.get("messages") or [{}])[-1].get("content") or "")
    writer = Writer(request.path, prompt, body)
    note(f"asked {prompt}")
    if prompt == "die":
        left = int((FOLDER / "deaths").read_text())
        if left:
            (FOLDER / "deaths").write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)
    if "prompt_logprobs" in body:
        rows = [{str(token): {"logprob": float(weights[1])}} for token in body["prompt"]]
        return web.json_response({"choices": [{"index": 0, "text": "", "prompt_logprobs": [None, *rows[1:]]}]})
    if prompt.startswith("who") and not body.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": weights[0]}]})
    if not body.get("stream"):
        try:
            while prompt == "hold" and not (FOLDER / "go").exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            note("left")
            raise
        return web.json_response(writer.said(prompt or "."))
    return await stream(request, prompt, writer)


async def stream(request: web.Request, prompt: str, writer: Writer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    count = int(prompt.split()[1]) if prompt.startswith(("say", "who", "pour")) else 1
    texts = {"who": lambda number: weights[0], "pour": lambda number: "x" * (64 << 10)}
    text = texts.get(prompt.split(" ")[0], str)
    try:
        for number in range(count):
            place = {"is_first": number == 0, "is_last": number == count - 1 and prompt not in ("half", "hold")}
            await response.write(writer.event(text(number), **place))
            await asyncio.sleep(0.01)
        while prompt == "flood":
            await response.write(writer.event("x" * (64 << 10)))
            note("flooded")
        while prompt == "hold" and not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
    except (asyncio.CancelledError, ConnectionError):
        note("left")
        raise
    if prompt.startswith("pour"):
        note("poured")
    if prompt == "half":
        await response.write(writer.event("1", is_last=False) + b'data: {"choices": [{"ind')
        await asyncio.sleep(0.1)  # until it is on its way
        os.kill(os.getpid(), signal.SIGKILL)
    await response.write(b"data: [DONE]\n\n")
    return response


async def load(request: web.Request) -> web.Response:
    folder = Path((await request.json())["args"][0])
    taken = (folder / "weights").read_text().split()
    note(f"loads {taken[0]}")
    if taken[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if taken[2] == "refuse":
        return web.json_response({"error": "no such layer"}, status=500)
    weights[:] = taken
    return web.Response()


async def forget(request: web.Request) -> web.Response:
    note("forgets")
    held = FOLDER / "held"  # how often blocks are still in use
    left = int(held.read_text()) if held.exists() else 0
    held.write_text(str(max(0, left - 1)))
    return web.json_response({"success": not left})


async def described(request: web.Request) -> web.Response:
    body = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}}}
    fields: dict[str, Any] = {name: {} for name in FIELDS}
    return web.json_response(
        {
            "paths": {path: {"post": body} for path in PATHS},
            "components": {"schemas": {"Body": {"properties": fields}}},
        }
    )


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "created": 1, "root": "/secret/place", "max_model_len": 64}]})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(text="engine_figure 1\n")


def main() -> None:
    signal_at_parents_end(signal.SIGKILL)
    if weights[2] == "refuse":
        sys.exit(3)
    (FOLDER / "pids").open("a").write(f"{os.getpid()}\n")
    app = web.Application()
    for path in PATHS:
        app.router.add_post(path, answer)
    for path, handler in {
        "/openapi.json": described,
        "/health": health,
        "/v1/models": models,
        "/metrics": metrics,
    }.items():
        app.router.add_get(path, handler)
    app.router.add_post("/collective_rpc", load)
    app.router.add_post("/reset_prefix_cache", forget)
    web.run_app(app, path=SOCKET, print=None, access_log=None, handler_cancellation=True, shutdown_timeout=1)


if __name__ == "__main__":
    main()
