"""Shards of batch inference: a prompt set cut into files of rows, each brought to the record of its completions.

A set is read as a stream, so it may be larger than memory. What has been read once is known by the content of its
files: a set that is unchanged is not read again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from blake3 import blake3
from pydantic import ValidationError

from rollout_core.base.errors import CorruptObject, NotFound
from rollout_core.base.ids import ContentId, SampleIds, canonical_json, content_id
from rollout_core.base.trusted import trusted
from rollout_core.config import SamplingParams
from rollout_core.data.datasets import PromptRow
from rollout_core.data.samples import Sample, ends_of, identify, identities_of
from rollout_core.data.text import try_prompts, with_own_bos
from rollout_core.inference.batch import (
    BatchOptions,
    Completed,
    Engine,
    Progress,
    Work,
    assist as assist_samples,
    complete_samples,
)
from rollout_core.inference.batch_runs import EventLog
from rollout_core.models.facts import known_ids
from rollout_core.models.pretrained import borrowed_tokenizer
from rollout_core.objects import ObjectStore
from rollout_core.objects.lineage import record_derivation
from rollout_core.objects.origins import Source, record_import
from rollout_core.objects.records import PromptShards, ShardCompletions
from rollout_core.objects.retention.garbage import FINISHED_REFS
from rollout_core.store import LightningStore

log = logging.getLogger(__name__)

SHARD_FORMAT = 3
"""Raised when the bytes of shards change for the same rows, or what is noted of them."""
_SLOWLY = b" "
"""Before a line that orjson could not write."""
_DUMP = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
LENGTH_BUCKETS = 64
BLOCKS_PER_COLLECTION = 8
"""A collection walks through all that other threads' blocks hold, too: after each block it took a tenth of the time."""


class ShardRow(NamedTuple):
    """One prompt of a shard."""

    row: PromptRow
    occurrence: int
    """How many rows of the whole set before this one have the same prompt."""


def import_shards(
    objects: ObjectStore, rows: Iterable[PromptRow], *, shard_size: int, source: ContentId | None = None
) -> PromptShards:
    """Cut ``rows`` into shards of ``shard_size`` and file them, and nothing of a shard that is not complete.

    ``source`` stands for the content of what is read: where it was imported before, nothing is read.
    """
    known = None if source is None else _ref(source, shard_size)
    if known is not None and (found := _imported(objects, known)) is not None:
        objects.set_ref(known, objects.put_bytes(found.model_dump_json().encode()))  # for garbage collection
        return found
    shards: list[ContentId] = []
    sizes: list[int] = []
    writer = _Lines()
    for lines in _batched(map(writer.line, rows), shard_size):
        shards.append(objects.put_bytes(b"".join(lines)))
        sizes.append(len(lines))
    index = objects.put_bytes(orjson.dumps({"shards": shards, "sizes": sizes}))
    record = PromptShards(index=index, num_rows=sum(sizes), shard_size=shard_size, num_chats=writer.num_chats)
    if known is not None:
        objects.set_ref(known, objects.put_bytes(record.model_dump_json().encode()))
    return record


def record_shards(objects: ObjectStore, prompts: PromptShards, source: Source | None) -> None:
    """Note where a set came from, and of its shards that they are of this set."""
    if source is not None:
        record_import(objects, prompts.index, source)
    shards = tuple(dict.fromkeys(shard for shard, _ in shards_of(objects, prompts)))
    record_derivation(objects, "cut_shards", {"prompts": prompts.index}, shards)


def imported_before(objects: ObjectStore, source: ContentId, shard_size: int) -> PromptShards | None:
    """What `import_shards` made of this source, if it did and all of it is still there."""
    return _imported(objects, _ref(source, shard_size))


def forget_import(objects: ObjectStore, source: ContentId, shard_size: int) -> None:
    """What was filed for this source is not its content."""
    objects.delete_ref(_ref(source, shard_size))


def shards_of(objects: ObjectStore, prompts: PromptShards) -> list[tuple[ContentId, int]]:
    """Shards of a set in order, with their numbers of rows."""
    index = orjson.loads(objects.get_bytes(prompts.index))
    return [(ContentId(shard), size) for shard, size in zip(index["shards"], index["sizes"], strict=True)]


def read_shard(objects: ObjectStore, shard: ContentId) -> list[ShardRow]:
    """Rows of one shard."""
    return [shard_row(line) for line in objects.get_bytes(shard).splitlines()]


def shard_row(line: bytes) -> ShardRow:
    """A line of a shard."""
    return _shard_row(_decoded(line))


