"""The LightningStore: the ledger of rollouts, attempts, spans, resources and workers, and the queue between them.

``SqlLightningStore.from_url("sqlite:///data/rollout.db")`` opens one. Names are imported when they are first used, so
that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_core.store.base import LightningStore
    from rollout_core.store.lifecycle import is_finished, is_queuing, is_running
    from rollout_core.store.resources import (
        LLM,
        NamedResources,
        PromptTemplate,
        ProxyLLM,
        Resource,
        ResourcesUpdate,
        ResourceUnion,
    )
    from rollout_core.store.spans import (
        Attributes,
        AttributeValue,
        Event,
        Link,
        OtelResource,
        Span,
        SpanContext,
        SpanCoreFields,
        StatusCode,
        TraceState,
        TraceStatus,
    )
    from rollout_core.store.sql import SqlLightningStore
    from rollout_core.store.types import (
        UNSET,
        Attempt,
        AttemptedRollout,
        AttemptStatus,
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
    )

_MODULES = {
    "base": "LightningStore",
    "lifecycle": "is_finished is_queuing is_running",
    "resources": "LLM NamedResources PromptTemplate ProxyLLM Resource ResourcesUpdate ResourceUnion",
    "spans": (
        "Attributes AttributeValue Event Link OtelResource Span SpanContext SpanCoreFields StatusCode TraceState"
        " TraceStatus"
    ),
    "sql": "SqlLightningStore",
    "types": (
        "UNSET Attempt AttemptedRollout AttemptStatus AttemptUpdate EnqueueRolloutRequest FilterLogic"
        " LightningStoreCapabilities LightningStoreStatistics PaginatedResult Rollout RolloutConfig RolloutMode"
        " RolloutStatus SortOrder TaskInput Unset Worker WorkerStatus"
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "LLM",
    "UNSET",
    "Attempt",
    "AttemptStatus",
    "AttemptUpdate",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "EnqueueRolloutRequest",
    "Event",
    "FilterLogic",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreStatistics",
    "Link",
    "NamedResources",
    "OtelResource",
    "PaginatedResult",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "SortOrder",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "SqlLightningStore",
    "StatusCode",
    "TaskInput",
    "TraceState",
    "TraceStatus",
    "Unset",
    "Worker",
    "WorkerStatus",
    "is_finished",
    "is_queuing",
    "is_running",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
