"""Records that say themselves under which ref they belong: results of stages, snapshots, lineage."""

from __future__ import annotations

import json
from typing import Any

from rollout_core.base.ids import is_content_id

RESULT_REFS = "results"
SNAPSHOT_REFS = "snapshots"
LINEAGE_REFS = "lineage"
SELF_NAMED_REFS = (RESULT_REFS, SNAPSHOT_REFS, LINEAGE_REFS)
RECORD_BYTES = 2**20
"""Records are rarely larger."""


def own_refs(document: Any) -> set[str]:
    """Names of the refs under which a stored document says it belongs; none where it is no such record."""
    match document:
        case {"metadata": {"storage_key": str(key)}, "result": _}:
            return {f"{RESULT_REFS}/{key}"}
        case {"id": str(snapshot), "run_id": str(run), "files": files, "algorithm": _} if is_content_id(files):
            return {f"{SNAPSHOT_REFS}/{snapshot}/{run}"}
        case {"stage": str(), "key": str(), "outputs": [*outputs]}:
            return {f"{LINEAGE_REFS}/{output}" for output in outputs if is_content_id(output)}
    return set()


def parsed(data: bytes) -> Any:
    """The JSON of a blob; None where it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None
