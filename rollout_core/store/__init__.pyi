from .changes import (
    Change as Change,
    ChangeKind as ChangeKind,
    ChangePage as ChangePage,
)
from .contract import (
    LightningStore as LightningStore,
)
from .forwarding_store import (
    LightningStoreThreaded as LightningStoreThreaded,
)
from .http.client import (
    LightningStoreClient as LightningStoreClient,
)
from .http.server import (
    LightningStoreServer as LightningStoreServer,
)
from .lifecycle import (
    is_finished as is_finished,
    is_queuing as is_queuing,
    is_running as is_running,
)
from .memory.collection import (
    Collection as Collection,
    FilterField as FilterField,
    FilterOptions as FilterOptions,
    KeyValue as KeyValue,
    LightningCollections as LightningCollections,
    Queue as Queue,
    SortOptions as SortOptions,
)
from .memory.collection_based import (
    CollectionBasedLightningStore as CollectionBasedLightningStore,
)
from .memory.list_collection import (
    ListBasedCollection as ListBasedCollection,
)
from .memory.memory_store import (
    DequeBasedQueue as DequeBasedQueue,
    DictBasedKeyValue as DictBasedKeyValue,
    InMemoryLightningCollections as InMemoryLightningCollections,
    InMemoryLightningStore as InMemoryLightningStore,
)
from .resources import (
    LLM as LLM,
    NamedResources as NamedResources,
    PromptTemplate as PromptTemplate,
    ProxyLLM as ProxyLLM,
    Resource as Resource,
    ResourcesUpdate as ResourcesUpdate,
    ResourceUnion as ResourceUnion,
)
from .spans import (
    Attributes as Attributes,
    AttributeValue as AttributeValue,
    Event as Event,
    Link as Link,
    OtelResource as OtelResource,
    Span as Span,
    SpanContext as SpanContext,
    SpanCoreFields as SpanCoreFields,
    StatusCode as StatusCode,
    TraceState as TraceState,
    TraceStatus as TraceStatus,
)
from .sql.sql_store import (
    SqlLightningStore as SqlLightningStore,
)
from .types import (
    UNSET as UNSET,
    Attempt as Attempt,
    AttemptedRollout as AttemptedRollout,
    AttemptStatus as AttemptStatus,
    AttemptUpdate as AttemptUpdate,
    EnqueueRolloutRequest as EnqueueRolloutRequest,
    FilterLogic as FilterLogic,
    LightningStoreCapabilities as LightningStoreCapabilities,
    LightningStoreStatistics as LightningStoreStatistics,
    PaginatedResult as PaginatedResult,
    Rollout as Rollout,
    RolloutConfig as RolloutConfig,
    RolloutMode as RolloutMode,
    RolloutStatus as RolloutStatus,
    SortOrder as SortOrder,
    TaskInput as TaskInput,
    Unset as Unset,
    Worker as Worker,
    WorkerStatus as WorkerStatus,
)
