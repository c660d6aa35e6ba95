"""An OpenAI-compatible server over this process's engine, for agents: usually behind the LLM proxy, which records their
calls token by token."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import orjson
from starlette.types import Receive, Scope, Send

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.config import EngineConfig, SamplingParams
from rollout_core.inference.backend import ModelRef
from rollout_core.inference.chat_api import CHAT, COMPLETIONS, ApiError, read_ask, stream_of
from rollout_core.inference.served_engine import ServedEngine
from rollout_core.store.codec import read_object
from rollout_core.web.http_errors import TooLarge, TooSlow, Unauthorized, status_of
from rollout_core.web.listening import DEFAULT_HOST, BodyLimits, Gate, Gone, listen, read_body, require_key, url_of
from rollout_core.web.threads import ServerThread

log = logging.getLogger(__name__)

_LIMITS = BodyLimits(silent_seconds=120.0, whole_seconds=120.0)
_JSON = b"application/json"
_STREAM = b"text/event-stream; charset=utf-8"


class EngineServer:
    """Serves this process's engine with OpenAI's API: chat completions, completions and the list of models.

    It runs on a thread and event loop of its own; its methods may be called from any. The engine stays in this
    process's pool between weights: batch inference shares it where it uses the same model, and must borrow it for
    another one, by ``lent``.

    Args:
        backend: the engine.
        name: of the model, as requests have it.
        tool_parser: how tool calls are written by the model; None leaves them as text.
        seed: what requests draw their seeds from that have none.
        host: where to listen; other than on loopback only with an ``api_key``.
        port: 0 takes a free one, which it keeps.
        say: receives lines about the engine's start.
    """

    def __init__(
        self,
        backend: EngineConfig,
        *,
        name: str = "policy",
        tool_parser: Literal["hermes"] | None = "hermes",
        seed: int = 0,
        host: str = DEFAULT_HOST,
        port: int = 0,
        api_key: str | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        require_key(host, api_key)
        self._host, self._port, self._api_key = host, port, api_key
        self._name = name
        self._make_engine = lambda: ServedEngine(
            backend, name, parses_tools=tool_parser == "hermes", seed=seed, say=say
        )
        self._model_id: ContentId | None = None
        self._engine: ServedEngine | None = None
        self._thread: ServerThread | None = None

    @property
    def url(self) -> str:
        """Base URL, with ``/v1``. Raises ConfigError before the port is known."""
        if not self._port:
            raise ConfigError("the engine's server has no port yet; start it, or give it one")
        return f"{url_of(self._host, self._port)}/v1"

    @property
    def model_id(self) -> ContentId:
        """Of the weights that answer. Raises ConfigError where none do."""
        if self._model_id is None:
            raise ConfigError("the engine's server has no model; start it, or load one")
        return self._model_id

    @property
    def problem(self) -> str | None:
        """Why nothing is answered until another load, where that is so."""
        return None if self._engine is None else self._engine.problem

    @property
    def num_running(self) -> int:
        """Sequences that the engine works on at present; 0 while requests wait, the engine is idle."""
        return 0 if self._engine is None else self._engine.num_running

    async def start(self, model: ModelRef, sampling: SamplingParams | None = None) -> None:
        """Serve; returns when the engine is loaded and answers. ``sampling``: see ``load``.

        Raises ConfigError where the port cannot be had, and what the engine raises at its start.
        """
        if self._thread is not None and self._thread.is_alive():
            raise ConfigError("the engine's server runs already; use load for another model")
        listener = listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._thread = ServerThread(self._serve, listener, "engine's server")
        try:
            await asyncio.wrap_future(self._thread.started)
            await self.load(model, sampling)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def load(self, model: ModelRef, sampling: SamplingParams | None = None) -> None:
        """Answer with these weights from now on. Requests under way end first, new ones wait meanwhile.

        With ``sampling``, temperature, top_p, top_k, penalties and ignore_eos are its own whatever a request asks for,
        ``max_tokens`` is default and upper limit, and its stops are added to a request's; without, requests say it, and
        OpenAI's defaults hold. Raises what the engine raises; then requests are answered with 503 and the reason until
        another load succeeds.
        """
        thread, engine = self._running()
        self._model_id = None
        await thread.run(engine.load(model, sampling))
        self._model_id = model.content_id

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside the block the engine is free for others in this process, also with another model. Requests under way
        end first, new ones wait; ``load`` may be called."""
        thread, engine = self._running()
        await thread.run(engine.lend())
        try:
            yield
        finally:
            if thread.is_alive() and not thread.is_stopping:
                thread.loop.call_soon_threadsafe(engine.take_back)

    async def stop(self) -> None:
        """Stop serving and release the engine, which stays in the process's pool. Requests under way get a few
        seconds. Harmless when it does not run."""
        thread, self._thread = self._thread, None
        self._model_id = None
        if thread is not None and thread.is_alive():
            thread.ask_to_stop()
            await asyncio.to_thread(thread.join)

    def _running(self) -> tuple[ServerThread, ServedEngine]:
        if self._thread is None or self._engine is None or not self._thread.is_alive():
            raise ConfigError("the engine's server does not run; start it")
        return self._thread, self._engine

    async def _serve(self, thread: ServerThread, listener: Any) -> None:
        engine = self._engine = self._make_engine()
        try:
            await thread.serve(_App(engine, self._name, self._api_key), listener)
        finally:
            await engine.close()


