"""Completions to train on: all of a set, or without the samples that failed for good and what is compared with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from rollout_core.base.errors import Fatal, Recoverable
from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Sample, decode_samples, encode_samples
from rollout_core.inference.batch import BatchOptions, Engine, Progress, Work, complete_samples
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Completions
from rollout_core.store import LightningStore

Failed = Literal["stop", "leave_out"]


@dataclass(frozen=True)
class FailedSamples:
    """What becomes of a set in which samples failed for good."""

    policy: Failed = "stop"
    group_size: int = 1
    """So many samples that follow each other are left out together."""


async def complete_batch(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    samples_id: ContentId,
    params: SamplingParams,
    *,
    worker_id: str,
    failed: FailedSamples | None = None,
    options: BatchOptions | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Completions, Work]:
    """Generate what is missing of the samples in blob ``samples_id`` and file all completions, in order, as one blob.

    The samples are those of the engine's model. Raises Recoverable where samples failed and another try may help, Fatal
    where they failed for good, unless ``failed`` has them left out with their groups: what is left is then filed as a
    set of its own, and Fatal raised only where nothing is.
    """
    failed = failed or FailedSamples()
    samples = decode_samples(objects.get_bytes(samples_id))
    completed = await complete_samples(
        store,
        objects,
        engine,
        samples,
        params,
        source=samples_id,
        worker_id=worker_id,
        options=options,
        on_progress=on_progress,
    )
    rows = list(map(orjson.loads, completed.lines))
    errors = [row for row in rows if row.get("error")]
    kept = whole_groups([not row.get("error") for row in rows], failed.group_size)
    if errors and (completed.passing_failures or failed.policy == "stop" or not kept):
        consequence = ", which leaves no whole group" if failed.policy == "leave_out" and not kept else ""
        problem = f"{len(errors)} of {len(rows)} samples failed{consequence}; first {errors[0]['id'][:12]}: "
        raise (Recoverable if completed.passing_failures else Fatal)(problem + errors[0]["error"])
    chosen = [rows[place] for place in kept]
    record = Completions(
        completions=await asyncio.to_thread(objects.put_bytes, b"".join(completed.lines[place] for place in kept)),
        samples=_filed(objects, samples_id, samples, [samples[place] for place in kept]),
        model=engine.model_id,
        num_samples=len(chosen),
        num_tokens=sum(len(row["token_ids"]) for row in chosen),
        finish_reasons=dict(sorted(Counter(row["finish_reason"] for row in chosen).items())),
        num_left_out=len(rows) - len(chosen),
    )
    return record, completed.work


def whole_groups(succeeded: Sequence[bool], group_size: int) -> list[int]:
    """Places of the samples in groups of which all succeeded."""
    return [
        place
        for start in range(0, len(succeeded), group_size)
        if all(succeeded[start : start + group_size])
        for place in range(start, min(start + group_size, len(succeeded)))
    ]


def _filed(objects: ObjectStore, whole: ContentId, samples: Sequence[Sample], chosen: Sequence[Sample]) -> ContentId:
    return whole if len(chosen) == len(samples) else objects.put_bytes(encode_samples(chosen))
