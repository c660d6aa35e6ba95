"""A LightningStore that talks to a server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from pydantic import TypeAdapter

from rollout_core.base.errors import ConfigError, Conflict, NotFound, Recoverable
from rollout_core.store.changes import PAGE_CHANGES, ChangeKind, ChangePage, check_kinds
from rollout_core.store.checks import check_id_list, check_ids, resources_json
from rollout_core.store.codec import encode_bytes, model_fields
from rollout_core.store.contract import AttemptEnd, LightningStore
from rollout_core.store.encoded_spans import encode_ends, span_json
from rollout_core.store.http import wire
from rollout_core.store.http.routes import ROUTES, Route
from rollout_core.store.http.transport import Repeat, Transport, TransportSettings, path_part
from rollout_core.store.resources import ClaimedTask, NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    LightningStoreCapabilities,
    Rollout,
    RolloutConfig,
    RolloutMode,
    TaskInput,
    Unset,
    as_model,
    enqueue_request,
)
from rollout_core.web.certificates import TLSFiles

logger = logging.getLogger(__name__)

LONGEST_TIMEOUT_SECONDS = 0.1
"""Longest timeout that ``wait_for_rollouts`` of a client takes; the contract's limit, not ours."""

_ROLLOUTS = TypeAdapter[list[Rollout]](wire.Rollouts)
_CLAIMED = TypeAdapter(list[AttemptedRollout])
_CLAIM = TypeAdapter[wire.Claim | None](wire.Claim | None)
_STARTED = TypeAdapter(AttemptedRollout)
_MANY_STARTED = TypeAdapter(list[AttemptedRollout | None])
_OUTCOMES = TypeAdapter(list[wire.AttemptOutcome])
_RESOURCES = TypeAdapter(ResourcesUpdate)
_OLDER_NAMES = {"status": "status_in", "rollout_ids": "rollout_id_in"}
"""Of filters, as the contract has them; the newer ones win."""


def _sent(method: Callable[..., Any], route: Route) -> Callable[..., Any]:
    """A method of the contract, passed on by its route."""
    name = method.__name__
    signature = inspect.signature(method)
    defaults = {parameter.name: parameter.default for parameter in signature.parameters.values()}
    in_path = re.findall(r"{(\w+)}", route.path)
    adapter = TypeAdapter(route.gives)
    may_be_none = type(None) in get_args(route.gives)

    @functools.wraps(method)
    async def call(self: LightningStoreClient, *args: Any, **kwargs: Any) -> Any:
        try:
            given = {**defaults, **signature.bind(self, *args, **kwargs).arguments}
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        del given["self"]
        path = route.path.format(**{part: path_part(given.pop(part), part) for part in in_path})
        transport = self._transport
        if route.method == "GET":
            try:
                return adapter.validate_json(await transport.get(path))
            except Recoverable as error:
                if not may_be_none:
                    raise
                logger.error("GET %s yields nothing: %s", path, error)
                return None
        body = _body(route, given)
        # The server refuses empty pages, as the one that it stands in for; the contract wants their total.
        is_empty = body.get("limit") == 0 and "offset" in body
        data = _json({**body, "limit": 1} if is_empty else body, name)
        repeat = Repeat.MATTERS if route.repeat_matters(given) else Repeat.HARMLESS
        found = adapter.validate_json(await transport.post(path, data, repeat))
        return found.model_copy(update={"items": [], "limit": 0}) if is_empty else found

    # Taken over by ``wraps`` from the contract, where the method is abstract.
    call.__dict__.pop("__isabstractmethod__", None)
    return call


def _json(body: Any, what: str) -> bytes:
    """A request's body. Raises ConfigError, which names the place, for what JSON cannot hold."""
    return encode_bytes(body, what, model_fields)