class _App:
    """The ASGI application."""

    def __init__(self, engine: ServedEngine, name: str, api_key: str | None) -> None:
        self._engine, self._name = engine, name
        self._gate = Gate(self, api_key)
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, kind, body = 200, *await self._answer(scope, receive)
        except Gone:
            return
        except ApiError as error:
            status, kind, body = error.status, _JSON, error.body()
        except asyncio.CancelledError:
            # By the server, which stops; the task ends with this answer.
            error = ApiError(503, "the server is being stopped")
            status, kind, body = error.status, _JSON, error.body()
        except Exception as error:  # noqa: BLE001 - a bug of ours; one request must not end the server
            # Without the error's message, which may hold a prompt.
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("A request failed by a fault of the server: %s\n%s", type(error).__name__, place)
            failed = ApiError(500, f"a fault of the server: {type(error).__name__}")
            status, kind, body = failed.status, _JSON, failed.body()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        headers += [(b"retry-after", b"1")] if status == 503 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[bytes, bytes]:
        """Content type and body."""
        path, is_get = scope["path"], scope["method"] in ("GET", "HEAD")
        if path == "/health" and is_get:
            return _JSON, b'{"status":"ok"}'
        if (refusal := self._gate.refusal(scope)) is not None:
            raise ApiError(401 if isinstance(refusal, Unauthorized) else 403, str(refusal))
        if path == "/v1/models" and is_get:
            model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "rollout"}
            return _JSON, orjson.dumps({"object": "list", "data": [model]})
        if path not in (CHAT, COMPLETIONS):
            raise ApiError(404, f"no such path; there are {CHAT}, {COMPLETIONS} and /v1/models")
        if scope["method"] != "POST":
            raise ApiError(405, f"{path} takes POST, not {scope['method']}")
        try:
            body = await read_body(scope, receive, _LIMITS)
        except (TooLarge, TooSlow) as error:
            raise ApiError(status_of(error), str(error)) from None
        return await _while_connected(receive, self._generate(body, is_chat=path == CHAT))

    async def _generate(self, data: bytes, *, is_chat: bool) -> tuple[bytes, bytes]:
        try:
            body = read_object(data)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        async with self._engine.admitted() as served:
            vocab_size = len(served.tokenizer)
            ask = read_ask(body, is_chat=is_chat, sampling=served.sampling, vocab_size=vocab_size)
            if body.get("model") not in (None, self._name):
                message = f"there is no model {body['model']!r:.100} here, only {self._name!r}"
                raise ApiError(404, message, "model", "model_not_found")
            answered = await self._engine.complete(served, ask)
        # Unique, also for equal requests: the proxy's spans and the tracer's are matched by it.
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        answer = served.writer.answer(ask, answered, response_id, int(time.time()))
        if ask.is_stream:
            return _STREAM, b"".join(stream_of(answer, with_usage=ask.wants_usage))
        return _JSON, orjson.dumps(answer)


async def _while_connected(receive: Receive, work: Awaitable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The result of ``work``, which is cancelled when the client goes away. Raises Gone then."""
    task = asyncio.ensure_future(work)

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    listener = asyncio.create_task(listen())
    try:
        await asyncio.wait([task, listener], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        listener.cancel()