def shard_samples(
    tokenizer: Any,
    rows: Sequence[ShardRow],
    identities: SampleIds,
    *,
    samples_per_prompt: int = 1,
    ends: Sequence[int] = (),
) -> tuple[list[Sample], dict[ContentId, str]]:
    """The samples of a shard's rows, tokenised and identified; and of those that cannot be tokenised the reason.

    Ids do not depend on how a set was cut.
    """
    prompts = [shard_row.row for shard_row in rows]
    token_ids, problems = try_prompts(tokenizer, prompts)
    occurrences = [shard_row.occurrence for shard_row in rows]
    own_bos = with_own_bos(tokenizer, prompts)
    samples = identify(
        prompts, token_ids, occurrences, identities, samples_per_prompt=samples_per_prompt, own_bos=own_bos, ends=ends
    )
    return samples, {
        samples[place * samples_per_prompt + copy].id: problem
        for place, problem in problems.items()
        for copy in range(samples_per_prompt)
    }


def _ref(source: ContentId, shard_size: int) -> str:
    return f"prompt-shards/{content_id('prompt-shards/1', [SHARD_FORMAT, source, shard_size])}"


def _imported(objects: ObjectStore, ref: str) -> PromptShards | None:
    kept = objects.cached_bytes(ref)
    if kept is None:
        return None
    try:
        record = PromptShards.model_validate_json(kept)
        shards = shards_of(objects, record)
    except (NotFound, CorruptObject, ValidationError) as error:
        log.warning("the input is read again: what was kept of it cannot be read (%s)", error)
        return None
    return record if all(objects.exists(shard) for shard, _ in shards) else None


class _Lines:
    """Rows as lines of a shard, with how often their prompt came before."""

    def __init__(self) -> None:
        self.num_chats = 0
        self._seen: Counter[bytes] = Counter()

    def line(self, row: PromptRow) -> bytes:
        document: dict[str, Any] = {}
        if row.prompt is not None:
            document["prompt"] = row.prompt
            key = row.prompt.encode()
        else:
            self.num_chats += 1
            document["messages"] = [message.document() for message in row.messages or ()]
            if row.tools is not None:
                document["tools"] = list(row.tools)
            key = orjson.dumps(document if row.tools else document["messages"], option=orjson.OPT_SORT_KEYS)
        if row.id is not None:
            document["id"] = row.id
        if row.extras:
            document["extras"] = row.extras
        digest = blake3(key).digest(8)
        if occurrence := self._seen[digest]:
            document["occurrence"] = occurrence
        self._seen[digest] = occurrence + 1
        try:
            return orjson.dumps(document, option=_DUMP)
        except orjson.JSONEncodeError:  # an integer beyond 64 bits, or deep nesting
            return _SLOWLY + canonical_json(document) + b"\n"


def _decoded(line: bytes) -> dict[str, Any]:
    # orjson makes floats of integers that it could not have written.
    return json.loads(line) if line.startswith(_SLOWLY) else orjson.loads(line)


def _shard_row(document: dict[str, Any]) -> ShardRow:
    occurrence = document.pop("occurrence", 0)
    if "messages" in document:
        return ShardRow(PromptRow.model_validate(document), occurrence)
    # Checked when it was filed.
    fields = {
        "extras": document.get("extras", {}),
        "prompt": document["prompt"],
        "messages": None,
        "tools": None,
        "id": document.get("id"),
    }
    return ShardRow(trusted(PromptRow, fields), occurrence)


def _batched(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class _CycleCollection:
    """Holds Python's search for reference cycles back while many samples are in memory: it would walk through every
    object of a shard again and again, which took half of the time of a scripted run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ended = 0
        self._was_enabled = True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Collect when every eighth such block ends, and seldom within them: those of several threads overlap.

        When none is left, Python collects when it sees fit, as before.
        """
        with self._lock:
            if not self._users:
                self._was_enabled = gc.isenabled()
                gc.disable()
                # What was there before, modules above all, is not looked at by the collections to come.
                gc.freeze()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._ended += 1
                is_due = self._ended % BLOCKS_PER_COLLECTION == 0
            if is_due:
                gc.collect()
            with self._lock:
                self._users -= 1
                if not self._users:
                    gc.unfreeze()
                    if self._was_enabled:
                        gc.enable()


_cycle_collection = _CycleCollection()


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
    with _cycle_collection.held_back():
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
    with borrowed_tokenizer(work.tokenizer_folder) as tokenizer:
        identities = identities_of(engine.model_id, work.params, known_ids(work.tokenizer_folder, tokenizer))
        rows = read_shard(objects, work.rows)
        ends = ends_of(work.tokenizer_folder, tokenizer, [row for row, _ in rows], work.params)
        return shard_samples(tokenizer, rows, identities, samples_per_prompt=work.samples_per_prompt, ends=ends)


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
    # Outside the record, which is the same whenever it is made.
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
