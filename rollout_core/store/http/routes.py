"""The store's calls as HTTP requests, in one table: it drives the server, the client and the API's description.

Most entries pass a call of the contract on: its name, and the models of what it takes and gives. For the others a
handler says what to do, with the store and the request. Requests are checked by pydantic before, and what they ask for
by the store itself; both say what was wrong by the exceptions of ``http.errors``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, TypeAdapter

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.base.loops import until_stop
from rollout_core.store.changes import ChangePage
from rollout_core.store.contract import LightningStore
from rollout_core.store.encoded_spans import encode_span
from rollout_core.store.http import wire
from rollout_core.store.http.large_bodies import list_fields
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    LightningStoreStatistics,
    PaginatedResult,
    Worker,
    build,
)

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams


class Call(NamedTuple):
    """One request, checked."""

    path: Mapping[str, str]
    body: Any
    """The body, or the query of a GET, as the route's model; None if there is none."""
    key: str | None
    """The client's name for this write."""
    digest: bytes
    """Tells this request from others of the same key; empty without one."""
    repeated: bool
    """Whether the client may have sent it before."""
    final: bool
    """Whether it must not be done unless it is known not to have been done before."""
    reply_headers: dict[str, str]
    is_large: bool = False
    """Whether it takes more than a moment to handle."""


Handler = Callable[[LightningStore, Call], Awaitable[Any]]
"""Returns what is to be sent, or bytes if it is JSON already."""


@dataclass(frozen=True, eq=False)
class Route:
    """A request that the server understands."""

    method: str
    path: str
    name: str
    """In the API's description and in metrics."""
    summary: str
    handler: Handler
    passes: str | None = None
    """The coroutine of the contract that it stands for, if the server only passes it on."""
    is_sent: bool = True
    """Whether our client passes that call on by it; single forms it makes of batches."""
    repeat_matters: Callable[[Mapping[str, Any]], bool] = lambda given: False
    """Whether a second try with these arguments of the call would do more than the first one."""
    takes: Any = None
    """Type of the body, or for a GET of the query."""
    gives: Any = None
    status: int = 200
    may_be_empty: bool = False
    """Whether the body may be missing."""
    remembered: bool = True
    """Whether the reply is kept for a client that may ask again; too costly for what can simply be asked again."""
    in_bulk: bool = False
    """Whether there are so many of it that its replies would push others out of the server's memory."""
    read: Callable[[bytes], Any] | None = field(init=False)
    """Makes the body's bytes what is taken; raises ValidationError."""
    lists: frozenset[str] = field(init=False)
    """The fields of the body that are lists."""

    def __post_init__(self) -> None:
        own = getattr(self.takes, "read", None)
        read = None if self.takes is None else own or TypeAdapter(self.takes).validate_json
        object.__setattr__(self, "read", read)
        object.__setattr__(self, "lists", list_fields(self.takes))

    def read_query(self, parameters: QueryParams) -> Any:
        """The query of a GET. Raises ValidationError."""
        # A list is given by naming it several times.
        given = self.takes.model_fields.keys() & parameters.keys()
        values = {name: parameters.getlist(name) if name in self.lists else parameters[name] for name in given}
        return self.takes.model_validate(values)

    def num_records(self, body: Any) -> int:
        """How many records a body names, or asks to be changed."""
        if isinstance(body, wire.DequeueRequest):
            return body.limit
        return max((len(getattr(body, name) or ()) for name in self.lists), default=0) if body is not None else 0


ROUTES: list[Route] = []


def _route(request: str, name: str, summary: str, handler: Handler, **settings: Any) -> None:
    method, path = request.split()
    ROUTES.append(Route(method, wire.PREFIX + path, name, summary, handler, **settings))


def _handle(request: str, summary: str, **settings: Any) -> Callable[[Handler], Handler]:
    """A request that the decorated function handles."""

    def register(handler: Handler) -> Handler:
        _route(request, handler.__name__.lstrip("_"), summary, handler, **settings)
        return handler

    return register


def _pass(request: str, name: str, summary: str, call: str, *, on_server: str | None = None, **settings: Any) -> None:
    """A request that is the ``call`` of the store; ``on_server`` names a form of it that gives JSON."""

    async def handler(store: LightningStore, given: Call) -> Any:
        return await getattr(store, on_server or call)(**given.path, **_arguments(given.body))

    _route(request, name, summary, handler, passes=call, **settings)


