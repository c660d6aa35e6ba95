"""The rows of batch inference's output, as JSON lines or Parquet, in input order and in constant memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from rollout_core.base.ids import ContentId, content_id, ordered_json
from rollout_core.config import InferBatchConfig, OutputDir, identity
from rollout_core.inference.folders import OutputFolder
from rollout_core.inference.parquet_output import parquet_chunks
from rollout_core.inference.prompt_shards import read_shard
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import ShardCompletions

OUTPUT_REFS = "output-files"
LINES_TOGETHER = 1024
RESERVED = frozenset({"error", "index", "token_ids", "logprobs", "top_logprobs"})
"""Keys that a row of the output may have of its own; those of the input with these names are left out."""


@dataclass(frozen=True)
class OutputRow:
    """A completion with what was asked."""

    fields: dict[str, Any]
    """By the names of the output, in its order; ``sampling_params`` is JSON already, as it is the same for all."""
    index: int
    """Number of the completion among those of its prompt."""
    extras: dict[str, Any]
    """Further keys of the input row."""


def file_name(output: OutputDir) -> str:
    """Name of the file in the output folder."""
    return f"completions.{output.format}"


def output_chunks(config: InferBatchConfig, rows: Iterable[OutputRow]) -> Iterator[bytes]:
    """The bytes of the output file, in pieces."""
    if config.output.format == "parquet":
        return parquet_chunks(
            ({**row.fields, "index": row.index, "extras": row.extras} for row in rows),
            token_ids=config.output.token_ids,
            logprobs=config.output.logprobs,
            alternatives=_with_alternatives(config),
        )
    return _jsonl_chunks(rows, with_index=config.sampling.n > 1)


def _jsonl_chunks(rows: Iterable[OutputRow], *, with_index: bool) -> Iterator[bytes]:
    lines: list[bytes] = []
    for row in rows:
        document = {**row.fields, "sampling_params": orjson.Fragment(row.fields["sampling_params"])}
        if with_index:
            document["index"] = row.index
        if document["error"] is None:
            del document["error"]
        for key, value in row.extras.items():
            if key not in RESERVED:
                document.setdefault(key, value)
        try:
            lines.append(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
        except orjson.JSONEncodeError:  # an integer beyond 64 bits
            document["sampling_params"] = orjson.loads(row.fields["sampling_params"])
            lines.append(ordered_json(document) + b"\n")
        if len(lines) == LINES_TOGETHER:
            yield b"".join(lines)
            lines.clear()
    yield b"".join(lines)


def shard_rows(
    objects: ObjectStore, shard: ShardCompletions, config: InferBatchConfig, ended: Sequence[float]
) -> Iterator[OutputRow]:
    """Rows of the output for one shard, in input order; ``ended`` are seconds since the epoch, a sample each."""
    copies = config.sampling.n
    prompts = (shard_row.row for shard_row in read_shard(objects, shard.rows) for _ in range(copies))
    completions = map(orjson.loads, objects.get_bytes(shard.completions).splitlines())
    sampling = orjson.dumps(config.sampling.model_dump(mode="json")).decode()
    for number, (row, completion, moment) in enumerate(zip(prompts, completions, ended, strict=True)):
        error = completion.get("error")
        fields: dict[str, Any] = {
            "id": row.id or completion["id"],
            "prompt": row.prompt if row.prompt is not None else [item.model_dump() for item in row.messages or ()],
            "completion": completion["text"] if error is None else None,
            "sampling_params": sampling,
            "model_uri": config.model.uri,
            "finish_reason": completion["finish_reason"],
            "model_content_id": shard.model,
            "completion_blob_id": shard.completions,
            "generated_at": _timestamp(moment),
            "error": error,
        }
        if config.output.token_ids:
            fields["token_ids"] = completion["token_ids"]
        if config.output.logprobs:
            fields["logprobs"] = completion["logprobs"]
        if _with_alternatives(config):
            fields["top_logprobs"] = completion.get("top_logprobs", [])
        yield OutputRow(fields, number % copies, row.extras)


def _with_alternatives(config: InferBatchConfig) -> bool:
    return config.output.logprobs and config.sampling.logprobs > 0


@functools.lru_cache(maxsize=1024)  # samples that were committed together ended together
def _timestamp(seconds: float) -> str | None:
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def output_id(config: InferBatchConfig, shards: Sequence[ShardCompletions]) -> ContentId:
    """Stands for what is written: rows, completions and form."""
    output = config.output
    form = [output.format, output.token_ids, output.logprobs, config.model.uri, identity(config.sampling)]
    return content_id("output-file/3", [*form, [[shard.rows, shard.completions] for shard in shards]])


def write_known(
    objects: ObjectStore, folder: OutputFolder, name: str, content: ContentId, chunks: Callable[[], Iterable[bytes]]
) -> bool:
    """Replace a file by ``chunks``, for which ``content`` stands; False, and nothing done, where it is there unchanged.

    What was written last is noted in the object store under the file's address.
    """
    ref = f"{OUTPUT_REFS}/{content_id('output-address/1', folder.where(name))}"
    mark = folder.mark(name)
    is_there = mark is not None and objects.cached_bytes(ref) == orjson.dumps([content, mark])
    if not is_there:
        mark = folder.replace(name, chunks())
    # Also where it is there: garbage collection goes by when it was last set.
    objects.set_ref(ref, objects.put_bytes(orjson.dumps([content, mark])))
    return not is_there
