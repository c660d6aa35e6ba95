"""Records of the control plane: rollouts, attempts, workers, requests and pages.

Field names and defaults are the store's public contract. All times are seconds since the epoch. The models are plain
pydantic without custom validators on the hot path; what may be stored (JSON only) is checked where it is stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from rollout_core.base.errors import ConfigError

RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]
RolloutMode = Literal["train", "val", "test"]
SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]

TaskInput = Any
"""What a rollout works on: any JSON value."""

Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)


class Unset:
    """Type of ``UNSET``, which marks an argument that was not given where None is a value of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "UNSET"  # unpickled by name, so that there is one object

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(cls)


UNSET: Final = Unset()


class RolloutConfig(BaseModel):
    """When an attempt counts as lost, and whether the rollout is tried again."""

    model_config = ConfigDict(allow_inf_nan=False)

    timeout_seconds: float | None = None
    """Longest time from an attempt's start to its end; None: no limit."""
    unresponsive_seconds: float | None = None
    """Longest silence between heartbeats of an attempt; None: no limit."""
    max_attempts: int = Field(default=1, ge=1)
    """Attempts in all, the first included."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list)
    """Attempt statuses after which the rollout is queued again."""


class Attempt(BaseModel):
    """One execution of a rollout."""

    model_config = ConfigDict(allow_inf_nan=False)

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Number of the attempt within its rollout, from 1."""
    start_time: float
    end_time: float | None = None
    """Set when the attempt succeeded or failed."""
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    """Time of the latest span or explicit heartbeat."""
    metadata: dict[str, Any] | None = None


class Rollout(BaseModel):
    """One unit of work: its input, and how far it is."""

    rollout_id: str
    input: TaskInput
    start_time: float
    """When the rollout was enqueued or started."""
    end_time: float | None = None
    """Set when the rollout succeeded, failed or was cancelled."""
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class AttemptedRollout(Rollout):
    """A rollout together with its latest attempt."""

    attempt: Attempt

    @model_validator(mode="after")
    def _attempt_belongs_to_rollout(self) -> AttemptedRollout:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(f"attempt is of rollout {self.attempt.rollout_id}, not of {self.rollout_id}")
        return self


class Worker(BaseModel):
    """A process that runs attempts, as the store last saw it."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    """When the worker last took up an attempt."""
    last_idle_time: float | None = None
    """When the worker last ended or lost an attempt, or found the queue empty."""
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class EnqueueRolloutRequest(BaseModel):
    """A rollout to be queued."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    """None: the latest resources at the time of enqueueing."""
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = Field(default=None, min_length=1)
    """The caller's own id, which makes enqueueing idempotent; None: an id is generated."""


class AttemptUpdate(BaseModel):
    """Changes to one attempt; fields left at ``UNSET`` stay as they are."""

    model_config = ConfigDict(allow_inf_nan=False)

    rollout_id: str
    attempt_id: str
    """An attempt's id, or ``"latest"``."""
    status: AttemptStatus | Unset = UNSET
    worker_id: str | Unset = UNSET
    last_heartbeat_time: float | Unset = UNSET
    metadata: dict[str, Any] | Unset = UNSET


class PaginatedResult(BaseModel, Sequence[Item], Generic[Item]):
    """One page of a query: a sequence of its items, and how many there are in all."""

    items: list[Item]
    limit: int
    """Most items this page may hold; -1: no limit."""
    offset: int
    """Items skipped before this page."""
    total: int
    """Items that match, on any page."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.items)


class BrowsedPage(BaseModel, Generic[Item]):
    """Some items, the newest first, and where to go on."""

    items: list[Item]
    next: str | None
    """Id of the last item that was looked at; None where all were."""


class LightningStoreCapabilities(TypedDict, total=False):
    """What a store can do; a missing key means no."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    """All threads and processes that hold this store see the same data."""
    otlp_traces: bool
    """The store has an OTLP/HTTP endpoint for traces."""


class LightningStoreStatistics(TypedDict, total=False):
    """Counts of a store, and for a store in memory its sizes."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    """Seconds since this store object was made."""
    total_span_bytes: int
    eviction_threshold_bytes: int
    safe_threshold_bytes: int
    memory_capacity_bytes: int


def build(model: type[Model], **fields: Any) -> Model:
    """``model(**fields)``, with a ConfigError that lists each bad field instead of pydantic's own error."""
    return _validated(model, fields)


def _validated(model: type[Model], fields: Mapping[Any, Any]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        # A field that may be UNSET is a union, whose second complaint ("not an Unset") helps nobody.
        problems = [entry for entry in error.errors() if entry["type"] != "is_instance_of"]
        lines = [f"{_place(problem['loc'])} is {problem['input']!r:.200}: {problem['msg']}" for problem in problems]
        raise ConfigError(f"not a valid {model.__name__}: {'; '.join(lines)}", lines) from error


def _place(location: tuple[int | str, ...]) -> str:
    return str(location[0]) if location else "it"


def as_model(model: type[Model], given: Any) -> Model:
    """``given``, which may also be a dict of the model's fields. Raises ConfigError for anything else."""
    if isinstance(given, model):
        return given
    if isinstance(given, Mapping):
        return _validated(model, given)
    raise ConfigError(f"got {given!r:.200} ({type(given).__name__}); expected {model.__name__} or a dict of its fields")


def enqueue_request(
    input: TaskInput,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, Any] | None,
    rollout_id: str | None = None,
) -> EnqueueRolloutRequest:
    """A request from the arguments of the single forms. Raises ConfigError if they are not valid."""
    if isinstance(input, Unset):
        raise ConfigError("input is UNSET; give the rollout's input, None included")
    return build(
        EnqueueRolloutRequest,
        input=input,
        mode=mode,
        resources_id=resources_id,
        config=config,
        metadata=metadata,
        rollout_id=rollout_id,
    )


def arguments_of(method: Callable[..., Any], request: EnqueueRolloutRequest) -> dict[str, Any]:
    """The arguments of a single form. No ``rollout_id`` where there is none, for stores that know no such thing; raises
    ConfigError where there is one, as of HTTP clients, who would enqueue twice otherwise when an answer is lost."""
    fields = {**request.__dict__}
    if fields["rollout_id"] is None:
        del fields["rollout_id"]
        return fields
    parameters = inspect.signature(method).parameters.values()
    if not any(given.name == "rollout_id" or given.kind is given.VAR_KEYWORD for given in parameters):
        owner = type(getattr(method, "__self__", None)).__name__
        raise ConfigError(
            f"{owner}.{method.__name__} takes no rollout_id, but the caller names the rollout {fields['rollout_id']}, "
            "as clients over HTTP do so that nothing is enqueued twice; give it a parameter rollout_id=None, or define "
            "enqueue_many_rollouts and start_many_rollouts"
        )
    return fields
