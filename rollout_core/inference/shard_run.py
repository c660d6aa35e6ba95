"""One shard of batch inference, from its rows to the record of its completions."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollout_core.base.ids import ContentId
from rollout_core.config import SamplingParams
from rollout_core.data.samples import Sample
from rollout_core.inference.batch import (
    BatchOptions,
    Completed,
    Engine,
    Progress,
    Work,
    assist as assist_samples,
    complete_samples,
)
from rollout_core.inference.events import EventLog
from rollout_core.inference.garbage import seldom_collected
from rollout_core.inference.prompt_shards import read_shard, shard_samples
from rollout_core.models.tokenizers import load_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.gc import FINISHED_REFS
from rollout_core.objects.records import ShardCompletions
from rollout_core.store import LightningStore

LENGTH_BUCKETS = 64


@dataclass(frozen=True)
class ShardWork:
    """What is asked of a shard."""

    rows: ContentId
    params: SamplingParams
    samples_per_prompt: int
    tokenizer_folder: Path
    """Of the model; the tokenizer in it decides the token ids."""


async def complete_shard(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    work: ShardWork,
    *,
    worker_id: str,
    options: BatchOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    events: EventLog | None = None,
) -> tuple[ShardCompletions, Work]:
    """Bring every sample of a shard to its outcome and file them all, in order, as one blob."""
    with seldom_collected():
        samples, problems = await asyncio.to_thread(_samples, objects, engine, work)
        if events is not None:
            store = events.watching(store, objects, samples)
        completed = await complete_samples(
            store,
            objects,
            engine,
            samples,
            work.params,
            source=work.rows,
            problems=problems,
            worker_id=worker_id,
            options=options,
            on_progress=on_progress,
        )
        record = await asyncio.to_thread(_file, objects, engine, work, samples, completed)
    return record, completed.work


async def assist_shard(
    store: LightningStore,
    objects: ObjectStore,
    engine: Engine,
    work: ShardWork,
    *,
    worker_id: str,
    options: BatchOptions,
    events: EventLog | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Work:
    """Take work off the hands of the shard's worker; see `batch.assist`."""
    samples, problems = await asyncio.to_thread(_samples, objects, engine, work)
    if events is not None:
        store = events.watching(store, objects, samples)
    sound = [sample for sample in samples if sample.id not in problems]
    return await assist_samples(
        store, objects, engine, sound, work.params, worker_id=worker_id, options=options, on_progress=on_progress
    )


def finished_ref(completions: ContentId) -> str:
    """Ref of the times, as JSON list of seconds since the epoch, at which the rows of a completions blob were made."""
    return f"{FINISHED_REFS}{completions}"


def _samples(objects: ObjectStore, engine: Engine, work: ShardWork) -> tuple[list[Sample], dict[ContentId, str]]:
    with _tokenizer(work.tokenizer_folder) as tokenizer:
        return shard_samples(
            tokenizer,
            read_shard(objects, work.rows),
            model=engine.model_id,
            params=work.params,
            samples_per_prompt=work.samples_per_prompt,
        )


_idle_tokenizers: dict[Path, list[Any]] = {}


@contextmanager
def _tokenizer(folder: Path) -> Iterator[Any]:
    """The tokenizer of a folder, loaded once; for one thread at a time, as tokenizers are not thread-safe."""
    idle = _idle_tokenizers.setdefault(folder, [])
    try:
        tokenizer = idle.pop()
    except IndexError:
        tokenizer = load_tokenizer(folder)
    yield tokenizer
    idle.append(tokenizer)


def _file(
    objects: ObjectStore, engine: Engine, work: ShardWork, samples: Sequence[Sample], completed: Completed
) -> ShardCompletions:
    reasons: Counter[str] = Counter()
    width = math.ceil(work.params.max_tokens / LENGTH_BUCKETS)
    lengths = [0] * math.ceil(work.params.max_tokens / width)
    tokens, first_failure = 0, None
    for row in map(orjson.loads, completed.lines):
        reasons[row["finish_reason"]] += 1
        first_failure = first_failure or row.get("error")
        count = len(row["token_ids"])
        tokens += count
        if count:
            lengths[min((count - 1) // width, len(lengths) - 1)] += 1
    completions = objects.put_bytes(b"".join(completed.lines))
    # Beside the record, which is the same whenever it is made.
    objects.set_ref(finished_ref(completions), objects.put_bytes(orjson.dumps(completed.ended)))
    return ShardCompletions(
        completions=completions,
        rows=work.rows,
        model=engine.model_id,
        num_samples=len(samples),
        num_failed=reasons["error"],
        num_passing=completed.passing_failures,
        num_prompt_tokens=sum(len(sample.prompt_token_ids) for sample in samples),
        num_tokens=tokens,
        finish_reasons=dict(sorted((+reasons).items())),
        lengths=tuple(lengths),
        first_failure=first_failure,
    )
