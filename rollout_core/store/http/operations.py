"""The store's operations as HTTP requests: for each a path, the bodies it takes and gives, and what it does.

A handler gets the store and the request, and returns what is to be sent. Requests are checked by pydantic before, and
what they ask for by the store itself; both say what was wrong by the errors of ``wire``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import QueryParams

from rollout_core.base.errors import ConfigError, Conflict
from rollout_core.store.base import LightningStore
from rollout_core.store.http import wire
from rollout_core.store.http.large_bodies import list_fields
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    LightningStoreStatistics,
    PaginatedResult,
    Worker,
    build,
)


class Call(NamedTuple):
    """One request, checked."""

    path: Mapping[str, str]
    body: Any
    """The body, or the query of a GET, as the operation's model; None if there is none."""
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
class Operation:
    """A request that the server understands."""

    method: str
    path: str
    handler: Handler
    takes: Any = None
    """Type of the body, or for a GET of the query."""
    gives: Any = None
    status: int = 200
    may_be_empty: bool = False
    """Whether the body may be missing."""
    remembered: bool = True
    """Whether the reply is kept for a client that may ask again; too costly for what can simply be asked again."""
    read: Callable[[bytes], Any] | None = field(init=False)
    """Makes the body's bytes what is taken; raises ValidationError."""
    lists: frozenset[str] = field(init=False)
    """The fields of the body that are lists of records."""

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

    @property
    def name(self) -> str:
        """Name in the API's description and in metrics."""
        return self.handler.__name__.lstrip("_")


OPERATIONS: list[Operation] = []


