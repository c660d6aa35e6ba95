"""An event for every sample that finishes, seen from the store: told once the sample's outcome is acknowledged."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollout_core.base.errors import Conflict, CorruptObject, NotFound
from rollout_core.base.ids import ContentId
from rollout_core.data.samples import Sample
from rollout_core.inference.ledger import BLOB_ATTRIBUTE, ROW_ATTRIBUTE
from rollout_core.objects import ObjectStore
from rollout_core.store import Attempt, AttemptUpdate, LightningStore
from rollout_core.store.forwarding import ForwardingLightningStore


@dataclass(frozen=True)
class SampleEnd:
    """How a sample ended."""

    sample: ContentId
    finish_reason: str
    num_tokens: int
    error: str | None


OnSamples = Callable[[Sequence[SampleEnd]], None]


class WatchedStore(ForwardingLightningStore):
    """A store whose ledger of samples is watched: ``on_samples`` is told of those that ended, a commit at a time.

    Only an attempt that the store let succeed or fail counts, so a sample is told once. What it became is read back
    from the blob that its span names.
    """

    def __init__(self, store: LightningStore, objects: ObjectStore, on_samples: OnSamples) -> None:
        self._store = store
        self._objects = objects
        self._on_samples = on_samples

    def backend(self) -> LightningStore:
        return self._store

    async def close(self) -> None:
        await self._store.close()

    async def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = await super().forward(name, *args, **kwargs)
        if name == "end_attempts":
            await self._tell(args[0], result)
        return result

    async def _tell(
        self, ends: Sequence[tuple[Mapping[str, Any], AttemptUpdate]], outcomes: Sequence[Attempt | Conflict]
    ) -> None:
        ended: dict[ContentId, list[int]] = {}
        for (span, _), outcome in zip(ends, outcomes, strict=True):
            attributes = span["attributes"]
            if BLOB_ATTRIBUTE in attributes and not isinstance(outcome, Conflict):
                ended.setdefault(ContentId(attributes[BLOB_ATTRIBUTE]), []).append(attributes[ROW_ATTRIBUTE])
        for blob, rows in ended.items():
            self._on_samples(await asyncio.to_thread(self._read, blob, rows))

    def _read(self, blob: ContentId, rows: Sequence[int]) -> list[SampleEnd]:
        try:
            lines = self._objects.get_bytes(blob).splitlines()
        except (NotFound, CorruptObject):
            return []  # whoever needs the completions says so
        return [_sample_end(orjson.loads(lines[row])) for row in rows]


def _sample_end(row: Mapping[str, Any]) -> SampleEnd:
    return SampleEnd(ContentId(row["id"]), row["finish_reason"], len(row["token_ids"]), row.get("error"))


@dataclass(frozen=True)
class EventLog:
    """Writes a line of JSON to stderr for each sample that ends."""

    run_id: str
    shard: str
    """Its number among the run's shards, such as ``3/17``."""

    def watching(self, store: LightningStore, objects: ObjectStore, samples: Sequence[Sample]) -> LightningStore:
        """``store``, through which the samples of the shard are worked on from now on."""
        row_ids = {sample.id: sample.row_id for sample in samples}
        return WatchedStore(store, objects, lambda ends: self._write(ends, row_ids))

    def _write(self, ends: Sequence[SampleEnd], row_ids: Mapping[ContentId, str | None]) -> None:
        lines = [orjson.dumps(self._event(end, row_ids.get(end.sample))) for end in ends]
        # One write, so that lines of several shards do not mix.
        sys.stderr.write(b"\n".join([*lines, b""]).decode())
        sys.stderr.flush()

    def _event(self, end: SampleEnd, row_id: str | None) -> dict[str, Any]:
        event = {
            "topic": "sample_completed" if end.error is None else "sample_failed",
            "run_id": self.run_id,
            "sample": end.sample,
            "id": row_id,
            "shard": self.shard,
            "finish_reason": end.finish_reason,
            "tokens": end.num_tokens,
        }
        return event if end.error is None else {**event, "error": end.error}
