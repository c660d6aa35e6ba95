"""The server that clients talk to: it checks who asks and for what, and passes requests to the engine and what that
writes, as it is written, to the client.

A request that has got no byte of its answer is asked again when the engine dies. A stream that has begun ends with one
event that says the error; nothing is answered twice. Bodies are never logged.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Message, Receive, Scope, Send

from rollout_core.base.errors import ConfigError, NotFound, Recoverable, RetryHint
from rollout_core.base.ids import ContentId
from rollout_core.serving.feedback import FEEDBACK, FeedbackDesk, read_feedback, thumbs_of
from rollout_core.serving.following import Follower
from rollout_core.serving.recording import RecordedCall
from rollout_core.serving.replica import LOST, Replica, Visit
from rollout_core.serving.requests import ANSWERED, read_request
from rollout_core.web.http_errors import Unauthorized, status_of
from rollout_core.web.listening import BodyLimits, Gate, Gone, read_body

MODEL_HEADER = "x-rollout-model"
"""Content id of the weights that made an answer."""
PUBLIC = ("/health", "/ready")
"""Paths that need no key."""
MOST_TRIES = 3
"""Of one request, of which each ended with an engine that died: the request itself may be what it dies of."""
MAX_ANSWER_BYTES = 256 << 20
"""Of an answer that is no stream."""
_METRICS_SECONDS = 2.0
_PASSED_HEADERS = ("content-type", "retry-after", "x-request-id")
_EVENT_END = b"\n\n"
_ERROR_EVENTS = (b'data: {"error"', b"event: error")
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

logger = logging.getLogger(__name__)


class Full(Recoverable):
    """As many requests as the server takes are under way."""


class _Died(Exception):
    """The engine died before anything of an answer was passed on."""


@dataclass(frozen=True)
class FrontLimits:
    """What a server takes."""

    max_requests: int = 512
    """Most requests under way, those that wait included."""
    max_body_bytes: int = 16 << 20
    wait_seconds: float = 300.0
    """Longest wait of a request for an engine that is started anew."""


class _Metrics:
    """The front's own figures, which follow the engine's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kept: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rollout_serve_requests", "Requests by path and status.", ["path", "status"], **kept)
        self.under_way = Gauge("rollout_serve_requests_under_way", "Requests that wait or are being answered.", **kept)
        self.left = Counter("rollout_serve_clients_left", "Requests whose client left before the end.", **kept)
        self.retries = Counter("rollout_serve_retries", "Requests asked again because the engine died.", **kept)
        self.broken = Counter("rollout_serve_broken_streams", "Streams that ended with an error event.", **kept)
        self.starts = Gauge("rollout_serve_engine_starts", "Times that the engine was started.", **kept)
        self.ready = Gauge("rollout_serve_engine_ready", "1 while the engine answers.", **kept)
        self.first_byte = Histogram(
            "rollout_serve_first_byte_seconds", "From a request's body to the first byte of its answer.", **kept
        )
        self.model = Gauge("rollout_serve_model_info", "The model that answers.", ["name", "model_id"], **kept)
        self.changes = Gauge("rollout_serve_weight_changes", "Times that other weights began to answer.", **kept)
        self.held = Gauge(
            "rollout_serve_weight_change_held_seconds", "How long requests waited at most for the last change.", **kept
        )
        self.loading = Gauge(
            "rollout_serve_weight_change_loading_seconds", "Of these, how long the engine took the weights.", **kept
        )
        self.behind = Gauge(
            "rollout_serve_behind", "1 while something else than the latest model of the resource answers.", **kept
        )


