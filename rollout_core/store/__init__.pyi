from .base import (
    LightningStore as LightningStore,
)
from .http.client import (
    LightningStoreClient as LightningStoreClient,
)
from .http.server import (
    LightningStoreServer as LightningStoreServer,
)
from .lifecycle import (
    is_finished as is_finished,
)
from .lifecycle import (
    is_queuing as is_queuing,
)
from .lifecycle import (
    is_running as is_running,
)
from .memory.collection import (
    Collection as Collection,
)
from .memory.collection import (
    FilterField as FilterField,
)
from .memory.collection import (
    FilterOptions as FilterOptions,
)
from .memory.collection import (
    KeyValue as KeyValue,
)
from .memory.collection import (
    LightningCollections as LightningCollections,
)
from .memory.collection import (
    Queue as Queue,
)
from .memory.collection import (
    SortOptions as SortOptions,
)
from .memory.collection_based import (
    CollectionBasedLightningStore as CollectionBasedLightningStore,
)
from .memory.list_collection import (
    ListBasedCollection as ListBasedCollection,
)
from .memory.memory_collections import (
    DequeBasedQueue as DequeBasedQueue,
)
from .memory.memory_collections import (
    DictBasedKeyValue as DictBasedKeyValue,
)
from .memory.memory_collections import (
    InMemoryLightningCollections as InMemoryLightningCollections,
)
from .memory.store import (
    InMemoryLightningStore as InMemoryLightningStore,
)
from .resources import (
    LLM as LLM,
)
from .resources import (
    NamedResources as NamedResources,
)
from .resources import (
    PromptTemplate as PromptTemplate,
)
from .resources import (
    ProxyLLM as ProxyLLM,
)
from .resources import (
    Resource as Resource,
)
from .resources import (
    ResourcesUpdate as ResourcesUpdate,
)
from .resources import (
    ResourceUnion as ResourceUnion,
)
from .spans import (
    Attributes as Attributes,
)
from .spans import (
    AttributeValue as AttributeValue,
)
from .spans import (
    Event as Event,
)
from .spans import (
    Link as Link,
)
from .spans import (
    OtelResource as OtelResource,
)
from .spans import (
    Span as Span,
)
from .spans import (
    SpanContext as SpanContext,
)
from .spans import (
    SpanCoreFields as SpanCoreFields,
)
from .spans import (
    StatusCode as StatusCode,
)
from .spans import (
    TraceState as TraceState,
)
from .spans import (
    TraceStatus as TraceStatus,
)
from .sql.store import (
    SqlLightningStore as SqlLightningStore,
)
from .threaded import (
    LightningStoreThreaded as LightningStoreThreaded,
)
from .types import (
    UNSET as UNSET,
)
from .types import (
    Attempt as Attempt,
)
from .types import (
    AttemptedRollout as AttemptedRollout,
)
from .types import (
    AttemptStatus as AttemptStatus,
)
from .types import (
    AttemptUpdate as AttemptUpdate,
)
from .types import (
    EnqueueRolloutRequest as EnqueueRolloutRequest,
)
from .types import (
    FilterLogic as FilterLogic,
)
from .types import (
    LightningStoreCapabilities as LightningStoreCapabilities,
)
from .types import (
    LightningStoreStatistics as LightningStoreStatistics,
)
from .types import (
    PaginatedResult as PaginatedResult,
)
from .types import (
    Rollout as Rollout,
)
from .types import (
    RolloutConfig as RolloutConfig,
)
from .types import (
    RolloutMode as RolloutMode,
)
from .types import (
    RolloutStatus as RolloutStatus,
)
from .types import (
    SortOrder as SortOrder,
)
from .types import (
    TaskInput as TaskInput,
)
from .types import (
    Unset as Unset,
)
from .types import (
    Worker as Worker,
)
from .types import (
    WorkerStatus as WorkerStatus,
)
