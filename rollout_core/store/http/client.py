"""A LightningStore that talks to a server."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter

from rollout_core.base.errors import ConfigError, Conflict, Recoverable
from rollout_core.store.base import LightningStore
from rollout_core.store.checks import check_id_list, check_ids, resources_json
from rollout_core.store.http import wire
from rollout_core.store.http.transport import Repeat, Transport, TransportSettings, path_part
from rollout_core.store.resources import NamedResources, ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptUpdate,
    EnqueueRolloutRequest,
    FilterLogic,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    Unset,
    Worker,
    WorkerStatus,
    as_model,
    enqueue_request,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)
Page = TypeVar("Page", bound=PaginatedResult[Any])

LONGEST_TIMEOUT_SECONDS = 0.1
"""Longest timeout that ``wait_for_rollouts`` of a client takes; the contract's limit, not ours."""

_ROLLOUT = TypeAdapter[Rollout](wire.AnyRollout)
_ROLLOUTS = TypeAdapter[list[Rollout]](wire.Rollouts)
_ROLLOUT_OR_NONE = TypeAdapter[Rollout | None](wire.AnyRollout | None)
_CLAIMED = TypeAdapter(list[AttemptedRollout])
_STARTED = TypeAdapter(AttemptedRollout)
_MANY_STARTED = TypeAdapter(list[AttemptedRollout | None])
_OUTCOMES = TypeAdapter(list[wire.AttemptOutcome])
_ATTEMPT_OR_NONE = TypeAdapter[Attempt | None](Attempt | None)
_SPANS = TypeAdapter(list[Span])
_RESOURCES = TypeAdapter(ResourcesUpdate)
_RESOURCES_OR_NONE = TypeAdapter[ResourcesUpdate | None](ResourcesUpdate | None)
_WORKER_OR_NONE = TypeAdapter[Worker | None](Worker | None)
_STATISTICS = TypeAdapter(LightningStoreStatistics)
_ROLLOUT_PAGE = TypeAdapter[PaginatedResult[Rollout]](wire.RolloutPage)
_ATTEMPT_PAGE = TypeAdapter(PaginatedResult[Attempt])
_SPAN_PAGE = TypeAdapter(PaginatedResult[Span])
_RESOURCES_PAGE = TypeAdapter(PaginatedResult[ResourcesUpdate])
_WORKER_PAGE = TypeAdapter(PaginatedResult[Worker])


