"""The output side of batch inference: the run id of an output folder, and the rows of ``completions.jsonl``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from rollout_core.config import InferBatchConfig
from rollout_core.errors import ConfigError, CorruptObject, NotFound
from rollout_core.ids import ContentId, new_run_id
from rollout_core.inference.prompt_shards import read_shard
from rollout_core.objects import ObjectStore
from rollout_core.records import ShardCompletions

COMPLETIONS_FILE = "completions.jsonl"
RUN_ID_FILE = "run-id"
_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")


def resolve_run_id(folder: Path, asked: str | None) -> str:
    """Run id of an output folder: the one asked for, else the folder's own, else a new one that is written there.

    Raises ConfigError as `earlier_run_id`.
    """
    run_id = earlier_run_id(folder, asked)
    if run_id is None:
        run_id = new_run_id()
        write_atomically(folder / RUN_ID_FILE, [run_id.encode() + b"\n"])
    return run_id


def earlier_run_id(folder: Path, asked: str | None) -> str | None:
    """The run to go on with: the one asked for, else the output folder's own; None where a new one will begin.

    Raises ConfigError for an id that is no ULID, or a ``run-id`` file that holds none.
    """
    if asked is not None:
        return _checked(asked, "run id")
    file = folder / RUN_ID_FILE
    return _checked(file.read_text(encoding="utf-8").strip(), str(file)) if file.exists() else None


def _checked(run_id: str, where: str) -> str:
    if not _ULID.fullmatch(run_id):
        raise ConfigError(f"{where}: {run_id!r} is no run id; expected a ULID (26 characters)")
    return run_id


def shard_lines(
    objects: ObjectStore, shard: ShardCompletions, config: InferBatchConfig, ended: Sequence[float]
) -> Iterator[bytes]:
    """Lines of the output file for one shard, in input order; ``ended`` are seconds since the epoch, a sample each."""
    rows = read_shard(objects, shard.rows)
    completions = map(orjson.loads, objects.get_bytes(shard.completions).splitlines())
    samples = (shard_row.row for shard_row in rows for _ in range(config.sampling.n))
    sampling = config.sampling.model_dump(mode="json")
    for number, (row, completion, moment) in enumerate(zip(samples, completions, ended, strict=True)):
        line: dict[str, Any] = {
            "id": row.id or completion["id"],
            "prompt": row.prompt if row.prompt is not None else [item.model_dump() for item in row.messages or ()],
            "completion": completion["text"],
            "sampling_params": sampling,
            "model_uri": config.model.uri,
            "finish_reason": completion["finish_reason"],
            "model_content_id": shard.model,
            "completion_blob_id": shard.completions,
            "generated_at": _timestamp(moment),
        }
        if config.sampling.n > 1:
            line["index"] = number % config.sampling.n
        if "error" in completion:
            line |= {"completion": None, "error": completion["error"]}
        for key, value in row.extras.items():
            line.setdefault(key, value)
        yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _timestamp(seconds: float) -> str | None:
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace ``path`` by ``chunks``: on disk, and never half visible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_known(objects: ObjectStore, name: ContentId, path: Path, chunks: Iterable[bytes]) -> None:
    """`write_atomically`, and keep the digest of the file under ``name``."""
    hasher = blake3()

    def hashed() -> Iterator[bytes]:
        for chunk in chunks:
            hasher.update(chunk)
            yield chunk

    write_atomically(path, hashed())
    objects.set_ref(f"output-files/{name}", objects.put_bytes(hasher.hexdigest().encode()))


def is_unchanged(objects: ObjectStore, name: ContentId, path: Path) -> bool:
    """Whether the file is still what `write_known` wrote under ``name``."""
    kept = objects.get_ref(f"output-files/{name}")
    if kept is None or not path.is_file():
        return False
    try:
        digest = objects.get_bytes(kept).decode()
    except (NotFound, CorruptObject):
        return False
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() == digest