def _operation(method: str, path: str, **settings: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        OPERATIONS.append(Operation(method, wire.PREFIX + path, handler, **settings))
        return handler

    return register


def _query(path: str, *, takes: type[BaseModel], gives: Any) -> Callable[[Handler], Handler]:
    """A query, by GET with parameters and by POST with a body."""

    def register(handler: Handler) -> Handler:
        _operation("GET", path, takes=takes, gives=gives, remembered=False)(handler)

        async def search(store: LightningStore, call: Call) -> Any:
            return await handler(store, call)

        search.__name__ = handler.__name__.replace("query", "search")
        search.__doc__ = handler.__doc__
        _operation("POST", f"{path}/search", takes=takes, gives=gives, remembered=False)(search)
        return handler

    return register


def _page(query: Any) -> dict[str, Any]:
    """The query as arguments. An empty page is refused, as Agent-lightning's server does."""
    if query.limit == 0:
        raise ConfigError("limit is 0; expected 1 or more, or -1 for no limit")
    return dict(query)


def _given(changes: BaseModel, *but: str) -> dict[str, Any]:
    """The fields that the client has set, None included."""
    return {name: getattr(changes, name) for name in changes.model_fields_set if name not in but}


@_operation("GET", "/statistics", gives=LightningStoreStatistics)
async def _statistics(store: LightningStore, call: Call) -> Any:
    """Name and counts of the store."""
    return await store.statistics()


# The queue


@_operation("POST", "/queues/rollouts/enqueue", takes=wire.EnqueueRequest, gives=wire.Rollouts, status=201)
async def _enqueue_rollouts(store: LightningStore, call: Call) -> Any:
    """Queue rollouts, all or none. With rollout ids it may be repeated."""
    return await store.enqueue_many_rollouts(call.body.rollouts)


@_operation(
    "POST", "/queues/rollouts/start", takes=wire.StartManyRequest, gives=list[AttemptedRollout | None], status=201
)
async def _start_rollouts(store: LightningStore, call: Call) -> Any:
    """Start the first attempts of rollouts past the queue, all or none; null for those that have had an attempt."""
    return await store.start_many_rollouts(call.body.rollouts, worker_id=call.body.worker_id)


@_operation(
    "POST", "/queues/rollouts/dequeue", takes=wire.DequeueRequest, gives=list[AttemptedRollout], may_be_empty=True
)
async def _dequeue_rollouts(store: LightningStore, call: Call) -> Any:
    """Claim the oldest queued rollouts. A repeated request of one idempotency key claims only once."""
    body = call.body or wire.DequeueRequest()
    if call.key is None:
        return await store.dequeue_many_rollouts(limit=body.limit, worker_id=body.worker_id)
    claim_id = f"{call.key} {call.digest.hex()}"
    return await store.claim_rollouts(claim_id, limit=body.limit, worker_id=body.worker_id, repeated=call.repeated)


@_operation("POST", "/queues/rollouts/release", takes=wire.ReleaseRequest)
async def _release_rollouts(store: LightningStore, call: Call) -> Any:
    """Give back claims that nobody took up."""
    await store.release_rollouts(call.body.rollouts)


@_operation("POST", "/waits/rollouts", takes=wire.WaitRequest, gives=wire.Rollouts, remembered=False)
async def _wait_for_rollouts(store: LightningStore, call: Call) -> Any:
    """Wait until rollouts are finished, or for so many seconds; those that are finished."""
    timeout = call.body.timeout
    started = time.monotonic()
    finished = await store.wait_for_rollouts(rollout_ids=call.body.rollout_ids, timeout=timeout)
    if timeout is not None and time.monotonic() - started >= timeout:
        call.reply_headers[wire.UNFINISHED_HEADER] = "true"
    return finished


# Rollouts


@_operation("POST", "/rollouts", takes=wire.StartRequest, gives=AttemptedRollout, status=201)
async def _start_rollout(store: LightningStore, call: Call) -> Any:
    """Store a rollout that is worked on at once."""
    return await store.start_rollout(**dict(call.body))


@_query("/rollouts", takes=wire.RolloutsQuery, gives=wire.RolloutPage)
async def _query_rollouts(store: LightningStore, call: Call) -> Any:
    """Rollouts that match, with their latest attempts."""
    return await store.query_rollouts(**_page(call.body))


@_operation("POST", "/rollouts/attempts", takes=wire.StartAttemptsRequest, gives=list[AttemptedRollout], status=201)
async def _start_attempts(store: LightningStore, call: Call) -> Any:
    """Start a new attempt of each of these rollouts, all or none."""
    return await store.start_many_attempts(call.body.rollout_ids, worker_id=call.body.worker_id)


@_operation("POST", "/rollouts/attempts/update", takes=wire.AttemptsUpdate, gives=list[wire.AttemptOutcome])
async def _update_attempts(store: LightningStore, call: Call) -> Any:
    """Update many attempts; refused fenced updates stand in their places."""
    updates = [build(AttemptUpdate, **_given(update)) for update in call.body.updates]
    outcomes = await store.update_many_attempts(updates, fenced=call.body.fenced)
    return [
        {"conflict": str(outcome)} if isinstance(outcome, Conflict) else {"attempt": outcome} for outcome in outcomes
    ]


@_operation("GET", "/rollouts/{rollout_id}", gives=wire.AnyRollout | None)
async def _get_rollout(store: LightningStore, call: Call) -> Any:
    """One rollout with its latest attempt; null if it is unknown."""
    return await store.get_rollout_by_id(call.path["rollout_id"])


@_operation("POST", "/rollouts/{rollout_id}", takes=wire.RolloutChanges, gives=wire.AnyRollout)
async def _update_rollout(store: LightningStore, call: Call) -> Any:
    """Replace the given fields of a rollout."""
    return await store.update_rollout(call.path["rollout_id"], **_given(call.body))


@_operation(
    "POST",
    "/rollouts/{rollout_id}/attempts",
    takes=wire.StartAttemptRequest,
    gives=AttemptedRollout,
    status=201,
    may_be_empty=True,
)
async def _start_attempt(store: LightningStore, call: Call) -> Any:
    """Start a new attempt of a rollout."""
    return await store.start_attempt(call.path["rollout_id"], call.body.worker_id if call.body else None)


@_query("/rollouts/{rollout_id}/attempts", takes=wire.AttemptsQuery, gives=PaginatedResult[Attempt])
async def _query_attempts(store: LightningStore, call: Call) -> Any:
    """Attempts of a rollout."""
    return await store.query_attempts(call.path["rollout_id"], **_page(call.body))


@_operation("GET", "/rollouts/{rollout_id}/attempts/latest", gives=Attempt | None)
async def _get_latest_attempt(store: LightningStore, call: Call) -> Any:
    """The latest attempt of a rollout; null if there is none."""
    return await store.get_latest_attempt(call.path["rollout_id"])


@_operation("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", takes=wire.AttemptChanges, gives=Attempt)
async def _update_attempt(store: LightningStore, call: Call) -> Any:
    """Update one attempt, which may be named ``latest``."""
    return await store.update_attempt(call.path["rollout_id"], call.path["attempt_id"], **_given(call.body))


# Spans


@_operation("POST", "/spans", takes=Span, gives=Span | None, status=201)
async def _add_span(store: LightningStore, call: Call) -> Any:
    """Store one span; null if it is a duplicate."""
    return await store.add_span(call.body)


@_operation("POST", "/spans/batch", takes=wire.SpansRequest, gives=wire.SpansReply, status=201)
async def _add_spans(store: LightningStore, call: Call) -> Any:
    """Store spans, all or none; the places of duplicates, which are left out."""
    is_new = await store.add_encoded_spans(call.body.encoded())
    return {"duplicates": [place for place, new in enumerate(is_new) if not new]}


@_query("/spans", takes=wire.SpansQuery, gives=PaginatedResult[Span])
async def _query_spans(store: LightningStore, call: Call) -> Any:
    """Spans of a rollout, of one attempt or of all."""
    return await store.query_spans_json(**_page(call.body))


@_operation("POST", "/spans/latest", takes=wire.LatestSpansQuery, gives=list[Span], remembered=False)
async def _query_latest_spans(store: LightningStore, call: Call) -> Any:
    """Spans of the latest attempts of many rollouts."""
    return await store.query_many_spans(call.body.rollout_ids, name=call.body.name)


@_operation("POST", "/spans/next", takes=wire.SequenceIdRequest, gives=wire.SequenceIdReply)
async def _next_sequence_id(store: LightningStore, call: Call) -> Any:
    """The next span sequence id of a rollout."""
    return {"sequence_id": await store.get_next_span_sequence_id(call.body.rollout_id, call.body.attempt_id)}


@_operation("POST", "/spans/next/batch", takes=wire.SequenceIdsRequest, gives=wire.SequenceIdsReply)
async def _next_sequence_ids(store: LightningStore, call: Call) -> Any:
    """The next span sequence ids of many attempts, in order."""
    return {"sequence_ids": list(await store.get_many_span_sequence_ids(call.body.rollout_attempt_ids))}


# Resources


@_query("/resources", takes=wire.ResourcesQuery, gives=PaginatedResult[ResourcesUpdate])
async def _query_resources(store: LightningStore, call: Call) -> Any:
    """Snapshots of resources that match."""
    return await store.query_resources(**_page(call.body))


@_operation("POST", "/resources", takes=NamedResources, gives=ResourcesUpdate, status=201)
async def _add_resources(store: LightningStore, call: Call) -> Any:
    """Store a snapshot of resources, the latest now."""
    return await store.add_resources(call.body)


@_operation("GET", "/resources/latest", gives=ResourcesUpdate | None)
async def _get_latest_resources(store: LightningStore, call: Call) -> Any:
    """The snapshot that was added or updated last; null if there is none."""
    return await store.get_latest_resources()


@_operation("GET", "/resources/{resources_id}", gives=ResourcesUpdate | None)
async def _get_resources(store: LightningStore, call: Call) -> Any:
    """One snapshot; null if it is unknown."""
    return await store.get_resources_by_id(call.path["resources_id"])


@_operation("POST", "/resources/{resources_id}", takes=NamedResources, gives=ResourcesUpdate)
async def _update_resources(store: LightningStore, call: Call) -> Any:
    """Replace a snapshot, or create it; it is the latest now."""
    return await store.update_resources(call.path["resources_id"], call.body)


# Workers


@_query("/workers", takes=wire.WorkersQuery, gives=PaginatedResult[Worker])
async def _query_workers(store: LightningStore, call: Call) -> Any:
    """Workers that match."""
    return await store.query_workers(**_page(call.body))


@_operation("GET", "/workers/{worker_id}", gives=Worker | None)
async def _get_worker(store: LightningStore, call: Call) -> Any:
    """One worker; null if it is unknown."""
    return await store.get_worker_by_id(call.path["worker_id"])


@_operation("POST", "/workers/{worker_id}", takes=wire.HeartbeatRequest, gives=Worker, may_be_empty=True)
async def _update_worker(store: LightningStore, call: Call) -> Any:
    """Record a worker's heartbeat."""
    given = _given(call.body) if call.body else {}
    return await store.update_worker(call.path["worker_id"], given.get("heartbeat_stats", UNSET))
