"""The LightningStore: the ledger of rollouts, attempts, spans, resources and workers, and the queue between them.

``SqlLightningStore.from_url("sqlite:///data/rollout.db")`` opens one. Names are imported when they are first used, so
that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_core.store.base import LightningStore
    from rollout_core.store.collection import (
        Collection,
        FilterField,
        FilterOptions,
        KeyValue,
        LightningCollections,
        Queue,
        SortOptions,
    )
    from rollout_core.store.collection_based import CollectionBasedLightningStore
    from rollout_core.store.http.client import LightningStoreClient
    from rollout_core.store.http.server import LightningStoreServer
    from rollout_core.store.lifecycle import is_finished, is_queuing, is_running
    from rollout_core.store.list_collection import ListBasedCollection
    from rollout_core.store.memory import InMemoryLightningStore
    from rollout_core.store.memory_collections import DequeBasedQueue, DictBasedKeyValue, InMemoryLightningCollections
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
    from rollout_core.store.threaded import LightningStoreThreaded
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
    "collection": "Collection FilterField FilterOptions KeyValue LightningCollections Queue SortOptions",
    "collection_based": "CollectionBasedLightningStore",
    "http.client": "LightningStoreClient",
    "http.server": "LightningStoreServer",
    "lifecycle": "is_finished is_queuing is_running",
    "list_collection": "ListBasedCollection",
    "memory": "InMemoryLightningStore",
    "memory_collections": "DequeBasedQueue DictBasedKeyValue InMemoryLightningCollections",
    "resources": "LLM NamedResources PromptTemplate ProxyLLM Resource ResourcesUpdate ResourceUnion",
    "spans": (
        "Attributes AttributeValue Event Link OtelResource Span SpanContext SpanCoreFields StatusCode TraceState"
        " TraceStatus"
    ),
    "sql": "SqlLightningStore",
    "threaded": "LightningStoreThreaded",
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
    "Collection",
    "CollectionBasedLightningStore",
    "DequeBasedQueue",
    "DictBasedKeyValue",
    "EnqueueRolloutRequest",
    "Event",
    "FilterField",
    "FilterLogic",
    "FilterOptions",
    "InMemoryLightningCollections",
    "InMemoryLightningStore",
    "KeyValue",
    "LightningCollections",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "Link",
    "ListBasedCollection",
    "NamedResources",
    "OtelResource",
    "PaginatedResult",
    "PromptTemplate",
    "ProxyLLM",
    "Queue",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "SortOptions",
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
