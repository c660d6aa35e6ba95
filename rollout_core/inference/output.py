"""The rows of batch inference's output, as JSON lines or Parquet, in input order and in constant memory."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from rollout_core.base.ids import ContentId, content_id
from rollout_core.base.stopping import run_async
from rollout_core.config import InferBatchConfig, OutputDir, identity
from rollout_core.data.samples import decode_completions_blob
from rollout_core.inference.folders import OutputFolder
from rollout_core.inference.ledger import CHUNK
from rollout_core.inference.shards import finished_ref, read_shard
from rollout_core.models.messages import openai_messages
from rollout_core.objects import ObjectStore
from rollout_core.objects.records import Record, ShardCompletions
from rollout_core.store.codec import ordered_json
from rollout_core.store.reachable import OpenStore

if TYPE_CHECKING:
    import pyarrow


OUTPUT_REFS = "output-files"
LINES_TOGETHER = 1024
RESERVED = frozenset({"error", "index", "token_ids", "logprobs", "top_logprobs"})
"""Keys that a row of the output may have of its own; those of the input with these names are left out."""
ROWS_OF_A_GROUP = 8192


@dataclass(frozen=True)
class OutputRow:
    """A completion with its prompt."""

    fields: dict[str, Any]
    """By the names of the output, in its order; ``sampling_params`` is JSON already, as it is the same for all."""
    index: int
    """Number of the completion among those of its prompt."""
    extras: dict[str, Any]
    """Further keys of the input row."""


class OutputFile(Record):
    """What was written where."""

    path: str
    num_rows: int
    num_failed: int
    run_id: str


def write_shards(
    objects: ObjectStore,
    folder: OutputFolder,
    config: InferBatchConfig,
    shards: Sequence[ShardCompletions],
    open_store: OpenStore,
    run_id: str,
) -> OutputFile:
    """Write the completions of all shards in input order, unless they are there. The store is opened for the times of
    samples that are noted nowhere else."""
    name = file_name(config.output)

    def chunks() -> Iterator[bytes]:
        parts = ((shard, _ended(objects, shard, open_store)) for shard in shards)
        rows = (row for shard, ended in parts for row in shard_rows(objects, shard, config, ended))
        return output_chunks(config, rows)

    write_known(objects, folder, name, output_id(config, shards), chunks)
    count, failed = (sum(getattr(shard, name) for shard in shards) for name in ("num_samples", "num_failed"))
    return OutputFile(path=folder.where(name), num_rows=count, num_failed=failed, run_id=run_id)


def _ended(objects: ObjectStore, shard: ShardCompletions, open_store: OpenStore) -> list[float]:
    """When each of a shard's samples was finished: from the note next to it, or else from the store."""
    noted = objects.cached_bytes(finished_ref(shard.completions))
    if noted is not None:
        return orjson.loads(noted)
    ids = [row.id for row in decode_completions_blob(objects.get_bytes(shard.completions))]
    times = run_async(_end_times(ids, open_store))
    return [times.get(sample_id, 0.0) for sample_id in ids]


async def _end_times(sample_ids: Sequence[ContentId], open_store: OpenStore) -> dict[str, float]:
    times: dict[str, float] = {}
    async with open_store() as store:
        for start in range(0, len(sample_ids), CHUNK):
            for rollout in await store.query_rollouts(rollout_id_in=sample_ids[start : start + CHUNK]):
                if rollout.end_time is not None:
                    times[rollout.rollout_id] = rollout.end_time
    return times


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
            "prompt": row.prompt if row.prompt is not None else [item.document() for item in row.messages or ()],
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
    return content_id("output-file/4", [*form, [[shard.rows, shard.completions] for shard in shards]])


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


def parquet_schema(*, token_ids: bool, logprobs: bool, alternatives: bool = False) -> pyarrow.Schema:
    """The columns. They are the same for every input: what an input row has besides its own keys is one column of JSON.

    A prompt is in ``prompt`` if it is a text and in ``messages`` if it is a conversation; the other is null.
    """
    import pyarrow as pa

    function = pa.struct([pa.field("name", pa.string()), pa.field("arguments", pa.string())])  # as JSON
    call = pa.struct([pa.field("id", pa.string()), pa.field("type", pa.string()), pa.field("function", function)])
    texts = ("role", "content", "reasoning_content", "tool_call_id", "name")
    message = pa.struct([*(pa.field(name, pa.string()) for name in texts), pa.field("tool_calls", pa.list_(call))])
    alternative = pa.struct([pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())])
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("prompt", pa.string()),
            pa.field("messages", pa.list_(message)),
            pa.field("completion", pa.string()),
            pa.field("sampling_params", pa.string(), nullable=False),
            pa.field("model_uri", pa.string(), nullable=False),
            pa.field("finish_reason", pa.string(), nullable=False),
            pa.field("model_content_id", pa.string(), nullable=False),
            pa.field("completion_blob_id", pa.string(), nullable=False),
            pa.field("generated_at", pa.timestamp("ms", tz="UTC")),
            pa.field("error", pa.string()),
            pa.field("index", pa.int32(), nullable=False),
            *([pa.field("token_ids", pa.list_(pa.int32()))] if token_ids else []),
            *([pa.field("logprobs", pa.list_(pa.float32()))] if logprobs else []),
            *([pa.field("top_logprobs", pa.list_(pa.list_(alternative)))] if alternatives else []),
            pa.field("extras", pa.string(), nullable=False),
        ]
    )


def parquet_chunks(
    rows: Iterable[Mapping[str, Any]], *, token_ids: bool, logprobs: bool, alternatives: bool = False
) -> Iterator[bytes]:
    """The bytes of a Parquet file of these rows, in pieces; few rows are in memory at once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = parquet_schema(token_ids=token_ids, logprobs=logprobs, alternatives=alternatives)
    sink = _Sink()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(_columns(row))
            if len(group) == ROWS_OF_A_GROUP:
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                group.clear()
                yield sink.take()
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    yield sink.take()


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    is_text, moment = isinstance(row["prompt"], str), row["generated_at"]
    alternatives = [
        [{"token_id": token, "logprob": logprob} for token, logprob in top] for top in row.get("top_logprobs", ())
    ]
    return {
        **row,
        "top_logprobs": alternatives,
        "prompt": row["prompt"] if is_text else None,
        "messages": None if is_text else openai_messages(row["prompt"]),
        "generated_at": None if moment is None else _moment(moment),
        "extras": ordered_json(row["extras"]).decode(),
    }


_moment = functools.lru_cache(maxsize=1024)(datetime.fromisoformat)


class _Sink(io.RawIOBase):
    """Takes what is written until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._taken = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(self._pieces[-1])

    def tell(self) -> int:
        return self._taken + sum(map(len, self._pieces))

    def take(self) -> bytes:
        """What was written since."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._taken += len(taken)
        return taken
