from .lineage import (
    Lineage as Lineage,
    lineage_of as lineage_of,
    trace_lineage as trace_lineage,
)
from .object_store import (
    ObjectStore as ObjectStore,
)
from .records import (
    BlobId as BlobId,
    Checkpoint as Checkpoint,
    Completions as Completions,
    Dataset as Dataset,
    EvalReport as EvalReport,
    Experience as Experience,
    Model as Model,
    PromptSet as PromptSet,
    Record as Record,
    Scores as Scores,
    SnapshotRecord as SnapshotRecord,
    TreeId as TreeId,
)
from .snapshots import (
    Snapshot as Snapshot,
    SnapshotStore as SnapshotStore,
)
from .trees import (
    TreeFile as TreeFile,
    TreeManifest as TreeManifest,
)
