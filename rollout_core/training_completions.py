"""Completions to train on: all of a set, or without the samples that failed for good and what is compared with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from rollout_core.config import SamplingParams
from rollout_core.errors import Fatal, Recoverable
from rollout_core.ids import ContentId
from rollout_core.inference.batch import BatchOptions, Engine, Progress, Work, complete_batch, complete_samples
from rollout_core.inference.samples import Sample, decode_samples, encode_samples
from rollout_core.objects import ObjectStore
from rollout_core.records import Completions
from rollout_core.store import LightningStore

Failed = Literal["stop", "leave_out"]


@dataclass(frozen=True)
class FailedSamples:
    """What becomes of a set in which samples failed for good."""

    policy: Failed = "stop"
    group_size: int = 1
    """So many samples that follow each other are left out together."""


async def complete_for_training(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    samples_id: ContentId,
    params: SamplingParams,
    *,
    failed: FailedSamples,
    worker_id: str,
    options: BatchOptions | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Completions, Work]:
    """`complete_batch`, but failed samples are left out, with their group, where ``failed`` says so.

    What is left is filed as a set of its own. Raises Recoverable where another try may help, Fatal where nothing is
    left.
    """
    if failed.policy == "stop":
        return await complete_batch(
            store, objects, engine, samples_id, params, worker_id=worker_id, options=options, on_progress=on_progress
        )
    samples = decode_samples(objects.get_bytes(samples_id))
    done = await complete_samples(
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
    rows = list(map(orjson.loads, done.lines))
    errors = [row["error"] for row in rows if row.get("error")]
    if done.passing_failures:
        raise Recoverable(f"{len(errors)} of {len(rows)} samples failed, and may not another time; first: {errors[0]}")
    kept = whole_groups([not row.get("error") for row in rows], failed.group_size)
    if not kept:
        raise Fatal(f"{len(errors)} of {len(rows)} samples failed, which leaves no whole group; first: {errors[0]}")
    chosen = [samples[place] for place in kept]
    rows = [rows[place] for place in kept]
    record = Completions(
        completions=await asyncio.to_thread(objects.put_bytes, b"".join(done.lines[place] for place in kept)),
        samples=_filed(objects, samples_id, samples, chosen),
        model=engine.model_id,
        num_samples=len(rows),
        num_tokens=sum(len(row["token_ids"]) for row in rows),
        finish_reasons=dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
        num_left_out=len(samples) - len(rows),
    )
    return record, done.work


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