class _KeyGate(Gate):
    """Lets in who has one of several keys, as OpenAI's clients send it or as Anthropic's do."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(_nothing, None, public=PUBLIC)
        self._keys = [key.encode() for key in keys]

    def why_refused(self, scope: Scope) -> Exception | None:
        if not self._keys:
            return super().why_refused(scope)
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        given += [
            value.removeprefix(b"Bearer ")
            for name, value in scope["headers"]
            if name == b"authorization" and value.startswith(b"Bearer ")
        ]
        # Every pair is compared, so that the time says nothing of which key it was.
        if any([hmac.compare_digest(one, key) for one in given for key in self._keys]):
            return None
        return Unauthorized("no valid API key; send it as Authorization: Bearer KEY, or as x-api-key: KEY")


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """A gate asks its application only for what it passes on itself."""


@dataclass
class _Answer:
    """What a client has got of one."""

    path: str
    send: Send
    status: int | None = None
    is_stream: bool = False
    has_error: bool = False
    """Whether an event of the stream says an error."""
    began: float = field(default_factory=time.monotonic)
    recorded: RecordedCall | None = None
    """What is to be stored of it."""

    def shown(self, events: bytes) -> bytes:
        """What the client gets of a piece of the engine's stream."""
        return events if self.recorded is None else self.recorded.piece(events)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        await self.start(
            status, {"content-length": str(len(data)), "content-type": "application/json"} | (headers or {})
        )
        await self.write(data)

    async def error(self, error: Exception) -> None:
        """The reply that says ``error``, in the form of the API that was asked."""
        status = 429 if isinstance(error, Full) else status_of(error)
        headers: dict[str, str] = {}
        if isinstance(error, Recoverable):
            headers["retry-after"] = str(max(1, round(error.hint.delay_seconds)))
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        message = str(error) if status != 500 else "the server failed; its log says why"
        await self.whole(status, orjson.dumps(self._in_words(status, message)), headers)

    async def broken(self, message: str) -> None:
        """End a stream that has begun with an event that says the error."""
        event: dict[str, Any] = self._in_words(500, message)
        if self.path == "/v1/responses":
            event = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}
        named = b"" if "type" not in event else b"event: error\n"
        await self.write(named + b"data: " + orjson.dumps(event) + _EVENT_END)

    def _in_words(self, status: int, message: str) -> dict[str, Any]:
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        if self.path.startswith("/v1/messages"):
            kind = "api_error" if status >= 500 else kind
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Front:
    """The ASGI application.

    Args:
        replica: the engine.
        name: of the model for clients, who may also ask for the content id that answers at present.
        keys: what clients must send one of; none: nothing, and only programs of this machine are let in.
        follower: changes what the engine runs; None: nobody does.
        desk: what records answers and takes feedback on them; None: nothing does.
    """

    def __init__(
        self,
        replica: Replica,
        name: str,
        keys: Collection[str],
        limits: FrontLimits,
        *,
        follower: Follower | None = None,
        desk: FeedbackDesk | None = None,
    ) -> None:
        self._replica, self._name, self._limits = replica, name, limits
        self._follower, self._desk = follower, desk
        self._gate = _KeyGate(keys)
        self._body_limits = BodyLimits(limits.max_body_bytes)
        self._metrics = _Metrics()
        self.num_requests = 0
        """Under way, those that wait included."""
        self._mean_seconds = 1.0
        self.is_draining = False
        """Whether no further requests are taken."""
        self._out_of_time = asyncio.Event()

    def drain(self, seconds: float) -> None:
        """Take no further requests; those under way have so many seconds."""
        self.is_draining = True
        asyncio.get_running_loop().call_later(seconds, self._out_of_time.set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "websockets and lifespan are off"
        scope["path"] = scope["raw_path"].decode("latin-1")
        answer = _Answer(scope["path"], send)
        try:
            refusal = self._gate.refusal(scope)
            if refusal is not None:
                raise refusal
            await self._route(scope, receive, answer)
        except Gone:
            self._metrics.left.inc()
        except Exception as error:
            if answer.status is not None:  # half an answer is out, which uvicorn cuts off
                raise
            if status_of(error) == 500:
                logger.error("A request to %s failed: %s", answer.path, type(error).__name__, exc_info=error)
            await answer.error(error)
        finally:
            path = answer.path if answer.path in (*ANSWERED, FEEDBACK) else "other"
            self._metrics.requests.labels(path, str(answer.status or 499)).inc()

    async def _route(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        asked = (scope["method"], answer.path)
        if asked[0] == "POST" and answer.path in ANSWERED:
            await self._take(scope, receive, answer)
        elif asked == ("POST", FEEDBACK):
            feedback = read_feedback(await read_body(scope, receive, self._body_limits))
            await answer.whole(200, orjson.dumps(await self._desk_for("feedback").keep(feedback)))
        elif asked == ("GET", "/health"):
            await answer.whole(200, b'{"status":"ok"}')
        elif asked == ("GET", "/ready"):
            await self._say_ready(answer)
        elif asked == ("GET", "/metrics"):
            await answer.whole(200, await self._figures(), {"content-type": "text/plain; version=0.0.4; charset=utf-8"})
        elif asked == ("GET", "/v1/models"):
            await answer.whole(200, orjson.dumps({"object": "list", "data": [await self._described()]}), self._header())
        elif asked[0] == "GET" and answer.path.startswith("/v1/models/"):
            name = answer.path.removeprefix("/v1/models/").replace("%2F", "/")
            self._refuse_other(name, self._replica.model_id)
            await answer.whole(200, orjson.dumps(await self._described()), self._header())
        else:
            raise NotFound(f"{asked[0]} {asked[1]:.200} is not served here; docs/serving.md has what is")

    # What is said of the server itself

    def _header(self) -> dict[str, str]:
        return _header_of(self._replica.model_id)

    def _refuse_other(self, name: Any, model_id: ContentId) -> None:
        if name not in (self._name, model_id):
            raise NotFound(f"no model {name!r:.200} is served here; expected {self._name!r}, which is {model_id} now")

    async def _say_ready(self, answer: _Answer) -> None:
        running = self._replica.running
        ready = running is not None and not self.is_draining
        why = "the server is stopping" if self.is_draining else self._replica.why
        said: dict[str, Any] = {"ready": ready, "model": self._replica.model_id, "name": self._name}
        said |= {"since": datetime.fromtimestamp(self._replica.changed_at, UTC).isoformat(timespec="seconds")}
        said |= {"why": why} if not ready else {}
        if self._follower is not None:
            said |= {"follows": self._follower.resource, "latest": self._follower.latest}
            said |= {"problem": self._follower.problem} if self._follower.problem else {}
        await answer.whole(200 if ready else 503, orjson.dumps(said), self._header())

    async def _figures(self) -> bytes:
        running = self._replica.running
        self._metrics.starts.set(self._replica.num_starts)
        self._metrics.ready.set(running is not None)
        self._metrics.under_way.set(self.num_requests)
        self._metrics.changes.set(self._replica.num_changes)
        self._metrics.held.set(self._replica.held_seconds)
        self._metrics.loading.set(self._replica.loading_seconds)
        self._metrics.behind.set(self._follower is not None and self._follower.problem is not None)
        self._metrics.model.clear()
        self._metrics.model.labels(self._name, self._replica.model_id).set(1)
        engines = b""
        if running is not None:
            with suppress(TimeoutError, *LOST):
                async with asyncio.timeout(_METRICS_SECONDS), running.session.get("/metrics") as response:
                    engines = await response.read()
        records = b"" if self._desk is None else self._desk.figures()
        return engines + generate_latest(self._metrics.registry) + records

    async def _described(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it."""
        running = await self._replica.wait(self._limits.wait_seconds)
        try:
            async with running.session.get("/v1/models") as response:
                [first, *_] = orjson.loads(await response.read())["data"]
        except LOST as error:
            raise Recoverable("the engine does not answer; try again later") from error
        described = {"id": self._name, "object": "model", "created": first["created"], "owned_by": "rollout"}
        return described | {"root": running.model.content_id, "max_model_len": first.get("max_model_len")}

    # Answers of the model

    async def _take(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        self._refuse_when_full()  # before its body is read
        data = await read_body(scope, receive, self._body_limits)
        body = read_request(answer.path, data, self._replica.fields.get(answer.path))
        answer.is_stream = bool(body.get("stream"))
        thumbs = thumbs_of(body)
        desk = self._desk if thumbs is None else self._desk_for("metadata with feedback_for")
        self._refuse_when_full()
        if desk is not None:
            answer.recorded = desk.recording.begin(answer.path, data, body)
            if thumbs is not None:
                desk.keep_behind(thumbs)
        answer.began = time.monotonic()
        self.num_requests += 1
        try:
            await self._attend(self._forward(body, data, answer), receive, answer)
        finally:
            if answer.recorded is not None:
                answer.recorded.end()
            self.num_requests -= 1
            self._mean_seconds += 0.1 * (time.monotonic() - answer.began - self._mean_seconds)

    def _desk_for(self, what: str) -> FeedbackDesk:
        if self._desk is None:
            raise ConfigError(f"{what} is not taken: this server records no answers; start it with --record")
        return self._desk

    def _refuse_when_full(self) -> None:
        if self.is_draining:
            raise Recoverable("the server is stopping; ask another one, or try again later")
        if self.num_requests >= self._limits.max_requests:
            raise Full(
                f"{self.num_requests} requests are under way, and the server takes no more (--max-queue); try again "
                "later",
                RetryHint(delay_seconds=min(60.0, max(1.0, self._mean_seconds))),
            )

    async def _attend(self, work: Any, receive: Receive, answer: _Answer) -> None:
        """Do ``work`` until it ends, the client leaves, or the time of a server that stops is over."""
        call = asyncio.create_task(work)
        gone = asyncio.create_task(_until_gone(receive))
        late = asyncio.create_task(self._out_of_time.wait())
        try:
            await asyncio.wait((call, gone, late), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            if gone.done():
                raise Gone
            if answer.status is None:
                raise Recoverable("the server stops, and the answer had not begun; ask again")
            if answer.is_stream:
                self._metrics.broken.inc()
                await answer.broken("the server stopped before the end of the answer")
        finally:
            for task in (call, gone, late):
                task.cancel()

    async def _forward(self, body: dict[str, Any], data: bytes, answer: _Answer) -> None:
        for tried in range(1, MOST_TRIES + 1):
            visit = await self._replica.admit(self._limits.wait_seconds)
            try:
                return await self._ask(visit, self._for_engine(visit, body, data, answer.recorded), answer)
            except _Died:
                self._metrics.retries.inc()
                logger.warning("The engine died with a request to %s, try %d", answer.path, tried)
            finally:
                visit.leave()
        raise Recoverable(f"the engine died {MOST_TRIES} times with this request, which is not asked again")

    def _for_engine(self, visit: Visit, body: dict[str, Any], data: bytes, recorded: RecordedCall | None) -> bytes:
        """The body as the engine is to have it, which knows its model by the name alone."""
        named, model_id = body.get("model"), visit.running.model.content_id
        if named:
            self._refuse_other(named, model_id)
        if recorded is not None:
            return recorded.asked_of(model_id, self._name)
        return data if not named or named == self._name else orjson.dumps(body | {"model": self._name})

    async def _ask(self, visit: Visit, data: bytes, answer: _Answer) -> None:
        """Pass on the engine's answer. Raises _Died while nothing has been passed on."""
        running = visit.running
        named = _header_of(running.model.content_id)
        try:
            async with running.session.post(
                answer.path, data=data, headers={"content-type": "application/json"}, allow_redirects=False
            ) as response:
                answer.is_stream = response.content_type == "text/event-stream"
                first = await (response.content.readany() if answer.is_stream else _whole(response))
                has_failed = response.status >= 500 or (answer.is_stream and first.startswith(_ERROR_EVENTS))
                if (has_failed or not first) and await self._replica.suspect(running):
                    raise _Died
                self._metrics.first_byte.observe(time.monotonic() - answer.began)
                headers = {name: response.headers[name] for name in _PASSED_HEADERS if name in response.headers}
                if not answer.is_stream:
                    visit.leave()
                    first = first if answer.recorded is None else answer.recorded.whole(response.status, first)
                    return await answer.whole(response.status, first, headers | named)
                # Gateways, nginx for one, hold streams back otherwise.
                await answer.start(
                    response.status, headers | named | {"cache-control": "no-cache", "x-accel-buffering": "no"}
                )
                async with _Pieces(response, visit) as pieces:
                    await _pass_on(first, pieces, answer)
                visit.leave()
                await answer.write(b"")
        except LOST as error:
            await self._replica.suspect(running)
            if answer.status is None:
                raise _Died from error
            self._metrics.broken.inc()
            logger.warning("The engine went away in the middle of a stream of %s", answer.path)
            if answer.has_error:
                await answer.write(b"")
            else:
                await answer.broken("the engine died before the end of the answer; ask again")


class _Pieces:
    """What an engine writes of a stream. Usually each piece is read when the client has taken the one before, so that a
    slow client fills no memory. When the weights are to change, the rest is read at once, for the engine to be free."""

    def __init__(self, response: aiohttp.ClientResponse, visit: Visit) -> None:
        self._response, self._visit = response, visit
        self._is_reading = False
        self._ahead: asyncio.Queue[bytes | Exception] | None = None
        self._reading_ahead: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Pieces:
        self._visit.read_ahead = self._read_ahead
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._visit.read_ahead = None
        if self._reading_ahead is not None:
            self._reading_ahead.cancel()
            await asyncio.wait([self._reading_ahead])

    async def next(self) -> bytes:
        """The next piece; nothing at the end."""
        if self._ahead is not None:
            piece = await self._ahead.get()
            if isinstance(piece, Exception):
                raise piece
            return piece
        self._is_reading = True
        try:
            return await self._response.content.readany()
        finally:
            self._is_reading = False

    def _read_ahead(self) -> None:
        if self._ahead is None and not self._is_reading:
            self._ahead = asyncio.Queue()
            self._reading_ahead = asyncio.create_task(self._read_into(self._ahead))

    async def _read_into(self, ahead: asyncio.Queue[bytes | Exception]) -> None:
        size = 0
        try:
            while piece := await self._response.content.readany():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise ConnectionError(f"the client has yet to read more than {MAX_ANSWER_BYTES:,} bytes")
                ahead.put_nowait(piece)
            ahead.put_nowait(b"")
        except LOST as error:
            ahead.put_nowait(error)
        self._visit.leave()


def _header_of(model_id: ContentId) -> dict[str, str]:
    return {MODEL_HEADER: model_id}


async def _until_gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise ConfigError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes; ask for less, or for a stream")
    return bytes(data)


async def _pass_on(first: bytes, pieces: _Pieces, answer: _Answer) -> None:
    """A stream as it comes, in whole events: half of one would spoil the event that says why the stream breaks off."""
    rest = first
    while True:
        end = rest.rfind(_EVENT_END) + len(_EVENT_END)
        if end >= len(_EVENT_END):
            events, rest = rest[:end], rest[end:]
            answer.has_error = answer.has_error or any(mark in events for mark in _ERROR_EVENTS)
            await answer.write(answer.shown(events), more=True)
        piece = await pieces.next()
        if not piece:
            break
        rest += piece
    if rest:
        await answer.write(rest if answer.recorded is None else answer.recorded.last_piece(rest), more=True)
