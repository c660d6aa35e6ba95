"""The output of batch inference as Parquet: typed columns, a row group at a time."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rollout_core.base.ids import ordered_json

if TYPE_CHECKING:
    import pyarrow

ROWS_OF_A_GROUP = 8192


def parquet_schema(*, token_ids: bool, logprobs: bool, alternatives: bool = False) -> pyarrow.Schema:
    """The columns. They are the same for every input: what an input row has beside its own keys is one column of JSON.

    A prompt is in ``prompt`` if it is a text and in ``messages`` if it is a conversation; the other is null.
    """
    import pyarrow as pa

    message = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
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
        "messages": None if is_text else row["prompt"],
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