def _arguments(body: Any) -> dict[str, Any]:
    """A body as arguments of a call."""
    if body is None:
        return {}
    if not isinstance(body, BaseModel):
        return {"resources": body}
    if isinstance(body, wire.Changes):
        return {name: getattr(body, name) for name in body.model_fields_set}
    given = dict(body)
    if given.get("limit") == 0:
        # As Agent-lightning's server does.
        raise ConfigError("limit is 0; expected 1 or more, or -1 for no limit")
    return given


def _query(path: str, what: str, summary: str, **settings: Any) -> None:
    """A query, by GET with parameters and by POST with a body."""
    call = f"query_{what}"
    _pass(f"GET {path}", call, summary, call, remembered=False, **settings)
    _pass(f"POST {path}/search", f"search_{what}", summary, call, remembered=False, **settings)


_pass("GET /statistics", "statistics", "Name and counts of the store.", "statistics", gives=LightningStoreStatistics)

# The queue

_pass(
    "POST /queues/rollouts/enqueue",
    "enqueue_rollouts",
    "Queue rollouts, all or none. With rollout ids it may be repeated.",
    "enqueue_many_rollouts",
    takes=wire.EnqueueRequest,
    gives=wire.Rollouts,
    status=201,
)
_pass(
    "POST /queues/rollouts/start",
    "start_rollouts",
    "Start the first attempts of rollouts past the queue, all or none; null for those that have had an attempt.",
    "start_many_rollouts",
    takes=wire.StartManyRequest,
    gives=list[AttemptedRollout | None],
    status=201,
)


@_handle(
    "POST /queues/rollouts/dequeue",
    "Claim the oldest queued rollouts. A repeated request of one idempotency key claims only once.",
    takes=wire.DequeueRequest,
    gives=list[AttemptedRollout],
    may_be_empty=True,
)
async def _dequeue_rollouts(store: LightningStore, call: Call) -> Any:
    body = call.body or wire.DequeueRequest()
    if call.key is None:
        return await store.dequeue_many_rollouts(limit=body.limit, worker_id=body.worker_id)
    claim_id = f"{call.key} {call.digest.hex()}"
    return await store.claim_rollouts(claim_id, limit=body.limit, worker_id=body.worker_id, repeated=call.repeated)


@_handle(
    "POST /queues/rollouts/claim",
    "Claim the oldest queued rollout, with its resources; null if none is queued. Repeated as a dequeue.",
    takes=wire.ClaimRequest,
    gives=wire.Claim | None,
)
async def _claim_task(store: LightningStore, call: Call) -> Any:
    claim_id = f"{call.key or secrets.token_hex(16)} {call.digest.hex()}"
    claimed = await store.claim_task(claim_id, worker_id=call.body.worker_id, repeated=call.repeated)
    return None if claimed is None else claimed._asdict()


@_handle("POST /queues/rollouts/release", "Give back claims that nobody took up.", takes=wire.ReleaseRequest)
async def _release_rollouts(store: LightningStore, call: Call) -> Any:
    await store.release_rollouts(call.body.rollouts)


@_handle(
    "POST /waits/rollouts",
    "Wait until rollouts are finished, or for so many seconds, at most 20; those that are finished.",
    takes=wire.WaitRequest,
    gives=wire.Rollouts,
    remembered=False,
)
async def _wait_for_rollouts(store: LightningStore, call: Call) -> Any:
    given = call.body.timeout
    # Bounded, because nothing ends the wait of a client that has gone.
    seconds = wire.LONGEST_WAIT_SECONDS if given is None else min(given, wire.LONGEST_WAIT_SECONDS)
    started = time.monotonic()
    finished = await store.wait_for_rollouts(rollout_ids=call.body.rollout_ids, timeout=seconds)
    if time.monotonic() - started >= seconds:
        call.reply_headers[wire.UNFINISHED_HEADER] = "true"
    return finished


@_handle(
    "POST /waits/work",
    "Wait until a rollout is queued, or for so many seconds; whether one may be.",
    takes=wire.WorkRequest,
    gives=wire.Work,
    remembered=False,
)
async def _wait_for_work(store: LightningStore, call: Call) -> Any:
    seconds = min(call.body.timeout, wire.LONGEST_WAIT_SECONDS)
    return {"queued": await until_stop(store.wait_for_work(seconds), False)}


