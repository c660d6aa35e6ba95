"""What client and server say to each other: bodies of requests and replies, and errors.

Paths and bodies are those of Agent-lightning's server, so that its clients are understood; batches, fences, claims and
typed errors are ours. Bodies are JSON, written by ``codec`` and read by pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollout_core.errors import (
    ConfigError,
    Conflict,
    CorruptObject,
    Fatal,
    MissingObject,
    NotFound,
    Recoverable,
    RolloutError,
    UnknownOutcome,
)
from rollout_core.store.codec import encode_bytes, encode_stored, model_fields
from rollout_core.store.span_fields import SpanFields, num_nulls, span_fields
from rollout_core.store.spans import Span
from rollout_core.store.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    WorkerStatus,
)

PREFIX = "/v1/agl"
TRACES_PATH = "/v1/traces"
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

AnyRollout = Annotated[AttemptedRollout | Rollout, Field(union_mode="left_to_right")]
Rollouts = list[AnyRollout]


class EnqueueRequest(BaseModel):
    """Rollouts to be queued."""

    rollouts: list[EnqueueRolloutRequest]


class DequeueRequest(BaseModel):
    """How many rollouts to claim, and for whom."""

    limit: int = 1
    worker_id: str | None = None


class ReleaseRequest(BaseModel):
    """Claims to be given back."""

    rollouts: list[AttemptedRollout]


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

    rollout_ids: list[str]


class RolloutChanges(BaseModel):
    """New values of a rollout's fields; those left out stay as they are."""

    input: TaskInput = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class AttemptChanges(BaseModel):
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

    updates: list[NamedAttemptChanges]
    fenced: bool = False


class AttemptOutcome(BaseModel):
    """An attempt as it is after its update, or why a fenced update was refused."""

    attempt: Attempt | None = None
    conflict: str | None = None


class SpansRequest(BaseModel):
    """Spans to be stored."""

    spans: list[SpanFields]


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

    rollout_attempt_ids: list[tuple[str, str]]


class SequenceIdsReply(BaseModel):
    """The sequence ids, in the order of pairs."""

    sequence_ids: list[int]


class WaitRequest(BaseModel):
    """Rollouts to wait for; ``timeout`` in seconds, None: as long as it takes."""

    model_config = ConfigDict(allow_inf_nan=False)

    rollout_ids: list[str]
    timeout: float | None = None


class ResourcesQuery(BaseModel):
    """Filter, order and page of a query of resources."""

    resources_id: str | None = None
    resources_id_contains: str | None = None
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0


class AttemptsQuery(BaseModel):
    """Order and page of a query of attempts."""

    sort_by: str | None = "sequence_id"
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0


class RolloutsQuery(BaseModel):
    """Filter, order and page of a query of rollouts."""

    status_in: list[RolloutStatus] | None = None
    rollout_id_in: list[str | None] | None = None
    rollout_id_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0


class WorkersQuery(BaseModel):
    """Filter, order and page of a query of workers."""

    status_in: list[WorkerStatus] | None = None
    worker_id_contains: str | None = None
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0


class SpansQuery(BaseModel):
    """Filter, order and page of a query of a rollout's spans."""

    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: FilterLogic = "and"
    limit: int = -1
    offset: int = 0
    sort_by: str | None = "sequence_id"
    sort_order: SortOrder = "asc"


class LatestSpansQuery(BaseModel):
    """Rollouts whose latest attempts' spans are wanted, of one name or of all."""

    rollout_ids: list[str]
    name: str | None = None


class HeartbeatRequest(BaseModel):
    """A worker's statistics; left out, the last ones stay."""

    heartbeat_stats: dict[str, Any] | None = None


class RolloutPage(PaginatedResult[AnyRollout]):
    """One page of rollouts."""


def dump_checked(value: Any, what: str) -> bytes:
    """JSON of what a caller gave us. Raises ConfigError, which names the place, for what JSON cannot hold."""
    return encode_bytes(value, what, model_fields)


def dump_spans(spans: Sequence[Span]) -> bytes:
    """The JSON of a ``SpansRequest``. Raises ConfigError as ``dump_checked`` does."""
    fields = [span_fields(span) for span in spans]
    return encode_bytes({"spans": fields}, "span", model_fields, sum(map(num_nulls, fields)))


# Errors


class ErrorBody(BaseModel):
    """The body of every reply that is not a success."""

    detail: str
    """What was wrong, and what to do."""
    error: str = "Fatal"
    """Kind of the error, by which the client raises the same one."""
    violations: list[str] = []
    """One line for each thing that is wrong."""
    content_id: str | None = None
    """The object that is missing or damaged."""


class _Kind(NamedTuple):
    error: type[Exception]
    status: int


_KINDS = {
    # Subclasses before their bases.
    "MissingObject": _Kind(MissingObject, 410),
    "CorruptObject": _Kind(CorruptObject, 410),
    "ConfigError": _Kind(ConfigError, 400),
    "NotFound": _Kind(NotFound, 404),
    "Conflict": _Kind(Conflict, 409),
    "UnknownOutcome": _Kind(UnknownOutcome, 503),
    "Recoverable": _Kind(Recoverable, 503),
    "Fatal": _Kind(Fatal, 503),
    # The contract's answer for spans that a store has evicted.
    "RuntimeError": _Kind(RuntimeError, 410),
}


class Unprocessable(ConfigError):
    """JSON that is not what this request takes."""


class TooLarge(ConfigError):
    """A body above the server's limit."""


class TooSlow(ConfigError):
    """A body that did not arrive in time."""


class WrongMediaType(ConfigError):
    """A body of a kind that this request does not take."""


class Unauthorized(ConfigError):
    """No API key, or a wrong one."""


_STATUS = {Unprocessable: 422, TooLarge: 413, TooSlow: 408, WrongMediaType: 415, Unauthorized: 401}


def status_of(error: Exception) -> int:
    """The HTTP status that says ``error``; 500 for what nobody foresaw."""
    if type(error) in _STATUS:
        return _STATUS[type(error)]
    if isinstance(error, RuntimeError) and not isinstance(error, RolloutError):
        return 410 if type(error) is RuntimeError else 500
    return next((kind.status for kind in _KINDS.values() if isinstance(error, kind.error)), 500)


def error_body(error: Exception) -> bytes:
    """The body that says ``error``. What nobody foresaw keeps its details to itself."""
    if status_of(error) == 500:
        return encode_stored(ErrorBody(detail="the server failed; its log says why", error="Fatal"))
    name = next(name for name, kind in _KINDS.items() if isinstance(error, kind.error))
    body = ErrorBody(
        detail=str(error),
        error=name,
        violations=list(getattr(error, "violations", ())),
        content_id=getattr(error, "content_id", None),
    )
    return encode_stored(body)


_ERROR_BODY = TypeAdapter(ErrorBody)


def error_from(status: int, data: bytes, request: str) -> Exception:
    """The error that a reply says. ``request`` names what was asked, for replies of servers that are not ours."""
    try:
        body = _ERROR_BODY.validate_json(data)
    except ValueError:
        body = ErrorBody(detail=data[:200].decode(errors="replace"), error="")
    kind = _KINDS.get(body.error)
    if kind is None:
        text = f"{request}: the server answered {status}: {body.detail}"
        return Recoverable(text) if status >= 500 else ConfigError(text)
    if kind.error in (MissingObject, CorruptObject):
        return kind.error(body.content_id or "", body.detail)
    if kind.error is ConfigError:
        return ConfigError(body.detail, body.violations)
    return kind.error(body.detail)