class LightningStoreClient(LightningStore):
    """A LightningStore on a server; ``server_address`` is ``http://host:port``, with a path if there is one in front.

    ``retry_delays`` are the waits before each further try of a request that got no answer, ``health_retry_delays``
    those between looks at whether the server is well again; ``request_timeout`` and ``connection_timeout`` bound each
    try. All in seconds. ``api_key`` is what the server was started with.

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
    ) -> None:
        self._settings = {
            "retry_delays": tuple(retry_delays),
            "health_retry_delays": tuple(health_retry_delays),
            "request_timeout": request_timeout,
            "connection_timeout": connection_timeout,
            "api_key": api_key,
        }
        self.server_address = server_address.rstrip("/")
        self._transport = Transport(TransportSettings(self.server_address, **self._settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._settings), (self.server_address,)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Safe for tasks and threads; all clients see the server's one store; OTLP is at the server."""
        return LightningStoreCapabilities(thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=True)

    async def statistics(self) -> LightningStoreStatistics:
        """Name and counts of the server's store."""
        return _STATISTICS.validate_json(await self._get("/statistics"))

    def otlp_traces_endpoint(self) -> str:
        """URL for an OTLP/HTTP exporter."""
        return self.server_address + wire.TRACES_PATH

    async def is_healthy(self) -> bool:
        """Whether the server answers now."""
        try:
            await self._transport.get(wire.PREFIX + "/health")
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
        claim = asyncio.ensure_future(self._post("/queues/rollouts/dequeue", body, "worker_id", Repeat.KNOWN))
        try:
            return _CLAIMED.validate_json(await asyncio.shield(claim))
        except Recoverable as error:
            logger.error("nothing could be claimed: %s", error)
            return []
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(claim))
            raise

    async def _give_back(self, claim: asyncio.Future[bytes]) -> None:
        """Release what a dequeue claimed that its caller no longer waits for."""
        try:
            claimed = _CLAIMED.validate_json(await claim)
            if claimed:
                await self.release_rollouts(claimed)
        except Recoverable as error:
            logger.warning("the claim of a cancelled dequeue stands until its lease ends: %s", error)

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

    async def start_many_attempts(
        self, rollout_ids: Sequence[str], *, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        body = {"rollout_ids": _plain(rollout_ids), "worker_id": worker_id}
        return _CLAIMED.validate_json(await self._post("/rollouts/attempts", body, "rollout_ids", Repeat.MATTERS))

    # Updates

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        changes = _given(
            input=input, mode=mode, resources_id=resources_id, status=status, config=config, metadata=metadata
        )
        # Queued twice, a rollout might be run twice.
        repeat = Repeat.MATTERS if status in ("queuing", "requeuing") else Repeat.HARMLESS
        path = f"/rollouts/{path_part(rollout_id, 'rollout_id')}"
        return _ROLLOUT.validate_json(await self._post(path, changes, "rollout", repeat))

    async def update_many_attempts(
        self, updates: Sequence[AttemptUpdate], *, fenced: bool = False
    ) -> Sequence[Attempt | Conflict]:
        updates = [as_model(AttemptUpdate, given) for given in updates]
        body = {"updates": [_given(**update.__dict__) for update in updates], "fenced": fenced}
        # The latest attempt may be another one by the time of a second try.
        matters = any(update.attempt_id == "latest" for update in updates)
        repeat = Repeat.MATTERS if matters else Repeat.HARMLESS
        outcomes = _OUTCOMES.validate_json(await self._post("/rollouts/attempts/update", body, "attempt", repeat))
        return [outcome.attempt or Conflict(outcome.conflict or "refused") for outcome in outcomes]

    # Spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        spans = [as_model(Span, given) for given in spans]
        reply = await self._transport.post(wire.PREFIX + "/spans/batch", wire.dump_spans(spans), Repeat.KNOWN)
        duplicates = set(wire.SpansReply.model_validate_json(reply).duplicates)
        return [span for place, span in enumerate(spans) if place not in duplicates]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        # Numbers given out twice leave a gap, which the contract allows.
        body = {"rollout_attempt_ids": list(rollout_attempt_ids)}
        reply = await self._post("/spans/next/batch", body, "rollout_attempt_ids")
        return wire.SequenceIdsReply.model_validate_json(reply).sequence_ids

    # Queries

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        query = {
            "status_in": _plain(status if status_in is None else status_in),
            "rollout_id_in": _plain(rollout_ids if rollout_id_in is None else rollout_id_in),
            "rollout_id_contains": rollout_id_contains,
            "filter_logic": filter_logic,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
        }
        return await self._search("/rollouts/search", query, _ROLLOUT_PAGE)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self._find(f"/rollouts/{path_part(rollout_id, 'rollout_id')}", _ROLLOUT_OR_NONE)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        query = {"sort_by": sort_by, "sort_order": sort_order, "limit": limit, "offset": offset}
        path = f"/rollouts/{path_part(rollout_id, 'rollout_id')}/attempts/search"
        return await self._search(path, query, _ATTEMPT_PAGE)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        path = f"/rollouts/{path_part(rollout_id, 'rollout_id')}/attempts/latest"
        return await self._find(path, _ATTEMPT_OR_NONE)

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        query = {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "trace_id": trace_id,
            "trace_id_contains": trace_id_contains,
            "span_id": span_id,
            "span_id_contains": span_id_contains,
            "parent_id": parent_id,
            "parent_id_contains": parent_id_contains,
            "name": name,
            "name_contains": name_contains,
            "filter_logic": filter_logic,
            "limit": limit,
            "offset": offset,
            "sort_by": sort_by,
            "sort_order": sort_order,
        }
        return await self._search("/spans/search", query, _SPAN_PAGE)

    async def query_many_spans(self, rollout_ids: Sequence[str], *, name: str | None = None) -> Sequence[Span]:
        body = {"rollout_ids": _plain(rollout_ids), "name": name}
        return _SPANS.validate_json(await self._post("/spans/latest", body, "rollout_ids"))

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
            data = wire.dump_checked(body, "rollout_ids")
            reply = await self._transport.send("POST", wire.PREFIX + "/waits/rollouts", data, Repeat.HARMLESS)
            finished.update({rollout.rollout_id: rollout for rollout in _ROLLOUTS.validate_json(reply.data)})
            if timeout is not None or wire.UNFINISHED_HEADER not in reply.headers:
                return [finished[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in finished]

    # Resources

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self._send_resources("/resources", resources)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return await self._send_resources(f"/resources/{path_part(resources_id, 'resources_id')}", resources)

    async def _send_resources(self, path: str, resources: NamedResources) -> ResourcesUpdate:
        data = resources_json(resources).encode()
        return _RESOURCES.validate_json(await self._transport.post(wire.PREFIX + path, data, Repeat.MATTERS))

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        query = {
            "resources_id": resources_id,
            "resources_id_contains": resources_id_contains,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
        }
        return await self._search("/resources/search", query, _RESOURCES_PAGE)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._find(f"/resources/{path_part(resources_id, 'resources_id')}", _RESOURCES_OR_NONE)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._find("/resources/latest", _RESOURCES_OR_NONE)

    # Workers

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        path = f"/workers/{path_part(worker_id, 'worker_id')}"
        data = await self._post(path, _given(heartbeat_stats=heartbeat_stats), "heartbeat_stats")
        return Worker.model_validate_json(data)

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        query = {
            "status_in": _plain(status_in),
            "worker_id_contains": worker_id_contains,
            "filter_logic": filter_logic,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
        }
        return await self._search("/workers/search", query, _WORKER_PAGE)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._find(f"/workers/{path_part(worker_id, 'worker_id')}", _WORKER_OR_NONE)

    # Requests

    async def _get(self, path: str) -> bytes:
        return await self._transport.get(wire.PREFIX + path)

    async def _post(self, path: str, body: Any, what: str, repeat: Repeat = Repeat.HARMLESS) -> bytes:
        return await self._transport.post(wire.PREFIX + path, wire.dump_checked(body, what), repeat)

    async def _find(self, path: str, adapter: TypeAdapter[Model | None]) -> Model | None:
        try:
            return adapter.validate_json(await self._get(path))
        except Recoverable as error:
            logger.error("GET %s yields nothing: %s", path, error)
            return None

    async def _search(self, path: str, query: dict[str, Any], adapter: TypeAdapter[Page]) -> Page:
        # The server refuses empty pages, as the one that it stands in for; the contract wants their total.
        empty = query["limit"] == 0
        if empty:
            query["limit"] = 1
        page = adapter.validate_json(await self._post(path, query, "query"))
        return page.model_copy(update={"items": [], "limit": 0}) if empty else page


def _given(**values: Any) -> dict[str, Any]:
    """The arguments that were given."""
    return {name: value for name, value in values.items() if not isinstance(value, Unset)}


def _plain(values: Sequence[str] | None) -> Any:
    """A sequence as JSON has it. A text is no list of texts: the server shall see it as it is."""
    return values if values is None or isinstance(values, str) else list(values)