@_handle(
    "POST /waits/changes",
    "What was committed after a position, or within so many seconds from now, at most 20, if there is nothing yet.",
    takes=wire.ChangesRequest,
    gives=ChangePage,
    remembered=False,
)
async def _wait_for_changes(store: LightningStore, call: Call) -> Any:
    given = call.body
    # Where the server is to stop nothing was found: the position is that of the caller, or of now.
    after = given.after if given.after is not None else (await store.wait_for_changes()).position
    seconds = min(given.timeout, wire.LONGEST_WAIT_SECONDS)
    wait = store.wait_for_changes(after, kinds=given.kinds, limit=given.limit, timeout=seconds)
    return await until_stop(wait, ChangePage(items=[], position=after))


# Rollouts and attempts

_pass(
    "POST /rollouts",
    "start_rollout",
    "Store a rollout that is worked on at once.",
    "start_rollout",
    takes=wire.StartRequest,
    gives=AttemptedRollout,
    status=201,
)
_query(
    "/rollouts",
    "rollouts",
    "Rollouts that match, with their latest attempts.",
    takes=wire.RolloutsQuery,
    gives=wire.RolloutPage,
)
_pass(
    "POST /rollouts/browse",
    "browse_rollouts",
    "Some rollouts, those stored last first, after the rollout that is named.",
    "browse_rollouts",
    takes=wire.BrowseRequest,
    gives=wire.BrowsedRollouts,
    remembered=False,
)
_pass(
    "POST /rollouts/attempts",
    "start_attempts",
    "Start a new attempt of each of these rollouts, all or none.",
    "start_many_attempts",
    repeat_matters=lambda given: True,
    takes=wire.StartAttemptsRequest,
    gives=list[AttemptedRollout],
    status=201,
)
_pass(
    "POST /rollouts/cancel",
    "cancel_rollouts",
    "Cancel those of these rollouts that have not finished; all as they are then.",
    "cancel_rollouts",
    takes=wire.body_of_call(LightningStore.cancel_rollouts, "CancelRequest"),
    gives=list[wire.AnyRollout],
)


@_handle(
    "POST /rollouts/attempts/update",
    "Update many attempts; refused fenced updates stand in their places.",
    takes=wire.AttemptsUpdate,
    gives=list[wire.AttemptOutcome],
)
async def _update_attempts(store: LightningStore, call: Call) -> Any:
    return _outcomes(await store.update_many_attempts(_updates(call.body), fenced=call.body.fenced))


@_handle(
    "POST /rollouts/attempts/end",
    "Store the last span of each attempt, and apply its fenced update.",
    takes=wire.EndsRequest,
    gives=list[wire.AttemptOutcome],
)
async def _end_attempts(store: LightningStore, call: Call) -> Any:
    updates = _updates(call.body)
    if len(updates) != len(call.body.spans):
        raise ConfigError(f"got {len(call.body.spans)} spans and {len(updates)} updates; expected one for each attempt")
    spans = map(encode_span, call.body.spans)
    return _outcomes(await store.end_attempts(list(zip(spans, updates, strict=True))))


def _updates(body: Any) -> list[AttemptUpdate]:
    return [build(AttemptUpdate, **_arguments(update)) for update in body.updates]


def _outcomes(outcomes: Sequence[Attempt | Conflict]) -> list[dict[str, Any]]:
    return [
        {"conflict": str(outcome)} if isinstance(outcome, Conflict) else {"attempt": outcome} for outcome in outcomes
    ]


_pass(
    "GET /rollouts/{rollout_id}",
    "get_rollout",
    "One rollout with its latest attempt; null if it is unknown.",
    "get_rollout_by_id",
    gives=wire.AnyRollout | None,
)
_pass(
    "POST /rollouts/{rollout_id}",
    "update_rollout",
    "Replace the given fields of a rollout.",
    "update_rollout",
    repeat_matters=lambda given: given["status"] in ("queuing", "requeuing"),  # queued twice, it might be run twice
    takes=wire.RolloutChanges,
    gives=wire.AnyRollout,
)
_pass(
    "POST /rollouts/{rollout_id}/attempts",
    "start_attempt",
    "Start a new attempt of a rollout.",
    "start_attempt",
    is_sent=False,
    takes=wire.StartAttemptRequest,
    gives=AttemptedRollout,
    status=201,
    may_be_empty=True,
)
_query(
    "/rollouts/{rollout_id}/attempts",
    "attempts",
    "Attempts of a rollout.",
    takes=wire.AttemptsQuery,
    gives=PaginatedResult[Attempt],
)
_pass(
    "GET /rollouts/{rollout_id}/attempts/latest",
    "get_latest_attempt",
    "The latest attempt of a rollout; null if there is none.",
    "get_latest_attempt",
    gives=Attempt | None,
)
_pass(
    "POST /rollouts/{rollout_id}/attempts/{attempt_id}",
    "update_attempt",
    "Update one attempt, which may be named ``latest``.",
    "update_attempt",
    is_sent=False,
    takes=wire.AttemptChanges,
    gives=Attempt,
)


