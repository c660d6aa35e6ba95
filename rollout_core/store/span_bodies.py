"""Large bodies of spans (attributes, events and so on) in the object store instead of the database.

The blob is stored, and named by a ref so that garbage collection spares it, before the row that points to it is
committed. A crash in between leaves a blob that nobody needs, never a row without its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rollout_core.base.errors import ConfigError
from rollout_core.base.ids import ContentId
from rollout_core.objects.store import ObjectStore
from rollout_core.store.sql.dialect import BODY

Model = TypeVar("Model")
SpanModel = Callable[[str, Sequence[Any]], Model]
"""Makes something of a rollout's id and a row of ``spans``, in the order of ``dialect.SPAN``."""

REFS = "spans"
"""Prefix of the refs that keep bodies alive."""


class StoredSpan(NamedTuple):
    """A row of ``spans``, in the order of ``dialect.SPAN``, with the id of its rollout."""

    rollout_id: str
    columns: tuple[Any, ...]


class SpanBodies:
    """Where large bodies go, and come from."""

    def __init__(self, objects: ObjectStore | None, offload_bytes: int) -> None:
        self._objects = objects
        self._offload_bytes = offload_bytes

    async def offload(self, spans: Sequence[StoredSpan]) -> Sequence[StoredSpan]:
        """The same rows, those with a large body pointing to the object store, where it is by now."""
        objects, limit = self._objects, self._offload_bytes
        if objects is None or not any(len(span.columns[BODY]) > limit for span in spans):
            return spans

        def put(span: StoredSpan) -> StoredSpan:
            body = span.columns[BODY]
            if len(body) <= limit:
                return span
            body_id = objects.put_bytes(body.encode())
            objects.set_ref(f"{REFS}/{body_id}", body_id)
            return span._replace(columns=(*span.columns[:BODY], "", body_id))

        return await asyncio.to_thread(objects.in_parallel, put, spans)

    async def fetch(self, found: Sequence[Model | StoredSpan], model: SpanModel[Model]) -> list[Model]:
        """What ``if_here`` left, with the bodies that were in the object store."""
        away = [span.columns[-1] for span in found if isinstance(span, StoredSpan)]
        if not away:
            return list(found)  # pyright: ignore[reportReturnType] - none is a row
        objects = self._objects
        if objects is None:
            raise ConfigError(
                f"{len(away)} of these spans have their bodies in an object store; open this store with objects="
            )
        ids = list(dict.fromkeys(map(ContentId, away)))
        bodies = dict(zip(ids, await asyncio.to_thread(objects.in_parallel, objects.get_bytes, ids), strict=True))

        def complete(span: Model | StoredSpan) -> Model:
            if not isinstance(span, StoredSpan):
                return span
            body = bodies[span.columns[-1]].decode()
            return model(span.rollout_id, (*span.columns[:BODY], body, None))

        return [complete(span) for span in found]


def if_here(model: SpanModel[Model]) -> SpanModel[Model | StoredSpan]:
    """``model`` for rows that hold their body; the others stay rows."""
    return lambda rollout_id, columns: (
        model(rollout_id, columns) if columns[-1] is None else StoredSpan(rollout_id, tuple(columns))
    )
