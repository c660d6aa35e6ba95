"""The proxy's web application: who is let in, which model a request is for, and what of it is recorded.

``/rollout/{rollout_id}/attempt/{attempt_id}`` in front of any path files the request under that attempt; without it
requests are passed on and not recorded. ``/v1`` may be there or not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.types import Receive, Scope, Send

from rollout_core.agents.proxy.call_delivery import FLUSH, FLUSH_SECONDS, UNDER_WAY_SECONDS, CallDelivery, Ticket
from rollout_core.agents.proxy.recording import CHAT, COMPLETIONS, Call
from rollout_core.agents.proxy.upstream_pools import Pool, Pools
from rollout_core.agents.proxy.upstream_requests import Exchange, Failed, Forwarder, Headers, Outgoing, error_body
from rollout_core.base.errors import NotFound
from rollout_core.base.ids import content_id
from rollout_core.base.logs import about
from rollout_core.store import LightningStore
from rollout_core.store.codec import read_object
from rollout_core.web.http_errors import TooLarge, TooSlow, Unauthorized, status_of
from rollout_core.web.listening import BodyLimits, Gate, Gone, read_body

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 100_000
"""Whose calls are counted at a time."""
BODY_SECONDS = 120.0
"""Longest time that a request's body may take to arrive."""
_PATH = re.compile(r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?(?:/v1)*(?P<rest>/.*)")
_CLIMBS = re.compile(r"(?i)(^|/)(\.|%2e){1,2}(/|$)")
_JSON: Headers = [(b"content-type", b"application/json")]


@dataclass(frozen=True)
class _Request:
    """What is asked, before it is known for which model."""

    method: str
    path: str
    query: str
    content_type: str | None
    ids: tuple[str, str] | None
    """Of rollout and attempt."""
    body: bytes


class _Reply:
    """The answer to the agent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.is_whole = False

    async def begin(self, status: int, headers: Headers) -> None:
        """The status line and headers."""
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes) -> None:
        """A piece of the body."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last piece."""
        self.is_whole = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """All of it."""
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def failed(self, error: Failed) -> None:
        """An error, as OpenAI's API has it; in the midst of a stream as an event, by which its clients raise."""
        if self.is_whole:
            return
        if self.has_begun:
            await self.end(b"\n\ndata: " + error.body + b"\n\n")  # what came before may have no end
        else:
            await self.whole(error.status, [*_JSON, *error.headers], error.body)


class ProxyApp:
    """The ASGI application. ``store`` is asked for at each call that is recorded, so it may change."""

    def __init__(
        self,
        pools: Pools,
        forwarder: Forwarder,
        delivery: CallDelivery,
        store: Callable[[], LightningStore],
        *,
        api_key: str | None,
        max_body_bytes: int,
    ) -> None:
        self._pools, self._forwarder, self._delivery, self._store = pools, forwarder, delivery, store
        self._gate = Gate(self, api_key)
        self._limits = BodyLimits(max_body_bytes, BODY_SECONDS, BODY_SECONDS)
        self._created = int(time.time())
        self._num_calls: OrderedDict[tuple[str, str], int] = OrderedDict()
        """Of the latest attempts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        reply = _Reply(send)
        try:
            request = await self._read(scope, receive)
            await _while_listening(receive, reply, self._answer(request, reply))
        except Gone:
            return
        except Failed as error:
            await reply.failed(error)
        except asyncio.CancelledError:
            # By the server, which stops; the task ends with this answer.
            await reply.failed(Failed(503, "the proxy is being stopped", headers=[(b"retry-after", b"1")]))
        except Exception as error:  # noqa: BLE001 - a bug of ours; one request must not end the server
            # Without the error's message, which may hold a prompt.
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("A request failed by a fault of the proxy: %s\n%s", type(error).__name__, place)
            await reply.failed(Failed(500, f"a fault of the proxy: {type(error).__name__}"))

    async def _read(self, scope: Scope, receive: Receive) -> _Request:
        """The request with its body. Raises Failed where there is something wrong with it."""
        path = scope["path"] = scope["raw_path"].decode("latin-1")  # ids may hold slashes, written as %2F
        if path != "/health" and (refusal := self._gate.refusal(scope)) is not None:
            raise Failed(401 if isinstance(refusal, Unauthorized) else 403, str(refusal))
        found = _PATH.fullmatch(path)
        if found is None or _CLIMBS.search(path):
            raise Failed(404, "the proxy has no such path; its API is at /v1, or /rollout/ID/attempt/ID/v1")
        ids = (unquote(found["rollout"]), unquote(found["attempt"])) if found["rollout"] else None
        headers = dict(scope["headers"])
        query = scope["query_string"].decode("latin-1")
        content_type = headers.get(b"content-type")
        try:
            body = await read_body(scope, receive, self._limits)
        except (TooLarge, TooSlow) as error:
            raise Failed(status_of(error), str(error)) from None
        kind = None if content_type is None else content_type.decode("latin-1")
        return _Request(scope["method"], found["rest"], query and f"?{query}", kind, ids, body)

    async def _answer(self, request: _Request, reply: _Reply) -> None:
        path, is_get = request.path, request.method in ("GET", "HEAD")
        if path == "/health" and is_get:
            await reply.whole(200, _JSON, b'{"status":"ok"}')
        elif path == FLUSH and request.ids is not None:
            left = await self._flush(*request.ids)
            facts = {
                "stored": True,
                "under_way": left,
                "refused": self._delivery.num_refused(*request.ids),
                "kept_seconds": self._delivery.seconds,
            }
            await reply.whole(202 if left else 200, _JSON, orjson.dumps(facts))
        elif path == "/models" and is_get:
            data = {"object": "list", "data": [self._described(name) for name in self._pools.names]}
            await reply.whole(200, _JSON, orjson.dumps(data))
        elif path.startswith("/models/") and is_get:
            name = unquote(path.removeprefix("/models/"))
            self._pool(name)
            await reply.whole(200, _JSON, orjson.dumps(self._described(name)))
        else:
            await self._forward(request, reply)

    async def _flush(self, rollout_id: str, attempt_id: str) -> int:
        """Wait until an attempt's calls are stored; how many are left that do not end, such as requests that its agent
        has forgotten."""
        ids = rollout_id, attempt_id
        try:
            async with asyncio.timeout(UNDER_WAY_SECONDS):
                await self._delivery.flush(*ids)
            return 0
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(FLUSH_SECONDS - UNDER_WAY_SECONDS):
                await self._delivery.flush(*ids, under_way=False)
            return self._delivery.num_under_way(*ids)
        except TimeoutError:
            raise Failed(503, f"not all calls could be stored within {FLUSH_SECONDS:g} s; ask again") from None

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "rollout"}

    def _pool(self, name: Any) -> Pool:
        if not isinstance(name, str):
            raise Failed(400, f"the request names no model; give one of {', '.join(self._pools.names)} as model")
        try:
            return self._pools.get(name)
        except NotFound as error:
            message = str(error.args[0])
            raise Failed(404, message, body=error_body(404, message, "model_not_found")) from None

    # Calls of models

    def _next_seed(self, rollout_id: str, attempt_id: str) -> int:
        number = self._num_calls.pop((rollout_id, attempt_id), 0)
        self._num_calls[rollout_id, attempt_id] = number + 1
        while len(self._num_calls) > _MOST_ATTEMPTS:
            self._num_calls.popitem(last=False)
        return int(content_id("agent-call-seed/1", [rollout_id, number])[:12], 16) % 2**31

    async def _forward(self, request: _Request, reply: _Reply) -> None:
        """Pass a request on, and its answer back; under an attempt, record both."""
        if request.ids is None:
            return await self._pass_on(request, reply)
        with about(rollout_id=request.ids[0], attempt_id=request.ids[1]):
            await self._pass_on(request, reply)

    async def _pass_on(self, request: _Request, reply: _Reply) -> None:
        body = _json_object(request)
        ids = request.ids if request.method == "POST" else None
        call = Call(request.path, request.body, body, is_recorded=ids is not None)
        call.seed = None if ids is None else self._next_seed(*ids)
        ticket = None if ids is None else self._begin(*ids)
        timeout = 0.0
        try:
            names = self._pools.names
            # What is no JSON, such as an upload, names its model where only that one is.
            pool = self._pool(body.get("model") if body or len(names) != 1 else names[0])
            timeout = pool.timeout
            async with asyncio.timeout(timeout) as limit:
                outgoing = Outgoing(request.method, request.path + request.query, request.content_type)
                exchange = await self._forwarder.begin(pool, call, outgoing, limit.when() or 0.0)
                try:
                    await self._pass_back(exchange, call, ticket, reply)
                finally:
                    exchange.close()
            return
        except TimeoutError:
            failed = Failed(504, f"the model did not answer within {timeout:g} s")
        except Failed as error:
            failed = error
        except asyncio.CancelledError:
            if not call.is_whole:
                call.problem = "cancelled: the caller went away before the answer's end, or the proxy was stopped"
            self._end(ticket, call)
            raise
        except Exception as error:
            # A fault of ours: a call without an end would keep its attempt's flush waiting, and its ticket for ever.
            call.give_up(f"the proxy failed by {type(error).__name__}")
            self._end(ticket, call)
            raise
        if call.is_streamed and call.is_whole and not reply.is_whole:
            # What is lacking is the stream's last event, by which nobody would know more.
            self._end(ticket, call)
            return await reply.end(call.end_stream())
        call.problem = f"HTTP {failed.status}: {failed}"
        self._end(ticket, call)
        raise failed

    async def _pass_back(self, exchange: Exchange, call: Call, ticket: Ticket | None, reply: _Reply) -> None:
        # Handed over before the last byte, and so before the agent can go on: see ``delivery``.
        if not exchange.is_stream:
            data = call.read_whole(exchange.first)
            self._end(ticket, call)
            return await reply.whole(exchange.status, exchange.headers, data)
        await reply.begin(exchange.status, exchange.headers)
        async for data in exchange.pieces():
            shown = call.read_piece(data)
            if call.is_done:
                self._end(ticket, call)
            await reply.piece(shown)
        last = call.end_stream()
        if call.problem is not None and not call.has_told_problem:
            raise Failed(502, call.problem)
        self._end(ticket, call)
        await reply.end(last)

    def _begin(self, rollout_id: str, attempt_id: str) -> Ticket:
        if self._delivery.is_full:
            raise Failed(503, "too many calls wait to be stored: the store is away", headers=[(b"retry-after", b"5")])
        return self._delivery.begin(self._store(), rollout_id, attempt_id)

    def _end(self, ticket: Ticket | None, call: Call) -> None:
        """Hand the call's span over, if it is to have one and has none yet."""
        if ticket is not None and not ticket.has_ended:
            self._delivery.end(ticket, call.span(ticket.rollout_id, ticket.attempt_id), call.num_bytes)


def _json_object(request: _Request) -> dict[str, Any]:
    """The body; empty if there is none, or it is no JSON and need not be."""
    if not request.body or (request.path not in (CHAT, COMPLETIONS) and "json" not in (request.content_type or "json")):
        return {}
    try:
        return read_object(request.body)
    except ValueError as error:
        raise Failed(400, str(error)) from None


async def _while_listening(receive: Receive, reply: _Reply, work: Awaitable[None]) -> None:
    """Await ``work``, and cancel it when the caller goes away before the reply is whole."""
    task = asyncio.current_task()
    assert task is not None
    has_gone = False

    async def listen() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.is_whole:
            has_gone = True
            task.cancel()

    listener = asyncio.create_task(listen())
    try:
        await work
    except asyncio.CancelledError:
        if not has_gone:
            raise
        task.uncancel()
    finally:
        listener.cancel()