# Spans


@_handle(
    "POST /spans",
    "Store one span; null if it is a duplicate.",
    takes=Span,
    gives=Span | None,
    status=201,
    in_bulk=True,
)
async def _add_span(store: LightningStore, call: Call) -> Any:
    return await store.add_span(call.body)


@_handle(
    "POST /spans/batch",
    "Store spans, all or none; the places of duplicates, which are left out.",
    takes=wire.SpansRequest,
    gives=wire.SpansReply,
    status=201,
    in_bulk=True,
)
async def _add_spans(store: LightningStore, call: Call) -> Any:
    is_new = await store.add_encoded_spans(call.body.encoded())
    return {"duplicates": [place for place, new in enumerate(is_new) if not new]}


_query(
    "/spans",
    "spans",
    "Spans of a rollout, of one attempt or of all.",
    takes=wire.SpansQuery,
    gives=PaginatedResult[Span],
    on_server="query_spans_json",
)
_pass(
    "POST /spans/latest",
    "query_latest_spans",
    "Spans of the latest attempts of many rollouts.",
    "query_many_spans",
    takes=wire.body_of_call(LightningStore.query_many_spans, "LatestSpansQuery"),
    gives=list[Span],
    remembered=False,
)


@_handle(
    "POST /spans/next",
    "The next span sequence id of a rollout.",
    takes=wire.SequenceIdRequest,
    gives=wire.SequenceIdReply,
)
async def _next_sequence_id(store: LightningStore, call: Call) -> Any:
    return {"sequence_id": await store.get_next_span_sequence_id(**dict(call.body))}


@_handle(
    "POST /spans/next/batch",
    "The next span sequence ids of many attempts, in order.",
    takes=wire.SequenceIdsRequest,
    gives=wire.SequenceIdsReply,
)
async def _next_sequence_ids(store: LightningStore, call: Call) -> Any:
    return {"sequence_ids": list(await store.get_many_span_sequence_ids(**dict(call.body)))}


# Resources

_query(
    "/resources",
    "resources",
    "Snapshots of resources that match.",
    takes=wire.ResourcesQuery,
    gives=PaginatedResult[ResourcesUpdate],
)
_pass(
    "POST /resources",
    "add_resources",
    "Store a snapshot of resources, the latest now.",
    "add_resources",
    takes=NamedResources,
    gives=ResourcesUpdate,
    status=201,
)
_pass(
    "GET /resources/latest",
    "get_latest_resources",
    "The snapshot that was added or updated last; null if there is none.",
    "get_latest_resources",
    gives=ResourcesUpdate | None,
)
_pass(
    "GET /resources/{resources_id}",
    "get_resources",
    "One snapshot; null if it is unknown.",
    "get_resources_by_id",
    gives=ResourcesUpdate | None,
)
_pass(
    "POST /resources/{resources_id}",
    "update_resources",
    "Replace a snapshot, or create it; it is the latest now.",
    "update_resources",
    takes=NamedResources,
    gives=ResourcesUpdate,
)

# Workers

_query("/workers", "workers", "Workers that match.", takes=wire.WorkersQuery, gives=PaginatedResult[Worker])
_pass(
    "GET /workers/{worker_id}",
    "get_worker",
    "One worker; null if it is unknown.",
    "get_worker_by_id",
    gives=Worker | None,
)
_pass(
    "POST /workers/{worker_id}",
    "update_worker",
    "Record a worker's heartbeat.",
    "update_worker",
    takes=wire.HeartbeatRequest,
    gives=Worker,
    may_be_empty=True,
)
