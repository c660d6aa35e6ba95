"""What client and server say to each other: bodies of requests and replies; errors are in ``http.errors``.

Paths and bodies are those of Agent-lightning's server, so that its clients are understood; batches, fences, claims and
typed errors are ours. Bodies are JSON, written by ``codec`` and read by pydantic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, FailFast, Field, create_model

from rollout_core.store import queries
from rollout_core.store.changes import PAGE_CHANGES, ChangeKind
from rollout_core.store.codec import encode_bytes, model_fields
from rollout_core.store.encoded_spans import EncodedSpan, encode_span, fields_of, num_nulls
from rollout_core.store.http.span_bodies import SpanFields, read_encoded
from rollout_core.store.resources import ResourcesUpdate
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    BrowsedPage,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
)

PREFIX = "/v1/agl"
TRACES_PATH = "/v1/traces"
WATCH_PATH = PREFIX + "/watch"
HEALTH_PATH = PREFIX + "/health"
JSON = "application/json"

KEY_HEADER = "idempotency-key"
"""Names a write. The server answers a repeated one from memory instead of doing it again."""
REPEATED_HEADER = "idempotency-repeated"
"""Present when the client may have sent this write before. ``final``: then it must not be done unless it is
remembered, because doing it twice would matter."""
UNFINISHED_HEADER = "rollout-unfinished"
"""Present on the reply to a wait when some of the rollouts are not finished yet."""
LONGEST_WAIT_SECONDS = 20.0
"""How long one request of a client waits at the server; then it asks again."""

MAX_RECORDS = 100_000
"""Most records of one request."""

Item = TypeVar("Item")


class _FirstError(FailFast):
    def __hash__(self) -> int:  # else there could be no union with None
        return hash(type(self))


FailFastList = Annotated[list[Item], _FirstError()]
"""A list whose first bad record is named, and no other: there may be a million."""
AnyRollout = Annotated[AttemptedRollout | Rollout, Field(union_mode="left_to_right")]
Rollouts = list[AnyRollout]


class Changes(BaseModel):
    """New values of some fields; those left out stay as they are."""


class EnqueueRequest(BaseModel):
    """Rollouts to be queued."""

    rollouts: FailFastList[EnqueueRolloutRequest]


class StartManyRequest(EnqueueRequest):
    """Rollouts to be started, and the worker that runs them."""

    worker_id: str | None = None


class DequeueRequest(BaseModel):
    """How many rollouts to claim, and the worker that claims them."""

    limit: int = Field(default=1, le=MAX_RECORDS)
    worker_id: str | None = None


class ReleaseRequest(BaseModel):
    """Claims to be given back."""

    rollouts: FailFastList[AttemptedRollout]


class StartRequest(BaseModel):
    """A rollout to be started at once."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    worker_id: str | None = None


class StartAttemptRequest(BaseModel):
    """Who works on the attempt."""

    worker_id: str | None = None


class StartAttemptsRequest(StartAttemptRequest):
    """Rollouts to start a new attempt of."""

    rollout_ids: FailFastList[str]


class RolloutChanges(Changes):
    """New values of a rollout's fields; those left out stay as they are."""

    input: TaskInput = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class AttemptChanges(Changes):
    """New values of an attempt's fields; those left out stay as they are."""

    status: AttemptStatus | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


class NamedAttemptChanges(AttemptChanges):
    """Changes and the attempt they are for."""

    rollout_id: str
    attempt_id: str


class AttemptsUpdate(BaseModel):
    """Changes to many attempts, in order."""

    updates: FailFastList[NamedAttemptChanges]
    fenced: bool = False


class AttemptOutcome(BaseModel):
    """An attempt as it is after its update, or why a fenced update was refused."""

    attempt: Attempt | None = None
    conflict: str | None = None


class SpansRequest(BaseModel):
    """Spans to be stored."""

    spans: FailFastList[SpanFields]

    @classmethod
    def read(cls, data: bytes) -> SpansRequest:
        """The request of a body, its spans encoded already where that is quicker. Raises ValidationError."""
        encoded = read_encoded(data)
        return cls.model_validate_json(data) if encoded is None else cls.model_construct(spans=encoded)

    def encoded(self) -> list[EncodedSpan]:
        """The spans, encoded. Raises ConfigError as ``encode_span``."""
        return [span if isinstance(span, EncodedSpan) else encode_span(span) for span in self.spans]


class EndsRequest(BaseModel):
    """Attempts to be ended: the last span of each, numbered by the store if its number is 0, and its update."""

    spans: FailFastList[SpanFields]
    updates: FailFastList[NamedAttemptChanges]


class ClaimRequest(BaseModel):
    """The worker that claims."""

    worker_id: str | None = None