def _body(route: Route, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments as the fields of a request's body."""
    body = _given(**given)
    for older, name in _OLDER_NAMES.items():
        if name in route.lists and older in body:
            value = body.pop(older)
            body[name] = value if body[name] is None else body[name]
    for name in route.lists & body.keys():
        # A text is no list of texts: the server shall see it as it is.
        if body[name] is not None and not isinstance(body[name], str):
            body[name] = list(body[name])
    return body


def _given(**values: Any) -> dict[str, Any]:
    """The arguments that were given."""
    return {name: value for name, value in values.items() if not isinstance(value, Unset)}


def _rollouts_of_claim(data: bytes) -> list[AttemptedRollout]:
    found = _CLAIM.validate_json(data)
    return [] if found is None else [found.rollout]


def _read_outcomes(data: bytes) -> list[Attempt | Conflict]:
    return [outcome.attempt or Conflict(outcome.conflict or "refused") for outcome in _OUTCOMES.validate_json(data)]


class LightningStoreClient(LightningStore):
    """A LightningStore on a server; ``server_address`` is ``http://host:port``, with a path if there is one in front.

    As an attribute ``server_address`` is that of the routes, which ends in ``/v1/agl``, as users of Agent-lightning
    know it, and ``server_address_root`` is what was given. Either is understood as the argument.

    ``retry_delays`` are the waits before each further try of a request that got no answer, ``health_retry_delays``
    those between looks at whether the server is well again; ``request_timeout`` and ``connection_timeout`` bound each
    try. All in seconds. ``api_key`` is what the server was started with. ``tls`` are the files by which client and
    server know each other; default: with https those that the environment names, and with none there the authorities
    that this machine trusts.

    What a call raises on the server it raises here. When no try was answered, calls raise Recoverable, but for those
    of which the contract says that they yield nothing then: dequeues an empty list or None, and gets None, with an
    entry in the log. A write is never done twice, see ``transport``. A dequeue that is cancelled, or whose answer was
    lost, leaks no claim.

    It may be used from any number of tasks, threads, event loops and, once forked or unpickled, processes. The
    pickle holds the arguments above, the key included.
    """

    def __init__(
        self,
        server_address: str,
        *,
        retry_delays: Sequence[float] = (1.0, 2.0, 5.0),
        health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
        api_key: str | None = None,
        tls: TLSFiles | None = None,
    ) -> None:
        if tls is None and server_address.lower().startswith("https:"):
            tls = TLSFiles.from_environment()
        self._settings = {
            "retry_delays": tuple(retry_delays),
            "health_retry_delays": tuple(health_retry_delays),
            "request_timeout": request_timeout,
            "connection_timeout": connection_timeout,
            "api_key": api_key,
            "tls": tls,
        }
        self.server_address_root = server_address.rstrip("/").removesuffix(wire.PREFIX)
        self.server_address = self.server_address_root + wire.PREFIX
        self._transport = Transport(TransportSettings(self.server_address_root, **self._settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._settings), (self.server_address_root,)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Safe for tasks and threads; all clients see the server's one store; OTLP is at the server."""
        return LightningStoreCapabilities(thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=True)

    def otlp_traces_endpoint(self) -> str:
        """URL for an OTLP/HTTP exporter."""
        return self.server_address_root + wire.TRACES_PATH

    async def is_healthy(self) -> bool:
        """Whether the server answers now."""
        try:
            await self._transport.get(wire.HEALTH_PATH)
        except Recoverable:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        await self._transport.close()

    # The queue

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        # With an id of our own a repeated request is the same rollout, not another one.
        named = [
            {**request.__dict__, "rollout_id": f"ro-{secrets.token_hex(10)}"}
            if request.rollout_id is None
            else request.__dict__
            for request in (as_model(EnqueueRolloutRequest, given) for given in rollouts)
        ]
        data = await self._post("/queues/rollouts/enqueue", {"rollouts": named}, "input")
        return _ROLLOUTS.validate_json(data)

    async def start_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout | None]:
        requests = [as_model(EnqueueRolloutRequest, given).__dict__ for given in rollouts]
        body = {"rollouts": requests, "worker_id": worker_id}
        return _MANY_STARTED.validate_json(await self._post("/queues/rollouts/start", body, "input", Repeat.MATTERS))

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        check_ids(worker_id)
        if limit <= 0:
            return []
        # No more than a request may ask for: "up to" the limit is what is promised.
        body = {"limit": min(limit, wire.MAX_RECORDS), "worker_id": worker_id}
        data = await self._claim("/queues/rollouts/dequeue", body, _CLAIMED.validate_json)
        return [] if data is None else _CLAIMED.validate_json(data)

    async def claim_task(
        self, claim_id: str, *, worker_id: str | None = None, repeated: bool = False
    ) -> ClaimedTask | None:
        check_ids(worker_id)
        data = await self._claim("/queues/rollouts/claim", {"worker_id": worker_id}, _rollouts_of_claim)
        found = None if data is None else _CLAIM.validate_json(data)
        return None if found is None else ClaimedTask(found.rollout, found.resources)

    async def _claim(
        self, path: str, body: dict[str, Any], rollouts_of: Callable[[bytes], list[AttemptedRollout]]
    ) -> bytes | None:
        """The reply to a claim; None if there was none. A claim whose caller is cancelled is given back."""
        claim = asyncio.ensure_future(self._claim_now(wire.PREFIX + path, _json(body, "worker_id"), rollouts_of))
        try:
            return await asyncio.shield(claim)
        except Recoverable as error:
            logger.error("nothing could be claimed: %s", error)
            return None
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(claim, rollouts_of))
            raise

    async def _claim_now(self, path: str, data: bytes, rollouts_of: Callable[[bytes], list[AttemptedRollout]]) -> bytes:
        """What earlier claims got no answer to is given back first: others may have done it by now, which the store
        knows, and the server's memory of its answers does not."""
        while True:
            reply, lost = await self._transport.claim(path, data)
            if lost is None:
                return reply
            if claimed := rollouts_of(reply):
                try:
                    with contextlib.suppress(NotFound):
                        await self.release_rollouts(claimed)
                except Recoverable:
                    self._transport.still_lost(path, data, lost)
                    raise

    async def _give_back(
        self, claim: asyncio.Future[bytes], rollouts_of: Callable[[bytes], list[AttemptedRollout]]
    ) -> None:
        try:
            claimed = rollouts_of(await claim)
            if claimed:
                await self.release_rollouts(claimed)
        except Recoverable as error:
            logger.warning("the claim of a cancelled dequeue may stand until its lease ends: %s", error)

    async def release_rollouts(self, claimed: Sequence[AttemptedRollout]) -> None:
        await self._post("/queues/rollouts/release", {"rollouts": list(claimed)}, "rollouts")

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        request = enqueue_request(input, mode, resources_id, config, metadata)
        body = {**request.__dict__, "worker_id": worker_id}
        return _STARTED.validate_json(await self._post("/rollouts", body, "input", Repeat.MATTERS))

    # Updates

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        updates = [as_model(AttemptUpdate, given) for given in updates]
        body = {"updates": [_given(**update.__dict__) for update in updates], "fenced": fenced}
        # The latest attempt may be another one by the time of a second try.
        matters = any(update.attempt_id == "latest" for update in updates)
        repeat = Repeat.MATTERS if matters else Repeat.HARMLESS
        return _read_outcomes(await self._post("/rollouts/attempts/update", body, "attempt", repeat))

    async def end_attempts(self, ends: Sequence[AttemptEnd]) -> Sequence[Attempt | Conflict]:
        spans, updates = encode_ends(ends)
        # The server numbers those without a number; JSON's null would not pass for one.
        numbered = [span._replace(sequence_id=span.sequence_id or 0) for span in spans]
        sent = b",".join(span_json(span[0], span[1:]) for span in numbered)
        changes = _json([_given(**update.__dict__) for update in updates], "updates")
        body = b'{"spans":[%b],"updates":%b}' % (sent, changes)
        reply = await self._transport.post(wire.PREFIX + "/rollouts/attempts/end", body, Repeat.HARMLESS)
        return _read_outcomes(reply)

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        spans = [as_model(Span, given) for given in spans]
        reply = await self._transport.post(wire.PREFIX + "/spans/batch", wire.dump_spans(spans), Repeat.KNOWN)
        duplicates = set(wire.SpansReply.model_validate_json(reply).duplicates)
        return [span for place, span in enumerate(spans) if place not in duplicates]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        # Numbers given out twice leave a gap, which the contract allows.
        body = {"rollout_attempt_ids": list(rollout_attempt_ids)}
        reply = await self._post("/spans/next/batch", body, "rollout_attempt_ids")
        return wire.SequenceIdsReply.model_validate_json(reply).sequence_ids

    # Waiting

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait as the contract says. A timeout of more than 0.1 s is a ConfigError; None waits as long as it takes."""
        if timeout is not None and timeout > LONGEST_TIMEOUT_SECONDS:
            raise ConfigError(
                f"timeout is {timeout} s; a client waits at most {LONGEST_TIMEOUT_SECONDS} s in one call, or with None "
                "as long as it takes"
            )
        check_id_list(rollout_ids)
        finished: dict[str, Rollout] = {}
        while True:
            waited = [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id not in finished]
            # Each request waits a while at the server, so none outlives the patience of whatever is in between.
            seconds = min(wire.LONGEST_WAIT_SECONDS, self._transport.settings.request_timeout / 2)
            body = {"rollout_ids": waited, "timeout": seconds if timeout is None else timeout}
            data = _json(body, "rollout_ids")
            reply = await self._transport.send("POST", wire.PREFIX + "/waits/rollouts", data, Repeat.HARMLESS)
            finished.update({rollout.rollout_id: rollout for rollout in _ROLLOUTS.validate_json(reply.data)})
            if timeout is not None or wire.UNFINISHED_HEADER not in reply.headers:
                return [finished[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in finished]

    async def wait_for_work(self, timeout: float) -> bool:
        seconds = min(timeout, wire.LONGEST_WAIT_SECONDS, self._transport.settings.request_timeout / 2)
        data = _json({"timeout": seconds}, "timeout")
        reply = await self._transport.send("POST", wire.PREFIX + "/waits/work", data, Repeat.HARMLESS)
        return wire.Work.model_validate_json(reply.data).queued

    async def wait_for_changes(
        self,
        after: str | None = None,
        *,
        kinds: Sequence[ChangeKind] | None = None,
        limit: int = PAGE_CHANGES,
        timeout: float = 0.0,
    ) -> ChangePage:
        check_kinds(kinds)
        seconds = min(timeout, wire.LONGEST_WAIT_SECONDS, self._transport.settings.request_timeout / 2)
        kept = None if kinds is None else list(kinds)
        data = _json({"after": after, "kinds": kept, "limit": limit, "timeout": seconds}, "wait_for_changes")
        reply = await self._transport.send("POST", wire.PREFIX + "/waits/changes", data, Repeat.HARMLESS)
        return ChangePage.model_validate_json(reply.data)

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self._send_resources("/resources", resources)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return await self._send_resources(f"/resources/{path_part(resources_id, 'resources_id')}", resources)

    async def _send_resources(self, path: str, resources: NamedResources) -> ResourcesUpdate:
        data = resources_json(resources).encode()
        return _RESOURCES.validate_json(await self._transport.post(wire.PREFIX + path, data, Repeat.MATTERS))

    # Requests

    async def _post(self, path: str, body: Any, what: str, repeat: Repeat = Repeat.HARMLESS) -> bytes:
        return await self._transport.post(wire.PREFIX + path, _json(body, what), repeat)


# Of a query's two routes the one with a body, which comes second.
for _name, _route in {route.passes: route for route in ROUTES if route.passes is not None and route.is_sent}.items():
    if _name not in vars(LightningStoreClient):  # those that are there do more than pass the call on
        setattr(LightningStoreClient, _name, _sent(getattr(LightningStore, _name), _route))