class Claim(BaseModel):
    """A claimed rollout, and the resources for it; null where they have to be asked for."""

    rollout: AttemptedRollout
    resources: ResourcesUpdate | None


class SpansReply(BaseModel):
    """Which of the spans were known already, by their places in the request."""

    duplicates: list[int]


class SequenceIdRequest(BaseModel):
    """An attempt that needs a sequence id for a span."""

    rollout_id: str
    attempt_id: str


class SequenceIdReply(BaseModel):
    """The sequence id."""

    sequence_id: int


class SequenceIdsRequest(BaseModel):
    """(rollout id, attempt id) pairs that need a sequence id each."""

    rollout_attempt_ids: FailFastList[tuple[str, str]]


class SequenceIdsReply(BaseModel):
    """The sequence ids, in the order of pairs."""

    sequence_ids: list[int]


class WaitRequest(BaseModel):
    """Rollouts to wait for; ``timeout`` in seconds, None: as long as it takes."""

    model_config = ConfigDict(allow_inf_nan=False)

    rollout_ids: FailFastList[str]
    timeout: float | None = None


class WorkRequest(BaseModel):
    """For how many seconds to wait for work."""

    model_config = ConfigDict(allow_inf_nan=False)

    timeout: float


class ChangesRequest(BaseModel):
    """From where changes are asked for, of which kinds, and for how many seconds to wait for some."""

    model_config = ConfigDict(allow_inf_nan=False)

    after: str | None = None
    kinds: list[ChangeKind] | None = None
    limit: int = Field(default=PAGE_CHANGES, ge=1, le=MAX_RECORDS)
    timeout: float = 0.0


class Work(BaseModel):
    """Whether there may be some."""

    queued: bool


def _body_of(query: Any, description: str, *, in_path: Sequence[str] = (), **kinds: Any) -> type[BaseModel]:
    """The body that asks a query of the contract; ``kinds`` are types of fields that differ from the query's."""
    fields: dict[str, Any] = {
        name: (kinds.get(name, _as_sent(kind)), query._field_defaults.get(name, ...))
        for name, kind in get_type_hints(query).items()
        if name not in in_path
    }
    return create_model(query.__name__, __doc__=description, __module__=__name__, **fields)


def body_of_call(method: Callable[..., Any], name: str) -> type[BaseModel]:
    """The body that makes a call of the contract: the arguments of its method."""
    kinds = get_type_hints(method)
    fields: dict[str, Any] = {
        given.name: (_as_sent(kinds[given.name]), ... if given.default is given.empty else given.default)
        for given in inspect.signature(method).parameters.values()
        if given.name != "self"
    }
    return create_model(name, __doc__=f"Arguments of ``{method.__name__}``.", __module__=__name__, **fields)


def _as_sent(kind: Any) -> Any:
    """The type of a field of a body from that of an argument."""
    if get_origin(kind) is Sequence:
        return FailFastList[get_args(kind)[0]]
    return reduce(or_, map(_as_sent, get_args(kind))) if get_origin(kind) in (UnionType, Union) else kind


ResourcesQuery = _body_of(queries.ResourcesQuery, "Filter, order and page of a query of resources.")
AttemptsQuery = _body_of(queries.AttemptsQuery, "Order and page of a query of attempts.", in_path=["rollout_id"])
RolloutsQuery = _body_of(
    queries.RolloutsQuery,
    "Filter, order and page of a query of rollouts.",
    rollout_id_in=FailFastList[str | None] | None,  # None, which the contract lets pass, is the id of no rollout
)
WorkersQuery = _body_of(queries.WorkersQuery, "Filter, order and page of a query of workers.")
SpansQuery = _body_of(
    queries.SpansQuery, "Filter, order and page of a query of a rollout's spans.", attempt_id=str | None
)


class HeartbeatRequest(Changes):
    """A worker's statistics; left out, the last ones stay."""

    heartbeat_stats: dict[str, Any] | None = None


class RolloutPage(PaginatedResult[AnyRollout]):
    """One page of rollouts."""


class BrowseRequest(BaseModel):
    """See ``LightningStore.browse_rollouts``."""

    before: str | None = None
    status_in: list[RolloutStatus] | None = None
    text: str | None = None
    limit: int = Field(default=100, le=MAX_RECORDS)
    within: int = 10_000


class BrowsedRollouts(BrowsedPage[AnyRollout]):
    """Some rollouts, and where to go on."""


def dump_spans(spans: Sequence[Span]) -> bytes:
    """The JSON of a ``SpansRequest``. Raises ConfigError, which names the place, for what JSON cannot hold."""
    fields = [fields_of(span) for span in spans]
    return encode_bytes({"spans": fields}, "span", model_fields, sum(map(num_nulls, fields)))
